"""Direct reads: bytes from a file into an arena without passing through the page cache.

A read through a mapping or a buffered read would leave a second copy of every hot row in the page cache. O_DIRECT
wants aligned offsets, lengths and targets, and rows have neither, so each reader owns one aligned buffer. Where a
file system has no O_DIRECT (tmpfs, some network mounts) the read is buffered and its pages are dropped at once.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from hotsplit.errors import BankError

_BLOCK = 4096
_BUFFER_BYTES = 8 << 20

logger = logging.getLogger(__name__)


class DirectReader:
    """Reads byte ranges of a fixed set of files; one per thread.

    Args:
        files: The files, opened at once.

    Raises:
        BankError: A file cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._handles: list[tuple[int, bool]] = []
        try:
            for path in self._files:
                self._handles.append(_open(path))
        except OSError as error:
            self.close()
            raise BankError(f"cannot open {path}", got=error.strerror, do="check the model folder") from error
        buffered = [path for path, (_, direct) in zip(self._files, self._handles, strict=True) if not direct]
        if buffered:
            what = "%s: the file system has no direct reads; reading hot rows through the page cache instead"
            logger.warning(what, buffered[0].parent)

    def read_into(self, target: memoryview, *, file: int, offset: int) -> None:
        """Fill `target` with the bytes that start at `offset`.

        Args:
            target: Writable bytes; their number is the length of the read.
            file: Index of the file.
            offset: First byte.

        Raises:
            BankError: The read failed or the file ends too early; `target` holds no whole row then.
        """
        handle, direct = self._handles[file]
        done = 0
        while done < len(target):
            start = (offset + done) // _BLOCK * _BLOCK if direct else offset + done
            skip = offset + done - start
            want = min(_BUFFER_BYTES, skip + len(target) - done)
            got = self._read(file, handle, start, -(-want // _BLOCK) * _BLOCK if direct else want)
            usable = min(got, want) - skip
            if usable <= 0:
                raise BankError(f"{self._files[file]} ended early", got=f"end of file at {start + got}")
            target[done : done + usable] = memoryview(self._buffer)[skip : skip + usable]
            done += usable
        if not direct:
            os.posix_fadvise(handle, offset, len(target), os.POSIX_FADV_DONTNEED)

    def _read(self, file: int, handle: int, start: int, length: int) -> int:
        try:
            return os.preadv(handle, [memoryview(self._buffer)[:length]], start)
        except OSError as error:
            raise BankError(f"cannot read {self._files[file]}", got=error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the files; twice is harmless."""
        for handle, _ in self._handles:
            os.close(handle)
        self._handles.clear()


def _open(path: Path) -> tuple[int, bool]:
    """A file handle, and whether it reads directly: one block is tried, since some systems refuse only then."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
            try:
                os.preadv(handle, [probe], 0)
                return handle, True
            except OSError:
                os.close(handle)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
    return os.open(path, os.O_RDONLY), False
