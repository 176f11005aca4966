"""A model whose files lose their pages after the check of a cold row and before it is computed; for test_lost_pages.py.

    python lost_pages.py FOLDER KERNEL guarded|bare PLACE...

Prints what happened in each place as JSON. Bare, without the guard, it is meant to die.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hotsplit
from engines import tiny
from engines.conftest import budget
from hotsplit.bank import cold_choice, guard_library
from hotsplit.bank.pointers import PointerRows
from hotsplit.bank.staging import Staging
from hotsplit.errors import HotsplitError

ROWS = {"prefill": 1, "decode": 1, "load": 2, "staging": 0}
"""Cold rows that are handed out before the files are cut: at load those of a proof, all at once."""


class Disk:
    """The files of a model, which can be cut short and be whole again."""

    def __init__(self, folder: Path) -> None:
        self._kept = [(path, path.read_bytes(), path.stat()) for path in folder.glob("*.safetensors")]

    def cut(self) -> None:
        for path, _, _ in self._kept:
            os.truncate(path, 0)

    def mend(self) -> None:
        for path, content, stat in self._kept:
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextmanager
def cut_after(owner: type, name: str, disk: Disk, *, rows: int) -> Iterator[None]:
    """The files are cut before a call, or after it has handed out so many cold rows."""
    real, calls = getattr(owner, name), []

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if not rows:
            disk.cut()
            return real(self, *args, **named)
        found = real(self, *args, **named)
        if not self.is_hot(*args):
            calls.append(args)
        if len(calls) == rows:
            disk.cut()
        return found

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except HotsplitError as error:
        return f"{type(error).__name__}: {error}"


def play(folder: Path, kernel: str, *, place: str) -> dict[str, Any]:
    disk = Disk(folder)
    hot = 0.5
    if place == "staging":
        cold_choice._LARGEST_SHARE, hot = 0.6, 0.9  # a tiny model's slots take more than their share of a tiny budget
    settings = {"hot_gib": budget(folder, hot), "run_when_fits": True, "dynamic": False, "kernel": kernel}
    load = lambda: hotsplit.load(folder, state_dir=folder / "state", **settings)  # noqa: E731
    where = (Staging, "copy") if place == "staging" else (PointerRows, "tensors")
    cut = lambda: cut_after(*where, disk, rows=ROWS[place])  # noqa: E731
    if place == "load":
        with cut():
            failed = outcome(load)
        disk.mend()
    model = load()
    prompt = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(1))

    def prefill() -> Any:
        return model(prompt, use_cache=True)

    def decode() -> Any:
        return model(prompt[:, :1], past_key_values=prefill().past_key_values).logits

    with torch.no_grad():
        step = decode if place == "decode" else lambda: prefill().logits
        expected = step()
        if place == "decode":
            past = prefill().past_key_values
            step_alone = lambda: model(prompt[:, :1], past_key_values=past).logits  # noqa: E731
        else:
            step_alone = step
        if place == "staging":
            staging = model.hotsplit.banks.rows._staging
            for key in list(staging._slots):
                staging.drop(key)  # or they would all be there
        if place != "load":
            with cut():
                failed = outcome(step_alone)
        still_cut = outcome(step) if place != "load" else failed
        disk.mend()
        if place == "staging":
            outcome(step)  # it may hear of a read that the step before it began
        again = [torch.equal(expected, step()) for _ in range(2)]
        text = model.generate(prompt, max_new_tokens=4, do_sample=False)
        model.hotsplit.close()
        stock = tiny.stock(folder).generate(prompt, max_new_tokens=4, do_sample=False)
    return {
        "failed": failed if isinstance(failed, str) else "",
        "still_cut": still_cut if isinstance(still_cut, str) else "",
        "again": again,
        "equals_stock": torch.equal(stock, text),
        "kernel": model.hotsplit.banks.kernel,
        "staged": model.hotsplit.banks.rows.cold_counts.staged_rows,
        "kept": model.hotsplit.banks.rows.cold_counts.kept_rows,
    }


if __name__ == "__main__":
    faulthandler.disable()
    if sys.argv[3] == "bare":
        guard_library.load = lambda: None
    told = {place: play(Path(sys.argv[1]), sys.argv[2], place=place) for place in sys.argv[4:]}
    sys.stdout.write(json.dumps(told) + "\n")
