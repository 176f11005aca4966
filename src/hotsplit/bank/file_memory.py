"""The CPU twin's memory: hot rows in anonymous memory, cold rows in pages of a bank file.

A RowMemory (row_memory.py) over ranges.py, which says how; residency.py looks where the rows really lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch

from hotsplit.bank.ranges import ALIGNMENT, BankFile, StitchedRange
from hotsplit.bank.residency import read_residency
from hotsplit.bank.row_memory import AddressRange
from hotsplit.errors import BankError
from hotsplit.units import gib


class FileMemory:
    """Anonymous memory and a bank file, as a RowMemory.

    Args:
        file: Keeps the cold rows; stays the caller's to close, after the ranges.
        huge_pages: Ask the kernel for huge pages behind hot rows.
    """

    alignment = ALIGNMENT
    device_type = "cpu"
    num_banks: Literal[1] = 1
    copies_rows_alone = False

    def __init__(self, file: BankFile, *, huge_pages: bool = True) -> None:
        self._file, self._huge_pages = file, huge_pages

    def make(self, shape: tuple[int, ...], *, dtype: torch.dtype, num_fast: int) -> StitchedRange:
        """Make a range, as RowMemory says.

        Args:
            shape: [R, ...].
            dtype: Of its elements.
            num_fast: Rows in memory.
        """
        return StitchedRange(shape=shape, dtype=dtype, num_fast=num_fast, file=self._file, huge_pages=self._huge_pages)

    def copy(self, moves: Sequence[tuple[int, int]], *, num_bytes: int) -> None:
        """Copy bytes, as RowMemory says.

        NOTE: by address, not with Tensor.copy_. It too lets other threads run meanwhile, but minds no inference mode and
        no autograd, in which engines make their tensors, and wakes no pool of compute threads for a side thread's sake.

        Args:
            moves: Target and source addresses.
            num_bytes: Of every move.
        """
        for target, source in moves:
            ctypes.memmove(target, source, num_bytes)

    def require_placed(self, ranges: Sequence[AddressRange]) -> None:
        """Look where the rows really lie, as RowMemory says.

        Args:
            ranges: That this memory made.

        Raises:
            BankError: A row does not lie where it should.
        """
        where = read_residency([one for one in ranges if isinstance(one, StitchedRange)])
        if where.misplaced_bytes:
            raise BankError(
                "where the rows lie",
                got=f"{gib(where.hot_other_bytes)} of hot rows outside of memory of their own and "
                f"{gib(where.cold_anonymous_bytes)} of cold rows in it",
                wanted="hot rows in memory, cold rows in the bank file",
                do="report this, with the output of `uname -a` and the file system of HOTSPLIT_BANK_DIR",
            )
