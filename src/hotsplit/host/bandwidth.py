"""How fast this host's processors read its memory: every node by itself, and all of them at once.

What all GPUs together can read of host memory is bounded by it. Each node is read by threads on its own CPUs, from pages
placed on it: where the kernel refuses to place them, that is told, and the figure is the host's as a whole. The best of
several passes counts, since everything that disturbs one makes it slower.

The largest of int64 words is sought: of numpy's reductions it is the one that computes least beside what it reads, so
that memory is what it waits for (on a host of two cores 27 GB/s with one thread and with two, where a sum got 13).

    >>> found = measure_memory((), available_bytes=2**30, passes=1)
    >>> found.total.value > 0, found.nodes
    (True, {})
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BankError
from hotsplit.host.asking import ROOT, Fact, known, read_text, unknown
from hotsplit.host.cpu import cpu_numbers, usable_cpus
from hotsplit.host.numa import NO_PLACEMENT, NumaNode, Placement
from hotsplit.host.pages import HostPages
from hotsplit.notices import Notice
from hotsplit.units import MIB, gib

SAMPLE_BYTES: Final = 1024 * MIB
"""Read per node and pass: more than any processor caches."""
PASSES: Final = 5
"""Of which the best one counts."""
_LEAST_BYTES: Final = 64 * MIB
"""A smaller sample would be read from caches."""
_SHARE: Final = 0.25
"""Of what is available, the most that all samples take together."""
_THREAD_BYTES: Final = 128 * MIB
"""Read per thread and pass at least, if there is room: with many threads a gibibyte is over too soon."""
_CHUNK_BYTES: Final = 16 * MIB
"""What a thread takes at a time: few enough that threads do not wait for Python's lock, nor for another at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRates:
    """Read rates of host memory, in bytes per second."""

    total: Fact[float]
    """All nodes at once, each by its own CPUs."""
    nodes: Mapping[int, Fact[float]] = field(default_factory=dict)
    """By node, alone; empty where the kernel tells of one node at most."""
    notices: tuple[Notice, ...] = ()
    """What must be said about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """Memory to read, and who reads it."""

    words: npt.NDArray[np.int64]
    """Its content, [num_words]."""
    cpus: tuple[int, ...]
    """Of the threads that read it, one each."""


def measure_memory(
    nodes: Sequence[NumaNode],
    *,
    available_bytes: int | None,
    root: Path = ROOT,
    passes: int = PASSES,
    sample_bytes: int = SAMPLE_BYTES,
) -> MemoryRates:
    """Measure.

    Args:
        nodes: Of this host.
        available_bytes: That this process may take; None is unknown, and then a small sample is read.
        root: Where /sys lies; another one only in tests.
        passes: How often each memory is read.
        sample_bytes: To read of each node at least, if there is room.

    Returns:
        The rates; unknown, with the reason, where there is too little memory to read.
    """
    places = _places(nodes, root=root)
    room = 4 * _LEAST_BYTES * len(places) if available_bytes is None else available_bytes
    wanted = max(sample_bytes, _THREAD_BYTES * max(len(cpus) for cpus in places.values()))
    size = min(wanted, int(room * _SHARE) // len(places))
    if size < _LEAST_BYTES:
        nothing: Fact[float] = unknown(f"{gib(room)} are available, too little to read more than caches hold")
        return MemoryRates(total=nothing, nodes=dict.fromkeys([one for one in places if one is not None], nothing))
    try:
        return _measured(places, size=size // 8 * 8, passes=passes)
    except BankError as error:
        return MemoryRates(total=unknown(str(error)))


def read_pass_s(samples: Sequence[tuple[npt.NDArray[np.int64], Sequence[int]]]) -> float:
    """Read memories at once, each by a thread on each of its CPUs.

    Args:
        samples: What to read, [num_words], int64, and on which CPUs.

    Returns:
        Seconds from the start of all threads to the end of the last.
    """
    counters = [iter(_chunks(words)) for words, _ in samples]
    locks = [threading.Lock() for _ in samples]
    ready, stop = threading.Barrier(sum(len(cpus) for _, cpus in samples)), threading.Event()
    times: list[float] = []

    def work(number: int, cpu: int) -> None:
        _stay_on(cpu)
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait()
            times.append(time.perf_counter())
            while not stop.is_set():
                with locks[number]:
                    chunk = next(counters[number], None)
                if chunk is None:
                    break
                chunk.max()
            times.append(time.perf_counter())

    threads = [
        threading.Thread(target=work, args=(number, cpu), name="hotsplit-read", daemon=True)
        for number, (_, cpus) in enumerate(samples)
        for cpu in cpus
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        # Whoever interrupts this gives the memory back next, which nobody may read then.
        stop.set()
        ready.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return max(max(times) - min(times), 1e-9)


def _measured(places: Mapping[int | None, tuple[int, ...]], *, size: int, passes: int) -> MemoryRates:
    notices: list[Notice] = []
    with ExitStack() as stack:
        samples: dict[int | None, _Sample] = {}
        for node, cpus in places.items():
            placement = NO_PLACEMENT if node is None else Placement(policy="preferred", node=node)
            pages = stack.enter_context(closing(HostPages(size, placement=placement, threads=len(cpus))))
            notices += [notice for notice in pages.notices if notice.name != "no-huge-pages"]
            raw = (ctypes.c_ubyte * size).from_address(pages.address)
            words = np.frombuffer(memoryview(raw), dtype=np.int64)
            samples[node] = _Sample(words=words, cpus=cpus)
        total = _best(list(samples.values()), passes=passes)
        how = f"{sum(len(one.cpus) for one in samples.values())} threads, best of {passes} passes over {gib(size)}"
        by_node = {
            node: known(_best([sample], passes=passes), f"{len(sample.cpus)} threads of its own")
            for node, sample in samples.items()
            if node is not None and len(samples) > 1
        }
        return MemoryRates(total=known(total, how), nodes=by_node, notices=tuple(notices))


def _best(samples: Sequence[_Sample], *, passes: int) -> float:
    seconds = min(read_pass_s([(one.words, one.cpus) for one in samples]) for _ in range(passes))
    return sum(one.words.nbytes for one in samples) / seconds


def _places(nodes: Sequence[NumaNode], *, root: Path) -> dict[int | None, tuple[int, ...]]:
    """CPUs that may be used by node; all of them under None where there are not two nodes to tell apart."""
    usable = usable_cpus()
    found: dict[int | None, tuple[int, ...]] = {}
    for node in nodes:
        text = read_text(root / f"sys/devices/system/node/node{node.number}/cpulist").value or ""
        cpus = tuple(sorted(set(cpu_numbers(text)) & set(usable)))
        if node.can_host and cpus:
            found[node.number] = cpus
    return found if len(found) > 1 else {None: usable}


def _chunks(words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    step = _CHUNK_BYTES // words.itemsize
    return [words[start : start + step] for start in range(0, len(words), step)]


def _stay_on(cpu: int) -> None:
    """Keep the calling thread on one CPU; where the system refuses, it is read from wherever the thread runs."""
    try:
        os.sched_setaffinity(threading.get_native_id(), {cpu})
    except OSError:
        return
