"""Which memory stands behind the rows of a worker: the CPU twin's, or a GPU's.

cpu    anonymous memory and a bank file                       bank/file_memory.py
cuda   GPU memory and host memory that the GPU reads in place  bank/cuda_open.py
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_devices import HostDevice, RangeDevice
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.route import StepRouter
from hotsplit.bank.row_memory import RowMemory
from hotsplit.errors import UnsupportedEngineError
from hotsplit.notices import Notice
from hotsplit.units import gib

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """What a backend does that has nothing to do."""


def _no_warm_up(router: StepRouter, top_k: int) -> None:
    """Nothing to compile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The memory of one worker, and how routes are counted and rows copied there."""

    name: str
    """For the log and the metrics."""
    memory: RowMemory
    """What rows are made of."""
    device: RangeDevice
    """Router and swaps."""
    close: Callable[[], None] = _nothing
    """After the rows."""
    settle: Callable[[], None] = _nothing
    """Before the rows are given back: waits for work that may still need them."""
    enter_thread: Callable[[], None] = _nothing
    """Once in every thread that drives the banks."""
    warm_up: Callable[[StepRouter, int], None] = _no_warm_up
    """Compiles and loads what a step runs, for so many experts per token, before a graph is captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """What a backend may heed."""

    bank_dir: Path
    """Where bank files go."""
    numa_policy: str
    """HOTSPLIT_NUMA_POLICY."""
    cold_bytes: int = 0
    """Host memory that cold rows of this rank will take."""
    huge_pages: bool = True
    """Ask for huge pages behind hot rows, where that is ours to ask."""


def cpu_backend(options: BackendOptions) -> Backend:
    """The CPU twin's.

    Args:
        options: Folder and pages.

    Raises:
        BankError: The bank file cannot be made.
    """
    file = BankFile(options.bank_dir)
    memory = FileMemory(file, huge_pages=options.huge_pages)
    return Backend(name="cpu-twin", memory=memory, device=HostDevice(), close=file.close)


def cuda_backend(options: BackendOptions) -> Backend:
    """A GPU's: the one that is current in this process.

    Args:
        options: NUMA policy, and how much is to be cold; the driver chooses its pages itself.

    Raises:
        BankError: The driver, its memory or the NUMA policy refuse.
    """
    from hotsplit.bank import cuda_open

    kit = cuda_open.open_cuda(numa_policy=options.numa_policy)
    logger.info("hotsplit: %s", kit.description)
    locked = [] if kit.memory.num_banks == 1 else locked_memory(options.cold_bytes)
    for notice in (*kit.notices, *locked):
        logger.warning("hotsplit: %s", notice)
    device = kit.device.device
    return Backend(
        name=kit.name,
        memory=kit.memory,
        device=kit.device,
        settle=kit.synchronise,
        enter_thread=kit.make_current,
        warm_up=lambda router, top_k: cuda_open.warm_up(router, top_k=top_k, device=device),
    )


BACKENDS: Mapping[str, Callable[[BackendOptions], Backend]] = {"cpu": cpu_backend, "cuda": cuda_backend}
"""By vLLM's device type."""


def open_backend(device_type: str, *, options: BackendOptions) -> Backend:
    """Open the memory of a worker's device.

    Args:
        device_type: vLLM's ("cpu", "cuda").
        options: What it may heed.

    Raises:
        UnsupportedEngineError: No backend for this device.
        BankError: The memory cannot be had.
    """
    if device_type not in BACKENDS:
        raise UnsupportedEngineError(
            f"device {device_type}", got="no backend for its memory", wanted=" or ".join(BACKENDS)
        )
    return BACKENDS[device_type](options)


def locked_memory(cold_bytes: int, *, limit: int | None = None) -> list[Notice]:
    """What is to be said where the limit on locked memory is below what is to be locked.

    Drivers lock pages on their own account on most systems, so this is no refusal: one that minds the limit says so.

    Args:
        cold_bytes: To be locked.
        limit: RLIMIT_MEMLOCK; None to ask the system.
    """
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed in (resource.RLIM_INFINITY, -1) or allowed >= cold_bytes:
        return []
    text = f"cold rows are {gib(cold_bytes)} of locked memory and the limit (ulimit -l) is {gib(allowed)}"
    do = "should the driver refuse it, raise the limit: ulimit -l unlimited, for Docker --ulimit memlock=-1"
    return [Notice(name="locked-memory", text=f"{text}: {do}", strict=False)]
