"""The CUDA swap backend on simulated streams, as explorer.py wants it: every byte knows its owner, every state is checked.

Stands where SimBackend stands, but below it are the real CudaSwapBackend and real addresses: two row maps, of 8 and of
4 bytes per entry, and two tensors per row, weights and scales. The layout in memory, stitched and in two banks:

    int64 maps [L, E + 1] | int32 maps [L, E + 1] | layer 0: weights [R, 4], scales [R, 2] | layer 1: ...
    int64 maps | int32 maps | layer 0: cold weights, cold scales | ... | layer 0: hot weights, hot scales | layer 1: ...

Raises SimViolation when
- an entry of either map names no row, another expert's row, or bytes that are not wholly its expert's;
- an entry changes while a step runs, or the two maps differ when one begins;
- a copy reads or writes what is no row, or writes to a row that an entry names;
- more rows are on their way than the test allows.

So each read of a step, through either map, whenever in the step, returns the bytes of the expert that was asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotsplit.bank.cuda_swaps import CudaSwapBackend, DeviceRowMap, _RowCopy
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.sim import SimViolation
from hotsplit.bank.sim_streams import SimMemory, SimStreams
from hotsplit.bank.swap import Stream, WaitName

NOBODY = 0
TENSOR_BYTES = (4, 2)
"""Per row: weights and scales."""
ADDRESS = 1 << 20
MANY = 99
"""Copies at a time: no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """Where everything lies, and what is wrong with given bytes; shared by all states."""

    layouts: tuple[LayerRows, ...]
    maps: tuple[DeviceRowMap, ...]
    map_bytes: int
    """Of all row maps, which come first."""
    tables: tuple[tuple[RowTensor, ...], ...]
    """Per layer: what RowMemory.tensors() says."""
    places: tuple[tuple[range, int, int], ...]
    """Addresses of every row of every tensor, its layer and its number."""
    verdicts: dict[bytes, str | None] = field(default_factory=dict)
    """By content: memo of find_violation()."""

    def tensors(self, layer_id: int) -> Sequence[RowTensor]:
        return self.tables[layer_id]

    def row_map(self, content: bytes, layer_id: int, *, which: int) -> tuple[int, ...]:
        """One of the maps as it stands, [E]."""
        one = self.maps[which]
        starts = [
            one.entry_address(layer_id, expert=expert) - ADDRESS
            for expert in range(len(self.layouts[layer_id].row_map))
        ]
        return tuple(
            int.from_bytes(content[start : start + one.entry_bytes], "little", signed=True) for start in starts
        )

    def row(self, content: bytes, layer_id: int, *, row: int) -> bytes:
        """All bytes of a row, tensor by tensor."""
        starts = [(one.address_of(row) - ADDRESS, one.row_bytes) for one in self.tables[layer_id]]
        return b"".join(content[start : start + size] for start, size in starts)

    def row_at(self, address: int) -> tuple[int, int]:
        """Layer and row of a byte."""
        for addresses, layer_id, row in self.places:
            if address in addresses:
                return layer_id, row
        raise SimViolation("a copy", got=f"address {address}", wanted="a row's")

    def named_rows(self, content: bytes) -> set[tuple[int, int]]:
        """Layer and row of whatever an entry of either map names."""
        return {
            (layer_id, row)
            for layer_id in range(len(self.layouts))
            for which in range(len(self.maps))
            for row in self.row_map(content, layer_id, which=which)
        }

    def find_violation(self, content: bytes) -> str | None:
        """What is wrong with the bytes whatever runs; None where nothing is."""
        if content not in self.verdicts:
            self.verdicts[content] = self._find_violation(content)
        return self.verdicts[content]

    def _find_violation(self, content: bytes) -> str | None:
        for layer_id, layout in enumerate(self.layouts):
            for which in range(len(self.maps)):
                row_map = self.row_map(content, layer_id, which=which)
                for expert, row in enumerate(row_map):
                    what = f"layer_id {layer_id}, expert {expert}, map {which}: row {row}"
                    if not 0 <= row < layout.num_rows:
                        return f"{what} does not exist"
                    if row_map.index(row) != expert:
                        return f"{what} is named twice"
                    found = self.row(content, layer_id, row=row)
                    if found != bytes([owner(layer_id, expert)]) * len(found):
                        return f"{what} with bytes of others: {found.hex()}"
        return None


