"""What rows are made of: the border between row numbers (range_rows.py) and memory (ranges.py, cuda_ranges.py).

A memory makes tensors whose first rows are fast and whose others are slow, and moves bytes between any two of them.
Most put both kinds of rows at one address, so that a kernel sees one tensor. Where a device cannot, two_banks.py makes
two tensors, its banks; row numbers go on through both:

    >>> one = RowTensor(pieces=((0, 4096),), row_bytes=256)
    >>> two = RowTensor(pieces=((0, 4096), (3, 65536)), row_bytes=256)
    >>> [[tensor.address_of(row) for row in (2, 3, 4)] for tensor in (one, two)]
    [[4608, 4864, 5120], [4608, 65536, 65792]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hotsplit.errors import BankError


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTensor:
    """Where the rows of one tensor lie."""

    pieces: tuple[tuple[int, int], ...]
    """First row and its address, of every part that has rows, in the order of their rows."""
    row_bytes: int
    """Of one row; those of a part lie one behind the other."""

    def address_of(self, row: int) -> int:
        """Where a row begins.

        Args:
            row: 0 to R - 1.
        """
        first, address = next(piece for piece in reversed(self.pieces) if piece[0] <= row)
        return address + (row - first) * self.row_bytes


class AddressRange(Protocol):
    """The rows of one tensor in two memories, at addresses that do not change for as long as it is open."""

    @property
    def tensor(self) -> torch.Tensor:
        """All rows, [R, ...]; must not be touched after close(). A BankError where the parts lie apart."""

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The whole tensor alone, or rows [0, num_fast) and [num_fast, R) as two tensors, of which one may be empty."""

    @property
    def address(self) -> int:
        """Where the first row lies."""

    @property
    def fast_bytes(self) -> int:
        """Bytes of fast memory taken, whole pages."""

    @property
    def slow_bytes(self) -> int:
        """Bytes of slow memory taken, whole pages."""

    def evict(self) -> None:
        """Let cold rows go from RAM where a disk keeps them; nothing where none does."""

    def close(self) -> None:
        """Give the memory back; twice is harmless."""


class RowMemory(Protocol):
    """Where the ranges of one rank get their pages."""

    @property
    def alignment(self) -> int:
        """Bytes that a row must be a multiple of."""

    @property
    def device_type(self) -> str:
        """Of the tensors it makes ("cpu", "cuda")."""

    @property
    def num_banks(self) -> Literal[1, 2]:
        """Parts of its tensors: 1 where both memories lie at one address, 2 where a kernel must be called for each."""

    @property
    def copies_rows_alone(self) -> bool:
        """Whether no copy or fill may span both memories, so that whole tensors must be written row by row."""

    def make(self, shape: tuple[int, ...], *, dtype: torch.dtype, num_fast: int) -> AddressRange:
        """Make a range; its bytes are anything, as torch.empty's.

        Args:
            shape: [R, ...], of rows that are a multiple of `alignment`.
            dtype: Of its elements.
            num_fast: Rows in fast memory, 0 to R.

        Raises:
            BankError: Memory does not suffice; nothing is held then.
        """

    def copy(self, moves: Sequence[tuple[int, int]], *, num_bytes: int) -> None:
        """Copy bytes, one move after the other; they are done when it returns.

        Args:
            moves: Target and source address of each.
            num_bytes: Of every move; none of them spans two memories.

        Raises:
            BankError: A copy failed.
        """

    def require_placed(self, ranges: Sequence[AddressRange]) -> None:
        """Look where the rows really lie: what is effective, not what was asked for.

        Args:
            ranges: That this memory made.

        Raises:
            BankError: A row does not lie where it should.
        """


def bytes_per_row(shape: Sequence[int], *, dtype: torch.dtype) -> int:
    """Bytes of one row.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
    """
    return math.prod(shape[1:]) * dtype.itemsize


def can_divide(shape: Sequence[int], *, dtype: torch.dtype, alignment: int) -> bool:
    """Whether a tensor can have its rows in two memories: an aligned start and a page edge can both be kept.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
        alignment: Bytes, of the memory.
    """
    return min(shape, default=0) > 0 and not bytes_per_row(shape, dtype=dtype) % alignment


def require_layout(shape: Sequence[int], *, dtype: torch.dtype, num_fast: int, alignment: int) -> None:
    """Refuse what no range can be made for.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
        num_fast: Rows in fast memory.
        alignment: Bytes, of the memory.

    Raises:
        BankError: Rows of other sizes, or more fast rows than rows.
    """
    what = f"address range for a tensor {tuple(shape)} of {dtype}"
    if not can_divide(shape, dtype=dtype, alignment=alignment):
        wanted = f"rows, each a multiple of {alignment} bytes: start and page edge cannot both be kept with others"
        raise BankError(what, got=f"rows of {bytes_per_row(shape, dtype=dtype)} bytes", wanted=wanted)
    if not 0 <= num_fast <= shape[0]:
        raise BankError(what, got=f"{num_fast} rows in fast memory", wanted=f"0..{shape[0]}")


def closed_range() -> BankError:
    """The error of a range that is used after close()."""
    return BankError("address range", got="a closed one")
