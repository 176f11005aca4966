"""The rows of all layers in address ranges: which tensors a row is made of, and how a row moves.

    allocate   before loading: a tensor [R, ...], its hot rows in fast memory, its cold rows in slow memory
    release    after post-processing that changed the size of a row, before another is allocated
    register   once every tensor is final: all that moves when a row moves, ranges and small plain tensors alike
    permute    where a loader wrote experts in the order of their ids, into rows 0..E-1
    copy_row   a swap's copies; exchange for two rows without a spare one

Placement is exclusive (rows.py). The memory itself is a RowMemory's; nothing here knows what it is made of, but for one
thing: in a memory of two banks (two_banks.py) a tensor has two parts, so it is asked for by allocate_parts() there.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from hotsplit.bank.rows import place
    >>> from hotsplit.bank.file_memory import FileMemory
    >>> from hotsplit.bank.ranges import BankFile
    >>> layers = [place((1, 3), num_experts=4, spare=True, inclusive=False)]
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = BankFile(Path(folder.name))
    >>> rows = RangeRows(layers, memory=FileMemory(file))
    >>> weight = rows.allocate(0, shape=(5, 64), dtype=torch.uint8)
    >>> weight[:4] = torch.arange(4, dtype=torch.uint8)[:, None]  # a loader that knows of no row map
    >>> rows.register(0, [weight])
    >>> rows.permute(0, rows=layers[0].row_map, free_row=layers[0].spare_row)
    >>> layers[0].row_map, weight[list(layers[0].row_map), 0].tolist()
    ((3, 0, 4, 1), [0, 1, 2, 3])
    >>> rows.close()
    >>> file.close()
    >>> folder.cleanup()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hotsplit.bank.row_memory import AddressRange, RowMemory, RowTensor, can_divide
from hotsplit.bank.rows import LayerRows
from hotsplit.errors import BankError

_OUTSIDE = -1
"""In place of a row number: the temporary that is no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Registered:
    """A tensor that moves with a row, kept alive."""

    parts: tuple[torch.Tensor, ...]
    """Those that have rows, in their order; [rows, row bytes], uint8."""

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return sum(part.nbytes for part in self.parts)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.parts[0].shape[1]

    def where(self) -> RowTensor:
        """As addresses."""
        firsts = [sum(len(part) for part in self.parts[:i]) for i in range(len(self.parts))]
        pieces = zip(firsts, (part.data_ptr() for part in self.parts), strict=True)
        return RowTensor(pieces=tuple(pieces), row_bytes=self.row_bytes)


