"""How much fast memory there is for hot experts, where nobody says.

On a CPU the engine's own placement would take what is free: memory that is available, less the reserve, less the
dense weights.
"""

from __future__ import annotations

import math

from hotsplit.errors import BudgetError
from hotsplit.host.memory import MemoryLimits, memory_limits
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import GIB, gib


def default_hot_bytes(sizes: ExpertSizes, *, reserve_bytes: int, limits: MemoryLimits | None = None) -> int:
    """The default budget on a CPU, in bytes; 0 where nothing is left.

    Args:
        sizes: Of the model.
        reserve_bytes: Left free for everything else.
        limits: Of this machine; None to read them.

    Raises:
        BudgetError: The system does not tell how much memory is available.
    """
    limits = limits or memory_limits()
    if limits.available_bytes is None:
        raise BudgetError(
            "the default hot budget", got="no way to tell how much memory is available", do="set HOTSPLIT_HOT_GIB"
        )
    return max(limits.available_bytes - reserve_bytes - sizes.dense_bytes, 0)


def require_memory(needed: int, *, sizes: ExpertSizes, reserve_bytes: int, limits: MemoryLimits | None = None) -> None:
    """Refuse, before anything is allocated, what this machine cannot hold.

    Args:
        needed: Bytes of hot rows.
        sizes: Of the model; its dense weights need room as well.
        reserve_bytes: Must stay free beside them.
        limits: Of this machine; None to read them.

    Raises:
        BudgetError: Hot rows, dense weights and reserve exceed the memory that is available.
    """
    limits = limits or memory_limits()
    if limits.available_bytes is None:
        return
    room = max(limits.available_bytes - sizes.dense_bytes - reserve_bytes, 0)
    if needed > room:
        raise BudgetError(
            "the hot budget exceeds real memory",
            got=f"{gib(needed)} of hot rows beside {gib(sizes.dense_bytes)} of dense weights and a reserve of "
            f"{gib(reserve_bytes)}",
            wanted=f"at most {gib(room)} ({limits})",
            do=f"set HOTSPLIT_HOT_GIB={math.floor(room / GIB * 100) / 100:g} or less, or lower "
            "HOTSPLIT_VRAM_RESERVE_GIB",
            room_bytes=room,
        )
