"""What `hotsplit simulate` reads: the plan or what one is made of, what rows weigh, and the settings that are swept.

Shapes: L MoE layers, E experts per layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hotsplit.config import HotsplitConfig, Origin
from hotsplit.errors import ConfigError, HistogramError, PlanMismatchError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, fill_empty_layers, planning_counts, validate
from hotsplit.plan.identity import ModelIdentity, require_same
from hotsplit.plan.planfile import Plan, load_plan
from hotsplit.plan.planner import PlanOptions, make_plan, plan_fraction
from hotsplit.plan.replay import Kept
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.plan.trace import Trace, histogram_of
from hotsplit.plan.transit import Placement
from hotsplit.units import MIB

POLICIES: Final = ("static", "dynamic", "lru", "oracle")
"""What can be replayed."""
_SWEPT: Final = ("dyn_schedule", "dyn_steps", "dyn_max_swaps", "dyn_margin", "dyn_half_life", "hot_gib", "hot_fraction")
_MAX_RUNS: Final = 1000
_MAX_ROW_MIB: Final = 2.0**20
"""A tebibyte: no expert has more, and sums over a trace stay within 64 bits."""
_LEAST_HALF_LIFE: Final = 1e-3
"""Updates; of less than that a count keeps nothing that a float can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateTask:
    """What `hotsplit simulate` was asked for."""

    config: HotsplitConfig
    """Settings: plan, counts, hot_gib and the dyn_ ones."""
    trace: Path
    """Trace file."""
    plan_domain: str | None = None
    """Domain of the trace that the plan is made from."""
    domains: tuple[str, ...] = ()
    """Domains to play, in turn; empty for all."""
    hot_fraction: float | None = None
    """Share of all experts that is hot."""
    even: bool = False
    """The same number in every layer."""
    row_mib: float | None = None
    """MiB of one expert on one rank."""
    policy: str = ",".join(POLICIES)
    """Names of POLICIES, with commas."""
    steps: int | None = None
    """Steps to play."""
    tokens_per_step: int | None = None
    """Tokens of a step; None for the trace's own steps."""
    phase: Kept = "decode"
    """Tokens to play."""
    window: int | None = None
    """Steps of a window."""
    placement: Placement = "inclusive"
    """When swaps become visible."""
    no_prior: bool = False
    """Dynamic policies know nothing at the start."""
    sweep: tuple[str, ...] = ()
    """NAME=V,V each."""
    rates: Path | None = None
    """Rates file."""
    output: Path | None = None
    """JSON file."""
    force: bool = False
    """Replay against a plan of another model all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where experts lie at the start."""

    hot: npt.NDArray[np.bool_]
    """Which are hot, [L, E], bool."""
    counts: npt.NDArray[np.float64] | None
    """What the plan was made from, [L, E], float64; None where it was read."""
    row_bytes: tuple[int, ...]
    """Of one row per layer, [L]; 1 where nobody knows."""


def options_first(task: SimulateTask) -> SimulateTask:
    """What was typed beats the environment, which is also so where the two are different settings.

    Args:
        task: What was asked for.

    Returns:
        The task without the plan, counts or budget of the environment that a typed source or budget excludes.
    """
    config, dropped = task.config, list[str]()

    def typed(name: str) -> bool:
        return config.origin(name) == "option"

    swept = {_swept(text) for text in task.sweep} & {"--hot-gib", "--hot-fraction"}
    has_budget = task.hot_fraction is not None or bool(swept) or typed("hot_gib")
    if task.plan_domain is not None or typed("plan") or typed("counts"):
        dropped += ["plan", "counts"]
    elif has_budget and config.counts is not None:
        dropped.append("plan")  # it has a budget of its own
    if has_budget or typed("plan"):
        dropped.append("hot_gib")
    gone = [name for name in dropped if config.origin(name) == "environment"]
    origins: dict[str, Origin] = {**config.origins, **dict.fromkeys(gone, "default")}
    kept = {name: None if name in gone else getattr(config, name) for name in ("plan", "counts", "hot_gib")}
    config = replace(config, plan=kept["plan"], counts=kept["counts"], hot_gib=kept["hot_gib"], origins=origins)
    return replace(task, config=config)


