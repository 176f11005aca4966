"""A GPU's memory and its host's: hot rows on the device, cold rows where it reads them in place.

A RowMemory (row_memory.py) over cuda_ranges.py, which says how; host/page_nodes.py looks where cold rows really lie.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hotsplit.bank.cuda_ranges import ALIGNMENT, CudaMemory, CudaRange
from hotsplit.bank.driver import Driver
from hotsplit.bank.row_memory import AddressRange
from hotsplit.host.numa import Placement
from hotsplit.host.page_nodes import PageNodes, check_placement, page_nodes, total_nodes

logger = logging.getLogger(__name__)

_MOST_PROBES = 4096
"""Pages that are asked after per range: the kernel's answer is slow, and pages of one allocation lie together."""


class CudaRowMemory:
    """Stitched ranges of one device, as a RowMemory.

    Args:
        memory: Where pages come from.
        device_type: Of the tensors; "cpu" only over a fake driver.
        synchronise: Waits until the device has done all that was enqueued.
    """

    alignment = ALIGNMENT
    num_banks: Literal[1] = 1
    copies_rows_alone = True

    def __init__(
        self, memory: CudaMemory, *, device_type: str = "cuda", synchronise: Callable[[], None] | None = None
    ) -> None:
        self._memory = memory
        self.device_type = device_type
        """Of the tensors it makes."""
        self._synchronise = synchronise or torch.cuda.synchronize

    @property
    def driver(self) -> Driver:
        """Of the device."""
        return self._memory.driver

    def make(self, shape: tuple[int, ...], *, dtype: torch.dtype, num_fast: int) -> CudaRange:
        """Make a range, as RowMemory says.

        Args:
            shape: [R, ...].
            dtype: Of its elements.
            num_fast: Rows in device memory.
        """
        return CudaRange(shape=shape, dtype=dtype, num_fast=num_fast, memory=self._memory)

    def copy(self, moves: Sequence[tuple[int, int]], *, num_bytes: int) -> None:
        """Copy bytes, as RowMemory says; never during serving, where the side stream does it.

        Args:
            moves: Target and source addresses.
            num_bytes: Of every move.
        """
        copy_and_wait(moves, num_bytes=num_bytes, driver=self.driver, synchronise=self._synchronise)

    def require_placed(self, ranges: Sequence[AddressRange]) -> None:
        """Look on which NUMA nodes the cold rows lie, as RowMemory says.

        Args:
            ranges: That this memory made.

        Raises:
            BankError: Under `bind`, pages lie elsewhere.
        """
        found = [(one.edge, one.slow_bytes) for one in ranges if isinstance(one, CudaRange) and one.slow_bytes]
        require_cold_rows_placed(found, placement=self._memory.placement)


def copy_and_wait(
    moves: Sequence[tuple[int, int]], *, num_bytes: int, driver: Driver, synchronise: Callable[[], None]
) -> None:
    """Let the driver copy bytes, after all that was enqueued before, and wait for it.

    Args:
        moves: Target and source address of each.
        num_bytes: Of every move.
        driver: Of the device.
        synchronise: Waits until the device has done all that was enqueued.

    Raises:
        BankError: The driver refuses.
    """
    synchronise()  # what an engine's own stream still writes there comes first
    for target, source in moves:
        driver.copy(target, source=source, num_bytes=num_bytes, stream=0)
    synchronise()


def require_cold_rows_placed(pieces: Sequence[tuple[int, int]], *, placement: Placement) -> None:
    """Look on which NUMA nodes cold rows lie, and say so.

    Args:
        pieces: Address and bytes of each piece of host memory, whole pages.
        placement: Where they should lie.

    Raises:
        BankError: Under `bind`, pages lie elsewhere.
    """
    if not pieces:
        return
    total = total_nodes(_nodes_of(address, num_bytes) for address, num_bytes in pieces)
    for notice in check_placement(total, placement=placement, what="cold rows"):
        logger.warning("%s", notice)
    logger.info("cold rows: %s", total.describe(placement.node))


def _nodes_of(address: int, num_bytes: int) -> PageNodes:
    num_pages = num_bytes // mmap.PAGESIZE
    return page_nodes(address, num_bytes, step_bytes=-(-num_pages // _MOST_PROBES) * mmap.PAGESIZE)
