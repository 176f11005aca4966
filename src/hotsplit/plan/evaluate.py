"""How good a choice of hot experts is: on its own counts, on traffic it has not seen, and beside what was possible.

Stands after the planner: `plan + histogram (+ test histogram) -> proof`. Every layer routes every token, so layers
weigh the same: where a plan is scored, counts are divided by their layer's total first. Totals that agree, as
validation demands where tokens are known, make that plainly hit pairs / routed pairs.

Shapes: L MoE layers, E routed experts per layer.

    >>> hot_LE = np.array([[True, False], [True, False]])
    >>> counts_LE = np.array([[4.0, 0.0], [1.0, 3.0]])
    >>> hit_rate(hot_LE, counts=counts_LE)
    0.625
    >>> null_rate(hot_LE, sizes=np.ones((2, 2), dtype=np.int64))
    0.5
    >>> oracle_reachable(np.array([1, 1]), counts=counts_LE)
    0.875
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.plan.budget import greedy
from hotsplit.plan.histogram import PHASES, Histogram, planning_counts
from hotsplit.plan.identity import require_same
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planfile import Plan

_DECIMALS = 9
"""Rates are rounded so: sums may differ in the last bit between machines, plan files may not."""


def hit_rate(hot: npt.NDArray[np.bool_], *, counts: npt.NDArray[np.float64]) -> float:
    """Routed pairs served hot / all routed pairs.

    Args:
        hot: Which experts are hot, [L, E], bool.
        counts: Routed pairs, [L, E], float64.

    Returns:
        A rate in [0, 1]; 0 where nothing was routed.
    """
    total = float(counts.sum())
    return min(float(counts[hot].sum()) / total, 1.0) if total else 0.0


def layer_hit_rates(hot: npt.NDArray[np.bool_], *, counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Hit rate of every layer by itself.

    Args:
        hot: Which experts are hot, [L, E], bool.
        counts: Routed pairs, [L, E], float64; an empty layer counts as uniform.

    Returns:
        Rates, [L], float64 in [0, 1].
    """
    rates_L: npt.NDArray[np.float64] = np.where(hot, shares_of(counts), 0.0).sum(axis=1)
    return np.minimum(rates_L, 1.0, out=rates_L)


def null_rate(hot: npt.NDArray[np.bool_], *, sizes: npt.NDArray[np.int64]) -> float:
    """Hit rate to expect of experts drawn blindly for the same bytes.

    Args:
        hot: Which experts are hot, [L, E], bool.
        sizes: Bytes of every expert, [L, E], int64.
    """
    return int(sizes[hot].sum()) / int(sizes.sum())


def oracle_reachable(hot_rows: npt.NDArray[np.int64], *, counts: npt.NDArray[np.float64]) -> float:
    """Hit rate of the best experts in hindsight with these many hot rows per layer: what swaps can reach.

    Args:
        hot_rows: Hot experts per layer, [L], int64.
        counts: Routed pairs, [L, E], float64; layers weigh the same.
    """
    falling_LE = -np.sort(-shares_of(counts), axis=1)
    hot_LE = np.arange(counts.shape[1]) < hot_rows[:, None]
    return hit_rate(hot_LE, counts=falling_LE)


def oracle_free(hot: npt.NDArray[np.bool_], *, sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.float64]) -> float:
    """Hit rate of the best experts in hindsight for the same bytes, any number per layer.

    With rows of one size this is exact. With mixed sizes the best choice is a knapsack: the greedy's, or the
    reachable one where that is better.

    Args:
        hot: Which experts are hot, [L, E], bool.
        sizes: Bytes of every expert, [L, E], int64.
        counts: Routed pairs, [L, E], float64; layers weigh the same.
    """
    shares_LE = shares_of(counts)
    best_LE = greedy(shares_LE / sizes, sizes=sizes, budget=int(sizes[hot].sum()))
    return max(hit_rate(best_LE, counts=shares_LE), oracle_reachable(hot.sum(axis=1), counts=counts))


def layer_order(sizes: npt.NDArray[np.int64], *, budget: int, counts: npt.NDArray[np.float64]) -> float:
    """Hit rate of whole layers, first to last, until one does not fit: how engines place without a plan.

    Args:
        sizes: Bytes of every expert, [L, E], int64.
        budget: Bytes for experts.
        counts: Routed pairs, [L, E], float64; layers weigh the same.
    """
    whole = int(np.searchsorted(np.cumsum(sizes.sum(axis=1)), budget, side="right"))
    return whole / len(counts)


