"""Unique cold rows, forecast and replayed: the touch correction fitted on half of a trace's requests, held on the rest.

`python tests/forecast_traces.py TRACE...` prints the rows of docs/forecast.md.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from forecast_truth import Held, as_table
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planner import PlanOptions, plan_fraction
from hotsplit.plan.touched import INDEPENDENT, batches_of, distinct_rows, fit_correction, runs_of, touch_chances
from hotsplit.plan.trace import Trace, histogram_of, load_trace

RUNS = (2, 4, 8)
BATCHES = (8, 32)
HOT = 0.25


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """Requests of even and of odd number."""
    return tuple(_take(trace, np.asarray(trace.request) % 2 == parity) for parity in (0, 1))


def _take(trace: Trace, chosen_T: np.ndarray) -> Trace:
    names = ("experts", "phase", "step", "request", "position", "domain")
    return replace(
        trace, **{name: getattr(trace, name)[chosen_T] for name in names if getattr(trace, name) is not None}
    )


def cold_rows(path: Path) -> tuple[list[Held], list[Held], float]:
    """Unique cold rows of a step, 25 % of the experts hot: of runs, of batches, and the fitted exponent."""
    trace, _ = load_trace(path)
    name, (train, test) = path.stem, halves(trace)
    correction = fit_correction(train, name=name)
    histogram = histogram_of(train)
    plan, _ = plan_fraction(histogram, fraction=HOT, options=PlanOptions())
    cold_LE, top_k = ~plan.hot_mask(), int(trace.experts.shape[2])
    shares_LE = shares_of(histogram.phases["decode"].counts)

    def predicted(effective: float) -> float:
        return float(np.where(cold_LE, touch_chances(shares_LE, top_k=top_k, tokens=effective), 0.0).sum())

    def seen(steps: np.ndarray) -> float:
        return float(distinct_rows(test, steps=steps, counted=cold_LE).sum())

    runs = [
        Held(
            what=f"{name}: {run} tokens in a row, unique cold rows",
            fitted=how,
            predicted=predicted(kind.effective_tokens(run)),
            measured=seen(runs_of(test, length=run)),
        )
        for how, kind in (
            (f"B^{correction.exponent:.3f}, on the other half", correction),
            ("nothing: the bound", INDEPENDENT),
        )
        for run in RUNS
    ]
    batches = [
        Held(
            what=f"{name}: {many} requests side by side, unique cold rows",
            fitted="nothing: independent",
            predicted=predicted(many),
            measured=seen(batches_of(test, size=many)),
        )
        for many in BATCHES
    ]
    return runs, batches, correction.exponent


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for found in cold_rows(Path(argument))[:2]:
            sys.stdout.write(f"{as_table(found)}\n")
