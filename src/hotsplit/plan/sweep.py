"""What a GiB of hot experts buys in speed, and what it costs in KV cache: the forecast over budgets.

Stands after the forecast: `counts + budgets + rates -> seconds and KV tokens per budget`. Every budget gets the static
greedy's choice on the same counts, so that its hit rates are in-sample.

Shapes: L MoE layers, E routed experts per layer.

    >>> round(kv_tokens_per_gib(55_000))
    19523
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.errors import ConfigError
from hotsplit.plan.budget import greedy
from hotsplit.plan.forecast import Extra, Model, Step, StepForecast, forecast_steps
from hotsplit.plan.objectives import OBJECTIVES
from hotsplit.plan.rates import Machine
from hotsplit.plan.touched import INDEPENDENT, TouchCorrection
from hotsplit.units import GIB

EVEN_BUDGETS = 10
"""Budgets of a sweep that names none: so many equal parts of all expert bytes, and nothing hot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPoint:
    """One budget of a sweep."""

    budget_bytes: int
    """Of one rank; every pipeline stage has it."""
    hot_bytes: int
    """What the chosen rows take, on the rank that has most."""
    hot_rows: int
    """Hot experts, all layers together."""
    steps: tuple[StepForecast, ...]
    """In the order in which they were asked for."""

    @property
    def token_hit(self) -> float:
        """Routed pairs that are served hot / all, in-sample."""
        return self.steps[0].token_hit


def sweep(
    model: Model,
    *,
    budgets: Sequence[int],
    machine: Machine,
    steps: Sequence[Step],
    objective: str = "share",
    costs: tuple[Extra, TouchCorrection] = (Extra(), INDEPENDENT),
) -> tuple[BudgetPoint, ...]:
    """Forecast the same traffic under several budgets.

    Args:
        model: Plan and traffic; what is hot in it is chosen again for every budget.
        budgets: Bytes of hot rows on one rank, each >= 0; the same for every stage.
        machine: Rates.
        steps: What to forecast, at least one.
        objective: A name of `OBJECTIVES`.
        costs: What else a step costs, and how tokens in a row count.

    Returns:
        One point per budget, in the order given.

    Raises:
        ConfigError: A budget below 0, or no step.
    """
    if not steps:
        raise ConfigError("a sweep", got="no step", wanted="at least one to forecast")
    sizes_LE = np.repeat(model.row_bytes[:, None], model.shares.shape[1], axis=1)
    scores_LE = OBJECTIVES[objective](model.shares, sizes=sizes_LE, top_k=model.top_k)
    points = []
    for budget in budgets:
        if budget < 0:
            raise ConfigError("a budget", got=f"{budget / GIB:g} GiB", wanted="at least 0")
        hot_LE = np.zeros_like(model.hot)
        for stage in model.stages:
            rows = list(stage)
            hot_LE[rows] = greedy(scores_LE[rows], sizes=sizes_LE[rows], budget=budget)
        chosen = replace(model, hot=hot_LE)
        forecasts = forecast_steps(chosen, machine=machine, steps=steps, extra=costs[0], correction=costs[1])
        points.append(
            BudgetPoint(
                budget_bytes=budget,
                hot_bytes=max(int(sizes_LE[list(stage)][hot_LE[list(stage)]].sum()) for stage in model.stages),
                hot_rows=int(hot_LE.sum()),
                steps=forecasts,
            )
        )
    return tuple(points)


def even_budgets(model: Model) -> tuple[int, ...]:
    """Budgets from nothing to all in equal parts.

    Args:
        model: For the bytes of its experts.
    """
    rows_L = model.row_bytes * model.shares.shape[1]
    most = max(int(rows_L[list(stage)].sum()) for stage in model.stages)
    return tuple(most * part // EVEN_BUDGETS for part in range(EVEN_BUDGETS + 1))


def kv_tokens_per_gib(kv_bytes_per_token: float) -> float:
    """KV-cache tokens that one GiB of hot experts takes the place of.

    Args:
        kv_bytes_per_token: On one rank, all its layers together.

    Raises:
        ConfigError: No finite number above 0.
    """
    if not 0 < kv_bytes_per_token < math.inf:
        wanted = "a finite number of bytes above 0"
        raise ConfigError("KV bytes per token", got=repr(kv_bytes_per_token), wanted=wanted)
    return GIB / kv_bytes_per_token
