"""Which plan rules: the one given, or one made from counts, learned or not, under the budget.

The last step of plan: every engine calls it with plain values and gets a plan, the counts behind it, and all that has
to be said aloud.

Order of precedence: a plan file; else counts merged with learned ones; else learned alone; else uniform.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, HistogramError, PlanError, PlanMismatchError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.evaluate import hit_rate
from hotsplit.plan.histogram import Histogram, planning_counts, validate
from hotsplit.plan.identity import require_same
from hotsplit.plan.learned import choose_counts, load_learned
from hotsplit.plan.planfile import Plan, load_plan, require_plan_for
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import ExpertSizes, left_out
from hotsplit.units import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a user asked for."""

    budget_bytes: int
    """Fast memory that hotsplit may take on this rank, everything counted."""
    is_budget_given: bool = False
    """Whether a user named it; a default gives way to the plan file's own budget."""
    plan: Path | None = None
    """A plan to use as it is."""
    counts: str | None = None
    """A histogram, FILE or FILE#SET."""
    state_dir: Path | None = None
    """Where learned counts lie; None to look for none."""
    force: bool = False
    """Use a plan or histogram of another model all the same."""
    options: PlanOptions = field(default_factory=PlanOptions)
    """Objective, mode, strictness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """What rules, and why."""

    plan: Plan
    """The plan."""
    prior: npt.NDArray[np.float64] | None
    """Counts that the live ones start from, [L, E]; None for uniform."""
    origin: str
    """One line for the log: what was used, with which weight."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


_UNBELIEVED = {"held-out-no-better", "no-skew"}
"""Notices of the planner on counts that it did not rank on: the live loop must not start from them either."""


def read_counts(name: str | None, *, sizes: ExpertSizes, force: bool = False) -> tuple[Histogram | None, list[Notice]]:
    """Read a histogram for a model.

    Args:
        name: FILE or FILE#SET; None for none.
        sizes: Of the model.
        force: Take counts of another model as this one's, if they have its layers and number of experts.

    Raises:
        PlanMismatchError: Counts of another model.
        HistogramError: Unreadable or not believable.
    """
    if name is None:
        return None, []
    what = f"histogram {name}"
    histogram, notices = load_histogram(name, layers=sizes.identity.layers)
    theirs, mine = histogram.identity, sizes.identity
    notices = notices + require_same(theirs, mine, what=what, force=force)
    if (mine.layers, mine.num_experts) != (theirs.layers, theirs.num_experts):
        raise PlanMismatchError(
            f"{what} was made for another model",
            got="other layers or another number of experts",
            do="--force cannot help here: make one for this model",
        )
    if theirs.top_k not in (None, mine.top_k):
        # Forced: another number of experts per token stands behind these tokens.
        phases = {phase: replace(counted, tokens=None) for phase, counted in histogram.phases.items()}
        histogram = replace(histogram, phases=phases)
    histogram = replace(histogram, identity=mine)
    validate(histogram, what=what)  # once more, now that the number of experts per token is known
    return histogram, notices


def choose_plan(sizes: ExpertSizes, *, request: PlanRequest) -> PlanChoice:
    """Find or make the plan for a model.

    Args:
        sizes: Of the model at hand.
        request: What was asked for.

    Raises:
        HotsplitError: A file is unreadable, of another model, or nothing fits the budget.
    """
    reference, notices = read_counts(request.counts, sizes=sizes, force=request.force)
    enforce(notices, strict=request.options.strict, error=HistogramError)
    notices += left_out(sizes)
    learned = None
    if request.state_dir is not None:
        learned, said = load_learned(request.state_dir, sizes.identity, quantisation=sizes.quantisation)
        notices += said
    counts, origin, said = choose_counts(reference, learned, use_learned=request.state_dir is not None)
    notices += said
    if request.plan is not None:
        plan, said = _given(request, sizes=sizes)
        origin = f"plan {request.plan}; the live loop starts from {origin}"
        if reference is not None:
            said = [*said, _scored(plan, reference)]
    else:
        plan, said = make_plan(sizes, histogram=counts, budget_bytes=request.budget_bytes, options=request.options)
    notices += said
    is_believed = counts is not None and not {notice.name for notice in notices} & _UNBELIEVED
    prior = planning_counts(counts)[0].counts if counts is not None and is_believed else None
    return PlanChoice(plan=plan, prior=prior, origin=origin, notices=tuple(notices))


