"""What a bank asks of an engine: where the bytes of every expert lie, and what they mean.

First border of the flow: the engine implements ExpertSource, bank reads it and nothing else of the engine.

A row is one expert's record: all its tensors (weights, scales, biases) behind one another, so that they move together.

    row of one expert     | gate_up_proj [2F, D] | down_proj [D, F] | gate_up_proj.scale | ...
    RowTensor.offset      0                      ^                  ^
    Span                  one run of bytes of a checkpoint file and where it goes in the row; a tensor may need
                          several (gate and up lie apart in the file and side by side in the row)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

ROW_ALIGN = 64
"""Bytes of a cache line; rows start on one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTensor:
    """One tensor of an expert's row."""

    name: str
    """What the engine calls it: "gate_up_proj", "down_proj", "gate_up_proj.scale"."""
    offset: int
    """First byte in the row. Modulo ROW_ALIGN it is what the stock engine's own tensor has: some matrix products round
    differently with the address of the weight."""
    dtype: torch.dtype
    """As stored, not as computed with: block-FP8 stays FP8."""
    shape: tuple[int, ...]
    """Of one expert."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The record of one expert of a layer; every expert of the layer has the same."""

    tensors: tuple[RowTensor, ...]
    """In row order, without overlap."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one row, padded so that the next row starts aligned."""
        last = self.tensors[-1]
        return align(last.offset + last.num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A run of bytes of a checkpoint file that belongs to a row."""

    file: int
    """Index into ExpertSource.files."""
    offset: int
    """First byte in the file."""
    num_bytes: int
    """Length."""
    row_offset: int
    """Where in the row it goes."""


class ExpertSource(Protocol):
    """The routed experts of one model on one rank, as an engine finds them."""

    @property
    def files(self) -> Sequence[Path]:
        """The checkpoint's files."""

    @property
    def layouts(self) -> Sequence[RowLayout]:
        """Row layout per MoE layer, L of them."""

    @property
    def num_experts(self) -> int:
        """Routed experts per layer, E."""

    def spans(self, layer_id: int, expert: int) -> Sequence[Span]:
        """The bytes of one expert, in row order.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
        """


def align(num_bytes: int, to: int = ROW_ALIGN) -> int:
    """The next multiple.

    Args:
        num_bytes: Bytes.
        to: Alignment, bytes.

    >>> align(65)
    128
    """
    return -(-num_bytes // to) * to
