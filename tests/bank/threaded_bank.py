"""A bank in real memory whose copies are made by real threads: numpy rows whose bytes say whose they are.

The backend of an engine that computes on the launching thread: publishes take effect at once, copies run beside the
steps on a worker thread per side stream. A row has two tensors, weights and scale, copied in halves, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np

from hotsplit.bank.rows import LayerRows
from hotsplit.bank.swap import Stream, WaitName
from hotsplit.errors import SwapError

NUM_WEIGHTS, NUM_SCALES = 1024, 16


@dataclass(kw_only=True, slots=True)
class CopyEvent:
    """Done when the copies before it are."""

    done: Event = field(default_factory=Event)
    error: BaseException | None = None


class ThreadedBank:
    """Rows of all layers in numpy arrays; a SwapBackend with one worker thread per side stream.

    Args:
        layouts: Rows per layer.
    """

    def __init__(self, layouts: Sequence[LayerRows]) -> None:
        num_rows, num_experts = max(rows.num_rows for rows in layouts), len(layouts[0].row_map)
        self.weights_LRN = np.full((len(layouts), num_rows, NUM_WEIGHTS), -1, dtype=np.int16)
        self.scales_LRN = np.full((len(layouts), num_rows, NUM_SCALES), -1, dtype=np.float32)
        self.row_map_LE = np.array([rows.row_map for rows in layouts], dtype=np.int64)
        self.owner_LE = np.arange(len(layouts) * num_experts, dtype=np.int16).reshape(len(layouts), num_experts)
        for layer_id, rows in enumerate(layouts):
            for expert, expert_rows in enumerate(zip(rows.row_map, rows.home_row or rows.row_map, strict=True)):
                self.weights_LRN[layer_id, expert_rows] = self.owner_LE[layer_id, expert]
                self.scales_LRN[layer_id, expert_rows] = self.owner_LE[layer_id, expert]
        self.num_copying = 0
        self._work: dict[Stream, SimpleQueue[Callable[[], None] | None]] = {}
        self._errors: dict[Stream, BaseException | None] = {}
        self._threads: list[Thread] = []
        for stream in ("side", "side_out"):
            self._work[stream], self._errors[stream] = SimpleQueue(), None
            self._threads.append(Thread(target=self._run, args=(stream,), daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End the workers."""
        for queue in self._work.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    # The SwapBackend.

    def record(self, stream: Stream) -> CopyEvent | None:
        if stream == "compute":
            return None
        event = CopyEvent()
        self._work[stream].put(lambda: self._complete(event, stream=stream))
        return event

    def wait(self, stream: Stream, event: CopyEvent, why: WaitName) -> None:
        if stream != "compute":
            raise AssertionError("compute has no events that a copy could wait for")
        event.done.wait()

    def query(self, event: CopyEvent) -> bool:
        if event.error is not None:
            raise SwapError("row copy", got=repr(event.error)) from event.error
        return event.done.is_set()

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        self._work[stream].put(lambda: self.copy_row(layer_id, source_row=source_row, target_row=target_row))

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        self.row_map_LE[layer_id, expert] = row

    # What the worker and the readers do.

    def copy_row(self, layer_id: int, *, source_row: int, target_row: int) -> None:
        """Copy both tensors of a row."""
        self.num_copying += 1
        try:
            for tensor in (self.weights_LRN[layer_id], self.scales_LRN[layer_id]):
                self.copy_tensor(tensor, source_row=source_row, target_row=target_row)
        finally:
            self.num_copying -= 1

    def copy_tensor(self, tensor: np.ndarray, *, source_row: int, target_row: int) -> None:
        """Copy one tensor of a row in halves, between which a reader may run."""
        half = tensor.shape[1] // 2
        tensor[target_row, :half] = tensor[source_row, :half]
        time.sleep(0)  # lets a reader in between
        tensor[target_row, half:] = tensor[source_row, half:]

    def wrong_experts(self) -> list[str]:
        """One engine step's reads: every expert through the row map, both tensors; what was wrong."""
        layers_L1 = np.arange(len(self.row_map_LE))[:, None]
        expected_LE1 = self.owner_LE[:, :, None]
        row_map_LE = self.row_map_LE.copy()
        wrong = []
        for name, tensor_LRN in (("weights", self.weights_LRN), ("scales", self.scales_LRN)):
            is_wrong_LE = (tensor_LRN[layers_L1, row_map_LE] != expected_LE1).any(axis=2)
            wrong += [f"{name} of layer {layer_id}, expert {expert}" for layer_id, expert in np.argwhere(is_wrong_LE)]
        if (row_map_LE != self.row_map_LE).any():
            wrong.append("row map changed while a step ran")
        return wrong

    def _run(self, stream: Stream) -> None:
        while (work := self._work[stream].get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - handed to whoever queries the event
                self._errors[stream] = error

    def _complete(self, event: CopyEvent, *, stream: Stream) -> None:
        event.error, self._errors[stream] = self._errors[stream], None
        event.done.set()
