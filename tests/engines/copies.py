"""Copies of a run whose experts swap: no step waits for one, so that a busy machine has them late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patience import until


def wait_for_copies(banks: Any) -> None:
    """From now on a copy that has been enqueued has ended by the next tick, however busy the machine is.

    Args:
        banks: Of a loaded model, on a CPU.
    """
    query = banks._swaps.query

    def wait(event: Any) -> Any:
        if event is not None:
            until(lambda: event.is_done)
        return query(event)

    banks._swaps.query = wait


def until_swapped(model: Any, run: Callable[[], object], *, swaps: int = 1) -> None:
    """Run on until so many swaps are done.

    Args:
        model: Loaded, dynamic.
        run: Runs some steps.
        swaps: Since the start.
    """

    def is_done() -> bool:
        if model.hotsplit.snapshot().swaps_done >= swaps:
            return True
        run()
        return False

    until(is_done)
