"""Files that survive a crash: read whole, written atomically.

A writer that dies leaves the old file; a reader never sees half of a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: temporary file beside it, fsync, rename.

    Args:
        path: Where to; its folder is made when missing.
        data: The whole content.

    Raises:
        HotsplitError: The folder cannot be written; nothing was changed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _mode_of(path))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise HotsplitError(
            f"cannot write {path}", got=error.strerror or str(error), do="choose another place", path=path
        ) from error
    _sync_folder(path.parent)


def _mode_of(path: Path) -> int:
    """The mode of the file that is replaced, or what a plain open() would give."""
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the file system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_bytes(path: Path, *, what: str, error: type[HotsplitError]) -> bytes:
    """Read a whole file.

    Args:
        path: The file.
        what: What the file is for, for the message: "histogram".
        error: Class to raise.

    Raises:
        HotsplitError: Of class `error`, when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(f"{what} {path}", got=reason.lower(), wanted="a readable file", path=path) from failure


def read_json(path: Path, *, what: str, error: type[HotsplitError]) -> Any:
    """Read a JSON file; NaN and Infinity parse (as floats), so that validation can name their place.

    Args:
        path: The file.
        what: What the file is for, for the message: "histogram".
        error: Class to raise.

    Raises:
        HotsplitError: Of class `error`, when it cannot be read or is not JSON.
    """
    data = read_bytes(path, what=what, error=error)
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as failure:
        raise error(f"{what} {path}", got="bytes that are no UTF-8", wanted="JSON", path=path) from failure
    except (ValueError, RecursionError) as failure:  # not only JSONDecodeError: integers of thousands of digits
        raise error(f"{what} {path}", got=str(failure), wanted="JSON", path=path) from failure


def canonical_json(value: object) -> bytes:
    """The one way our canonical files are written: sorted keys, fixed separators, one closing newline."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"
