"""Huge pages: whether the kernel makes them by itself, on request or never, and the pools that were set aside.

Cold rows on huge pages need fewer entries of every table on the way. The mode must be "always" or "madvise" for hotsplit
to get them; a pool (hugetlb) is memory that nothing else can use, so one that lies idle is told.

    >>> selected("always [madvise] never"), selected("garbage")
    ('madvise', None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hotsplit.host.asking import ROOT, Fact, fact, read_number, read_text, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class HugePool:
    """Pages of one size that were set aside."""

    page_bytes: int
    """Of a page."""
    total: Fact[int]
    """Pages in the pool."""
    free: Fact[int]
    """Of them, unused."""
    reserved: Fact[int]
    """Of the unused ones, those that a program was promised and has not touched yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HugePageFacts:
    """Huge pages of this host."""

    mode: Fact[str]
    """Transparent ones: "always", "madvise" or "never"."""
    pools: tuple[HugePool, ...]
    """By page size, the smallest first; none where the kernel has no pools or hides them."""

    @property
    def idle_bytes(self) -> int | None:
        """Set aside, unused and promised to nobody; None where it is not known of a pool, or of none."""
        # A kernel that tells of no promises has made none.
        free = [(pool.page_bytes, pool.free.value, pool.reserved.value or 0) for pool in self.pools]
        pages = [num_bytes * max(count - promised, 0) for num_bytes, count, promised in free if count is not None]
        return sum(pages) if pages and len(pages) == len(free) else None


def read_huge_pages(root: Path = ROOT) -> HugePageFacts:
    """Read mode and pools.

    Args:
        root: Where /sys lies; another one only in tests.
    """
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    reason = text.reason or f"{text.source} says {shortened(text.value or '')}"
    folders = {
        int(found[1]) * 1024: folder
        for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")
        if (found := re.fullmatch(r"hugepages-([0-9]{1,12})kB", folder.name))
    }
    return HugePageFacts(
        mode=fact(selected(text.value or ""), source=text.source, reason=reason),
        pools=tuple(
            HugePool(
                page_bytes=size,
                total=read_number(folders[size] / "nr_hugepages"),
                free=read_number(folders[size] / "free_hugepages"),
                reserved=read_number(folders[size] / "resv_hugepages"),
            )
            for size in sorted(folders)
        ),
    )


def selected(text: str) -> str | None:
    """The word in brackets, by which the kernel marks a choice.

    Args:
        text: "always [madvise] never".
    """
    found = re.search(r"\[([a-z]+)\]", text)
    return found[1] if found else None
