"""Host memory of an exact size, filled in parallel, on the right NUMA node, and readable by a GPU where it is registered.

What cold rows lie in where a driver cannot put them behind a stitched range, and what stitched host memory is measured
against. Allocators of pinned memory round a request up to a power of two and fill it in one thread; here a request
takes its own bytes in whole pages:

    map        addresses for exactly that much, on the edge of a huge page
    place      mbind, before the first touch
    populate   every page, in threads, so that what does not fit fails here and not at a step
    register   the driver locks the pages and reads them over the link; fails clearly where locking is limited

Children of this process do not inherit these pages: a fork would have to copy every one that a driver has locked.

    >>> pages = HostPages(3 * mmap.PAGESIZE - 5)
    >>> pages.num_bytes // mmap.PAGESIZE, pages.where().absent_bytes, pages.device_address
    (3, 0, None)
    >>> pages.close()
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from hotsplit.errors import BankError
from hotsplit.host.libc import MADV_POPULATE_WRITE, MAP_NORESERVE, READ_WRITE, checked
from hotsplit.host.numa import NO_PLACEMENT, Placement, bind_pages
from hotsplit.host.page_nodes import PageNodes, page_nodes
from hotsplit.notices import Notice
from hotsplit.units import MIB, gib

HUGE_PAGE_BYTES: Final = mmap.PAGESIZE * mmap.PAGESIZE // 8
"""A huge page: what one page of 8-byte page table entries covers; 2 MiB where small pages have 4 KiB."""
_CHUNK_BYTES: Final = max(64 * MIB, HUGE_PAGE_BYTES)
"""What one thread populates at a time."""
_MOST_THREADS: Final = 16
"""More do not fill memory faster: it is the memory that is busy then."""


class Registrar(Protocol):
    """What a driver does for host memory; each method raises BankError and then has changed nothing."""

    def register(self, address: int, *, num_bytes: int) -> int:
        """Lock pages and return their address on the device."""

    def unregister(self, address: int) -> None:
        """Undo register()."""


class HostPages:
    """One piece of host memory, all zero at first.

    NOTE: nothing may touch it after close(): the addresses belong to nobody then. A piece that is dropped without
    close() stays, so memory in use is never lost.

    Args:
        num_bytes: Its size; whole pages are taken.
        placement: Where the pages shall lie.
        huge_pages: Ask the kernel for huge ones.
        threads: How many fill it; None for one per processor, 16 at most.

    Raises:
        BankError: Memory does not suffice, or cannot be placed where it must be; nothing is held then.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        placement: Placement = NO_PLACEMENT,
        huge_pages: bool = True,
        threads: int | None = None,
    ) -> None:
        if num_bytes < 1:
            raise BankError("host memory", got=f"{num_bytes} bytes", wanted="1 or more")
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        """Bytes taken, whole pages."""
        self.placement = placement
        """Where the pages shall lie."""
        self.notices: list[Notice] = []
        """What was asked of the kernel in vain."""
        self.device_address: int | None = None
        """Where a GPU reads it; None unless it is registered."""
        self._registrar: Registrar | None = None
        self._address = 0
        try:
            self._fill(huge_pages=huge_pages, threads=threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS))
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        """Of the first byte, on a page.

        Raises:
            BankError: It is closed.
        """
        if not self._address:
            raise BankError("host memory", got="a closed piece")
        return self._address

    def register(self, driver: Registrar) -> int:
        """Let a driver lock the pages, so that its device reads them in place.

        Args:
            driver: Its; the device's context is current in this thread.

        Returns:
            The address on the device.

        Raises:
            BankError: It is registered already, or the driver refuses; what was locked before stays so.
        """
        if self.device_address is not None:
            raise BankError("host memory", got="a piece that is registered", wanted="register() once")
        try:
            self.device_address = driver.register(self.address, num_bytes=self.num_bytes)
        except BankError as error:
            raise _cannot_lock(error, num_bytes=self.num_bytes) from error
        self._registrar = driver
        return self.device_address

    def where(self, *, step_bytes: int = mmap.PAGESIZE) -> PageNodes:
        """Ask the kernel where the pages lie.

        Args:
            step_bytes: One page in so many bytes.
        """
        return page_nodes(self.address, self.num_bytes, step_bytes=step_bytes)

    def close(self) -> None:
        """Unlock the pages, then give them back; twice is harmless. No work of a device may need them any more.

        Raises:
            BankError: The driver or the kernel refuses; the rest is held until another close().
        """
        if self._registrar is not None:
            self._registrar.unregister(self.address)
            self._registrar, self.device_address = None, None
        if self._address:
            try:
                checked("munmap", self._address, self.num_bytes)
            except OSError as error:
                raise BankError("host memory cannot be given back", got=error.strerror) from error
            self._address = 0

    def _fill(self, *, huge_pages: bool, threads: int) -> None:
        try:
            self._address = _map_on_edge(self.num_bytes, edge=HUGE_PAGE_BYTES if huge_pages else mmap.PAGESIZE)
            checked("madvise", self._address, self.num_bytes, mmap.MADV_DONTFORK)
            if huge_pages:
                self.notices += _advise_huge_pages(self._address, num_bytes=self.num_bytes)
            self.notices += bind_pages(self._address, self.num_bytes, placement=self.placement)
            populate(self._address, self.num_bytes, threads=threads)
        except OSError as error:
            node = self.placement.node
            raise BankError(
                "host memory for cold rows",
                got=f"{error.filename}: {error.strerror}",
                wanted=f"{gib(self.num_bytes)}{'' if node is None else f', {self.placement}'}",
                do="raise HOTSPLIT_HOT_GIB, so that fewer experts are cold, or take a host with more memory",
            ) from error


