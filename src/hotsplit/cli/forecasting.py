"""What `hotsplit forecast` does: opens plan, counts, rates and trace, and hands plain values to the forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.config import HotsplitConfig
from hotsplit.errors import ConfigError, HistogramError, PlanError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.forecast import BATCHES, CHUNKS, WINDOWS, Extra, Model, Step, StepForecast, forecast_steps
from hotsplit.plan.histogram import Histogram, planning_counts
from hotsplit.plan.identity import require_same
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planfile import Plan, load_plan
from hotsplit.plan.rates import Machine, given_rates, load_rates, machine_of
from hotsplit.plan.sweep import BudgetPoint, even_budgets, kv_tokens_per_gib, sweep
from hotsplit.plan.touched import INDEPENDENT, TouchCorrection, fit_correction
from hotsplit.plan.trace import load_trace
from hotsplit.units import GIB, MIB

WINDOW_BATCHES = (1, 8)
"""Requests side by side for which speculative steps are forecast: what helps one request may hurt eight."""
_MAX_GIB = 2.0**23
"""As `hotsplit fit` has it: no machine has more, and all numbers stay exact."""
_MAX_ROW_MIB = 2.0**20
"""A tebibyte: no expert has more, and sums over all stay within 64 bits."""
_MAX_MS = 86_400e3
"""A day."""
_MOST_TOKENS = 2**24
"""Of one step, far above any engine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastTask:
    """What `hotsplit forecast` was asked for."""

    config: HotsplitConfig
    """Settings: counts, strict."""
    plan: Path
    """Plan file."""
    rates: Path | None
    """Rates file."""
    link: float | None
    """GB/s."""
    hbm: float | None
    """GB/s."""
    host_memory: float | None
    """GB/s."""
    trace: Path | None
    """Trace to fit the touch correction on."""
    row_mib: float | None
    """MiB of an expert, for a plan without a model."""
    dense_gib: float | None
    """GiB."""
    other_ms: float | None
    """Milliseconds."""
    cold_layer_us: float | None
    """Microseconds."""
    kv_bytes_per_token: float | None
    """Bytes."""
    accepted: float | None
    """Tokens that a request gains per speculative step."""
    batch: str | None
    """List of requests side by side."""
    window: str | None
    """List of tokens per speculative step."""
    chunk: str | None
    """List of prompt tokens per prefill step."""
    sweep: str | None
    """List of budgets in GiB, or "auto"."""
    force: bool
    """Use counts of another model all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """All that was forecast."""

    plan: Plan
    """Of which."""
    model: Model
    """Its arrays, with the decode traffic."""
    machine: Machine
    """On which."""
    correction: TouchCorrection
    """How tokens in a row count."""
    extra: Extra
    """What else is in a step."""
    is_extra_known: bool
    """Whether anything beside the experts was told."""
    decode: tuple[StepForecast, ...]
    """By batch."""
    windows: tuple[StepForecast, ...]
    """Speculative steps: by batch, then window."""
    singles: tuple[StepForecast, ...]
    """For every window the step of one token with as many requests."""
    prefill: tuple[StepForecast, ...]
    """By chunk."""
    points: tuple[BudgetPoint, ...]
    """Of the sweep; none if none was asked for."""
    accepted: float | None
    """Tokens that a request gains per speculative step; None where not told."""
    kv_per_gib: float | None
    """KV tokens that a GiB of hot experts takes the place of; None where not told."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def forecast_for(task: ForecastTask) -> Forecast:
    """Read the inputs and forecast.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is missing or wrong; one line that says which.
    """
    batches = _integers("--batch", task.batch, default=BATCHES)
    windows = _integers("--window", task.window, default=WINDOWS)
    chunks = _integers("--chunk", task.chunk, default=CHUNKS)
    extra, accepted = _extra(task), _amount("--accepted", task.accepted, least=1.0)
    kv = None if task.kv_bytes_per_token is None else kv_tokens_per_gib(task.kv_bytes_per_token)
    given = given_rates(link=task.link, hbm=task.hbm, host=task.host_memory)
    plan = load_plan(task.plan)
    histogram, notices = _histogram(task, plan)
    enforce(notices, strict=task.config.strict, error=HistogramError)
    model, prefill_model, said = _models(task, plan, histogram)
    rates = load_rates(task.rates) if task.rates else None
    machine, unknown = machine_of(rates, given=given, ranks=plan.identity.tp * plan.identity.pp)
    correction, more = _correction(task, plan)
    extra_told = extra or Extra()
    together = [Step(kind="window", requests=many, tokens=window) for many in WINDOW_BATCHES for window in windows]
    alone = [Step(kind="decode", requests=step.requests) for step in together]

    def run(model: Model, steps: list[Step]) -> tuple[StepForecast, ...]:
        return forecast_steps(model, machine=machine, steps=steps, extra=extra_told, correction=correction)

    return Forecast(
        plan=plan,
        model=model,
        machine=machine,
        correction=correction,
        extra=extra_told,
        is_extra_known=extra is not None,
        decode=run(model, [Step(kind="decode", requests=many) for many in batches]),
        windows=run(model, together),
        singles=run(model, alone),
        prefill=run(prefill_model, [Step(kind="prefill", tokens=tokens) for tokens in chunks]),
        points=sweep(
            model,
            budgets=_budgets(task.sweep, model),
            machine=machine,
            steps=[Step(kind="decode", requests=many) for many in batches],
            objective=plan.objective,
            costs=(extra_told, correction),
        ),
        accepted=accepted,
        kv_per_gib=kv,
        notices=(*notices, *said, *unknown, *more),
    )


