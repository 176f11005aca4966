"""A memory limit for one process, its page cache included: a memory control group, version 1 or 2.

With it the race beyond memory can be run with a model that is smaller than this machine's memory. The limit holds for
all engines alike, and covers what a process keeps for itself as well as the pages of the files that it reads: pages
that another process has read before would be free of charge, so files are dropped from the cache first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(num_bytes: int | None) -> Iterator[Path | None]:
    """A group whose processes may hold so many bytes; a process enters by writing its id to cgroup.procs there.

    Args:
        num_bytes: The limit; None for no group at all.

    Yields:
        The group's folder, or None.

    Raises:
        SystemExit: No group can be made here.
    """
    if num_bytes is None:
        yield None
        return
    folder, limits = _place()
    try:
        folder.mkdir()
        for name in limits:
            (folder / name).write_text(str(num_bytes), encoding="ascii")
    except OSError as error:
        raise SystemExit(
            f"{folder}: no memory control group can be made ({error}); run as root, or start the whole benchmark with "
            f"`systemd-run --user --scope -p MemoryMax={num_bytes} -p MemorySwapMax=0` and without --memory-limit"
        ) from error
    try:
        yield folder
    finally:
        _remove(folder)


def _place() -> tuple[Path, tuple[str, ...]]:
    """Where a group goes, and the files that take its limit."""
    name = f"hotsplit-race-{os.getpid()}-{time.monotonic_ns()}"
    if (_ROOT / "memory" / "cgroup.procs").exists():
        return _ROOT / "memory" / name, ("memory.limit_in_bytes",)
    return _ROOT / name, ("memory.max",)


def _remove(folder: Path) -> None:
    """A group goes once its last process has; that may take a moment."""
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
