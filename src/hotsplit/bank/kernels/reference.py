"""The plain torch twins of the bank's kernels: they are the specification.

Shapes: E experts, T tokens, K top-k.
"""

from __future__ import annotations

import torch


def route(
    topk_ids: torch.Tensor,
    *,
    row_map: torch.Tensor,
    is_padding: torch.Tensor | None = None,
    redirect_padding: bool = True,
) -> torch.Tensor:
    """Replace expert ids by row numbers.

    Args:
        topk_ids: The router's choice, [T, K], any integer dtype; an id outside 0..E-1 is a sentinel and stays as it is.
        row_map: Row of every expert, [E], integer.
        is_padding: Tokens that nobody asked for, [T], bool; None for none.
        redirect_padding: Send padding to a real token's experts, or to row 0 where there is none, so that it touches
            no row of its own. Off where padding must compute what the stock engine computes.

    Returns:
        Row ids, [T, K], of row_map's dtype.

    >>> row_map = torch.tensor([7, 8, 9])
    >>> route(torch.tensor([[0, 2], [1, -1]]), row_map=row_map).tolist()
    [[7, 9], [8, -1]]
    >>> route(torch.tensor([[0, 2], [1, 2]]), row_map=row_map, is_padding=torch.tensor([True, False])).tolist()
    [[8, 9], [8, 9]]
    """
    num_experts = row_map.numel()
    is_expert_TK = (topk_ids >= 0) & (topk_ids < num_experts)
    safe_TK = torch.where(is_expert_TK, topk_ids, 0).long()
    rows_TK = torch.where(is_expert_TK, row_map[safe_TK], topk_ids.to(row_map.dtype))
    if is_padding is None or not redirect_padding or not bool(is_padding.any()):
        return rows_TK
    return redirect(rows_TK, is_padding=is_padding)


def redirect(row_ids: torch.Tensor, *, is_padding: torch.Tensor) -> torch.Tensor:
    """Send padding to a real token's rows, or to row 0 where no token is real, so that it touches no row of its own.

    Args:
        row_ids: Rows of all tokens, [T, K], integer.
        is_padding: Tokens that nobody asked for, [T], bool.

    Returns:
        Row ids, [T, K], of the same dtype.

    >>> redirect(torch.tensor([[3, 4], [1, 2]]), is_padding=torch.tensor([True, False])).tolist()
    [[1, 2], [1, 2]]
    """
    real = (~is_padding).nonzero()
    stand_in_K = row_ids[real[0, 0]] if real.numel() else torch.zeros_like(row_ids[0])
    return torch.where(is_padding[:, None], stand_in_K, row_ids)
