"""Files that survive a crash: read whole, written atomically.

A writer that dies leaves the old file; a reader never sees half of a new one. What is no regular file (a folder, a
device, a named pipe, a socket) is neither read, since it may never end, nor replaced, since others may depend on it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError

MAX_JSON_BYTES = 2**30
"""No histogram, plan or index comes near it; a longer file was named by mistake and would fill the memory."""


def require_regular(path: Path) -> int:
    """Make sure that a path is a file as one thinks of it; links are followed, nothing is opened.

    Args:
        path: The file.

    Returns:
        Its size in bytes.

    Raises:
        OSError: It is not there, or a folder, a device, a named pipe, a socket.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{_kind(found.st_mode)}, no regular file", str(path))
    return found.st_size


def target_of(path: Path) -> Path:
    """Where a write to `path` goes: through links to the file that they name, there already or not.

    Args:
        path: Where somebody wants to write.

    Raises:
        OSError: What is there is no regular file, and must not be replaced by one.
    """
    with contextlib.suppress(FileNotFoundError):
        require_regular(path)
    return Path(os.path.realpath(path))


def _kind(mode: int) -> str:
    """What a file that is not regular is called."""
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: temporary file beside it, fsync, rename.

    Args:
        path: Where to; its folder is made when missing. A link stays one: the file that it names is replaced.
        data: The whole content.

    Raises:
        HotsplitError: The folder cannot be written, or what is there is no regular file; nothing was changed.
    """
    try:
        target = target_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, data)
    except (OSError, ValueError) as error:  # a ValueError: a name with a zero byte in it
        reason = getattr(error, "strerror", None) or str(error)
        raise HotsplitError(f"cannot write {path}", got=reason, do="choose another place", path=path) from error
    _sync_folder(target.parent)


def _replace(target: Path, data: bytes) -> None:
    """Write beside the target, then rename; what was begun and failed is removed."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


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


def read_bytes(path: Path, *, what: str, error: type[HotsplitError], limit: int | None = None) -> bytes:
    """Read a whole regular file.

    Args:
        path: The file.
        what: What the file is for, for the message: "histogram".
        error: Class to raise.
        limit: Most bytes that it may have; None for any number.

    Raises:
        HotsplitError: Of class `error`, when it cannot be read, is no regular file or is too long.
    """
    try:
        size = require_regular(path)
        data = path.read_bytes() if limit is None or size <= limit else b""
    except (OSError, ValueError) as failure:  # a ValueError: a name with a zero byte in it
        reason = (getattr(failure, "strerror", None) or str(failure)).lower()
        raise error(f"{what} {path}", got=reason, wanted="a readable file", path=path) from failure
    if limit is not None and size > limit:
        raise error(f"{what} {path}", got=f"{size} bytes", wanted=f"at most {limit}", path=path)
    return data


def read_json(path: Path, *, what: str, error: type[HotsplitError], repeats: bool = False) -> Any:
    """Read a JSON file; NaN and Infinity parse (as floats), so that validation can name their place.

    Args:
        path: The file.
        what: What the file is for, for the message: "histogram".
        error: Class to raise.
        repeats: Whether an object may have a key twice, the last one counting: in files that other programs read so.

    Raises:
        HotsplitError: Of class `error`, when it cannot be read, is not JSON or has a key twice.
    """
    data = read_bytes(path, what=what, error=error, limit=MAX_JSON_BYTES)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=dict if repeats else unique_keys)
    except UnicodeDecodeError as failure:
        raise error(f"{what} {path}", got="bytes that are no UTF-8", wanted="JSON", path=path) from failure
    except (ValueError, RecursionError) as failure:  # not only JSONDecodeError: integers of thousands of digits
        start = data[:200].decode("utf-8", errors="replace").lstrip()[:40]
        got = f"{failure}, in what begins {start!r}" if start else "nothing"
        raise error(f"{what} {path}", got=got, wanted="JSON", path=path) from failure


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's members, as json.loads' `object_pairs_hook`: which of two equal keys counts, nobody can tell.

    Args:
        pairs: Keys and values in the file's order.

    Raises:
        ValueError: A key is there twice; names it.
    """
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {key[:60]!r} twice in one object")
        members[key] = value
    return members


def canonical_json(value: object) -> bytes:
    """The one way our canonical files are written: sorted keys, fixed separators, one closing newline."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"
