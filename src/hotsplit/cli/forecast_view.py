"""How a forecast looks: one JSON object with stable keys, and plain tables."""

from __future__ import annotations

import math
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.forecasting import Forecast
from hotsplit.plan.forecast import StepForecast, breakeven
from hotsplit.plan.planfile import plan_hash
from hotsplit.plan.rates import GIGA
from hotsplit.units import GIB, gib

_THOUSANDS = ("", "k", "M", "G")
_RESOURCES = {"hbm": "HBM", "link": "link", "host": "host memory", "other": "other"}
_NEEDED = "dense weights, attention, launches and arithmetic are not in it (--dense-gib, --other-ms)"


def forecast_json(result: Forecast) -> dict[str, Any]:
    """A forecast's facts; seconds and bytes in base units, null for unknown.

    Args:
        result: From `hotsplit forecast`.
    """
    host = result.machine.host_bytes_per_s
    return {
        "kind": "forecast",
        "model": result.plan.identity.model.to_json(),
        "plan_hash": plan_hash(result.plan),
        "ranks": {"tp": result.plan.identity.tp, "pp": result.plan.identity.pp},
        "rates": {
            "hbm_bytes_per_s": list(result.machine.hbm_bytes_per_s),
            "link_bytes_per_s": list(result.machine.link_bytes_per_s),
            "host_bytes_per_s": None if math.isinf(host) else host,
        },
        "extra": {
            "is_known": result.is_extra_known,
            "dense_bytes": result.extra.dense_bytes,
            "other_s": result.extra.other_s,
            "cold_layer_s": result.extra.cold_layer_s,
        },
        "correction": {
            "exponent": result.correction.exponent,
            "largest": result.correction.largest,
            "source": result.correction.source,
        },
        "cold_bank_bytes": result.model.cold_bank_bytes,
        "decode": [_step_json(step) for step in result.decode],
        "windows": [
            _window_json(window, single, accepted=result.accepted)
            for window, single in zip(result.windows, result.singles, strict=True)
        ],
        "prefill": [_step_json(step) for step in result.prefill],
        "kv_tokens_per_hot_gib": result.kv_per_gib,
        "sweep": [
            {
                "budget_bytes": point.budget_bytes,
                "hot_bytes": point.hot_bytes,
                "hot_experts": point.hot_rows,
                "token_hit": point.token_hit,
                "kv_tokens_taken": None if result.kv_per_gib is None else point.hot_bytes / GIB * result.kv_per_gib,
                "decode": [_step_json(step) for step in point.steps],
            }
            for point in result.points
        ],
        "notices": [str(notice) for notice in result.notices],
    }


def _step_json(step: StepForecast) -> dict[str, Any]:
    return {
        "requests": step.step.requests,
        "tokens_per_request": step.step.tokens,
        "seconds": [step.seconds_low, step.seconds_high],
        "tokens_per_s": [_finite(step.tokens_per_s_low), _finite(step.tokens_per_s_high)],
        "token_hit": step.token_hit,
        "byte_hit": step.byte_hit,
        "distinct_experts": step.distinct,
        "hot_bytes": step.hot_bytes,
        "cold_bytes": step.cold_bytes,
        "cold_bytes_corrected": step.cold_bytes_corrected,
        "is_sweep": step.is_sweep,
        "binds": {"resource": step.binding.resource, "rank": step.binding.rank, "seconds": step.binding.seconds},
    }


def _window_json(window: StepForecast, single: StepForecast, *, accepted: float | None) -> dict[str, Any]:
    gained = None
    if accepted is not None:
        tokens = window.step.requests * min(accepted, window.step.tokens)
        gained = [_finite(tokens / seconds if seconds else math.inf) for seconds in _high_first(window)]
    low, high = breakeven(window, single=single)
    facts = {**_step_json(window), "tokens_per_s": gained}
    return {**facts, "breakeven_tokens": [_finite(low), _finite(high)]}


def _high_first(step: StepForecast) -> tuple[float, float]:
    return step.seconds_high, step.seconds_low


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def print_forecast(result: Forecast) -> None:
    """Bounds and what binds, by kind of step; the sweep; the KV cache; where the correction comes from.

    Args:
        result: From `hotsplit forecast`.
    """
    _print_head(result)
    rows = [[_batch(step), *_bounds(step), rate(step.byte_hit), _cold(step), _binds(step)] for step in result.decode]
    columns = ["decode", "ms per step", "tokens/s", "byte\nhit", "cold bytes\nper rank", "waits\nlongest for"]
    console.table("", columns=columns, rows=rows)
    _print_windows(result)
    _print_prefill(result)
    _print_sweep(result)
    if result.kv_per_gib is not None:
        used = max(stage.used_bytes for stage in result.plan.stages) if _has_bytes(result) else None
        plans = "" if used is None else f"; this plan's {gib(used)} that of {used / GIB * result.kv_per_gib:,.0f}"
        console.prose(f"each hot GiB takes the place of {result.kv_per_gib:,.0f} KV tokens on its rank{plans}")
    console.prose(f"tokens in a row: {result.correction.source}")


