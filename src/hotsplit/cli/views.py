"""How results look: JSON objects with stable keys, and plain tables."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import numpy.typing as npt

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.work import Opened, PlanResult, counted
from hotsplit.metrics import MetricsSnapshot
from hotsplit.plan.evaluate import Evaluation
from hotsplit.plan.histogram import PHASES, Histogram
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planfile import Plan, plan_hash
from hotsplit.plan.trace import Trace
from hotsplit.units import gib

COVERAGE = (0.1, 0.2, 0.3, 0.5)
"""Shares of all experts at which a histogram's skew is shown."""


def coverage(counts: npt.NDArray[np.float64], *, share: float) -> float:
    """How much of the traffic the most used experts serve, in one ranking over all layers.

    Args:
        counts: Routed pairs, [L, E].
        share: Of all experts.
    """
    falling = -np.sort(-shares_of(counts).ravel())
    return float(falling[: int(share * falling.size)].sum() / len(counts))


def histogram_json(histogram: Histogram) -> dict[str, Any]:
    """A histogram's facts.

    Args:
        histogram: Counts.
    """
    return {
        "kind": "histogram",
        "model": {"name": histogram.name, **histogram.identity.to_json()},
        "normalised": histogram.normalised,
        "phases": {
            phase: {
                "tokens": counted_.tokens,
                "pairs": float(counted_.counts.sum()),
                "unused_experts": int((counted_.counts == 0).sum()),
                "coverage": {f"{share:g}": coverage(counted_.counts, share=share) for share in COVERAGE},
            }
            for phase, counted_ in histogram.phases.items()
        },
    }


def print_histogram(histogram: Histogram, *, name: str) -> None:
    """Skew per phase: what the most used experts serve.

    Args:
        histogram: Counts.
        name: For the title.
    """
    identity = histogram.identity
    heading = f"{name}: {len(histogram.layers)} layers x {identity.num_experts} experts, top-{identity.top_k or '?'}"
    rows = []
    for phase in [phase for phase in PHASES if phase in histogram.phases]:
        found = histogram.phases[phase]
        shown = [rate(coverage(found.counts, share=share)) for share in COVERAGE]
        tokens = "-" if found.tokens is None else f"{found.tokens:,}"
        rows.append([phase, tokens, *shown, str(int((found.counts == 0).sum()))])
    columns = ["phase", "tokens", *(f"top {100 * share:.0f} %" for share in COVERAGE), "unused"]
    console.table(heading, columns=columns, rows=rows)


def plan_json(result: PlanResult) -> dict[str, Any]:
    """A plan's facts, with its scores.

    Args:
        result: From `hotsplit plan`.
    """
    return {**_plan_facts(result.plan), **_scores_json(result.evaluation), "notices": [str(n) for n in result.notices]}


def _plan_facts(plan: Plan) -> dict[str, Any]:
    proof = plan.proof
    hot_L = plan.hot_rows()
    return {
        "kind": "plan",
        "model": plan.identity.model.to_json(),
        "objective": plan.objective,
        "hash": plan_hash(plan),
        "hot_experts": int(hot_L.sum()),
        "hot_rows": {str(layer): int(hot) for layer, hot in zip(plan.layers, hot_L, strict=True)},
        "hot": {str(layer): list(experts) for layer, experts in zip(plan.layers, plan.hot, strict=True)},
        "budget_bytes": [stage.budget_bytes for stage in plan.stages],
        "used_bytes": [stage.used_bytes for stage in plan.stages],
        "hit_rate": proof.hit_rate,
        "held_out": proof.held_out,
        "null": proof.null,
        "oracle_free": proof.oracle_free,
        "oracle_reachable": proof.oracle_reachable,
        "bound": proof.bound,
        "gap": proof.gap,
        "worst_layer": proof.worst_layer,
    }


def _scores_json(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "layer_order": evaluation.scored.layer_order if evaluation.scored else None,
        "drift": evaluation.drift,
        "scores": [
            {
                "traffic": score.traffic,
                "phase": score.phase,
                "hit_rate": score.hit_rate,
                "oracle_free": score.oracle_free,
                "oracle_reachable": score.oracle_reachable,
                "layer_order": score.layer_order,
                "worst_layer": score.worst_layer,
                "worst_rate": min(score.per_layer),
            }
            for score in evaluation.scores
        ],
    }