def require_choices(task: SimulateTask) -> None:
    """One source of the plan, one budget, and numbers that can be.

    Args:
        task: What was asked for.

    Raises:
        ConfigError: They are not.
    """
    sources = {"--plan": task.config.plan, "--counts": task.config.counts, "--plan-domain": task.plan_domain}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "the plan", got=" and ".join(given) or "none", wanted="one of --plan, --counts, --plan-domain"
        )
    budgets = {"--hot-gib": task.config.hot_gib, "--hot-fraction": task.hot_fraction}
    named = [name for name, value in budgets.items() if value is not None]
    named += [option for option in ("--hot-gib", "--hot-fraction") for text in task.sweep if _swept(text) == option]
    if task.config.plan is not None and named:
        raise ConfigError("the budget", got=f"{named[0]} beside --plan", wanted="one of them: a plan has its budget")
    if task.config.plan is None and len(set(named)) != 1:
        got = " and ".join(sorted(set(named))) or "none"
        raise ConfigError("the budget", got=got, wanted="--hot-gib, or --hot-fraction")
    if task.row_mib is not None and not 0 < task.row_mib <= _MAX_ROW_MIB:
        raise ConfigError("--row-mib", got=str(task.row_mib), wanted=f"a number > 0 and <= {_MAX_ROW_MIB:g}")
    if task.even and (task.config.plan is not None or "--hot-gib" in named):
        raise ConfigError("--even", got="no --hot-fraction", wanted="--even with --hot-fraction", do="leave it out")


def policies_of(text: str) -> tuple[str, ...]:
    """Names with commas between them.

    Args:
        text: As typed.

    Raises:
        ConfigError: One is not known.
    """
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError("--policy", got=repr(unknown[0]), wanted=f"some of {', '.join(POLICIES)}")
    return names


def sources_of(task: SimulateTask, trace: Trace) -> tuple[Plan | None, Histogram | None, list[Notice]]:
    """The plan, or the counts that one is made from; both of the trace's model.

    Args:
        task: What was asked for.
        trace: As read.

    Raises:
        HotsplitError: A file is wrong, or of another model.
    """
    if task.config.plan is not None:
        plan = load_plan(task.config.plan)
        return plan, None, _require_same(trace, plan.identity.model, task=task)
    if task.config.counts is not None:
        histogram, notices = load_histogram(task.config.counts)
        notices += validate(histogram, what=f"histogram {task.config.counts}")
        enforce(notices, strict=task.config.strict, error=HistogramError)
        return None, histogram, notices + _require_same(trace, histogram.identity, task=task)
    return None, histogram_of(trace, domain=task.plan_domain), []


def _require_same(trace: Trace, model: ModelIdentity, *, task: SimulateTask) -> list[Notice]:
    """Another model's trace is refused; even with --force its arrays must have the same form."""
    notices = require_same(trace.identity, model, what=f"trace {task.trace}", force=task.force)
    shape = (len(trace.identity.layers or ()), trace.identity.top_k)
    if shape != (len(model.layers or ()), model.top_k or shape[1]):
        got = f"{shape[0]} layers, top-{shape[1]}"
        raise PlanMismatchError(
            f"trace {task.trace}", got=got, wanted=f"{len(model.layers or ())} layers, top-{model.top_k}"
        )
    return notices


def row_bytes_of(task: SimulateTask, trace: Trace, plan: Plan | None) -> tuple[int, ...] | None:
    """What a row weighs: as said, as planned, as the trace says.

    Args:
        task: What was asked for.
        trace: As read.
        plan: As read.

    Returns:
        Bytes per layer, [L]; None where nobody says.
    """
    num_layers = len(trace.identity.layers or ())
    if task.row_mib is not None:
        return (max(1, round(task.row_mib * MIB)),) * num_layers
    if plan is not None and max(plan.row_bytes) > 1:  # a plan by fraction has rows of one byte
        return plan.row_bytes
    told = trace.meta.get("expert_bytes", trace.meta.get("expert_bytes_bf16"))
    if isinstance(told, int) and not isinstance(told, bool) and told > 0:
        return (told,) * num_layers
    return None


def place_at_start(
    task: SimulateTask,
    *,
    trace: Trace,
    plan: Plan | None,
    histogram: Histogram | None,
    row_bytes: tuple[int, ...] | None,
) -> tuple[Placed, list[Notice]]:
    """The hot set at the start.

    Args:
        task: What was asked for, with the settings of one run.
        trace: As read.
        plan: As read; None where one is made.
        histogram: What it is made from.
        row_bytes: Bytes of one row per layer, [L]; None where nobody knows.

    Raises:
        HotsplitError: No plan can be made.
    """
    rows = row_bytes or (1,) * len(trace.identity.layers or ())
    if histogram is None:
        return Placed(hot=_hot(plan), counts=None, row_bytes=rows), []
    counts_LE, _ = fill_empty_layers(planning_counts(histogram)[0].counts)
    if task.even:
        return Placed(hot=_even(counts_LE, fraction=task.hot_fraction), counts=counts_LE, row_bytes=rows), []
    options = PlanOptions(dynamic="dynamic" in task.policy, objective=task.config.objective, strict=task.config.strict)
    if task.config.hot_bytes is None:
        made, notices = plan_fraction(histogram, fraction=task.hot_fraction or 0.0, options=options)
    else:
        sizes = _sizes(histogram, trace, row_bytes=row_bytes)
        made, notices = make_plan(sizes, histogram=histogram, budget_bytes=task.config.hot_bytes, options=options)
    return Placed(hot=made.hot_mask(), counts=counts_LE, row_bytes=rows), notices