def populate(address: int, num_bytes: int, *, threads: int) -> None:
    """Give every page of fresh memory its place, in threads.

    Args:
        address: On a page.
        num_bytes: Of the memory.
        threads: How many.

    Raises:
        OSError: The kernel has no memory left.
    """
    chunks = [(address + start, min(_CHUNK_BYTES, num_bytes - start)) for start in range(0, num_bytes, _CHUNK_BYTES)]
    with ThreadPoolExecutor(threads, thread_name_prefix="hotsplit-populate") as pool:
        for _ in pool.map(_populate_chunk, *zip(*chunks, strict=True)):
            pass  # the first failure is raised here, and what was not begun is given up


def _populate_chunk(address: int, num_bytes: int) -> None:
    try:
        checked("madvise", address, num_bytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel older than 5.14: a store to every page does the same, with Python's lock held.
        memory = memoryview((ctypes.c_ubyte * num_bytes).from_address(address))
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0


def _map_on_edge(num_bytes: int, *, edge: int) -> int:
    """Map fresh memory whose first byte lies on an edge; addresses on both sides are given back."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # populated at once, so nothing need be set aside
    room = num_bytes + edge - mmap.PAGESIZE
    start = checked("mmap", 0, room, READ_WRITE, flags, -1, 0)
    address = -(-start // edge) * edge
    for piece, end in ((start, address), (address + num_bytes, start + room)):
        if end > piece:
            checked("munmap", piece, end - piece)
    return address


def _advise_huge_pages(address: int, *, num_bytes: int) -> list[Notice]:
    try:
        checked("madvise", address, num_bytes, mmap.MADV_HUGEPAGE)
    except OSError as error:
        text = f"no huge pages for host memory ({error.strerror}); using small ones instead"
        return [Notice(name="no-huge-pages", text=text, strict=False)]
    return []


def _cannot_lock(error: BankError, *, num_bytes: int) -> BankError:
    """A driver's refusal to register, with what limits locked memory here."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_limited = limit != resource.RLIM_INFINITY and limit < num_bytes
    raise_it = "raise the limit on locked memory: ulimit -l unlimited, for Docker --ulimit memlock=-1"
    return BankError(
        "host memory cannot be locked for the GPU",
        got=f"{error}{f', and a limit of {gib(limit)} on locked memory' if is_limited else ''}",
        wanted=gib(num_bytes),
        do=raise_it if is_limited else "free host memory; WSL locks no more than half of it",
        limit_bytes=limit if is_limited else None,
    )