def print_plan(result: PlanResult) -> None:
    """What is hot, what it costs, and how good it is.

    Args:
        result: From `hotsplit plan`.
    """
    print_plan_facts(result.plan, has_model=result.sizes is not None)
    print_scores(result.evaluation)


def print_plan_facts(plan: Plan, *, has_model: bool) -> None:
    """Hot experts and bytes per stage.

    Args:
        plan: The plan.
        has_model: Whether its rows are real bytes.
    """
    hot_L, num_experts = plan.hot_rows(), plan.identity.model.num_experts or 0
    per_layer = f"{hot_L.min()}" if hot_L.min() == hot_L.max() else f"{hot_L.min()} to {hot_L.max()}"
    console.prose(
        f"{int(hot_L.sum())} of {len(hot_L) * num_experts} experts are hot, {per_layer} per layer "
        f"({len(hot_L)} layers x {num_experts}); objective {plan.objective}; plan {plan_hash(plan)[:12]}"
    )
    for i, stage in enumerate(plan.stages if has_model else ()):
        where = f"stage {i}: " if len(plan.stages) > 1 else ""
        fixed = f", {gib(stage.fixed_bytes)} of it for all experts" if stage.fixed_bytes else ""
        console.prose(f"{where}uses {gib(stage.used_bytes)} of {gib(stage.budget_bytes)}{fixed}")


def print_scores(evaluation: Evaluation) -> None:
    """Hit rates on every traffic and phase, beside what was possible.

    Args:
        evaluation: Of the plan.
    """
    rows = [
        [
            f"{score.traffic}, {score.phase}",
            rate(score.hit_rate),
            rate(evaluation.null),
            rate(score.layer_order),
            rate(score.oracle_reachable),
            rate(score.oracle_free),
            f"{rate(min(score.per_layer))} ({score.worst_layer})",
        ]
        for score in evaluation.scores
    ]
    if rows:
        columns = ["hit rate on", "plan", "null", "layer\norder", "oracle\nreachable", "oracle\nfree", "worst\nlayer"]
        console.table("", columns=columns, rows=rows)
    if evaluation.drift is not None:
        console.prose(f"drift between the two: {evaluation.drift:.3f} (0 the same, 1 nothing in common)")


def show_json(opened: Opened) -> dict[str, Any]:
    """The facts of any file.

    Args:
        opened: From open_any.
    """
    content = opened.content
    if isinstance(content, Plan):
        return _plan_facts(content)
    if isinstance(content, MetricsSnapshot):
        return _snapshot_json(content)
    if isinstance(content, Trace):
        return {**histogram_json(counted(content)), "kind": "trace", "domains": list(content.domains)}
    return histogram_json(content)


def print_any(opened: Opened) -> None:
    """The facts of any file, as tables.

    Args:
        opened: From open_any.
    """
    content = opened.content
    if isinstance(content, Plan):
        print_plan_facts(content, has_model=content.identity.headers_hash is not None)
        _print_proof(content)
        return
    if isinstance(content, MetricsSnapshot):
        _print_snapshot(content, name=opened.name)
        return
    if isinstance(content, Trace):
        steps = len(np.unique(content.step))
        domains = f"; domains {', '.join(content.domains)}" if content.domains else ""
        console.out.print(f"{len(content.experts):,} tokens in {steps:,} steps{domains}")
        content = counted(content)
    print_histogram(content, name=opened.name)


_PROOF = {
    "in-sample": "hit_rate",
    "held-out": "held_out",
    "null": "null",
    "oracle reachable": "oracle_reachable",
    "oracle free": "oracle_free",
    "bound": "bound",
    "gap": "gap",
}
"""The rates of a proof by the names that `plan` has for them too."""


def _print_proof(plan: Plan) -> None:
    console.table("", columns=["proof", ""], rows=[[name, rate(getattr(plan.proof, _PROOF[name]))] for name in _PROOF])
    if plan.proof.worst_layer is not None:
        console.prose(f"worst layer: {plan.proof.worst_layer}")


