"""Routing and counting on a GPU: the device counts while it routes, and the host reads the counters without waiting.

    begin_step       compute stream   the step's number and phase, written in order with steps and graph replays
    serve            compute stream   one launch per layer: row ids, pairs, hits, stamps
    flush            host             starts a reading of all counters, or takes one that has arrived

A reading is a copy on the compute stream into host memory, with an event behind it; it is taken when a query says that
it has arrived, steps later as a rule. So counters on the host lag by READ_PER_UPDATE-th part of an update at most, and
no step is ever waited for. The same windows, hits and touched bytes come out as on a CPU (route.py).

Shapes: L MoE layers, E experts, F fixed ids, P phases, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.kernels.reference import TOTALS, LayerCounters
from hotsplit.bank.route import PHASES, Counters, Phase
from hotsplit.bank.rows import LayerRows

READ_PER_UPDATE: Final = 20
"""Readings between two updates, at least: the window of an update is off by a twentieth at most."""
_NOT_COUNTED: Final = -1
"""Phase of warm-up, capture and whatever else runs between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """A copy of all counters on its way to the host."""

    pairs: torch.Tensor
    """[L, P, E], int64, in host memory."""
    totals: torch.Tensor
    """[L, P, 4], int64, in host memory."""
    num_steps: int
    """Steps that it counts."""
    event: Any
    """Done when it has arrived; None where it has at once."""


