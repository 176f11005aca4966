"""How much memory a GPU has, and how much of it nobody holds: what budgets are made of, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """One GPU's memory at one moment."""

    free_bytes: int
    """What the driver can still allocate."""
    total_bytes: int
    """All of it."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Ask the driver how much of a GPU's memory is free, once torch has given back what it holds without using it.

    Torch keeps what it has freed for allocations of its own, and hears nothing when the driver, which hot rows come
    from, runs out.

    Args:
        device: Of type "cuda"; without an index the current one.
    """
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(free_bytes=free_bytes, total_bytes=total_bytes)
