"""An OpenAI server with hotsplit: concurrent clients, a change of domain, a restart, and what it shows meanwhile.

Under concurrency no two runs have the same schedule, and stock vLLM then differs from itself. So here nothing is
compared between runs: the probe recomputes one MoE call in five from an unpermuted copy, on the same inputs.

The trained small-moe routes by domain. First all clients send Python, then English.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.vllm import vllm_models
from engines.vllm.vllm_server import Server, serve, wait_for
from hotsplit.metrics import METRICS, MetricsSnapshot, UpdateLine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NAME = "small-moe"
CLIENTS = 32
LIVE = {"HOTSPLIT_DYN_STEPS": "20", "HOTSPLIT_DYN_MAX_SWAPS": "4", "HOTSPLIT_DYN_HALF_LIFE": "3"}
WINDOWS = 12
"""Updates per domain: long enough to settle at these settings."""
NO_SLOTS = "hotsplit_kept_ratio_window"
"""What is told only where cold rows stay in slots: never under vLLM, whose cold rows lie in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """What a server did before, during and after a change of domain."""

    updates: list[UpdateLine]
    """All update lines."""
    changed_at: int
    """Updates before the change."""
    requests: int
    """Answered."""
    report: dict[str, Any]
    """The probe's, when all was idle."""
    widest: int
    """Requests that shared a decode step, at most."""
    rows: dict[str, Any]
    """Whether every expert kept its bytes and a row of its own."""
    snapshot: MetricsSnapshot
    """Of the same moment."""
    scrapes: list[dict[str, Any]]
    """What /metrics showed then, several times: two API servers take turns."""
    log: str
    """Of the server, after it has ended."""
    place: Any
    """Its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted:
    """What the server did after it was started again."""

    updates: list[UpdateLine]
    """All update lines."""
    shown: dict[str, Any]
    """What /metrics showed."""
    plan_hash: str
    """Of its plan."""
    log: str
    """Of the server, after it has ended."""


def requests_of(domain: str, *, seed: int, number: int = 4000) -> list[tuple[str, int]]:
    """Prompts cut from a domain's text, and how much to generate: both of mixed lengths."""
    text, chance = vllm_models.corpus(domain), random.Random(seed)
    starts = [chance.randrange(len(text) - 400) for _ in range(number)]
    return [(text[start : start + chance.randint(20, 400)], chance.randint(4, 96)) for start in starts]


def drive(server: Server, domain: str, *, windows: int, seed: int = 0) -> int:
    """Let all clients send one domain until so many more updates have come."""
    end = len(server.updates) + windows
    return server.complete_all(
        requests_of(domain, seed=seed), clients=CLIENTS, until=lambda: len(server.updates) >= end
    )


@pytest.fixture(scope="module")
def shift(checkpoint, settings, tmp_path_factory):
    place = tmp_path_factory.mktemp("shift")
    chosen = settings(NAME, **LIVE)
    flags = ["--api-server-count", "2"]
    with serve(checkpoint(NAME), settings=chosen, place=place, flags=flags, probe={"VLLM_PROBE_EVERY": "5"}) as server:
        requests = drive(server, "python", windows=WINDOWS)
        changed_at = len(server.updates)
        requests += drive(server, "english", windows=WINDOWS)
        (report,), (rows,) = server.probe("report"), server.probe("check rows")
        (snapshot,) = server.settled_snapshots(steps=report["steps"])
        scrapes = [server.metrics() for _ in range(8)]
        updates = server.updates
    steps = [json.loads(line) for line in (place / "probe" / "rank0.jsonl").read_text().splitlines()]
    return Shift(
        updates=updates,
        changed_at=changed_at,
        requests=requests,
        report=report,
        widest=max(step["tokens"] for step in steps if step["phase"] == "decode"),
        rows=rows,
        snapshot=snapshot,
        scrapes=scrapes,
        log=server.log,
        place=place,
    )