def _print_head(result: Forecast) -> None:
    plan, machine = result.plan, result.machine
    host = "unknown" if math.isinf(machine.host_bytes_per_s) else f"{machine.host_bytes_per_s / GIGA:,.0f}"
    console.prose(
        f"plan {plan_hash(plan)[:12]}: {rate(result.decode[0].token_hit)} of the tokens' experts are hot; "
        f"{gib(result.model.cold_bank_bytes)} are cold, over {len(plan.stages)} stage(s) of {plan.identity.tp} rank(s)"
    )
    console.prose(
        f"rates in GB/s: HBM {_span(machine.hbm_bytes_per_s)}, in-place reads {_span(machine.link_bytes_per_s)}, "
        f"host memory {host}"
    )
    scope = "experts alone: " + _NEEDED if not result.is_extra_known else "experts, and what was told of the rest"
    console.prose(f"low and high: perfect overlap, and one read after the other; seconds of the {scope}")


def _print_windows(result: Forecast) -> None:
    rows = []
    for window, single in zip(result.windows, result.singles, strict=True):
        low, high = breakeven(window, single=single)
        gained = "-"
        if result.accepted is not None and window.seconds_low:
            tokens = window.step.requests * min(result.accepted, window.step.tokens)
            gained = _range(tokens / window.seconds_high, tokens / window.seconds_low)
        name = f"{window.step.tokens} tokens, batch {window.step.requests}"
        rows.append([name, _range(1e3 * window.seconds_low, 1e3 * window.seconds_high), gained, _range(low, high)])
    columns = ["speculative step", "ms per step", "tokens/s", "pays from so many\ntokens per request"]
    console.table("", columns=columns, rows=rows)


def _print_prefill(result: Forecast) -> None:
    rows = [
        [
            f"{step.step.tokens:,} tokens",
            _bounds(step)[0],
            _number(step.tokens_per_s_high),
            "all" if step.is_sweep else rate(step.cold_bytes / max(result.model.cold_bank_bytes, 1)),
            _binds(step),
        ]
        for step in result.prefill
    ]
    columns = ["prefill chunk", "ms per step", "tokens/s\nat most", "of the\ncold bank", "waits\nlongest for"]
    console.table("", columns=columns, rows=rows)


def _print_sweep(result: Forecast) -> None:
    if not result.points:
        return
    rows = []
    for point in result.points:
        kv = "-" if result.kv_per_gib is None else _number(point.hot_bytes / GIB * result.kv_per_gib)
        speeds = [_range(step.tokens_per_s_low, step.tokens_per_s_high) for step in point.steps[:2]]
        rows.append([gib(point.budget_bytes), rate(point.token_hit), *speeds, kv])
    names = [f"tokens/s\n{_batch(step)}" for step in result.points[0].steps[:2]]
    console.table("", columns=["hot", "token hit\nin-sample", *names, "KV tokens\ntaken"], rows=rows)


def _has_bytes(result: Forecast) -> bool:
    return set(result.plan.row_bytes) != {1}


def _batch(step: StepForecast) -> str:
    return f"batch {step.step.requests}"


def _bounds(step: StepForecast) -> tuple[str, str]:
    return (
        _range(1e3 * step.seconds_low, 1e3 * step.seconds_high),
        _range(step.tokens_per_s_low, step.tokens_per_s_high),
    )


def _range(low: float, high: float) -> str:
    """Two bounds, with as many places as say something."""
    return f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if value < 100:
        return f"{value:.3g}"
    thousands = next(power for power in range(len(_THOUSANDS)) if value < 9999.5 * 1000**power or power == 3)
    return f"{value / 1000**thousands:,.0f}{_THOUSANDS[thousands]}"


def _cold(step: StepForecast) -> str:
    return gib(round(step.cold_bytes))


def _binds(step: StepForecast) -> str:
    return f"{_RESOURCES[step.binding.resource]}, rank {step.binding.rank}"


def _span(rates: tuple[float, ...]) -> str:
    low, high = min(rates) / GIGA, max(rates) / GIGA
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
