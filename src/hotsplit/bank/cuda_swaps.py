"""The swap protocol's streams on a GPU: rows are copied by the driver on a side stream, the map is written between steps.

Between the Swapper, which decides what may happen when, and the driver, which does it:

    copy       each tensor of the row by its address, on the side stream
    publish    one word in each row map, its value in the call, on the compute stream: in order with steps and replays
    events     of the streams; nothing here waits on the host, before close()

Row maps lie in device memory, at one address for ever; the mirror is the host's, who must not wait for the device to
read its own decisions back. It tells what the steps launched from now on will see, as the Swapper does.

**One copy at a time.** Copies compete with the cold reads of the running step, and write-backs win: on one host reads
fell to 11 GB/s beside 25 GB/s written. So a copy is handed to the device only when those before it are done, as the
worker of the CPU backends does it; and because that is looked at between steps, swaps cost the link one row per step
and rank, however many layers swap. A row of 11 MB in a step of 20 ms is 0.55 GB/s, one or two hundredths of a link;
60 layers with two swaps each take 240 steps of the 2000 between updates. Copies that wait lie in a queue, and their
events are not done. Copies to the GPU wait as well: they use the link in the very direction of the cold reads.

Source: the two rates are from NVIDIA/nvbandwidth, issue 53; nothing of this is measured here.

    >>> from hotsplit.bank.row_memory import RowTensor
    >>> from hotsplit.bank.rows import place
    >>> from hotsplit.bank.sim_streams import SimMemory, SimStreams
    >>> from hotsplit.bank.swap import Swapper
    >>> layers = [place((0,), num_experts=2, spare=True, inclusive=False)]
    >>> class Rows:
    ...     def tensors(self, layer_id):
    ...         return [RowTensor(pieces=((0, 1024),), row_bytes=4)]
    >>> class Mirror:
    ...     def publish(self, layer_id, *, expert, row):
    ...         print(f"expert {expert} lies in row {row}")
    >>> memory = SimMemory(b"hot.....cold" + bytes([0, 0, 0, 0, 2, 0, 0, 0]), address=1024)
    >>> streams = SimStreams(memory)
    >>> row_map = DeviceRowMap(address=1036, layer_bytes=8, entry_bytes=4)
    >>> backend = CudaSwapBackend(Rows(), streams=streams, driver=streams, row_maps=[row_map], mirror=Mirror())
    >>> swapper = Swapper(backend, layouts=layers)
    >>> swapper.request(0, expert_in=1, expert_out=0)
    True
    >>> while not swapper.is_idle():
    ...     result = swapper.tick()
    ...     streams.drain()
    expert 1 lies in row 1
    expert 0 lies in row 2
    >>> memory.content[4:12]
    b'coldhot.'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch

from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.streams import StreamCalls, StreamEvent, Streams
from hotsplit.bank.swap import Stream, WaitName
from hotsplit.errors import BankError, SwapError

_SIDE_STREAMS: Final[tuple[Stream, ...]] = ("side", "side_out")


class RowMemory(Protocol):
    """Where rows lie."""

    def tensors(self, layer_id: int) -> Sequence[RowTensor]:
        """Where each tensor that moves with a row of the layer has its rows."""


class RowMapMirror(Protocol):
    """The row maps as the host knows them."""

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Change one entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRowMap:
    """A row map [L, entries] in device memory. The memory stays the caller's to keep, for as long as steps run."""

    address: int
    """Of the first layer's first entry."""
    layer_bytes: int
    """From a layer's first entry to the next layer's."""
    entry_bytes: int
    """4 or 8."""

    def entry_address(self, layer_id: int, *, expert: int) -> int:
        """Where an entry begins; of one of 8 bytes, the half that changes, since rows are below 2**31 and never negative.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
        """
        return self.address + layer_id * self.layer_bytes + expert * self.entry_bytes


