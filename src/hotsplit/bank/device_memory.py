"""How much memory a GPU has, and how much of it nobody holds: what budgets are made of, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """One GPU's memory at one moment."""

    free_bytes: int
    """What can still be allocated, torch's own cache included: it gives unused blocks back when it must."""
    total_bytes: int
    """All of it."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Ask the driver how much of a GPU's memory is free, and torch how much of the rest it holds without using it.

    Args:
        device: Of type "cuda"; without an index the current one.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(free_bytes=free_bytes + cached_bytes, total_bytes=total_bytes)
