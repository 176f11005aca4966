"""Swaps beside captured graphs: no replay may see half of one, and mutants of the protocol must be found.

One graph is one step: in each layer the route op, the experts kernel over rows in two memories, and a comparison with
what the unpermuted copy gave for the same tokens, bit by bit. It chooses its tokens by a counter in GPU memory, so
replays differ and nothing comes from the host. Between two replays the product's Swapper ticks over CudaSwapBackend:

    done        publishes what a query says is done: the rule of the product
    enqueued    publishes at once and leans on the waits alone, with copies that lag behind the steps

In the end every expert must lie, whole, in the row that its entry names, and the route op's counters must say what the
host knows: a replay is counted by the map that it was launched with.

Shapes: L layers, E experts, S draws, T tokens, K top-k, D model dim, P phases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.findings import Fact, Finding, Proof
from hotsplit.bank.checks.rig import Rig, draw_traffic, random_experts
from hotsplit.bank.cuda_swaps import CudaSwapBackend, device_row_map
from hotsplit.bank.kernels.reference import TOTALS, LayerCounters
from hotsplit.bank.rows import LayerRows, place
from hotsplit.bank.streams import StreamCalls, StreamEvent
from hotsplit.bank.swap import PublishRule, Stream, Swapper, WaitName
from hotsplit.errors import BankError

NUM_LAYERS: Final = 2
NUM_TOKENS: Final = 4
_DRAWS: Final = 16
_SWAPS_AT_ONCE: Final = 2
"""Of one layer and update, as the product has it: the second one follows the first at once."""
_MANY: Final = 64
"""Copies that may be under way, where nothing but the waits shall hold them back."""
_MOST_EXTRA_STEPS: Final = 10_000
"""For the last swaps to come to their end."""


class DroppedWait(CudaSwapBackend):
    """A mutant that leaves one wait of the protocol out; its name is bound with functools.partial."""

    dropped: WaitName = "w1"

    def wait(self, stream: Stream, event: StreamEvent, why: WaitName) -> None:
        """Order the stream behind the event, but for the wait that is dropped.

        Args:
            stream: Which waits.
            event: For what.
            why: The protocol's name of the wait.
        """
        if why != self.dropped:
            super().wait(stream, event, why)


class RewrittenRow(CudaSwapBackend):
    """A mutant that copies to the row behind the right one as well, while the map may name it."""

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of one row, twice.

        Args:
            stream: "side" or "side_out".
            layer_id: Ordinal among MoE layers.
            source_row: Where the expert lies.
            target_row: A row that belongs to nobody; row 0 or the one before it does.
        """
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=target_row)
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=max(0, target_row - 1))


def _dropped(name: WaitName) -> type[CudaSwapBackend]:
    return type(f"Dropped_{name}", (DroppedWait,), {"dropped": name})


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
"""Where no replay may differ."""
MUTANTS: Final = (
    Mode(name="copy into a row that steps still read (no w1)", rule="enqueued", backend=_dropped("w1")),
    Mode(name="publish before the copy in (no w2)", rule="enqueued", backend=_dropped("w2"), lags=True),
    Mode(name="write back before the publish (no w3)", rule="enqueued", backend=_dropped("w3")),
    Mode(name="publish before the write-back (no w4)", rule="enqueued", backend=_dropped("w4"), lags=True),
    Mode(name="a rewritten row", rule="done", backend=RewrittenRow),
)
"""Where some replay must."""