class RangeRows:
    """The rows of one rank. Not for two threads at once, but for copies of rows that the other does not touch.

    Args:
        layers: Row numbers per layer, exclusive, L of them.
        memory: Makes the tensors; stays the caller's to close, after this.
    """

    def __init__(self, layers: Sequence[LayerRows], *, memory: RowMemory) -> None:
        self._layers = tuple(layers)
        self.memory = memory
        """What rows are made of."""
        self._ranges: list[tuple[int, AddressRange]] = []  # layer_id, range
        self._owners: dict[int, tuple[int, AddressRange]] = {}  # the same, by the address of every part that has rows
        self._tensors: dict[int, tuple[_Registered, ...]] = {}  # layer_id -> all that moves
        self._is_closed = False

    @property
    def ranges(self) -> tuple[AddressRange, ...]:
        """All that are open, in the order they were made."""
        return tuple(one for _, one in self._ranges)

    @property
    def hot_bytes(self) -> int:
        """Bytes of fast memory taken: the ranges' hot rows, in whole pages, and registered tensors outside of them."""
        plain = [one for tensors in self._tensors.values() for one in tensors if not self.owns(one.parts[0])]
        return sum(one.fast_bytes for one in self.ranges) + sum(one.num_bytes for one in plain)

    @property
    def host_bytes(self) -> int:
        """Bytes of slow memory taken: the ranges' cold rows, in whole pages."""
        return sum(one.slow_bytes for one in self.ranges)

    def allocate(self, layer_id: int, *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor whose rows lie where the layer's row numbers say.

        Args:
            layer_id: Ordinal among MoE layers.
            shape: [R, ...].
            dtype: Of its elements.

        Returns:
            The tensor, its bytes anything, as torch.empty's. It must not be touched after close().

        Raises:
            BankError: The shape is not of R rows, each a multiple of the memory's alignment, memory or disk do not
                suffice, or the memory is one of two banks.
        """
        self._require_one_bank(layer_id)
        return self.allocate_parts(layer_id, shape=shape, dtype=dtype)[0]

    def allocate_parts(self, layer_id: int, *, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Make a tensor whose rows lie where the layer's row numbers say, in as many parts as the memory has banks.

        Args:
            layer_id: Ordinal among MoE layers.
            shape: [R, ...], of all parts together.
            dtype: Of its elements.

        Returns:
            The whole tensor alone, or its hot and its cold rows, of which one may be empty; their bytes are anything.
            They must not be touched after close().

        Raises:
            BankError: The shape is not of R rows, each a multiple of the memory's alignment, or memory or disk do not
                suffice.
        """
        self._require_shape(layer_id, shape, dtype=dtype)
        made = self.memory.make(tuple(shape), dtype=dtype, num_fast=self._layers[layer_id].first_cold)
        self._ranges.append((layer_id, made))
        self._owners |= {part.data_ptr(): (layer_id, made) for part in made.parts if part.numel()}
        return made.parts

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor starts where one of the ranges does, or a part of it.

        Args:
            tensor: Any.
        """
        return tensor.data_ptr() in self._owners

    def release(self, layer_id: int, tensor: torch.Tensor) -> None:
        """Give a tensor's memory up; what was registered of the layer is forgotten.

        Args:
            layer_id: Ordinal among MoE layers.
            tensor: From allocate(), for this layer, or any part that has rows; must not be touched any more, nor the
                other part.

        Raises:
            BankError: The tensor is not this layer's.
        """
        old = self._range_of(layer_id, tensor)
        self._tensors.pop(layer_id, None)
        self._ranges.remove((layer_id, old))
        self._owners = {address: owner for address, owner in self._owners.items() if owner[1] is not old}
        old.close()

    def register(self, layer_id: int, tensors: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
        """Say what a row of the layer is made of: these tensors instead of any that were registered before.

        Args:
            layer_id: Ordinal among MoE layers.
            tensors: Every tensor [R, ...] that moves with a row, each row contiguous, as a whole or in the parts of two
                banks; one given twice counts once, an empty one not at all.

        Raises:
            BankError: A tensor has not R rows that lie one behind the other in memory, or shares bytes with another.
        """
        rows = self._layer(layer_id)
        given = [one if isinstance(one, tuple) else (one,) for one in tensors]
        views = [self._views(parts, layer_id=layer_id, rows=rows) for parts in given if any(p.numel() for p in parts)]
        distinct = {view.parts[0].data_ptr(): view for view in views}
        end = 0
        for (start, past), part in sorted(_by_span(views).items(), key=lambda item: item[0]):
            if start < end:
                raise _wrong_tensor(part, layer_id=layer_id, wanted="tensors that share no bytes: a row moves once")
            end = past
        self._tensors[layer_id] = tuple(distinct.values())

    def row_bytes(self, layer_id: int) -> int:
        """Bytes of one row, all registered tensors together.

        Args:
            layer_id: Ordinal among MoE layers.

        Raises:
            BankError: Nothing is registered.
        """
        return sum(tensor.row_bytes for tensor in self._registered(layer_id))

    def tensors(self, layer_id: int) -> list[RowTensor]:
        """What a row is made of: where every registered tensor has its rows.

        Args:
            layer_id: Ordinal among MoE layers.

        Raises:
            BankError: Nothing is registered.
        """
        return [tensor.where() for tensor in self._registered(layer_id)]

    def copy_row(self, layer_id: int, *, source_row: int, target_row: int) -> int:
        """Copy one row, all of its tensors.

        Args:
            layer_id: Ordinal among MoE layers.
            source_row: Where it lies.
            target_row: Where it shall lie as well.

        Returns:
            Bytes copied.

        Raises:
            BankError: No such row, or nothing is registered.
        """
        self._require_rows(layer_id, (source_row, target_row))
        self._move(layer_id, [(source_row, target_row)])
        return self.row_bytes(layer_id)

    def exchange(self, layer_id: int, a: int, b: int) -> None:
        """Let two rows change places; no spare row is needed.

        Args:
            layer_id: Ordinal among MoE layers.
            a: One row.
            b: The other.

        Raises:
            BankError: No such row, or nothing is registered.
        """
        self._require_rows(layer_id, (a, b))
        self._move(layer_id, [(a, _OUTSIDE), (b, a), (_OUTSIDE, b)])

    def permute(self, layer_id: int, *, rows: Sequence[int], free_row: int | None) -> None:
        """Bring the first rows where they belong, each moved once, without a second copy of the layer.

        Args:
            layer_id: Ordinal among MoE layers.
            rows: Row where what lies in row i now shall lie, for i from 0; a row map, where experts lie in the order
                of their ids. Rows that are named neither way keep their bytes.
            free_row: A row that nothing shall lie in, to move through; None for a temporary of one row.

        Raises:
            BankError: A row is named twice or does not exist, something shall lie in `free_row`, or nothing is
                registered; nothing has moved then.
        """
        self._require_rows(layer_id, rows if free_row is None else (*rows, free_row))
        if len(set(rows)) < len(rows) or free_row in rows:
            wanted = "different rows, and none of them the free one"
            raise BankError(f"layer_id {layer_id}", got=f"rows {list(rows)}, free row {free_row}", wanted=wanted)
        self._move(layer_id, list(_moves(rows, through=_OUTSIDE if free_row is None else free_row)))

    def evict(self) -> None:
        """Write all cold rows to the disk and let their pages go; the next read fetches them again.

        Raises:
            BankError: The disk failed.
        """
        for one in self.ranges:
            one.evict()

    def close(self) -> None:
        """Give all memory back; no tensor from here may be touched any more. Twice is harmless.

        Raises:
            BankError: A range cannot be unmapped; the others are.
        """
        self._is_closed = True
        self._tensors.clear()
        self._owners.clear()
        with contextlib.ExitStack() as stack:
            while self._ranges:
                stack.callback(self._ranges.pop()[1].close)

    def _range_of(self, layer_id: int, tensor: torch.Tensor) -> AddressRange:
        owner, found = self._owners.get(tensor.data_ptr(), (None, None))
        if found is None or owner != layer_id:
            raise BankError(f"layer_id {layer_id}", got="another tensor", wanted="one that was allocated for it")
        return found

    def _layer(self, layer_id: int) -> LayerRows:
        if self._is_closed:
            raise BankError("the banks are closed", do="load the model again")
        if not 0 <= layer_id < len(self._layers):
            raise BankError("layer_id of a row", got=str(layer_id), wanted=f"0..{len(self._layers) - 1}")
        return self._layers[layer_id]

    def _require_one_bank(self, layer_id: int) -> None:
        if self.memory.num_banks != 1:
            wanted = "allocate_parts(), and a kernel that is called for each part"
            raise BankError(f"layer_id {layer_id}, one tensor of all rows", got="a memory of two banks", wanted=wanted)

    def _registered(self, layer_id: int) -> tuple[_Registered, ...]:
        tensors = self._tensors.get(layer_id)
        if tensors is None:
            raise BankError(f"layer_id {layer_id}", got="no registered tensors", wanted="register() before rows move")
        return tensors

    def _require_shape(self, layer_id: int, shape: tuple[int, ...], *, dtype: torch.dtype) -> None:
        num_rows = self._layer(layer_id).num_rows
        alignment = self.memory.alignment
        if shape[:1] != (num_rows,) or not can_divide(shape, dtype=dtype, alignment=alignment):
            got = f"a tensor {tuple(shape)} of {dtype}"
            wanted = f"{num_rows} rows, each a multiple of {alignment} bytes"
            raise BankError(f"layer_id {layer_id}", got=got, wanted=wanted, layer_id=layer_id)

    def _views(self, parts: tuple[torch.Tensor, ...], *, layer_id: int, rows: LayerRows) -> _Registered:
        """Views of all that has rows."""
        sizes = (rows.num_rows,) if len(parts) == 1 else (rows.first_cold, rows.num_rows - rows.first_cold)
        if len(parts) != len(sizes):
            raise _wrong_tensor(parts[0], layer_id=layer_id, wanted="a tensor, or its hot and its cold rows")
        pairs = zip(parts, sizes, strict=True)
        views = [self._row_bytes_view(part, layer_id=layer_id, num_rows=size) for part, size in pairs]
        held = tuple(view for view in views if view.numel())
        if len({view.shape[1] for view in held}) > 1:
            raise _wrong_tensor(parts[1], layer_id=layer_id, wanted=f"rows as those of {tuple(parts[0].shape)}")
        return _Registered(parts=held)

    def _row_bytes_view(self, tensor: torch.Tensor, *, layer_id: int, num_rows: int) -> torch.Tensor:
        """A view of a part as [rows, row bytes], uint8."""
        is_whole = tensor.device.type == self.memory.device_type and tensor.is_contiguous()
        if not is_whole or not tensor.dim() or tensor.shape[0] != num_rows:
            wanted = f"{num_rows} rows that lie one behind the other in memory"
            raise _wrong_tensor(tensor, layer_id=layer_id, wanted=wanted)
        flat = tensor.data.flatten(1) if tensor.dim() > 1 else tensor.data[:, None]
        return flat.view(torch.uint8)

    def _require_rows(self, layer_id: int, rows: Sequence[int]) -> None:
        num_rows = self._layer(layer_id).num_rows
        for row in rows:
            if not 0 <= row < num_rows:
                raise BankError(f"layer_id {layer_id}", got=f"row {row}", wanted=f"0..{num_rows - 1}")

    def _move(self, layer_id: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows, (source, target) one after the other, tensor by tensor."""
        needs_outside = any(_OUTSIDE in move for move in moves)
        for tensor in self._registered(layer_id):
            size, where = tensor.row_bytes, tensor.where()
            outside = torch.empty(size if needs_outside else 0, dtype=torch.uint8, device=tensor.parts[0].device)
            rows = {row for move in moves for row in move} - {_OUTSIDE}
            address_of = {row: where.address_of(row) for row in rows} | {_OUTSIDE: outside.data_ptr()}
            addresses = [(address_of[target], address_of[source]) for source, target in moves]
            self.memory.copy(addresses, num_bytes=size)


def _moves(rows: Sequence[int], *, through: int) -> Iterator[tuple[int, int]]:
    """Copies (source, target) that bring row i to rows[i], in an order that overwrites nothing still needed.

    First the chains, from the end that nothing leaves; what remains are cycles, opened by one copy to `through`. A row
    that nothing shall lie in is the start of a chain, so it is free for `through` by then.
    """
    source_of = {target: source for source, target in enumerate(rows) if source != target}
    for end in [target for target in rows if target >= len(rows)]:
        target = end
        while target in source_of:
            source = source_of.pop(target)
            yield source, target
            target = source
    while source_of:
        first = next(iter(source_of))
        yield first, through
        target = first
        while (source := source_of.pop(target)) != first:
            yield source, target
            target = source
        yield through, target


def _by_span(registered: Sequence[_Registered]) -> dict[tuple[int, int], torch.Tensor]:
    """Every part by its first byte and the one behind its last."""
    parts = [part for one in registered for part in one.parts]
    return {(part.data_ptr(), part.data_ptr() + part.nbytes): part for part in parts}


def _wrong_tensor(tensor: torch.Tensor, *, layer_id: int, wanted: str) -> BankError:
    got = f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
    return BankError(f"layer_id {layer_id}", got=got, wanted=wanted, layer_id=layer_id)
