"""The numbers on /metrics: every name of every rank, in both kinds of registry, whatever state the files are in."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client import multiprocess, parser  # noqa: E402 - after the skip
from prometheus_client.openmetrics import exposition as openmetrics_exposition  # noqa: E402
from prometheus_client.openmetrics import parser as openmetrics_parser  # noqa: E402

from hotsplit.engines.vllm.exposition import expose  # noqa: E402
from hotsplit.metrics import METRICS, MetricsSnapshot, snapshot_path, write_snapshot  # noqa: E402

pytestmark = pytest.mark.vllm

SNAPSHOT = MetricsSnapshot(
    rank=0,
    version="0.1.0",
    plan_hash="ab12",
    mode="dynamic",
    backend="cpu-twin",
    tokens={"decode": 2**53, "prefill": 2},
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
    hot_bytes=1000,
    host_bytes=9000,
    budget_bytes=1100,
    hit_ratio_window=0.75,
    byte_hit_ratio_window=0.1 + 0.2,
    kept_ratio_window=0.1 + 0.1,
    oracle_ratio_window=0.875,
    drift_ratio=0.25,
    update_seconds=0.002,
    counts={"decode": {3: (1, 5)}, "prefill": {3: (4, 0)}},
)
RANKS = [replace(SNAPSHOT, rank=rank, steps=4 + rank, pairs={"decode": 6 + rank, "prefill": 4}) for rank in range(2)]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry and a class of this test's own in place of the process's."""
    fresh = prometheus_client.CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(prometheus_client, "REGISTRY", fresh)
    own_class = type("MultiProcessCollector", (multiprocess.MultiProcessCollector,), {})
    monkeypatch.setattr(multiprocess, "MultiProcessCollector", own_class)
    return fresh


