"""Counts of ranks put together, differences between readings, and which run is a server's."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from cli.fake_openai import PHASES, FakeServer
from hotsplit.bank import runs
from hotsplit.cli.balance_target import running
from hotsplit.cli.openai_client import OpenAIClient
from hotsplit.cli.run_counts import CountedRun, RunCounts, histogram_of, join_ranks, parallel_of, require_model
from hotsplit.errors import EngineError, HistogramError
from hotsplit.metrics import MetricsSnapshot
from patience import LIMIT_S
from plan_builders import sizes_of

SIZES = sizes_of([100, 100], num_experts=3, top_k=2, first_layer=3)
ZEROS = dict.fromkeys(
    ("touched_hot_bytes", "touched_cold_bytes", "steps", "swaps_done", "swaps_refused", "swaps_failed", "swap_bytes",
     "update_failures", "hot_bytes", "host_bytes", "budget_bytes"), 0)  # fmt: skip


def snapshot(rank, layers, *, tokens=3):
    """Of a rank whose layers count layer x 10 + expert."""
    counts = {phase: {layer: [10 * layer + expert for expert in range(3)] for layer in layers} for phase in PHASES}
    pairs = {phase: sum(map(sum, counts[phase].values())) for phase in PHASES}
    named = {"version": "0", "plan_hash": "0", "mode": "static", "backend": "toy"}
    told = dict.fromkeys(PHASES, tokens)
    return MetricsSnapshot(rank=rank, tokens=told, pairs=pairs, hit_pairs={}, counts=counts, **named, **ZEROS)


def counted(decode, *, tokens=3, prefill=None):
    arrays = {"decode": np.array(decode), "prefill": np.array(decode if prefill is None else prefill)}
    return RunCounts(layers=(3, 4), tokens={"decode": tokens, "prefill": tokens}, counts=arrays)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [([(3, 4)], (1, 1)), ([(3, 4), (3, 4)], (2, 1)), ([(3,), (3,), (4,), (4,)], (2, 2)), ([(4,), (3,)], (1, 2))],
    ids=["one", "tp 2", "tp 2 pp 2", "pp 2 in another order"],
)
def test_copies_count_once_and_stages_stand_in_the_order_of_their_layers(ranks, sizes):
    snapshots = [snapshot(rank, layers) for rank, layers in enumerate(ranks)]
    joined = join_ranks(snapshots)
    assert sizes == parallel_of(snapshots)
    assert ((3, 4), [[30, 31, 32], [40, 41, 42]]) == (joined.layers, joined.counts["decode"].tolist())
    assert {"decode": 3, "prefill": 3} == joined.tokens


def test_stages_that_overlap_are_refused():
    with pytest.raises(EngineError, match="wanted each layer once"):
        join_ranks([snapshot(0, (3, 4)), snapshot(1, (4, 5))])


@pytest.mark.parametrize(
    "counts",
    [
        {"decode": {4: [1, 2]}, "prefill": {4: [1, 2]}},
        {"decode": {4: [1, 2, 3]}},
        {"decode": {4: [1, 2, 3]}, "prefill": {5: [1, 2, 3]}},
        {"decode": {4: [1, 2, 2**70]}, "prefill": {4: [1, 2, 3]}},
    ],
    ids=["fewer experts", "no prefill", "other layers", "too many"],
)
def test_ranks_that_do_not_count_one_model_are_refused(counts):
    with pytest.raises(EngineError, match="wanted those of one model"):
        join_ranks([snapshot(0, (3,)), replace(snapshot(1, (4,)), counts=counts)])


def test_a_difference_is_what_came_between_and_a_restart_is_told():
    early, late = counted([[1, 1, 0], [2, 0, 0]], tokens=1), counted([[3, 1, 2], [2, 2, 2]], tokens=3)
    passed = late.since(early)
    assert ([[2, 0, 2], [0, 2, 2]], 2) == (passed.counts["decode"].tolist(), passed.tokens["decode"])
    assert late.counts["decode"].tolist() == early.plus(passed).counts["decode"].tolist()
    with pytest.raises(EngineError, match="it was started anew"):
        early.since(late)


def test_counts_survive_the_journal():
    one = counted([[3, 1, 2], [2, 2, 2]])
    again = RunCounts.from_json(one.to_json())
    assert one.to_json() == again.to_json()


@pytest.mark.parametrize("damage", [{"layers": [3]}, {"tokens": {"decode": 1}}, {"counts": {"decode": [[1]]}}])
def test_counts_that_are_none_are_refused(damage):
    with pytest.raises((KeyError, ValueError, TypeError)):
        RunCounts.from_json(counted([[3, 1, 2], [2, 2, 2]]).to_json() | damage)


def test_a_histogram_leaves_out_tokens_that_do_not_fit_and_phases_without_traffic():
    zeros = [[0, 0, 0]] * 2
    whole, said = histogram_of(counted([[3, 1, 2], [2, 2, 2]], prefill=zeros), sizes=SIZES, name="m")
    assert (["decode"], 3, []) == (list(whole.phases), whole.phases["decode"].tokens, said)
    broken, said = histogram_of(counted([[3, 1, 2], [2, 2, 1]], prefill=zeros), sizes=SIZES, name="m")
    assert (None, ["broken-step"]) == (broken.phases["decode"].tokens, [notice.name for notice in said])
    with pytest.raises(HistogramError, match="no routed token"):
        histogram_of(counted(zeros), sizes=SIZES, name="m")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (sizes_of([100] * 3, num_experts=3, top_k=2, first_layer=3), "layers"),
        (sizes_of([100] * 2, num_experts=4, top_k=2, first_layer=3), "num_experts"),
        (sizes_of([100] * 2, num_experts=3, top_k=1, first_layer=3), "top_k"),
    ],
)
def test_a_server_of_another_model_is_told_by_the_field(other, field):
    one = counted([[3, 1, 2], [2, 2, 2]])
    require_model(one, sizes=SIZES, model="m")
    with pytest.raises(EngineError, match=f"got {field}"):
        require_model(one, sizes=other, model="m")


def test_two_that_ask_at_once_are_both_answered(tmp_path):
    with FakeServer(tmp_path) as server:
        server.count({"prompt": "a", "max_tokens": 3})
        found = []

        def read():
            run = CountedRun(server.run_dir, timeout_s=LIMIT_S)
            found.extend(run.counts().tokens["decode"] for _ in range(5))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [3] * 10 == found


def test_a_run_that_is_dead_ends_the_wait(tmp_path):
    def is_alive():
        raise EngineError("dead")

    with FakeServer(tmp_path) as server:
        server.is_answering = False
        began = time.monotonic()
        with pytest.raises(EngineError, match="dead"):
            CountedRun(server.run_dir, is_alive=is_alive, timeout_s=10 * LIMIT_S).counts()
        assert time.monotonic() - began < LIMIT_S


def test_the_run_of_a_server_is_found_beside_one_that_cannot_be_read(tmp_path, monkeypatch):
    with FakeServer(tmp_path) as server:
        broken = server.run_dir.parent / server.run_dir.name.replace("000000", "000001")
        broken.mkdir()
        (broken / "rank0.json").write_text("{")
        (server.run_dir / "rank-of-mine.json").write_text("{}")
        answer_all = lambda folder, rank: runs.asked(folder)  # noqa: E731
        monkeypatch.setattr("hotsplit.cli.run_counts.runs.told", answer_all)
        connect = lambda: OpenAIClient(server.url, timeout_s=LIMIT_S, connections=1)  # noqa: E731
        with running(server.url, state_dir=tmp_path, connect=connect) as target:
            assert server.run_dir == target.run.run_dir


def test_the_run_of_a_server_is_found_beside_one_that_hangs(tmp_path, monkeypatch):
    with FakeServer(tmp_path) as server:
        hanging = server.run_dir.parent / server.run_dir.name.replace("000000", "000001")
        hanging.mkdir()
        (hanging / "rank0.json").write_bytes((server.run_dir / "rank0.json").read_bytes())
        server.count({"prompt": "a", "max_tokens": 3})
        assert 2 == len(runs.live_runs(tmp_path))
        init = CountedRun.__init__
        limit_of = lambda run_dir: 0.3 if run_dir == hanging else LIMIT_S  # noqa: E731
        patient = lambda run, run_dir, **more: init(run, run_dir, **({"timeout_s": limit_of(run_dir)} | more))  # noqa: E731
        monkeypatch.setattr(CountedRun, "__init__", patient)
        connect = lambda: OpenAIClient(server.url, timeout_s=LIMIT_S, connections=1)  # noqa: E731
        with running(server.url, state_dir=tmp_path, connect=connect) as target:
            assert server.run_dir == target.run.run_dir
