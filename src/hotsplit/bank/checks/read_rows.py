"""Reading rows and nothing else, which is what the rate of a memory is measured with: the twin of read_triton.py.

Shapes: R rows of W words each, N rows that are read, C pieces of a row.

    >>> rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    >>> sum_rows(rows, order=torch.tensor([2, 0])).tolist()
    [[38], [6]]
"""

from __future__ import annotations

from typing import Final

import torch

PIECE_WORDS: Final = 16 * 1024
"""Words of a row that one program reads: 64 KiB."""


def num_pieces(row_words: int) -> int:
    """Pieces of a row.

    Args:
        row_words: W.
    """
    return -(-row_words // PIECE_WORDS)


def sum_rows(rows: torch.Tensor, *, order: torch.Tensor) -> torch.Tensor:
    """Read rows and sum up their words, piece by piece.

    Args:
        rows: [R, W], int32, one row behind the other.
        order: Which to read, and in which order, [N], int64.

    Returns:
        Sums modulo 2**32, [N, C], int32.
    """
    row_words = rows.shape[1]
    padded_NW = torch.nn.functional.pad(rows[order], (0, num_pieces(row_words) * PIECE_WORDS - row_words))
    return padded_NW.view(len(order), -1, PIECE_WORDS).sum(2).to(torch.int32)
