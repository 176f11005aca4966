"""What fits: the greedy choice under a budget, the bounds that judge it, and what rows, spares and stages cost.

Stands under the planner: `order scores + budget -> which experts are hot`. A stage's budget pays first for the bytes
that stay fast whatever is hot, then (dynamic mode) for top_k rows and a spare row in every layer, then for whatever is
worth most per byte. A layer that is wholly hot can never swap and has no spare row: its last expert is free.

Shapes: S MoE layers of one pipeline stage (L for a whole model), E routed experts per layer, N cells.

    >>> scores_LE = np.array([[10.0, 9.0, 9.0]])
    >>> greedy(scores_LE, sizes=np.array([[6, 5, 5]]), budget=10)       # 6 fits, then neither 5 does
    array([[ True, False, False]])
    >>> values_LE = np.array([[60.0, 45.0, 45.0]])
    >>> best_subset(values_LE, sizes=np.array([[6, 5, 5]]), budget=10)
    array([[False,  True,  True]])
    >>> fractional_bound(values_LE, sizes=np.array([[6, 5, 5]]), budget=10)
    96.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, PlanError
from hotsplit.units import GIB

MAX_SUBSET_CELLS = 16


def greedy(scores: npt.NDArray[np.float64], *, sizes: npt.NDArray[np.int64], budget: int) -> npt.NDArray[np.bool_]:
    """Take the highest scores first, while they fit; go on past one that does not fit.

    Raising the budget never lowers the value taken, if scores are value per byte. With room r < r', both runs agree
    until one item i fits r' only. From there the smaller run can only take items of at most score i: worth at most
    r x score i, which is less than size i x score i, the value of item i alone. (By induction the same holds after
    every later item that both take or both leave.)

    Args:
        scores: Order scores, value per byte, [L, E], float64; ties go by (layer, expert).
        sizes: Bytes of every expert, [L, E], int64.
        budget: Bytes that may be taken.

    Returns:
        Which experts are taken, [L, E], bool.
    """
    order_N = _descending(scores.ravel())
    taken_N = np.zeros(scores.size, dtype=bool)
    taken_N[order_N] = _take(sizes.ravel()[order_N], room=budget)[0]
    return taken_N.reshape(scores.shape)


def best_subset(values: npt.NDArray[np.float64], *, sizes: npt.NDArray[np.int64], budget: int) -> npt.NDArray[np.bool_]:
    """The best choice there is, by trying all: an oracle for small cases.

    Args:
        values: What every expert is worth, any shape of at most 16 cells, float64.
        sizes: Bytes of every expert, the same shape, int64.
        budget: Bytes that may be taken, >= 0.

    Returns:
        Which experts are taken, the same shape, bool; of equally good choices the first.

    Raises:
        PlanError: More cells than can be tried.
    """
    if values.size > MAX_SUBSET_CELLS:
        raise PlanError("best subset", got=f"{values.size} cells", wanted=f"at most {MAX_SUBSET_CELLS}")
    subsets = (np.arange(2**values.size)[:, None] >> np.arange(values.size) & 1).astype(bool)
    worth = np.where(subsets @ sizes.ravel() <= budget, subsets @ values.ravel(), -np.inf)
    return np.asarray(subsets[int(worth.argmax())].reshape(values.shape), dtype=bool)


def fractional_bound(values: npt.NDArray[np.float64], *, sizes: npt.NDArray[np.int64], budget: int) -> float:
    """What the best choice could be worth if experts could be cut: no choice under this budget beats it.

    Args:
        values: What every expert is worth, any shape, float64.
        sizes: Bytes of every expert, the same shape, int64, > 0.
        budget: Bytes that may be taken, >= 0.

    Returns:
        The linear-programming bound, in the unit of `values`.

    Source: the greedy solution of the continuous knapsack problem (Dantzig 1957).
    """
    order_N = _descending((values / sizes).ravel())
    values_N, sizes_N = values.ravel()[order_N], sizes.ravel()[order_N]
    whole = _prefix(sizes_N, room=budget)
    bound = math.fsum(values_N[:whole].tolist())
    if whole < values.size:
        room = budget - int(sizes_N[:whole].sum())
        bound += float(values_N[whole]) * room / int(sizes_N[whole])
    return bound


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBudget:
    """What one pipeline stage may spend on one rank, and on what."""

    layers: tuple[int, ...]
    """Decoder indices of its MoE layers, [S]."""
    row_bytes: npt.NDArray[np.int64]
    """Bytes of one expert's row, [S], int64."""
    num_experts: int
    """Routed experts per layer."""
    budget_bytes: int
    """All that may be taken; at most `all_bytes`."""
    fixed_bytes: int = 0
    """What stays fast for all experts."""
    swap_rows: int = 0
    """Dynamic mode: hot rows that every layer keeps (top_k), beside a spare row. 0 in static mode: no spare either."""

    @property
    def all_bytes(self) -> int:
        """What the stage takes when everything is hot."""
        return self.fixed_bytes + int(self.row_bytes.sum()) * self.num_experts

    @property
    def least_rows(self) -> int:
        """Hot rows that every layer keeps: where only the spare row is left to save, all of them."""
        return self.num_experts if 0 < self.num_experts - 1 <= self.swap_rows else min(self.swap_rows, self.num_experts)

    @property
    def least_bytes(self) -> int:
        """What the stage takes at the least."""
        return self.used_bytes(np.full(len(self.layers), self.least_rows))

    def used_bytes(self, hot_rows: npt.NDArray[np.int64]) -> int:
        """What the stage takes, everything counted.

        Args:
            hot_rows: Hot rows per layer, [S], int64.
        """
        spare_S = (hot_rows < self.num_experts) if self.swap_rows else 0
        return self.fixed_bytes + int(((hot_rows + spare_S) * self.row_bytes).sum())


