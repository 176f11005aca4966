"""What a page is about: plans of one model, the traffic that they are scored on, and a run.

Stands between the files and the page: `plans + histogram (+ test, forecasts, run) -> report -> page`. Every number of
the page is taken from here, so that the page, its tables and `--json` cannot disagree.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotsplit.notices import Notice
from hotsplit.plan.evaluate import Evaluation, Score, evaluate, score
from hotsplit.plan.histogram import PHASES, Histogram, planning_counts
from hotsplit.plan.planfile import Plan, plan_hash
from hotsplit.plan.rates import GivenRates, Rates, machine_of
from hotsplit.plan.verdict import made_from, not_unseen, other_counts
from hotsplit.report.curves import Curves, coverage_curves
from hotsplit.report.live import Run, live_counts, other_plan, require_same_model
from hotsplit.report.speed import Speed, forecast_speed

TRAFFIC = {"in-sample": "its own traffic", "held-out": "unseen traffic", "live": "the run's traffic"}
"""What the page calls the counts that a plan is scored on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Counts that every plan is scored on."""

    kind: str
    """A key of TRAFFIC."""
    phase: str
    """"decode" or "prefill"."""
    counts: npt.NDArray[np.float64]
    """Routed pairs, [L, E], float64."""
    tokens: int | None
    """Tokens behind them; None where not known."""

    @property
    def title(self) -> str:
        """For people: "unseen traffic, decode"."""
        return f"{TRAFFIC[self.kind]}, {self.phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPart:
    """One plan, scored."""

    name: str
    """As the user named its file."""
    plan: Plan
    """The plan."""
    evaluation: Evaluation
    """On its own counts and on the test's."""
    scores: tuple[Score, ...]
    """One for each of the report's kinds of traffic, in their order."""
    curves: Curves
    """Of its ranking, at every budget."""
    speed: Speed | None
    """Its forecast; None without rates."""

    @property
    def digest(self) -> str:
        """The plan's hash."""
        return plan_hash(self.plan)

    @property
    def has_bytes(self) -> bool:
        """Whether its rows are real bytes: a plan by fraction has experts of one byte."""
        return self.plan.identity.headers_hash is not None or set(self.plan.row_bytes) != {1}

    @property
    def hot_bytes(self) -> int:
        """Of the hot experts, on one rank of every stage."""
        rows = zip(self.plan.hot, self.plan.row_bytes, strict=True)
        return sum(len(hot) * size for hot, size in rows)

    @property
    def all_bytes(self) -> int:
        """Of all experts, on one rank of every stage."""
        return sum(self.plan.row_bytes) * (self.plan.identity.model.num_experts or 0)

    @property
    def score(self) -> Score:
        """The one that counts: on the test where there is one."""
        scored = self.evaluation.scored
        return scored if scored is not None else self.scores[0]

    @property
    def has_test(self) -> bool:
        """Whether it was scored on traffic that it has not seen."""
        return self.evaluation.test is not None

    @property
    def has_own_counts(self) -> bool:
        """Whether the counts shown as its own can be those that it was made from."""
        return made_from(self.plan, evaluation=self.evaluation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything on one page."""

    counts_name: str
    """The histogram, as the user named it."""
    test_name: str | None
    """The test histogram, likewise."""
    histogram: Histogram
    """What the plans were made from."""
    traffics: tuple[Traffic, ...]
    """In-sample, held-out, live; decode before prefill."""
    plans: tuple[PlanPart, ...]
    """At least one."""
    run: Run | None
    """A live run."""

    @property
    def model_name(self) -> str:
        """For people."""
        return self.histogram.name or self.histogram.identity.model_type or "a model without a name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What all plans are shown against."""

    name: str
    """Of the one that the plans were made from."""
    histogram: Histogram
    """The counts."""
    test_name: str | None = None
    """Of the one with other traffic."""
    test: Histogram | None = None
    """Its counts."""
    rates: Rates | None = None
    """Of the machine that the plans are for; None to forecast nothing."""


def build_report(
    plans: Sequence[tuple[str, Plan]], *, inputs: Inputs, run: Run | None = None
) -> tuple[Report, list[Notice]]:
    """Score plans and lay out their page.

    Args:
        plans: Names and plans, of the histogram's model.
        inputs: The histogram, and the test's and a machine's rates where there are any.
        run: A run of one of them.

    Returns:
        The report, and notices: what stands in for rates that are not known, a run of none of these plans, counts that
        a plan was not made from, and a test that a plan was made from, which is left out of the page.

    Raises:
        PlanMismatchError: Counts or a run of another model.
        HistogramError: A histogram without any phase.
        RatesError: Rates that are needed are not known.
        PlanError: Rates, and a plan whose rows have no known size.
    """
    if run is not None:
        require_same_model(run, plan=plans[0][1])
    inputs, notices = _unseen_only(plans, inputs=inputs)
    parts = [_part(name, plan, inputs=inputs, notices=notices) for name, plan in plans]
    traffics = [*_traffics(inputs.histogram, kind="in-sample"), *_traffics(inputs.test, kind="held-out")]
    live = _live_traffic(run, plan=plans[0][1])
    if live is not None:
        parts = [_with_live(part, live) for part in parts]
        traffics.append(live)
    report = Report(
        counts_name=inputs.name,
        test_name=inputs.test_name,
        histogram=inputs.histogram,
        traffics=tuple(traffics),
        plans=tuple(parts),
        run=run,
    )
    return report, notices + ([] if run is None else other_plan(run, plans=[plan for _, plan in plans]))


def _unseen_only(plans: Sequence[tuple[str, Plan]], *, inputs: Inputs) -> tuple[Inputs, list[Notice]]:
    """The inputs without a test that a plan was made from: shown, it would pass for unseen traffic."""
    others, seen = [], []
    for name, plan in plans:
        evaluation = evaluate(plan, histogram=inputs.histogram, test=inputs.test)
        others += other_counts(plan, evaluation=evaluation, what=f"plan {name}, histogram {inputs.name}")
        seen += not_unseen(plan, evaluation=evaluation, what=f"plan {name}, test {inputs.test_name}, which is left out")
    return (replace(inputs, test=None, test_name=None) if seen else inputs), others + seen


def _part(name: str, plan: Plan, *, inputs: Inputs, notices: list[Notice]) -> PlanPart:
    evaluation = evaluate(plan, histogram=inputs.histogram, test=inputs.test)
    own = planning_counts(inputs.histogram)[0].counts
    test = None if inputs.test is None else planning_counts(inputs.test)[0].counts
    speed = None
    if inputs.rates is not None:
        ranks = plan.identity.tp * len(plan.stages)
        machine, said = machine_of(inputs.rates, given=GivenRates(), ranks=ranks)
        speed, more = forecast_speed(plan, counts=own, traffic=inputs.test or inputs.histogram, machine=machine)
        notices += [*said, *more]
    curves = coverage_curves(plan, counts=own, test=test)
    return PlanPart(name=name, plan=plan, evaluation=evaluation, scores=evaluation.scores, curves=curves, speed=speed)


def _with_live(part: PlanPart, live: Traffic) -> PlanPart:
    found = score(part.plan, counts=live.counts, traffic=live.kind, phase=live.phase)
    return replace(part, scores=(*part.scores, found))


def _traffics(histogram: Histogram | None, *, kind: str) -> list[Traffic]:
    """Every phase that a histogram has, in the order in which `evaluate` scores them."""
    phases = {} if histogram is None else histogram.phases
    present = [(phase, phases[phase]) for phase in PHASES if phase in phases]
    return [Traffic(kind=kind, phase=phase, counts=found.counts, tokens=found.tokens) for phase, found in present]


def _live_traffic(run: Run | None, *, plan: Plan) -> Traffic | None:
    """What the run has routed, decode before prefill; None where its snapshots do not tell of every layer."""
    if run is None:
        return None
    for phase in PHASES:
        counts_LE = live_counts(run, plan=plan, phase=phase)
        if counts_LE is not None:
            tokens = max(snapshot.tokens.get(phase, 0) for snapshot in run.snapshots.values())
            return Traffic(kind="live", phase=phase, counts=counts_LE, tokens=tokens)
    return None