class CudaMachine:
    """What the explorer takes for a SimBackend.

    Args:
        layouts: Rows per layer.
        num_chunks: Pieces of a copy of one tensor.
        backend: The backend, or a mutant of it.
        max_copies: The backend's.
        failing_copies: Ordinals of the driver's copies that are refused, two for each row.
        limit: Rows that may be on their way when a step is launched.
        num_banks: Parts of every tensor.
    """

    def __init__(
        self,
        layouts: Sequence[LayerRows],
        *,
        num_chunks: int = 1,
        backend: Callable[..., CudaSwapBackend] = CudaSwapBackend,
        max_copies: int = 1,
        failing_copies: Collection[int] = (),
        limit: int = MANY,
        num_banks: int = 1,
    ) -> None:
        self.arena, content = build(tuple(layouts), num_banks=num_banks)
        self.memory = CheckedMemory(content, arena=self.arena)
        self.streams = SimStreams(self.memory, num_chunks=num_chunks, failing_copies=failing_copies)
        self.backend = backend(
            self.arena,
            streams=self.streams,
            driver=self.streams,
            row_maps=self.arena.maps,
            mirror=Unwatched(),
            max_copies=max_copies,
        )
        self.limit = limit
        self._running: bytes | None = None  # the maps of the step that runs
        self.check()

    # The SwapBackend.

    def record(self, stream: Stream) -> Any:
        return self.backend.record(stream)

    def wait(self, stream: Stream, event: Any, why: WaitName) -> None:
        self.backend.wait(stream, event, why)

    def query(self, event: Any) -> bool:
        return self.backend.query(event)

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        self.backend.copy(stream, layer_id=layer_id, source_row=source_row, target_row=target_row)

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        self.backend.publish(layer_id, expert=expert, row=row)

    # What the explorer does to it.

    def launch_step(self) -> None:
        if self.streams.num_copies() > self.limit * len(TENSOR_BYTES):
            raise SimViolation("row copies", got="more on their way than may be")
        self.streams.launch_step()

    def num_steps(self) -> int:
        return self.streams.num_steps()

    def enabled(self) -> tuple[Stream, ...]:
        return self.streams.enabled()

    def is_copying(self, stream: Stream) -> bool:
        """Never: a copy that was handed to a device does not fail alone; the driver refuses it before, or all is lost."""
        return False

    def is_empty(self) -> bool:
        return self.streams.is_empty() and not self.backend._waiting

    def advance(self, stream: Stream, *, fail: bool) -> None:
        was_running = self._running is not None
        self.streams.advance(stream)
        if not self.streams.is_stepping():
            self._running = None
        elif not was_running:
            self._running = self.memory.content[: self.arena.map_bytes]
            self._require_equal_maps()
        self.check()

    def row_map(self, layer_id: int) -> tuple[int, ...]:
        return self.arena.row_map(self.memory.content, layer_id, which=0)

    def fork(self) -> CudaMachine:
        twin = copy.copy(self)
        twin.memory = self.memory.fork()
        twin.streams = self.streams.fork(twin.memory)
        twin.backend = copy.copy(self.backend)
        twin.backend._streams = twin.backend._driver = twin.streams
        twin.backend._outcomes = self.backend._outcomes.copy()
        twin.backend._last = dict(self.backend._last)
        return twin

    def key(self) -> Hashable:
        waiting = tuple((one.stream, one.layer_id, one.source_row, one.target_row) for one in self.backend._waiting)
        under_way = tuple(self.streams.event_key(event) for event in self.backend._under_way)
        under_way = tuple(key for key in under_way if key != "done")
        return (self.memory.content, self.streams.key(), waiting, under_way)

    def event_key(self, event: Any) -> Hashable:
        if isinstance(event, _RowCopy):
            if event in self.backend._waiting:
                return ("waiting", self.backend._waiting.index(event))
            event = self.backend._outcomes[event]
        return "failed" if isinstance(event, Exception) else self.streams.event_key(event)

    def check(self) -> None:
        violation = self.arena.find_violation(self.memory.content)
        if violation is not None:
            raise SimViolation("row map", got=violation)
        if self._running is not None and not self.memory.content.startswith(self._running):
            raise SimViolation("row map", got="an entry that changed while a step ran")

    def _require_equal_maps(self) -> None:
        for layer_id in range(len(self.arena.layouts)):
            maps = [self.arena.row_map(self.memory.content, layer_id, which=which) for which in (0, 1)]
            if maps[0] != maps[1]:
                raise SimViolation("row maps", got=f"{maps} when a step began", wanted="equal ones")


class CheckedMemory(SimMemory):
    """Bytes in which no copy may write to a row that an entry names."""

    def __init__(self, content: bytes, *, arena: Arena) -> None:
        super().__init__(content, address=ADDRESS)
        self._arena = arena

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        self._arena.row_at(source)
        layer_id, row = self._arena.row_at(target)
        if (layer_id, row) in self._arena.named_rows(self.content):
            raise SimViolation(f"layer_id {layer_id}", got=f"row {row}, which an entry names, written to")
        super().copy(target, source=source, num_bytes=num_bytes, stream=stream)


class Unwatched:
    """A mirror that nobody looks into."""

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Nothing."""


def owner(layer_id: int, expert: int) -> int:
    """The byte that an expert's rows are full of."""
    return 16 * layer_id + expert + 1


def build(layouts: tuple[LayerRows, ...], *, num_banks: int) -> tuple[Arena, bytes]:
    """Lay everything out as the banks would be built."""
    num_entries, maps, content = len(layouts[0].row_map) + 1, [], b""
    for size in (8, 4):
        maps.append(DeviceRowMap(address=ADDRESS + len(content), layer_bytes=size * num_entries, entry_bytes=size))
        for layout in layouts:
            content += b"".join(row.to_bytes(size, "little", signed=True) for row in (*layout.row_map, -1))
    map_bytes = len(content)
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cold_first in (True, False)[2 - num_banks :]:
        for layer_id, layout in enumerate(layouts):
            first = layout.first_cold if cold_first else 0
            past = layout.num_rows if cold_first or num_banks == 1 else layout.first_cold
            owners = {row: owner(layer_id, expert) for expert, row in enumerate(layout.row_map)}
            for number, size in enumerate(TENSOR_BYTES):
                pieces.setdefault((layer_id, number), []).insert(0, (first, ADDRESS + len(content)))
                content += b"".join(bytes([owners.get(row, NOBODY)]) * size for row in range(first, past))
    tables = tuple(
        tuple(RowTensor(pieces=tuple(pieces[layer_id, i]), row_bytes=size) for i, size in enumerate(TENSOR_BYTES))
        for layer_id in range(len(layouts))
    )
    places = tuple(
        (range(one.address_of(row), one.address_of(row) + one.row_bytes), layer_id, row)
        for layer_id, table in enumerate(tables)
        for one in table
        for row in range(layouts[layer_id].num_rows)
    )
    return Arena(layouts=layouts, maps=tuple(maps), map_bytes=map_bytes, tables=tables, places=places), content
