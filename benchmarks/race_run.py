"""Runs the entries of a race, each in a process of its own, and keeps what they found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import load_average
from observe import drop_pages
from race_cgroup import memory_limit
from race_entries import Entry
from race_ledger import Ledger
from race_players import weights

_HERE = Path(__file__).parent
_LAST_LINES = 40
_PROFILED = 16
"""Tokens whose time is told apart by module, after the timed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a race runs, and with what."""

    folder: Path
    """The checkpoint."""
    scratch: Path
    """For copies that engines make; beside the checkpoint, so that all read from one disk."""
    python: str
    """A Python with llama_cpp and gguf."""
    threads: int
    """Compute threads."""
    limit_bytes: int | None = None
    """Memory that an engine may use, page cache included; None for all."""

    @property
    def gguf(self) -> Path:
        """llama.cpp's copy of the weights."""
        return self.folder.with_name(f"{self.folder.name}.gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One entry's turn in one round."""

    key: str
    """In the ledger."""
    entry: Entry
    """Who."""
    script: Sequence[Mapping[str, Any]]
    """What."""
    is_warm: bool
    """Whether its files are read into the page cache first; else they are dropped from it."""
    save_counts: str | None = None
    """Where hotsplit's histogram goes."""


def run_turns(turns: Sequence[Turn], *, place: Place, ledger: Ledger) -> None:
    """All turns that the ledger lacks, one after the other, with the time that is left.

    Args:
        turns: In order.
        place: Where.
        ledger: Takes the results.
    """
    start, played = time.perf_counter(), 0
    for number, turn in enumerate(turns, start=1):
        if ledger.get(turn.key):
            continue
        left = (time.perf_counter() - start) / played * (len(turns) - number + 1) if played else None
        note(f"{number} of {len(turns)}: {turn.key}" + (f"; about {left / 60:.1f} min left" if left else ""))
        begun = time.perf_counter()
        result = play(turn, place=place, logits=ledger.logits_file(turn.key))
        took = time.perf_counter() - begun
        ledger.put(turn.key, result | {"load_average": load_average()[0], "took_s": round(took, 1)})
        note(f"  not measured: {result['failed']}" if "failed" in result else f"  done, {took:.0f} s")
        played += 1


def play(turn: Turn, *, place: Place, logits: Path) -> dict[str, Any]:
    """One turn in a process of its own.

    Args:
        turn: Who and what.
        place: Where.
        logits: File for the kept ones.

    Returns:
        What race_worker.measure found; or "failed" and why, where the engine could not do it.
    """
    if turn.entry.engine == "llama" and (reason := _no_gguf(place)):
        return {"failed": reason}
    if turn.entry.engine == "accelerate":
        _make_room(place)
    drop_pages([*weights(place.folder), *([place.gguf] if place.gguf.exists() else [])])
    with (
        tempfile.TemporaryDirectory(prefix="race-", dir=place.scratch) as own,
        memory_limit(place.limit_bytes) as group,
    ):
        copies = Path(own) / "copies"
        copies.mkdir()
        ask, answer = Path(own) / "job.json", Path(own) / "result.json"
        job = {
            "engine": turn.entry.engine,
            "options": dict(turn.entry.options),
            "script": [*turn.script][: turn.entry.parts],
            "folder": str(place.folder),
            "gguf": str(place.gguf),
            "scratch": str(copies),
            "logits": str(logits),
            "threads": place.threads,
            "is_warm": turn.is_warm,
            "context_tokens": 64 + sum(len(part["tokens"]) for part in turn.script),
            "save_counts": turn.save_counts,
            "profile_tokens": turn.script[-1]["tokens"][:_PROFILED],
            "cgroup": str(group) if group else None,
        }
        ask.write_text(json.dumps(job), encoding="utf-8")
        python = place.python if turn.entry.engine == "llama" else sys.executable
        reason = _watched([python, str(_HERE / "race_worker.py"), str(ask), str(answer)])
        if reason:
            return {"failed": reason}
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def note(line: str) -> None:
    """Say where the race stands.

    Args:
        line: One line.
    """
    print(line, file=sys.stderr, flush=True)


def _watched(command: Sequence[str]) -> str | None:
    """Run a worker, pass its progress on, and say why it failed, if it did."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as worker:
        try:
            for line in worker.stderr or ():
                if line.startswith("progress: "):
                    note(f"  {line.removeprefix('progress: ').rstrip()}")
                elif line.strip():
                    last.append(line.rstrip())
            code = worker.wait()
        except BaseException:
            worker.kill()
            worker.wait()  # its memory group goes only after it
            raise
    if code == 0:
        return None
    if code == -9:
        return "killed by the kernel: it needs more memory than there is"
    return last[-1][:400] if last else f"exit status {code}"


def _no_gguf(place: Place) -> str | None:
    """Make llama.cpp's copy of the weights where there is none; why not, if that fails."""
    probe = subprocess.run([place.python, "-c", "import llama_cpp, gguf"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return (
            f"{place.python} has no llama_cpp and gguf: pip install llama-cpp-python gguf, or name one (--llama-python)"
        )
    if place.gguf.exists():
        return None
    note(f"  {place.gguf}: writing")
    command = [place.python, str(_HERE / "make_gguf.py"), str(place.folder), str(place.gguf)]
    done = subprocess.run(command, stderr=None, stdout=subprocess.DEVNULL, check=False)
    return f"make_gguf.py ended with exit status {done.returncode}" if done.returncode else None


def _make_room(place: Place) -> None:
    """The GGUF file can be made again; accelerate's copies need its room where the disk is short."""
    total = sum(path.stat().st_size for path in weights(place.folder))
    if place.gguf.exists() and shutil.disk_usage(place.scratch).free < total:
        note(f"  {place.gguf}: removed, accelerate's copies need the room")
        place.gguf.unlink()
