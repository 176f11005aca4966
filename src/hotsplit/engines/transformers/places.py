"""Where a model computes: on this machine's CPU, or on one of its GPUs.

The first decision of load(): `device -> place`. Everything that differs by it follows from the place.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotsplit.bank.device_banks import DeviceParts, ExpertsKernel
from hotsplit.bank.device_memory import DeviceMemory, device_memory
from hotsplit.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlace:
    """One GPU, or what stands in for one."""

    device: torch.device
    """Of dense weights, tokens and hot rows."""
    memory: Callable[[], DeviceMemory]
    """How much of its memory is free."""
    capability: Callable[[], tuple[int, int]]
    """Its compute capability: (9, 0) is sm_90."""
    open: Callable[[str], DeviceParts]
    """Opens its memory for rows, by HOTSPLIT_NUMA_POLICY."""


def place_of(device: str | torch.device | None) -> GpuPlace | None:
    """The place that a user asked for.

    Args:
        device: "cpu", "cuda", "cuda:1" or such; None for a CUDA GPU with memory of its own where torch sees one, else the
            CPU.

    Returns:
        The GPU; None for the CPU.

    Raises:
        ConfigError: No such device, or none that hotsplit has rows for.
    """
    if device is None:
        return _own_choice() if has_cuda() else None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_device(device, got="no device's name") from error
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise _no_device(device, got="a device that has no rows here")
    if not has_cuda():
        raise _no_device(device, got=_why_no_cuda())
    number = torch.cuda.device_count()
    index = _index_of(device, wanted=wanted)
    if not 0 <= index < number:
        raise _no_device(device, got=f"{number} CUDA device{'s' if number > 1 else ''}")
    return gpu_place(index)


def _own_choice() -> GpuPlace | None:
    """The current GPU, or the first other one where that is integrated: it has no memory to split from the host's."""
    current = torch.cuda.current_device()
    for index in sorted(range(torch.cuda.device_count()), key=lambda index: index != current):
        if not torch.cuda.get_device_properties(index).is_integrated:
            return gpu_place(index)
        logger.info("cuda:%d is passed over: it is integrated, and its memory is the host's", index)
    return None


def _index_of(device: str | torch.device, *, wanted: torch.device) -> int:
    """The number as it was written: torch keeps eight bits of it, and "cuda:256" would be the first device."""
    if ":" not in str(device):
        return torch.cuda.current_device()
    return int(device.partition(":")[2]) if isinstance(device, str) else int(wanted.index)


def has_cuda() -> bool:
    """Whether torch sees a GPU of NVIDIA's; what it calls "cuda" on AMD's has no driver calls here."""
    return torch.cuda.is_available() and not _is_for_amd()


def gpu_place(index: int) -> GpuPlace:
    """A GPU's own place.

    Args:
        index: Ordinal among the visible devices.
    """
    device = torch.device("cuda", index)
    return GpuPlace(
        device=device,
        memory=lambda: device_memory(device),
        capability=lambda: torch.cuda.get_device_capability(device),
        open=lambda numa_policy: _open(index, numa_policy=numa_policy),
    )


def _open(index: int, *, numa_policy: str) -> DeviceParts:
    from hotsplit.bank.cuda_open import open_cuda

    kernels = importlib.import_module("hotsplit.bank.kernels.rows_triton")  # Triton comes with a CUDA build of torch
    experts: ExpertsKernel = kernels.experts
    with torch.cuda.device(index):
        return DeviceParts(kit=open_cuda(numa_policy=numa_policy, index=index), experts=experts)


def _why_no_cuda() -> str:
    if _is_for_amd():
        return "a build of torch for AMD GPUs, whose memory hotsplit cannot split"
    if torch.version.cuda is None:
        return "a build of torch without CUDA"
    return "no CUDA device that torch can use"


def _is_for_amd() -> bool:
    return getattr(torch.version, "hip", None) is not None


def _no_device(device: object, *, got: str) -> ConfigError:
    return ConfigError(
        f"device {device}", got=got, wanted="cpu, or the cuda device of an NVIDIA GPU", do="leave it out, or use cpu"
    )
