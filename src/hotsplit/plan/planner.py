"""Which experts should be hot, and why that is a good choice.

The heart of the flow: `sizes + histogram + budget -> plan`. Experts are bought by value per byte until the budget is
spent; where the counts cannot be trusted every layer gets the same number of rows instead. Pure: the same input is the
same plan, on every machine.

Shapes: L MoE layers, E routed experts per layer.

    >>> model = ModelIdentity(layers=(0, 1), num_experts=4, top_k=1)
    >>> counts_LE = np.array([[70.0, 10, 10, 10], [40.0, 30, 20, 10]])
    >>> histogram = Histogram(identity=model, phases={"decode": PhaseCounts(counts=counts_LE, tokens=100)})
    >>> plan, notices = plan_fraction(histogram, fraction=0.5, options=PlanOptions())
    >>> plan.hot
    ((0,), (0, 1, 2))
    >>> plan.proof.hit_rate, plan.proof.null, plan.proof.bound
    (0.8, 0.5, 0.8)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, PlanError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.budget import (
    StageBudget,
    best_subset,
    fractional_bound,
    greedy,
    require_enough,
    spend,
    spread,
    stage_bound,
    stage_layers,
)
from hotsplit.plan.evaluate import Evaluation, drift, evaluate
from hotsplit.plan.histogram import Histogram, PhaseCounts, planning_counts, validate
from hotsplit.plan.identity import ModelIdentity, require_same
from hotsplit.plan.objectives import OBJECTIVES, shares_of
from hotsplit.plan.planfile import Plan, PlanIdentity, Proof, Stage
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import GIB

__all__ = [
    "OBJECTIVES",
    "USEFUL",
    "PlanOptions",
    "best_subset",
    "fractional_bound",
    "greedy",
    "make_plan",
    "plan_fraction",
    "stage_layers",
]

USEFUL = 0.02
"""Counts must beat a blind choice by this much, two points of hit rate, or the plan spreads evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How to plan."""

    dynamic: bool = True
    """Whether experts will swap while the model runs: every layer then keeps top_k hot rows and a spare one."""
    objective: str = "share"
    """A name of `OBJECTIVES`."""
    strict: bool = False
    """Whether doubts about the counts are errors."""
    pp: int = 1
    """Pipeline stages."""
    test: Histogram | None = None
    """Counts of other traffic, that the plan is scored on and never made from."""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError("objective", got=repr(self.objective), wanted=" or ".join(sorted(OBJECTIVES)))
        if type(self.pp) is not int or self.pp < 1:
            raise ConfigError("pp", got=repr(self.pp), wanted="an integer >= 1")


def make_plan(
    sizes: ExpertSizes, *, histogram: Histogram | None, budget_bytes: int, options: PlanOptions
) -> tuple[Plan, list[Notice]]:
    """Plan a model.

    Args:
        sizes: Bytes of the model's experts on one rank.
        histogram: Counts to rank on; None spreads evenly.
        budget_bytes: Fast memory that may be taken on one rank, everything counted, in bytes; each stage has it.
        options: How to plan.

    Returns:
        The plan, within its budget, and what was noticed.

    Raises:
        BudgetError: The budget is too small; the message names the least that is enough.
        PlanMismatchError: Counts of another model.
        PlanError: In strict mode, counts that are of no use; more stages than layers.
        HistogramError: Counts that cannot be believed.
    """
    stages, notices = _model_stages(sizes, budget_bytes=budget_bytes, options=options)
    identity = PlanIdentity(model=sizes.identity, headers_hash=sizes.headers_hash, tp=sizes.tp, pp=options.pp)
    plan, more = _choose(identity, stages=stages, histogram=histogram, options=options)
    return plan, notices + more


def plan_fraction(histogram: Histogram, *, fraction: float, options: PlanOptions) -> tuple[Plan, list[Notice]]:
    """Plan without a model: floor(fraction x L x E) experts of equal size, no spare rows, no minimum per layer.

    Args:
        histogram: Counts to rank on.
        fraction: Of all experts, 0 to 1, taken as it is written: 0.29 of 100 experts are 29.
        options: How to plan; `dynamic` and `pp` do not matter here.

    Returns:
        The plan, in rows of one byte, and what was noticed.

    Raises:
        ConfigError: The fraction is out of its range.
        PlanMismatchError: Test counts of another model.
        PlanError: In strict mode, counts that are of no use.
        HistogramError: Counts that cannot be believed.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError("hot fraction", got=repr(fraction), wanted="a number from 0 to 1")
    model = histogram.identity
    num_experts = model.num_experts or 0
    stage = StageBudget(
        layers=histogram.layers,
        row_bytes=np.ones(len(histogram.layers), dtype=np.int64),
        num_experts=num_experts,
        budget_bytes=math.floor(Fraction(repr(float(fraction))) * len(histogram.layers) * num_experts),
    )
    return _choose(PlanIdentity(model=model), stages=[stage], histogram=histogram, options=options)