def _hot(plan: Plan | None) -> npt.NDArray[np.bool_]:
    if plan is None:
        raise ConfigError("the plan", got="none", wanted="one of --plan, --counts, --plan-domain")
    return plan.hot_mask()


def _even(counts_LE: npt.NDArray[np.float64], *, fraction: float | None) -> npt.NDArray[np.bool_]:
    if fraction is None or not 0 <= fraction <= 1:
        raise ConfigError("hot fraction", got=repr(fraction), wanted="a number from 0 to 1")
    order_LE = np.argsort(-counts_LE, axis=1, kind="stable")
    hot_LE = np.zeros(counts_LE.shape, dtype=bool)
    num_hot = math.floor(Fraction(repr(fraction)) * counts_LE.shape[1])  # as it is written: 0.29 of 100 are 29
    np.put_along_axis(hot_LE, order_LE, np.arange(counts_LE.shape[1]) < num_hot, axis=1)
    return hot_LE


def _sizes(histogram: Histogram, trace: Trace, *, row_bytes: tuple[int, ...] | None) -> ExpertSizes:
    """Rows of one size, for a budget in bytes."""
    if row_bytes is None:
        raise ConfigError("--hot-gib", got="no bytes of an expert", wanted="--row-mib with it, or --hot-fraction")
    identity = histogram.identity
    return ExpertSizes(
        identity=replace(identity, top_k=identity.top_k or trace.identity.top_k),
        row_bytes=np.array(row_bytes, dtype=np.int64),
        fixed_bytes=np.zeros(len(row_bytes), dtype=np.int64),
        dense_bytes=0,
        headers_hash=None,
        num_decoder_layers=max(identity.layers or (0,)) + 1,
    )


def _swept(text: str) -> str:
    """The option that a sweep names."""
    return f"--{text.partition('=')[0].strip().removeprefix('--').replace('_', '-')}"


def sweep_of(task: SimulateTask) -> Sequence[tuple[dict[str, str], SimulateTask]]:
    """Every combination of the swept values, all checked before the first is replayed.

    Args:
        task: What was asked for.

    Returns:
        The swept settings by name, and the task with them; one pair without any where nothing is swept.

    Raises:
        ConfigError: A name cannot be swept, a value is not allowed, or there are too many combinations.
    """
    axes: list[list[tuple[str, str]]] = []
    for text in task.sweep:
        name, values = _swept(text).removeprefix("--").replace("-", "_"), text.partition("=")[2].split(",")
        if name not in _SWEPT or any(not value.strip() for value in values):
            wanted = f"NAME=V,V with one of {', '.join(name.replace('_', '-') for name in _SWEPT)}"
            raise ConfigError("--sweep", got=repr(text), wanted=wanted)
        axes.append([(name, value.strip()) for value in values])
    runs = [dict(chosen) for chosen in itertools.product(*axes)]
    if len(runs) > _MAX_RUNS:
        raise ConfigError("--sweep", got=f"{len(runs)} combinations", wanted=f"at most {_MAX_RUNS}")
    return [(settings, _with_settings(task, settings)) for settings in runs]


def _with_settings(task: SimulateTask, settings: Mapping[str, str]) -> SimulateTask:
    fields = {name: value for name, value in settings.items() if name != "hot_fraction"}
    given = {name: getattr(task.config, name) for name, origin in task.config.origins.items() if origin != "default"}
    config = HotsplitConfig.from_options({}, **(given | fields))
    if config.dyn_half_life < _LEAST_HALF_LIFE:
        got, wanted = f"{config.dyn_half_life:g}", f"at least {_LEAST_HALF_LIFE:g} updates"
        raise ConfigError("dyn-half-life", got=got, wanted=wanted)
    if "hot_fraction" not in settings:
        return replace(task, config=config)
    try:
        fraction = float(settings["hot_fraction"])
    except ValueError as error:
        got = repr(settings["hot_fraction"])
        raise ConfigError("hot fraction", got=got, wanted="a number from 0 to 1") from error
    return replace(task, config=config, hot_fraction=fraction)


def budget_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Those of the swept settings that change more than the dynamic policy.

    Args:
        settings: By name.
    """
    return {name: value for name, value in settings.items() if name in ("hot_gib", "hot_fraction")}
