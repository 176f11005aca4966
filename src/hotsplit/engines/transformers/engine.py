"""The handle behind a loaded model: what rules, what is counted, what is saved, and how it all ends.

A model from hotsplit.load() carries it as `model.hotsplit`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotsplit.bank.banks import EngineBanks
from hotsplit.bank.live import Update
from hotsplit.bank.record import Record, RunFacts
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
        if self._record.is_save_due:
            self._record.save()
        else:
            self._record.write(self._record.snapshot())
