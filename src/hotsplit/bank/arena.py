"""The memory behind hot rows on a CPU: private, of exactly the size that was charged, near its processors, kept in RAM.

    map      anonymous and private (shared memory would count as a file), on the edge of a huge page
    advise   huge pages for every whole one inside: fewer page table entries between the compute threads and the rows
    place    mbind to a NUMA node, before the first touch
    lock     mlock, once the rows are there, where there is swap and the limit allows it

None of the last three is ever a failure (but HOTSPLIT_NUMA_POLICY=bind, which asks for that); what was asked for in vain
is a notice.

    >>> arena = Arena(5000)
    >>> arena.content.shape, arena.content.data_ptr() % HUGE_PAGE_BYTES
    (torch.Size([5000]), 0)
"""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import torch

from hotsplit.errors import BankError
from hotsplit.host.libc import checked
from hotsplit.host.memory import swap_bytes
from hotsplit.host.numa import NO_PLACEMENT, Placement, bind_pages
from hotsplit.host.page_nodes import check_placement, page_nodes
from hotsplit.host.pages import HUGE_PAGE_BYTES
from hotsplit.notices import Notice
from hotsplit.units import gib


class Arena:
    """One piece of memory, all zero at first; the kernel rounds it up to a page.

    Args:
        num_bytes: Its size.
        placement: Where its pages shall lie.

    Raises:
        BankError: Memory cannot be had, or not where it must be.
    """

    def __init__(self, num_bytes: int, *, placement: Placement = NO_PLACEMENT) -> None:
        self.num_bytes = num_bytes
        """Its size."""
        self.notices: list[Notice] = []
        """What was asked of the kernel in vain."""
        self._placement = placement
        self._memory = _map(num_bytes)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._lead = -whole.data_ptr() % HUGE_PAGE_BYTES
        self.content = whole[self._lead : self._lead + num_bytes]
        """Its bytes, [num_bytes], uint8."""
        self._advise()
        if num_bytes:
            pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self.notices += bind_pages(self.content.data_ptr(), pages, placement=placement)

    def part(self, first: int, num_bytes: int) -> memoryview:
        """Some of its bytes, to be written to.

        Args:
            first: Where they start.
            num_bytes: How many.
        """
        return memoryview(self._memory)[self._lead + first : self._lead + first + num_bytes]

    def settle(self, *, root: Path = Path("/")) -> None:
        """Once the rows are there: lock them in RAM, and look where they lie.

        Args:
            root: Where /proc lies; another one only in tests.

        Raises:
            BankError: They lie elsewhere than HOTSPLIT_NUMA_POLICY=bind demands.
        """
        if not self.num_bytes:
            return
        self.notices += self._lock(swap=swap_bytes(root))
        if self._placement.node is not None and not self.notices:
            # One page in a huge one: they are moved and placed together.
            found = page_nodes(self.content.data_ptr(), self.num_bytes, step_bytes=HUGE_PAGE_BYTES)
            self.notices += check_placement(found, placement=self._placement, what="hot rows")

    def close(self) -> None:
        """Forget the memory; views that a caller still holds keep it until they go."""
        self._memory, self._lead, self.num_bytes = _map(0), 0, 0
        self.content = torch.empty(0, dtype=torch.uint8)

    def _advise(self) -> None:
        whole = self.num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # a huge page past the end would be paid for
        if not whole:
            return
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._lead, whole)
        except OSError as error:
            text = f"no huge pages for hot rows ({error.strerror}); using small ones instead"
            self.notices.append(Notice(name="no-huge-pages", text=text, strict=False))

    def _lock(self, *, swap: int | None) -> list[Notice]:
        """Without swap anonymous memory stays where it is, and there is nothing to lock."""
        if swap == 0:
            return []
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        try:
            checked("mlock", self.content.data_ptr(), self.num_bytes)
        except OSError as error:
            limited = "" if limit == resource.RLIM_INFINITY else f", limit {gib(limit)}: raise it with ulimit -l"
            text = f"hot rows are not locked in memory and may be swapped out ({error.strerror}{limited})"
            return [Notice(name="not-locked", text=text, strict=False)]
        return []


def _map(num_bytes: int) -> mmap.mmap:
    """With room to begin on the edge of a huge page; what is never touched takes no memory."""
    size = max(num_bytes, 1) + HUGE_PAGE_BYTES - mmap.PAGESIZE
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        wanted = f"{num_bytes} bytes"
        raise BankError("the hot bank", got=str(error), wanted=wanted, do="lower HOTSPLIT_HOT_GIB") from error
