"""What `hotsplit simulate` does: read a trace and a plan, replay policies, sweep settings.

Shapes: L MoE layers, E experts per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hotsplit.cli import console
from hotsplit.cli.places import histogram_files, require_places
from hotsplit.cli.simulate_inputs import (
    Placed,
    SimulateTask,
    budget_of,
    options_first,
    place_at_start,
    policies_of,
    require_choices,
    row_bytes_of,
    sources_of,
    sweep_of,
)
from hotsplit.config import HotsplitConfig
from hotsplit.errors import TraceError
from hotsplit.notices import Notice
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.lru import as_replayed, lru, sample_layers
from hotsplit.plan.rates import Machine, given_rates, load_rates, machine_of
from hotsplit.plan.rebalance import RebalanceOptions, thrash_notice
from hotsplit.plan.replay import Steps, repeat_notice, steps_of
from hotsplit.plan.simulate import Replayed, ReplayOptions, oracle, replay
from hotsplit.plan.steering import make_policy
from hotsplit.plan.trace import load_trace

_WINDOWS: Final = 10
"""Windows of a result, where nobody says how long one is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One policy with one set of settings."""

    policy: str
    """A name of POLICIES."""
    settings: Mapping[str, str]
    """What was swept, by name, as written."""
    hot_rows: int
    """Hot experts of all layers at the start."""
    result: Replayed
    """What came out; of the sampled layers alone where there are any."""
    layers: tuple[int, ...] | None = None
    """Decoder indices of the layers that were replayed; None for all."""
    tokens_per_s: tuple[float, float] | None = None
    """Tokens per second of reading experts alone, lower and upper bound; None without rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All that was replayed."""

    task: SimulateTask
    """What was asked for."""
    identity: ModelIdentity
    """Of the traffic."""
    hot_rows: int
    """Hot experts of all layers, of the first run."""
    row_bytes: tuple[int, ...] | None
    """Bytes of a row per layer, [L]; None where nobody knows, and then bytes are rows."""
    num_steps: int
    """Steps played."""
    runs: tuple[Run, ...]
    """In order."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def simulate(task: SimulateTask) -> Simulation:
    """Read the files and replay.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is wrong, or the output cannot be written, which is known before the work.
    """
    task = options_first(task)
    require_choices(task)
    policies = policies_of(task.policy)
    plan_file = [] if task.config.plan is None else [task.config.plan]
    read = [task.trace, *plan_file, *histogram_files(task.config.counts), *([task.rates] if task.rates else [])]
    require_places({"--output": task.output}, inputs=read)
    trace, notices = load_trace(task.trace)
    plan, histogram, said = sources_of(task, trace)
    notices += said
    num_experts = (plan.identity.model if plan else histogram.identity if histogram else trace.identity).num_experts
    if num_experts is None:
        raise TraceError(f"trace {task.trace}", got="no num_experts", wanted="the number of experts per layer")
    steps = steps_of(
        trace,
        num_experts=num_experts,
        domains=task.domains,
        kept=task.phase,
        tokens_per_step=task.tokens_per_step,
        num_steps=task.steps,
    )
    notices += [notice] if (notice := repeat_notice(steps)) else []
    machine, said = _machine(task)
    notices += said
    row_bytes = row_bytes_of(task, trace, plan)
    runs: list[Run] = []
    for settings, swept in sweep_of(task):
        placed, said = place_at_start(swept, trace=trace, plan=plan, histogram=histogram, row_bytes=row_bytes)
        notices += said
        if "dynamic" in policies and (thrash := thrash_notice(_rebalance(swept.config))):
            notices.append(thrash)
        # Settings of the live loop change nothing but the dynamic policy.
        chosen = [name for name in policies if name == "dynamic" or budget_of(settings) or not runs]
        layers = trace.identity.layers or ()
        runs += [
            _run(name, steps=steps, placed=placed, task=swept, settings=settings, layers=layers) for name in chosen
        ]
    return Simulation(
        task=task,
        identity=replace(trace.identity, num_experts=num_experts),
        hot_rows=runs[0].hot_rows,
        row_bytes=row_bytes,
        num_steps=len(steps),
        runs=tuple(_with_rates(run, machine=machine) for run in runs),
        notices=tuple(notices),
    )


