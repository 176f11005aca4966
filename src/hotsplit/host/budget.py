"""How much fast memory there is for hot experts, where nobody says, and whether what was asked for fits.

On a CPU the engine's own placement would take what is free: memory that is available, less the reserve, less the
dense weights. On a GPU it is what stock transformers would keep there under `device_map="auto"`: whole modules in their
order, from the first that does not fit on in host memory. hotsplit takes as many bytes, all dense weights first.

Worked example, ten layers of 1 GiB dense and 4 GiB experts on a GPU with 34 GiB free: 90 % of it is 30.6; one layer must
always find room beside those that are kept, so five stay, 25 GiB. Less the ten layers' dense weights: 15 GiB of experts.

    >>> layer = ModuleBytes(name="layers.0", dense_bytes=GIB, expert_bytes=4 * GIB)
    >>> sum(one.num_bytes for one in kept_by_device_map([layer] * 10, free_bytes=34 * GIB)) // GIB
    25
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hotsplit.errors import BudgetError
from hotsplit.host.memory import MemoryLimits, memory_limits
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import GIB, gib

_KEPT_FREE: Final = 0.1
"""Of a GPU's free memory: what an automatic device map leaves for everything that is no weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleBytes:
    """A module that a device map puts somewhere as a whole."""

    name: str
    """Its path."""
    dense_bytes: int
    """Of its weights that are no routed experts."""
    expert_bytes: int
    """Of its routed experts."""

    @property
    def num_bytes(self) -> int:
        """Of all its weights."""
        return self.dense_bytes + self.expert_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """One GPU's memory, and what else goes there."""

    free_bytes: int
    """What can still be allocated."""
    total_bytes: int
    """All of it."""
    reserve_bytes: int
    """HOTSPLIT_VRAM_RESERVE_GIB."""
    dense_bytes: int
    """Weights other than routed experts."""
    name: str
    """Of the GPU, "cuda:0"."""

    @property
    def room_bytes(self) -> int:
        """What is left for hot experts."""
        return max(self.free_bytes - self.dense_bytes - self.reserve_bytes, 0)

    def __str__(self) -> str:
        return f"{gib(self.free_bytes)} of {gib(self.total_bytes)} free on {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultBudget:
    """The budget, and why."""

    num_bytes: int
    """Bytes."""
    text: str
    """How it came about, for the log."""


def kept_by_device_map(modules: Sequence[ModuleBytes], *, free_bytes: int) -> list[ModuleBytes]:
    """The modules that an automatic device map of one GPU would keep on it.

    Args:
        modules: That are never split, in the model's order.
        free_bytes: Of the GPU.

    Returns:
        The first ones, as many as fit in 90 % beside the largest of those that follow: it is fetched when it is needed.

    Source: get_balanced_memory and infer_auto_device_map of transformers 5.23, integrations/accelerate.py, which follow
    accelerate's (both Apache-2.0); the rule alone, for one GPU.
    """
    room, used = int((1 - _KEPT_FREE) * free_bytes), 0
    for i, module in enumerate(modules):
        following = max((one.num_bytes for one in modules[i + 1 :]), default=0)
        if used + module.num_bytes > room - following:
            return list(modules[:i])
        used += module.num_bytes
    return list(modules)


def default_hot_bytes_gpu(modules: Sequence[ModuleBytes], *, memory: GpuMemory) -> DefaultBudget:
    """The default budget on a GPU.

    Args:
        modules: That are never split, in the model's order.
        memory: Of the GPU.
    """
    kept = kept_by_device_map(modules, free_bytes=memory.free_bytes)
    resident = sum(one.num_bytes for one in kept)
    dense, experts = (sum(getattr(one, name) for one in modules) for name in ("dense_bytes", "expert_bytes"))
    hot = min(max(resident - dense, 0), experts)
    text = (
        f'{gib(resident)}, which device_map="auto" would keep of this model ({len(kept)} of {len(modules)} modules; '
        f"{memory}), less {gib(dense)} of dense weights"
    )
    if hot > memory.room_bytes:
        hot = memory.room_bytes
        text += f"; at most what a reserve of {gib(memory.reserve_bytes)} leaves"
    return DefaultBudget(num_bytes=hot, text=text)


def require_gpu_memory(needed: int, *, memory: GpuMemory) -> None:
    """Refuse, before anything is allocated, what a GPU cannot hold.

    Args:
        needed: Bytes of hot rows, and of what stays fast with them.
        memory: Of the GPU.

    Raises:
        BudgetError: Hot rows, dense weights and reserve exceed the memory that is free.
    """
    if needed > memory.room_bytes:
        raise _too_much(
            needed, room=memory.room_bytes, dense=memory.dense_bytes, reserve=memory.reserve_bytes, what=str(memory)
        )


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
        raise _too_much(needed, room=room, dense=sizes.dense_bytes, reserve=reserve_bytes, what=str(limits))


def _too_much(needed: int, *, room: int, dense: int, reserve: int, what: str) -> BudgetError:
    return BudgetError(
        "the hot budget exceeds real memory",
        got=f"{gib(needed)} of hot rows beside {gib(dense)} of dense weights and a reserve of {gib(reserve)}",
        wanted=f"at most {gib(room)} ({what})",
        do=f"set HOTSPLIT_HOT_GIB={math.floor(room / GIB * 100) / 100:g} or less, or lower HOTSPLIT_VRAM_RESERVE_GIB",
        room_bytes=room,
    )
