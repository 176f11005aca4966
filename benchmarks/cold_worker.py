"""One way of reading cold rows, measured in a process of its own; bench_cold_path.py starts these.

python benchmarks/cold_worker.py JOB.json FOUND.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from observe import bytes_from_disk, drop_pages, memory, warm_pages

import hotsplit
from hotsplit.bank import mapped
from hotsplit.bank.cold_choice import ColdChoice, slot_needs
from hotsplit.bank.cold_reads import ColdRows
from hotsplit.config import HotsplitConfig
from hotsplit.engines.transformers import loading
from hotsplit.plan.histogram import save_histogram

_LIMITS = ("memory.limit_in_bytes", "memory.max")
_KERNEL_BYTES = 24 << 20
"""Page tables and the like, charged to a group beside the process's own memory."""


class Counted:
    """Bytes of the distinct cold rows that steps touched."""

    def __init__(self, model: Any) -> None:
        self._row_bytes = model.hotsplit.sizes.row_bytes
        self.num_bytes = 0
        rows = model.hotsplit.banks.rows
        ask = rows.ask

        def counted(layer_id: int, wanted: Sequence[int]) -> None:
            wanted = list(wanted)
            self.num_bytes += int(self._row_bytes[layer_id]) * len(set(wanted))
            ask(layer_id, wanted)

        rows.ask = counted


def _threads(self: ColdRows, key: tuple[int, int]) -> None:
    """Reading threads for the page cache too; they make the pages present, with read-ahead of our own or without."""
    if not self._files.is_present(self._ranges_of(key)):
        _PENDING[key] = _POOL.submit(self._files.make_present, self._ranges_of(key))


def _await_thread(self: ColdRows, key: tuple[int, int]) -> None:
    done = _PENDING.pop(key, None)
    if done is not None:
        done.result()
    self._present.add(key)


_PENDING: dict[tuple[int, int], Future[None]] = {}
_POOL = ThreadPoolExecutor(2)


def _ahead(self: ColdRows, key: tuple[int, int]) -> None:
    """As it was before reading threads: advice on the stepping thread, then a touch that waits."""
    self._files.read_ahead(self._ranges_of(key))
    self._present.add(key)