def _run(
    name: str,
    *,
    steps: Steps,
    placed: Placed,
    task: SimulateTask,
    settings: Mapping[str, str],
    layers: Sequence[int],
) -> Run:
    """Replay one policy."""
    settings = settings if name == "dynamic" else budget_of(settings)
    window = task.window or max(1, -(-len(steps) // _WINDOWS))
    hot_rows = int(placed.hot.sum())
    if name == "oracle":
        found = oracle(steps, hot=placed.hot, window_steps=window)
        return Run(policy=name, settings=settings, hot_rows=hot_rows, result=found)
    if name == "lru":
        return _run_lru(steps, placed=placed, settings=settings, window=window, layers=layers)
    what = " ".join([name, *(f"{key.replace('_', '-')}={value}" for key, value in settings.items())])
    with console.progress(f"replaying {what}") as told:
        options = ReplayOptions(
            row_bytes=placed.row_bytes,
            dyn_steps=task.config.dyn_steps,
            placement=task.placement,
            window_steps=window,
            on_progress=told,
        )
        policy = None
        if name == "dynamic":
            policy = make_policy(
                hot=placed.hot,
                prior=None if task.no_prior else placed.counts,
                top_k=steps.top_k,
                options=_rebalance(task.config),
                row_bytes=placed.row_bytes,
            )
        found = replay(steps, hot=placed.hot, policy=policy, options=options)
        return Run(policy=name, settings=settings, hot_rows=hot_rows, result=found)


def _rebalance(config: HotsplitConfig) -> RebalanceOptions:
    return RebalanceOptions(
        half_life=config.dyn_half_life,
        margin=config.dyn_margin,
        max_swaps=config.dyn_max_swaps,
        schedule=config.dyn_schedule,
    )


def _run_lru(steps: Steps, *, placed: Placed, settings: Mapping[str, str], window: int, layers: Sequence[int]) -> Run:
    """LRU in as many layers as time allows; rows are weighed by the mean row of those layers."""
    sample = sample_layers(steps)
    order_LE = placed.hot.astype(np.float64) if placed.counts is None else placed.counts
    found = lru(steps, hot=placed.hot, order=order_LE, layer_ids=sample)
    row = float(np.mean([placed.row_bytes[layer_id] for layer_id in sample]))
    result = as_replayed(found, steps=steps, row_bytes=row, window_steps=window)
    is_whole = len(sample) == steps.num_layers
    return Run(
        policy="lru",
        settings=settings,
        hot_rows=int(placed.hot.sum()),
        result=result,
        layers=None if is_whole else tuple(layers[layer_id] for layer_id in sample),
    )


def _machine(task: SimulateTask) -> tuple[Machine | None, list[Notice]]:
    if task.rates is None:
        return None, []
    return machine_of(load_rates(task.rates), given=given_rates(link=None, hbm=None, host=None), ranks=1)


def _with_rates(run: Run, *, machine: Machine | None) -> Run:
    """Tokens per second of reading experts and moving rows, of one rank; nothing else of a step is in it."""
    found = run.result
    if machine is None or found.hot_bytes_per_step is None or found.cold_bytes_per_step is None:
        return run
    hot_s = found.hot_bytes_per_step / machine.hbm_bytes_per_s[0]
    # A cache reads a row that it has moved from fast memory; a swap moves what was read in place as well.
    moved_bytes = 0.0 if run.policy == "lru" else found.moved_bytes / max(found.steps, 1)
    link_bytes = found.cold_bytes_per_step + moved_bytes
    cold_s = link_bytes / min(machine.link_bytes_per_s[0], machine.host_bytes_per_s)
    tokens = found.tokens / max(found.steps, 1)
    slow, fast = hot_s + cold_s, max(hot_s, cold_s)
    return replace(run, tokens_per_s=(tokens / slow, tokens / fast)) if fast else run