def _given(request: PlanRequest, *, sizes: ExpertSizes) -> tuple[Plan, list[Notice]]:
    """A plan file, checked against the model, the mode and a budget that was named."""
    path = request.plan
    if path is None:
        raise PlanError("no plan file")
    plan = load_plan(path)
    notices = require_plan_for(plan, sizes, force=request.force)
    what = f"plan {path}"
    if len(plan.stages) > 1:
        raise PlanMismatchError(
            f"{what} was made for several pipeline stages",
            got=f"pp is {plan.identity.pp}, not 1",
            do="make one without --pp",
        )
    budget = plan.stages[0].budget_bytes
    if request.is_budget_given and min(request.budget_bytes, sizes.expert_bytes) != budget:
        raise PlanError(
            what,
            got=f"a budget of {gib(budget)} in the plan and {gib(request.budget_bytes)} given",
            do="leave HOTSPLIT_HOT_GIB out, or make a plan for it",
        )
    if request.options.dynamic:
        _require_rows(plan, sizes=sizes, what=what)
    needed = needed_bytes(plan, sizes=sizes, dynamic=request.options.dynamic)
    if needed > budget:
        raise BudgetError(
            what,
            got=gib(needed) + (" with its spare rows" if request.options.dynamic else ""),
            wanted=f"at most {gib(budget)}",
            do="make the plan anew for this mode and model, or set HOTSPLIT_DYNAMIC=0",
        )
    return plan, notices


def _require_rows(plan: Plan, *, sizes: ExpertSizes, what: str) -> None:
    """In dynamic mode every layer that is not wholly hot keeps top_k hot rows: fewer, and no token is served by them."""
    hot_L, num_experts = plan.hot_rows(), sizes.identity.num_experts or 0
    least = min(sizes.identity.top_k or 1, num_experts)
    short = np.flatnonzero(hot_L < least)
    if short.size:
        layer = plan.layers[int(short[0])]
        raise BudgetError(
            f"{what}, layer {layer}",
            got=f"{hot_L[short[0]]} hot experts",
            wanted=f"at least {least} in every layer, one for each that a token chooses",
            do="make the plan anew for dynamic mode, or set HOTSPLIT_DYNAMIC=0",
            layer=layer,
            minimum_rows=least,
        )


def _scored(plan: Plan, counts: Histogram) -> Notice:
    """Beside a plan file, counts do not choose: they say how good it is."""
    counted, phase, _ = planning_counts(counts)
    rate = hit_rate(plan.hot_mask(), counts=counted.counts)
    text = f"the plan file rules; HOTSPLIT_COUNTS only scores it: it serves {rate:.3f} of their {phase} pairs"
    return Notice(name="counts-score-plan", text=text, strict=False)


def needed_bytes(plan: Plan, *, sizes: ExpertSizes, dynamic: bool) -> int:
    """Fast memory that a plan takes with this model's real rows.

    Args:
        plan: Which experts are hot.
        sizes: What they weigh.
        dynamic: Whether layers that are neither wholly hot nor wholly cold get a spare row.
    """
    hot_L = plan.hot_rows()
    num_experts = sizes.identity.num_experts or 0
    spare_L = ((hot_L > 0) & (hot_L < num_experts)) if dynamic else np.zeros(len(hot_L), dtype=bool)
    return int(((hot_L + spare_L) * sizes.row_bytes).sum() + sizes.fixed_bytes.sum())
