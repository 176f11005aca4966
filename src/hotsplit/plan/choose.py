"""Which plan rules: the one given, or one made from counts, learned or not, under the budget.

The last step of plan: every engine calls it with plain values and gets a plan, the counts behind it, and all that has
to be said aloud.

Order of precedence: a plan file; else counts merged with learned ones; else learned alone; else uniform.

Where an engine has several ranks each of them calls it with the same values and files, and gets the same plan of all
pipeline stages; what concerns the rank itself is the `part` of its stage. Learned counts are those of all stages, since
all of them are planned here (docs/decisions/0019).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, ConfigError, HistogramError, PlanError, PlanMismatchError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.budget import stage_layers
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.evaluate import hit_rate
from hotsplit.plan.histogram import Histogram, planning_counts, validate
from hotsplit.plan.identity import ModelIdentity, require_same
from hotsplit.plan.learned import choose_counts, load_learned_stages
from hotsplit.plan.planfile import Plan, load_plan, require_plan_for
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import ExpertSizes, left_out
from hotsplit.plan.stage import StagePlan, stage_of
from hotsplit.units import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a user asked for."""

    budget_bytes: int
    """Fast memory that hotsplit may take on each rank, everything counted: the same number on all of them."""
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
    """Objective, mode, strictness, number of pipeline stages."""
    stage: int = 0
    """Pipeline stage of this rank, below options.pp. The plan does not depend on it."""

    def __post_init__(self) -> None:
        if type(self.stage) is not int or not 0 <= self.stage < self.options.pp:
            raise ConfigError("stage", got=repr(self.stage), wanted=f"an integer from 0 to {self.options.pp - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """What rules, and why."""

    plan: Plan
    """The plan, of all pipeline stages."""
    part: StagePlan
    """What of it this rank holds."""
    prior: npt.NDArray[np.float64] | None
    """Counts that the live ones start from, [L, E] over all stages; None for uniform. `part.rows_of` has the rank's."""
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
    learned, identities = None, _stage_identities(sizes, pp=request.options.pp)
    if request.state_dir is not None:
        learned, said = load_learned_stages(request.state_dir, identities, quantisation=sizes.quantisation)
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
    # A plan that was forced names another model, but what is counted by it is counted on this one.
    part = replace(stage_of(plan, request.stage), identity=identities[request.stage])
    return PlanChoice(plan=plan, part=part, prior=prior, origin=origin, notices=tuple(notices))


def _given(request: PlanRequest, *, sizes: ExpertSizes) -> tuple[Plan, list[Notice]]:
    """A plan file, checked against the model, the mode and a budget that was named."""
    path = request.plan
    if path is None:
        raise PlanError("no plan file")
    plan = load_plan(path)
    notices = require_plan_for(plan, sizes, force=request.force)
    what = f"plan {path}"
    _require_stages(plan, sizes=sizes, pp=request.options.pp, what=what)
    if request.options.dynamic:
        _require_rows(plan, sizes=sizes, what=what)
    for stage in range(len(plan.stages)):
        where = what if len(plan.stages) == 1 else f"{what}, stage {stage}"
        _require_budget(stage_of(plan, stage), request=request, sizes=sizes, what=where)
    return plan, notices


def _stage_identities(sizes: ExpertSizes, *, pp: int) -> list[ModelIdentity]:
    """The model's identity with the layers of every pipeline stage."""
    stages = stage_layers(sizes.identity.layers or (), num_decoder_layers=sizes.num_decoder_layers, pp=pp)
    return [replace(sizes.identity, layers=layers) for layers in stages]


def _require_stages(plan: Plan, *, sizes: ExpertSizes, pp: int, what: str) -> None:
    """The stages are those of this run: force cannot help, since a rank would hold other layers than it plans."""
    theirs = [len(stage.layers) for stage in plan.stages]
    ours = [len(identity.layers or ()) for identity in _stage_identities(sizes, pp=pp)]
    if theirs != ours:
        is_size = plan.identity.pp != pp
        differs = f"pp is {plan.identity.pp}, not {pp}" if is_size else f"MoE layers per stage are {theirs}, not {ours}"
        raise PlanMismatchError(
            f"{what} was made for other pipeline stages",
            got=differs,
            do=f"make one with --pp {pp}" if pp > 1 else "make one without --pp",
            differing=[differs],
        )


def _require_budget(part: StagePlan, *, request: PlanRequest, sizes: ExpertSizes, what: str) -> None:
    """A stage keeps its own budget, and that is the one that was named."""
    budget, dynamic = part.budget_bytes, request.options.dynamic
    num_experts = sizes.identity.num_experts or 0
    all_bytes = int((part.rows_of(sizes.row_bytes) * num_experts + part.rows_of(sizes.fixed_bytes)).sum())
    if request.is_budget_given and min(request.budget_bytes, all_bytes) != budget:
        raise PlanError(
            what,
            got=f"a budget of {gib(budget)} in the plan and {gib(request.budget_bytes)} given",
            do="leave HOTSPLIT_HOT_GIB out, or make a plan for it",
        )
    needed = _needed(part, sizes=sizes, dynamic=dynamic)
    if needed > budget:
        raise BudgetError(
            what,
            got=gib(needed) + (" with its spare rows" if dynamic else ""),
            wanted=f"at most {gib(budget)}",
            do="make the plan anew for this mode and model, or set HOTSPLIT_DYNAMIC=0",
        )


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
    """Fast memory that a plan takes with this model's real rows, all stages together.

    Args:
        plan: Which experts are hot.
        sizes: What they weigh.
        dynamic: Whether layers that are neither wholly hot nor wholly cold get a spare row.
    """
    return sum(_needed(stage_of(plan, stage), sizes=sizes, dynamic=dynamic) for stage in range(len(plan.stages)))


def _needed(part: StagePlan, *, sizes: ExpertSizes, dynamic: bool) -> int:
    """The same of one stage."""
    row_bytes, fixed = part.rows_of(sizes.row_bytes).tolist(), int(part.rows_of(sizes.fixed_bytes).sum())
    return part.needed_bytes(dynamic=dynamic, row_bytes=row_bytes, fixed_bytes=fixed)
