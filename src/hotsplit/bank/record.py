"""What a run tells and what it keeps: metrics, histograms, learned counts.

`counters + live loop -> record -> snapshot files, learned counts`. Every engine holds one per rank. A disk that is full
or read-only must not stop a run that computes: it is said, and the run goes on.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotsplit.bank.live import Learned, Live
from hotsplit.bank.route import PHASES, StepRouter
from hotsplit.errors import HotsplitError
from hotsplit.metrics import MetricsSnapshot, write_snapshot
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.learned import add_learned
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.version import __version__

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0
"""Seconds between two saves of the learned counts; they are always saved at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What does not change while a run goes on."""

    sizes: ExpertSizes
    """What the experts of this rank's layers weigh."""
    plan_hash: str
    """Of the plan that the run started from."""
    budget_bytes: int
    """The budget, as the plan has it."""
    hot_bytes: int
    """Fast memory that hotsplit has taken."""
    host_bytes: int | None = None
    """Slow memory that hotsplit has taken for cold rows; None where it takes none and they lie in the checkpoint."""
    dynamic: bool
    """Whether hot experts follow the traffic."""
    backend: str
    """What holds the rows: "cpu-pointers", "cpu-twin"."""
    learn_into: Path | None
    """State directory for learned counts; None to save none."""
    run_dir: Path | None
    """Folder for metric snapshots; None to write none."""
    rank: int = 0
    """Of the worker."""
    stage: int = 0
    """Pipeline stage."""


class Record:
    """Tells and keeps what one rank has counted.

    Args:
        router: Counters.
        live: Live loop.
        facts: The rest.
    """

    def __init__(self, router: StepRouter, *, live: Live, facts: RunFacts) -> None:
        self._router, self._live, self.facts = router, live, facts
        self._saved_at = time.monotonic()

    @property
    def is_save_due(self) -> bool:
        """Whether the last save is SAVE_EVERY_S ago."""
        return time.monotonic() - self._saved_at >= SAVE_EVERY_S

    def histogram(self) -> Histogram:
        """Everything counted so far, decode and prefill apart."""
        counters = self._router.counters
        phases: dict[str, PhaseCounts] = {
            phase: PhaseCounts(counts=counters.counts[phase].astype(np.float64), tokens=counters.tokens[phase])
            for phase in PHASES
            if counters.tokens[phase]
        }
        return self._as_histogram(phases)

    def snapshot(self) -> MetricsSnapshot:
        """All metrics as they stand."""
        live, counters, facts = self._live, self._router.counters, self.facts
        last = live.last.line if live.last else None
        layers = facts.sizes.identity.layers or ()
        return MetricsSnapshot(
            rank=facts.rank,
            tokens={phase: counters.tokens[phase] for phase in PHASES},
            pairs={phase: int(counters.counts[phase].sum()) for phase in PHASES},
            hit_pairs={phase: counters.hits[phase] for phase in PHASES},
            touched_hot_bytes=sum(counters.touched_hot_bytes.values()),
            touched_cold_bytes=sum(counters.touched_cold_bytes.values()),
            kept_bytes=sum((counters.kept_bytes or {}).values()),
            steps=counters.steps,
            swaps_done=live.swaps.done,
            swaps_refused=live.swaps.refused,
            swaps_failed=live.swaps.failed,
            swap_bytes=live.swaps.moved_bytes,
            update_failures=live.update_failures,
            shifts=live.num_shifts,
            hot_bytes=facts.hot_bytes,
            host_bytes=self._cold_bytes() if facts.host_bytes is None else facts.host_bytes,
            budget_bytes=facts.budget_bytes,
            hit_ratio_window=last.hit if last else None,
            byte_hit_ratio_window=last.byte_hit if last else None,
            kept_ratio_window=last.kept if last else None,
            oracle_ratio_window=last.oracle if last else None,
            drift_ratio=last.drift if last else None,
            update_seconds=last.cost_ms / 1e3 if last else None,
            version=__version__,
            plan_hash=facts.plan_hash,
            mode="dynamic" if facts.dynamic else "static",
            backend=facts.backend,
            counts={
                phase: {layer: counters.counts[phase][i].tolist() for i, layer in enumerate(layers)} for phase in PHASES
            },
        )

    def _cold_bytes(self) -> int:
        """Bytes of the experts that are cold now."""
        return int((self.facts.sizes.row_bytes * (~self._router.hot_mask()).sum(axis=1)).sum())

    def save(self, lock: contextlib.AbstractContextManager[object] | None = None) -> None:
        """Write the snapshot and add to the learned counts what was learned since the last save.

        Args:
            lock: Held while counters are read, and not while a disk is waited for; None where nobody else runs.
        """
        lock = lock or contextlib.nullcontext()
        with lock:
            snapshot, learned = self.snapshot(), self.to_keep()
        self.write(snapshot)
        if learned is not None and self.keep(learned):
            with lock:
                self.kept(learned)

    def to_keep(self) -> Learned | None:
        """What has been learned since the last save; None where there is nothing to save or no place for it."""
        self._saved_at = time.monotonic()
        learned = self._live.learned()
        return learned if self.facts.learn_into is not None and learned.tokens else None

    def keep(self, learned: Learned) -> bool:
        """Add it to the learned counts on disk; any thread may, while the model runs.

        Args:
            learned: From to_keep().

        Returns:
            Whether it is there now, so that kept() is to be told.
        """
        if (into := self.facts.learn_into) is None:
            return False
        counted = {"decode": PhaseCounts(counts=learned.counts, tokens=learned.tokens)}
        now = self._as_histogram(counted, normalised=True)
        try:
            path = add_learned(now, into, decay=learned.decay, stage=self.facts.stage)
        except HotsplitError as error:
            logger.warning("learned counts are not saved: %s", error)
            return False
        logger.info("learned counts saved to %s", path)
        return True

    def kept(self, learned: Learned) -> None:
        """Hear that keep() has ended well, before the next to_keep(); on the thread that counts.

        Args:
            learned: What is on disk now.
        """
        self._live.learned_saved(learned)

    def write(self, snapshot: MetricsSnapshot) -> None:
        """Write a snapshot into the run's folder, if there is one.

        Args:
            snapshot: From snapshot().
        """
        if self.facts.run_dir is None:
            return
        try:
            write_snapshot(snapshot, self.facts.run_dir)
        except HotsplitError as error:
            logger.warning("metrics are not written: %s", error)

    def _as_histogram(self, phases: Mapping[str, PhaseCounts], *, normalised: bool = False) -> Histogram:
        sizes = self.facts.sizes
        return Histogram(
            identity=sizes.identity,
            phases=phases,
            normalised=normalised,
            name=sizes.name,
            quantisation=sizes.quantisation,
            source={"made_by": f"hotsplit {__version__}"},
        )