def drift(shares_a: npt.NDArray[np.float64], shares_b: npt.NDArray[np.float64]) -> float:
    """How far two kinds of traffic are apart: the mean over layers of half the L1 distance of their shares.

    No choice of equal-sized experts can serve one of them better than the other by more than this.

    Args:
        shares_a: Shares, or counts, [L, E], float64.
        shares_b: The same of the other traffic.

    Returns:
        0 for the same shares, 1 where they have no expert in common.
    """
    apart_LE = np.abs(shares_of(shares_a) - shares_of(shares_b))
    return min(0.5 * float(apart_LE.sum()) / len(apart_LE), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One plan on one phase of one histogram."""

    traffic: str
    """"in-sample": the counts that the plan was made from; "held-out": the test's."""
    phase: str
    """"decode" or "prefill"."""
    hit_rate: float
    """Of the plan."""
    oracle_free: float
    """Best choice in hindsight of the same bytes, any layer sizes."""
    oracle_reachable: float
    """The same with this plan's hot rows per layer."""
    layer_order: float
    """Of whole layers in order, under the same budget."""
    per_layer: tuple[float, ...]
    """Hit rate of every layer, [L]."""
    worst_layer: int
    """Decoder index of the layer with the lowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A plan on everything it can be scored on."""

    null: float
    """Hit rate of a uniform choice of the same bytes, whatever the traffic."""
    own: Score | None
    """On the counts that it was made from, in the phase that plans rank on; None without counts."""
    test: Score | None
    """On the test counts, in the phase that plans rank on; None without a test."""
    drift: float | None
    """Between the shares of these two; None where one is missing."""
    scores: tuple[Score, ...]
    """All, every phase: in-sample before held-out, decode before prefill."""

    @property
    def scored(self) -> Score | None:
        """The score that counts: the test's, else the plan's own."""
        return self.test or self.own

    @property
    def in_sample(self) -> float | None:
        """Hit rate on the plan's own counts."""
        return self.own.hit_rate if self.own else None

    @property
    def held_out(self) -> float | None:
        """Hit rate on the test counts."""
        return self.test.hit_rate if self.test else None


def evaluate(plan: Plan, *, histogram: Histogram | None, test: Histogram | None = None) -> Evaluation:
    """Score a plan on its own counts and on traffic it has not seen, decode and prefill apart.

    Args:
        plan: The plan.
        histogram: The counts that it was made from, if any.
        test: Counts of other traffic, if any.

    Raises:
        PlanMismatchError: Counts of another model.
        HistogramError: A histogram without any phase.
    """
    own = _scores(plan, histogram, traffic="in-sample")
    unseen = _scores(plan, test, traffic="held-out")
    apart = None
    if histogram is not None and test is not None:
        apart = drift(planning_counts(histogram)[0].counts, planning_counts(test)[0].counts)
    return Evaluation(
        null=null_rate(plan.hot_mask(), sizes=expert_sizes(plan)),
        own=own[planning_counts(histogram)[1]] if histogram else None,
        test=unseen[planning_counts(test)[1]] if test else None,
        drift=apart,
        scores=(*own.values(), *unseen.values()),
    )


def _scores(plan: Plan, histogram: Histogram | None, *, traffic: str) -> dict[str, Score]:
    """One score for each phase that a histogram has, by its name."""
    if histogram is None:
        return {}
    require_same(histogram.identity, plan.identity.model, what=f"the {traffic} histogram")
    phases = [phase for phase in PHASES if phase in histogram.phases]
    return {phase: score(plan, counts=histogram.phases[phase].counts, traffic=traffic, phase=phase) for phase in phases}


def score(plan: Plan, *, counts: npt.NDArray[np.float64], traffic: str, phase: str) -> Score:
    """Score a plan on one set of counts.

    Args:
        plan: The plan.
        counts: Routed pairs, [L, E], float64; layers weigh the same, an empty one counts as uniform.
        traffic: "in-sample" or "held-out", for the record.
        phase: "decode" or "prefill", for the record.
    """
    shares_LE, hot_LE, sizes_LE = shares_of(counts), plan.hot_mask(), expert_sizes(plan)
    rates = [round(rate, _DECIMALS) for rate in layer_hit_rates(hot_LE, counts=counts).tolist()]
    return Score(
        traffic=traffic,
        phase=phase,
        hit_rate=round(hit_rate(hot_LE, counts=shares_LE), _DECIMALS),
        oracle_free=round(oracle_free(hot_LE, sizes=sizes_LE, counts=counts), _DECIMALS),
        oracle_reachable=round(oracle_reachable(plan.hot_rows(), counts=counts), _DECIMALS),
        layer_order=round(_layer_order_of(plan, counts=counts), _DECIMALS),
        per_layer=tuple(rates),
        worst_layer=plan.layers[rates.index(min(rates))],
    )


def expert_sizes(plan: Plan) -> npt.NDArray[np.int64]:
    """Bytes of every expert's row, [L, E], int64."""
    rows_L = np.array(plan.row_bytes, dtype=np.int64)
    return np.repeat(rows_L[:, None], plan.identity.model.num_experts or 0, axis=1)


def _layer_order_of(plan: Plan, *, counts: npt.NDArray[np.float64]) -> float:
    """The engine's own order within every stage, under the stage's budget; layers weigh the same."""
    sizes_LE, whole, start = expert_sizes(plan), 0.0, 0
    for stage in plan.stages:
        rows = slice(start, start + len(stage.layers))
        budget = stage.budget_bytes - stage.fixed_bytes
        if stage.layers:
            whole += layer_order(sizes_LE[rows], budget=budget, counts=counts[rows]) * len(stage.layers)
        start = rows.stop
    return whole / len(counts)
