"""Run folders: where a run leaves its snapshots, how one asks it for fresh ones, and which old folders go.

Under the state folder, which may be any folder of the user's: only what is certainly a run folder of ours is removed.

A snapshot is written every few seconds and counts may lag behind it. Who needs all that was counted up to now asks:

    who asks      RUN/ask             a word that nobody has used
    every rank    RUN/rank0.json      its snapshot, as of now
                  RUN/told-rank0      the same word: the snapshot beside it is as fresh as that
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

from hotsplit.files import write_atomic

KEPT_RUNS = 20
"""Run folders that a start leaves behind."""

_NAME = re.compile(r"\d{8}T\d{6}-(?P<pid>\d+)-\d+")
_ASK = "ask"
_MAX_WORD = 200
"""Bytes of a word that are read: whatever else lies there is none of ours."""
_OURS = r"rank\d+\.json|ask|told-rank\d+"
_FILE = re.compile(rf"(?:{_OURS})|\.(?:{_OURS})\..*")  # the second is what a kill leaves of a write
_numbers = itertools.count()
_CLOCK_SLACK_S = 5.0
"""By which two clocks of one machine, and its files, may differ."""


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


def live_runs(state_dir: Path) -> list[Path]:
    """Folders of runs whose starting process is still there, oldest first.

    In a container that starts anew every server has the process id of the one before it: a folder that was last
    written before its process began is another's.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
    """
    with contextlib.suppress(OSError):
        found = [(path, _NAME.fullmatch(path.name)) for path in sorted((state_dir / "runs").iterdir())]
        return [path for path, name in found if name is not None and path.is_dir() and _is_its(path, int(name["pid"]))]
    return []


def ask(run_dir: Path, *, word: str) -> None:
    """Ask all ranks of a run for snapshots as of now.

    Args:
        run_dir: The run's folder.
        word: One that nobody has used before.

    Raises:
        HotsplitError: The folder cannot be written.
    """
    write_atomic(run_dir / _ASK, word.encode())


def asked(run_dir: Path) -> str:
    """The word that was asked with last; empty where nobody has asked.

    Args:
        run_dir: The run's folder.
    """
    return _word(run_dir / _ASK)


def tell(run_dir: Path, *, rank: int, word: str) -> None:
    """Say that a rank's snapshot is as fresh as a word.

    Args:
        run_dir: The run's folder.
        rank: Whose snapshot.
        word: That was asked with.

    Raises:
        HotsplitError: The folder cannot be written.
    """
    write_atomic(run_dir / f"told-rank{rank}", word.encode())


def told(run_dir: Path, *, rank: int) -> str:
    """The word that a rank answered last; empty where it has answered none.

    Args:
        run_dir: The run's folder.
        rank: Whose.
    """
    return _word(run_dir / f"told-rank{rank}")


def _word(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_WORD).decode("utf-8", errors="replace")
    return ""


def _is_ended_run(path: Path) -> bool:
    """Whether this is a folder that a run of ours made, and nothing but its files is in it."""
    name = _NAME.fullmatch(path.name)
    if name is None or path.is_symlink() or not path.is_dir() or _is_alive(int(name["pid"])):
        return False
    return all(_FILE.fullmatch(child.name) and child.is_file() for child in path.iterdir())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    # One that has ended keeps its id until somebody reaps it, which in many a container nobody does.
    return _stat(pid)[:1] not in (["Z"], ["X"])


def _is_its(run_dir: Path, pid: int) -> bool:
    """Whether the process that made a folder lives, and no later one that has its id now."""
    if not _is_alive(pid):
        return False
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # where there is no /proc, the id is all
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
        return run_dir.stat().st_mtime >= time.time() - age_s - _CLOCK_SLACK_S
    return True


def _stat(pid: int) -> list[str]:
    """What /proc says of a process from its state on (proc_pid_stat(5), field 3); empty where it says nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _remove(folder: Path) -> None:
    for child in folder.iterdir():
        child.unlink()
    folder.rmdir()