def _snapshot_json(snapshot: MetricsSnapshot) -> dict[str, Any]:
    """A snapshot's facts; its counts are many, and stay in the file."""
    facts = {name: value for name, value in snapshot.to_json()["snapshot"].items() if name != "counts"}
    rates = {
        "hit_rate": _hit_rates(snapshot),
        "byte_hit_rate": _byte_hit_rate(snapshot),
        "kept_rate": _kept_rate(snapshot),
    }
    return {"kind": "snapshot", **facts, **rates}


def _hit_rates(snapshot: MetricsSnapshot) -> dict[str, float | None]:
    """Of all traffic so far, by phase; None where there was none."""
    return {
        phase: snapshot.hit_pairs.get(phase, 0) / snapshot.pairs[phase] if snapshot.pairs.get(phase) else None
        for phase in PHASES
    }


def _byte_hit_rate(snapshot: MetricsSnapshot) -> float | None:
    touched = snapshot.touched_hot_bytes + snapshot.touched_cold_bytes
    return snapshot.touched_hot_bytes / touched if touched else None


def _kept_rate(snapshot: MetricsSnapshot) -> float | None:
    touched = snapshot.touched_hot_bytes + snapshot.touched_cold_bytes
    return snapshot.kept_bytes / touched if touched else None


def _print_snapshot(snapshot: MetricsSnapshot, *, name: str) -> None:
    """What a run has done so far: traffic and hit rates, swaps, bytes."""
    rates = _hit_rates(snapshot)
    rows = [[phase, f"{snapshot.tokens.get(phase, 0):,}", rate(rates[phase])] for phase in PHASES]
    title = f"{name}: rank {snapshot.rank}, {snapshot.mode}, {snapshot.steps:,} steps, plan {snapshot.plan_hash[:12]}"
    console.table(title, columns=["phase", "tokens", "hit rate"], rows=rows)
    console.prose(
        f"byte hit rate {rate(_byte_hit_rate(snapshot))} of {gib(snapshot.touched_hot_bytes + snapshot.touched_cold_bytes)} "
        "touched" + (f", {rate(_kept_rate(snapshot))} more kept in slots" if snapshot.kept_bytes else "")
    )
    console.prose(
        f"{snapshot.swaps_done} swaps ({gib(snapshot.swap_bytes)} copied), {snapshot.swaps_refused} refused, "
        f"{snapshot.swaps_failed} failed; {snapshot.update_failures} updates failed"
    )
    console.prose(
        f"{gib(snapshot.hot_bytes)} hot of a budget of {gib(snapshot.budget_bytes)}, {gib(snapshot.host_bytes)} cold"
    )
    if snapshot.hit_ratio_window is not None:
        kept = snapshot.kept_ratio_window
        console.prose(
            f"last window: hit rate {rate(snapshot.hit_ratio_window)}, byte hit rate "
            f"{rate(snapshot.byte_hit_ratio_window)}, {'' if kept is None else f'kept in slots {rate(kept)}, '}oracle reachable {rate(snapshot.oracle_ratio_window)}"
        )


def print_run(result: dict[str, Any], *, is_text_shown: bool = False) -> None:
    """The text on stdout, the numbers on stderr.

    Args:
        result: From `hotsplit run`.
        is_text_shown: The text is on the terminal already.
    """
    if not is_text_shown:
        click.echo(result["text"])  # as the model wrote it: a console would turn its tabs into blanks
    speed = f"{result['new_tokens']} tokens in {result['seconds']:.1f} s"
    if result["hit_rate"] is None:
        console.note(speed)
        return
    kept = f", kept in slots {rate(result['kept_rate'])}" if result["kept_rate"] else ""
    console.note(
        f"{speed}; hit rate {rate(result['hit_rate'])} (byte hit rate {rate(result['byte_hit_rate'])}{kept}); "
        f"{result['hot_experts']} of {result['experts']} experts hot, {gib(result['hot_bytes'])} of "
        f"{gib(result['budget_bytes'])}; {result['swaps']} swaps in {result['updates']} updates"
    )
