"""What a test may ask of the probe while the engine runs."""

from __future__ import annotations

from typing import Any

from hotsplit_probe import live
from hotsplit_probe.memory import anonymous_bytes, banks
from hotsplit_probe.watch import Watch


def run_command(watch: Watch, command: str) -> dict[str, Any]:
    """Carry out one command in this worker.

    Args:
        watch: The worker's probe.
        command: "report", "check rows", "evict", "roll", or "pad N"; the last two hold from then on.

    Returns:
        Plain JSON.
    """
    name, _, value = command.partition(" ")
    if name == "pad":
        watch.padding = int(value)
    if name == "roll":
        watch.is_rolled = True
    answers = {"report": _report, "check": _check, "evict": _evict}
    return answers[name](watch) if name in answers else {}


def _report(watch: Watch) -> dict[str, Any]:
    return watch.report() | {"anonymous_bytes": anonymous_bytes()}


def _check(watch: Watch) -> dict[str, Any]:
    """Whether every expert's bytes survived all swaps, and each lies in a row of its own."""
    maps = [live.row_map(layer_id) for layer_id in range(len(watch.layers))]
    return {
        "rows_intact": all(one.copy.is_intact(row_map_E) for one, row_map_E in zip(watch.layers, maps, strict=True)),
        "rows_distinct": all(len(set(row_map_E.tolist())) == len(row_map_E) for row_map_E in maps),
    }


def _evict(_: Watch) -> dict[str, Any]:
    """Push the cold pages out; how much of them was in memory before and after."""
    before = banks()
    live.evict()
    return {"before": before["bank_resident"], "after": banks()["bank_resident"]}
