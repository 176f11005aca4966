"""The handle behind a loaded model: what rules, what is counted, what is saved, and how it all ends.

A model from hotsplit.load() carries it as `model.hotsplit`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotsplit.bank.banks import Banks
from hotsplit.bank.live import Update
from hotsplit.bank.route import PHASES
from hotsplit.errors import HotsplitError
from hotsplit.metrics import MetricsSnapshot, write_snapshot
from hotsplit.notices import Notice
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.learned import add_learned
from hotsplit.plan.planfile import Plan, plan_hash
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.version import __version__

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0
"""Seconds between two saves of the learned counts, at an update; they are always saved at the end."""


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
        banks: Banks,
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
        self._options = options
        self._saved_at = time.monotonic()
        self._is_closed = False
        banks.live.on_update.append(self._after_update)

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.banks.live.num_updates

    def histogram(self) -> Histogram:
        """Everything counted so far, decode and prefill apart."""
        self.banks.router.flush()
        counters = self.banks.router.counters
        phases: dict[str, PhaseCounts] = {
            phase: PhaseCounts(counts=counters.counts[phase].astype(np.float64), tokens=counters.tokens[phase])
            for phase in PHASES
            if counters.tokens[phase]
        }
        return self._as_histogram(phases)

    def snapshot(self) -> MetricsSnapshot:
        """All metrics as they stand."""
        self.banks.router.flush()
        live, counters = self.banks.live, self.banks.router.counters
        last = live.last.line if live.last else None
        layers = self.sizes.identity.layers or ()
        return MetricsSnapshot(
            rank=0,
            tokens={phase: counters.tokens[phase] for phase in PHASES},
            pairs={phase: int(counters.counts[phase].sum()) for phase in PHASES},
            hit_pairs={phase: counters.hits[phase] for phase in PHASES},
            touched_hot_bytes=sum(counters.touched_hot_bytes.values()),
            touched_cold_bytes=sum(counters.touched_cold_bytes.values()),
            steps=counters.steps,
            swaps_done=live.swaps.done,
            swaps_refused=live.swaps.refused,
            swaps_failed=live.swaps.failed,
            swap_bytes=live.swaps.moved_bytes,
            update_failures=live.update_failures,
            hot_bytes=self.banks.hot_bytes,
            host_bytes=int((self.sizes.row_bytes * (~self.banks.router.hot_mask()).sum(axis=1)).sum()),
            budget_bytes=self._options.budget_bytes,
            hit_ratio_window=last.hit if last else None,
            byte_hit_ratio_window=last.byte_hit if last else None,
            oracle_ratio_window=last.oracle if last else None,
            drift_ratio=last.drift if last else None,
            update_seconds=last.cost_ms / 1e3 if last else None,
            version=__version__,
            plan_hash=plan_hash(self.plan),
            mode="dynamic" if self._options.dynamic else "static",
            backend="cpu-pointers",
            counts={
                phase: {layer: counters.counts[phase][i].tolist() for i, layer in enumerate(layers)} for phase in PHASES
            },
        )

    def close(self) -> None:
        """Count the last step, save what was learned, give memory and files back; twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.banks.router.flush()
            self._save()
        finally:
            self.banks.close()

    def _after_update(self, update: Update) -> None:
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._save()
        elif self._options.run_dir is not None:
            self._write_snapshot(self._options.run_dir)

    def _save(self) -> None:
        """A full or read-only disk must not stop a run that computes: it is said and goes on."""
        self._saved_at = time.monotonic()
        if self._options.run_dir is not None:
            self._write_snapshot(self._options.run_dir)
        learned = self.banks.live.learned()
        if self._options.learn_into is None or not learned.tokens:
            return
        counted = {"decode": PhaseCounts(counts=learned.counts, tokens=learned.tokens)}
        now = self._as_histogram(counted, normalised=True)
        try:
            path = add_learned(now, self._options.learn_into, decay=learned.decay)
        except HotsplitError as error:
            logger.warning("learned counts are not saved: %s", error)
            return
        self.banks.live.learned_saved()
        logger.info("learned counts saved to %s", path)

    def _write_snapshot(self, run_dir: Path) -> None:
        try:
            write_snapshot(self.snapshot(), run_dir)
        except HotsplitError as error:
            logger.warning("metrics are not written: %s", error)

    def _as_histogram(self, phases: Mapping[str, PhaseCounts], *, normalised: bool = False) -> Histogram:
        return Histogram(
            identity=self.sizes.identity,
            phases=phases,
            normalised=normalised,
            name=self.sizes.name,
            quantisation=self.sizes.quantisation,
            source={"made_by": f"hotsplit {__version__}"},
        )
