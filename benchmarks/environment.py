"""The machine and the versions behind a benchmark's figures: stored with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_REPOSITORY = Path(__file__).parents[1]


def environment(*, packages: Sequence[str], threads: int) -> dict[str, Any]:
    """Where and with what a benchmark runs.

    Args:
        packages: Distributions whose versions matter.
        threads: Compute threads that the benchmark sets.

    Returns:
        Plain JSON. What cannot be read is None, never 0.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cpu_flags": [flag for flag in _FLAGS if flag in (_first("/proc/cpuinfo", "flags") or "").split()],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "ram_bytes": _ram_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "load_average_at_start": load_average(),
    }


def commit() -> str | None:
    """The repository's commit, with "+changes" where files differ from it; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    return head and head + ("+changes" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else "")


def load_average() -> list[float]:
    """Runnable processes, averaged over 1, 5 and 15 minutes: neighbours show here."""
    return [round(value, 2) for value in os.getloadavg()]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _first(path: str, key: str) -> str | None:
    """The first value of a key in a "key : value" file of the kernel."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)


def _ram_bytes() -> int | None:
    total = _first("/proc/meminfo", "MemTotal")
    return int(total.split()[0]) * 1024 if total else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
