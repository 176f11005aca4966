"""A GPU that is none: a driver that is fake, streams that are simulated, the kernels' twins, and tensors on the CPU.

What an engine does on a GPU is done here, but for the device itself: rows lie in stitched ranges of real memory, swaps
are copies on a simulated side stream, and the device counts while it routes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotsplit
from hotsplit.bank.cuda_open import GpuParts, open_cuda
from hotsplit.bank.cuda_probe import Probe
from hotsplit.bank.device_banks import DeviceParts
from hotsplit.bank.device_memory import DeviceMemory
from hotsplit.bank.fake_driver import FakeDriver, FakeMachine
from hotsplit.bank.kernels import reference
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.engines.transformers import gpu
from hotsplit.engines.transformers.places import GpuPlace

GIB = 2**30
PAGE = 4096
"""Bytes: rows of these models are small, and so are the pages that divide them."""
TWO_BANKS = frozenset({"host_numa", "host"})
"""What a driver must not support for rows to lie in two banks."""


@dataclass(kw_only=True)
class StandIn:
    """One machine with one GPU of no substance.

    Args:
        unsupported: Kinds of host memory that its driver does not stitch.
        free_bytes: Of GPU memory.
        capability: Of its GPU.
    """

    unsupported: frozenset[str] = frozenset()
    free_bytes: int = 64 * GIB
    driver: FakeDriver = field(init=False)
    streams: SimStreams = field(init=False)
    capability: tuple[int, int] = (9, 0)
    num_opened: int = 0
    policies: list[str] = field(default_factory=list)
    experts: Any = reference.experts
    num_waits: int = 0

    def __post_init__(self):
        pages = dict.fromkeys(("device", "host_numa", "host"), PAGE)
        self.driver = FakeDriver(FakeMachine(unsupported=self.unsupported, granularity=pages))
        self.streams = SimStreams(self.driver, num_chunks=3)
        self.kernels = SimpleNamespace(route_and_count=reference.route_and_count, begin_step=self._begin_step)

    def place(self) -> GpuPlace:
        """What load() is given for a device."""
        return GpuPlace(
            device=torch.device("cpu"), memory=self.memory, capability=lambda: self.capability, open=self.open
        )

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free_bytes=self.free_bytes, total_bytes=2 * self.free_bytes)

    def open(self, numa_policy: str) -> DeviceParts:
        self.num_opened += 1
        self.policies.append(numa_policy)
        probe = Probe(read_rate=lambda tensor: 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor)
        parts = GpuParts(
            device=torch.device("cpu"),
            driver=self.driver,
            streams=self.streams,
            calls=self.streams,
            kernels=self.kernels,
            probe=probe,
            synchronise=self.synchronise,
        )
        return DeviceParts(kit=open_cuda(numa_policy="off", parts=parts), experts=self._experts)

    def synchronise(self):
        self.num_waits += 1
        self.streams.drain()

    def _begin_step(self, step, *, number, phase):
        """What was enqueued before a step has run when it does: publishes, and the copies that they wait for."""
        self.streams.synchronize("compute")
        reference.begin_step(step, number=number, phase=phase)

    def _experts(self, *args, **kwargs):
        """While layers run, so does a piece of what the side stream copies."""
        if "side" in self.streams.enabled():
            self.streams.advance("side")
        return self.experts(*args, **kwargs)


def budget(folder, *, rows, dynamic):
    """GiB for so many hot rows in every layer, all that a GPU takes beside them included."""
    if not rows:
        return 0.0
    seen: list[Any] = []

    def look(model, **kwargs):
        seen.append(real(model, **kwargs))
        raise EnoughError

    real = gpu.planned_sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "planned_sizes", look)
        with pytest.raises(EnoughError):
            hotsplit.load(folder, hot_gib=1e-9, dynamic=dynamic, run_when_fits=True)
    sizes = seen[0]
    return float(
        (sizes.row_bytes * (rows + (dynamic and rows < sizes.identity.num_experts)) + sizes.fixed_bytes).sum() / 2**30
    )


class EnoughError(Exception):
    """Of a load that was only begun to see what it plans with."""
