"""One engine of the race, loaded and measured in a process of its own, so that its memory is its own.

    python benchmarks/race_worker.py JOB.json RESULT.json        bench_larger_than_memory.py starts it

A job is a script of parts. Each part feeds tokens to the engine, all at once or one by one, and every forward is timed:
wall time, CPU time of all threads, bytes that the storage delivered. What the engine would have said is kept, to
compare engines, and never fed back: all of them compute the same tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from observe import bytes_from_disk, cached_share, warm_pages
from race_players import PLAYERS, Logits, Player

_IMPORTS = {
    "hotsplit": ("accelerate", "transformers", "hotsplit.engines.transformers"),
    "stock": ("accelerate", "transformers"),
    "accelerate": ("accelerate", "transformers"),
    "llama": ("llama_cpp",),
}
"""What a load would import; done before its clock runs."""


class MemoryWatch:
    """The most that the process had resident, in memory of its own and in pages of files, while a block runs.

    Sampled every 20 ms from a thread; a sample costs 50 microseconds.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.anonymous = 0
        """Bytes that the kernel cannot take back (RssAnon)."""
        self.file = 0
        """Bytes of mapped files (RssFile); the kernel takes them back when it needs room."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        """Peaks so far, and the kernel's own peak of both together (VmHWM)."""
        fields = _status()
        self.anonymous = max(self.anonymous, fields["RssAnon"])
        self.file = max(self.file, fields["RssFile"])
        return {"anonymous": self.anonymous, "file": self.file, "together": fields["VmHWM"]}

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            self.now()


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Load an engine and play the script.

    Args:
        job: engine, folder, gguf, options, threads, scratch, is_warm, script, profile_tokens, logits (where the kept ones
            go), save_counts.
    """
    with MemoryWatch() as watch:
        start = _meter()
        player = PLAYERS[job["engine"]](job)
        load = _since(start)
        after_load = watch.now()
        if job["is_warm"]:
            warm_pages(player.reads)
        cached = cached_share(player.reads)
        kept: list[Logits] = []
        digest = hashlib.sha256()
        parts = [_play(player, part, kept=kept, digest=digest, started=time.perf_counter()) for part in job["script"]]
        memory = watch.now()
    profile = player.profile(job["profile_tokens"]) if player.profile and job["profile_tokens"] else None
    np.save(job["logits"], np.array(kept, dtype=np.float32))
    if player.save_counts and job["save_counts"]:
        player.save_counts(Path(job["save_counts"]))
    player.close()
    return {
        "load": load,
        "memory_after_load": after_load,
        "memory": memory,
        "cached_share_at_start": cached,
        "cached_share_at_end": cached_share(player.reads),
        "parts": parts,
        "profile_ms": profile,
        "digest": digest.hexdigest(),
        "facts": dict(player.facts),
    }


def _play(
    player: Player, part: Mapping[str, Any], *, kept: list[Logits], digest: Any, started: float
) -> dict[str, Any]:
    """One part: all of its tokens at once, or one by one until they or its seconds are over."""
    if part["restarts"]:
        player.restart()
    tokens = part["tokens"]
    pieces = [tokens] if part["at_once"] else [[token] for token in tokens]
    before, costs = player.counted(), []
    for piece in pieces:
        if part["max_s"] is not None and time.perf_counter() - started > part["max_s"]:
            break
        start = _meter()
        logits = player.forward(piece)
        costs.append(_since(start))
        digest.update(logits.tobytes())
        if part["is_kept"]:
            kept.append(logits)
    print(f"progress: {part['name']}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return {
        "name": part["name"],
        "tokens": len(tokens) if part["at_once"] else len(costs),
        "costs": costs,
        "counted": _difference(player.counted(), before),
    }


def _difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What counters grew by; of the pairs per layer and expert too, where decode had begun before."""
    grown: dict[str, Any] = {name: after[name] - before[name] for name in after if name != "counts"}
    if after.get("counts") is not None:
        first = before["counts"] or np.zeros_like(after["counts"])
        grown["counts"] = (np.array(after["counts"]) - np.array(first)).astype(int).tolist()
    return grown


def _meter() -> tuple[float, float, int, int]:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return time.perf_counter(), time.process_time(), bytes_from_disk(), faults


def _since(start: tuple[float, float, int, int]) -> dict[str, float]:
    wall, cpu, read, faults = _meter()
    return {
        "wall_ms": round((wall - start[0]) * 1e3, 3),
        "cpu_ms": round((cpu - start[1]) * 1e3, 3),
        "read_bytes": read - start[2],
        "major_faults": faults - start[3],
    }


def _status() -> dict[str, int]:
    pairs = (line.partition(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    wanted = ("VmHWM", "RssAnon", "RssFile")
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs if name in wanted}


def main(arguments: list[str]) -> int:
    """Do one job."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if job["cgroup"]:  # before anything is imported, so that all of it is charged
        Path(job["cgroup"], "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    for module in _IMPORTS[job["engine"]]:
        importlib.import_module(module)
    if job["engine"] != "llama":
        importlib.import_module("torch").set_num_threads(job["threads"])
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
    Path(arguments[1]).write_text(json.dumps(measure(job)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
