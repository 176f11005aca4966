"""Which plan rules: the one given, or one made from counts, learned or not, under the budget.

The last step of plan: every engine calls it with plain values and gets a plan, the counts behind it, and all that has
to be said aloud.

Order of precedence: a plan file; else counts merged with learned ones; else learned alone; else uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, PlanError, PlanMismatchError
from hotsplit.units import gib
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, planning_counts
from hotsplit.plan.identity import require_same
from hotsplit.plan.learned import choose_counts, load_learned
from hotsplit.plan.planfile import Plan, load_plan, require_plan_for
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import ExpertSizes


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
    options: PlanOptions = PlanOptions()
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


def choose_plan(sizes: ExpertSizes, *, request: PlanRequest) -> PlanChoice:
    """Find or make the plan for a model.

    Args:
        sizes: Of the model at hand.
        request: What was asked for.

    Raises:
        HotsplitError: A file is unreadable, of another model, or nothing fits the budget.
    """
    notices: list[Notice] = []
    reference = None
    if request.counts is not None:
        reference, said = load_histogram(request.counts)
        what = f"histogram {request.counts}"
        notices += said + require_same(reference.identity, sizes.identity, what=what, force=request.force)
        _require_shape(reference, sizes, what=what)
        enforce(said, strict=request.options.strict, error=PlanError)
    learned = None
    if request.state_dir is not None:
        learned, said = load_learned(request.state_dir, sizes.identity)
        notices += said
    counts, origin, said = choose_counts(reference, learned, use_learned=request.state_dir is not None)
    notices += said
    if request.plan is not None:
        plan, said = _given(request, sizes=sizes)
        origin = f"plan {request.plan}"
    else:
        plan, said = make_plan(sizes, histogram=counts, budget_bytes=request.budget_bytes, options=request.options)
    prior = None if counts is None else planning_counts(counts)[0].counts
    return PlanChoice(plan=plan, prior=prior, origin=origin, notices=tuple(notices + said))


def _given(request: PlanRequest, *, sizes: ExpertSizes) -> tuple[Plan, list[Notice]]:
    """A plan file, checked against the model, the mode and a budget that was named."""
    path = request.plan
    if path is None:
        raise PlanError("no plan file")
    plan = load_plan(path)
    notices = require_plan_for(plan, sizes, force=request.force)
    budget = plan.stages[0].budget_bytes
    has_model = plan.identity.headers_hash is not None
    if request.is_budget_given and has_model and min(request.budget_bytes, sizes.expert_bytes) != budget:
        raise PlanError(
            f"plan {path}",
            got=f"a budget of {gib(budget)} in the plan and {gib(request.budget_bytes)} given",
            do="leave HOTSPLIT_HOT_GIB out, or make a plan for it",
        )
    needed = needed_bytes(plan, sizes=sizes, dynamic=request.options.dynamic)
    allowed = budget if has_model else request.budget_bytes
    if needed > allowed:
        raise BudgetError(
            f"plan {path}",
            got=gib(needed) + (" with its spare rows" if request.options.dynamic else ""),
            wanted=f"at most {gib(allowed)}",
            do="make the plan anew for this mode and model, or set HOTSPLIT_DYNAMIC=0",
        )
    return plan, notices


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


def _require_shape(histogram: Histogram, sizes: ExpertSizes, *, what: str) -> None:
    """Force cannot bend arrays: layers and experts must agree even then."""
    mine, theirs = sizes.identity, histogram.identity
    if (mine.layers, mine.num_experts) != (theirs.layers, theirs.num_experts):
        raise PlanMismatchError(
            f"{what} was made for another model",
            got="other layers or another number of experts",
            do="--force cannot help here: make one for this model",
        )
