"""Everything that a rank's GPU brings to its banks, opened in one call: what an engine asks for, and nothing else.

Stands on top of the CUDA modules and below the engines:

    load_driver  -> choose_placement  -> choose_backing        -> CudaRowMemory or TwoBankMemory  -> CudaKit
    the context     NUMA node of rows    tried and measured       where rows lie                     memory and device

A GPU is five things to hotsplit, its GpuParts: a driver, streams, calls on them, kernels, and a way to try memory out.
gpu_parts() has those of the real one; over a fake driver and streams of a simulation the same call opens a kit whose
tensors lie on the CPU, for tests and dry runs:

    >>> from hotsplit.bank.fake_driver import FakeDriver
    >>> from hotsplit.bank.kernels import reference
    >>> from hotsplit.bank.sim_streams import SimStreams
    >>> from hotsplit.bank.tensor_at import cpu_tensor
    >>> driver = FakeDriver()
    >>> streams = SimStreams(driver)
    >>> probe = Probe(read_rate=lambda tensor: 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor)
    >>> parts = GpuParts(
    ...     device=torch.device("cpu"), driver=driver, streams=streams, calls=streams, kernels=reference, probe=probe,
    ...     synchronise=streams.drain,
    ... )
    >>> kit = open_cuda(numa_policy="off", parts=parts)
    >>> kit.name, kit.memory.device_type, kit.memory.num_banks
    ('cuda-stitched', 'cpu', 1)
    >>> kit.description
    'cold rows at HOST in one range with the hot ones, pages of 2.0 MiB, read at 50.0 GB/s, ...; no NUMA placement'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch

from hotsplit.bank.cuda_probe import BackingChoice, Probe, choose_backing, summing_rate
from hotsplit.bank.cuda_ranges import cuda_memory
from hotsplit.bank.cuda_row_memory import CudaRowMemory
from hotsplit.bank.driver import Driver, load_driver
from hotsplit.bank.range_devices import CudaDevice
from hotsplit.bank.route import StepRouter
from hotsplit.bank.row_memory import RowMemory
from hotsplit.bank.streams import StreamCalls, Streams, TorchStreams
from hotsplit.bank.two_banks import TwoBankMemory
from hotsplit.errors import BankError
from hotsplit.host.numa import Placement, choose_placement
from hotsplit.notices import Notice

STITCHED: Final = "cuda-stitched"
"""Name of a kit whose hot and cold rows lie at one address."""
TWO_BANKS: Final = "cuda-two-banks"
"""Name of a kit whose hot and cold rows are two tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuParts:
    """What a GPU is to hotsplit; or what stands in for one."""

    device: torch.device
    """Where steps run."""
    driver: Driver
    """Its context is current in the calling thread."""
    streams: Streams
    """Compute and side stream."""
    calls: StreamCalls
    """Copies and writes on these streams: the driver itself, where streams are real."""
    kernels: ModuleType
    """route_and_count and begin_step: bank.kernels.route_triton, or its twin."""
    probe: Probe
    """How memory is tried out."""
    synchronise: Callable[[], None]
    """Waits until the device has done all that was enqueued."""
    give_back: Callable[[], None] | None = None
    """Lets torch give back what it caches; None where nothing does."""
    is_integrated: bool = False
    """Whether its memory is the host's: there are no two memories then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaKit:
    """One GPU's memory for rows, and how they are routed and moved there."""

    name: str
    """STITCHED or TWO_BANKS; for logs and metrics."""
    memory: RowMemory
    """What rows are made of."""
    device: CudaDevice
    """Router and swaps."""
    notices: tuple[Notice, ...]
    """What must be said about where cold rows lie."""
    description: str
    """What was chosen and why, measured rates and NUMA placement: one line for the log."""
    make_current: Callable[[], None]
    """Makes the driver's context current: once in every thread that drives the banks."""
    synchronise: Callable[[], None]
    """Waits for the device: before the rows are given back, which waits for nothing."""


def gpu_parts(index: int | None = None) -> GpuParts:
    """A GPU's own.

    Args:
        index: Ordinal among the visible devices; None for the one that is current in this thread.

    Raises:
        BankError: cuda.bindings, the driver or the device is missing.
        ImportError: Triton is.
    """
    from hotsplit.bank.kernels import route_triton  # Triton comes with a CUDA build of torch, and with no other

    number = torch.cuda.current_device() if index is None else index
    torch.cuda.synchronize(number)  # torch makes the primary context, and driver calls join it
    driver = load_driver(number)
    return GpuParts(
        device=torch.device("cuda", number),
        driver=driver,
        streams=TorchStreams(number),
        calls=driver,
        kernels=route_triton,
        probe=Probe(read_rate=summing_rate),
        synchronise=lambda: torch.cuda.synchronize(number),
        give_back=torch.cuda.empty_cache,
        is_integrated=bool(torch.cuda.get_device_properties(number).is_integrated),
    )


def open_cuda(*, numa_policy: str, index: int | None = None, parts: GpuParts | None = None) -> CudaKit:
    """Open a GPU: find out where its cold rows can lie, and say so.

    Args:
        numa_policy: HOTSPLIT_NUMA_POLICY: preferred, bind or off.
        index: Ordinal among the visible devices; None for the one that is current in this thread.
        parts: The GPU's, or stand-ins; None for the real ones of `index`.

    Raises:
        BankError: Driver, device or NUMA policy refuse, the GPU can read no host memory in place, or it has no memory of
            its own.
    """
    parts = parts or gpu_parts(index)
    if parts.is_integrated:
        got = "one that is integrated: its memory is the host's"
        raise BankError(
            "this GPU", got=got, wanted="memory of its own", do="run without hotsplit: there is nothing to split"
        )
    driver = parts.driver
    placement, notices = choose_placement(
        numa_policy, bus_id=driver.bus_id(), driver_node=driver.attribute("HOST_NUMA_ID")
    )
    choice = choose_backing(driver, probe=parts.probe, placement=placement)
    device = CudaDevice(device=parts.device, streams=parts.streams, driver=parts.calls, kernels=parts.kernels)
    return CudaKit(
        name=STITCHED if choice.location is not None else TWO_BANKS,
        memory=_memory(parts, choice=choice, placement=placement),
        device=device,
        notices=(*notices, *choice.notices),
        description=f"{choice}; {placement}",
        make_current=driver.make_current,
        synchronise=parts.synchronise,
    )


def warm_up(router: StepRouter, *, top_k: int, device: torch.device) -> None:
    """Run every kernel of a step once, so that none is compiled or loaded inside of a graph's capture.

    Nothing is counted, since no step runs, and no row is touched.

    Args:
        router: Of the banks.
        top_k: Experts per token: kernels are compiled for it.
        device: Of the ids.
    """
    for dtype in (torch.int32, torch.int64):
        topk_ids = torch.zeros((1, top_k), dtype=dtype, device=device)
        for is_padding in (None, torch.zeros(1, dtype=torch.bool, device=device)):
            router.serve(0, topk_ids, is_padding=is_padding)
    router.abandon_step()


def _memory(parts: GpuParts, *, choice: BackingChoice, placement: Placement) -> RowMemory:
    tensor_at, synchronise = parts.probe.tensor_at, parts.synchronise
    if choice.location is None:
        return TwoBankMemory(parts.driver, placement=placement, tensor_at=tensor_at, synchronise=synchronise)
    memory = cuda_memory(
        parts.driver, host=choice.location, placement=placement, tensor_at=tensor_at, give_back=parts.give_back
    )
    return CudaRowMemory(memory, device_type=parts.device.type, synchronise=synchronise)
