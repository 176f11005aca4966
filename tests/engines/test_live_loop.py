"""The live loop inside a real model: lines at their cadence, failures that harm nothing, what is learned and kept."""

from __future__ import annotations

import json
import logging
import os
import threading

import numpy as np
import pytest
import torch

import hotsplit
from engines import tiny
from engines.conftest import budget
from engines.copies import until_swapped, wait_for_copies
from hotsplit.bank import record
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.pointers import PointerRows
from hotsplit.data import tiny_moe_path
from hotsplit.errors import BankError
from hotsplit.metrics import UpdateLine, read_snapshot
from hotsplit.plan.learned import learned_path, load_learned
from patience import LIMIT_S

pytestmark = pytest.mark.transformers

E, TOP_K, LAYERS = 8, 3, 2
RESTLESS = {"dyn_steps": 3, "dyn_margin": 1, "dyn_half_life": 1}


@pytest.fixture(autouse=True)
def listen(caplog):
    caplog.set_level(logging.INFO, logger="hotsplit")


def lines(caplog):
    return [UpdateLine.parse(message) for message in caplog.messages if message.startswith("hotsplit update=")]


def generate(model, tokens):
    return model.generate(**tiny.prompts(), **tiny.greedy(tokens))


def equals_stock(expected, folder, model):
    return [torch.equal(*pair) for pair in zip(expected(folder), tiny.play(model), strict=True)]


def test_lines_come_every_so_many_steps_and_agree_with_the_snapshot(checkpoint, load, caplog):
    model = load(checkpoint("qwen3_moe"), **RESTLESS)
    generate(model, 20)
    found, snapshot = lines(caplog), model.hotsplit.snapshot()
    assert [(n, 3 * n) for n in range(1, 7)] == [(line.update, line.step) for line in found]
    # 18 real tokens of the prompts, then 3 sequences.
    assert [18 + 3 * (line.step - 1) for line in found] == [line.tokens for line in found]
    assert 20 == snapshot.steps
    assert found[-1] == UpdateLine.parse(str(found[-1]))
    assert round(snapshot.hit_ratio_window, 3) == found[-1].hit
    assert round(snapshot.byte_hit_ratio_window, 3) == found[-1].byte_hit
    assert round(snapshot.oracle_ratio_window, 3) == found[-1].oracle
    assert sum(line.swaps for line in found) <= snapshot.swaps_done


def test_a_static_model_logs_its_lines_too_and_never_swaps(checkpoint, load, caplog):
    model = load(checkpoint("qwen3_moe"), dynamic=False, dyn_steps=5)
    generate(model, 20)
    assert [5, 10, 15] == [line.step for line in lines(caplog)]
    assert 0 == sum(line.swaps + line.refused + line.failed for line in lines(caplog))
    assert "static" == model.hotsplit.snapshot().mode


def test_window_rates_are_those_of_the_windows_own_pairs(checkpoint, load, caplog):
    model = load(checkpoint("qwen3_moe"), dynamic=False, dyn_steps=4)
    hot, batch = model.hotsplit.plan.hot_mask(), tiny.prompts()
    with tiny.routers_watched(model) as seen:
        model.generate(**batch, **tiny.greedy(9))
    row = model.hotsplit.sizes.row_bytes
    expected = []
    for steps in (range(1, 4), range(4, 8)):  # the first window's decode steps, and the second window
        hits = pairs = hot_bytes = all_bytes = 0
        counts = np.zeros((LAYERS, E))
        for step in steps:
            for layer, logits in seen[step * LAYERS : (step + 1) * LAYERS]:
                chosen = logits.float().softmax(-1).topk(TOP_K, dim=-1).indices.flatten()
                np.add.at(counts[layer], chosen.numpy(), 1)
                hits, pairs = hits + int(hot[layer, chosen].sum()), pairs + len(chosen)
                for expert in set(chosen.tolist()):
                    all_bytes += row[layer]
                    hot_bytes += row[layer] * hot[layer, expert]
        best = np.sort(counts, axis=1)[:, -4:].sum() / counts.sum()
        expected.append((round(hits / pairs, 3), round(hot_bytes / all_bytes, 3), round(best, 3)))
    assert expected == [(line.hit, line.byte_hit, line.oracle) for line in lines(caplog)]


