"""The promise of the exact kernel: bit-identical to the stock model's eager experts, wherever experts lie and while they move."""

from __future__ import annotations

import pytest
import torch

from engines import tiny
from hotsplit.bank.kernels import exact as kernel

pytestmark = pytest.mark.transformers

ARCHITECTURES = sorted(tiny.CONFIGS)
FLOAT32 = ("qwen3_moe", "gpt_oss", "granitemoe")


CASES = [(name, torch.bfloat16) for name in ARCHITECTURES] + [(name, torch.float32) for name in FLOAT32]


def all_equal(expected, got):
    return [torch.equal(*pair) for pair in zip(expected, got, strict=True)]


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("model_type", "dtype"), CASES)
def test_a_static_model_equals_stock_to_the_bit(checkpoint, expected, load, model_type, dtype, hot):
    folder = checkpoint(model_type, dtype=dtype)
    model = load(folder, hot=hot, dynamic=False)
    hot_rows = model.hotsplit.plan.hot_rows()
    assert [int(8 * hot)] * len(hot_rows) == hot_rows.tolist()
    assert [True] * 3 == all_equal(expected(folder), tiny.play(model))
    assert 0 == model.hotsplit.snapshot().swaps_done


@pytest.mark.parametrize(("model_type", "dtype"), CASES)
def test_a_dynamic_model_equals_stock_to_the_bit_while_experts_swap(
    checkpoint, expected, load, model_type, dtype, monkeypatch
):
    folder = checkpoint(model_type, dtype=dtype)
    model = load(folder, hot=0.5, dyn_steps=3, dyn_margin=1, dyn_half_life=1)
    router, moved = model.hotsplit.banks.router, []
    publish = router.publish

    def watched(layer_id, *, expert, row):
        moved.append(row != router.row_map[layer_id, expert])
        publish(layer_id, expert=expert, row=row)

    monkeypatch.setattr(router, "publish", watched)
    assert [True] * 3 == all_equal(expected(folder), tiny.play(model))
    assert [True] * 3 == all_equal(expected(folder), tiny.play(model))
    done = model.hotsplit.snapshot().swaps_done
    assert done > 0
    assert 2 * done <= len(moved)  # one comes in, one goes out; the map itself may be back where it began
    assert all(moved)


@pytest.mark.parametrize("hot", [0.0, 0.5])
def test_a_long_prompt_equals_stock_whichever_order_computes(checkpoint, load, monkeypatch, hot):
    folder = checkpoint("qwen3_moe")
    ids = torch.randint(3, 100, (2, 200), generator=torch.Generator().manual_seed(0))
    model, stock = load(folder, hot=hot, dynamic=False), tiny.stock(folder)
    with torch.no_grad():
        expected = stock(ids).logits
        for limit in (0, 1 << 30):  # outputs may pile up never, always
            monkeypatch.setattr(kernel, "_MAX_PENDING_BYTES", limit)
            assert torch.equal(expected, model(ids).logits)


# The same comparison must find what is wrong: each test below breaks one thing.


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v4"])
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_a_row_map_that_is_rolled_by_one_is_noticed(checkpoint, expected, load, model_type, hot):
    folder = checkpoint(model_type)
    model = load(folder, hot=hot, dynamic=False)
    row_map = model.hotsplit.banks.router.row_map
    row_map[0] = row_map[0].roll(1)
    assert [False] * 3 == all_equal(expected(folder), tiny.play(model))


def test_two_experts_exchanged_in_the_row_map_are_noticed(checkpoint, expected, load):
    folder = checkpoint("qwen3_moe")
    model = load(folder, hot=0.5, dynamic=False)
    tiny.play(model)
    counts = model.hotsplit.histogram().phases["prefill"].counts
    used = counts[1].argsort()[-2:].tolist()
    row_map = model.hotsplit.banks.router.row_map
    row_map[1, used] = row_map[1, used[::-1]]
    assert not torch.equal(expected(folder)[1], tiny.play(model)[1])


def test_adding_in_another_order_is_noticed(checkpoint, expected, load, monkeypatch):
    folder = checkpoint("qwen3_moe")
    model = load(folder, hot=0.5, dynamic=False)
    ascending = kernel._pairs_by_expert

    def backwards(*args, **kwargs):
        return dict(reversed(ascending(*args, **kwargs).items()))

    monkeypatch.setattr(kernel, "_pairs_by_expert", backwards)
    assert not torch.equal(expected(folder)[1], tiny.play(model)[1])


def test_one_wrong_byte_in_a_hot_row_is_noticed(checkpoint, expected, load):
    folder = checkpoint("qwen3_moe")
    model = load(folder, hot=1.0, dynamic=False)
    banks = model.hotsplit.banks
    for row in range(8):
        banks.rows.tensors(0, row)["down_proj"][3, 5] += 1
    assert not torch.equal(expected(folder)[0], tiny.play(model)[0])
