"""Pointer rows on a CPU: hot rows in an arena, cold rows where they lie in the checkpoint's own files.

The memory behind the embedded engine. Placement is inclusive (rows.py): the files keep every expert, so a swap reads
one row and writes none, and nothing of a cold expert is ever copied. A cold row is a view of the mapped file; only a
tensor whose parts lie apart in the file (gate here, up there) is gathered for the time of its use.

    layer 0  | hot row 0 | hot row 1 | spare |      arena: one private anonymous mapping, page-aligned
    layer 1  | hot row 0 | spare |
    files    | ... expert 0 ... expert 1 ... |      mapped read-only, shared with the page cache
"""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from hotsplit.bank.direct import DirectReader
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.source import ExpertSource, Span
from hotsplit.errors import BankError

RowTensors = Mapping[str, torch.Tensor]

_CHECK_EVERY_S = 1.0


class PointerRows:
    """The rows of all layers, hot and cold.

    Args:
        source: Where the experts lie.
        layers: Row numbering per layer, inclusive, L of them.

    Raises:
        BankError: The arena cannot be allocated or a file cannot be mapped.
    """

    def __init__(self, source: ExpertSource, *, layers: Sequence[LayerRows]) -> None:
        self._source = source
        self._layers = layers
        self._starts = _arena_starts(source, layers)
        self._arena = _arena(self._starts[-1])
        self._maps = [_map_file(path) for path in source.files]
        self._marks = [_mark(path) for path in source.files]
        self._checked_at = time.monotonic()
        self._views: dict[tuple[int, int], RowTensors] = {}
        self._is_closed = False

    @property
    def hot_bytes(self) -> int:
        """Bytes of the arena: hot and spare rows. The kernel rounds it up to a page: under 4 KiB per rank."""
        return self._starts[-1]

    def tensors(self, layer_id: int, row: int) -> RowTensors:
        """The tensors of one row, by name; views wherever the bytes lie together.

        Args:
            layer_id: Ordinal among MoE layers.
            row: Row number.
        """
        key = (layer_id, row)
        if key in self._views:
            return self._views[key]
        self._require_open()
        if self.is_hot(layer_id, row):
            tensors: RowTensors = self._hot_views(layer_id, row)
            self._views[key] = tensors
            return tensors
        tensors, gathered = self._cold_views(layer_id, row - self._layers[layer_id].first_cold)
        if not gathered:
            self._views[key] = tensors
        return tensors

    def is_hot(self, layer_id: int, row: int) -> bool:
        """Whether the row lies in the arena.

        Args:
            layer_id: Ordinal among MoE layers.
            row: Row number.
        """
        return row < self._layers[layer_id].first_cold

    def ask(self, layer_id: int, rows: Iterable[int]) -> None:
        """Have the kernel read cold rows ahead: exactly their ranges, nothing around them, without waiting.

        Args:
            layer_id: Ordinal among MoE layers.
            rows: Cold row numbers.
        """
        self._require_open()
        first_cold = self._layers[layer_id].first_cold
        for row in rows:
            for span in _joined(self._source.spans(layer_id, row - first_cold)):
                start = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
                self._maps[span.file][0].madvise(mmap.MADV_WILLNEED, start, span.offset + span.num_bytes - start)

    def fill(self, layer_id: int, *, expert: int, row: int, reader: DirectReader) -> int:
        """Read an expert's bytes from the files into a hot row.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Whose bytes.
            row: Hot or spare row that takes them.
            reader: The calling thread's reader.

        Returns:
            Bytes read.

        Raises:
            BankError: A read failed; the row holds no expert then.
        """
        self._require_open()
        if not self.is_hot(layer_id, row):
            raise BankError(f"layer {layer_id}, row {row}", got="a cold row", wanted="a hot or spare row")
        start = self._starts[layer_id] + row * self._source.layouts[layer_id].num_bytes
        spans = self._source.spans(layer_id, expert)
        with memoryview(self._arena) as arena:
            for span in spans:
                first = start + span.row_offset
                reader.read_into(arena[first : first + span.num_bytes], file=span.file, offset=span.offset)
        return sum(span.num_bytes for span in spans)

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
        for mapping, _ in self._maps:
            mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of arena and files; views that a caller still holds keep their memory until they go."""
        self._is_closed = True
        self._views.clear()
        self._maps = []
        self._arena = mmap.mmap(-1, mmap.PAGESIZE)

    def _require_open(self) -> None:
        if self._is_closed:
            raise BankError("the banks are closed", do="load the model again")

    def _hot_views(self, layer_id: int, row: int) -> RowTensors:
        layout = self._source.layouts[layer_id]
        start = self._starts[layer_id] + row * layout.num_bytes
        arena = torch.frombuffer(self._arena, dtype=torch.uint8, offset=start, count=layout.num_bytes)
        return {
            part.name: arena[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)
            for part in layout.tensors
        }

    def _cold_views(self, layer_id: int, expert: int) -> tuple[RowTensors, bool]:
        spans = self._source.spans(layer_id, expert)
        gathered, tensors = False, {}
        for part in self._source.layouts[layer_id].tensors:
            mine = [span for span in spans if part.offset <= span.row_offset < part.offset + part.num_bytes]
            joined = _joined(mine)
            if len(joined) == 1 and joined[0].offset % part.dtype.itemsize == 0:
                raw = self._file_bytes(joined[0])
            else:
                raw, gathered = torch.cat([self._file_bytes(span) for span in mine]), True
            tensors[part.name] = raw.view(part.dtype).view(part.shape)
        return tensors, gathered

    def _file_bytes(self, span: Span) -> torch.Tensor:
        return self._maps[span.file][1][span.offset : span.offset + span.num_bytes]


def _arena_starts(source: ExpertSource, layers: Sequence[LayerRows]) -> list[int]:
    """First byte of every layer in the arena, and its whole length last."""
    starts = [0]
    for layout, rows in zip(source.layouts, layers, strict=True):
        starts.append(starts[-1] + layout.num_bytes * rows.first_cold)
    return starts


def _arena(num_bytes: int) -> mmap.mmap:
    """Private anonymous memory of exactly this size (mmap's default would be shared, which counts as file-backed)."""
    size = max(num_bytes, 1)
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise BankError("the hot bank", got=str(error), wanted=f"{size} bytes", do="lower HOTSPLIT_HOT_GIB") from error


def _map_file(path: object) -> tuple[mmap.mmap, torch.Tensor]:
    """A read-only mapping and its bytes as a tensor."""
    try:
        with open(str(path), "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise BankError(f"cannot map {path}", got=str(error), do="check the model folder") from error
    with warnings.catch_warnings():
        # Nobody writes to a cold row; a private writable mapping would be charged as memory that it never takes.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """What tells whether a file is still the same; None where it is gone from its folder, which harms no mapping."""
    try:
        now = path.stat()
    except OSError:
        return None
    return (now.st_ino, now.st_size, now.st_mtime_ns)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans that touch in the file and in the row become one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.row_offset):
        last = joined[-1] if joined else None
        if last and _follows(last, span):
            joined[-1] = Span(
                file=last.file,
                offset=last.offset,
                num_bytes=last.num_bytes + span.num_bytes,
                row_offset=last.row_offset,
            )
        else:
            joined.append(span)
    return joined


def _follows(first: Span, second: Span) -> bool:
    return (
        first.file == second.file
        and first.offset + first.num_bytes == second.offset
        and first.row_offset + first.num_bytes == second.row_offset
    )
