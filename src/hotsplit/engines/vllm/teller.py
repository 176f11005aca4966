"""The thread that keeps a worker's snapshot file and learned counts up to date. It asks the host alone, never a device."""

from __future__ import annotations

import logging
import threading

from hotsplit.bank.range_banks import RangeBanks
from hotsplit.bank.record import Record

logger = logging.getLogger(__name__)


class Teller:
    """Keeps the snapshot file and the learned counts up to date, off the thread that launches the steps.

    Args:
        record: What it writes.
        banks: Whose lock it takes.
        every_s: Seconds between two looks at whether the snapshot file is out of date.
    """

    def __init__(self, record: Record, *, banks: RangeBanks, every_s: float) -> None:
        self._record, self._banks, self._every_s = record, banks, every_s
        self._told_steps, self._saved_steps = -1, 0
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
        while not self._ended.wait(self._every_s):
            steps = self._banks.router.counters.steps
            # A server that has fallen idle saves at once: who knows whether it will be given time to at its end.
            is_idle = steps == self._told_steps
            if steps != self._saved_steps and (is_idle or self._record.is_save_due):
                self._record.save(self._banks.lock)
                self._saved_steps = steps
            elif not is_idle:
                self._tell()

    def _tell(self) -> None:
        with self._banks.lock:
            snapshot = self._record.snapshot()
        self._told_steps = snapshot.steps
        self._record.write(snapshot)
