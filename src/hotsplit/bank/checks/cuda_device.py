"""The Device of a real GPU: torch's streams, events and graphs, Triton's kernels, the driver's memory.

Made only where there is a GPU, and uses what torch 2.11 has. All work is enqueued on a stream of its own, as engines
do, and never on torch's default stream, which waits for others in ways that nothing here should lean on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from hotsplit.bank.checks.device import STEPS_AHEAD, Kernels, Stamp, Work
from hotsplit.bank.cuda_probe import summing_rate
from hotsplit.bank.driver import driver_error, load_driver
from hotsplit.bank.streams import StreamCalls, Streams, TorchStreams
from hotsplit.bank.swap import Stream
from hotsplit.bank.tensor_at import DeviceTensors, TensorAt
from hotsplit.errors import BankError

_WARM_UPS: Final = 2
"""Runs before a capture: a kernel is compiled and loaded when it first runs, which no capture allows."""


def triton_kernels() -> Kernels:
    """The kernels that run on a GPU; interpreted in a process in which Triton interprets.

    Raises:
        BankError: There is no Triton.
    """
    try:
        from hotsplit.bank.checks import read_triton
        from hotsplit.bank.kernels import route_triton, rows_triton
    except ImportError as error:
        raise BankError("kernels", got=f"no module {error.name}", do="install triton") from error
    return Kernels(
        name="Triton",
        route_and_count=route_triton.route_and_count,
        begin_step=route_triton.begin_step,
        experts=rows_triton.experts,
        sum_rows=read_triton.sum_rows,
    )


class CudaGraph:
    """A captured graph of torch's (a Graph).

    Args:
        graph: Captured, and kept.
        bindings: The module cuda.bindings.driver.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, *, bindings: Any) -> None:
        self._graph, self._bindings = graph, bindings

    @property
    def num_nodes(self) -> int | None:
        """Launches and copies in it."""
        status, _, num_nodes = self._bindings.cuGraphGetNodes(self._graph.raw_cuda_graph())
        if status != self._bindings.CUresult.CUDA_SUCCESS:
            raise driver_error("cuGraphGetNodes", name=str(status))
        return int(num_nodes)

    def replay(self) -> None:
        """Enqueue all of it on the current stream."""
        self._graph.replay()


class CudaDevice:
    """One GPU (a Device, which says what each method does). Makes a stream of its own the current one.

    Args:
        index: Ordinal among the visible devices.

    Raises:
        BankError: torch sees no GPU, or Triton, cuda.bindings or the driver is missing.
    """

    is_dry = False
    type = "cuda"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            do = "look at nvidia-smi, install a CUDA build of torch, or try every line on a CPU with --dry"
            raise BankError("NVIDIA GPU", got=f"torch {torch.__version__} sees none", do=do)
        torch.cuda.set_device(index)
        torch.zeros(1, device=self.type)  # makes the primary context
        torch.cuda.set_stream(torch.cuda.Stream())
        self._index = index
        self.driver = load_driver(index)
        self._bindings: Any = importlib.import_module("cuda.bindings.driver")  # for calls that only checks make
        self.calls: StreamCalls = self.driver
        self.tensor_at: TensorAt = DeviceTensors(index)
        self.kernels = triton_kernels()
        self.streams: Streams = TorchStreams(index)
        self._under_way: deque[torch.cuda.Event] = deque()

    def describe(self) -> Mapping[str, Any]:
        """Names and versions."""
        figures = torch.cuda.get_device_properties(self._index)
        return {
            "gpu": figures.name,
            "gpu_bytes": figures.total_memory,
            "capability": f"{figures.major}.{figures.minor}",
            "multiprocessors": figures.multi_processor_count,
            "driver_cuda": self.driver.version(),
            "torch_cuda": torch.version.cuda,
        }

    def free_bytes(self) -> int:
        """GPU memory that is left."""
        return int(torch.cuda.mem_get_info(self._index)[0])

    def release(self) -> None:
        """Give back what no tensor uses any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def read_rate(self, tensor: torch.Tensor) -> float:
        """The rate by which the product chooses a memory.

        Args:
            tensor: [num_bytes], uint8.
        """
        return summing_rate(tensor)

    @contextlib.contextmanager
    def pinned(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Host memory of the driver's own: what cudaHostAlloc gives, of the size asked for.

        Args:
            num_bytes: How many.
        """
        flags = self._bindings.CU_MEMHOSTALLOC_PORTABLE | self._bindings.CU_MEMHOSTALLOC_DEVICEMAP
        address = self._call("cuMemHostAlloc", num_bytes, flags)
        try:
            yield self.tensor_at(int(self._call("cuMemHostGetDevicePointer", address, 0)), num_bytes=num_bytes)
        finally:
            self.synchronise()
            self._call("cuMemFreeHost", address)

    def synchronise(self) -> None:
        """Wait until everything that was enqueued is done."""
        torch.cuda.synchronize(self._index)
        self._under_way.clear()

    def stamp(self, stream: Stream) -> Stamp:
        """Mark a point in a stream.

        Args:
            stream: Which.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.ExternalStream(self.streams.handle(stream), device=self._index))
        return event

    def elapsed_s(self, start: Stamp, end: Stamp) -> float:
        """Seconds between two points that have been passed.

        Args:
            start: The earlier one.
            end: The later one.
        """
        return max(float(start.elapsed_time(end)) / 1e3, math.ulp(0))

    def capture(self, work: Work) -> CudaGraph:
        """Run the work to warm up, then capture it.

        Args:
            work: Enqueues on the current stream alone.
        """
        for _ in range(_WARM_UPS):
            work()
        self.synchronise()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            work()
        graph.instantiate()
        return CudaGraph(graph, bindings=self._bindings)

    def launch(self, step: Work) -> None:
        """Enqueue one step; waits for older ones where more than STEPS_AHEAD are under way.

        Args:
            step: Enqueues it on the current stream.
        """
        step()
        event = torch.cuda.Event()
        event.record()
        self._under_way.append(event)
        if len(self._under_way) > STEPS_AHEAD:
            self._under_way.popleft().synchronize()

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._bindings, name)(*arguments)
        if status != self._bindings.CUresult.CUDA_SUCCESS:
            _, text = self._bindings.cuGetErrorName(status)
            raise driver_error(name, name=text.decode("ascii") if text else str(int(status)))
        return results[0] if results else None
