"""What a process costs, read from the kernel: memory, bytes from the disk, and how to empty or fill the page cache."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """This process's resident memory, bytes."""

    peak: int
    """The most that was ever resident, file pages included (VmHWM)."""
    resident: int
    """Resident now, file pages included (VmRSS)."""
    anonymous: int
    """Resident now and not backed by a file: what the kernel cannot take back (RssAnon)."""


def memory() -> Memory:
    """Read /proc/self/status."""
    fields = _fields("/proc/self/status")
    peak, resident, anonymous = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon"))
    return Memory(peak=peak, resident=resident, anonymous=anonymous)


def bytes_from_disk() -> int:
    """Bytes that this process has made the storage deliver so far; what the page cache gives is not in it."""
    return int(_fields("/proc/self/io")["read_bytes"])


class AnonymousPeak:
    """Watches anonymous memory from a thread while a block runs; it costs time, so nothing is timed meanwhile."""

    def __init__(self, *, every_s: float = 0.002) -> None:
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0
        """Most anonymous bytes seen."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.peak = max(self.peak, memory().anonymous)


def drop_pages(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the files' cached pages; pages that are mapped somewhere or not yet written stay.

    Args:
        files: Any files.
    """
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def warm_pages(files: Iterable[Path]) -> None:
    """Read the files once, so that all of them lie in the page cache.

    Args:
        files: Any files.
    """
    buffer = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(files: Iterable[Path]) -> float | None:
    """Share of the files' bytes that a read finds without waiting, from a sample of pages of each file.

    Args:
        files: Any files; None comes back for none.
    """
    dice = random.Random(0)
    found = [_is_cached(path, dice.randrange(path.stat().st_size)) for path in files for _ in range(64)]
    return round(sum(found) / len(found), 4) if found else None


def disk_rate(path: Path, *, row_bytes: int, num_rows: int = 48) -> float | None:
    """Bytes per second of direct reads of one row after the other, at random places: what a cold row waits for.

    Args:
        path: A file of many rows.
        row_bytes: Length of one read.
        num_rows: Reads.

    Returns:
        None where the file system has no direct reads.
    """
    length = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    dice = random.Random(time.time_ns())
    places = [dice.randrange(max(path.stat().st_size // length, 1)) * length for _ in range(num_rows)]
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
            start = time.perf_counter()
            total: float = sum(os.preadv(handle, [buffer], place) for place in places)
            return total / (time.perf_counter() - start)
    except OSError:
        return None
    finally:
        os.close(handle)


def read_ahead_bytes(path: Path) -> int | None:
    """How much the kernel reads around a page fault on the file's disk: it decides what a plain mapping costs.

    Args:
        path: A file.
    """
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (disk, disk / ".."):  # a partition has no queue of its own
        try:
            return int((place / "queue" / "read_ahead_kb").read_text(encoding="ascii")) * 1024
        except OSError:
            continue
    return None


def _is_cached(path: Path, offset: int) -> bool:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _fields(path: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in Path(path).read_text(encoding="ascii").splitlines())
    return {name: value.strip() for name, _, value in pairs}
