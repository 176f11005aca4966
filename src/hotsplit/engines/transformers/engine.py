"""The handle behind a loaded model: what rules, what is counted, what is saved, and how it all ends.

A model from hotsplit.load() carries it as `model.hotsplit`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hotsplit.bank.banks import EngineBanks
from hotsplit.bank.live import Learned, Update
from hotsplit.bank.record import Record, RunFacts
from hotsplit.bank.workers import Job, Workers
from hotsplit.host.threads import stay_behind
from hotsplit.metrics import MetricsSnapshot
from hotsplit.notices import Notice
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.planfile import Plan, plan_hash
from hotsplit.plan.sizes import ExpertSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Where the engine leaves its files."""

    learn_into: Path | None
    """State directory for learned counts; None to save none."""
    run_dir: Path | None
    """Folder for metric snapshots; None to write none."""
    budget_bytes: int
    """The budget, as asked for."""
    dynamic: bool
    """Whether hot experts follow the traffic."""


class Engine:
    """One loaded model's banks, with the facts around them.

    Args:
        banks: The rows.
        plan: What rules.
        sizes: What the experts weigh.
        options: Files and mode.
        notices: What was said while loading.
        origin: One line: which counts were used, with which weight.
    """

    def __init__(
        self,
        banks: EngineBanks,
        *,
        plan: Plan,
        sizes: ExpertSizes,
        options: EngineOptions,
        notices: Sequence[Notice],
        origin: str,
    ) -> None:
        self.banks = banks
        """Rows, routes, live loop."""
        self.plan = plan
        """The plan that the run started from."""
        self.sizes = sizes
        """What every expert weighs here."""
        self.notices = tuple(notices)
        """What was said while loading."""
        self.origin = origin
        """Which counts were used, with which weight."""
        facts = RunFacts(
            sizes=sizes,
            plan_hash=plan_hash(plan),
            budget_bytes=options.budget_bytes,
            hot_bytes=banks.hot_bytes,
            host_bytes=banks.host_bytes,
            dynamic=options.dynamic,
            backend=banks.name,
            learn_into=options.learn_into,
            run_dir=options.run_dir,
        )
        self._record = Record(banks.router, live=banks.live, facts=facts)
        self._writer = SnapshotWriter(self._record.write)
        self._saving: tuple[Learned, Job[bool]] | None = None
        self._pid = os.getpid()
        self._is_closed = False
        banks.live.on_update.append(self._after_update)

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.banks.live.num_updates

    def histogram(self) -> Histogram:
        """Everything counted so far, decode and prefill apart; on a GPU its counters are waited for."""
        with self.banks.lock:
            self.banks.router.settle()
            return self._record.histogram()

    def snapshot(self) -> MetricsSnapshot:
        """All metrics as they stand; on a GPU its counters are waited for."""
        with self.banks.lock:
            self.banks.router.settle()
            return self._record.snapshot()

    def close(self) -> None:
        """Count the last step, save what was learned, give memory and files back; twice is harmless.

        In a forked child nothing of that is its own, and all of it stays the parent's.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._pid != os.getpid():
            return
        try:
            self._writer.close()
            with self.banks.lock:
                self._hear_of_save()
            self._settle_last()
            self._record.save(self.banks.lock)
        finally:
            self.banks.close()

    def _settle_last(self) -> None:
        """A device that has failed takes the last counts with it, and not those that were read before."""
        try:
            with self.banks.lock:
                self.banks.router.settle()
        except RuntimeError as error:
            logger.warning("the last counts cannot be read: %s", error)

    def _after_update(self, update: Update) -> None:
        if self._pid != os.getpid():  # a forked child's steps are no business of the files that its parent writes
            return
        self._hear_of_save()
        self._writer.put(self._record.snapshot())
        if self._record.is_save_due and self._saving is None:
            learned = self._record.to_keep()
            if learned is not None:
                self._saving = (learned, self._writer.submit(partial(self._record.keep, learned)))

    def _hear_of_save(self) -> None:
        """What a save that has ended well holds is not saved again; one under way is heard of at a later update."""
        if self._saving is None or not self._saving[1].is_done:
            return
        learned, job = self._saving
        self._saving = None
        if job.result():
            self._record.kept(learned)


class SnapshotWriter:
    """Writes on a thread of its own, of snapshots the newest only: a disk that syncs must not hold up a step.

    Args:
        write: Writes one.
    """

    def __init__(self, write: Callable[[MetricsSnapshot], None]) -> None:
        self._write = write
        self._newest: deque[MetricsSnapshot] = deque(maxlen=1)
        self._worker = Workers(1, name="hotsplit-snapshots", prepare=stay_behind)
        self._job: Job[None] | None = None
        self._is_handed_over = False

    def put(self, snapshot: MetricsSnapshot) -> None:
        """Have a snapshot written in place of those that still wait; returns at once.

        Args:
            snapshot: The newest.
        """
        self._newest.append(snapshot)
        if self._job is None or self._job.is_done:
            self._is_handed_over = False
            self._job = Job(self._write_newest)
        if not self._is_handed_over:  # or an interrupt has left that open: it is done once all the same
            if not self._worker.do(self._job):  # no thread is to be had
                self._job.give_up()
                self._write_newest()
            self._is_handed_over = True

    def submit(self, write: Callable[[], bool]) -> Job[bool]:
        """Have something else written after what waits; returns at once.

        Args:
            write: Writes it, and tells whether that went well.
        """
        job = Job(write)
        if not self._worker.do(job):  # no thread is to be had
            job()
        return job

    def finish(self) -> None:
        """Write what waits, and wait for it."""
        if self._job is not None and not self._job.give_up():
            self._job.result()
        self._write_newest()

    def close(self) -> None:
        """Write what waits, and let the thread go; twice is harmless."""
        try:
            self.finish()
        finally:
            self._worker.close(forget=False)

    def _write_newest(self) -> None:
        while self._newest:
            snapshot = self._newest[0]  # stays until it is written, whatever interrupts that
            self._write(snapshot)
            with contextlib.suppress(ValueError):  # a newer one has taken its place
                self._newest.remove(snapshot)