def require_enough(stages: Sequence[StageBudget]) -> None:
    """Refuse a budget that is too small for any stage.

    Raises:
        BudgetError: Names the least budget in GiB, and static mode where that would do; `minimum_bytes` has it.
    """
    short = max(stages, key=lambda stage: stage.least_bytes - stage.budget_bytes)
    if short.least_bytes <= short.budget_bytes:
        return
    minimum = max(stage.least_bytes for stage in stages)
    rows = f"{len(short.layers)} layers x ({short.swap_rows} + 1) rows" if short.swap_rows else "no hot row"
    cure = ", or HOTSPLIT_DYNAMIC=0" if short.swap_rows and short.fixed_bytes <= short.budget_bytes else ""
    raise BudgetError(
        "hot budget",
        got=f"{short.budget_bytes / GIB:.6g} GiB",
        wanted=f"at least {gib_to_ask(minimum)} GiB ({rows}, {short.fixed_bytes / GIB:.3g} GiB fixed)",
        do=f"set HOTSPLIT_HOT_GIB={gib_to_ask(minimum)}{cure}",
        budget_bytes=short.budget_bytes,
        minimum_bytes=minimum,
    )


def gib_to_ask(nbytes: int) -> str:
    """Bytes in GiB, rounded up to six decimals: typed back as a setting it is enough."""
    return f"{math.ceil(nbytes / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")


