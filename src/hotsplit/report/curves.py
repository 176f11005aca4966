"""How much of the traffic every budget would serve: the curves behind a plan, which is one point of them.

Stands after the plan: `plan + counts (+ test counts) -> curves -> page`. The curves follow the plan's own way of
ranking, at every budget from nothing to everything; the plan may lie below them, where it keeps some rows in every
layer to swap with, or spreads evenly because its counts were of no use.

Shapes: L MoE layers, E routed experts per layer, N = L*E cells, P points.

    >>> from hotsplit.plan.identity import ModelIdentity
    >>> from hotsplit.plan.planfile import PlanIdentity, Proof, Stage
    >>> model = ModelIdentity(layers=(0,), num_experts=4, top_k=1)
    >>> plan = Plan(identity=PlanIdentity(model=model), objective="share", row_bytes=(1,), hot=((0,),), proof=Proof(),
    ...             stages=(Stage(layers=(0,), budget_bytes=1, used_bytes=1, fixed_bytes=0),))
    >>> curves = coverage_curves(plan, counts=np.array([[7.0, 1, 1, 1]]), test=np.array([[1.0, 7, 1, 1]]))
    >>> curves.budget
    (0.0, 0.25, 0.5, 0.75, 1.0)
    >>> curves.own, curves.unseen
    ((0.0, 0.7, 0.8, 0.9, 1.0), (0.0, 0.1, 0.8, 0.9, 1.0))
    >>> curves.oracle_free
    (0.0, 0.7, 0.8, 0.9, 1.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.plan.budget import places
from hotsplit.plan.evaluate import expert_sizes
from hotsplit.plan.objectives import OBJECTIVES, shares_of
from hotsplit.plan.planfile import Plan

POINTS = 200
"""Steps of a curve: more than a screen can show apart, and small in the page."""

_DECIMALS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Hit rates at every budget, all [P], in [0, 1]."""

    budget: tuple[float, ...]
    """Bytes of hot experts / bytes of all experts, rising from 0 to 1. A blind choice serves as much: the null."""
    own: tuple[float, ...]
    """Of the plan's ranking, on the counts that it was made from."""
    unseen: tuple[float, ...] | None
    """Of the same ranking on the test counts; None without them."""
    oracle_free: tuple[float, ...]
    """Best choice in hindsight for the scored traffic (the test's, else the plan's own), any layer sizes."""
    oracle_reachable: tuple[float, ...]
    """The same with the ranking's number of hot rows in every layer: what swaps can reach."""
    layer_order: tuple[float, ...]
    """Of whole layers, first to last."""

    def at(self, budget: float) -> float:
        """Hit rate of the ranking at a budget, on the test counts where there are any.

        Args:
            budget: Bytes of hot experts / bytes of all experts.
        """
        return float(np.interp(budget, self.budget, self.own if self.unseen is None else self.unseen))


def coverage_curves(
    plan: Plan, *, counts: npt.NDArray[np.float64], test: npt.NDArray[np.float64] | None = None, points: int = POINTS
) -> Curves:
    """Walk the plan's ranking from no hot expert to all.

    With pipeline stages every stage has hot the same part of its bytes at every point.

    Args:
        plan: Whose objective, row bytes and stages count; its choice does not.
        counts: Routed pairs that it was made from, [L, E], float64; layers weigh the same.
        test: Of other traffic, [L, E], float64.
        points: Steps of the curve, at most one per expert.
    """
    sizes_LE, top_k = expert_sizes(plan), plan.identity.model.top_k or 1
    scores_LE = OBJECTIVES[plan.objective](counts, sizes=sizes_LE, top_k=top_k)
    order_N, budget_N = ranking(plan, counts=counts)
    scored_LE = shares_of(counts if test is None else test)
    reached_LE = np.take_along_axis(-np.sort(-scored_LE, axis=1), places(scores_LE), axis=1)
    reached_N = _walk(reached_LE, order_N=order_N)
    stops_P = np.unique(np.linspace(0, len(order_N), min(points, len(order_N)) + 1).round().astype(np.int64))
    return Curves(
        budget=_rounded(budget_N[stops_P]),
        own=_rounded(_walk(shares_of(counts), order_N=order_N)[stops_P]),
        unseen=None if test is None else _rounded(_walk(scored_LE, order_N=order_N)[stops_P]),
        oracle_free=_rounded(
            np.maximum(_free(scored_LE, sizes_LE=sizes_LE, budget_P=budget_N[stops_P]), reached_N[stops_P])
        ),
        oracle_reachable=_rounded(reached_N[stops_P]),
        layer_order=_rounded(_layer_order(sizes_LE, budget_P=budget_N[stops_P])),
    )


def ranking(plan: Plan, *, counts: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The order in which experts become hot as the budget grows: by score in a stage, stages side by side.

    Args:
        plan: Whose objective, row bytes and stages count; its choice does not.
        counts: Routed pairs that it was made from, [L, E], float64.

    Returns:
        Cells (layer_id x E + expert) in order, [N], int64, and the part of all experts' bytes that the first n of them
        take, [N+1], float64.
    """
    sizes_LE, top_k = expert_sizes(plan), plan.identity.model.top_k or 1
    scores_LE = OBJECTIVES[plan.objective](counts, sizes=sizes_LE, top_k=top_k)
    part_N, start = np.empty(scores_LE.size), 0
    for stage in plan.stages:
        cells = slice(start * scores_LE.shape[1], (start + len(stage.layers)) * scores_LE.shape[1])
        falling = np.argsort(-scores_LE.ravel()[cells], kind="stable")
        sizes = sizes_LE.ravel()[cells][falling]
        part_N[cells][falling] = np.cumsum(sizes) / max(int(sizes.sum()), 1)
        start += len(stage.layers)
    order_N = np.argsort(part_N, kind="stable")
    return order_N, np.concatenate([[0], np.cumsum(sizes_LE.ravel()[order_N])]) / sizes_LE.sum()


def _walk(gains_LE: npt.NDArray[np.float64], *, order_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """What the first n cells gain, averaged over layers, [N+1], ending at what all gain."""
    return np.concatenate([[0.0], np.cumsum(gains_LE.ravel()[order_N])]) / len(gains_LE)


def _free(
    shares_LE: npt.NDArray[np.float64], *, sizes_LE: npt.NDArray[np.int64], budget_P: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Best choice in hindsight at every budget; between two whole experts a part of the next one counts."""
    order_N = np.argsort(-(shares_LE / sizes_LE).ravel(), kind="stable")
    bytes_N = _walk(sizes_LE / sizes_LE.sum() * len(sizes_LE), order_N=order_N)
    rates_P: npt.NDArray[np.float64] = np.interp(budget_P, bytes_N, _walk(shares_LE, order_N=order_N))
    return rates_P


def _layer_order(sizes_LE: npt.NDArray[np.int64], *, budget_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Share of layers that fit whole."""
    ends_L = np.cumsum(sizes_LE.sum(axis=1)) / sizes_LE.sum()
    # A budget that is a sum of fractions may miss the end of a layer by its last bits.
    whole_P: npt.NDArray[np.float64] = np.searchsorted(ends_L, budget_P + 1e-12, side="right") / len(sizes_LE)
    return whole_P


def _rounded(rates_P: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Short in the page, and the same on every machine."""
    return tuple(min(round(rate, _DECIMALS), 1.0) for rate in rates_P.tolist())
