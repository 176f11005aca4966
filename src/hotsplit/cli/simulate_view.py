"""How a simulation looks: JSON with stable keys, and plain tables."""

from __future__ import annotations

from typing import Any

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.simulate_inputs import budget_of
from hotsplit.cli.simulating import Run, Simulation
from hotsplit.plan.simulate import Part
from hotsplit.units import MIB


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    """A simulation's numbers. Bytes are rows where `row_bytes` is null.

    Args:
        simulation: From `hotsplit simulate`.
    """
    task = simulation.task
    return {
        "kind": "simulation",
        "trace": str(task.trace),
        "model": simulation.identity.to_json(),
        "plan_domain": task.plan_domain,
        "domains": list(task.domains),
        "phase": task.phase,
        "placement": task.placement,
        "steps": simulation.num_steps,
        "hot_experts": simulation.hot_rows,
        "row_bytes": None if simulation.row_bytes is None else list(simulation.row_bytes),
        "runs": [_run_json(run) for run in simulation.runs],
        "notices": list(dict.fromkeys(str(notice) for notice in simulation.notices)),
    }


def _run_json(run: Run) -> dict[str, Any]:
    found = run.result
    return {
        "policy": run.policy,
        "settings": dict(run.settings),
        "hot_experts": run.hot_rows,
        "layers": None if run.layers is None else list(run.layers),
        "hit_rate": found.hit_rate,
        "byte_hit_rate": found.byte_hit_rate,
        "cold_bytes_per_step": found.cold_bytes_per_step,
        "moved_bytes": found.moved_bytes,
        "moved_bytes_per_step": found.moved_bytes / max(found.steps, 1),
        "swaps": found.done,
        "refused": found.refused,
        "updates": found.updates,
        "shifts": list(found.shifts),
        "tokens": found.tokens,
        "pairs": found.pairs,
        "hits": found.hits,
        "tokens_per_s": None if run.tokens_per_s is None else list(run.tokens_per_s),
        "windows": [_part_json(part) for part in found.parts],
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {name: getattr(part, name) for name in Part.__dataclass_fields__}


def print_simulation(simulation: Simulation) -> None:
    """What every policy got, and how it went over time.

    Args:
        simulation: From `hotsplit simulate`.
    """
    identity, has_bytes = simulation.identity, simulation.row_bytes is not None
    layers = len(identity.layers or ())
    title = (
        f"{simulation.task.trace}: {simulation.num_steps:,} steps, {simulation.hot_rows:,} of "
        f"{layers * (identity.num_experts or 0):,} experts hot"
    )
    unit, scale = ("MiB", MIB) if has_bytes else ("rows", 1)
    columns = [
        "policy",
        "hit",
        "byte hit",
        f"cold {unit}\nper step",
        f"moved {unit}\nper step",
        f"moved {unit}",
        "swaps",
    ]
    has_speed = any(run.tokens_per_s for run in simulation.runs)
    columns += ["tokens/s of\nreading experts"] if has_speed else []
    rows = [_row(run, scale=scale, has_speed=has_speed) for run in simulation.runs]
    for run, row in zip(simulation.runs, rows, strict=True):
        row[0] += "" if run.layers is None else f" ({len(run.layers)} of {layers} layers)"
    if any(budget_of(run.settings) for run in simulation.runs):
        columns.insert(1, "hot\nexperts")
        for run, row in zip(simulation.runs, rows, strict=True):
            row.insert(1, f"{run.hot_rows:,}")
    console.table(title, columns=columns, rows=rows)
    for run in simulation.runs:
        _print_idle(run, simulation)
        if run.result.shifts:
            steps = ", ".join(f"{step:,}" for step in run.result.shifts)
            console.prose(f"{_name(run)}: the traffic shifted at step {steps}.")
        if run.layers is not None:
            names = ", ".join(str(layer) for layer in run.layers)
            console.prose(f"{_name(run)}: a sample of the layers ({names}); its bytes are of these alone.")
    _print_windows(simulation)


def _print_idle(run: Run, simulation: Simulation) -> None:
    """Why a dynamic policy did nothing: the replay is shorter than its first window."""
    every = int(run.settings.get("dyn_steps", simulation.task.config.dyn_steps))
    if run.policy == "dynamic" and not run.result.updates and not run.result.done and every > simulation.num_steps:
        console.prose(
            f"{_name(run)}: no update in {simulation.num_steps:,} steps (every {every:,}); "
            f"try --dyn-steps {max(simulation.num_steps // 10, 1)}."
        )


def _row(run: Run, *, scale: int, has_speed: bool) -> list[str]:
    found = run.result
    cells = [_name(run), rate(found.hit_rate), rate(found.byte_hit_rate)]
    if run.policy == "oracle":
        return [*cells, *["-"] * (4 + has_speed)]
    cold, steps = found.cold_bytes_per_step or 0.0, max(found.steps, 1)
    cells += [f"{cold / scale:,.2f}", f"{found.moved_bytes / scale / steps:,.4f}", f"{found.moved_bytes / scale:,.1f}"]
    cells.append(f"{found.done:,}")
    if has_speed:
        cells.append("-" if run.tokens_per_s is None else f"{run.tokens_per_s[0]:,.1f} to {run.tokens_per_s[1]:,.1f}")
    return cells


def _name(run: Run) -> str:
    settings = [f"{name.replace('_', '-')}={value}" for name, value in run.settings.items()]
    return " ".join([run.policy, *settings])


def _print_windows(simulation: Simulation) -> None:
    """Hit rates window by window, one column per run."""
    runs = simulation.runs
    if len(runs) > 8 or len(runs[0].result.parts) < 2:
        return
    rows = []
    for i, part in enumerate(runs[0].result.parts):
        rows.append([f"{part.first_step:,}", *(rate(run.result.parts[i].hit_rate) for run in runs)])
    console.table("hit rate over time", columns=["from step", *(_name(run) for run in runs)], rows=rows)
