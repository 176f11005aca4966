"""What slots keep, in a whole model: told by the line, the snapshot and its file as the routers and the slots saw it."""

from __future__ import annotations

import logging

import pytest

from engines import tiny
from hotsplit.bank.staging import Staging
from hotsplit.metrics import UpdateLine, read_snapshot

pytestmark = pytest.mark.transformers

TOP_K, LAYERS = 3, 2
COUNTED = ("steps", "touched_hot_bytes", "touched_cold_bytes", "kept_bytes")
ALIVE = {"hot": 0.9, "dyn_steps": 4, "dyn_margin": 1, "dyn_half_life": 1}


@pytest.fixture(autouse=True)
def listen(caplog):
    caplog.set_level(logging.INFO, logger="hotsplit")


def lines(caplog):
    return [UpdateLine.parse(message) for message in caplog.messages if message.startswith("hotsplit update=")]


class Seen:
    """Every step as routers and slots saw it: bytes that were hot, kept, fetched; by hand, without the notes."""

    def __init__(self, model, *, mask, patch):
        self.steps, self._mask, self._took = [], mask, set()
        self._banks, self._row_bytes = model.hotsplit.banks, model.hotsplit.sizes.row_bytes
        take = Staging.take

        def watched(slots, key, *, turn):
            self._took.add(key)  # also where it gets none: then the row comes through the page cache
            return take(slots, key, turn=turn)

        patch.setattr(Staging, "take", watched)
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.register_forward_hook(self._router(layer))
            block.mlp.register_forward_hook(self._layer(layer))

    def _router(self, layer):
        def hook(_module, _args, output):
            if layer == 0:
                self.steps.append({"hot": 0, "kept": 0, "fetched": 0})
            self._took.clear()
            self._hot = self._banks.router.hot_mask()[layer].copy()
            chosen = output[0].float().softmax(-1).topk(TOP_K, dim=-1).indices
            self._chosen = chosen[self._mask] if len(chosen) == len(self._mask) else chosen

        return hook

    def _layer(self, layer):
        def hook(*_):
            for expert in set(self._chosen.flatten().tolist()):
                part = "hot" if self._hot[expert] else "fetched" if (layer, expert) in self._took else "kept"
                self.steps[-1][part] += int(self._row_bytes[layer])

        return hook

    def sum(self, part, steps=slice(None)):
        return sum(step[part] for step in self.steps[steps])


@pytest.fixture
def seen(monkeypatch):
    mask = tiny.prompts()["attention_mask"].bool().flatten()
    return lambda model: Seen(model, mask=mask, patch=monkeypatch)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("settings", [{}, {"dynamic": False}, {"kernel": "fast"}], ids=["dynamic", "static", "fast"])
def test_hot_kept_and_fetched_bytes_are_those_of_routers_and_slots(checkpoint, load, seen, caplog, tmp_path, settings):
    model = load(checkpoint("qwen3_moe"), **(ALIVE | settings))
    watched = seen(model)
    model.generate(**tiny.prompts(), **tiny.greedy(22))
    snapshot = model.hotsplit.snapshot()
    assert watched.sum("kept") > 0
    assert watched.sum("fetched") > 0
    assert watched.sum("hot") == snapshot.touched_hot_bytes
    assert watched.sum("kept") == snapshot.kept_bytes
    assert watched.sum("fetched") == snapshot.touched_cold_bytes - snapshot.kept_bytes
    told = lines(caplog)
    assert 5 == len(told)
    # The first step is the prompt's: windows are of decode.
    for line, steps in zip(told, [slice(1, 4), *(slice(n, n + 4) for n in (4, 8, 12, 16))], strict=True):
        parts = {part: watched.sum(part, steps) for part in ("hot", "kept", "fetched")}
        assert round(parts["kept"] / sum(parts.values()), 3) == line.kept
        assert round(parts["hot"] / sum(parts.values()), 3) == line.byte_hit
    assert round(snapshot.kept_ratio_window, 3) == told[-1].kept
    model.hotsplit.close()
    (file,) = (tmp_path / "state").glob("runs/*/rank0.json")
    assert snapshot.to_json() == read_snapshot(file).to_json()


def test_a_step_that_is_interrupted_is_not_counted_and_the_next_ones_are(checkpoint, load, full, seen):
    model = load(checkpoint("qwen3_moe"), **(ALIVE | {"dynamic": False}))
    batch = tiny.prompts()
    model.generate(**batch, **tiny.greedy(4))
    before = model.hotsplit.snapshot()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**batch, **tiny.greedy(4))
    hook.remove()
    broken = model.hotsplit.snapshot()
    assert [getattr(before, name) for name in COUNTED] == [getattr(broken, name) for name in COUNTED]
    watched = seen(model)
    model.generate(**batch, **tiny.greedy(4))
    after = model.hotsplit.snapshot()
    assert watched.sum("kept") == after.kept_bytes - before.kept_bytes
    assert watched.sum("fetched") == (after.touched_cold_bytes - before.touched_cold_bytes) - watched.sum("kept")


@pytest.mark.parametrize("hot", [0.5, 0.9])
def test_without_slots_there_is_none_and_no_word_of_it(checkpoint, load, caplog, hot):
    model = load(checkpoint("qwen3_moe"), **(ALIVE | {"hot": hot}))
    model.generate(**tiny.prompts(), **tiny.greedy(10))
    snapshot = model.hotsplit.snapshot()
    assert (0, None) == (snapshot.kept_bytes, snapshot.kept_ratio_window)
    assert snapshot.touched_cold_bytes > 0
    assert 2 == len(lines(caplog))
    assert not any("kept=" in message for message in caplog.messages)
