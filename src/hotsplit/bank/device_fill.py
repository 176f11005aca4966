"""Fill a GPU's rows from a checkpoint: every expert read once, laid out, copied into its row, and looked at there.

    files -> staging buffer of one row -> convert (row_format.py) -> copy by address, tensor by tensor -> its row
                                                                  -> sum of its bytes == sum as the device reads them

The peak above the rows themselves is one row, two while it is converted. The device reads every row once, where it
lies, before the first step does: a cold row that it cannot read, or reads wrong, ends the load and not a reply.

Shapes: L MoE layers, E experts, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hotsplit.bank.build import Heartbeat, Progress
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.row_format import FormedExperts, RowFormat, Tensors, by_bank
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.source import ExpertSource, RowLayout
from hotsplit.errors import BankError

LayerTensors = Mapping[str, tuple[torch.Tensor, ...]]
"""The tensors of a layer by field of ExpertRows: [R, ...], or the parts of two banks."""


def allocate(
    rows: RangeRows, *, forms: Sequence[RowFormat], layers: Sequence[LayerRows], device: torch.device
) -> list[LayerTensors]:
    """Make all tensors of all layers and register what moves with a row.

    Args:
        rows: Empty.
        forms: Of the layers, [L].
        layers: Their rows, [L].
        device: Of the tensors that are not divided.

    Raises:
        BankError: Memory does not suffice.
    """
    made: list[LayerTensors] = []
    for layer_id, (form, layer) in enumerate(zip(forms, layers, strict=True)):
        tensors: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, (shape, dtype) in form.tensors.items():
            whole = (layer.num_rows, *shape)
            if name in form.divided:
                tensors[name] = rows.allocate_parts(layer_id, shape=whole, dtype=dtype)
            else:
                plain = _plain(whole, dtype=dtype, device=device)
                tensors[name] = by_bank(plain, first_cold=layer.first_cold, num_banks=rows.memory.num_banks)
        rows.register(layer_id, [parts if len(parts) > 1 else parts[0] for parts in tensors.values()])
        made.append(tensors)
    return made


def fill(
    rows: RangeRows,
    experts: FormedExperts,
    *,
    layers: Sequence[LayerRows],
    tensors: Sequence[LayerTensors],
    on_progress: Progress | None,
) -> None:
    """Read every expert into its row, and check that the device reads there what was read from the file.

    Args:
        rows: Allocated and registered.
        experts: Of the model.
        layers: Where every expert starts, [L].
        tensors: From allocate(), [L].
        on_progress: Told bytes done and in all, after every row.

    Raises:
        BankError: A read or a copy failed, or a row holds other bytes.
    """
    source, forms = experts.source, experts.forms
    total = sum(layout.num_bytes for layout in source.layouts) * source.num_experts
    staging = _Staging(source, is_pinned=rows.memory.device_type == "cuda")
    done, heartbeat = 0, Heartbeat("reading experts")
    try:
        for layer_id, layer in enumerate(layers):
            check = _Check(layer_id)
            for expert, row in enumerate(layer.row_map):
                converted = _checked(forms[layer_id].convert(staging.read(layer_id, expert)), form=forms[layer_id])
                _write(rows, layer_id=layer_id, row=row, values=list(converted.values()))
                check.add(expert, wanted=converted, found=row_of(tensors[layer_id], row=row, layer=layer))
                done += source.layouts[layer_id].num_bytes
                heartbeat(done, total)
                if on_progress:
                    on_progress(done, total)
            check.require_equal()
    finally:
        staging.close()


def row_of(tensors: LayerTensors, *, row: int, layer: LayerRows) -> Tensors:
    """One row of every tensor, where it lies.

    Args:
        tensors: Of a layer.
        row: Its number among all rows.
        layer: The layer's rows.
    """
    return {name: part_of(parts, row=row, layer=layer) for name, parts in tensors.items()}


def part_of(parts: tuple[torch.Tensor, ...], *, row: int, layer: LayerRows) -> torch.Tensor:
    """One row of one tensor.

    Args:
        parts: Of the tensor.
        row: Its number among all rows.
        layer: The layer's rows.
    """
    if len(parts) == 1 or row < layer.first_cold:
        return parts[0][row]
    return parts[1][row - layer.first_cold]


class _Staging:
    """Reads one expert at a time into one buffer."""

    def __init__(self, source: ExpertSource, *, is_pinned: bool) -> None:
        self._source = source
        largest = max(layout.num_bytes for layout in source.layouts)
        self._buffer = torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self._reader = DirectReader(source.files)

    def read(self, layer_id: int, expert: int) -> Tensors:
        """The stored tensors of an expert, until the next is read."""
        layout, view = self._source.layouts[layer_id], self._buffer.numpy().data
        spans = self._source.spans(layer_id, expert)
        for span in spans:
            target = view[span.row_offset : span.row_offset + span.num_bytes]
            self._reader.read_into(target, file=span.file, offset=span.offset)
        found, wanted = sum(span.num_bytes for span in spans), sum(part.num_bytes for part in layout.tensors)
        if found != wanted:
            what = f"layer_id {layer_id}, expert {expert}"
            raise BankError(what, got=f"{found} bytes in the checkpoint", wanted=str(wanted))
        return stored_views(self._buffer, layout=layout)

    def close(self) -> None:
        self._reader.close()


def stored_views(buffer: torch.Tensor, *, layout: RowLayout) -> Tensors:
    """The tensors of a stored row.

    Args:
        buffer: Its bytes, uint8.
        layout: Of the row.
    """
    views = {}
    for part in layout.tensors:
        raw = buffer[part.offset : part.offset + part.num_bytes]
        if part.offset % part.dtype.itemsize:
            raw = raw.clone()
        views[part.name] = raw.view(part.dtype).view(part.shape)
    return views


def _checked(values: Tensors, *, form: RowFormat) -> dict[str, torch.Tensor]:
    """What was converted, contiguous and in the form's order, or the error that names what it is not."""
    found = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    if found != dict(form.tensors):
        raise BankError("an expert for the kernels of rows", got=str(found), wanted=str(dict(form.tensors)))
    return {name: _aligned(values[name].contiguous()) for name in form.tensors}


