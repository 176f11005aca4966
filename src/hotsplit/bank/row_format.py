"""How the expert-row kernels want one expert: which tensors, of which shapes and types, and what is done with them.

Between an engine, which knows what its checkpoint's rows mean, and device_banks.py, which knows where rows lie:

    stored row (source.py) -> convert -> the tensors of one expert, by field of ExpertRows -> its row of each tensor [R, ...]

A tensor is divided into fast and slow rows where its rows allow it and it is worth a range of its own; what is smaller
than a hundredth of an expert (most factors and biases) lies in fast memory for all experts, and moves with its row.

    >>> shapes = {"up": (64, 128), "down": (128, 32), "up_bias": (64,)}
    >>> tensors = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
    >>> form = RowFormat(tensors=tensors, options={"activation": "silu"}, convert=dict)
    >>> form.divided, form.divided_bytes, form.fixed_bytes
    (('up', 'down'), 24576, 128)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hotsplit.bank.cuda_ranges import ALIGNMENT
from hotsplit.bank.kernels.reference import ExpertRows
from hotsplit.bank.row_memory import can_divide
from hotsplit.bank.source import ExpertSource

Tensors = Mapping[str, torch.Tensor]

_LEAST_SHARE: Final = 0.01
"""Of an expert's bytes: a tensor below it is not worth pages in two memories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """The experts of one layer, as the kernels compute with them."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """By field of ExpertRows: shape and type of one expert's tensor."""
    options: Mapping[str, Any]
    """The other fields of ExpertRows."""
    convert: Callable[[Tensors], Tensors]
    """From a stored row's tensors, by the engine's names, to these; on the CPU, one expert at a time."""

    @property
    def divided(self) -> tuple[str, ...]:
        """Tensors whose rows lie in two memories."""
        return tuple(name for name in self.tensors if self._is_divided(name))

    @property
    def divided_bytes(self) -> int:
        """Bytes of one expert that are fast or slow as it is hot or cold."""
        return sum(self._num_bytes(name) for name in self.divided)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one row that stay fast whatever is hot."""
        return self.row_bytes - self.divided_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(map(self._num_bytes, self.tensors))

    def rows(self, tensors: Mapping[str, torch.Tensor], *, first_cold: int) -> ExpertRows:
        """What the kernels take.

        Args:
            tensors: By field, [rows, ...] each.
            first_cold: The lowest cold row among them.

        Raises:
            BankError: No kernel here computes with such rows.
        """
        given: dict[str, Any] = {**tensors, **self.options}
        return ExpertRows(first_cold=first_cold, **given)

    def _is_divided(self, name: str) -> bool:
        shape, dtype = self.tensors[name]
        is_worth_it = self._num_bytes(name) >= _LEAST_SHARE * self.row_bytes
        return is_worth_it and can_divide((1, *shape), dtype=dtype, alignment=ALIGNMENT)

    def _num_bytes(self, name: str) -> int:
        shape, dtype = self.tensors[name]
        return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class FormedExperts:
    """The experts of a model, and how the kernels want them."""

    source: ExpertSource
    """Where they lie."""
    forms: Sequence[RowFormat]
    """Of the layers, [L]."""


def by_bank(tensor: torch.Tensor, *, first_cold: int, num_banks: int) -> tuple[torch.Tensor, ...]:
    """A whole tensor in the parts that one of two banks would have.

    Args:
        tensor: [R, ...].
        first_cold: Rows of the first part.
        num_banks: 1 or 2.
    """
    return (tensor,) if num_banks == 1 else (tensor[:first_cold], tensor[first_cold:])


def workspace_bytes(form: RowFormat, *, top_k: int, itemsize: int) -> int:
    """What the kernels take for one token while they run, in bytes.

    Args:
        form: Of the layer.
        top_k: Experts per token.
        itemsize: Of a token's element, bytes.
    """
    hidden_dim, inner_dim = form.tensors["down"][0]
    return top_k * (4 * hidden_dim + itemsize * inner_dim)


def row_bytes_of(forms: Sequence[RowFormat]) -> list[int]:
    """Bytes of one expert per layer, [L].

    Args:
        forms: Of all layers.
    """
    return [form.row_bytes for form in forms]
