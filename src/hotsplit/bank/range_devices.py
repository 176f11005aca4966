"""What differs by device behind RangeBanks: how routes are counted, and who copies rows.

HostDevice    Router, RangeSwapBackend       the CPU twin: one worker thread copies
CudaDevice    DeviceRouter, CudaSwapBackend  a GPU: Triton kernels, a side stream, the driver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from hotsplit.bank.cuda_swaps import CudaSwapBackend, device_row_map
from hotsplit.bank.device_router import READ_PER_UPDATE, DeviceRouter
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.range_swaps import RangeSwapBackend
from hotsplit.bank.route import Router, StepRouter
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.streams import StreamCalls, Streams
from hotsplit.bank.swap import SwapBackend
from hotsplit.errors import BankError


class ClosableSwaps(SwapBackend, Protocol):
    """A SwapBackend that ends."""

    def is_capturing(self) -> bool:
        """Whether the calling thread is capturing a graph: nothing may be enqueued or asked then."""

    def close(self) -> None:
        """End the copies under way and forget the others; before the rows are closed."""


class RangeDevice(Protocol):
    """Where steps run."""

    def is_capturing(self) -> bool:
        """Whether the calling thread is capturing a graph: nothing may be enqueued or asked then."""

    def router(
        self, layers: Sequence[LayerRows], *, row_bytes: Sequence[int], dyn_steps: int, copies_ids: bool
    ) -> StepRouter:
        """Row maps and counters.

        Args:
            layers: Row numbers per layer, L of them.
            row_bytes: Bytes of one row per layer, [L].
            dyn_steps: Steps between two updates.
            copies_ids: Whether the engine uses its buffers of ids again.
        """

    def swaps(self, rows: RangeRows, *, router: StepRouter) -> ClosableSwaps:
        """What moves rows.

        Args:
            rows: The memory.
            router: From router().
        """


class HostDevice:
    """The CPU (a RangeDevice)."""

    def is_capturing(self) -> bool:
        """Never: there are no graphs."""
        return False

    def router(
        self, layers: Sequence[LayerRows], *, row_bytes: Sequence[int], dyn_steps: int, copies_ids: bool
    ) -> Router:
        """A router that counts when a step has run.

        Args:
            layers: Row numbers per layer.
            row_bytes: Bytes of one row per layer.
            dyn_steps: Steps between two updates.
            copies_ids: Whether ids must be copied to be counted later.
        """
        return Router(layers, row_bytes=row_bytes, copies_ids=copies_ids)

    def swaps(self, rows: RangeRows, *, router: StepRouter) -> RangeSwapBackend:
        """Copies by one worker thread.

        Args:
            rows: The memory.
            router: From router().
        """
        return RangeSwapBackend(rows, router=router)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    """A GPU (a RangeDevice)."""

    device: torch.device
    """Of the steps."""
    streams: Streams
    """Compute and side stream."""
    driver: StreamCalls
    """Copies and writes on them."""
    kernels: ModuleType
    """route_and_count and begin_step: bank.kernels.route_triton."""

    def is_capturing(self) -> bool:
        """Whether the calling thread is capturing a graph."""
        return self.streams.is_capturing()

    def router(
        self, layers: Sequence[LayerRows], *, row_bytes: Sequence[int], dyn_steps: int, copies_ids: bool
    ) -> DeviceRouter:
        """A router that counts on the device.

        Args:
            layers: Row numbers per layer.
            row_bytes: Bytes of one row per layer.
            dyn_steps: Steps between two updates.
            copies_ids: Of no effect: the device counts while it routes.
        """
        return DeviceRouter(
            layers,
            row_bytes=row_bytes,
            device=self.device,
            kernels=self.kernels,
            read_every_steps=max(1, dyn_steps // READ_PER_UPDATE),
        )

    def swaps(self, rows: RangeRows, *, router: StepRouter) -> CudaSwapBackend:
        """Copies by the driver on the side stream.

        Args:
            rows: The memory.
            router: From router().

        Raises:
            BankError: A router of another device.
        """
        if not isinstance(router, DeviceRouter):
            raise BankError("router of a GPU's banks", got=type(router).__name__, wanted="DeviceRouter")
        row_maps = [device_row_map(row_map) for row_map in router.device_maps.values()]
        return CudaSwapBackend(rows, streams=self.streams, driver=self.driver, row_maps=row_maps, mirror=router)
