"""The loop that corrects the plan while the model runs: count, score, swap, publish, report.

    every step      flush the counters, then let the swapper publish what has been copied
    every look      window -> policy (numpy, plan/steering.py) -> swaps -> swapper        (dynamic mode)
    every N steps   one update line: the number that proves that the thing pays

With the fixed schedule every update is a look and there are no others; the adaptive one looks more often. Driven by tick(), on the thread that launches the steps, between two of them.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.bank.route import StepRouter
from hotsplit.bank.swap import Swapper
from hotsplit.errors import BankError, HotsplitError
from hotsplit.metrics import UpdateLine
from hotsplit.plan import evaluate
from hotsplit.plan.counters import Window
from hotsplit.plan.steering import Policy, Steering

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""Failed updates that stop the run: a disk that cannot be read three times over will not serve the next token."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update, as reported."""

    line: UpdateLine
    """What is logged."""
    window: Window
    """What it was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """Decode traffic since the last save."""

    counts: FloatArray
    """Faded counts, in routed pairs, [L, E], float64."""
    tokens: int
    """Decode tokens seen."""
    decay: float
    """What counts saved before keep, 0 to 1."""
    num_updates: int
    """Updates when this was told."""


@dataclass(kw_only=True, slots=True)
class SwapTotals:
    """Swaps and their bytes since the start."""

    done: int = 0
    """Published swaps."""
    refused: int = 0
    """Proposals that found their layer busy."""
    failed: int = 0
    """Failed copies."""
    moved_bytes: int = 0
    """Row bytes of published swaps."""


class Live:
    """Counters, rebalancer and swapper of one rank, tied together.

    Args:
        router: Row maps and counters.
        plan_shares: Shares that the plan expects, [L, E]; drift is measured against them. None where it expects none.
        row_bytes: Bytes of one row per layer, [L].
        dyn_steps: Steps between updates.
        rank: For the update line.
    """

    def __init__(
        self,
        router: StepRouter,
        *,
        plan_shares: FloatArray | None,
        row_bytes: Sequence[int],
        dyn_steps: int,
        rank: int = 0,
    ) -> None:
        self._router, self._plan_shares, self._row_bytes = router, plan_shares, tuple(row_bytes)
        self._rank = rank
        self._swapper: Swapper | None = None
        self._steering = Steering(router.counters, dyn_steps=dyn_steps)
        self._shifts_before = 0
        self._learned_LE: FloatArray = np.zeros(router.row_map.shape)  # since the start, faded
        self._saved_LE: FloatArray = np.zeros(router.row_map.shape)  # what of them is kept, faded since alike
        self._learned_upto = router.counters.counts["decode"].copy()
        self._learned_tokens, self._learned_updates = router.counters.tokens["decode"], 0
        self._swaps_before = SwapTotals()
        self._failures_in_a_row = 0
        self._failed_now = self._succeeded_now = False
        self._cost_s = 0.0
        self.swaps = SwapTotals()
        """Since the start."""
        self.num_updates = 0
        """Updates so far."""
        self.update_failures = 0
        """Updates of which a swap failed."""
        self.last: Update | None = None
        """The last update."""
        self.on_update: list[Callable[[Update], None]] = []
        """Called after every update."""

    def adapt(self, swapper: Swapper, *, rebalancer: Policy) -> None:
        """Switch dynamic mode on.

        Args:
            swapper: Moves rows.
            rebalancer: Chooses which.
        """
        self._swapper, self._steering.policy = swapper, rebalancer

    @property
    def num_shifts(self) -> int:
        """Shifts of the traffic that were acted upon; always 0 with the fixed schedule."""
        return self._steering.policy.num_shifts if self._steering.policy is not None else 0

    def tick(self) -> None:
        """Between two steps: count the one that ran, publish what is copied, update when it is time.

        Raises:
            BankError: The third update in a row failed.
        """
        started = time.perf_counter()
        self._router.flush()
        steps = self._router.counters.steps
        if self._swapper is not None:
            self._publish(self._swapper)
        is_update = self._steering.is_update_due(steps)
        if is_update:
            self._begin_update()
        if self._steering.is_look_due(steps):
            self._look()
        self._cost_s += time.perf_counter() - started
        if is_update:
            self._report()

    def learned(self) -> Learned:
        """Decode traffic since learned_saved(), faded with every update, the window under way included.

        The rebalancer's own counts are not that: where there was no decode they follow prefill.
        """
        counters = self._router.counters
        counts_LE = self._learned_LE + (counters.counts["decode"] - self._learned_upto) - self._saved_LE
        return Learned(
            counts=np.maximum(counts_LE, 0.0),  # rounding of what is saved and comes no more
            tokens=counters.tokens["decode"] - self._learned_tokens,
            decay=self._decay ** (self.num_updates - self._learned_updates),
            num_updates=self.num_updates,
        )

    def learned_saved(self, learned: Learned) -> None:
        """What learned() told is kept: from now on it tells what has come since.

        Args:
            learned: As it was told; the model may have run on while it was written.
        """
        self._saved_LE = self._saved_LE + self._decay ** (self.num_updates - learned.num_updates) * learned.counts
        self._learned_tokens += learned.tokens
        self._learned_updates = learned.num_updates

    def window(self) -> Window:
        """What happened since the last update."""
        return self._steering.window(self._router.counters)

    @property
    def _decay(self) -> float:
        """What a count keeps at an update."""
        return 1.0 if self._steering.policy is None else self._steering.policy.decay

    def _publish(self, swapper: Swapper) -> None:
        result = swapper.tick()
        self._succeeded_now |= bool(result.published)
        for swap in result.published:
            self.swaps.done += 1
            self.swaps.moved_bytes += self._row_bytes[swap.layer_id]
        for swap, reason in result.failed:
            self.swaps.failed += 1
            logger.error("swap of expert %d into layer %d failed: %s", swap.expert_in, swap.layer_id, reason)
        if result.failed:
            self._count_failure(result.failed[-1][1])

    def _count_failure(self, reason: str) -> None:
        """An update fails once, however many of its swaps do."""
        if self._failed_now:
            return
        self._failed_now = True
        self._failures_in_a_row += 1
        self.update_failures += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise BankError(
                f"{self._failures_in_a_row} updates in a row failed",
                got=reason,
                do="check the disk that holds the model, or run with HOTSPLIT_DYNAMIC=0",
            )

    def _begin_update(self) -> None:
        """Count it, forgive what has healed, and let what was learned fade."""
        # Only a swap that went through forgives: an update that finds its layers busy has tried nothing.
        if self._succeeded_now and not self._failed_now:
            self._failures_in_a_row = 0
        self._failed_now = self._succeeded_now = False
        self.num_updates += 1
        if self._swapper is None:
            return
        decode_LE = self._router.counters.counts["decode"]
        self._learned_LE = self._learned_LE * self._decay + (decode_LE - self._learned_upto)
        self._saved_LE = self._saved_LE * self._decay
        self._learned_upto = decode_LE.copy()

    def _look(self) -> None:
        """Score the window and ask for swaps."""
        if self._swapper is None:
            return
        before = self.num_shifts
        try:
            self._ask(self._swapper)
        except HotsplitError as error:
            logger.error("update %d failed: %s", self.num_updates, error)
            self._count_failure(str(error))
        if self.num_shifts > before:
            logger.info("the traffic has shifted at step %d: settling", self._router.counters.steps)

    def _ask(self, swapper: Swapper) -> None:
        busy = swapper.busy()
        # The row map is the truth, also where an interrupt fell between a publish and our hearing of it.
        for swap in self._steering.look(self._router.counters, hot=self._router.hot_mask(), busy=busy):
            asked = swap.layer_id not in busy and swapper.request(
                swap.layer_id, expert_in=swap.expert_in, expert_out=swap.expert_out
            )
            self.swaps.refused += not asked

    def _report(self) -> None:
        window, swaps, before = self.window(), self.swaps, self._swaps_before
        line = UpdateLine(
            update=self.num_updates,
            step=self._router.counters.steps,
            tokens=sum(self._router.counters.tokens.values()),
            hit=window.hit_ratio,
            byte_hit=window.byte_hit_ratio,
            kept=window.kept_ratio,
            oracle=self._oracle(window),
            drift=self._drift(window),
            swaps=swaps.done - before.done,
            refused=swaps.refused - before.refused,
            failed=swaps.failed - before.failed,
            moved_mib=(swaps.moved_bytes - before.moved_bytes) / 2**20,
            cost_ms=self._cost_s * 1e3,
            rank=self._rank,
            shifts=self.num_shifts - self._shifts_before,
        )
        logger.info("%s", line)
        self.last = Update(line=line, window=window)
        self._cost_s = 0.0
        self._swaps_before = SwapTotals(
            done=swaps.done, refused=swaps.refused, failed=swaps.failed, moved_bytes=swaps.moved_bytes
        )
        self._shifts_before = self.num_shifts
        self._steering.updated(self._router.counters)
        for observe in self.on_update:
            observe(self.last)

    def _oracle(self, window: Window) -> float | None:
        if not window.tokens:
            return None
        return evaluate.oracle_reachable(self._router.hot_mask().sum(axis=1), counts=window.counts.astype(np.float64))

    def _drift(self, window: Window) -> float | None:
        if self._plan_shares is None or not window.tokens:
            return None
        return evaluate.drift(window.counts.astype(np.float64), self._plan_shares)