def test_hot_experts_that_follow_the_traffic_serve_more_of_it(load):
    rates = {}
    for dynamic in (False, True):
        model = load(tiny_moe_path(), hot=0.3, dynamic=dynamic, dyn_steps=4, dyn_margin=1.1, dyn_half_life=8)
        if dynamic:
            wait_for_copies(model.hotsplit.banks)
        model.generate(torch.arange(40, 60)[None], max_new_tokens=120, do_sample=False)
        snapshot = model.hotsplit.snapshot()
        rates[dynamic] = snapshot.hit_pairs["decode"] / snapshot.pairs["decode"]
    # Although the static model has a hot row more per layer: the dynamic one spends it on the spare row.
    assert rates[True] > rates[False] + 0.1


def test_swaps_are_refused_while_a_copy_is_under_way(checkpoint, expected, load, monkeypatch):
    folder = checkpoint("qwen3_moe")
    model = load(folder, **RESTLESS)
    go, fill = threading.Event(), PointerRows.fill
    monkeypatch.setattr(PointerRows, "fill", lambda *args, **kwargs: (go.wait(LIMIT_S), fill(*args, **kwargs))[1])
    try:
        before = model.hotsplit.banks.router.row_map.tolist()
        assert [True] * 3 == equals_stock(expected, folder, model)
        snapshot = model.hotsplit.snapshot()
        assert snapshot.swaps_refused > 0
        assert (0, before) == (snapshot.swaps_done, model.hotsplit.banks.router.row_map.tolist())
    finally:
        go.set()


def failing_reads(*args, **kwargs):
    raise BankError("cannot read model.safetensors", got="Input/output error")


@pytest.mark.parametrize("method", [(PointerRows, "fill"), (DirectReader, "read_into")])
def test_copies_that_fail_leave_the_map_and_the_outputs_as_they_were(
    checkpoint, expected, load, monkeypatch, caplog, method
):
    folder = checkpoint("qwen3_moe")
    model = load(folder, **(RESTLESS | {"dyn_steps": 8}))
    wait_for_copies(model.hotsplit.banks)
    before = model.hotsplit.banks.router.row_map.tolist()
    monkeypatch.setattr(*method, failing_reads)
    # 14 steps: one update.
    assert [True] * 3 == equals_stock(expected, folder, model)
    snapshot = model.hotsplit.snapshot()
    assert before == model.hotsplit.banks.router.row_map.tolist()
    assert (0, 1) == (snapshot.swaps_done, snapshot.update_failures)
    assert snapshot.swaps_failed > 0
    assert any("Input/output error" in record.message for record in caplog.records if record.levelname == "ERROR")


def test_the_third_failed_update_in_a_row_stops_the_run_with_the_reason(checkpoint, load, monkeypatch):
    model = load(checkpoint("qwen3_moe"), **RESTLESS)
    wait_for_copies(model.hotsplit.banks)
    monkeypatch.setattr(PointerRows, "fill", failing_reads)
    with pytest.raises(BankError, match="3 updates in a row failed: got .*Input/output error.*HOTSPLIT_DYNAMIC=0"):
        generate(model, 100)
    snapshot = model.hotsplit.snapshot()
    assert (3, 0) == (snapshot.update_failures, snapshot.swaps_done)
    assert snapshot.steps < 100


def test_a_disk_that_recovers_is_forgiven(checkpoint, expected, load, monkeypatch):
    folder = checkpoint("qwen3_moe")
    model = load(folder, **RESTLESS)
    wait_for_copies(model.hotsplit.banks)
    with monkeypatch.context() as patch:
        patch.setattr(PointerRows, "fill", failing_reads)
        for _ in range(50):  # until an update has asked for a copy
            if model.hotsplit.snapshot().update_failures:
                break
            generate(model, 1)
    assert model.hotsplit.snapshot().update_failures in (1, 2)
    assert [True] * 3 == equals_stock(expected, folder, model)
    generate(model, 30)
    assert model.hotsplit.snapshot().swaps_done > 0
    assert [True] * 3 == equals_stock(expected, folder, model)


