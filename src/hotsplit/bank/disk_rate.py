"""How fast a disk gives experts: whole rows at random places of a model's files, read directly, by several threads.

What streams experts from files waits for this rate. Reads go past the page cache (direct.py), so that what was read before
does not pass for a disk; on a file system without direct reads it does, and that is told. No place is read twice.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.bank.direct import DirectReader
from hotsplit.errors import BankError
from hotsplit.host.asking import Fact, known, unknown
from hotsplit.host.cpu import usable_cpus
from hotsplit.notices import Notice
from hotsplit.units import MIB, gib

ROW_BYTES: Final = 8 * MIB
"""About one expert, where nobody says how large they are."""
_LEAST_BYTES: Final = 64 * MIB
"""Fewer say nothing of a disk."""
_MOST_ROWS: Final = 100_000
_MOST_FILES: Final = 1000
_MOST_THREADS: Final = 8
"""Readers at once: one leaves a fast disk idle between two reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRate:
    """What was measured."""

    rate: Fact[float]
    """Bytes per second."""
    notices: tuple[Notice, ...] = ()
    """What must be said about it."""


def measure_disk(folder: Path, *, row_bytes: int = ROW_BYTES, seconds: float = 3.0, seed: int = 0) -> DiskRate:
    """Read rows at random places of a folder's files.

    Args:
        folder: Of a model: its safetensors files are read, or where it has none, all files right in it.
        row_bytes: Of one read.
        seconds: To read for; less where the files are read to their end before.
        seed: Of the places.

    Returns:
        The rate; unknown, with the reason, where there is too little to read.
    """
    try:
        files = model_files(folder)
        sizes = [path.stat().st_size for path in files]
    except OSError as error:
        return DiskRate(rate=unknown(f"{folder}: {(error.strerror or str(error)).lower()}"))
    places = _places(sizes, row_bytes=row_bytes, seed=seed)
    if len(places) * row_bytes < _LEAST_BYTES:
        found = f"{gib(sum(sizes))} in {len(files)} files of {folder}"
        reason = f"{found}: fewer than {gib(_LEAST_BYTES)} in rows of {gib(row_bytes)} say nothing of a disk"
        return DiskRate(rate=unknown(reason))
    try:
        num_bytes, took_s = _read(files, places, row_bytes=row_bytes, seconds=seconds)
    except BankError as error:
        return DiskRate(rate=unknown(str(error)))
    how = f"{gib(num_bytes)} in rows of {gib(row_bytes)} at random places of {folder}, {_threads(places)} threads"
    return DiskRate(rate=known(num_bytes / took_s, how), notices=_doubts(files[0]))


def model_files(folder: Path) -> list[Path]:
    """The files to read, the largest first.

    Args:
        folder: Of a model, or any.

    Raises:
        OSError: It cannot be listed.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    shards = [path for path in files if path.suffix == ".safetensors"]
    return sorted(shards or files, key=lambda path: (-path.stat().st_size, path.name))[:_MOST_FILES]


def reads_directly(path: Path) -> bool:
    """Whether a file can be read past the page cache.

    Args:
        path: Of the file.
    """
    with contextlib.suppress(OSError), mmap.mmap(-1, mmap.PAGESIZE) as block:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(handle, [block], 0) >= 0
        finally:
            os.close(handle)
    return False


def _doubts(path: Path) -> tuple[Notice, ...]:
    if reads_directly(path):
        return ()
    text = f"{path.parent}: no direct reads there, so its rate may be that of the page cache and not of the disk"
    return (Notice(name="disk-through-cache", text=text, strict=False),)


def _places(sizes: Sequence[int], *, row_bytes: int, seed: int) -> list[tuple[int, int]]:
    """File and offset of every read, in random order; rows that do not overlap."""
    counts = [size // row_bytes for size in sizes]
    chosen = random.Random(seed).sample(range(sum(counts)), min(sum(counts), _MOST_ROWS))
    starts = list(itertools.accumulate(counts, initial=0))[:-1]
    places = []
    for number in chosen:
        file = bisect.bisect_right(starts, number) - 1
        places.append((file, (number - starts[file]) * row_bytes))
    return places


def _read(
    files: Sequence[Path], places: Sequence[tuple[int, int]], *, row_bytes: int, seconds: float
) -> tuple[int, float]:
    """Bytes that were read, and seconds from the first thread's start to the last one's end."""
    queue, lock, stop = iter(places), threading.Lock(), threading.Event()

    def work() -> tuple[int, float, float]:
        with closing(DirectReader(files)) as reader:
            row, done = memoryview(bytearray(row_bytes)), 0
            start = time.perf_counter()
            for file, offset in _taken(queue, lock):
                reader.read_into(row, file=file, offset=offset)
                done += row_bytes
                if stop.is_set() or time.perf_counter() - start > seconds:
                    break
            return done, start, time.perf_counter()

    with ThreadPoolExecutor(_threads(places), "hotsplit-disk") as pool:
        futures = [pool.submit(work) for _ in range(_threads(places))]
        try:
            found = [future.result() for future in futures]
        finally:
            stop.set()  # whoever interrupts does not wait for the rest
    ends = max(end for _, _, end in found), min(start for _, start, _ in found)
    return sum(done for done, _, _ in found), max(ends[0] - ends[1], 1e-9)


def _taken(queue: Iterator[tuple[int, int]], lock: threading.Lock) -> Iterator[tuple[int, int]]:
    while True:
        with lock:
            place = next(queue, None)
        if place is None:
            return
        yield place


def _threads(places: Sequence[tuple[int, int]]) -> int:
    return max(1, min(2 * len(usable_cpus()), _MOST_THREADS, len(places)))
