"""Direct reads: bytes from files into memory without passing through the page cache.

A read through a mapping or a buffered read would leave a second copy of every hot row in the page cache. O_DIRECT
wants aligned offsets, lengths and targets. Whoever lays memory out for that reads straight into it (DirectFiles);
rows of the arena have neither, so that their reader owns one aligned buffer (DirectReader). Where a file system has no
O_DIRECT (tmpfs, some network mounts) the read is buffered and its pages are dropped at once.

No copy holds Python's lock: a step that runs meanwhile would stand still for as long.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from hotsplit.errors import BankError

BLOCK: int = 4096
"""What offsets, lengths and addresses of direct reads are multiples of: enough for every disk that is sold."""
_BUFFER_BYTES = 8 << 20

logger = logging.getLogger(__name__)


class DirectFiles:
    """A fixed set of files that any thread may read from.

    Args:
        files: The files, opened at once.

    Raises:
        BankError: A file cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._handles: list[tuple[int, bool]] = []
        try:
            for path in self._files:
                self._handles.append(_open(path))
        except OSError as error:
            self.close()
            raise BankError(f"cannot open {path}", got=error.strerror, do=what_to_do(error)) from error
        buffered = [path for path, (_, direct) in zip(self._files, self._handles, strict=True) if not direct]
        if buffered:
            what = "%s: the file system has no direct reads; reading rows through the page cache instead"
            logger.warning(what, buffered[0].parent)

    def is_direct_file(self, file: int) -> bool:
        """Whether this one can.

        Args:
            file: Index of the file.
        """
        return self._handles[file][1]

    def read_blocks(self, target: memoryview, *, file: int, offset: int, needed: int) -> None:
        """Read whole blocks.

        Args:
            target: Writable bytes on a block's edge; their number, whole blocks, is the length of the read.
            file: Index of the file.
            offset: First byte, on a block's edge.
            needed: Bytes of them that must come; a file may end inside of its last block.

        Raises:
            BankError: The read failed or the file ends too early; `target` holds nothing of use then.
        """
        done = 0
        while done < needed:
            got = self.read_some(target[done:], file=file, offset=offset + done)
            if done + got >= needed:
                break
            whole = got // BLOCK * BLOCK  # the next read has to begin on a block's edge
            if not whole:
                raise self.ended(file, at=offset + done + got)
            done += whole
        self.forget(file, offset=offset, num_bytes=len(target))

    def read_some(self, target: memoryview, *, file: int, offset: int) -> int:
        """One read.

        Args:
            target: Where to.
            file: Index of the file.
            offset: First byte.

        Returns:
            Bytes read; 0 at the end of the file.

        Raises:
            BankError: It failed.
        """
        try:
            return os.preadv(self._handles[file][0], [target], offset)
        except OSError as error:
            raise BankError(
                f"cannot read {self._files[file]}",
                got=error.strerror or str(error),
                do="check the disk that holds the model",
            ) from error

    def ended(self, file: int, *, at: int) -> BankError:
        """What to raise where a file is shorter than it was.

        Args:
            file: Index of the file.
            at: Where it ends.
        """
        return BankError(f"{self._files[file]} ended early", got=f"end of file at {at}", do="load the model again")

    def forget(self, file: int, *, offset: int, num_bytes: int) -> None:
        """Drop from the page cache what a buffered read has left there; nothing to do for a direct one.

        Args:
            file: Index of the file.
            offset: First byte.
            num_bytes: Of the read.
        """
        handle, direct = self._handles[file]
        if not direct:
            os.posix_fadvise(handle, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files; twice is harmless."""
        for handle, _ in self._handles:
            os.close(handle)
        self._handles.clear()


class DirectReader:
    """Reads byte ranges that lie anywhere, through one aligned buffer; one per thread.

    Args:
        files: The files, opened at once.
        uses_cache: Whether bytes that happen to be in the page cache are copied from there. None are put into it.

    Raises:
        BankError: A file cannot be opened.
    """

    def __init__(self, files: Sequence[Path], *, uses_cache: bool = False) -> None:
        self._files = DirectFiles(files)
        try:
            self._cached = CachedFiles(files if uses_cache else ())
        except BankError:
            self._files.close()
            raise
        self._uses_cache = uses_cache
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def read_into(self, target: memoryview, *, file: int, offset: int) -> None:
        """Fill `target` with the bytes that start at `offset`.

        Args:
            target: Writable bytes; their number is the length of the read.
            file: Index of the file.
            offset: First byte.

        Raises:
            BankError: The read failed or the file ends too early; `target` holds no whole row then.
        """
        direct = self._files.is_direct_file(file)
        done = self._cached.read(target, file=file, offset=offset) if self._uses_cache else 0
        if done == len(target):
            return
        while done < len(target):
            start = (offset + done) // BLOCK * BLOCK if direct else offset + done
            skip = offset + done - start
            want = min(_BUFFER_BYTES, skip + len(target) - done)
            length = -(-want // BLOCK) * BLOCK if direct else want
            got = self._files.read_some(memoryview(self._buffer)[:length], file=file, offset=start)
            usable = min(got, want) - skip
            if usable <= 0:
                raise self._files.ended(file, at=start + got)
            ctypes.memmove(address_of(target[done:]), address_of(memoryview(self._buffer)[skip:]), usable)
            done += usable
        self._files.forget(file, offset=offset, num_bytes=len(target))

    def close(self) -> None:
        """Close the files; twice is harmless."""
        self._cached.close()
        self._files.close()


class CachedFiles:
    """Files of which only what the page cache holds is read: a disk is never waited for.

    Args:
        files: The files, opened at once.

    Raises:
        BankError: A file cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._handles: list[int] = []
        for path in files:
            try:
                self._handles.append(os.open(path, os.O_RDONLY))
            except OSError as error:
                self.close()
                raise BankError(f"cannot open {path}", got=error.strerror, do=what_to_do(error)) from error

    def read(self, target: memoryview, *, file: int, offset: int) -> int:
        """Copy what is there, up to the first page that is not.

        Args:
            target: Writable bytes; their number is the length wanted.
            file: Index of the file.
            offset: First byte.

        Returns:
            Bytes copied; 0 as well where the file system or the kernel does not know the question.
        """
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._handles[file], [target[done:]], offset + done, os.RWF_NOWAIT)
            except OSError:  # not there, or not known; and a disk's error is for the read that follows
                break
            if not got:
                break
            done += got
        return done

    def close(self) -> None:
        """Close the files; twice is harmless."""
        while self._handles:
            os.close(self._handles.pop())


def address_of(memory: memoryview) -> int:
    """Of its first byte. NOTE: whoever uses it keeps the memory alive.

    Args:
        memory: Writable.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


def what_to_do(error: Exception) -> str:
    """The next step for whoever cannot open a file of the model.

    Args:
        error: Why not.
    """
    is_full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return "raise the limit on open files: ulimit -n 8192" if is_full else "check the model folder"


def _open(path: Path) -> tuple[int, bool]:
    """A file handle, and whether it reads directly: one block is tried, since some systems refuse only then."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
            try:
                os.preadv(handle, [probe], 0)
                return handle, True
            except OSError:
                os.close(handle)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
    return os.open(path, os.O_RDONLY), False
