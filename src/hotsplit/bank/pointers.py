"""Pointer rows on a CPU: hot rows in an arena, cold rows where they lie in the checkpoint's own files.

The memory behind the embedded engine. Placement is inclusive (rows.py): the files keep every expert, so a swap reads
one row and writes none. What becomes of a cold row is cold_reads.py's: a view of the mapped file, or of the slot that
it was read into.

    layer 0  | hot row 0 | hot row 1 | spare |      arena: one private anonymous mapping, page-aligned
    layer 1  | hot row 0 | spare |
    files    | ... expert 0 ... expert 1 ... |      mapped read-only, shared with the page cache; or read into
    slots    | expert 7 | expert 3 | ...            a few slots, past the page cache
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hotsplit.bank.arena import Arena
from hotsplit.bank.cold_reads import READ_THREADS, ColdCounts, ColdRows
from hotsplit.bank.direct import DirectFiles, DirectReader, address_of
from hotsplit.bank.kept_rows import KeptRows
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.source import ExpertSource
from hotsplit.bank.staging import Staging
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.notices import Notice

RowTensors = Mapping[str, torch.Tensor]

_CHECK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOptions:
    """How pointer rows use this machine; cold_choice.py chooses."""

    is_direct: bool = False
    """Whether cold rows are read past the page cache, into slots."""
    slots: int = 0
    """Slots for cold rows, there to be read or put together."""
    slot_bytes: int = 0
    """Room of one slot, whole blocks."""
    threads: int = READ_THREADS
    """Cold rows that are read at once."""
    placement: Placement = NO_PLACEMENT
    """NUMA node of the hot rows."""


class PointerRows:
    """The rows of all layers, hot and cold.

    Args:
        source: Where the experts lie.
        layers: Row numbering per layer, inclusive, L of them.
        options: How to use this machine.

    Raises:
        BankError: The arena cannot be allocated or a file cannot be mapped.
    """

    def __init__(
        self, source: ExpertSource, *, layers: Sequence[LayerRows], options: RowsOptions | None = None
    ) -> None:
        options = options or RowsOptions()
        self._source = source
        self._layers = layers
        self._starts = _arena_starts(source, layers)
        self._arena = Arena(self._starts[-1], placement=options.placement)
        self._marks = [_mark(path) for path in source.files]
        files = MappedFiles(source.files)
        self.guard = files.guard
        """What tells, after cold rows were used, whether their bytes were the files'."""
        self._staging = _staging(source, options=options, turns=len(layers))
        self._cold = ColdRows(
            source, files=files, staging=self._staging, is_direct=options.is_direct, threads=options.threads
        )
        self._checked_at = time.monotonic()
        self._views: dict[tuple[int, int], RowTensors] = {}
        self._is_closed = False

    @property
    def hot_bytes(self) -> int:
        """Bytes taken of the budget: hot rows, spare rows and slots. The kernel rounds them up to pages."""
        return self._starts[-1] + self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Of them, those of the slots for cold rows."""
        return 0 if self._staging is None else self._staging.num_bytes

    @property
    def notices(self) -> Sequence[Notice]:
        """What was asked of the kernel in vain."""
        return tuple(self._arena.notices)

    @property
    def cold_counts(self) -> ColdCounts:
        """Where cold rows came from."""
        return self._cold.counts

    @property
    def kept(self) -> KeptRows | None:
        """Which cold rows of a step lay in slots; None where there are no slots."""
        return self._cold.kept

    def tensors(self, layer_id: int, row: int) -> RowTensors:
        """The tensors of one row, by name; of a cold one they stay in place until the next ask().

        Args:
            layer_id: Ordinal among MoE layers.
            row: Row number.

        Raises:
            BankError: The banks are closed, or a cold row cannot be read.
        """
        if not self.is_hot(layer_id, row):
            return self._cold.tensors(layer_id, self.expert_at(layer_id, row))
        key = (layer_id, row)
        if key not in self._views:
            self._require_open()
            self._views[key] = self._hot_views(layer_id, row)
        return self._views[key]

    def is_hot(self, layer_id: int, row: int) -> bool:
        """Whether the row lies in the arena.

        Args:
            layer_id: Ordinal among MoE layers.
            row: Row number.
        """
        return row < self._layers[layer_id].first_cold

    def first_cold(self, layer_id: int) -> int:
        """The lowest cold row of a layer.

        Args:
            layer_id: Ordinal among MoE layers.
        """
        return self._layers[layer_id].first_cold

    def ask(self, layer_id: int, rows: Iterable[int]) -> None:
        """Start reading cold rows: exactly their ranges, nothing around them, without waiting.

        Args:
            layer_id: Ordinal among MoE layers.
            rows: Cold row numbers.

        Raises:
            BankError: The banks are closed.
        """
        first_cold = self._layers[layer_id].first_cold
        self._cold.ask(layer_id, [row - first_cold for row in rows])

    def arrivals(self, layer_id: int, rows: Iterable[int]) -> Iterator[int]:
        """The cold rows, each once, as they come.

        Args:
            layer_id: Ordinal among MoE layers.
            rows: Of those that were asked for.

        Raises:
            BankError: One cannot be read.
        """
        first_cold = self._layers[layer_id].first_cold
        for expert in self._cold.arrivals(layer_id, [row - first_cold for row in rows]):
            yield first_cold + expert

    def fill(self, layer_id: int, *, expert: int, row: int, reader: DirectReader) -> int:
        """Copy an expert's bytes into a hot row: from its slot, if it has one, else from the files.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Whose bytes.
            row: Hot or spare row that takes them.
            reader: The calling thread's reader.

        Returns:
            Bytes copied.

        Raises:
            BankError: A read failed; the row holds no expert then.
        """
        self._require_open()
        if not self.is_hot(layer_id, row):
            raise BankError(f"layer {layer_id}, row {row}", got="a cold row", wanted="a hot or spare row")
        layout, spans = self._source.layouts[layer_id], self._source.spans(layer_id, expert)
        start = self._starts[layer_id] + row * layout.num_bytes
        if self._staging is not None:
            with self._arena.part(start, layout.num_bytes) as target:
                is_there = len(target) == layout.num_bytes  # a closed arena has no part
                if is_there and self._staging.copy_out((layer_id, expert), layout=layout, address=address_of(target)):
                    return sum(span.num_bytes for span in spans)
        for span in spans:
            with self._arena.part(start + span.row_offset, span.num_bytes) as target:
                reader.read_into(target, file=span.file, offset=span.offset)
        return sum(span.num_bytes for span in spans)

    def let_go(self, layer_id: int, *, expert: int) -> None:
        """An expert has become hot: what a slot keeps of it is not needed any more.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Which.
        """
        if self._staging is not None:
            self._staging.give_up((layer_id, expert))

    def expert_at(self, layer_id: int, row: int) -> int:
        """Whose home row this is.

        Args:
            layer_id: Ordinal among MoE layers.
            row: Cold row number.
        """
        return row - self._layers[layer_id].first_cold

    def require_whole(self) -> None:
        """Refuse to go on with files that have changed under the map; looked at once a second at most.

        Raises:
            BankError: The banks are closed, or a file was written to, truncated or cannot be seen any more.
        """
        self._require_open()
        now = time.monotonic()
        if now - self._checked_at < _CHECK_EVERY_S:
            return
        self._checked_at = now
        for path, mark in zip(self._source.files, self._marks, strict=True):
            if _mark(path) not in (mark, None):
                raise BankError(f"{path} has changed while it was in use", do="load the model again")

    def drop_cold_pages(self) -> None:
        """Let go of every mapped page of the files, so that the page cache may give them up."""
        self._cold.drop_pages()

    def settle(self) -> None:
        """Once the hot rows are filled: lock them in RAM where that is allowed, and look where they lie.

        Raises:
            BankError: They lie elsewhere than HOTSPLIT_NUMA_POLICY=bind demands.
        """
        self._arena.settle()

    def close(self) -> None:
        """Let go of arena, threads and files; views that a caller still holds keep their memory until they go."""
        self._is_closed = True
        self._views.clear()
        try:
            self._cold.close()
        finally:
            self._arena.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise BankError("the banks are closed", do="load the model again")

    def _hot_views(self, layer_id: int, row: int) -> RowTensors:
        layout = self._source.layouts[layer_id]
        start = self._starts[layer_id] + row * layout.num_bytes
        arena = self._arena.content[start : start + layout.num_bytes]
        return {
            part.name: arena[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)
            for part in layout.tensors
        }


def _arena_starts(source: ExpertSource, layers: Sequence[LayerRows]) -> list[int]:
    """First byte of every layer in the arena, and its whole length last."""
    starts = [0]
    for layout, rows in zip(source.layouts, layers, strict=True):
        starts.append(starts[-1] + layout.num_bytes * rows.first_cold)
    return starts


def _staging(source: ExpertSource, *, options: RowsOptions, turns: int) -> Staging | None:
    """Slots, where there are to be any. NOTE: where a file system has no direct reads they pass the cache all the same."""
    if not options.slots:
        return None
    files = DirectFiles(source.files) if options.is_direct else None
    try:
        return Staging(files, num_slots=options.slots, slot_bytes=options.slot_bytes, turns=turns)
    except BankError:
        if files is not None:
            files.close()
        raise


def _mark(path: Path) -> tuple[int, int, int] | None:
    """What tells whether a file is still the same; None where it is gone from its folder, which harms no mapping."""
    try:
        now = path.stat()
    except OSError:
        return None
    return (now.st_ino, now.st_size, now.st_mtime_ns)