def _model_stages(
    sizes: ExpertSizes, *, budget_bytes: int, options: PlanOptions
) -> tuple[list[StageBudget], list[Notice]]:
    """What every pipeline stage may spend: the budget, or all it has where that is less."""
    model = sizes.identity
    if model.layers is None or model.num_experts is None or model.top_k is None:
        raise PlanError("sizes of the model", got=str(model), wanted="layers, num_experts and top_k")
    stages: list[StageBudget] = []
    for layers in stage_layers(model.layers, num_decoder_layers=sizes.num_decoder_layers, pp=options.pp):
        mine = [model.layers.index(layer) for layer in layers]
        stage = StageBudget(
            layers=layers,
            row_bytes=sizes.row_bytes[mine],
            num_experts=model.num_experts,
            budget_bytes=budget_bytes,
            fixed_bytes=int(sizes.fixed_bytes[mine].sum()),
            swap_rows=model.top_k if options.dynamic else 0,
        )
        stages.append(replace(stage, budget_bytes=min(budget_bytes, stage.all_bytes)))
    require_enough(stages)
    most = max(stage.all_bytes for stage in stages)
    if budget_bytes <= most:
        return stages, []
    text = (
        f"the hot budget of {budget_bytes / GIB:.6g} GiB is more than the routed experts take, {most / GIB:.6g} GiB "
        "on a rank: capped to that, everything is hot"
    )
    return stages, [Notice(name="budget-capped", text=text, strict=False)]


def _choose(
    identity: PlanIdentity, *, stages: Sequence[StageBudget], histogram: Histogram | None, options: PlanOptions
) -> tuple[Plan, list[Notice]]:
    """Rank, spend and prove; spread evenly instead where the counts are of no use."""
    model, test = identity.model, options.test
    counted, notices = _believed(histogram, model=model, what="the histogram")
    notices += _believed(test, model=model, what="the test histogram")[1]
    doubt = _doubt(counted)
    shares_LE = shares_of(counted.counts) if counted else np.full(_shape(model), 1.0 / (model.num_experts or 1))
    plan = _plan(identity, stages=stages, shares=shares_LE, even=doubt is not None, options=options)
    evaluation = evaluate(plan, histogram=histogram, test=test)
    held_out = evaluation.held_out
    if doubt is None and (doubt := _held_out_doubt(evaluation, layers=plan.layers)):
        plan = _plan(identity, stages=stages, shares=shares_LE, even=True, options=options)
        evaluation = evaluate(plan, histogram=histogram, test=test)
    # Where everything fits, no choice was made and there is nothing to doubt.
    notices += [doubt] if doubt and not plan.hot_mask().all() else []
    enforce(notices, strict=options.strict, error=PlanError)
    bound = _bound(shares_LE, stages=stages) if counted else None
    return replace(plan, proof=replace(_proof(evaluation, bound=bound), held_out=held_out)), notices


def _believed(
    histogram: Histogram | None, *, model: ModelIdentity, what: str
) -> tuple[PhaseCounts | None, list[Notice]]:
    """The counts to rank or score on, of this model and valid; doubts about the file are its reader's to tell."""
    if histogram is None:
        return None, []
    notices = [] if histogram.identity is model else require_same(histogram.identity, model, what=what)
    validate(histogram, what=what)
    counted, _, more = planning_counts(histogram)
    return counted, notices + more


def _doubt(counted: PhaseCounts | None) -> Notice | None:
    """Why the counts cannot rank experts under any budget, if so."""
    if counted is None:
        text = "no counts: every layer gets the same number of hot experts, whichever they are"
        return Notice(name="no-histogram", text=text)
    # Half the L1 distance to uniform is the most that any choice of equal-sized experts can gain on a blind one.
    skew = drift(counted.counts, np.ones_like(counted.counts))
    if skew >= USEFUL:
        return None
    text = (
        f"the counts are flat (no choice serves {100 * USEFUL:g} points more than a blind one, at best "
        f"{100 * skew:.1f}): every layer gets the same number of hot experts"
    )
    return Notice(name="no-skew", text=text)


