"""The seam of the checks: everything that differs between a GPU and the stand-ins of a dry run is behind one Device.

    tensors of `type`          torch's own, and rows in ranges over `driver` and `tensor_at`
    kernels                    Triton's, or their torch twins
    streams, calls             what the swaps run on: events, copies by address, words by value
    stamp, elapsed_s           points in a stream, and the time between two of them
    capture, launch            a graph, and a step of the engine, which may be its replay

cuda_device.py and dry_device.py implement it. Nothing in the checks asks which one it got.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch

from hotsplit.bank.driver import Driver
from hotsplit.bank.streams import StreamCalls, Streams
from hotsplit.bank.swap import Stream
from hotsplit.bank.tensor_at import TensorAt

Stamp: TypeAlias = Any
"""A point in a stream; Any, because only its maker knows its type."""
Work: TypeAlias = Callable[[], None]

STEPS_AHEAD: Final = 2
"""Steps that may be under way when another one is launched: an engine prepares one while the last one runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One set of kernels; reference.py says what the first four of them compute."""

    name: str
    """What they are made of."""
    route_and_count: Callable[..., torch.Tensor]
    """The route op."""
    begin_step: Callable[..., None]
    """Says which step it counts."""
    experts: Callable[..., torch.Tensor]
    """The routed experts of a layer."""
    sum_rows: Callable[..., torch.Tensor]
    """read_rows.sum_rows: reads rows and does nothing else."""


class Graph(Protocol):
    """Work that was captured once."""

    @property
    def num_nodes(self) -> int | None:
        """Launches and copies in it; None where there is nothing to count."""

    def replay(self) -> None:
        """Enqueue all of it on the compute stream."""


class Device(Protocol):
    """One GPU, or what stands in for it. Called from one thread."""

    is_dry: bool
    """Whether its times mean nothing."""
    type: str
    """Of its tensors, for torch."""
    driver: Driver
    """Memory behind addresses."""
    tensor_at: TensorAt
    """Tensors over them."""
    kernels: Kernels
    """What computes."""
    streams: Streams
    """The streams that swaps run on."""
    calls: StreamCalls
    """What is enqueued there by address."""

    def describe(self) -> Mapping[str, Any]:
        """Names and versions, plain JSON."""

    def free_bytes(self) -> int:
        """GPU memory that is left."""

    def release(self) -> None:
        """Give back what no tensor uses any more."""

    def read_rate(self, tensor: torch.Tensor) -> float:
        """Bytes per second at which it reads memory, [num_bytes], uint8: what a backing is chosen by."""

    def pinned(self, num_bytes: int) -> AbstractContextManager[torch.Tensor]:
        """Host memory of the driver's own, page-locked, [num_bytes], uint8, as the device sees it."""

    def synchronise(self) -> None:
        """Wait until everything that was enqueued is done."""

    def stamp(self, stream: Stream) -> Stamp:
        """Mark a point in a stream."""

    def elapsed_s(self, start: Stamp, end: Stamp) -> float:
        """Seconds between two points that have been passed."""

    def capture(self, work: Work) -> Graph:
        """Run the work to warm up, then capture it; both leave traces in whatever it writes to."""

    def launch(self, step: Work) -> None:
        """Enqueue one step on the compute stream; waits for older ones where more than STEPS_AHEAD are under way."""


def median_s(device: Device, work: Work, *, repeats: int) -> float:
    """How long work takes on the compute stream.

    Args:
        device: Where it runs.
        work: Enqueues it, and joins whatever it enqueued on other streams.
        repeats: Measured runs, after one to warm up.

    Returns:
        Seconds, the median.
    """
    work()
    device.synchronise()
    durations = []
    for _ in range(repeats):
        start = device.stamp("compute")
        work()
        end = device.stamp("compute")
        device.synchronise()
        durations.append(device.elapsed_s(start, end))
    return statistics.median(durations)


def join(device: Device, *, first: Stream, then: Stream) -> None:
    """Order what follows on one stream behind all that is enqueued on another.

    Args:
        device: Whose streams.
        first: Runs on.
        then: Waits.
    """
    device.streams.wait(then, device.streams.record(first))
