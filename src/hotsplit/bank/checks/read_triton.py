"""Reading rows on a GPU, as fast as a kernel can: 16 bytes per thread and load, several loads under way at once.

One program reads 64 KiB of one row, so that rows lie in flight on every multiprocessor and their order is that of the
grid. It computes no more than a sum, which tells as well whether every byte was the right one. The twin is read_rows.py.

Shapes: R rows of W words each, N rows that are read, C pieces of a row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hotsplit.bank.checks.read_rows import PIECE_WORDS, num_pieces

# mypy: disable-error-code="untyped-decorator"
# (Triton ships no types; what its decorator makes of a function is called by its own rules.)

_BLOCK: Final = 4096
"""Words of one load: 16 KiB, eight times 16 bytes for each of 128 threads."""


@triton.jit
def _sum_kernel(
    rows_ptr: tl.tensor,
    order_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    row_words: tl.tensor,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One piece of one row. Grid: pieces, rows."""
    piece = tl.program_id(0)
    nth = tl.program_id(1)
    row = tl.load(order_ptr + nth).to(tl.int64)
    begin = piece * PIECE
    base = rows_ptr + row * row_words + begin
    total = tl.zeros((BLOCK,), tl.int32)
    for start in tl.static_range(0, PIECE, BLOCK):
        word = start + tl.arange(0, BLOCK)
        total += tl.load(base + word, mask=begin + word < row_words, other=0)
    tl.store(sums_ptr + nth.to(tl.int64) * tl.num_programs(0) + piece, tl.sum(total, 0))


def sum_rows(rows: torch.Tensor, *, order: torch.Tensor) -> torch.Tensor:
    """Read rows and sum up their words, piece by piece: read_rows.sum_rows in one launch.

    Args:
        rows: [R, W], int32, one row behind the other; W a multiple of 4, as rows of whole 16 bytes have it.
        order: Which to read, and in which order, [N], int64.

    Returns:
        Sums modulo 2**32, [N, C], int32.
    """
    pieces = num_pieces(rows.shape[1])
    sums_NC = torch.empty(len(order), pieces, dtype=torch.int32, device=rows.device)
    _sum_kernel[(pieces, len(order))](
        rows, order, sums_NC, rows.shape[1], PIECE=PIECE_WORDS, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return sums_NC
