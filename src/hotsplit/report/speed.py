"""How fast a plan would run, at its own budget and at every other: the forecast's figures and table.

Stands between forecast and page: `plan + counts + machine -> charts`. The seconds are those of plan/forecast.py; here they
are laid out over what a reader can turn: the budget, the batch, the chunk.

Shapes: L MoE layers, E routed experts per layer, N = L*E cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hotsplit.errors import PlanError
from hotsplit.notices import Notice
from hotsplit.plan.forecast import BATCHES, CHUNKS, WINDOWS, Model, Step, StepForecast, forecast_step
from hotsplit.plan.histogram import Histogram, planning_counts
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planfile import Plan
from hotsplit.plan.rates import Machine
from hotsplit.report.curves import ranking

BUDGETS = tuple(n / 20 for n in range(21))
"""Parts of the experts' bytes at which the curves are computed."""

_DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One figure: a quantity between its bounds along another."""

    title: str
    """What it shows."""
    axis: str
    """What lies along it: "budget" (part of the experts' bytes) or "chunk" (prompt tokens of a step)."""
    unit: str
    """Of the bounds: "ms" per step, or "tokens/s"."""
    tokens: int
    """Tokens of one step; 0 where they lie along the axis."""
    at: tuple[float, ...]
    """Where, rising, [P]."""
    low: tuple[float, ...]
    """The lower bound there, [P]."""
    high: tuple[float, ...]
    """The upper bound, [P]."""
    plan: tuple[float, float, float] | None = None
    """The plan itself: where, low, high; None where the line is the plan's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The forecast of one plan."""

    steps: tuple[StepForecast, ...]
    """Of the plan: batches, windows, chunks."""
    charts: tuple[Chart, ...]
    """One for every batch along the budget, one for prefill along the chunk."""


def forecast_speed(
    plan: Plan, *, counts: npt.NDArray[np.float64], traffic: Histogram, machine: Machine
) -> tuple[Speed, list[Notice]]:
    """Forecast a plan, and its ranking at other budgets.

    Args:
        plan: With real bytes.
        counts: Routed pairs that it was made from, [L, E], float64.
        traffic: What will meet it: the test's counts, or those that it was made from.
        machine: Rates of every rank.

    Returns:
        The forecast, and a notice where decode counts stand in for prefill's.

    Raises:
        PlanError: The plan has no real bytes, nobody knows top_k, or the machine has another number of ranks.
    """
    model = _model(plan, traffic=traffic)
    prompts, notices = _for_prompts(model, traffic=traffic)
    batches = [Step(kind="decode", requests=batch) for batch in BATCHES]
    windows = [Step(kind="window", tokens=window) for window in WINDOWS]
    chunks = [Step(kind="prefill", tokens=chunk) for chunk in CHUNKS]
    found = [forecast_step(model, machine=machine, step=step) for step in (*batches, *windows)]
    found += [forecast_step(prompts, machine=machine, step=step) for step in chunks]
    swept = _swept(model, plan=plan, counts=counts)
    part = float((plan.hot_rows() * model.row_bytes).sum() / (model.row_bytes.sum() * model.hot.shape[1]))
    charts = [
        _along_budget(own, part=part, swept=[forecast_step(each, machine=machine, step=own.step) for each in swept])
        for own in found[: len(batches)]
    ]
    return Speed(steps=tuple(found), charts=(*charts, _along_chunk(found[-len(chunks) :]))), notices


def _model(plan: Plan, *, traffic: Histogram) -> Model:
    """The plan as arrays, with the traffic that plans rank on."""
    if plan.identity.headers_hash is None and set(plan.row_bytes) == {1}:
        do = "make one for the model (hotsplit plan MODEL --hot-gib ...), or leave --rates out"
        raise PlanError("a forecast", got="a plan that was made without a model", wanted="rows of known size", do=do)
    top_k = plan.identity.model.top_k or traffic.identity.top_k
    if top_k is None:
        raise PlanError("a forecast", got="no top_k in the plan, nor in the counts", wanted="experts per token")
    ends = np.cumsum([0, *(len(stage.layers) for stage in plan.stages)]).tolist()
    return Model(
        shares=shares_of(planning_counts(traffic)[0].counts),
        hot=plan.hot_mask(),
        row_bytes=np.array(plan.row_bytes, dtype=np.int64),
        stages=tuple(tuple(range(start, end)) for start, end in pairwise(ends)),
        top_k=top_k,
        tp=plan.identity.tp,
    )


def _for_prompts(model: Model, *, traffic: Histogram) -> tuple[Model, list[Notice]]:
    """The same with prefill's counts, where there are any."""
    counted = traffic.phases.get("prefill")
    if counted is not None and counted.counts.any():
        return replace(model, shares=shares_of(counted.counts)), []
    text = "no prefill counts: decode counts stand in, which touch fewer experts than a prompt does"
    return model, [Notice(name="decode-counts-for-prefill", text=text, strict=False)]


def _swept(model: Model, *, plan: Plan, counts: npt.NDArray[np.float64]) -> list[Model]:
    """The same at every one of BUDGETS: as many experts of the plan's ranking hot as its part of the bytes holds."""
    order_N, budget_N = ranking(plan, counts=counts)
    models = []
    for budget in BUDGETS:
        hot_N = np.zeros(model.hot.size, dtype=bool)
        hot_N[order_N[: int(np.searchsorted(budget_N, budget + 1e-9, side="right")) - 1]] = True
        models.append(replace(model, hot=hot_N.reshape(model.hot.shape)))
    return models


def _along_budget(own: StepForecast, *, part: float, swept: Sequence[StepForecast]) -> Chart:
    """Milliseconds of one kind of step, from nothing hot to everything."""
    requests = own.step.requests
    return Chart(
        title=f"Decode, {requests} request{'s' if requests > 1 else ''}: ms per step",
        axis="budget",
        unit="ms",
        tokens=own.step.num_tokens,
        at=BUDGETS,
        low=tuple(_short(1e3 * each.seconds_low) for each in swept),
        high=tuple(_short(1e3 * each.seconds_high) for each in swept),
        plan=(_short(part), _short(1e3 * own.seconds_low), _short(1e3 * own.seconds_high)),
    )


def _along_chunk(chunks: Sequence[StepForecast]) -> Chart:
    """Prompt tokens per second of the plan; a chunk that takes no time at all has no speed."""
    timed = [each for each in chunks if math.isfinite(each.tokens_per_s_high)]
    return Chart(
        title="Prefill: prompt tokens per second",
        axis="chunk",
        unit="tokens/s",
        tokens=0,
        at=tuple(float(each.step.tokens) for each in timed),
        low=tuple(_short(each.tokens_per_s_low) for each in timed),
        high=tuple(_short(each.tokens_per_s_high) for each in timed),
    )


def _short(value: float) -> float:
    """As many digits as matter, the same on every machine."""
    return float(f"{value:.{_DIGITS}g}")
