"""The thread that keeps a worker's snapshot file and learned counts up to date.

It asks the host alone, never a device, but when somebody asks for a snapshot as of now (bank/runs.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hotsplit.bank import runs
from hotsplit.bank.range_banks import RangeBanks
from hotsplit.bank.record import Record
from hotsplit.errors import HotsplitError
from hotsplit.metrics import write_snapshot

logger = logging.getLogger(__name__)

ASKED_EVERY_S = 0.2
"""Seconds between two looks at whether somebody asks: one small file that is rarely there."""


class Teller:
    """Keeps the snapshot file and the learned counts up to date, off the thread that launches the steps.

    Args:
        record: What it writes.
        banks: Whose lock it takes.
        every_s: Seconds between two looks at whether the snapshot file is out of date.
        enter_thread: Tells the device's driver of this thread, before it is asked anything.
    """

    def __init__(
        self, record: Record, *, banks: RangeBanks, every_s: float, enter_thread: Callable[[], None] | None = None
    ) -> None:
        self._record, self._banks, self._every_s = record, banks, every_s
        self._enter_thread = enter_thread
        self._told_steps, self._saved_steps = -1, 0
        run_dir = record.facts.run_dir
        self._answered = "" if run_dir is None else runs.asked(run_dir)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotsplit-teller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and save once more."""
        self._ended.set()
        self._thread.join()
        try:
            self._banks.router.settle()
        except RuntimeError as error:  # a device that has failed answers no more: what was read before is saved
            logger.warning("hotsplit: the last counts cannot be read: %s", error)
        self._record.save(self._banks.lock)

    def _run(self) -> None:
        self._tell()
        looked_at = time.monotonic()
        while not self._ended.wait(min(self._every_s, ASKED_EVERY_S)):
            self._answer()
            if time.monotonic() - looked_at >= self._every_s:
                looked_at = time.monotonic()
                self._look()

    def _look(self) -> None:
        steps = self._banks.router.counters.steps
        # A server that has fallen idle saves at once: who knows whether it will be given time to at its end.
        is_idle = steps == self._told_steps
        if steps != self._saved_steps and (is_idle or self._record.is_save_due):
            self._record.save(self._banks.lock)
            self._saved_steps = steps
        elif not is_idle:
            self._tell()

    def _answer(self) -> None:
        """Write a snapshot as of now where somebody asks for one; the next look tries again what could not be done."""
        run_dir = self._record.facts.run_dir
        word = "" if run_dir is None else runs.asked(run_dir)
        if run_dir is None or word in ("", self._answered):
            return
        try:
            if self._enter_thread is not None:
                self._enter_thread()
            if not self._banks.settle(word):
                return
            with self._banks.lock:
                snapshot = self._record.snapshot()
            write_snapshot(snapshot, run_dir)  # not Record.write, which lets a failure pass: an old file is no answer
            self._told_steps = snapshot.steps
            runs.tell(run_dir, rank=self._record.facts.rank, word=word)
        except (HotsplitError, RuntimeError) as error:
            logger.warning("hotsplit: a snapshot that was asked for cannot be written: %s", error)
        self._answered = word

    def _tell(self) -> None:
        with self._banks.lock:
            snapshot = self._record.snapshot()
        self._told_steps = snapshot.steps
        self._record.write(snapshot)
