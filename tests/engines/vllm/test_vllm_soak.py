"""What takes minutes: ten of them under load, workers that are killed while they save, and shared metrics."""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

import httpx

from engines.vllm import vllm_models
from engines.vllm.vllm_jobs import Job, run
from engines.vllm.vllm_server import serve, wait_for
from hotsplit.metrics import METRICS
from hotsplit.plan.dialects import load_histogram

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]

MINUTES = 10
SETTLES_S = 300
"""At first memory grows for good reasons: KV blocks are touched, and caches fill."""
SMALL_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "LRU_CACHE_CAPACITY": "8",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
"""oneDNN keeps a kernel for every batch size that it meets: with mixed requests stock vLLM grows by hundreds of MB per
hour as well, and a leak would drown in that."""
MAY_GROW_BYTES_PER_HOUR = 128 << 20
"""A worker that forgot one KiB per step would grow by three times as much."""


def anonymous_bytes(pids):
    """Memory of processes that no file backs, by process; those that have ended are left out."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[fields["Name"].strip(), pid] = int(fields["RssAnon"].split()[0]) * 1024
    return found


def growth(samples):
    """Bytes per hour by process, from the slope of what it held once it had settled."""
    settled = [(at, held) for at, held in samples if at > samples[0][0] + SETTLES_S]
    seconds = np.array([at for at, _ in settled])
    processes = set.intersection(*(set(held) for _, held in settled))
    return {
        process: 3600 * float(np.polyfit(seconds, [held[process] for _, held in settled], 1)[0])
        for process in processes
    }


def mixed_requests(seed=0):
    """Endless requests of mixed domains and lengths; the domain changes every 200."""
    chance = random.Random(seed)
    texts = [vllm_models.corpus(domain) for domain in ("python", "english", "chinese", "json")]
    for number in itertools.count():
        text = texts[number // 200 % len(texts)]
        start = chance.randrange(len(text) - 400)
        yield text[start : start + chance.randint(1, 400)], chance.randint(1, 96)


@pytest.mark.timeout(1200)
def test_ten_minutes_of_mixed_requests_leave_no_error_no_mismatch_and_no_growth(checkpoint, settings, tmp_path):
    name = "small-moe"
    chosen = settings(name, HOTSPLIT_DYN_STEPS="20", HOTSPLIT_DYN_HALF_LIFE="3")
    samples = []
    # Few KV blocks: they are touched once each, and a cache that is not yet touched everywhere looks like growth.
    flags = ["--num-gpu-blocks-override", "256", "--no-enable-prefix-caching"]
    probe = {"VLLM_PROBE_EVERY": "31"}
    with serve(
        checkpoint(name), settings=chosen, place=tmp_path, flags=flags, probe=probe, environment=SMALL_CACHES
    ) as server:
        end = time.monotonic() + MINUTES * 60
        ended = threading.Event()

        def watch():
            while not ended.wait(2):
                samples.append((time.monotonic(), anonymous_bytes([server.process.pid, *server.children()])))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            requests = list(itertools.islice(mixed_requests(), 100_000))
            answered = server.complete_all(requests, clients=32, until=lambda: time.monotonic() > end)
        finally:
            ended.set()
            watcher.join()
        (report,), (rows,) = server.probe("report"), server.probe("check rows")
        (snapshot,) = server.settled_snapshots(steps=report["steps"])
        log = server.log
    assert answered > 1000
    assert 0 == report["mismatches"]
    assert report["compared"] > 1000
    assert {"rows_intact": True, "rows_distinct": True} == rows
    assert snapshot.swaps_done > 100
    assert (0, 0) == (snapshot.swaps_failed, snapshot.update_failures)
    assert (report["pairs"], report["hits"]) == (dict(snapshot.pairs), dict(snapshot.hit_pairs))
    assert [] == [line for line in log.splitlines() if " ERROR " in line]
    assert {} == {process: grown for process, grown in growth(samples).items() if grown > MAY_GROW_BYTES_PER_HOUR}


def test_a_worker_that_is_killed_while_it_saves_loses_nothing_that_was_saved(checkpoint, settings, tmp_path):
    name = "tiny-moe"
    banks = tmp_path / "banks"
    chosen = settings(name, HOTSPLIT_BANK_DIR=str(banks))
    seen = []
    # Saving all the time, so that the kill falls into a save.
    with serve(checkpoint(name), settings=chosen, place=tmp_path, probe={"VLLM_PROBE_SAVE_S": "0.001"}) as server:
        text = vllm_models.corpus("python")
        folder = server.state / "learned"
        server.complete(text[:100], max_tokens=32)
        wait_for(lambda: any(folder.glob("*.json")), what="the first save", timeout_s=120)
        killer = threading.Timer(20, server.kill_all)
        killer.start()
        while server.process.poll() is None:
            try:
                server.complete(text[len(seen) % 1000 :][:100], max_tokens=32)
            except httpx.TransportError:
                break
            (path,) = folder.glob("*.json")
            seen.append(load_histogram(str(path))[0].phases["decode"].tokens)
        killer.join()
        assert server.log.count("learned counts saved") > 20
    (path,) = folder.glob("*.json")
    kept, _ = load_histogram(str(path))
    assert len(seen) > 10
    assert sorted(seen) == seen
    assert kept.phases["decode"].tokens >= seen[-1]
    assert [] == list(banks.iterdir())
    again = chosen | {"HOTSPLIT_STATE_DIR": str(server.state)}
    job = Job(model=checkpoint(name), prompts=[[1, 2, 3]], max_tokens=4, settings=again)
    assert "counts: learned alone" in run(job, place=tmp_path / "after").log


def test_metrics_are_there_where_the_user_has_set_a_folder_for_several_processes(checkpoint, settings, tmp_path):
    name = "tiny-moe"
    shared = tmp_path / "prometheus"
    shared.mkdir()
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(shared)}
    with serve(checkpoint(name), settings=settings(name), place=tmp_path, probe={}, environment=environment) as server:
        server.complete_all([("def f(x):", 32)] * 8, clients=4)
        (report,) = server.probe("report")
        (snapshot,) = server.settled_snapshots(steps=report["steps"])
        shown = server.metrics()
    assert set(METRICS) - {"hotsplit_drift_ratio"} == set(shown)  # no counts behind the plan: nothing to drift from
    assert snapshot.steps == shown["hotsplit_steps_total"][("rank", "0"),]
    assert report["hits"]["decode"] == shown["hotsplit_hit_pairs_total"][("phase", "decode"), ("rank", "0")]