@pytest.fixture(scope="module")
def restarted(shift, checkpoint, settings, tmp_path_factory):
    """The same server with the same state folder, started by `hotsplit serve` this time; English goes on."""
    place = tmp_path_factory.mktemp("restarted")
    chosen = settings(NAME, **LIVE, HOTSPLIT_STATE_DIR=str(shift.place / "state"))
    with serve(checkpoint(NAME), settings=chosen, place=place, through_hotsplit=True) as server:
        drive(server, "english", windows=2, seed=1)
        wait_for(
            lambda: server.snapshots[0].hit_ratio_window is not None, what="an update in the snapshot", timeout_s=120
        )
        shown = server.metrics()
    return Restarted(updates=server.updates, shown=shown, plan_hash=server.snapshots[0].plan_hash, log=server.log)


def hits(lines):
    return [line.hit for line in lines]


def test_no_call_differs_from_one_without_hotsplit_under_concurrency(shift):
    assert shift.requests > 100
    assert shift.widest > 24
    assert shift.report["compared"] > 500
    assert 0 == shift.report["mismatches"]
    assert shift.report["half_swapped_steps"] > 0
    assert {"rows_intact": True, "rows_distinct": True} == shift.rows


def test_prefill_and_decode_were_both_served(shift):
    assert shift.report["tokens"]["decode"] > 1000
    assert shift.report["tokens"]["prefill"] > 1000


def test_metrics_have_every_name_and_each_is_of_rank_0(shift):
    for scrape in shift.scrapes:
        # Drift is the distance from what the plan expected: this one expected nothing (the restarted server's did).
        assert set(METRICS) - {"hotsplit_drift_ratio", NO_SLOTS} == set(scrape)
        assert {0} == set(scrape["hotsplit_kept_bytes_total"].values())
        assert {"0"} == {dict(labels)["rank"] for series in scrape.values() for labels in series}


def test_with_counts_behind_the_plan_metrics_have_every_name(restarted):
    assert set(METRICS) - {NO_SLOTS} == set(restarted.shown)


def test_metrics_are_the_snapshot_whichever_api_server_answers(shift):
    expected = {}
    for sample in shift.snapshot.to_samples():
        expected.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    for scrape in shift.scrapes:
        assert expected == scrape


def test_the_hit_rate_on_metrics_is_what_the_router_chose(shift):
    for phase in ("decode", "prefill"):
        labels = (("phase", phase), ("rank", "0"))
        for name, what in (("routed_pairs", "pairs"), ("hit_pairs", "hits"), ("tokens", "tokens")):
            assert shift.report[what][phase] == shift.scrapes[0][f"hotsplit_{name}_total"][labels]


def test_a_change_of_domain_lowers_the_hit_rate_and_it_recovers(shift):
    before = statistics.median(hits(shift.updates[shift.changed_at - 4 : shift.changed_at]))
    fallen = min(hits(shift.updates[shift.changed_at : shift.changed_at + 3]))
    after = statistics.median(hits(shift.updates[-4:]))
    assert fallen < before - 0.1
    assert after > fallen + 0.1


def test_live_traffic_beats_the_uniform_plan_that_the_run_began_with(shift):
    settled = statistics.median(hits(shift.updates[shift.changed_at - 4 : shift.changed_at]))
    assert settled > shift.updates[0].hit + 0.1


def test_what_was_learned_is_saved_at_the_end_and_used_at_the_next_start(shift, restarted):
    assert "learned counts saved" in shift.log
    assert "counts: learned alone" in restarted.log
    assert restarted.plan_hash != shift.snapshot.plan_hash


def test_the_first_window_after_a_restart_is_better_than_that_of_a_fresh_start(shift, restarted):
    assert restarted.updates[0].hit > shift.updates[0].hit + 0.1


def test_no_worker_reported_an_error(shift, restarted):
    for log in (shift.log, restarted.log):
        assert [] == [line for line in log.splitlines() if "hotsplit" in line and " ERROR " in line]