def _histogram(task: ForecastTask, plan: Plan) -> tuple[Histogram, list[Notice]]:
    """The traffic's counts, of the plan's model."""
    if task.config.counts is None:
        raise ConfigError("forecast", got="no --counts", wanted="--counts FILE: which experts the traffic uses")
    histogram, notices = load_histogram(task.config.counts, layers=plan.layers)
    what = f"histogram {task.config.counts}"
    said = require_same(histogram.identity, plan.identity.model, what=what, force=task.force)
    shape = (len(plan.layers), plan.identity.model.num_experts or 0)
    if (len(histogram.layers), histogram.identity.num_experts) != shape:
        got = f"{len(histogram.layers)} layers x {histogram.identity.num_experts} experts"
        raise HistogramError(what, got=got, wanted=f"the plan's {shape[0]} x {shape[1]}", do="--force cannot help")
    return histogram, notices + said


def _models(task: ForecastTask, plan: Plan, histogram: Histogram) -> tuple[Model, Model, list[Notice]]:
    """The plan as arrays, with decode and with prefill traffic."""
    counted, _, notices = planning_counts(histogram)
    top_k = plan.identity.model.top_k or histogram.identity.top_k
    if top_k is None:
        raise PlanError(f"plan {task.plan}", got="no top_k, nor in the counts", wanted="experts per token")
    ends = np.cumsum([len(stage.layers) for stage in plan.stages]).tolist()
    starts = [0, *ends[:-1]]
    model = Model(
        shares=shares_of(counted.counts),
        hot=plan.hot_mask(),
        row_bytes=_row_bytes(task, plan),
        stages=tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True)),
        top_k=top_k,
        tp=plan.identity.tp,
    )
    prefill = histogram.phases.get("prefill")
    if prefill is None or not prefill.counts.any():
        text = "no prefill counts: decode counts stand in, which touch fewer experts than a prompt does"
        return model, model, [*notices, Notice(name="decode-counts-for-prefill", text=text, strict=False)]
    return model, replace(model, shares=shares_of(prefill.counts)), notices


def _row_bytes(task: ForecastTask, plan: Plan) -> npt.NDArray[np.int64]:
    """Bytes of a row: the plan's, or as told for a plan that was made without a model."""
    has_model = plan.identity.headers_hash is not None or set(plan.row_bytes) != {1}
    told = _amount("--row-mib", task.row_mib, least=0.0, most=_MAX_ROW_MIB)
    if has_model and told is not None:
        raise ConfigError(
            "--row-mib", got="a plan that has its rows' bytes", wanted="none beside it", do="leave it out"
        )
    if has_model:
        return np.array(plan.row_bytes, dtype=np.int64)
    if not told:
        raise PlanError(
            f"plan {task.plan}", got="rows of unknown size: it was made without a model", do="pass --row-mib"
        )
    return np.full(len(plan.row_bytes), max(round(told * MIB), 1), dtype=np.int64)


def _correction(task: ForecastTask, plan: Plan) -> tuple[TouchCorrection, list[Notice]]:
    """From the trace, if one was named; it must be of the plan's model."""
    if task.trace is None:
        return INDEPENDENT, []
    trace, notices = load_trace(task.trace)
    said = require_same(trace.identity, plan.identity.model, what=f"trace {task.trace}", force=task.force)
    return fit_correction(trace, name=f"trace {task.trace}"), notices + said


def _extra(task: ForecastTask) -> Extra | None:
    """What else is in a step; None where nothing was told."""
    dense = _amount("--dense-gib", task.dense_gib, least=0.0, most=_MAX_GIB)
    other = _amount("--other-ms", task.other_ms, least=0.0, most=_MAX_MS)
    cold = _amount("--cold-layer-us", task.cold_layer_us, least=0.0, most=_MAX_MS * 1e3)
    if dense is None and other is None and cold is None:
        return None
    return Extra(dense_bytes=round((dense or 0) * GIB), other_s=(other or 0) / 1e3, cold_layer_s=(cold or 0) / 1e6)


def _amount(option: str, value: float | None, *, least: float, most: float = math.inf) -> float | None:
    """A finite number within bounds, if one was given."""
    if value is None or (least <= value <= most and value < math.inf):
        return value
    limit = f" and <= {most:g}" * (most < math.inf)
    raise ConfigError(option, got=repr(value), wanted=f"a finite number >= {least:g}{limit}")


def _integers(option: str, text: str | None, *, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of numbers of tokens or requests, as typed."""
    if text is None:
        return default
    parts = [part.strip() for part in text.split(",")]
    good = [int(part) for part in parts if part.isdecimal() and part.isascii() and len(part) <= 9]
    if len(good) != len(parts) or not all(1 <= number <= _MOST_TOKENS for number in good):
        raise ConfigError(option, got=repr(text), wanted=f"integers from 1 to {_MOST_TOKENS} with commas between")
    return tuple(good)


def _budgets(text: str | None, model: Model) -> tuple[int, ...]:
    """Budgets in bytes, as typed in GiB."""
    if text is None:
        return ()
    if text.strip() == "auto":
        return even_budgets(model)
    try:
        amounts = [float(part) for part in text.split(",")]
    except ValueError:
        amounts = [math.nan]
    if not all(0 <= amount < 2**33 for amount in amounts):  # a NaN is in no range
        raise ConfigError("--sweep", got=repr(text), wanted="budgets in GiB, each >= 0, with commas between; or auto")
    return tuple(round(amount * GIB) for amount in amounts)
