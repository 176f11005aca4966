"""Metrics: the names, what a snapshot accepts, its file, its samples, and the update line."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import HotsplitError
from hotsplit.metrics import METRICS, MetricsSnapshot, UpdateLine, read_snapshot, snapshot_path, write_snapshot

# The names of the design, typed in once more.
NAMES = [
    "hotsplit_tokens_total{phase}",
    "hotsplit_routed_pairs_total{phase}",
    "hotsplit_hit_pairs_total{phase}",
    "hotsplit_touched_bytes_total{bank}",
    "hotsplit_kept_bytes_total",
    "hotsplit_steps_total",
    "hotsplit_swaps_total{result}",
    "hotsplit_swap_bytes_total",
    "hotsplit_shifts_total",
    "hotsplit_update_failures_total",
    "hotsplit_hot_bytes",
    "hotsplit_host_bytes",
    "hotsplit_budget_bytes",
    "hotsplit_hit_ratio_window",
    "hotsplit_byte_hit_ratio_window",
    "hotsplit_kept_ratio_window",
    "hotsplit_oracle_ratio_window",
    "hotsplit_drift_ratio",
    "hotsplit_update_seconds",
    "hotsplit_info{version,plan_hash,mode,backend}",
]
LINE = (
    "hotsplit update=12 step=24000 tokens=24000 hit=0.874 byte_hit=0.861 oracle=0.889 drift=0.06 swaps=14 refused=1 "
    "failed=0 moved_mib=161.0 cost_ms=3.2 rank=0"
)
UPDATE = UpdateLine(
    update=12,
    step=24000,
    tokens=24000,
    hit=0.8741,
    byte_hit=0.8609,
    oracle=0.8888,
    drift=0.0617,
    swaps=14,
    refused=1,
    failed=0,
    moved_mib=161.04,
    cost_ms=3.21,
    rank=0,
)
SNAPSHOT = MetricsSnapshot(
    rank=1,
    version="0.1.0",
    plan_hash="ab12",
    mode="dynamic",
    backend="cpu-pointers",
    tokens={"decode": 3, "prefill": 2},
    pairs={"decode": 6, "prefill": 4},
    hit_pairs={"decode": 5, "prefill": 1},
    touched_hot_bytes=700,
    touched_cold_bytes=300,
    kept_bytes=200,
    steps=4,
    swaps_done=7,
    swaps_refused=2,
    swaps_failed=1,
    swap_bytes=70,
    update_failures=1,
    shifts=3,
    hot_bytes=1000,
    host_bytes=9000,
    budget_bytes=1100,
    hit_ratio_window=0.75,
    byte_hit_ratio_window=0.5,
    kept_ratio_window=0.375,
    oracle_ratio_window=0.875,
    drift_ratio=0.25,
    update_seconds=0.002,
    counts={"decode": {3: [1, 2], 4: [0, 3]}, "prefill": {3: [2, 0], 4: [1, 1]}},
)

counts = st.integers(0, 2**60)
ratios = st.none() | st.floats(0, 1)


def by_phase(values):
    return st.fixed_dictionaries({}, optional={"decode": values, "prefill": values})


@st.composite
def snapshots(draw):
    pairs = draw(by_phase(counts))
    whole = {f.name: draw(counts) for f in fields(MetricsSnapshot) if f.type == "int"}
    whole["kept_bytes"] = draw(st.integers(0, whole["touched_cold_bytes"]))
    ratio_names = [f.name for f in fields(MetricsSnapshot) if f.name.endswith(("ratio", "ratio_window"))]
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    rows = st.lists(counts, min_size=shape[1], max_size=shape[1]).map(tuple)
    layers = st.dictionaries(st.integers(0, 99), rows, min_size=shape[0], max_size=shape[0])
    return MetricsSnapshot(
        version="0.1.0",
        plan_hash=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        mode=draw(st.sampled_from(["static", "dynamic"])),
        backend="sim",
        tokens=draw(by_phase(counts)),
        pairs=pairs,
        hit_pairs={phase: draw(st.integers(0, number)) for phase, number in pairs.items()},
        counts=draw(by_phase(layers)),
        update_seconds=draw(st.none() | st.floats(0, 1e6)),
        **whole,
        **{name: draw(ratios) for name in ratio_names},
    )


def test_the_metrics_are_those_of_the_design_with_their_labels():
    assert NAMES == [
        metric.name + (f"{{{','.join(metric.labels)}}}" if metric.labels else "") for metric in METRICS.values()
    ]


def test_counters_and_only_counters_end_in_total():
    assert [m.name for m in METRICS.values() if m.kind == "counter"] == [n for n in METRICS if n.endswith("_total")]


def test_every_metric_is_exported_per_rank_with_exactly_its_labels():
    samples = SNAPSHOT.to_samples()
    assert set(METRICS) == {sample.name for sample in samples}
    for sample in samples:
        assert {*METRICS[sample.name].labels, "rank"} == set(sample.labels)
        assert "1" == sample.labels["rank"]


def test_the_exported_numbers_are_those_of_the_snapshot():
    values = {(s.name, *sorted(v for k, v in s.labels.items() if k != "rank")): s.value for s in SNAPSHOT.to_samples()}
    assert {
        ("hotsplit_tokens_total", "decode"): 3,
        ("hotsplit_tokens_total", "prefill"): 2,
        ("hotsplit_routed_pairs_total", "decode"): 6,
        ("hotsplit_routed_pairs_total", "prefill"): 4,
        ("hotsplit_hit_pairs_total", "decode"): 5,
        ("hotsplit_hit_pairs_total", "prefill"): 1,
        ("hotsplit_touched_bytes_total", "hot"): 700,
        ("hotsplit_touched_bytes_total", "cold"): 300,
        ("hotsplit_kept_bytes_total",): 200,
        ("hotsplit_steps_total",): 4,
        ("hotsplit_swaps_total", "done"): 7,
        ("hotsplit_swaps_total", "refused"): 2,
        ("hotsplit_swaps_total", "failed"): 1,
        ("hotsplit_swap_bytes_total",): 70,
        ("hotsplit_shifts_total",): 3,
        ("hotsplit_update_failures_total",): 1,
        ("hotsplit_hot_bytes",): 1000,
        ("hotsplit_host_bytes",): 9000,
        ("hotsplit_budget_bytes",): 1100,
        ("hotsplit_hit_ratio_window",): 0.75,
        ("hotsplit_byte_hit_ratio_window",): 0.5,
        ("hotsplit_kept_ratio_window",): 0.375,
        ("hotsplit_oracle_ratio_window",): 0.875,
        ("hotsplit_drift_ratio",): 0.25,
        ("hotsplit_update_seconds",): 0.002,
        ("hotsplit_info", "0.1.0", "ab12", "cpu-pointers", "dynamic"): 1,
    } == values


def test_before_the_first_update_window_metrics_are_absent_and_not_zero():
    fresh = replace(
        SNAPSHOT,
        hit_ratio_window=None,
        byte_hit_ratio_window=None,
        kept_ratio_window=None,
        oracle_ratio_window=None,
        drift_ratio=None,
        update_seconds=None,
    )
    absent = set(METRICS) - {sample.name for sample in fresh.to_samples()}
    assert {
        "hotsplit_hit_ratio_window",
        "hotsplit_byte_hit_ratio_window",
        "hotsplit_kept_ratio_window",
        "hotsplit_oracle_ratio_window",
        "hotsplit_drift_ratio",
        "hotsplit_update_seconds",
    } == absent


def test_a_phase_without_traffic_is_exported_as_zero():
    idle = replace(SNAPSHOT, tokens={}, pairs={}, hit_pairs={}, counts={})
    tokens = {s.labels["phase"]: s.value for s in idle.to_samples() if s.name == "hotsplit_tokens_total"}
    assert {"decode": 0, "prefill": 0} == tokens


@given(snapshots())
def test_a_snapshot_reads_back_the_same_through_json_text(snapshot):
    assert snapshot == MetricsSnapshot.from_json(json.loads(json.dumps(snapshot.to_json())))


@given(snapshots())
def test_samples_are_unique_and_pairs_are_hits_and_misses(snapshot):
    samples = snapshot.to_samples()
    keys = [(s.name, tuple(sorted(s.labels.items()))) for s in samples]
    assert len(set(keys)) == len(keys)
    totals = {(s.name, s.labels.get("phase")): s.value for s in samples}
    for phase in ("decode", "prefill"):
        pairs, hits = (totals[f"hotsplit_{kind}_pairs_total", phase] for kind in ("routed", "hit"))
        assert 0 <= hits <= pairs
    assert all(METRICS[s.name].kind == "gauge" or s.value >= 0 for s in samples)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"steps": 1.0},
        {"steps": True},
        {"swap_bytes": None},
        {"hit_ratio_window": 1.001},
        {"kept_ratio_window": True},
        {"drift_ratio": -0.1},
        {"oracle_ratio_window": float("nan")},
        {"update_seconds": float("inf")},
        {"update_seconds": -1.0},
        {"byte_hit_ratio_window": "0.5"},
        {"kept_ratio_window": 1.5},
        {"kept_bytes": 301},
        {"kept_bytes": -1},
        {"mode": "adaptive"},
        {"tokens": {"train": 1}},
        {"tokens": {"decode": -1}},
        {"hit_pairs": {"decode": 7}},
        {"pairs": {}},
        {"counts": {"decode": {3: [1, -1]}}},
        {"counts": {"decode": {3: [1, 0.5]}}},
        {"counts": {"train": {3: [1]}}},
    ],
    ids=str,
)
def test_a_snapshot_refuses_what_cannot_be(change):
    with pytest.raises(HotsplitError, match="snapshot field"):
        replace(SNAPSHOT, **change)


def test_a_snapshot_file_is_written_per_rank_and_reads_back(tmp_path):
    path = write_snapshot(SNAPSHOT, tmp_path / "run")
    assert snapshot_path(tmp_path / "run", rank=1) == path
    assert SNAPSHOT.to_json() == read_snapshot(path).to_json()
    assert [path] == list((tmp_path / "run").iterdir())


def test_a_snapshot_file_replaces_the_one_before(tmp_path):
    write_snapshot(SNAPSHOT, tmp_path)
    path = write_snapshot(replace(SNAPSHOT, steps=99), tmp_path)
    assert 99 == read_snapshot(path).steps


def test_a_snapshot_file_from_before_rows_were_kept_reads_as_none_kept(tmp_path):
    older = SNAPSHOT.to_json()
    for name in ("kept_bytes", "kept_ratio_window", "shifts"):
        del older["snapshot"][name]
    path = snapshot_path(tmp_path, rank=1)
    path.write_text(json.dumps(older))
    assert replace(SNAPSHOT, kept_bytes=0, kept_ratio_window=None, shifts=0).to_json() == read_snapshot(path).to_json()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: [],
        lambda value: value | {"format": "hotsplit-plan"},
        lambda value: value | {"version": 2},
        lambda value: {key: part for key, part in value.items() if key != "snapshot"},
        lambda value: value | {"snapshot": {**value["snapshot"], "colour": 1}},
        lambda value: value | {"snapshot": {k: v for k, v in value["snapshot"].items() if k != "steps"}},
        lambda value: value | {"snapshot": {**value["snapshot"], "steps": -4}},
        lambda value: value | {"snapshot": {**value["snapshot"], "counts": {"decode": {"three": [1]}}}},
        lambda value: value | {"snapshot": {**value["snapshot"], "counts": {"decode": [1]}}},
    ],
)
def test_a_spoilt_snapshot_file_is_one_error_that_names_the_file(tmp_path, spoil):
    path = tmp_path / "rank1.json"
    path.write_text(json.dumps(spoil(SNAPSHOT.to_json())))
    with pytest.raises(HotsplitError, match=re.escape(str(path))):
        read_snapshot(path)


def test_the_update_line_is_exactly_that_of_the_design():
    assert LINE == str(UPDATE)


def test_an_update_line_is_found_behind_a_log_prefix():
    assert LINE == str(UpdateLine.parse(f"2026-01-01 12:00:00 INFO hotsplit.engines: {LINE}\n"))


@pytest.mark.parametrize(
    "line", ["", "hotsplit", LINE.replace("hit=0.874", "hit=?"), LINE.removesuffix(" rank=0"), LINE + "x", f"x{LINE}"]
)
def test_what_is_no_update_line_is_refused(line):
    with pytest.raises(HotsplitError, match="update line"):
        UpdateLine.parse(line)


def test_a_window_without_traffic_says_none_instead_of_a_rate():
    idle = replace(UPDATE, hit=None, byte_hit=None, oracle=None, drift=None)
    assert "hit=none byte_hit=none oracle=none drift=none" in str(idle)
    assert UpdateLine.parse(str(idle)).hit is None


@given(
    st.builds(
        UpdateLine,
        **dict.fromkeys(("update", "step", "tokens", "swaps", "refused", "failed", "rank"), counts),
        **dict.fromkeys(("hit", "byte_hit", "kept", "oracle", "drift"), ratios),
        shifts=st.integers(0, 9),
        moved_mib=st.floats(0, 1e9),
        cost_ms=st.floats(0, 1e9),
    )
)
def test_an_update_line_reads_back_with_the_digits_that_were_written(line):
    again = UpdateLine.parse(str(line))
    assert str(line) == str(again)
    assert (line.update, line.swaps, line.rank, line.shifts) == (again.update, again.swaps, again.rank, again.shifts)
    for before, after in ((line.hit, again.hit), (line.kept, again.kept)):
        assert before is after or abs(before - after) <= 0.0005 + 1e-12


def test_a_shift_is_written_behind_the_rank_and_nothing_where_there_was_none():
    assert LINE == str(UPDATE)
    shifted = f"{LINE} shifts=2"
    assert shifted == str(replace(UPDATE, shifts=2))
    assert (2, shifted) == (UpdateLine.parse(f"INFO {shifted}").shifts, str(UpdateLine.parse(shifted)))
    assert 0 == UpdateLine.parse(LINE).shifts


@pytest.mark.parametrize("kept", [0.0, 0.3124])
def test_what_slots_kept_is_written_behind_the_byte_hit_rate_and_nothing_where_there_are_none(kept):
    assert "kept" not in str(UPDATE)
    told = LINE.replace(" oracle=", f" kept={kept:.3f} oracle=")
    assert (
        told
        == str(replace(UPDATE, kept=kept))
        == str(UpdateLine.parse(f"INFO {told} shifts=1")).removesuffix(" shifts=1")
    )
    assert (round(kept, 3), None) == (UpdateLine.parse(told).kept, UpdateLine.parse(LINE).kept)


@pytest.mark.parametrize("part", ["kept=none", "kept=", "kept=1", "kept=0.5 kept=0.5"])
def test_a_line_with_another_form_of_it_is_no_update_line(part):
    with pytest.raises(HotsplitError, match="update line"):
        UpdateLine.parse(LINE.replace(" oracle=", f" {part} oracle="))