def spend(scores: npt.NDArray[np.float64], *, stage: StageBudget) -> npt.NDArray[np.bool_]:
    """Choose a stage's hot experts by score.

    A layer whose experts are all hot but one gets that last one in place of the spare row, for free, if this comes
    about before the first row that does not fit. Rows taken after that are small change in what is left of less than
    one row; a free expert there could outweigh the wider row that a larger budget would buy, and raising the budget
    would then lower the hit rate. Before it, a larger budget takes all that a smaller one takes.

    Args:
        scores: Order scores, value per byte, [S, E], float64.
        stage: The stage, whose budget holds at least its `least_bytes`.

    Returns:
        Which experts are hot, [S, E], bool.
    """
    place_SE = places(scores)
    hot_SE = place_SE < stage.least_rows
    # In dynamic mode the last place of a layer is not for sale: it comes for free, or the spare row has its bytes.
    for_sale_SE = ~hot_SE & (place_SE < stage.num_experts - (1 if stage.swap_rows else 0))
    cells_N = np.flatnonzero(for_sale_SE)
    cells_N = cells_N[_descending(scores.ravel()[cells_N])]
    sizes_N = stage.row_bytes[cells_N // stage.num_experts]
    taken_N, before_misfit = _take(sizes_N, room=stage.budget_bytes - stage.least_bytes)
    hot_SE.flat[cells_N[:before_misfit]] = True
    if stage.swap_rows:
        hot_SE[hot_SE.sum(axis=1) == stage.num_experts - 1] = True
    hot_SE.flat[cells_N[taken_N]] = True
    return hot_SE


def spread(stage: StageBudget) -> npt.NDArray[np.bool_]:
    """Give every layer of a stage the same number of hot rows, one more where bytes are left, narrow rows first.

    Without counts no expert is better than another: the first ids are as good as any.

    Args:
        stage: The stage, whose budget holds at least its `least_bytes`.

    Returns:
        Which experts are hot, [S, E], bool.
    """
    levels = range(stage.least_rows, stage.num_experts + 1)
    prices = [stage.used_bytes(np.full(len(stage.layers), rows)) for rows in levels]
    rows = levels[int(np.searchsorted(prices, stage.budget_bytes, side="right")) - 1]
    rows_S = np.full(len(stage.layers), rows, dtype=np.int64)
    if rows < stage.num_experts:
        order_S = np.argsort(stage.row_bytes, kind="stable")
        more_S, _ = _take(stage.row_bytes[order_S], room=stage.budget_bytes - stage.used_bytes(rows_S))
        rows_S[order_S[more_S]] += 1
    return np.arange(stage.num_experts) < rows_S[:, None]


def stage_bound(values: npt.NDArray[np.float64], *, stage: StageBudget) -> float:
    """What no choice under this stage's budget and rules can beat.

    In dynamic mode: the rows that every layer keeps are its best ones, the last row bought in a layer brings the last
    expert along, and rows may be cut and bought in any order. Every plan is such a choice.

    Args:
        values: What every expert is worth, [S, E], float64.
        stage: The stage, whose budget holds at least its `least_bytes`.
    """
    falling_SE = -np.sort(-values, axis=1)
    kept = math.fsum(falling_SE[:, : stage.least_rows].ravel().tolist())
    wares_SM = falling_SE[:, stage.least_rows :].copy()
    if stage.swap_rows and wares_SM.shape[1]:
        wares_SM[:, -2] += wares_SM[:, -1]
        wares_SM = wares_SM[:, :-1]
    sizes_SM = np.broadcast_to(stage.row_bytes[:, None], wares_SM.shape)
    return kept + fractional_bound(wares_SM, sizes=sizes_SM, budget=stage.budget_bytes - stage.least_bytes)


def stage_layers(layers: Sequence[int], *, num_decoder_layers: int | None, pp: int) -> tuple[tuple[int, ...], ...]:
    """Cut the decoder into pipeline stages as vLLM does, and say which MoE layers each one has.

    Args:
        layers: Decoder indices of the MoE layers, ascending.
        num_decoder_layers: All decoder layers, dense ones included; may be None where there is one stage.
        pp: Number of stages, >= 1.

    Returns:
        Decoder indices of the MoE layers, per stage; a stage may have none.

    Raises:
        PlanError: The decoder cannot be cut into so many stages.

    Source: the rule of vLLM's get_pp_indices (Apache-2.0): every stage gets the same number of layers; what is left
    over goes one each to the stages before the last, from the back, since the last one also has the output head.
    """
    if pp == 1:
        return (tuple(layers),)
    if num_decoder_layers is None or not 1 <= pp <= num_decoder_layers:
        got = "an unknown number of" if num_decoder_layers is None else str(num_decoder_layers)
        raise PlanError(f"pipeline size {pp}", got=f"{got} decoder layers", wanted="at least one per stage", pp=pp)
    each, left = divmod(num_decoder_layers, pp)
    parts = [each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)]
    ends = np.cumsum(parts).tolist()
    starts = [0, *ends[:-1]]
    return tuple(tuple(n for n in layers if start <= n < end) for start, end in zip(starts, ends, strict=True))


def places(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Every expert's place in its layer, 0 for the highest score, ties by expert id.

    Args:
        scores: Order scores, [S, E], float64.

    Returns:
        Places 0..E-1, [S, E], int64.
    """
    order_SE = np.argsort(-scores, axis=1, kind="stable")
    place_SE = np.empty_like(order_SE)
    np.put_along_axis(place_SE, order_SE, np.arange(scores.shape[1])[None, :], axis=1)
    return place_SE


def _descending(scores_N: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Cell numbers by falling score; equal scores keep cell order, which is (layer, expert)."""
    return np.argsort(-scores_N, kind="stable")


def _prefix(sizes_N: npt.NDArray[np.int64], *, room: int) -> int:
    """How many of the first items fit together."""
    return int(np.searchsorted(np.cumsum(sizes_N), room, side="right"))


def _take(sizes_N: npt.NDArray[np.int64], *, room: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Take items in order while they fit and go on past those that do not: the mask, and where the first misfit is."""
    whole = _prefix(sizes_N, room=room)
    taken_N = np.zeros(len(sizes_N), dtype=bool)
    taken_N[:whole] = True
    room -= int(sizes_N[:whole].sum())
    # Past the first misfit only items smaller than it can fit: with equal sizes there are none, and no loop.
    for item in (np.flatnonzero(sizes_N[whole:] <= room) + whole).tolist():
        if sizes_N[item] <= room:
            taken_N[item] = True
            room -= int(sizes_N[item])
    return taken_N, whole
