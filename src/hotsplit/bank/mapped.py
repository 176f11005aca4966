"""Files mapped read-only: cold rows read in place, and never touched before it is sure that they are there.

A page of a mapping that cannot be read (a disk that fails, a file cut short) kills whoever touches it. So a range is
made present first, by a call that fails instead:

    is_present     mincore, and the file's size: is every page in the page cache? 4 us for 3 MB
    make_present   read ahead exactly these pages, then MADV_POPULATE_READ: waits for them, and tells of errors

What goes between that and its use is map_guard.py's.

Read-ahead of the kernel's own, as a touch or a populate alone would cause it, reads four to six times as much as was asked
for. Source: benchmarks/results/cold_path.json.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hotsplit.bank import guard_library
from hotsplit.bank.direct import what_to_do
from hotsplit.bank.map_guard import GuardedMap, GuardedMemory, MapGuard
from hotsplit.bank.source import Span
from hotsplit.errors import BankError
from hotsplit.host.libc import MADV_POPULATE_READ, checked

_AHEAD_BYTES = 128 << 10
"""Most that one call asks for: the kernel cuts a request at the disk's read-ahead, which is hardly ever set lower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mapping:
    """One mapped file."""

    path: Path
    """Of the file."""
    memory: GuardedMemory
    """Keeps it mapped, and the file open."""
    content: torch.Tensor
    """Its bytes, [n], uint8."""
    address: int
    """Of the first byte."""
    tells_presence: bool
    """Whether mincore tells the truth: of a file that is neither ours nor writable it says that all is there."""


class MappedFiles:
    """The checkpoint's files, mapped. Any thread may ask for ranges.

    Args:
        files: The files.

    Raises:
        BankError: One cannot be mapped.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._maps = [_map_file(path) for path in files]
        self.guard = MapGuard([_guarded(one) for one in self._maps])
        """What tells whether the bytes that were read of them were theirs."""

    def content(self, span: Span) -> torch.Tensor:
        """The bytes of a span, [n], uint8, in place.

        Args:
            span: Which.
        """
        return self._map_of(span).content[span.offset : span.offset + span.num_bytes]

    def is_present(self, spans: Sequence[Span]) -> bool:
        """Whether all pages of some spans are in the page cache; False where the kernel does not tell.

        Args:
            spans: Which.
        """
        return all(self._is_present(self._map_of(span), span) for span in spans)

    def make_present(self, spans: Sequence[Span]) -> None:
        """Read what of some spans is not in the page cache, and wait for it.

        Args:
            spans: Which.

        Raises:
            BankError: It cannot be read.
        """
        self.read_ahead(spans)
        self.await_present(spans)

    def await_present(self, spans: Sequence[Span]) -> None:
        """Wait for what read_ahead() has begun.

        Args:
            spans: Which.

        Raises:
            BankError: It cannot be read.
        """
        for span in spans:
            start, length = _pages(span)
            mapping = self._map_of(span)
            if mapping.content.numel() < span.offset + span.num_bytes:
                raise _unreadable(mapping, span=span, reason="a file shorter than its header says")
            failure = populate(mapping.address + start, length)
            # Looked at afterwards, and also where that went well: the last page of a file goes on past its end, in zeros.
            size = _size_now(mapping)
            if size < span.offset + span.num_bytes:
                raise _unreadable(mapping, span=span, reason=f"a file of {size} bytes now") from failure
            if failure is not None:
                raise _unreadable(mapping, span=span, reason=failure.strerror or str(failure)) from failure

    def read_ahead(self, spans: Sequence[Span]) -> None:
        """Have the kernel read spans, nothing around them, without waiting.

        It is advice: where the kernel takes none, await_present() reads, or tells what is wrong.

        Args:
            spans: Which.
        """
        for span in spans:
            start, length = _pages(span)
            mapping = self._map_of(span)
            for at in range(start, min(start + length, mapping.content.numel()), _AHEAD_BYTES):
                try:
                    mapping.memory.madvise(mmap.MADV_WILLNEED, at, min(_AHEAD_BYTES, start + length - at))
                except OSError:  # of a disk that fails, or memory that is short
                    return

    def drop(self) -> None:
        """Let go of every mapped page, so that the page cache may give them up."""
        for mapping in self._maps:
            mapping.memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the mappings; each goes when the last view of it does."""
        self._maps = []
        self.guard.close()

    def _map_of(self, span: Span) -> _Mapping:
        try:
            self.guard.use(span.file)
            return self._maps[span.file]
        except IndexError:  # another thread has closed them
            raise BankError("the banks are closed", do="load the model again") from None

    def _is_present(self, mapping: _Mapping, span: Span) -> bool:
        if not mapping.tells_presence:
            return False
        # A file that is cut short inside of a large folio keeps pages past its end that no touch survives.
        if _size_now(mapping) < span.offset + span.num_bytes:
            return False
        start, length = _pages(span)
        pages = bytearray(-(-length // mmap.PAGESIZE))
        try:
            checked("mincore", mapping.address + start, length, _address(pages))
        except OSError:
            return False
        return 0 not in pages


def populate(address: int, num_bytes: int) -> OSError | None:
    """Wait for pages of a mapping, by a call that fails where a touch would kill.

    Args:
        address: Of a page.
        num_bytes: From there on.

    Returns:
        What was wrong with them. A kernel older than 5.14 does not know the call, and then a touch waits.
    """
    try:
        checked("madvise", address, num_bytes, MADV_POPULATE_READ)
    except OSError as error:
        return None if error.errno == errno.EINVAL else error
    return None


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _pages(span: Span) -> tuple[int, int]:
    """First byte of a span's first page, and the bytes from there to its end."""
    start = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
    return start, span.offset + span.num_bytes - start


def _map_file(path: Path) -> _Mapping:
    try:
        with open(path, "rb") as file:
            memory = GuardedMemory(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid() or os.access(path, os.W_OK)
    except (OSError, ValueError) as error:
        raise BankError(f"cannot map {path}", got=str(error), do=what_to_do(error)) from error
    with warnings.catch_warnings():
        # Nobody writes to a cold row; a private writable mapping would be charged as memory that it never takes.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        content = torch.frombuffer(memory, dtype=torch.uint8)
    return _Mapping(path=path, memory=memory, content=content, address=content.data_ptr(), tells_presence=is_ours)


def _guarded(mapping: _Mapping) -> GuardedMap:
    number = mapping.memory.watch(guard_library.load(), address=mapping.address)
    return GuardedMap(path=mapping.path, memory=mapping.memory, number=number)


def _size_now(mapping: _Mapping) -> int:
    """Of the file, by its own handle: also where it has another name by now, or none."""
    return mapping.memory.size()


def _unreadable(mapping: _Mapping, *, span: Span, reason: str) -> BankError:
    return BankError(
        f"cannot read {mapping.path}",
        got=reason,
        wanted=f"{span.num_bytes} bytes from byte {span.offset} on",
        do="check the disk that holds the model, and load it again",
    )
