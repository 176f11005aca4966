"""Run folders: where a run leaves its snapshots, and which old ones go.

Under the state folder, which may be any folder of the user's: only what is certainly a run folder of ours is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from datetime import UTC, datetime
from pathlib import Path

KEPT_RUNS = 20
"""Run folders that a start leaves behind."""

_NAME = re.compile(r"\d{8}T\d{6}-(?P<pid>\d+)-\d+")
_SNAPSHOT = re.compile(r"rank\d+\.json|\.rank\d+\.json\..*")  # the second is what a kill leaves of a write
_numbers = itertools.count()


def new_run_dir(state_dir: Path) -> Path:
    """A name for this run's folder; the oldest folders of runs that have ended go.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
    """
    runs = state_dir / "runs"
    with contextlib.suppress(OSError):
        for old in sorted(path for path in runs.iterdir() if _is_ended_run(path))[: -KEPT_RUNS + 1]:
            _remove(old)
    return runs / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{next(_numbers)}"


def _is_ended_run(path: Path) -> bool:
    """Whether this is a folder that a run of ours made, and nothing but its snapshots is in it."""
    name = _NAME.fullmatch(path.name)
    if name is None or path.is_symlink() or not path.is_dir() or _is_alive(int(name["pid"])):
        return False
    return all(_SNAPSHOT.fullmatch(child.name) and child.is_file() for child in path.iterdir())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove(folder: Path) -> None:
    for child in folder.iterdir():
        child.unlink()
    folder.rmdir()