def _held_out_doubt(evaluation: Evaluation, *, layers: Sequence[int]) -> Notice | None:
    """Why the plan is of no use on unseen traffic, if so; the worst layer is named.

    It must beat a blind choice of the same bytes by two points, but never by more than half of what lies between the
    blind choice and nothing or all: with 1 % or 99 % of the experts hot no counts could pass otherwise.
    """
    seen, unseen, null = evaluation.own, evaluation.test, evaluation.null
    if seen is None or unseen is None or unseen.hit_rate - null >= min(USEFUL, null / 2, (1 - null) / 2):
        return None
    worst = unseen.per_layer[layers.index(unseen.worst_layer)]
    text = (
        f"on traffic it has not seen the plan serves {100 * unseen.hit_rate:.1f} %, a blind choice {100 * null:.1f} % "
        f"(in-sample {100 * seen.hit_rate:.1f} %, drift {evaluation.drift or 0:.2f}, worst layer {unseen.worst_layer} "
        f"with {100 * worst:.1f} %): every layer gets the same number of hot experts"
    )
    return Notice(name="held-out-no-better", text=text)


def _plan(
    identity: PlanIdentity,
    *,
    stages: Sequence[StageBudget],
    shares: npt.NDArray[np.float64],
    even: bool,
    options: PlanOptions,
) -> Plan:
    """The plan without its proof."""
    sizes_LE = np.concatenate([np.repeat(stage.row_bytes[:, None], stage.num_experts, axis=1) for stage in stages])
    scores_LE = OBJECTIVES[options.objective](shares, sizes=sizes_LE, top_k=identity.model.top_k or 1)
    parts = _parts(stages)
    hot_LE = np.concatenate([spread(stage) if even else spend(scores_LE[rows], stage=stage) for rows, stage in parts])
    records = [_record(stage, hot=hot_LE[rows]) for rows, stage in parts]
    return Plan(
        identity=identity,
        objective=options.objective,
        row_bytes=tuple(int(size) for stage in stages for size in stage.row_bytes),
        stages=tuple(records),
        hot=_in_order(hot_LE, scores=scores_LE),
        proof=Proof(),
    )


def _record(stage: StageBudget, *, hot: npt.NDArray[np.bool_]) -> Stage:
    """What a stage takes; more than its budget would be a fault of ours, and is never trimmed silently."""
    used = stage.used_bytes(hot.sum(axis=1))
    if used > stage.budget_bytes:
        wanted = f"at most {stage.budget_bytes} bytes"
        raise PlanError("the plan exceeds its budget", got=f"{used} bytes", wanted=wanted, do="report this bug")
    return Stage(layers=stage.layers, budget_bytes=stage.budget_bytes, used_bytes=used, fixed_bytes=stage.fixed_bytes)


def _in_order(hot_LE: npt.NDArray[np.bool_], *, scores: npt.NDArray[np.float64]) -> tuple[tuple[int, ...], ...]:
    """Hot ids per layer, most wanted first, ties by id."""
    order_LE = np.argsort(np.where(hot_LE, -scores, np.inf), axis=1, kind="stable")
    return tuple(
        tuple(order_E[:rows].tolist()) for order_E, rows in zip(order_LE, hot_LE.sum(axis=1).tolist(), strict=True)
    )


def _bound(shares: npt.NDArray[np.float64], *, stages: Sequence[StageBudget]) -> float:
    """Hit rate that no choice under these budgets can beat on these counts."""
    return math.fsum(stage_bound(shares[rows], stage=stage) for rows, stage in _parts(stages)) / len(shares)


def _proof(evaluation: Evaluation, *, bound: float | None) -> Proof:
    """The headline, but for held-out, beside the bound: a greedy that reaches it differs by rounding alone."""
    hit_rate, scored = evaluation.in_sample, evaluation.scored
    if bound is not None and hit_rate is not None:
        bound = min(max(round(bound, 9), hit_rate), 1.0)
    return Proof(
        hit_rate=hit_rate,
        null=round(evaluation.null, 9),
        bound=bound,
        gap=None if bound is None or hit_rate is None else round(bound - hit_rate, 9),
        oracle_free=scored.oracle_free if scored else None,
        oracle_reachable=scored.oracle_reachable if scored else None,
        worst_layer=scored.worst_layer if scored else None,
    )


def _parts(stages: Sequence[StageBudget]) -> list[tuple[slice, StageBudget]]:
    """Every stage with its rows in arrays of all layers."""
    ends = np.cumsum([len(stage.layers) for stage in stages]).tolist()
    return [(slice(end - len(stage.layers), end), stage) for end, stage in zip(ends, stages, strict=True)]


def _shape(model: ModelIdentity) -> tuple[int, int]:
    return len(model.layers or ()), model.num_experts or 0
