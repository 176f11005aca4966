"""Address ranges on a CPU: one tensor whose first rows lie in memory and whose other rows lie in a file.

The memory of the CPU twin, below the row logic of range_rows.py; another backend brings a module of this shape. Every
rank has one bank file without a name, which goes with its last mapping, however the process ends. Its space is
allocated before it is mapped, so that a full disk is an error here and no SIGBUS at a store.

           | lead | row 0 ... row num_fast-1 |  row num_fast ... row R-1  | tail |
    page   ^      ^ address, on 64 bytes     ^ edge, a page edge                 ^
    edge   |  anonymous memory, fast_bytes   |  pages of the bank file, slow_bytes

The tensor starts inside its first page so that its first cold row falls on a page edge: no row lies in both memories.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = BankFile(Path(folder.name))
    >>> held = StitchedRange(shape=(8, 40, 32), dtype=torch.float16, num_fast=3, file=file)
    >>> held.fast_bytes, held.slow_bytes, held.edge % mmap.PAGESIZE, held.address % 64
    (8192, 16384, 0, 0)
    >>> held.tensor.shape, list(Path(folder.name).iterdir()), file.num_bytes
    (torch.Size([8, 40, 32]), [], 16384)
    >>> held.close()
    >>> file.num_bytes
    0
    >>> file.close()
    >>> folder.cleanup()
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from hotsplit.bank.row_memory import bytes_per_row, can_divide, closed_range, require_layout
from hotsplit.errors import BankError
from hotsplit.units import gib

ALIGNMENT: Final = 64
"""Bytes: where a tensor starts, and what its rows must be a multiple of for that."""

# Of the kernel's headers; Python's mmap and os know the others. Python's own mmap cannot map at a given address.
_PROT_NONE, _MAP_FIXED, _MADV_PAGEOUT, _MS_SYNC = 0, 0x10, 21, 4
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR)
"""What a file system, or an old kernel, answers that cannot make a file without a name."""
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_ALL_BEYOND = 1 << 62

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_ssize_t
_ARGUMENTS = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "msync": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "fallocate": (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long),
}

logger = logging.getLogger(__name__)


def can_stitch(shape: Sequence[int], *, dtype: torch.dtype) -> bool:
    """Whether a tensor can have its rows in two memories: start and page edge can both be kept.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
    """
    return can_divide(shape, dtype=dtype, alignment=ALIGNMENT)


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written on the disk of a folder.

    Args:
        folder: It need not exist yet.

    Raises:
        BankError: Nobody lets us look.
    """
    try:
        return _room(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    except OSError as error:
        raise BankError(f"cannot see {folder}", got=error.strerror, do="set HOTSPLIT_BANK_DIR") from error


class BankFile:
    """One rank's file for cold rows, open and without a name from the start.

    Args:
        folder: Where its disk is; made if missing.

    Raises:
        BankError: The folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where its disk is."""
        self.handle = _open_nameless(folder)
        """To map it by; -1 once it is closed."""
        self._taken: dict[int, int] = {}
        self._free = [(0, _ALL_BEYOND)]  # (offset, bytes), sorted; the last one begins where nothing was ever taken
        self._is_warned = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now, whole pages."""
        return sum(self._taken.values())

    def take(self, num_bytes: int) -> int:
        """Allocate a piece of the file.

        Args:
            num_bytes: Its size, rounded up to whole pages.

        Returns:
            Its offset, on a page.

        Raises:
            BankError: The disk is full, or the file is closed; nothing is taken then.
        """
        if self.handle < 0:
            raise BankError(f"bank file in {self.folder}", got="a closed file")
        size = _whole_pages(num_bytes)
        place, (offset, room) = next((i, hole) for i, hole in enumerate(self._free) if size <= hole[1])
        self._free[place : place + 1] = [(offset + size, room - size)] if size < room else []
        self._taken[offset] = size
        try:
            os.posix_fallocate(self.handle, offset, size)
        except OSError as error:
            self.give_back(offset, num_bytes)  # what was allocated before the disk was full
            raise self._no_room(error, num_bytes=size) from error
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return a piece, unmapped before: its blocks go back to the disk, its place is used again.

        Args:
            offset: From take().
            num_bytes: As it was taken.

        Raises:
            BankError: No such piece is taken.
        """
        size = _whole_pages(num_bytes)
        if self._taken.get(offset) != size:
            raise BankError(f"bank file in {self.folder}", got=f"{size} bytes at {offset}", wanted="a piece in use")
        del self._taken[offset]
        self._free = _joined([*self._free, (offset, size)])
        if self.handle >= 0:
            self._punch(offset, size)

    def close(self) -> None:
        """Let go of the file; what is mapped of it stays until it is unmapped. Twice is harmless."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _punch(self, offset: int, size: int) -> None:
        try:
            _checked("fallocate", self.handle, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, size)
        except OSError as error:
            if not self._is_warned:
                what = "bank file in %s: cannot give space back before the end (%s); using it again instead"
                logger.warning(what, self.folder, error.strerror)
            self._is_warned = True

    def _no_room(self, error: OSError, *, num_bytes: int) -> BankError:
        free = _room(self.handle)
        more_room = "set HOTSPLIT_BANK_DIR to a folder on a disk with that much room, or raise HOTSPLIT_HOT_GIB"
        if error.errno == errno.EFBIG:
            more_room = "raise the limit on the size of files (ulimit -f), or raise HOTSPLIT_HOT_GIB"
        return BankError(
            f"bank file in {self.folder}",
            got=f"{gib(free)} free ({error.strerror})",
            wanted=f"{gib(num_bytes)} more than the {gib(self.num_bytes)} it has",
            do=more_room if error.errno in _NO_ROOM else "set HOTSPLIT_BANK_DIR to a folder on another disk",
            free_bytes=free,
            wanted_bytes=num_bytes,
        )


class StitchedRange:
    """One tensor in two memories, at one address for as long as it is open.

    NOTE: the tensor, and any view of it, must not be touched after close(): the address belongs to nobody then. A range
    that is dropped without close() stays mapped, so a tensor in use never loses its bytes.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
        num_fast: Rows in memory, 0 to R.
        file: Keeps the others.
        huge_pages: Ask the kernel for huge pages where rows lie in memory.

    Raises:
        BankError: Rows are no multiple of 64 bytes, or memory or disk do not suffice; nothing is held then.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        num_fast: int,
        file: BankFile,
        huge_pages: bool = True,
    ) -> None:
        require_layout(shape, dtype=dtype, num_fast=num_fast, alignment=ALIGNMENT)
        row_bytes = bytes_per_row(shape, dtype=dtype)
        self._file, self._offset, self._base = file, -1, 0
        self._tensor: torch.Tensor | None = None
        self.num_bytes = row_bytes * shape[0]
        """Bytes of the tensor."""
        self.fast_bytes = _whole_pages(row_bytes * num_fast)
        """Bytes of anonymous memory, whole pages."""
        self.slow_bytes = _whole_pages(row_bytes * (shape[0] - num_fast))
        """Bytes of the bank file, whole pages."""
        try:
            self._map(huge_pages=huge_pages)
            self.edge = self._base + self.fast_bytes
            """Address of the first cold row, on a page; the end of the memory part where no row is cold."""
            self.address = self.edge - row_bytes * num_fast if self.slow_bytes else self._base
            """Address of the tensor."""
            self._tensor = _tensor_at(self.address, num_bytes=self.num_bytes).view(dtype).view(shape)
        except BaseException:
            self.close()
            raise

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, of the shape and dtype asked for.

        Raises:
            BankError: The range is closed.
        """
        if self._tensor is None:
            raise closed_range()
        return self._tensor

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """The tensor: both memories lie at one address.

        Raises:
            BankError: The range is closed.
        """
        return (self.tensor,)

    def evict(self) -> None:
        """Write the cold rows to the disk and let their pages go; the next read fetches them again.

        Raises:
            BankError: The range is closed, the disk failed, or the kernel is older than 5.4.
        """
        if not self._base:
            raise closed_range()
        if not self.slow_bytes:
            return
        try:
            _checked("msync", self.edge, self.slow_bytes, _MS_SYNC)
            _checked("madvise", self.edge, self.slow_bytes, _MADV_PAGEOUT)
        except OSError as error:
            raise BankError(f"cold rows in {self._file.folder} cannot be evicted", got=error.strerror) from error

    def close(self) -> None:
        """Unmap it all and give the file's piece back; twice is harmless.

        Raises:
            BankError: The kernel refuses to unmap; the piece of the file stays taken then.
        """
        self._tensor = None
        if self._base:
            try:
                _checked("munmap", self._base, self.fast_bytes + self.slow_bytes)
            except OSError as error:
                raise BankError("address range cannot be unmapped", got=error.strerror) from error
            self._base = 0
        if self._offset >= 0:
            self._file.give_back(self._offset, self.slow_bytes)
            self._offset = -1

    def _map(self, *, huge_pages: bool) -> None:
        """Take the file's piece, reserve the addresses, and put both memories behind them."""
        if self.slow_bytes:
            self._offset = self._file.take(self.slow_bytes)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            # Reserved without access first: cold rows are never charged as memory, not even for a moment.
            self._base = _checked("mmap", 0, self.fast_bytes + self.slow_bytes, _PROT_NONE, anonymous, -1, 0)
            if self.fast_bytes:
                _checked("mmap", self._base, self.fast_bytes, _READ_WRITE, anonymous | _MAP_FIXED, -1, 0)
            if self.slow_bytes:
                edge, shared = self._base + self.fast_bytes, mmap.MAP_SHARED | _MAP_FIXED
                _checked("mmap", edge, self.slow_bytes, _READ_WRITE, shared, self._file.handle, self._offset)
        except OSError as error:
            raise BankError(
                "memory for expert rows",
                got=error.strerror,
                wanted=f"{gib(self.fast_bytes)} hot and addresses for {gib(self.slow_bytes)} cold",
                do="lower HOTSPLIT_HOT_GIB, or look at ulimit -v and vm.max_map_count",
            ) from error
        if huge_pages and self.fast_bytes:
            _advise_huge_pages(self._base, self.fast_bytes)


def _checked(name: str, *arguments: int) -> int:
    """Call the C library; every function used here tells a failure by -1 and errno."""
    function = getattr(_LIBC, name)
    function.argtypes = _ARGUMENTS[name]
    result: int = function(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _open_nameless(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        handle, path = tempfile.mkstemp(prefix="hotsplit-bank-", dir=folder)
        os.unlink(path)
    except OSError as error:
        what, reason = f"bank file in {folder}", error.strerror or str(error)
        raise BankError(what, got=reason, do="set HOTSPLIT_BANK_DIR to a folder that you may write to") from error
    return handle


def _advise_huge_pages(address: int, num_bytes: int) -> None:
    try:
        _checked("madvise", address, num_bytes, mmap.MADV_HUGEPAGE)
    except OSError as error:
        _warn_once(f"no huge pages for hot rows ({error.strerror}); using small ones instead")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _tensor_at(address: int, *, num_bytes: int) -> torch.Tensor:
    """The bytes at an address, [num_bytes], uint8; they stay the caller's to unmap."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _room(place: Path | int) -> int:
    """Free bytes of the file system of a path or an open file."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _joined(holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same free space, (offset, bytes) sorted, neighbours made one."""
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(holes):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined
