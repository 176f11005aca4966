"""How fast each GPU reads its own memory and the host's, alone, and what the links carry when all GPUs read at once.

These are the rates that a forecast needs, and a rates file holds. Of host memory two are measured: copies by the copy
engine (DMA), and reads in place by a kernel that does nothing else, which is how cold experts are read. Both go to locked
memory that was allocated near the GPU. While copies run, whoever can read the link's state is asked to, since a link that
idles tells of a slower generation than it has.

    one thread per GPU      opens it, measures it alone when its turn comes, then with all others
    alone                   median of several passes, by events on the GPU's own stream
    together                as many passes as take each GPU the same time alone: all bytes / the slowest one's time

A GPU is behind checks/device.py's Device, so that the same lines run on stand-ins, on machines without one:

    >>> from hotsplit.bank.checks.dry_device import DryDevice
    >>> found = measure_links([DryDevice, DryDevice], sizes=LinkSizes(host_bytes=2**20, device_bytes=2**20, together_s=0))
    >>> [gpu.dma.value > 0 for gpu in found.gpus], found.all_dma.value > 0, found.gpus[0].bus_id
    ([True, True], True, '0000:17:00.0')
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from hotsplit.bank.checks.device import Device, median_s
from hotsplit.errors import BankError
from hotsplit.host.asking import Fact, known, unknown
from hotsplit.host.links import Link, unknown_link
from hotsplit.host.numa import choose_placement, thread_policy
from hotsplit.units import GIB, MIB, gib

_ROW_BYTES: Final = 8 * MIB
"""About one expert: rows are read whole, in random order."""
_LEAST_BYTES: Final = 1 * MIB
_COPIES: Final = 4
"""That a pass is made of, back to back."""
_MOST_PASSES: Final = 1000
"""Of all GPUs at once: a stand-in may tell any rate."""
_FAILURES: Final = Exception
"""Of ours, of torch, of the driver, of Triton where it finds no C compiler: whatever it is, the next GPU goes on."""

OpenDevice = Callable[[], Device]
"""Opens a GPU in the calling thread, its context current there."""
ReadLink = Callable[[str], Link]
"""Tells the state of a GPU's link now, by its place on the bus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSizes:
    """How much is read."""

    host_bytes: int = GIB
    """Of locked host memory, per GPU; far more than a processor caches."""
    device_bytes: int = 2 * GIB
    """Of the GPU's own, half of what is free at most."""
    passes: int = 5
    """Measured ones, of which the median counts."""
    together_s: float = 0.5
    """What all GPUs read at once for, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLinkRates:
    """One GPU, alone."""

    bus_id: str | None
    """Its place; None where it could not be opened."""
    memory_bytes: int | None
    """Of its own, as CUDA has it; None where it is not known."""
    hbm: Fact[float]
    """Reads of its own memory, bytes per second."""
    dma: Fact[float]
    """Copies from locked host memory to it."""
    in_place: Fact[float]
    """Reads of locked host memory by a kernel."""
    link: Link
    """As it was while copies ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """All GPUs."""

    gpus: tuple[GpuLinkRates, ...]
    """In the order in which CUDA counts them."""
    all_dma: Fact[float]
    """Copies to all of them at once, together, bytes per second."""
    all_in_place: Fact[float]
    """Reads in place by all of them at once, together."""


def cuda_openers() -> Sequence[OpenDevice]:
    """What opens each GPU that CUDA sees, in its order; none where it sees none."""
    from hotsplit.bank.checks.cuda_device import CudaDevice

    return [_opener(CudaDevice, index) for index in range(torch.cuda.device_count())]


