"""The adaptive schedule: settle quickly at a start or a shift of the traffic, drift slowly after, within a bound on bytes.

Beside the fixed schedule of rebalance.py, for the same place in the loop: `window -> policy -> swaps`. It looks every
few steps instead of every update, and decides four things:

    memory      a recent one (half-life 40 steps) and a long one (1000 steps); score = recent + 0.3 x long
    pay-back    a swap must have saved two row reads within that memory; outside a settling time its gain must also be
                larger than chance: in - out > sqrt(in + out), one standard error of a difference of two counts
    bytes       every 1000 bytes read cold earn 3 for drifting and 5 for the next settling; what is not earned is not moved
    shift       the experts that the long memory names best serve recent traffic 18 points worse than it says: the long
                memory is forgotten, what is saved may be spent at once, and the model settles for 600 steps

So bytes moved never exceed 0.8 % of the bytes read cold, plus one settling (2.2 times the hot bank) for the start. Pure
numpy: no clock, no randomness. docs/policy.md says where each number comes from, and what changes if it is another.

Shapes: L MoE layers, E routed experts per layer, M pairs per layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, PlanError
from hotsplit.plan.counters import Window
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.rebalance import Pairs, RebalanceOptions, Swap, pair_up


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveOptions:
    """The numbers of the schedule; none is a setting."""

    look_steps: int = 10
    """Steps between two looks; >= 1."""
    recent_half_life: float = 40.0
    """Steps after which a count of the recent memory weighs half; finite, > 0."""
    long_half_life: float = 1000.0
    """The same of the long memory; a prior stands for so many steps of traffic."""
    long_weight: float = 0.3
    """What a pair of the long memory weighs beside one of the recent."""
    payback: float = 2.0
    """Row reads that a swap must have saved within the memory, per row moved; >= 0."""
    noise: float = 1.0
    """Standard errors by which a gain must exceed chance outside a settling time; >= 0."""
    shift_drop: float = 0.18
    """Hit rate that the long memory's best experts lose on recent traffic when that has shifted, 0 to 1."""
    settle_steps: int = 600
    """Steps that a settling time lasts."""
    rest_steps: int = 200
    """Steps between two shifts at least: the long memory needs so many to say anything."""
    burst: float = 2.2
    """Most that may be saved, in sizes of the hot bank: what one settling costs."""
    ready: float = 0.33
    """Part of that which must be saved before a shift is acted upon: without bytes, forgetting only harms."""
    drift_share: float = 0.003
    """Bytes earned for drifting, per byte read cold."""
    settle_share: float = 0.005
    """Bytes earned for the next settling, per byte read cold."""

    def __post_init__(self) -> None:
        for name in ("recent_half_life", "long_half_life", "burst"):
            _require(name, getattr(self, name), low=0.0, inclusive=False)
        for name in ("long_weight", "payback", "noise", "drift_share", "settle_share", "ready", "shift_drop"):
            _require(name, getattr(self, name), low=0.0, inclusive=True)
        for name in ("look_steps", "settle_steps", "rest_steps"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(name, got=repr(getattr(self, name)), wanted="an integer >= 1")


class AdaptiveRebalancer:
    """Two memories, two accounts of bytes, and the hot mask they are held against (a steering.Policy).

    Args:
        hot: Which experts are hot, [L, E], bool.
        prior: Counts or shares of the histogram that the plan came from, [L, E], float64; None for none, and then the
            start is a settling time.
        top_k: Experts chosen per token.
        options: Swaps per layer and look, and the half-life of learned counts; margin is not used.
        row_bytes: Bytes of one row per layer, [L].
        adaptive: The numbers of the schedule.
    """

    def __init__(
        self,
        *,
        hot: npt.NDArray[np.bool_],
        prior: npt.NDArray[np.float64] | None,
        top_k: int,
        options: RebalanceOptions,
        row_bytes: Sequence[int],
        adaptive: AdaptiveOptions | None = None,
    ) -> None:
        if len(row_bytes) != len(hot):
            raise PlanError("row_bytes", got=f"{len(row_bytes)} layers", wanted=f"{len(hot)}, as the hot mask has")
        self._hot_LE = np.array(hot, dtype=bool)
        self._row_bytes_L = np.array(row_bytes, dtype=np.int64)
        self._top_k, self._options, self._adaptive = top_k, options, adaptive or AdaptiveOptions()
        self._recent_LE, self._long_LE = np.zeros(self._hot_LE.shape), np.zeros(self._hot_LE.shape)
        self._prior_shares_LE = None if prior is None else shares_of(prior)
        self._cap = self._adaptive.burst * float((self._hot_LE.sum(axis=1) * self._row_bytes_L).sum())
        # Without a prior nothing is known: the start is a settling time, and its bytes are there.
        self._credit, self._saved = (self._cap, 0.0) if prior is None else (0.0, self._cap)
        self._steps_seen = 0
        self._steps_since_shift = 0 if prior is None else math.inf
        self.num_shifts = 0
        """Shifts acted upon since the start."""

    @property
    def look_steps(self) -> int | None:
        """Steps between two looks."""
        return self._adaptive.look_steps

    @property
    def decay(self) -> float:
        """What a learned count keeps of its weight from one update to the next."""
        return self._options.decay

    @property
    def is_settling(self) -> bool:
        """Whether it is a settling time."""
        return self._steps_since_shift < self._adaptive.settle_steps

    @property
    def credit_bytes(self) -> int:
        """What may be moved now, in bytes."""
        return int(self._credit)

    @property
    def saved_bytes(self) -> int:
        """What is saved for the next settling time, in bytes."""
        return int(self._saved)

    def drop(self) -> float:
        """Hit rate that the long memory's best experts, as many as are hot, lose on recent traffic."""
        return coverage_drop(self._long_LE, self._recent_LE, hot_rows=self._hot_LE.sum(axis=1))

    def observe(self, window: Window, *, busy: Collection[int] = ()) -> tuple[Swap, ...]:
        """Learn from what came since the last look, and propose what pays.

        Args:
            window: Since the last look; one without tokens teaches and forgets nothing.
            busy: layer_ids with a swap in flight: they get no proposal, and their turn comes at the next look.

        Returns:
            Swaps, at most `max_swaps` per layer, those that gain most first, ties by (layer, expert), of no more
            bytes than are earned.
        """
        if window.tokens > 0:
            self._learn(window)
            self._earn(window.cold_bytes)
        pairs = pair_up(self.scores(), hot=self._hot_LE, max_swaps=self._options.max_swaps, busy=busy)
        return tuple(self._paid(pairs.chosen(self._pays(pairs))))

    def published(self, swap: Swap) -> None:
        """Follow one swap that became visible; a live run follows the row map itself instead.

        Args:
            swap: As it was proposed.
        """
        self._hot_LE[swap.layer_id, swap.expert_in] = True
        self._hot_LE[swap.layer_id, swap.expert_out] = False

    def follow(self, hot: npt.NDArray[np.bool_]) -> None:
        """Take the hot mask from the row map itself.

        Args:
            hot: Which experts are hot now, [L, E], bool.
        """
        self._hot_LE = np.array(hot, dtype=bool)

    def hot(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot, a copy, [L, E], bool."""
        return self._hot_LE.copy()

    def scores(self) -> npt.NDArray[np.float64]:
        """Both memories, in routed pairs, [L, E], float64."""
        return self._recent_LE + self._adaptive.long_weight * self._long_LE

    def _learn(self, window: Window) -> None:
        """Fade both memories, see whether the traffic has shifted, and add the window."""
        numbers = self._adaptive
        if self._prior_shares_LE is not None and not self._steps_seen:
            tokens = numbers.long_half_life * window.tokens / window.steps
            self._long_LE = self._prior_shares_LE * (tokens * self._top_k)
        self._steps_seen += window.steps
        self._steps_since_shift += window.steps
        self._recent_LE *= math.exp2(-window.steps / numbers.recent_half_life)
        self._recent_LE += window.counts
        if self._has_shifted():
            self._settle()
        self._long_LE *= math.exp2(-window.steps / numbers.long_half_life)
        self._long_LE += window.counts

    def _has_shifted(self) -> bool:
        numbers = self._adaptive
        may_settle = (
            self._saved >= numbers.ready * self._cap
            and self._steps_since_shift >= numbers.rest_steps
            and self._steps_seen >= numbers.recent_half_life
        )
        return may_settle and self.drop() > numbers.shift_drop  # the dearest last

    def _settle(self) -> None:
        """Forget what was, and let all that is saved be spent."""
        self.num_shifts += 1
        self._steps_since_shift = 0
        self._long_LE[:] = 0.0
        granted = min(self._saved, self._cap - self._credit)
        self._credit, self._saved = self._credit + granted, self._saved - granted

    def _earn(self, cold_bytes: int) -> None:
        self._credit = min(self._credit + self._adaptive.drift_share * cold_bytes, self._cap)
        self._saved = min(self._saved + self._adaptive.settle_share * cold_bytes, self._cap)

    def _pays(self, pairs: Pairs) -> npt.NDArray[np.bool_]:
        """Which pairs gain enough, [L, M], bool."""
        gain_LM = pairs.scores_in - pairs.scores_out
        pays_LM: npt.NDArray[np.bool_] = gain_LM > self._adaptive.payback
        if not self.is_settling:
            pays_LM &= gain_LM > self._adaptive.noise * np.sqrt(pairs.scores_in + pairs.scores_out)
        return pays_LM

    def _paid(self, swaps: Sequence[Swap]) -> Iterator[Swap]:
        """Those that the credit pays for, in their order; one row that is too wide does not hold up a narrower one."""
        for swap in swaps:
            price = float(self._row_bytes_L[swap.layer_id])
            if price <= self._credit:
                self._credit -= price
                yield swap


def coverage_drop(
    before: npt.NDArray[np.float64], now: npt.NDArray[np.float64], *, hot_rows: npt.NDArray[np.int64]
) -> float:
    """Hit rate that the best experts of one kind of traffic lose on another: never more than the drift between them.

    Args:
        before: Routed pairs that name the best experts, [L, E], float64.
        now: Routed pairs that they are held against, [L, E], float64.
        hot_rows: Best experts per layer, [L], int64.

    Returns:
        The mean over layers of their share before less their share now; 0 where either has no pairs at all.
    """
    if not before.any() or not now.any():
        return 0.0
    order_LE = np.argsort(-before, axis=1, kind="stable")
    best_LE = np.zeros(before.shape, dtype=bool)
    np.put_along_axis(best_LE, order_LE, np.arange(before.shape[1]) < hot_rows[:, None], axis=1)
    return float(np.where(best_LE, _shares(before) - _shares(now), 0.0).sum()) / len(before)


def _shares(counts_LE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares of faded counts, which need no exact totals: nothing is planned from them."""
    totals_L1 = counts_LE.sum(axis=1, keepdims=True)
    shares_LE = np.full(counts_LE.shape, 1.0 / counts_LE.shape[1])
    np.divide(counts_LE, totals_L1, out=shares_LE, where=totals_L1 > 0)
    return shares_LE


def _require(name: str, value: float, *, low: float, inclusive: bool) -> None:
    if not math.isfinite(value) or value < low or (value == low and not inclusive):
        wanted = f"a finite number {'>=' if inclusive else '>'} {low:g}"
        raise ConfigError(name, got=repr(value), wanted=wanted)
