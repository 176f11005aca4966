"""The page: one file that opens anywhere, asks the network for nothing and is the same bytes for the same input.

End of the flow: `report -> page`. Style and scripts are files beside this one, put into the page whole; a policy in its
head forbids everything but these two, by their hashes. What comes from files is text or JSON, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, fields
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.report.blocks import where
from hotsplit.report.content import PlanPart, Report
from hotsplit.report.curves import Curves
from hotsplit.report.frames import about, coverage, live_run, speed
from hotsplit.report.live import Run
from hotsplit.report.markup import Html, element, embedded, escape, joined, printable
from hotsplit.report.sections import experts, header, in_short
from hotsplit.version import __version__

SCRIPTS = ("map.js", "charts.js", "page.js")
"""Joined in this order."""

_DIGITS = 7
"""Of counts that are no whole numbers: more than a screen can show."""


def render(report: Report) -> bytes:
    """The page, in ASCII.

    Args:
        report: What it is about.
    """
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    page = Template(_asset("page.html")).substitute(
        policy=policy,
        title=escape(f"{report.model_name}: hotsplit report"),
        style=style,
        body=_body(report),
        data=embedded(page_data(report)),
        script=script,
    )
    return page.encode("ascii")


def page_data(report: Report) -> dict[str, Any]:
    """What the script draws from.

    Args:
        report: What the page is about.
    """
    return {
        "layers": list(report.histogram.layers),
        "experts": report.histogram.identity.num_experts,
        "traffic": [{"title": traffic.title, "rows": _numbers(traffic.counts)} for traffic in report.traffics],
        "plans": [_plan_data(part) for part in report.plans],
        "run": None if report.run is None else _run_data(report.run),
    }


def _body(report: Report) -> Html:
    sections = [in_short(report), experts(report), coverage(report), speed(report), live_run(report), about(report)]
    made = f"Made by hotsplit {__version__}. All data is in this page; it asks for nothing."
    return joined(
        [
            header(report),
            element("main", joined(section for section in sections if section)),
            element("footer", escape(made)),
            Html('<div class="tip" id="tip" hidden></div>'),
            Html('<div class="unseen-text" id="spoken" role="status" aria-live="polite"></div>'),
        ]
    )


def _plan_data(part: PlanPart) -> dict[str, Any]:
    evaluation = part.evaluation
    return {
        "name": printable(part.name),
        "hot": [list(experts) for experts in part.plan.hot],
        "row_bytes": list(part.plan.row_bytes),
        "ranks": [where(part.plan, layer_id) for layer_id in range(len(part.plan.hot))],
        "has_bytes": part.has_bytes,
        "all_bytes": part.all_bytes,
        "null": evaluation.null,
        "own": evaluation.in_sample,
        "test": evaluation.held_out,
        "scored": part.scores.index(part.score),
        "scores": [
            {
                "hit_rate": score.hit_rate,
                "oracle_free": score.oracle_free,
                "oracle_reachable": score.oracle_reachable,
                "layer_order": score.layer_order,
                "per_layer": list(score.per_layer),
                "worst_layer": score.worst_layer,
            }
            for score in part.scores
        ],
        "curves": _curves_data(part.curves),
        "forecast": None if part.speed is None else [asdict(chart) for chart in part.speed.charts],
    }


def _curves_data(curves: Curves) -> dict[str, Any]:
    return {field.name: getattr(curves, field.name) for field in fields(curves)}


def _run_data(run: Run) -> list[dict[str, Any]]:
    """Step, hit rate, byte hit rate, oracle and drift of every update, by rank."""
    return [
        {"rank": rank, "lines": [[line.step, line.hit, line.byte_hit, line.oracle, line.drift] for line in lines]}
        for rank, lines in run.lines.items()
    ]


def _numbers(counts: npt.NDArray[np.float64]) -> list[list[float]]:
    """Whole numbers as such, others with as many digits as can be seen."""
    if (counts == np.floor(counts)).all():
        whole: list[list[float]] = counts.astype(np.int64).tolist()
        return whole
    return [[float(f"{count:.{_DIGITS}g}") for count in row] for row in counts.tolist()]


def _asset(name: str) -> str:
    """A file that ships beside this one."""
    return (files(__package__) / name).read_text(encoding="ascii").strip()


def _digest(text: str) -> str:
    """As a content security policy names what it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
