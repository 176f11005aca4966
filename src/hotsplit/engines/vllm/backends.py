"""Which memory stands behind the rows of a worker: the CPU twin's, or a GPU's.

    cpu    anonymous memory and a bank file                       bank/file_memory.py
    cuda   device pages and host pages, read in place by the GPU  bank/cuda_row_memory.py

NOTE: the CUDA backend has been run over stand-ins alone, and refusals.py still turns its device away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_devices import HostDevice, RangeDevice
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.row_memory import RowMemory
from hotsplit.errors import UnsupportedEngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The memory of one worker, and how routes are counted and rows copied there."""

    name: str
    """For the log and the metrics."""
    memory: RowMemory
    """What rows are made of."""
    device: RangeDevice
    """Router and swaps."""
    close: Callable[[], None]
    """After the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """What a backend may heed."""

    bank_dir: Path
    """Where bank files go."""
    numa_policy: str
    """HOTSPLIT_NUMA_POLICY."""
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
        options: NUMA policy; the driver chooses its pages itself.

    Raises:
        BankError: The driver, its memory or the NUMA policy refuse.
        UnsupportedEngineError: This device cannot put both memories at one address.
    """
    import torch

    from hotsplit.bank.cuda_probe import Probe, choose_backing, summing_rate
    from hotsplit.bank.cuda_ranges import cuda_memory
    from hotsplit.bank.cuda_row_memory import CudaRowMemory
    from hotsplit.bank.driver import load_driver
    from hotsplit.bank.kernels import route_triton
    from hotsplit.bank.range_devices import CudaDevice
    from hotsplit.bank.streams import TorchStreams
    from hotsplit.host.numa import choose_placement

    index = torch.cuda.current_device()
    driver = load_driver(index)
    driver.make_current()
    placement, notices = choose_placement(
        options.numa_policy, bus_id=driver.bus_id(), driver_node=driver.attribute("HOST_NUMA_ID")
    )
    choice = choose_backing(driver, probe=Probe(read_rate=summing_rate), placement=placement)
    for notice in (*notices, *choice.notices):
        logger.warning("hotsplit: %s", notice)
    logger.info("hotsplit: %s", choice)
    if choice.location is None:
        raise UnsupportedEngineError(
            "memory of this GPU",
            got=choice.reason,
            wanted="device pages and host pages at one address",
            do="update the driver; in a container add --cap-add SYS_NICE; or run vLLM without hotsplit",
        )
    memory = cuda_memory(driver, host=choice.location, placement=placement)
    device = CudaDevice(
        device=torch.device("cuda", index), streams=TorchStreams(index), driver=driver, kernels=route_triton
    )
    return Backend(name="cuda-stitched", memory=CudaRowMemory(memory), device=device, close=_nothing)


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


def _nothing() -> None:
    """Device pages go with their ranges."""
