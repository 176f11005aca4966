"""The handle of an engine that keeps its own kernels: rows in stitched ranges, routes, swaps and the live loop.

    banks = RangeBanks(rows, ...)              once, when every row lies where the plan wants it
    banks.tick()                               between two steps, on the thread that launches them
    with banks.step("decode"):                 around a step
        banks.route(layer_id, topk_ids, ...)   in every MoE layer
    banks.close()                              when the model goes

Outside of a step (warm-up, profiling, graph capture) routes are remapped and never counted.

Shapes: L MoE layers, E experts, T tokens, K top-k.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.device_router import READ_PER_UPDATE
from hotsplit.bank.live import Live
from hotsplit.bank.range_devices import ClosableSwaps, HostDevice, RangeDevice
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.route import Phase
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.swap import Swapper
from hotsplit.plan.adaptive import AdaptiveOptions
from hotsplit.plan.rebalance import RebalanceOptions
from hotsplit.plan.steering import make_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeBankOptions:
    """How the banks behave while the model runs."""

    top_k: int
    """Experts per token."""
    dynamic: bool = True
    """Whether hot experts follow the traffic."""
    dyn_steps: int = 2000
    """Steps between updates."""
    rebalance: RebalanceOptions = field(default_factory=RebalanceOptions)
    """Margin, swaps per layer, half-life."""
    rank: int = 0
    """Of the worker, for the update line."""
    copies_ids: bool = False
    """Keep copies of the routed ids until they are counted: compiled code uses its buffers again."""


class RangeBanks:
    """Routes, swaps and live loop over rows that lie in place already.

    Args:
        rows: The memory, every row loaded and registered.
        layers: Row numbers per layer, exclusive, L of them.
        prior: Counts that the plan was made from, [L, E]; None where there were none.
        options: Behaviour.
        device: Where steps run; None for the CPU.
    """

    def __init__(
        self,
        rows: RangeRows,
        *,
        layers: Sequence[LayerRows],
        prior: npt.NDArray[np.float64] | None,
        options: RangeBankOptions,
        device: RangeDevice | None = None,
    ) -> None:
        device = self._device = device or HostDevice()
        self.rows = rows
        """Memory behind the rows."""
        row_bytes = [rows.row_bytes(layer_id) for layer_id in range(len(layers))]
        self.router = device.router(
            layers, row_bytes=row_bytes, dyn_steps=_counted_steps(options), copies_ids=options.copies_ids
        )
        """Row maps and counters."""
        self.live = Live(
            self.router, plan_shares=prior, row_bytes=row_bytes, dyn_steps=options.dyn_steps, rank=options.rank
        )
        """The loop that corrects the plan."""
        self.swapper: Swapper | None = None
        """Moves rows; None in static mode."""
        self.lock = threading.RLock()  # reentrant: a model may be closed by a garbage collection inside of a reading
        """Held while counters or row maps change: readers of other threads take it."""
        self._swaps: ClosableSwaps | None = None
        self._step, self._is_stepping = 0, False
        self._settle_wish: str | None = None  # of settle(), for the end of the step under way
        self._settled_wish: str | None = None
        if options.dynamic:
            self._swaps = device.swaps(rows, router=self.router)
            self.swapper = Swapper(self._swaps, layouts=layers)
            rebalancer = make_policy(
                hot=self.router.hot_mask(),
                prior=prior,
                top_k=options.top_k,
                options=options.rebalance,
                row_bytes=row_bytes,
            )
            self.live.adapt(self.swapper, rebalancer=rebalancer)

    def tick(self) -> None:
        """Before a step: publish what is copied, update when it is time; nothing while a graph is captured.

        Raises:
            BankError: The third update in a row failed.
        """
        if self._device.is_capturing():
            return
        with self.lock:
            self.live.tick()

    @contextlib.contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Around one step: what it routes is counted when it has run, and not at all when it breaks off.

        Args:
            phase: Of the whole step.
        """
        self._step += 1
        with self.lock:
            self._is_stepping = True
            self.router.begin_step(self._step, phase=phase)
        try:
            yield
        except BaseException:
            with self.lock:
                self._is_stepping = False
                self.router.abandon_step()
            raise
        with self.lock:
            self._is_stepping = False
            self.router.end_step()
            if self._settle_wish is not None:
                self.router.settle()
                self._settled_wish, self._settle_wish = self._settle_wish, None

    def settle(self, wish: str) -> bool:
        """Bring the counters up to date, from any thread; may wait for the device, and keeps the next step waiting.

        While a step is under way, half of it would be counted: then it is done at its end, and another call says so.

        Args:
            wish: Names this wish, in the first call and in those that ask what became of it.

        Returns:
            Whether it was done since the first of these calls.
        """
        with self.lock:
            if not self._is_stepping:
                self.router.settle()
                return True
            if self._settled_wish != wish:
                self._settle_wish = wish
            return self._settled_wish == wish

    def route(self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Count one layer's pairs and say in which rows they lie.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], int32 or int64; -1 is a sentinel.
            is_padding: The engine's own mask, at least [T], bool, one for all layers of a step; None for none.

        Returns:
            Row ids, [T, K], of the dtype of topk_ids.
        """
        return self.router.serve(layer_id, topk_ids, is_padding=is_padding)

    def close(self) -> None:
        """Stop the copies and let the memory go; twice is harmless."""
        if self._swaps is not None:
            self._swaps.close()
            self._swaps = None
        self.rows.close()


def _counted_steps(options: RangeBankOptions) -> int:
    """Steps that a device takes for an update's when it spaces its readings: a schedule that looks more often wants more."""
    if not options.dynamic or options.rebalance.schedule != "adaptive":
        return options.dyn_steps
    return min(options.dyn_steps, AdaptiveOptions().look_steps * READ_PER_UPDATE)
