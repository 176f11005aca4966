"""What `hotsplit evaluate` does and how it looks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.histograms import read_histogram
from hotsplit.notices import Notice
from hotsplit.plan.evaluate import Evaluation, Score, evaluate
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.identity import require_same
from hotsplit.plan.planfile import Plan, load_plan, plan_hash
from hotsplit.plan.verdict import Verdict, few_pairs, judge, not_unseen, other_counts, warnings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTask:
    """What `hotsplit evaluate` was asked for."""

    plan: Path
    """Plan file."""
    tests: tuple[str, ...]
    """Histograms of other traffic, FILE or FILE#SET."""
    train: str | None
    """The histogram that the plan was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """A plan on one test."""

    name: str
    """As the user wrote it."""
    evaluation: Evaluation
    """Scores."""
    verdicts: dict[str, Verdict]
    """By phase: decode before prefill."""

    @property
    def phase(self) -> str:
        """The phase that plans rank on, whose verdict is the test's."""
        return self.evaluation.test.phase if self.evaluation.test else next(iter(self.verdicts))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateResult:
    """A plan on all tests."""

    plan: Plan
    """The plan."""
    in_sample: tuple[Score, ...]
    """On the counts that it was made from, by phase; empty without --train."""
    tested: tuple[Tested, ...]
    """In the order given."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def evaluate_plan(task: EvaluateTask) -> EvaluateResult:
    """Read everything, then score.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: A file cannot be read, or is of another model.
    """
    plan = load_plan(task.plan)
    train, notices = _read(task.train, plan=plan) if task.train else (None, [])
    tested: list[Tested] = []
    for name in task.tests:
        test, said = _read(name, plan=plan)
        notices += said
        evaluation = evaluate(plan, histogram=train, test=test)
        verdicts = {}
        for score in evaluation.scores:
            if score.traffic == "held-out":
                what = f"test {name}, {score.phase}"
                verdicts[score.phase] = judge(score, null=evaluation.null)
                notices += few_pairs(test, phase=score.phase, what=what)
                notices += _warnings(verdicts[score.phase], evaluation=evaluation, score=score, what=what)
        notices += not_unseen(plan, evaluation=evaluation, what=f"test {name}")
        if not tested:
            notices += other_counts(plan, evaluation=evaluation, what=f"histogram {task.train}")
        tested.append(Tested(name=name, evaluation=evaluation, verdicts=verdicts))
    own = () if train is None else tuple(s for s in tested[0].evaluation.scores if s.traffic == "in-sample")
    return EvaluateResult(plan=plan, in_sample=own, tested=tuple(tested), notices=tuple(notices))


def _read(name: str, *, plan: Plan) -> tuple[Histogram, list[Notice]]:
    """A histogram of the plan's model."""
    histogram, notices = read_histogram(name, layers=plan.layers)
    return histogram, notices + require_same(histogram.identity, plan.identity.model, what=f"histogram {name}")


def _warnings(verdict: Verdict, *, evaluation: Evaluation, score: Score, what: str) -> list[Notice]:
    """Of the phase that plans rank on; in the other one a plan need not be good."""
    notices = warnings_of(verdict, what=what)
    is_ranked_on = evaluation.test is not None and score.phase == evaluation.test.phase
    return notices if is_ranked_on else [replace(notice, strict=False) for notice in notices]


def evaluation_json(result: EvaluateResult) -> dict[str, Any]:
    """The scores and verdicts.

    Args:
        result: From evaluate_plan.
    """
    null = result.tested[0].evaluation.null
    return {
        "kind": "evaluation",
        "plan": plan_hash(result.plan),
        "model": result.plan.identity.model.to_json(),
        "null": null,
        "in_sample": [_score_json(score, plan=result.plan) for score in result.in_sample],
        "tests": [_tested_json(tested, plan=result.plan) for tested in result.tested],
        "notices": [str(notice) for notice in result.notices],
    }


def _tested_json(tested: Tested, *, plan: Plan) -> dict[str, Any]:
    main = tested.verdicts[tested.phase]
    return {
        "name": tested.name,
        "verdict": main.name,
        "words": main.words,
        "drift": tested.evaluation.drift,
        "scores": [
            {
                **_score_json(score, plan=plan),
                "verdict": tested.verdicts[score.phase].name,
                "captured": tested.verdicts[score.phase].captured,
            }
            for score in tested.evaluation.scores
            if score.traffic == "held-out"
        ],
    }


def _score_json(score: Score, *, plan: Plan) -> dict[str, Any]:
    return {
        "phase": score.phase,
        "hit_rate": score.hit_rate,
        "oracle_reachable": score.oracle_reachable,
        "oracle_free": score.oracle_free,
        "layer_order": score.layer_order,
        "worst_layer": score.worst_layer,
        "worst_rate": min(score.per_layer),
        "per_layer": {str(layer): found for layer, found in zip(plan.layers, score.per_layer, strict=True)},
    }


def print_evaluation(result: EvaluateResult, *, per_layer: bool) -> None:
    """One row per traffic and phase, then the verdicts.

    Args:
        result: From evaluate_plan.
        per_layer: Whether to print every layer.
    """
    null = result.tested[0].evaluation.null
    rows = [_row(f"in-sample, {score.phase}", score, null=null) for score in result.in_sample]
    for tested in result.tested:
        unseen = [score for score in tested.evaluation.scores if score.traffic == "held-out"]
        rows += [_row(f"{Path(tested.name).name}, {score.phase}", score, null=null) for score in unseen]
    columns = ["hit rate on", "plan", "null", "layer\norder", "oracle\nreachable", "oracle\nfree", "worst\nlayer"]
    console.table("", columns=columns, rows=rows)
    for tested in result.tested:
        _print_verdict(tested)
    if per_layer:
        _print_layers(result)


def _row(name: str, score: Score, *, null: float) -> list[str]:
    worst = f"{rate(min(score.per_layer))} ({score.worst_layer})"
    rates = (score.hit_rate, null, score.layer_order, score.oracle_reachable, score.oracle_free)
    return [name, *(rate(one) for one in rates), worst]


def _print_verdict(tested: Tested) -> None:
    """A sentence per phase, the one that plans rank on first."""
    for phase in sorted(tested.verdicts, key=lambda phase: phase != tested.phase):
        verdict = tested.verdicts[phase]
        told = (
            ""
            if verdict.captured is None
            else f" ({rate(verdict.captured)} of what these hot rows could add to chance)"
        )
        console.prose(
            f"{Path(tested.name).name}, {phase}: {verdict.words}{told}", style="bold" if phase == tested.phase else ""
        )
    if tested.evaluation.drift is not None:
        console.prose(f"drift from the counts it was made from: {tested.evaluation.drift:.3f} (0 the same, 1 nothing)")


def _print_layers(result: EvaluateResult) -> None:
    """Every layer's hit rate on every traffic."""
    named = [(f"in-sample\n{score.phase}", score) for score in result.in_sample]
    for tested in result.tested:
        unseen = [score for score in tested.evaluation.scores if score.traffic == "held-out"]
        named += [(f"{Path(tested.name).name}\n{score.phase}", score) for score in unseen]
    rows = [
        [str(layer), str(len(hot)), *(rate(score.per_layer[layer_id]) for _, score in named)]
        for layer_id, (layer, hot) in enumerate(zip(result.plan.layers, result.plan.hot, strict=True))
    ]
    console.table("", columns=["layer", "hot", *(name for name, _ in named)], rows=rows)