def measure_links(
    openers: Sequence[OpenDevice],
    *,
    sizes: LinkSizes | None = None,
    read_link: ReadLink | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> LinkRates:
    """Measure every GPU alone, then all together.

    Args:
        openers: Of each GPU.
        sizes: How much is read; None for as much as a figure needs.
        read_link: Asked while copies run; None for nobody.
        tell: Is told what is measured next.

    Returns:
        The rates. A GPU that fails is unknown, with the reason, and the others go on.
    """
    sizes = sizes or LinkSizes()
    with ExitStack() as stack:
        # A thread of its own per GPU: what torch and the driver call current is the thread's.
        threads = [stack.enter_context(ThreadPoolExecutor(1, f"hotsplit-gpu{i}")) for i in range(len(openers))]
        workers = [_Worker(opener, sizes=sizes) for opener in openers]
        for thread, worker in zip(threads, workers, strict=True):
            stack.callback(_close, thread, worker)
        alone = []
        for i, (thread, worker) in enumerate(zip(threads, workers, strict=True)):
            tell(f"GPU {i} of {len(openers)}: its memory, and its link, some seconds")
            alone.append(thread.submit(worker.measure, read_link).result())
        if len(workers) > 1:
            tell(f"all {len(openers)} GPUs at once, some seconds")
        return LinkRates(
            gpus=tuple(alone),
            all_dma=_together(threads, workers, [one.dma for one in alone], work="dma"),
            all_in_place=_together(threads, workers, [one.in_place for one in alone], work="in_place"),
        )


def _together(
    threads: Sequence[ThreadPoolExecutor], workers: Sequence[_Worker], alone: Sequence[Fact[float]], *, work: str
) -> Fact[float]:
    """All GPUs at once; of one GPU, what it has alone."""
    if not workers:
        return unknown("CUDA sees no GPU")
    failed = [f"GPU {i}: {one.reason}" for i, one in enumerate(alone) if one.value is None]
    if failed:
        return unknown(failed[0])
    if len(workers) == 1:
        return replace(alone[0], source=f"one GPU alone, {alone[0].source}")
    ready = threading.Barrier(len(workers))
    futures = [
        thread.submit(worker.run_together, work, ready, alone_bytes_per_s=one.value or 0.0)
        for thread, worker, one in zip(threads, workers, alone, strict=True)
    ]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # Of whoever failed, and not of those that then waited in vain.
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        return unknown(_one_line((causes or errors)[0]))
    found = [future.result() for future in futures]
    total, slowest_s = sum(num_bytes for num_bytes, _ in found), max(seconds for _, seconds in found)
    return known(total / slowest_s, f"{len(workers)} GPUs at once, {gib(total)} in {slowest_s:.2f} s")


def _close(thread: ThreadPoolExecutor, worker: _Worker) -> None:
    thread.submit(worker.close).result()


class _Worker:
    """One GPU in its thread; all methods are called there.

    Args:
        opener: Opens it.
        sizes: How much is read.
    """

    def __init__(self, opener: OpenDevice, *, sizes: LinkSizes) -> None:
        self._opener, self._sizes = opener, sizes
        self._stack = ExitStack()
        self._device: Device | None = None
        self._host: torch.Tensor | None = None
        self._target: torch.Tensor | None = None

    def measure(self, read_link: ReadLink | None) -> GpuLinkRates:
        """Alone."""
        bus_id, memory_bytes = None, None
        try:
            device = self._opener()
            self._device = device
            bus_id = device.driver.bus_id()
            total = device.describe().get("gpu_bytes")
            memory_bytes = total if isinstance(total, int) and total > 0 else None
        except _FAILURES as error:
            return _failed(bus_id, memory_bytes, reason=_one_line(error))
        hbm = _tried(self._hbm)
        try:
            self._host = self._stack.enter_context(_locked(device, self._sizes.host_bytes, bus_id=bus_id))
            self._target = torch.empty(self._host.numel(), dtype=torch.uint8, device=device.type)
        except _FAILURES as error:
            reason = f"no locked host memory to read: {_one_line(error)}"
            return replace(_failed(bus_id, memory_bytes, reason=reason), hbm=hbm)
        return GpuLinkRates(
            bus_id=bus_id,
            memory_bytes=memory_bytes,
            hbm=hbm,
            dma=_tried(lambda: self._alone("dma")),
            link=self._link_under_load(read_link, bus_id=bus_id),
            in_place=_tried(lambda: self._alone("in_place")),
        )

    def run_together(self, work: str, ready: threading.Barrier, *, alone_bytes_per_s: float) -> tuple[int, float]:
        """With all others, for as long as each takes alone: bytes and seconds."""
        try:
            device, host = self._opened()
            passes = min(max(math.ceil(self._sizes.together_s * alone_bytes_per_s / host.numel()), 1), _MOST_PASSES)
            run = self._work(work)
            ready.wait()
            start = device.stamp("compute")
            for _ in range(passes):
                run()
            end = device.stamp("compute")
            device.synchronise()
            return passes * host.numel(), device.elapsed_s(start, end)
        except BaseException:
            ready.abort()  # the others wait for nobody
            raise

    def close(self) -> None:
        """Give everything back; the second time there is nothing."""
        self._host = self._target = None
        self._stack.close()
        if self._device is not None:
            self._device.release()

    def _opened(self) -> tuple[Device, torch.Tensor]:
        if self._device is None or self._host is None:
            raise BankError("GPU", got="one that is not open")
        return self._device, self._host

    def _hbm(self) -> Fact[float]:
        device = self._device
        if device is None:
            raise BankError("GPU", got="one that is not open")
        size = min(self._sizes.device_bytes, device.free_bytes() // 2)
        memory = torch.zeros(_whole(size), dtype=torch.uint8, device=device.type)
        return _read_rate(device, memory, passes=self._sizes.passes)

    def _alone(self, work: str) -> Fact[float]:
        device, host = self._opened()
        if work == "in_place":
            return _read_rate(device, host, passes=self._sizes.passes)
        seconds = median_s(device, self._work(work), repeats=self._sizes.passes)
        return known(host.numel() / seconds, f"median of {self._sizes.passes} copies of {gib(host.numel())}")

    def _work(self, work: str) -> Callable[[], None]:
        """What one pass over host memory enqueues."""
        device, host = self._opened()
        if work == "in_place":
            return _reader(device, host)
        target = self._target
        if target is None:
            raise BankError("GPU", got="one that is not open")
        step, handle = host.numel() // _COPIES, device.streams.handle("compute")

        def copy() -> None:
            for start in range(0, _COPIES * step, step):
                device.calls.copy(
                    target.data_ptr() + start, source=host.data_ptr() + start, num_bytes=step, stream=handle
                )

        return copy

    def _link_under_load(self, read_link: ReadLink | None, *, bus_id: str) -> Link:
        """What somebody reads of the link while copies run, for as long as that takes."""
        if read_link is None:
            return unknown_link("nobody was asked")
        found: list[Link] = []
        reader = threading.Thread(target=lambda: found.append(read_link(bus_id)), daemon=True)
        try:
            device, _ = self._opened()
            run = self._work("dma")
            run()  # the link is up before it is read
            reader.start()
            while reader.is_alive():
                run()
                device.synchronise()
        except _FAILURES as error:
            return unknown_link(_one_line(error))
        return found[0] if found else unknown_link("whoever reads it failed")


@contextmanager
def _locked(device: Device, num_bytes: int, *, bus_id: str) -> Iterator[torch.Tensor]:
    """Locked host memory, on the GPU's node where that can be had."""
    placement, _ = choose_placement("preferred", bus_id=bus_id, driver_node=device.driver.attribute("HOST_NUMA_ID"))
    with ExitStack() as stack:
        with thread_policy(placement):
            tensor = stack.enter_context(device.pinned(_whole(num_bytes)))
        yield tensor


def _read_rate(device: Device, memory: torch.Tensor, *, passes: int) -> Fact[float]:
    """By the kernel of our own that only reads; by torch's sum where that one cannot be built here."""
    try:
        seconds = median_s(device, _reader(device, memory), repeats=passes)
    except _FAILURES as error:
        return known(device.read_rate(memory), f"torch's sum, since Triton's kernel fails: {_one_line(error)}")
    kernel = device.kernels.name
    return known(memory.numel() / seconds, f"median of {passes} reads of {gib(memory.numel())}, {kernel}")


def _reader(device: Device, memory: torch.Tensor) -> Callable[[], None]:
    """A pass over memory: whole rows, in random order."""
    row_bytes = min(_ROW_BYTES, memory.numel())
    num_rows = memory.numel() // row_bytes
    words_RW = memory[: num_rows * row_bytes].view(torch.int32).view(num_rows, -1)
    order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device.type)

    def read() -> None:
        device.kernels.sum_rows(words_RW, order=order_N)

    return read


def _whole(num_bytes: int) -> int:
    """A size that rows and copies divide."""
    step = _ROW_BYTES if num_bytes >= _ROW_BYTES else _LEAST_BYTES
    return max(num_bytes // step, 1) * step


def _opener(kind: Callable[[int], Device], index: int) -> OpenDevice:
    return lambda: kind(index)


def _tried(measure: Callable[[], Fact[float]]) -> Fact[float]:
    try:
        found = measure()
    except _FAILURES as error:
        return unknown(_one_line(error))
    is_rate = found.value is not None and math.isfinite(found.value) and found.value > 0
    return found if is_rate else unknown(f"{found.value} bytes per second were measured")


def _failed(bus_id: str | None, memory_bytes: int | None, *, reason: str) -> GpuLinkRates:
    nothing: Fact[float] = unknown(reason)
    return GpuLinkRates(
        bus_id=bus_id,
        memory_bytes=memory_bytes,
        hbm=nothing,
        dma=nothing,
        in_place=nothing,
        link=unknown_link(reason),
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