def learned_of(model, state):
    return load_learned(state, model.hotsplit.sizes.identity)[0]


def test_what_was_learned_is_written_at_the_end_and_taken_up_at_the_next_start(checkpoint, expected, load, tmp_path):
    folder, state = checkpoint("qwen3_moe"), tmp_path / "learned-state"
    model = load(folder, state_dir=state, **RESTLESS)
    generate(model, 40)
    assert learned_of(model, state) is None
    model.hotsplit.banks.router.flush()
    learned = model.hotsplit.banks.live.learned()
    model.hotsplit.close()
    saved = learned_of(model, state)
    np.testing.assert_allclose(learned.counts, saved.phases["decode"].counts)
    assert learned.counts.any()
    assert not model.hotsplit.banks.live.learned().counts.any(), "what is saved is not saved again"

    again = load(folder, state_dir=state, dynamic=False)
    assert "learned alone" in again.hotsplit.origin
    for layer in range(LAYERS):
        counts = saved.phases["decode"].counts[layer]
        assert set(np.argsort(-counts, kind="stable")[:3].tolist()) <= set(again.hotsplit.plan.hot[layer])
    assert [True] * 3 == equals_stock(expected, folder, again)


def test_learned_counts_can_be_ignored(checkpoint, load, tmp_path):
    folder, state = checkpoint("qwen3_moe"), tmp_path / "learned-state"
    model = load(folder, state_dir=state, **RESTLESS)
    generate(model, 40)
    model.hotsplit.close()
    again = load(folder, state_dir=state, learned="ignore", dynamic=False)
    assert ((0, 1, 2, 3),) * LAYERS == again.hotsplit.plan.hot
    assert "learned alone" not in again.hotsplit.origin


def test_learned_counts_of_another_model_are_skipped_with_the_field_named(checkpoint, load, tmp_path, caplog):
    state = tmp_path / "learned-state"
    model = load(checkpoint("mixtral"), state_dir=state, **RESTLESS)
    generate(model, 20)
    model.hotsplit.close()
    again = load(checkpoint("qwen3_moe"), state_dir=state, dynamic=False)
    assert ((0, 1, 2, 3),) * LAYERS == again.hotsplit.plan.hot
    assert any("model_type is mixtral, not qwen3_moe" in message for message in caplog.messages)


def test_damaged_learned_counts_are_skipped_aloud(checkpoint, load, tmp_path, caplog):
    state = tmp_path / "learned-state"
    model = load(checkpoint("qwen3_moe"), state_dir=state)
    path = learned_path(state, model.hotsplit.sizes.identity)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    again = load(checkpoint("qwen3_moe"), state_dir=state, dynamic=False)
    assert ((0, 1, 2, 3),) * LAYERS == again.hotsplit.plan.hot
    assert any("[learned-damaged]" in message for message in caplog.messages)


