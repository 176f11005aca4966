"""A model that one thread runs and another looks at, or closes: that one waits for the step's end."""

from __future__ import annotations

import threading

import pytest
import torch

from hotsplit.bank.kernels import fast_library
from hotsplit.errors import BankError
from patience import LIMIT_S, until

pytestmark = pytest.mark.transformers

IDS = torch.arange(6)[None]
NATIVE = pytest.mark.skipif(fast_library.load() is None, reason="the native code is not built here")


def in_the_middle(model, act):
    """Have another thread act while a step runs, which waits for it for a moment only. Returns the thread."""
    other = threading.Thread(target=act)
    router = model.hotsplit.banks.router
    route = router.route

    def slowly(layer_id, *given, **named):
        if layer_id == 1 and not other.ident:
            other.start()
            other.join(0.2)
        return route(layer_id, *given, **named)

    router.route = slowly
    return other


@pytest.mark.parametrize("kernel", ["exact", pytest.param("fast", marks=NATIVE)])
@pytest.mark.parametrize("hot", [0.5, 0.9])
def test_who_closes_waits_for_the_step_and_the_next_one_is_told(checkpoint, load, kernel, hot):
    model = load(checkpoint("qwen3_moe"), kernel=kernel, hot=hot, dynamic=False)
    expected = model(IDS).logits
    other = in_the_middle(model, model.hotsplit.close)
    assert torch.equal(expected, model(IDS).logits), "the step had its rows to its end"
    other.join(LIMIT_S)
    assert not other.is_alive()
    with pytest.raises(BankError, match="the banks are closed"):
        model(IDS)


def test_who_looks_in_mid_step_sees_whole_steps_only(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=0.5, dynamic=False)
    engine, seen = model.hotsplit, []
    model(IDS)
    one = engine.snapshot()
    other = in_the_middle(model, lambda: seen.append(engine.snapshot()))
    model(IDS)
    until(lambda: seen)
    other.join(LIMIT_S)
    assert 2 == seen[0].steps == engine.snapshot().steps
    assert {phase: 2 * number for phase, number in one.tokens.items()} == seen[0].tokens
    assert {phase: 2 * number for phase, number in one.pairs.items()} == seen[0].pairs
