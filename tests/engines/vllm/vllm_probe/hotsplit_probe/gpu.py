"""A GPU's backend on a CPU: the product's own memory, router and swaps, over a fake driver and streams of a simulation.

    memory    address ranges of the fake driver; no copy may span both kinds of rows
    streams   copies of rows go piece by piece while steps run, and are published when a query finds them done
    kernels   the torch twins; what was published is written before a step begins, as a compute stream would

Tensors lie on the CPU, so vLLM's CPU kernels compute with them, and what they give can be held against stock.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from hotsplit.bank.cuda_open import GpuParts, open_cuda, warm_up
from hotsplit.bank.cuda_probe import Probe
from hotsplit.bank.fake_driver import FakeDriver, FakeMachine
from hotsplit.bank.kernels import reference
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.tensor_at import cpu_tensor

PAGE_BYTES = 4096
"""Of both memories: a small model must not be all page edges."""
_PIECES = 3
"""Of a copy: steps run between them."""


class BusyStreams(SimStreams):
    """Streams that get on a little whenever they are looked at; how far, a seed decides.

    Args:
        memory: Where bytes are moved.
        seed: Of their progress.
    """

    def __init__(self, memory: Any, *, seed: int = 0) -> None:
        super().__init__(memory, num_chunks=_PIECES)
        self._chance = random.Random(seed)
        self.asked: list[str] = []
        """What was asked and enqueued, by name."""

    def query(self, event: int) -> bool:
        """Whether the event is done, after some progress of the side stream."""
        self.asked.append("query")
        while "side" in self.enabled() and self._chance.random() < 0.6:
            self.advance("side")
        return super().query(event)

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        self.asked.append("copy")
        super().copy(target, source=source, num_bytes=num_bytes, stream=stream)

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue a write."""
        self.asked.append("write")
        super().write32(address, value=value, stream=stream)


class StandIn:
    """A GPU that is none.

    Args:
        machine: What its driver pretends to run on; None for one that can do everything.
        writes_maps: Whether what is published reaches the device; without it outputs go wrong, as they must.
    """

    def __init__(self, machine: FakeMachine | None = None, *, writes_maps: bool = True) -> None:
        pages = dict.fromkeys(("device", "host_numa", "host"), PAGE_BYTES)
        self.driver = FakeDriver(machine or FakeMachine(granularity=pages))
        self.streams = BusyStreams(self.driver if writes_maps else _Deaf(self.driver))
        self.num_settled = 0
        """Waits for the device."""
        self.num_threads = 0
        """Threads that were told of the driver."""

    def parts(self, **more: Any) -> GpuParts:
        """What a GPU is to hotsplit.

        Args:
            **more: Other parts.
        """
        kernels = SimpleNamespace(route_and_count=reference.route_and_count, begin_step=self._begin_step)
        probe = Probe(read_rate=lambda tensor: 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor)
        given = {
            "device": torch.device("cpu"), "driver": self.driver, "streams": self.streams, "calls": self.streams,
            "kernels": kernels, "probe": probe, "synchronise": self._synchronise,
        }  # fmt: skip
        return GpuParts(**given | more)

    def backend(self, options: Any) -> Any:
        """As engines/vllm/backends.py makes it of a real one.

        Args:
            options: The product's.
        """
        from hotsplit.engines.vllm.backends import Backend

        kit = open_cuda(numa_policy=options.numa_policy, parts=self.parts())
        return Backend(
            name=kit.name,
            memory=kit.memory,
            device=kit.device,
            settle=kit.synchronise,
            enter_thread=self._enter_thread,
            warm_up=lambda router, top_k: warm_up(router, top_k=top_k, device=torch.device("cpu")),
        )

    def _begin_step(self, step: torch.Tensor, *, number: int, phase: int) -> None:
        self.streams.synchronize("compute")
        reference.begin_step(step, number=number, phase=phase)

    def _synchronise(self) -> None:
        self.num_settled += 1
        self.streams.drain()

    def _enter_thread(self) -> None:
        self.num_threads += 1
        self.driver.make_current()


class _Deaf:
    """A driver that copies rows and loses what is published."""

    def __init__(self, driver: FakeDriver) -> None:
        self.copy = driver.copy

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Nothing."""


def install(*, writes_maps: bool) -> None:
    """Let every worker of this process that asks for the CPU's backend have this one.

    Args:
        writes_maps: As for StandIn.
    """
    from hotsplit.engines.vllm import backends

    backends.BACKENDS = {"cpu": StandIn(writes_maps=writes_maps).backend}