def _aligned(value: torch.Tensor) -> torch.Tensor:
    """The tensor, where its bytes can be looked at as 64-bit words; else a copy."""
    return value.clone() if value.storage_offset() * value.itemsize % _WORD_BYTES else value


def _write(rows: RangeRows, *, layer_id: int, row: int, values: Sequence[torch.Tensor]) -> None:
    """By address, since no engine's copy knows both memories."""
    for where, value in zip(rows.tensors(layer_id), values, strict=True):
        rows.memory.copy([(where.address_of(row), value.data_ptr())], num_bytes=where.row_bytes)


_WORD_BYTES = 8


def _sum(value: torch.Tensor) -> torch.Tensor:
    """Of all bytes, as 64-bit words where they are whole ones; it wraps alike everywhere."""
    flat = value.reshape(-1).view(torch.uint8)
    return flat.view(torch.int64).sum() if not len(flat) % _WORD_BYTES else flat.sum(dtype=torch.int64)


@dataclass(slots=True)
class _Sums:
    expert: int
    wanted: list[torch.Tensor]
    found: list[torch.Tensor]


class _Check:
    """Sums of the rows of one layer, as written and as read: compared at its end, so that no row is waited for."""

    def __init__(self, layer_id: int) -> None:
        self._layer_id = layer_id
        self._sums: list[_Sums] = []

    def add(self, expert: int, *, wanted: Tensors, found: Tensors) -> None:
        """An expert that lies in its row."""
        self._sums.append(
            _Sums(expert, [_sum(wanted[name]) for name in wanted], [_sum(found[name]) for name in wanted])
        )

    def require_equal(self) -> None:
        """Raise where the device reads other bytes than the file holds."""
        wanted = torch.stack([torch.stack(one.wanted) for one in self._sums])
        found = torch.stack([torch.stack(one.found) for one in self._sums]).cpu()
        for one in (wanted != found).any(dim=1).nonzero().flatten().tolist():
            raise BankError(
                f"layer_id {self._layer_id}, expert {self._sums[one].expert}, as the device reads its row",
                got="other bytes than the checkpoint's",
                wanted="the same",
                do="load again; if it comes back, use device='cpu' and report the machine",
            )


def _plain(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the device for all rows; zeros, so that a spare row holds nothing odd."""
    try:
        return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
    except RuntimeError as error:
        got = str(error).splitlines()[0]
        raise BankError("memory for what stays fast for all experts", got=got, do="lower HOTSPLIT_HOT_GIB") from error
