"""The Device of a dry run: every line of the checks runs on a CPU, and only the times mean nothing.

    driver      fake_driver.py: real memory behind real addresses, by the real driver's rules
    streams     sim_streams.py: copies in pieces, and streams that take turns at random, by a seed
    graphs      the work itself; a step reads when its turn on the compute stream comes, and not when it is launched
    kernels     the torch twins; Triton's own in a process in which it interprets (TRITON_INTERPRET=1)

So swaps really run beside steps, in orders that a GPU could take, and a mutant really tears bytes that a step reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from hotsplit.bank.checks.device import STEPS_AHEAD, Kernels, Stamp, Work
from hotsplit.bank.checks.read_rows import sum_rows
from hotsplit.bank.driver import Driver
from hotsplit.bank.fake_driver import FakeDriver
from hotsplit.bank.kernels import reference
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.streams import StreamCalls, Streams
from hotsplit.bank.swap import Stream
from hotsplit.bank.tensor_at import TensorAt, cpu_tensor

_PIECES: Final = 3
"""Of a copy: others run in between."""
_GO_ON: Final = 0.9
"""Chance that the streams go on for another piece before the next step is launched."""
_STAY: Final = 0.85
"""Chance that the same stream goes on: of two streams that are always level, none is ever early or late."""
_FREE_BYTES: Final = 1 << 30
_READ_RATE: Final = 1e9


def dry_kernels() -> Kernels:
    """The torch twins, or Triton's kernels where they are interpreted."""
    if importlib.util.find_spec("triton"):
        import triton

        if triton.knobs.runtime.interpret:
            from hotsplit.bank.checks.cuda_device import triton_kernels

            return triton_kernels()
    return Kernels(
        name="torch twins",
        route_and_count=reference.route_and_count,
        begin_step=reference.begin_step,
        experts=reference.experts,
        sum_rows=sum_rows,
    )


class DryStreams(SimStreams):
    """Simulated streams whose steps do something: each runs its work at its end.

    Args:
        memory: Where copies and writes end.
        seed: Of the order in which streams take turns.
    """

    def __init__(self, memory: StreamCalls, *, seed: int = 0) -> None:
        super().__init__(memory, num_chunks=_PIECES)
        self._random = random.Random(seed)
        self._steps: deque[Work] = deque()
        self._turn: Stream = "compute"

    def launch(self, step: Work) -> None:
        """Enqueue one step, then let the streams run for a while.

        Args:
            step: Its work.
        """
        self.launch_step()
        self._steps.append(step)
        while streams := self.enabled():
            if self.num_steps() <= STEPS_AHEAD and self._random.random() > _GO_ON:
                break
            if self._turn not in streams or self._random.random() > _STAY:
                self._turn = self._random.choice(streams)
            self.advance(self._turn)

    def advance(self, stream: Stream) -> None:
        """Do the stream's next piece of work; a step that ends has run its own.

        Args:
            stream: One of enabled().
        """
        num_steps = self.num_steps()
        super().advance(stream)
        if self.num_steps() < num_steps:
            self._steps.popleft()()


class DryGraph:
    """Work that runs anew with every replay (a Graph).

    Args:
        work: What was captured.
    """

    num_nodes = None

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        """Run the work."""
        self._work()


class DryDevice:
    """What stands in for a GPU (a Device, which says what each method does).

    Args:
        driver: Memory behind addresses; one of its own if None.
        kernels: What computes; dry_kernels() if None.
    """

    is_dry = True
    type = "cpu"

    def __init__(self, driver: FakeDriver | None = None, *, kernels: Kernels | None = None) -> None:
        fake = driver or FakeDriver()
        self._dry_streams = DryStreams(fake)
        self.driver: Driver = fake
        self.tensor_at: TensorAt = cpu_tensor
        self.kernels = kernels or dry_kernels()
        self.streams: Streams = self._dry_streams
        self.calls: StreamCalls = self._dry_streams

    def describe(self) -> Mapping[str, Any]:
        """Nothing of a GPU, so that no reader takes it for one."""
        return {"gpu": None, "kernels": self.kernels.name}

    def free_bytes(self) -> int:
        """More than tiny sizes take."""
        return _FREE_BYTES

    def release(self) -> None:
        """Nothing is kept."""

    def read_rate(self, tensor: torch.Tensor) -> float:
        """Read it; the rate is the same for all memory, so that no choice hangs on the CPU's mood.

        Args:
            tensor: [num_bytes], uint8.
        """
        return float(tensor.view(torch.int32).sum().isfinite()) * _READ_RATE

    @contextlib.contextmanager
    def pinned(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Plain memory.

        Args:
            num_bytes: How many.
        """
        yield torch.zeros(num_bytes, dtype=torch.uint8)
        self.synchronise()

    def synchronise(self) -> None:
        """Let all streams run to their end."""
        self._dry_streams.drain()

    def stamp(self, stream: Stream) -> Stamp:
        """The time of the call: of a stream that runs later it says nothing.

        Args:
            stream: Which.
        """
        return time.perf_counter()

    def elapsed_s(self, start: Stamp, end: Stamp) -> float:
        """Seconds between two calls.

        Args:
            start: The earlier one.
            end: The later one.
        """
        return max(float(end - start), 1e-9)

    def capture(self, work: Work) -> DryGraph:
        """Run the work as a capture would refuse it: no call of a stream may come.

        Args:
            work: What to capture.
        """
        with self._dry_streams.capture():
            work()
        return DryGraph(work)

    def launch(self, step: Work) -> None:
        """Enqueue one step.

        Args:
            step: Its work.
        """
        self._dry_streams.launch(step)
