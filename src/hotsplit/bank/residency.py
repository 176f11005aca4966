"""Where the bytes of address ranges really lie, as the kernel tells it: what is effective, not what was asked for.

Read after loading, to check that hot rows are anonymous memory and cold rows are file pages, and whenever somebody
asks how much of either is in RAM. The source is /proc/self/smaps, which has one entry per mapping, and the kernel makes
one mapping of neighbours of a kind:

    range A   | hot rows | cold rows |           three ranges side by side: A is stitched, B and C are wholly hot
    range B                          | hot rows |
    range C                                     | hot rows |
    smaps     | anonymous | file     | anonymous               |

What *kind* a byte is, follows from the mapping it lies in: exact, by overlap. How much of it is *resident* is told per
mapping only: exact where every byte of the mapping belongs to the ranges (file parts always, since the bank file is
nobody else's), shared out by overlap where others' memory has been merged with it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from hotsplit.bank.ranges import StitchedRange
from hotsplit.errors import BankError

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ([r-][w-][x-])([ps]) [0-9a-f]+ \S+ (\d+)\b")
_FIELD = re.compile(r"(Rss|AnonHugePages):\s+(\d+) kB$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """Where the bytes of some address ranges lie; whole pages, so a little more than the rows."""

    hot_anonymous_bytes: int
    """Of the memory parts, in anonymous memory: where they belong."""
    hot_other_bytes: int
    """Of the memory parts, anywhere else."""
    cold_file_bytes: int
    """Of the file parts, in shared pages of a file: where they belong."""
    cold_anonymous_bytes: int
    """Of the file parts, anywhere else, so that they cannot be evicted to the file."""
    hot_resident_bytes: int
    """Of the memory parts, in RAM now."""
    cold_resident_bytes: int
    """Of the file parts, in RAM and mapped now; the page cache may hold more."""
    huge_bytes: int
    """Of the memory parts, in huge pages."""
    is_exact: bool
    """Whether the last three are counted; False where a mapping with others' memory in it had to be shared out."""

    @property
    def misplaced_bytes(self) -> int:
        """Bytes that do not lie where they belong."""
        return self.hot_other_bytes + self.cold_anonymous_bytes


@dataclass(kw_only=True, slots=True)
class _Mapping:
    """One entry of smaps."""

    start: int
    end: int
    is_anonymous: bool
    is_shared_file: bool
    fields: dict[str, int] = field(default_factory=dict)

    def part(self, name: str, *, num_bytes: int) -> int:
        """What of a field falls to so many of the mapping's bytes; never more than them."""
        return self.fields.get(name, 0) * num_bytes // (self.end - self.start)


class _Cover:
    """Disjoint segments of addresses, asked for their overlap with others."""

    def __init__(self, segments: Iterable[tuple[int, int]]) -> None:
        self._segments = sorted((start, size) for start, size in segments if size)
        self._starts = [start for start, _ in self._segments]
        self._sizes_before = list(accumulate((size for _, size in self._segments), initial=0))
        self.num_bytes = self._sizes_before[-1]

    def overlap(self, mapping: _Mapping) -> int:
        return self._below(mapping.end) - self._below(mapping.start)

    def _below(self, address: int) -> int:
        """Bytes of the segments that lie below an address."""
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return 0
        start, size = self._segments[i]
        return self._sizes_before[i] + min(address - start, size)


def read_residency(ranges: Sequence[StitchedRange], *, root: Path = Path("/")) -> Residency:
    """Ask the kernel where the bytes of ranges lie.

    Args:
        ranges: Open ones of this process.
        root: Where /proc lies; another one only in tests.

    Raises:
        BankError: smaps cannot be read or has a form that is not known, or a range is not mapped.
    """
    hot = _Cover((one.edge - one.fast_bytes, one.fast_bytes) for one in ranges)
    cold = _Cover((one.edge, one.slow_bytes) for one in ranges)
    hot_parts, cold_parts = [], []
    is_exact = True
    for mapping in _read_smaps(root / "proc/self/smaps"):
        hot_bytes, cold_bytes = hot.overlap(mapping), cold.overlap(mapping)
        if hot_bytes:
            hot_parts.append((mapping, hot_bytes))
        if cold_bytes:
            cold_parts.append((mapping, cold_bytes))
        largest = max(hot_bytes, cold_bytes)
        is_exact &= not largest or largest == mapping.end - mapping.start
    _require_mapped(hot, hot_parts)
    _require_mapped(cold, cold_parts)
    hot_anonymous = sum(num_bytes for mapping, num_bytes in hot_parts if mapping.is_anonymous)
    cold_file = sum(num_bytes for mapping, num_bytes in cold_parts if mapping.is_shared_file)
    return Residency(
        hot_anonymous_bytes=hot_anonymous,
        hot_other_bytes=hot.num_bytes - hot_anonymous,
        cold_file_bytes=cold_file,
        cold_anonymous_bytes=cold.num_bytes - cold_file,
        hot_resident_bytes=sum(mapping.part("Rss", num_bytes=size) for mapping, size in hot_parts),
        cold_resident_bytes=sum(mapping.part("Rss", num_bytes=size) for mapping, size in cold_parts),
        huge_bytes=sum(mapping.part("AnonHugePages", num_bytes=size) for mapping, size in hot_parts),
        is_exact=is_exact,
    )


def _require_mapped(cover: _Cover, parts: Sequence[tuple[_Mapping, int]]) -> None:
    mapped = sum(num_bytes for _, num_bytes in parts)
    if mapped != cover.num_bytes:
        raise BankError("address ranges", got=f"{mapped} bytes mapped", wanted=f"{cover.num_bytes}, all of them open")


def _read_smaps(path: Path) -> Iterator[_Mapping]:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise BankError(f"cannot read {path}", got=error.strerror) from error
    mapping: _Mapping | None = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            if mapping:
                yield mapping
            mapping = _mapping(head)
        elif (found := _FIELD.match(line)) and mapping:
            mapping.fields[found[1]] = int(found[2]) * 1024
    if mapping is None:
        raise BankError(f"cannot read {path}", got="no mapping", wanted="entries as Linux writes them")
    yield mapping


def _mapping(head: re.Match[str]) -> _Mapping:
    """A private mapping of a file counts as neither: what is written to it becomes anonymous, a page at a time."""
    is_file = int(head[5]) > 0  # an inode; memory that processes share has one too
    return _Mapping(
        start=int(head[1], 16),
        end=int(head[2], 16),
        is_anonymous=not is_file,
        is_shared_file=is_file and head[4] == "s",
    )