@pytest.fixture
def run_dir(tmp_path):
    """A run of two ranks."""
    for snapshot in RANKS:
        write_snapshot(snapshot, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def scraped_together(tmp_path):
    """A registry as vLLM makes one for a scrape when several processes answer."""
    (tmp_path / "multiproc").mkdir()
    fresh = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(fresh, path=str(tmp_path / "multiproc"))
    return fresh


def text_of(registry):
    return prometheus_client.generate_latest(registry).decode()


def numbers(text):
    """Samples by name and labels; one that is there twice fails."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def expected(*snapshots):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for snapshot in snapshots
        for sample in snapshot.to_samples()
    }


def test_every_name_of_every_rank_is_exposed_with_the_value_of_its_snapshot(registry, run_dir):
    expose(run_dir)
    found = numbers(text_of(registry))
    assert expected(*RANKS) == found
    for rank in ("0", "1"):
        assert set(METRICS) == {name for name, *labels in found if ("rank", rank) in labels}


def test_every_name_has_its_kind_and_its_help(registry, run_dir):
    expose(run_dir)
    lines = text_of(registry).splitlines()
    for metric in METRICS.values():
        assert f"# HELP {metric.name} {metric.meaning}" in lines
        assert f"# TYPE {metric.name} {metric.kind}" in lines


def test_the_text_parses_as_openmetrics_too(registry, run_dir):
    expose(run_dir)
    text = openmetrics_exposition.generate_latest(registry).decode()
    names = {
        sample.name for family in openmetrics_parser.text_string_to_metric_families(text) for sample in family.samples
    }
    assert set(METRICS) == names


def test_they_are_there_too_where_several_processes_answer(run_dir, scraped_together):
    expose(run_dir)
    assert expected(*RANKS) == numbers(text_of(scraped_together))


def test_the_numbers_of_other_libraries_stay(tmp_path, run_dir, registry, scraped_together):
    prometheus_client.Counter("requests", "Requests.", registry=registry).inc(3)
    expose(run_dir)
    assert 3 == numbers(text_of(registry))["requests_total",]
    gauge = json.dumps(["vllm:running", "vllm:running", {}, "Running."])
    values = multiprocess.MmapedDict(str(tmp_path / "multiproc" / "gauge_livesum_7.db"))
    values.write_value(gauge, 2.0, 0.0)
    values.close()
    assert 2 == numbers(text_of(scraped_together))["vllm:running",]


@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_is_doubled_where_both_kinds_of_collector_share_a_registry(registry, run_dir, tmp_path, is_late):
    if not is_late:
        expose(run_dir)
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    expose(run_dir)
    assert expected(*RANKS) == numbers(text_of(registry))


@pytest.mark.parametrize("times", [1, 3])
def test_a_second_call_adds_nothing_and_wraps_nothing_again(registry, run_dir, scraped_together, times):
    for _ in range(times):
        expose(run_dir)
    assert expected(*RANKS) == numbers(text_of(registry)) == numbers(text_of(scraped_together))
    assert not hasattr(multiprocess.MultiProcessCollector.collect.__wrapped__, "__wrapped__")


def test_a_later_engine_of_the_same_process_takes_over(registry, run_dir, tmp_path):
    expose(run_dir)
    write_snapshot(replace(SNAPSHOT, steps=99), tmp_path / "later")
    expose(tmp_path / "later")
    assert {99} == {value for (name, *_), value in numbers(text_of(registry)).items() if name == "hotsplit_steps_total"}


def test_before_the_first_snapshot_there_is_nothing(registry, scraped_together, tmp_path):
    expose(tmp_path / "not yet")
    assert "" == text_of(registry) == text_of(scraped_together)


def test_before_the_first_update_the_window_is_absent_and_not_zero(registry, tmp_path):
    ratios = ("hit_ratio_window", "byte_hit_ratio_window", "kept_ratio_window", "oracle_ratio_window", "drift_ratio")
    write_snapshot(replace(SNAPSHOT, **dict.fromkeys(ratios), update_seconds=None), tmp_path)
    expose(tmp_path)
    text = text_of(registry)
    assert "hotsplit_steps_total" in text
    assert "_window" not in text
    assert "hotsplit_update_seconds" not in text


def test_a_scrape_shows_what_was_written_since_the_last(registry, run_dir):
    expose(run_dir)
    assert expected(*RANKS) == numbers(text_of(registry))
    later = replace(RANKS[1], steps=1000)
    write_snapshot(later, run_dir)
    assert expected(RANKS[0], later) == numbers(text_of(registry))


def test_one_name_can_be_asked_for_alone(registry, run_dir):
    expose(run_dir)
    found = numbers(text_of(registry.restricted_registry(["hotsplit_hit_ratio_window", "hotsplit_steps_total"])))
    assert {"hotsplit_hit_ratio_window", "hotsplit_steps_total"} == {name for name, *_ in found}


def spoilt(**changes):
    """A snapshot file's bytes with fields that are something else."""
    value = SNAPSHOT.to_json()
    return json.dumps(value | {"snapshot": value["snapshot"] | {"rank": 1} | changes}).encode()


DAMAGED = {
    "empty": b"",
    "cut off": spoilt()[:200],
    "no UTF-8": b"\xff\xfe",
    "no snapshot": b"[]",
    "a later version": spoilt().replace(b'"version": 1', b'"version": 2', 1),
    "a missing field": json.dumps({"format": "hotsplit-metrics", "version": 1, "snapshot": {"rank": 1}}).encode(),
    "a negative count": spoilt(steps=-1),
    "a number beyond floats": spoilt(steps=10**400),
    "another rank's": spoilt(rank=0),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_snapshot_is_left_out_and_said_once(registry, run_dir, caplog, damage):
    path = snapshot_path(run_dir, rank=1)
    path.write_bytes(DAMAGED[damage])
    expose(run_dir)
    for _ in range(3):
        assert expected(RANKS[0]) == numbers(text_of(registry))
    (record,) = caplog.records
    assert (logging.WARNING, "hotsplit.engines.vllm.exposition") == (record.levelno, record.name)
    assert record.message.startswith(f"snapshot {path}")
    assert record.message.endswith("; left out of /metrics until it can be read")


def test_a_snapshot_that_is_whole_again_is_back_and_a_new_damage_is_said_anew(registry, run_dir, caplog):
    path = snapshot_path(run_dir, rank=1)
    expose(run_dir)
    for _ in range(2):
        path.write_bytes(b"")
        assert expected(RANKS[0]) == numbers(text_of(registry))
        write_snapshot(RANKS[1], run_dir)
        assert expected(*RANKS) == numbers(text_of(registry))
    assert 2 == len(caplog.records)


def test_what_is_no_file_and_what_is_no_rank_breaks_nothing(registry, run_dir):
    (run_dir / "rank7.json").mkdir()
    (run_dir / "rankX.json").write_bytes(spoilt())
    (run_dir / ".rank1.json.half").write_bytes(b"{")
    (run_dir / "rank8.json").symlink_to(run_dir / "nowhere")
    expose(run_dir)
    assert expected(*RANKS) == numbers(text_of(registry))


def test_a_text_where_a_label_should_be_a_text_is_exposed_as_one(registry, tmp_path):
    snapshot_path(tmp_path, rank=1).write_bytes(spoilt(plan_hash=5, version='a"b\\c\n'))
    expose(tmp_path)
    (info,) = [key for key in numbers(text_of(registry)) if key[0] == "hotsplit_info"]
    assert ("plan_hash", "5") in info
    assert ("version", 'a"b\\c\n') in info


@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "PROMETHEUS_MULTIPROC_DIR"])
def test_vllms_own_endpoint_answers_with_them(monkeypatch, run_dir, tmp_path, registry, is_shared):
    pytest.importorskip("vllm")
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator import metrics as endpoint
    from vllm.v1.metrics import prometheus as registries

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if is_shared:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(registries, "REGISTRY", registry)
    expose(run_dir)
    app = FastAPI()
    endpoint.attach_router(app)
    for path in ("/metrics", "/metrics/"):
        answer = TestClient(app).get(path)
        assert 200 == answer.status_code
        ours = {key: value for key, value in numbers(answer.text).items() if key[0].startswith("hotsplit_")}
        assert expected(*RANKS) == ours
