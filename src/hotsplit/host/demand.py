"""Whether this machine can hold what a run needs: asked, and refused, before anything is allocated.

Stands before the banks: `bytes per item -> what the allocator really takes -> limits of this host -> go, or one error`.
What an allocator takes may be far more than it is asked for: one that rounds every request up to a power of two turns
145 GiB into 196. Nothing is ever made smaller in silence; the error names a number that fits.

Worked example, three banks on a host with 160 GiB:

    bank        requested     exact     power-of-two
    a             2.25 GiB    2.25           4
    b            47.7        47.7           64
    c            94.6        94.6          128
    total       144.55      144.55: go     196: 36 too many

    >>> demand = HostDemand(items={"a": 2304 * 2**20, "b": 48845 * 2**20, "c": 96870 * 2**20})
    >>> [demand.total_bytes(allocator) // 2**30 for allocator in ("exact", "power-of-two")]
    [144, 196]
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.errors import BankError, BudgetError
from hotsplit.host.memory import MemoryLimits, memory_limits
from hotsplit.notices import Notice
from hotsplit.units import GIB, gib

HOT_ROWS: Final = "hot rows"
"""Item that HOTSPLIT_HOT_GIB makes smaller, where the hot rows lie in host memory."""
COLD_ROWS: Final = "cold rows"
"""Item that HOTSPLIT_HOT_GIB makes smaller by growing, where only the cold rows lie in host memory."""
RESERVE: Final = "reserve"
"""Item that is HOTSPLIT_VRAM_RESERVE_GIB."""

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are memory."""


