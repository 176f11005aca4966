"""The parts of the page about quantities: what a budget buys, how fast it runs, how a run went, what all of it is of.

Stands between report and page. Each figure is a frame that page.js fills, beside a table of the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotsplit.metrics import MetricsSnapshot, UpdateLine
from hotsplit.plan.forecast import StepForecast
from hotsplit.report.blocks import chart, each_plan, paragraph, plan_table, radios, section
from hotsplit.report.content import PlanPart, Report
from hotsplit.report.live import Run
from hotsplit.report.markup import Html, details, element, escape, facts, joined, table
from hotsplit.report.sentences import percent
from hotsplit.units import MIB, gib

TENTHS = tuple(n / 10 for n in range(11))
"""Budgets of the coverage table."""
TABLE_UPDATES = 40
"""Rows of the table of updates; of more, every n-th, the first and the last."""

_BINDS = {"hbm": "fast memory", "link": "link", "host": "host memory", "other": "everything else"}
_KINDS = {"decode": "decode, {} in a batch", "window": "a window of {} tokens", "prefill": "prefill, {} tokens"}


def coverage(report: Report) -> Html:
    """What every budget would serve: the figure, and a table in tenths.

    Args:
        report: What the page is about.
    """
    text = (
        "How much of the traffic fast memory serves, by how much of the experts fits there. The plan is the orange point. The "
        "further the curve bends away from the straight line of a blind choice, the more a good choice is worth."
    )
    title = "Traffic served from fast memory, by budget"
    columns = ["bytes hot", "own traffic", "unseen traffic", "blind", "layers in order", "reachable", "best"]
    tables = plan_table(report, "The curve as a table", columns=columns, make=_coverage_rows)
    return section("budget", "What a budget buys", paragraph(text), chart("coverage", title), tables)


def _coverage_rows(part: PlanPart) -> list[list[str]]:
    curves, score = part.curves, part.score
    lines = [curves.own, curves.unseen, curves.budget, curves.layer_order, curves.oracle_reachable, curves.oracle_free]
    rows = [
        [
            percent(budget),
            *("-" if line is None else percent(float(np.interp(budget, curves.budget, line))) for line in lines),
        ]
        for budget in TENTHS
    ]
    evaluation = part.evaluation
    own = [evaluation.in_sample, evaluation.held_out, evaluation.null, score.layer_order]
    own += [score.oracle_reachable, score.oracle_free]
    return [*rows, [f"the plan: {percent(evaluation.null)}", *map(percent, own)]]


def speed(report: Report) -> Html | None:
    """The forecast's figures and table; None without rates.

    Args:
        report: What the page is about.
    """
    first = report.plans[0].speed
    if first is None:
        return None
    text = (
        "Seconds that a step spends on reading experts, from bytes and this machine\u2019s measured rates. The lower bound lets "
        "reads of fast and slow memory overlap perfectly, the upper one reads one after the other; the truth lies between. "
        "Attention and all other weights are not in it, so real steps are longer."
    )
    charts = [chart(f"forecast-{n}", each.title, data_forecast=str(n)) for n, each in enumerate(first.charts)]
    columns = ["step", "tokens/s", "ms per step", "token hit rate", "byte hit rate", "cold bytes", "waits for"]
    tables = plan_table(report, "The forecast as a table", columns=columns, make=_speed_rows)
    return section(
        "speed", "How fast it would run", paragraph(text), element("div", joined(charts), class_="two"), tables
    )


def _speed_rows(part: PlanPart) -> list[list[str]]:
    return [_speed_row(step) for step in (part.speed.steps if part.speed else ())]


def _speed_row(found: StepForecast) -> list[str]:
    count = found.step.tokens if found.step.requests == 1 and found.step.kind != "decode" else found.step.requests
    return [
        _KINDS[found.step.kind].format(count),
        f"{found.tokens_per_s_low:,.3g} to {found.tokens_per_s_high:,.3g}",
        f"{1e3 * found.seconds_low:.3g} to {1e3 * found.seconds_high:.3g}",
        percent(found.token_hit),
        percent(found.byte_hit),
        gib(round(found.cold_bytes)),
        f"{_BINDS[found.binding.resource]}, rank {found.binding.rank}",
    ]


def live_run(report: Report) -> Html | None:
    """How a run went, update by update, and where it stands; None without one.

    Args:
        report: What the page is about.
    """
    run = report.run
    if run is None:
        return None
    parts = [paragraph(_course(run))]
    if any(len(lines) > 1 for lines in run.lines.values()):
        ranks = [f"rank {rank}" for rank in run.lines]
        parts += [radios("rank", "Rank", ranks)] if len(ranks) > 1 else []
        frames = [
            chart("hits", "Hit rate of every update\u2019s window"),
            chart("drift", "Drift from the plan\u2019s traffic"),
        ]
        parts.append(element("div", joined(frames), class_="two"))
    parts += [_updates(rank, lines) for rank, lines in run.lines.items()]
    parts += [_state(snapshot) for snapshot in run.snapshots.values()]
    return section("run", "How a run went", *parts)


def _course(run: Run) -> str:
    if not run.lines:
        return "The run\u2019s folder holds where it stands. Its course over time is in its log: name that too (--run LOG) to see it."
    lines = next(iter(run.lines.values()))
    first, last = lines[0], lines[-1]
    swaps = sum(line.swaps for line in lines)
    text = f"{last.update:,} updates over {last.step:,} steps. "
    if first.hit is not None and last.hit is not None:
        text += f"The hit rate went from {percent(first.hit)} to {percent(last.hit)}"
        text += f", with {percent(last.oracle)} in reach of swaps at the end. " if last.oracle is not None else ". "
    return f"{text}{swaps:,} swaps in the updates shown."


def _updates(rank: int, lines: Sequence[UpdateLine]) -> Html:
    kept = ["kept in slots"] if any(line.kept is not None for line in lines) else []
    shown = np.unique(np.linspace(0, len(lines) - 1, min(TABLE_UPDATES, len(lines))).round().astype(int))
    rows = [
        [
            f"{line.update:,}", f"{line.step:,}", percent(line.hit), percent(line.byte_hit),
            *(percent(line.kept) for _ in kept), percent(line.oracle),
            "-" if line.drift is None else f"{line.drift:.2f}", str(line.swaps), f"{line.moved_mib:,.1f}", f"{line.cost_ms:.1f}",
        ]
        for line in (lines[n] for n in shown)
    ]  # fmt: skip
    columns = [
        "update",
        "step",
        "hit rate",
        "byte hit rate",
        *kept,
        "in reach",
        "drift",
        "swaps",
        "MiB moved",
        "cost, ms",
    ]
    return details(f"Updates of rank {rank} as a table", table(f"Updates of rank {rank}", columns=columns, rows=rows))


def _state(snapshot: MetricsSnapshot) -> Html:
    touched = snapshot.touched_hot_bytes + snapshot.touched_cold_bytes
    pairs = [
        (f"hit rate, {phase}", percent(snapshot.hit_pairs.get(phase, 0) / snapshot.pairs[phase]))
        for phase in sorted(snapshot.pairs)
        if snapshot.pairs[phase]
    ]
    pairs += [
        ("byte hit rate", percent(snapshot.touched_hot_bytes / touched) if touched else "-"),
        *([("kept in slots", f"{percent(snapshot.kept_bytes / touched)} of the bytes")] if snapshot.kept_bytes else []),
        ("steps", f"{snapshot.steps:,}"),
        ("tokens", ", ".join(f"{count:,} {phase}" for phase, count in sorted(snapshot.tokens.items()))),
        (
            "swaps",
            f"{snapshot.swaps_done:,} done, {snapshot.swaps_refused:,} refused, {snapshot.swaps_failed:,} failed",
        ),
        ("shifts of traffic", f"{snapshot.shifts:,}"),
        ("moved by swaps", f"{snapshot.swap_bytes / MIB:,.1f} MiB"),
        ("hot bytes", f"{gib(snapshot.hot_bytes)} of a budget of {gib(snapshot.budget_bytes)}"),
        ("cold bytes on the host", gib(snapshot.host_bytes)),
        ("mode, backend", f"{snapshot.mode}, {snapshot.backend}"),
        ("plan at the start", snapshot.plan_hash[:12]),
    ]
    return joined([element("h3", escape(f"Where rank {snapshot.rank} stands")), facts(pairs)])


def about(report: Report) -> Html:
    """What the numbers are of: files, model, settings of the plan, its proof.

    Args:
        report: What the page is about.
    """
    identity, histogram = report.histogram.identity, report.histogram
    counted = "; ".join(
        f"{traffic.title}: {f'{traffic.tokens:,} tokens' if traffic.tokens is not None else 'tokens not known'}"
        for traffic in report.traffics
    )
    pairs = [
        ("model", report.model_name),
        ("architecture", identity.model_type or "not said"),
        ("quantisation", histogram.quantisation or "not said"),
        ("MoE layers", _layers_named(report.histogram.layers)),
        ("experts per layer", f"{identity.num_experts}, {identity.top_k or 'an unknown number'} per token"),
        ("made from" if all(part.has_own_counts for part in report.plans) else "counts given", report.counts_name),
        ("scored on", report.test_name or "the same traffic; no other was given"),
        ("counts", counted + ("; scaled, no numbers of pairs" if histogram.normalised else "")),
    ]
    return section("about", "What this is of", facts(pairs), each_plan(report, _plan_facts))


def _layers_named(layers: Sequence[int]) -> str:
    is_run = list(layers) == list(range(layers[0], layers[-1] + 1))
    named = f"{layers[0]} to {layers[-1]}" if is_run and len(layers) > 1 else ", ".join(map(str, layers))
    return f"{len(layers)}: {named}"


def _plan_facts(part: PlanPart) -> Html:
    plan = part.plan
    hot_L = plan.hot_rows()
    proof = plan.proof
    stages = [
        (
            f"stage {number}" if len(plan.stages) > 1 else "budget per rank",
            f"{gib(stage.used_bytes)} used of {gib(stage.budget_bytes)}"
            + (f", {gib(stage.fixed_bytes)} of it for all experts" if stage.fixed_bytes else ""),
        )
        for number, stage in enumerate(plan.stages)
    ]
    rows = sorted(set(plan.row_bytes))
    pairs = [
        ("plan file", part.name),
        ("plan hash", part.digest),
        ("objective", plan.objective),
        (
            "ranks",
            f"{plan.identity.tp * plan.identity.pp} (tensor parallel {plan.identity.tp}, pipeline {plan.identity.pp})",
        ),
        ("checkpoint headers", plan.identity.headers_hash or "none: made without a model"),
        *(stages if part.has_bytes else []),
        (
            "one expert",
            " to ".join(gib(size) for size in {rows[0]: 0, rows[-1]: 0}) if part.has_bytes else "taken as equal",
        ),
        ("hot experts", f"{int(hot_L.sum()):,} of {plan.hot_mask().size:,}, {hot_L.min()} to {hot_L.max()} per layer"),
        ("no choice can beat", percent(proof.bound)),
        ("below that bound", percent(proof.gap)),
    ]
    return facts(pairs)