@contextmanager
def _way(name: str, *, slot_share: float, threads: int) -> Iterator[None]:
    """Have load() read cold rows in one way."""
    rows_options = loading.rows_options

    def choice(opened: Any, *, budget: int, config: HotsplitConfig) -> ColdChoice:
        sizes, slot_bytes = opened.sizes, slot_needs(opened.source).slot_bytes
        least = int(sizes.row_bytes.sum()) * (sizes.identity.top_k + 1) if config.dynamic else 0
        slots = int(slot_share * max(budget - least, 0)) // slot_bytes
        return ColdChoice(is_direct=bool(slots), slots=slots, slot_bytes=slot_bytes, text=f"{name}, {slots} slots")

    def options(*arguments: Any, **named: Any) -> Any:
        rows, notices = rows_options(*arguments, **named)
        return replace(rows, threads=threads), notices

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(loading, "cold_choice", choice))
        patches.enter_context(mock.patch.object(loading, "rows_options", options))
        if name == "advice, then a touch":
            patches.enter_context(mock.patch.object(ColdRows, "_begin", _ahead))
        if name.startswith("reading threads"):
            patches.enter_context(mock.patch.object(ColdRows, "_begin", _threads))
            patches.enter_context(mock.patch.object(ColdRows, "_await_page_cache", _await_thread))
        if name == "reading threads, populate alone":
            patches.enter_context(mock.patch.object(mapped.MappedFiles, "read_ahead", return_value=None))
        yield


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode tokens one by one, in one regime after the other.

    Args:
        job: folder, way, slot_share, threads, kernel, hot_gib, counts, histogram, tokens, warm, regimes, group, settings.

    Returns:
        What was found, by regime.
    """
    group = job["group"] and Path(job["group"])
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    files = sorted(folder.glob("*.safetensors"))
    drop_pages(files)
    with _way(job["way"], slot_share=job["slot_share"], threads=job["threads"]):
        model = hotsplit.load(
            folder,
            hot_gib=job["hot_gib"],
            counts=job["counts"],
            kernel=job["kernel"],
            run_when_fits=True,
            state_dir=job["scratch"],
            device="cpu",
            learned="ignore",
            **job["settings"],
        )
        counted = Counted(model)
        found = {}
        for regime, cache_bytes in job["regimes"].items():
            if group and cache_bytes:
                _limit(group, cache_bytes=cache_bytes)
            elif cache_bytes is None:
                warm_pages(files)
            found[regime] = _decode(model, job=job, files=files, counted=counted, dropped=cache_bytes == 0)
        if job.get("histogram"):
            save_histogram(model.hotsplit.histogram(), Path(job["histogram"]))
        model.hotsplit.close()
        return found


def _limit(group: Path, *, cache_bytes: int) -> None:
    """Leave so many bytes for page cache beside what the process holds for itself."""
    limit = next(group / name for name in _LIMITS if (group / name).exists())
    limit.write_text(str(memory().anonymous + _KERNEL_BYTES + cache_bytes))


def _decode(
    model: Any, *, job: Mapping[str, Any], files: Sequence[Path], counted: Counted, dropped: bool
) -> dict[str, Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    wall, cpu = [], []
    read = touched = 0
    tick_ms: list[float] = []
    tick = model.hotsplit.banks.tick

    def timed() -> None:
        started = time.perf_counter()
        tick()
        tick_ms.append((time.perf_counter() - started) * 1e3)

    model.hotsplit.banks.tick = timed
    before = model.hotsplit.snapshot()
    rows_before = _rows(model)
    for number, token in enumerate(job["tokens"]):
        if number == job["warm"]:
            read, touched = bytes_from_disk(), counted.num_bytes
            tick_ms.clear()
        if dropped:
            model.hotsplit.banks.rows.drop_cold_pages()
            drop_pages(files)
        busy, started = time.process_time(), time.perf_counter()
        with torch.no_grad():
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        if number >= job["warm"]:
            wall.append((time.perf_counter() - started) * 1e3)
            cpu.append((time.process_time() - busy) * 1e3)
    spread = _spread(tick_ms)
    _finish_swaps(model)
    snapshot = model.hotsplit.snapshot()
    found = {
        "wall_ms": _spread(wall),
        "cpu_ms": _spread(cpu),
        "tick_ms": spread,
        "read_bytes_per_token": (bytes_from_disk() - read) // len(wall),
        "unique_cold_bytes_per_token": (counted.num_bytes - touched) // len(wall),
        "hit_ratio": (snapshot.hit_pairs["decode"] - before.hit_pairs["decode"])
        / max(snapshot.pairs["decode"] - before.pairs["decode"], 1),
        "swaps": snapshot.swaps_done - before.swaps_done,
        "anonymous_bytes": memory().anonymous,
        "rows": {name: number - rows_before[name] for name, number in _rows(model).items()},
    }
    model.hotsplit.banks.tick = tick
    return found


def _finish_swaps(model: Any) -> None:
    """Swaps that were begun while steps were timed are counted too: a disk that is busy has them late."""
    live = model.hotsplit.banks.live
    while live._swapper is not None and not live._swapper.is_idle():
        model.hotsplit.banks.tick()
        time.sleep(0.001)


def _rows(model: Any) -> dict[str, int]:
    return {name: getattr(model.hotsplit.banks.rows.cold_counts, name) for name in _ROW_COUNTS}


_ROW_COUNTS = ("staged_rows", "paged_rows", "kept_rows", "present_rows")


def _spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "median": round(statistics.median(values), 3),
        "p10": round(hundredths[9], 3),
        "p90": round(hundredths[89], 3),
        "p99": round(hundredths[98], 3),
        "max": round(max(values), 3),
    }


def main(arguments: Sequence[str]) -> int:
    """Run one job."""
    job = json.loads(Path(arguments[0]).read_text())
    Path(arguments[1]).write_text(json.dumps(measure(job)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
