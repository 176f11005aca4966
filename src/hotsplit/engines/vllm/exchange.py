"""What all ranks agree on before anything is loaded: one budget, one plan."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hotsplit.errors import EngineError

WAIT = timedelta(minutes=10)
"""For the slowest rank. A rank without HOTSPLIT_ settings runs stock and never answers."""

AllGather = Callable[[Any], list[Any]]
"""Gives every rank's value, in rank order."""


def gather_of_all() -> AllGather:
    """The all-gather of all workers of this engine."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return lambda value: [value]

    def gather(value: Any) -> list[Any]:
        import torch.distributed

        try:
            torch.distributed.monitored_barrier(group.cpu_group, timeout=WAIT, wait_all_ranks=True)
        except RuntimeError as error:
            raise EngineError(
                "ranks of this engine",
                got=f"no answer from some of them: {str(error).splitlines()[0]}",
                do="set the same HOTSPLIT_ variables on every node",
            ) from error
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return gather
