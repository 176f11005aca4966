"""What `hotsplit report` does: read plans, counts, rates and a run, and write one page. The command only parses and prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.cli.places import histogram_files, require_places
from hotsplit.config import HotsplitConfig
from hotsplit.errors import ConfigError, HistogramError, PlanError
from hotsplit.files import write_atomic
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.planfile import load_plan
from hotsplit.plan.rates import load_rates
from hotsplit.report.content import Inputs, PlanPart, Report, build_report
from hotsplit.report.live import read_run, run_files
from hotsplit.report.markup import printable
from hotsplit.report.page import render
from hotsplit.report.sentences import headline, summary, verdict

MAX_PLANS = 12
"""Plans on a page: a choice of more is no choice, and every one brings its own curves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportTask:
    """What `hotsplit report` was asked for."""

    config: HotsplitConfig
    """Settings."""
    plans: tuple[Path, ...]
    """Plan files of one model."""
    test: str | None
    """Histogram of other traffic."""
    rates: Path | None
    """Measured rates of the machine."""
    run: tuple[Path, ...]
    """Run folder and logs of one run."""
    output: Path
    """The page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportResult:
    """A page that was written."""

    report: Report
    """What it says."""
    num_bytes: int
    """Its size."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def make_report(task: ReportTask) -> ReportResult:
    """Read everything, score, and write the page.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is wrong; nothing was written.
    """
    if task.config.counts is None:
        raise ConfigError(
            "report", got="no --counts", wanted="the histogram that the plans were made from", do="name it"
        )
    if len(task.plans) > MAX_PLANS:
        raise ConfigError("report", got=f"{len(task.plans)} plans", wanted=f"at most {MAX_PLANS}", do="name fewer")
    inputs = [*task.plans, *histogram_files(task.config.counts, task.test), *run_files(task.run)]
    require_places({"--output": task.output}, inputs=[*inputs, *([task.rates] if task.rates else [])])
    plans = [(str(path), load_plan(path)) for path in task.plans]
    layers = plans[0][1].layers
    histogram, notices = load_histogram(task.config.counts, layers=layers)
    test, said = (None, []) if task.test is None else load_histogram(task.test, layers=layers)
    notices += said
    enforce(notices, strict=task.config.strict, error=HistogramError)
    run, said = read_run(task.run) if task.run else (None, [])
    shown = Inputs(
        name=task.config.counts,
        histogram=histogram,
        test_name=task.test,
        test=test,
        rates=None if task.rates is None else load_rates(task.rates),
    )
    report, more = build_report(plans, inputs=shown, run=run)
    enforce(more, strict=task.config.strict, error=PlanError)
    page = render(report)
    write_atomic(task.output, page)
    return ReportResult(report=report, num_bytes=len(page), notices=(*notices, *said, *more))


def report_json(result: ReportResult, *, output: Path) -> dict[str, Any]:
    """What a page says, for programs.

    Args:
        result: From make_report.
        output: Where the page is.
    """
    return {
        "kind": "report",
        "page": str(output),
        "bytes": result.num_bytes,
        "model": {"name": result.report.histogram.name, **result.report.histogram.identity.to_json()},
        "plans": [_plan_json(part) for part in result.report.plans],
        "notices": [str(notice) for notice in result.notices],
    }


def _plan_json(part: PlanPart) -> dict[str, Any]:
    return {
        "name": part.name,
        "hash": part.digest,
        "hot_experts": int(part.plan.hot_rows().sum()),
        "hit_rate": part.evaluation.in_sample,
        "held_out": part.evaluation.held_out,
        "null": part.evaluation.null,
        "oracle_free": part.score.oracle_free,
        "oracle_reachable": part.score.oracle_reachable,
        "worst_layer": part.score.worst_layer,
        "verdict": verdict(part)[0],
        "summary": {sentence.topic: sentence.text for sentence in summary(part)},
    }


def plain_summary(parts: Sequence[PlanPart]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the page says first, as plain text: per plan a headline, and topics with their sentences.

    Args:
        parts: The plans.
    """
    several = len(parts) > 1
    return [
        (
            f"{printable(part.name) + ': ' if several else ''}{headline(part)}: {verdict(part)[1]}.",
            [(sentence.topic, sentence.text) for sentence in summary(part)],
        )
        for part in parts
    ]