class DeviceRouter:
    """The row maps and counters of all layers of one rank, on its device (a StepRouter).

    Args:
        layers: Rows per layer as the banks were built, L of them.
        row_bytes: Bytes of one row per layer, [L].
        device: Where steps run.
        kernels: route_and_count and begin_step: the Triton module on a GPU, the reference anywhere.
        read_every_steps: Steps between two readings.
        redirect_padding: Let padding touch no row of its own.
    """

    def __init__(
        self,
        layers: Sequence[LayerRows],
        *,
        row_bytes: Sequence[int],
        device: torch.device,
        kernels: ModuleType,
        read_every_steps: int = 1,
        redirect_padding: bool = True,
    ) -> None:
        self.row_map = torch.tensor([rows.row_map for rows in layers], dtype=torch.int64, device="cpu")
        """Row of every expert as the host knows it, [L, E], int64; publish() writes into it."""
        mapped = [(*rows.row_map, *rows.fixed_rows) for rows in layers]
        self.device_maps = {
            dtype: torch.tensor(mapped, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32)
        }
        """The same on the device, with the rows of fixed ids, [L, E + F], at one address for ever."""
        num_layers, num_experts = self.row_map.shape
        self._kernels, self._redirect_padding, self._read_every_steps = kernels, redirect_padding, read_every_steps
        self._first_cold = [rows.first_cold for rows in layers]
        self._row_bytes_L = np.array(row_bytes, dtype=np.int64)
        self._pairs = torch.zeros(num_layers, len(PHASES), num_experts, dtype=torch.int64, device=device)
        self._totals = torch.zeros(num_layers, len(PHASES), len(TOTALS), dtype=torch.int64, device=device)
        stamps_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._step = torch.tensor([0, _NOT_COUNTED], dtype=torch.int64, device=device)
        self._layers = [
            LayerCounters(pairs=self._pairs[i], totals=self._totals[i], stamps=stamps_LE[i], step=self._step)
            for i in range(num_layers)
        ]
        self._num_steps, self._read_steps = 0, 0
        self._reading: _Reading | None = None
        self._ended: torch.cuda.Event | None = None  # behind the last step, on its stream
        self.counters = Counters(counts={phase: np.zeros((num_layers, num_experts), np.int64) for phase in PHASES})
        """Everything counted, as of the last reading."""

    def begin_step(self, number: int, *, phase: Phase) -> None:
        """Count what serve() routes from now on, in stream order.

        Args:
            number: Of the engine step, from 1.
            phase: Of the whole step.
        """
        self._num_steps += 1
        self._kernels.begin_step(self._step, number=number, phase=PHASES.index(phase))

    def end_step(self) -> None:
        """Count no more, in stream order, and see what has been read."""
        self._count_no_more()
        self.flush()

    def abandon_step(self) -> None:
        """Count no more. What the device has counted of the step stays: nobody can say how far it came."""
        self._count_no_more()

    def serve(self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Say in which rows an engine's ids lie, and count them where a step runs; one launch.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], int32 or int64; -1 is a sentinel, ids of fixed rows are E, E + 1 and so on.
            is_padding: The engine's own mask, at least [T], bool; None for none.

        Returns:
            Row ids, [T, K], of the dtype of topk_ids.
        """
        rows_TK: torch.Tensor = self._kernels.route_and_count(
            topk_ids,
            row_map=self.device_maps[topk_ids.dtype][layer_id],
            is_padding=is_padding,
            counters=self._layers[layer_id],
            first_cold=self._first_cold[layer_id],
            redirect_padding=self._redirect_padding,
        )
        return rows_TK

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Change one entry as the host knows it; the device's own is the swap backend's to write, in stream order.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
            row: Where it lies from now on.
        """
        self.row_map[layer_id, expert] = row

    def hot_mask(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot now, [L, E], bool."""
        mask: npt.NDArray[np.bool_] = self.row_map.numpy() < np.array(self._first_cold)[:, None]
        return mask

    def flush(self) -> None:
        """Take a reading that has arrived, and start the next where it is time; never waits.

        Nothing while a graph is captured: a query would break the capture, and a copy would be done with every replay.
        """
        if self._is_capturing():
            return
        reading = self._reading
        if reading is not None and (reading.event is None or reading.event.query()):
            self._take(reading)
        if self._reading is None and self._num_steps - self._read_steps >= self._read_every_steps:
            self._reading = self._read()
            if self._reading.event is None:
                self._take(self._reading)

    def settle(self) -> None:
        """Read all that is counted, and wait for it: from any thread, on its own stream, behind the last step."""
        if self._ended is not None:
            torch.cuda.current_stream(self._pairs.device).wait_event(self._ended)
        reading = self._read()
        if reading.event is not None:
            reading.event.synchronize()
        self._take(reading)

    def _count_no_more(self) -> None:
        self._kernels.begin_step(self._step, number=0, phase=_NOT_COUNTED)
        if self._pairs.is_cuda and not self._is_capturing():
            self._ended = torch.cuda.current_stream(self._pairs.device).record_event(self._ended)

    def _is_capturing(self) -> bool:
        return self._pairs.is_cuda and torch.cuda.is_current_stream_capturing()

    def _read(self) -> _Reading:
        """Enqueue a copy of all counters."""
        self._read_steps = self._num_steps
        pairs, totals = _to_host(self._pairs), _to_host(self._totals)
        event = None
        if self._pairs.device.type == "cuda":
            event = torch.cuda.current_stream(self._pairs.device).record_event()
        return _Reading(pairs=pairs, totals=totals, num_steps=self._num_steps, event=event)

    def _take(self, reading: _Reading) -> None:
        pairs_LPE, totals_LP4 = reading.pairs.numpy(), reading.totals.numpy()
        counters = self.counters
        for p, phase in enumerate(PHASES):
            total_L4 = dict(zip(TOTALS, totals_LP4[:, p].T, strict=True))
            counters.counts[phase] = pairs_LPE[:, p].copy()
            counters.tokens[phase] = int(total_L4["tokens"][0])
            counters.hits[phase] = int(total_L4["hits"].sum())
            counters.touched_hot_bytes[phase] = int((total_L4["touched_hot"] * self._row_bytes_L).sum())
            counters.touched_cold_bytes[phase] = int((total_L4["touched_cold"] * self._row_bytes_L).sum())
        counters.steps = reading.num_steps
        self._reading = None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, enqueued on the current stream; into pinned memory, or it would be waited for."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