def _next_power_of_two(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


ALLOCATORS: Mapping[str, Callable[[int], int]] = {"exact": int, "power-of-two": _next_power_of_two}
"""By name: bytes that one request really takes. Each grows with the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDemand:
    """What one rank asks of host memory.

    Raises:
        BudgetError: An item is negative.
    """

    items: Mapping[str, int]
    """Bytes by what they are for ("hot rows", "dense weights", "KV cache", "reserve"), each one request."""

    def __post_init__(self) -> None:
        for name, num_bytes in self.items.items():
            if num_bytes < 0:
                raise BudgetError(f"host memory, {name}", got=f"{num_bytes} bytes", wanted="bytes >= 0")

    @property
    def requested_bytes(self) -> int:
        """What is asked for."""
        return sum(self.items.values())

    def real_bytes(self, allocator: str) -> dict[str, int]:
        """What every item really takes.

        Args:
            allocator: A name in ALLOCATORS.

        Raises:
            BudgetError: No such allocator.
        """
        taken = _allocator(allocator)
        return {name: taken(num_bytes) for name, num_bytes in self.items.items()}

    def total_bytes(self, allocator: str) -> int:
        """What all items really take.

        Args:
            allocator: A name in ALLOCATORS.
        """
        return sum(self.real_bytes(allocator).values())

    def describe(self, allocator: str) -> str:
        """Requested and real bytes, one line for the log; real ones only where they differ.

        Args:
            allocator: A name in ALLOCATORS.

        >>> HostDemand(items={"hot rows": 3 * 2**29, "reserve": 2**31}).describe("exact")
        'hot rows 1.500 GiB, reserve 2.000 GiB: 3.500 GiB'
        """
        parts = ", ".join(
            f"{name} {gib(num_bytes)}" for name, num_bytes in self.real_bytes(allocator).items() if num_bytes
        )
        requested, real = self.requested_bytes, self.total_bytes(allocator)
        more = f", {gib(requested)} of them requested ({allocator} allocator)" if real != requested else ""
        return f"{parts or 'nothing'}: {gib(real)}{more}"


def _allocator(name: str) -> Callable[[int], int]:
    if name not in ALLOCATORS:
        raise BudgetError("host allocator", got=repr(name), wanted=f"one of {', '.join(ALLOCATORS)}")
    return ALLOCATORS[name]


def require_host(
    demand: HostDemand, *, allocator: str = "exact", limits: MemoryLimits | None = None, ranks: int = 1
) -> None:
    """Refuse what this host cannot hold, before anything is allocated.

    Args:
        demand: Of one rank.
        allocator: How requests are rounded, a name in ALLOCATORS.
        limits: Of this host; None to read them.
        ranks: Ranks on this host, each with the same demand.

    Raises:
        BudgetError: It does not fit. Names requested and real bytes, what there is and which limit says so, the excess
            and a cure; the numbers are attributes. Where no limit can be read, nothing is refused.
    """
    limits = limits or memory_limits()
    real = demand.total_bytes(allocator) * ranks
    available = limits.available_bytes
    if available is None or real <= available:
        return
    raise BudgetError(
        "the run exceeds host memory",
        got=demand.describe(allocator) + (f", on each of {ranks} ranks: {gib(real)}" if ranks > 1 else ""),
        wanted=f"at most {limits}: {gib(real - available)} too many",
        do=_cure(demand, allocator=allocator, room=available // ranks),
        requested_bytes=demand.requested_bytes * ranks,
        real_bytes=real,
        available_bytes=available,
        excess_bytes=real - available,
    )


def _cure(demand: HostDemand, *, allocator: str, room: int) -> str:
    """The next step for whoever has `room` bytes per rank and wants more."""
    if demand.requested_bytes <= room:
        return f"allocate exact sizes, without rounding: {gib(demand.requested_bytes)} per rank fit"
    has_hot, has_cold = bool(demand.items.get(HOT_ROWS)), bool(demand.items.get(COLD_ROWS))
    if has_hot and not has_cold:
        largest = _largest(HOT_ROWS, demand=demand, allocator=allocator, room=room)
        hundredths = math.floor(largest / GIB * 100)
        if hundredths > 0:
            return f"set HOTSPLIT_HOT_GIB={hundredths / 100:g} or less"
    if has_cold and not has_hot:
        largest = _largest(COLD_ROWS, demand=demand, allocator=allocator, room=room)
        if largest >= 0:
            more = math.ceil((demand.items[COLD_ROWS] - largest) / GIB * 100) / 100
            return f"raise HOTSPLIT_HOT_GIB by {more:g} or more, so that fewer experts are cold"
    others = sorted((name for name in demand.items if demand.items[name]), key=lambda name: -demand.items[name])
    excess = demand.total_bytes(allocator) - room
    reserve = " (HOTSPLIT_VRAM_RESERVE_GIB)" if RESERVE in others else ""
    return f"take {gib(excess)} less per rank of {', '.join(others)}{reserve}, or a host with more memory"


def _largest(item: str, *, demand: HostDemand, allocator: str, room: int) -> int:
    """The largest request for an item with which the demand fits; negative where even none of it would not."""
    taken = _allocator(allocator)
    left = room - sum(num_bytes for name, num_bytes in demand.real_bytes(allocator).items() if name != item)
    return bisect.bisect_right(range(demand.items[item] + 1), left, key=taken) - 1


def require_disk(folder: Path, *, needed: int, ranks: int = 1, root: Path = Path("/")) -> list[Notice]:
    """Refuse a folder that cannot hold the bank files, before one is made.

    Args:
        folder: Where they will be made; it need not be there yet.
        needed: Bytes of one rank's bank file.
        ranks: Ranks on this host, each with a file of its own.
        root: Where /proc lies; another one only in tests.

    Returns:
        A notice where files of that folder are memory.

    Raises:
        BankError: No folder can be made there, or it cannot be written.
        BudgetError: Its file system has too little room.
    """
    place = _nearest(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise BankError(
            f"bank folder {folder}",
            got=f"{place}, which is {'not writable' if place.is_dir() else 'no folder'}",
            wanted="a folder that can be written",
            do="set HOTSPLIT_BANK_DIR to another one",
            folder=folder,
        )
    free = free_disk_bytes(place)
    if needed * ranks > free:
        raise BudgetError(
            f"bank folder {folder}",
            got=f"{gib(free)} free",
            wanted=f"{gib(needed * ranks)} for the cold rows of {ranks} rank{'s' if ranks > 1 else ''}",
            do="set HOTSPLIT_BANK_DIR to a folder on a larger disk, or raise HOTSPLIT_HOT_GIB",
            folder=folder,
            needed_bytes=needed * ranks,
            free_bytes=free,
        )
    kind = _file_system(place, root=root)
    if needed and kind in _IN_MEMORY:
        text = f"bank folder {folder} lies in memory ({kind}), from which cold rows cannot be evicted"
        return [Notice(name="bank-in-memory", text=f"{text}: set HOTSPLIT_BANK_DIR to a folder on a disk")]
    return []


def free_disk_bytes(folder: Path) -> int:
    """What a user without privileges may still write to the file system of a folder, in bytes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _nearest(folder: Path) -> Path:
    """The folder, or what is there of the path to it."""
    real = Path(os.path.realpath(folder))
    return next(path for path in (real, *real.parents) if path.exists())


def _file_system(place: Path, *, root: Path) -> str | None:
    """Its type ("ext4", "tmpfs"); None where it cannot be read."""
    try:
        lines = (root / "proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    mounts = [(Path(fields[1].replace(r"\040", " ")), fields[2]) for fields in map(str.split, lines) if len(fields) > 2]
    # Of mounts on the same folder the last one counts: it lies over the others.
    above = [(len(path.parts), order, kind) for order, (path, kind) in enumerate(mounts) if place.is_relative_to(path)]
    return max(above)[2] if above else None