def test_nothing_is_written_into_the_models_folder(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    model = load(folder, **RESTLESS)
    generate(model, 20)
    model.hotsplit.close()
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_save_of_learned_counts_that_takes_long_holds_no_step_up_and_loses_nothing(
    checkpoint, load, tmp_path, monkeypatch
):
    begun, go, callers, add_learned = threading.Event(), threading.Event(), [], record.add_learned

    def slow(*arguments, **named):
        callers.append(threading.current_thread().name)
        begun.set()
        go.wait(LIMIT_S)
        return add_learned(*arguments, **named)

    def run(name, *, between=lambda: None):
        model = load(checkpoint("qwen3_moe"), state_dir=tmp_path / name, **RESTLESS)
        generate(model, 20)
        between()
        generate(model, 20)
        model.hotsplit.close()
        return learned_of(model, tmp_path / name).phases["decode"]

    def one_save_is_under_way():
        assert begun.wait(LIMIT_S)
        try:
            assert ["hotsplit-snapshots"] == [name.rpartition("_")[0] for name in callers]
        finally:
            go.set()

    expected = run("saved once")
    monkeypatch.setattr(record, "add_learned", slow)
    monkeypatch.setattr(record, "SAVE_EVERY_S", 0.0)
    kept = run("saved while it runs", between=one_save_is_under_way)
    assert len(callers) > 2
    assert expected.tokens == kept.tokens
    np.testing.assert_allclose(expected.counts, kept.counts)


def test_a_state_folder_that_cannot_be_written_is_a_warning_and_the_run_goes_on(
    checkpoint, expected, load, tmp_path, caplog
):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    folder = checkpoint("qwen3_moe")
    model = load(folder, state_dir=blocked / "state", **RESTLESS)
    for _ in range(2):
        assert [True] * 3 == equals_stock(expected, folder, model)
    model.hotsplit.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any(message.startswith("learned counts are not saved: ") for message in warnings)
    assert any(message.startswith("metrics are not written: ") for message in warnings)


def test_the_snapshot_file_holds_what_the_snapshot_says(checkpoint, load, tmp_path):
    state = tmp_path / "state"
    model = load(checkpoint("qwen3_moe"), state_dir=state, **RESTLESS)
    generate(model, 20)
    model.hotsplit.close()
    (path,) = state.rglob("rank0.json")
    written, now = read_snapshot(path), model.hotsplit.snapshot()
    assert (now.steps, now.pairs, now.hit_pairs, now.swaps_done) == (
        written.steps,
        written.pairs,
        written.hit_pairs,
        written.swaps_done,
    )
    assert json.loads(json.dumps(now.to_json()))["snapshot"]["counts"] == written.to_json()["snapshot"]["counts"]


def test_two_models_of_one_process_write_snapshots_of_their_own(checkpoint, load, tmp_path):
    state = tmp_path / "state"
    models = [load(checkpoint(name), state_dir=state, dyn_steps=3) for name in ("qwen3_moe", "mixtral")]
    for number, model in enumerate(models, 1):
        generate(model, 10 * number)
    for model in models:
        model.hotsplit.close()
    assert [10, 20] == sorted(read_snapshot(path).steps for path in state.rglob("rank0.json"))


def test_the_snapshot_says_what_runs(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=0.5, **RESTLESS)
    generate(model, 20)
    snapshot, sizes = model.hotsplit.snapshot(), model.hotsplit.sizes
    assert ("dynamic", "cpu-pointers", 0) == (snapshot.mode, snapshot.backend, snapshot.rank)
    assert hotsplit.__version__ == snapshot.version
    assert 64 == len(snapshot.plan_hash)
    assert snapshot.hot_bytes <= snapshot.budget_bytes <= budget(checkpoint("qwen3_moe"), 0.5) * 2**30
    cold = ~model.hotsplit.banks.router.hot_mask()
    assert int((cold.sum(axis=1) * sizes.row_bytes).sum()) == snapshot.host_bytes
    assert snapshot.swaps_done * int(sizes.row_bytes[0]) == snapshot.swap_bytes
    assert 0 < snapshot.update_seconds < LIMIT_S


def test_the_rebalancers_hot_set_is_the_row_maps(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), **RESTLESS)
    generate(model, 40)
    until_swapped(model, lambda: generate(model, 40))
    banks = model.hotsplit.banks
    assert banks.router.hot_mask().tolist() == banks.live._steering.policy.hot().tolist()
    assert [3, 3] == banks.router.hot_mask().sum(axis=1).tolist()


def test_a_forked_childs_steps_leave_the_metrics_of_its_parent_alone(checkpoint, load, tmp_path):
    model = load(checkpoint("qwen3_moe"), state_dir=tmp_path, dynamic=False, dyn_steps=2)
    with torch.no_grad():
        model(**tiny.prompts())  # no snapshot yet, so that no thread for them either
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            for _ in range(5):
                model(**tiny.prompts())
        model.hotsplit.close()
        os._exit(0)
    assert 0 == os.waitpid(child, 0)[1]
    assert not list(tmp_path.rglob("rank0.json"))
    model.hotsplit.close()
    (path,) = tmp_path.rglob("rank0.json")
    assert 1 == read_snapshot(path).steps