def device_row_map(row_map: torch.Tensor) -> DeviceRowMap:
    """Where a tensor's entries lie.

    Args:
        row_map: Rows of all experts, [L, at least E], int32 or int64, the entries of a layer one behind the other.

    Raises:
        BankError: It is not.
    """
    if row_map.dtype not in (torch.int32, torch.int64) or row_map.dim() != 2 or row_map.stride(1) != 1:
        got = f"{row_map.dtype} {tuple(row_map.shape)} with strides {row_map.stride()}"
        raise BankError("row map on a device", got=got, wanted="int32 or int64 [L, E], contiguous in each layer")
    size = row_map.element_size()
    return DeviceRowMap(address=row_map.data_ptr(), layer_bytes=row_map.stride(0) * size, entry_bytes=size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class _RowCopy:
    """A copy that was accepted; it is its own event, whether or not it has been handed to the device."""

    stream: Stream
    layer_id: int
    source_row: int
    target_row: int


_Event: TypeAlias = StreamEvent | _RowCopy | None
"""Of the compute stream, or the last copy of a side stream; None where there was none."""


class CudaSwapBackend:
    """Rows in device and host memory behind the swap protocol (a SwapBackend).

    All calls come from the thread that launches the steps, with the driver's context current. None may come while that
    thread captures a graph: an engine that ticks there must have frozen its Swapper, which is_capturing() tells.

    Args:
        rows: Where rows lie; asked anew for every copy.
        streams: Of the rank's device.
        driver: Copies and writes on them.
        row_maps: Every map that steps read.
        mirror: Told of every publish when it is enqueued.
        max_copies: Rows on their way at a time.
    """

    def __init__(
        self,
        rows: RowMemory,
        *,
        streams: Streams,
        driver: StreamCalls,
        row_maps: Sequence[DeviceRowMap],
        mirror: RowMapMirror,
        max_copies: int = 1,
    ) -> None:
        self._rows, self._streams, self._driver = rows, streams, driver
        self._row_maps, self._mirror, self._max_copies = tuple(row_maps), mirror, max_copies
        self._waiting: tuple[_RowCopy, ...] = ()
        self._under_way: tuple[StreamEvent, ...] = ()
        # What became of the copies that left the queue, for as long as anybody may ask.
        self._outcomes: WeakKeyDictionary[_RowCopy, StreamEvent | SwapError] = WeakKeyDictionary()
        self._last: dict[Stream, _RowCopy] = {}
        self._is_closed = False

    def is_capturing(self) -> bool:
        """Whether the calling thread is capturing a graph."""
        return self._streams.is_capturing()

    def record(self, stream: Stream) -> _Event:
        """An event behind everything enqueued on the stream so far; of a side stream, behind its last copy.

        Args:
            stream: Which.
        """
        self._require_no_capture()
        return self._streams.record(stream) if stream == "compute" else self._last.get(stream)

    def wait(self, stream: Stream, event: _Event, why: WaitName) -> None:
        """Order the stream behind the event.

        A copy that still lies in the queue is handed to the device first, and those before it: there must be something
        to wait for. It does not come to that where a query has said done.

        Args:
            stream: Which waits.
            event: For what.
            why: The protocol's name of the wait.

        Raises:
            SwapError: The copy could not be handed to the device.
        """
        self._require_no_capture()
        if isinstance(event, _RowCopy):
            while event in self._waiting:
                self._start_next()
            event = self._outcome(event)
        if event is not None:
            self._streams.wait(stream, event)

    def query(self, event: _Event) -> bool:
        """Whether the event is done; the queue moves on first.

        Args:
            event: From record().

        Raises:
            SwapError: The copy could not be handed to the device, or was given up by close(). What little of it was
                handed over comes to its end before any later copy on its stream.
        """
        self._require_no_capture()
        while self._waiting and self._has_room():
            self._start_next()
        if isinstance(event, _RowCopy):
            if event in self._waiting:
                return False
            event = self._outcome(event)
        return event is None or self._streams.query(event)

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of one row, all of its tensors; it waits for its turn.

        Args:
            stream: "side" or "side_out".
            layer_id: Ordinal among MoE layers.
            source_row: Where the expert lies.
            target_row: A row that belongs to nobody.

        Raises:
            SwapError: The bank is closed, the copy would hold the steps up, or the driver refuses it.
        """
        self._require_no_capture()
        if stream == "compute":
            raise SwapError(f"layer_id {layer_id}", got="a copy on the compute stream", wanted="on the side stream")
        if self._is_closed:
            raise SwapError(f"layer_id {layer_id}", got="a closed bank", wanted="an open one")
        copy = _RowCopy(stream=stream, layer_id=layer_id, source_row=source_row, target_row=target_row)
        if self._waiting or not self._has_room():
            self._waiting = (*self._waiting, copy)
        else:
            self._start(copy)
        self._last[stream] = copy

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Write one entry of every map, in order with the steps, then of the mirror.

        A refusal of the driver ends the tick, not the swap: the Swapper stays where it was, and its next tick writes
        every map again. Until then the maps may differ, and each of them names a whole row of the expert.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
            row: Its row from now on.

        Raises:
            BankError: The driver refuses.
        """
        self._require_no_capture()
        stream = self._streams.handle("compute")
        for row_map in self._row_maps:
            self._driver.write32(row_map.entry_address(layer_id, expert=expert), value=row, stream=stream)
        self._mirror.publish(layer_id, expert=expert, row=row)

    def close(self) -> None:
        """Give up the copies in the queue and wait for those under way; before the rows are closed, which waits for none.

        Twice is harmless.
        """
        for copy in self._waiting:
            self._outcomes[copy] = SwapError("a copy of an expert row was given up", got="a closed bank")
        self._waiting, self._is_closed = (), True
        for stream in _SIDE_STREAMS:  # both, whatever was recorded there: a refused copy may have begun
            self._streams.synchronize(stream)

    def _has_room(self) -> bool:
        """Whether another copy may be on its way."""
        self._under_way = tuple(event for event in self._under_way if not self._streams.query(event))
        return len(self._under_way) < self._max_copies

    def _start_next(self) -> None:
        """Hand the oldest copy in the queue to the device; a refusal is kept for whoever asks for the copy."""
        copy, *rest = self._waiting
        self._waiting = tuple(rest)
        try:
            self._start(copy)
        except SwapError as error:
            self._outcomes[copy] = error

    def _start(self, copy: _RowCopy) -> None:
        """Hand a copy to the device, and an event right behind it."""
        stream = self._streams.handle(copy.stream)
        try:
            for tensor in self._rows.tensors(copy.layer_id):
                target, source = tensor.address_of(copy.target_row), tensor.address_of(copy.source_row)
                self._driver.copy(target, source=source, num_bytes=tensor.row_bytes, stream=stream)
        except BankError as error:
            what = f"layer_id {copy.layer_id}, copy of row {copy.source_row} to row {copy.target_row}"
            raise SwapError(what, got=str(error)) from error
        event = self._streams.record(copy.stream)
        self._outcomes[copy] = event
        self._under_way = (*self._under_way, event)

    def _outcome(self, copy: _RowCopy) -> StreamEvent:
        """The event of a copy that left the queue."""
        outcome = self._outcomes[copy]
        if isinstance(outcome, SwapError):
            raise outcome
        return outcome

    def _require_no_capture(self) -> None:
        """NOTE: even a query would break a capture, and what it captures would be done again with every replay."""
        if self._streams.is_capturing():
            raise BankError(
                "swaps during a graph capture", got="a tick", wanted="none", do="freeze the Swapper around the capture"
            )
