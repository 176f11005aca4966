"""Ways to swap, right and wrong: the modes that no replay may notice, and the mutants that some replay must.

A check that finds nothing is worth what it would have found. Each mutant breaks the protocol of swap.py in one place:
a wait that is left out, or a row that is written while the map names it. Where a mutant needs it, copies lag: each row
goes behind a long copy of bytes that nobody wants, so that a step which does not wait for it comes first for sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from hotsplit.bank.cuda_swaps import CudaSwapBackend
from hotsplit.bank.streams import StreamCalls, StreamEvent
from hotsplit.bank.swap import PublishRule, Stream, WaitName


class _DroppedWait(CudaSwapBackend):
    """Leaves one wait of the protocol out."""

    dropped: ClassVar[WaitName]

    def wait(self, stream: Stream, event: StreamEvent, why: WaitName) -> None:
        if why != self.dropped:
            super().wait(stream, event, why)


class _WithoutW1(_DroppedWait):
    dropped = "w1"


class _WithoutW2(_DroppedWait):
    dropped = "w2"


class _WithoutW3(_DroppedWait):
    dropped = "w3"


class _WithoutW4(_DroppedWait):
    dropped = "w4"


class _RewrittenRow(CudaSwapBackend):
    """Copies to the row before the right one as well, which as a rule is an expert's."""

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=target_row)
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=max(0, target_row - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to swap."""

    name: str
    """For the table."""
    rule: PublishRule
    """When the Swapper publishes."""
    backend: type[CudaSwapBackend] = CudaSwapBackend
    """The product's, or a mutant."""
    lags: bool = False
    """Whether copies of rows end late."""


MODES: Final = (
    Mode(name="published when done", rule="done"),
    Mode(name="published when enqueued, lagging copies", rule="enqueued", lags=True),
)
"""Where no replay may differ; the first is the product's."""
MUTANTS: Final = (
    Mode(name="a copy into a row that steps still read (no w1)", rule="enqueued", backend=_WithoutW1),
    Mode(name="a publish before the copy in (no w2)", rule="enqueued", backend=_WithoutW2, lags=True),
    Mode(name="a write-back before the publish (no w3)", rule="enqueued", backend=_WithoutW3),
    Mode(name="a publish before the write-back (no w4)", rule="enqueued", backend=_WithoutW4, lags=True),
    Mode(name="a rewritten row", rule="done", backend=_RewrittenRow),
)
"""Where some replay must."""


class LaggingCalls:
    """Calls of a driver whose copies end late (a StreamCalls).

    Args:
        calls: Where they go.
        source: Bytes that are copied before each row, [num_bytes], uint8.
        target: Where to, as many.
    """

    def __init__(self, calls: StreamCalls, *, source: torch.Tensor, target: torch.Tensor) -> None:
        self._calls, self._source, self._target = calls, source, target

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue the long copy, and behind it the one that is meant.

        Args:
            target: First byte to write.
            source: First byte to read.
            num_bytes: How many.
            stream: Its handle.
        """
        lag = self._source
        self._calls.copy(self._target.data_ptr(), source=lag.data_ptr(), num_bytes=lag.nbytes, stream=stream)
        self._calls.copy(target, source=source, num_bytes=num_bytes, stream=stream)

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue the write of one word.

        Args:
            address: Of the word.
            value: Of it.
            stream: Its handle.
        """
        self._calls.write32(address, value=value, stream=stream)
