"""The exact kernel: any order of computing, the stock module's order of adding.

Hot experts are computed first, while the cold ones are read, and those as they arrive; each expert's output is added to
the result in ascending expert id and in the stock module's dtype. Floating-point addition is not associative, so the
order of adding is what makes the result equal to the stock module's to the bit, wherever a row lies.

Shapes: T tokens, K top-k, D model dim, N = pairs of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = Mapping[str, torch.Tensor]
ExpertFunction = Callable[[Tensors, torch.Tensor], torch.Tensor]
"""One expert's mathematics: (tensors of its row, tokens [N, D]) -> outputs [N, D], unweighted."""

_MAX_PENDING_BYTES = 64 << 20
"""Outputs that may wait for their turn to be added; past it experts run in ascending order (long prefill)."""


class LayerBank(Protocol):
    """The rows of one layer, as the kernel sees them."""

    @property
    def first_cold(self) -> int:
        """The lowest cold row: those below it lie in fast memory, each at one place."""

    def tensors(self, row: int) -> Tensors:
        """The tensors of a row; waits until they are there. The same mapping always means the same addresses."""

    def ask(self, rows: Iterable[int]) -> None:
        """Start reading cold rows, without waiting. What an earlier call gave may be gone from here on."""

    def arrivals(self, rows: Iterable[int]) -> Iterator[int]:
        """The rows that were asked for, each once, in the order in which they arrive; waits for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMath:
    """What one layer's experts compute, as the engine reads it off the stock module."""

    function: ExpertFunction
    """One expert's mathematics."""
    num_experts: int
    """E; ids outside 0..E-1 are sentinels and contribute nothing."""
    accumulate: torch.dtype | None
    """Dtype in which the stock module adds the experts' outputs; None for that of the routing weights."""


def exact(
    hidden_states: torch.Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    row_ids: torch.Tensor,
    bank: LayerBank,
    math: ExpertMath,
) -> torch.Tensor:
    """One MoE layer's routed experts.

    Args:
        hidden_states: Tokens, [T, D].
        topk_ids: Expert ids, [T, K], integer.
        topk_weights: Router weights, [T, K].
        row_ids: Where those experts lie, [T, K], integer, from the route op.
        bank: The layer's rows.
        math: The layer's mathematics.

    Returns:
        Outputs, [T, D], of hidden_states' dtype.
    """
    pairs = _pairs_by_expert(topk_ids, row_ids=row_ids, num_experts=math.num_experts)
    accumulate = math.accumulate or topk_weights.dtype
    out_TD = torch.zeros_like(hidden_states, dtype=accumulate)
    pending: dict[int, torch.Tensor] = {}
    unadded = iter(pairs)
    following = next(unadded, None)
    num_bytes = topk_ids.numel() * hidden_states.shape[-1] * max(accumulate.itemsize, topk_weights.dtype.itemsize)
    for expert in _order(pairs, bank=bank, hot_first=num_bytes <= _MAX_PENDING_BYTES):
        mine = pairs[expert]
        output_ND = math.function(bank.tensors(mine.row), hidden_states[mine.tokens])
        pending[expert] = output_ND * topk_weights[mine.tokens, mine.places, None]
        while following in pending:
            out_TD.index_add_(0, pairs[following].tokens, pending.pop(following).to(accumulate))
            following = next(unadded, None)
    return out_TD.to(hidden_states.dtype)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One expert's routed pairs."""

    row: int
    """Where the expert lies."""
    tokens: torch.Tensor
    """Its tokens, [N], int64."""
    places: torch.Tensor
    """Their top-k places, [N], int64."""


def _order(pairs: Mapping[int, _Pairs], *, bank: LayerBank, hot_first: bool) -> Iterator[int]:
    """Ask for the cold rows at once, then hot experts and cold ones as they arrive.

    Where outputs must not pile up, all in ascending order instead.
    """
    cold = {mine.row: expert for expert, mine in pairs.items() if mine.row >= bank.first_cold}
    bank.ask(list(cold))
    if not hot_first:
        yield from pairs
        return
    yield from (expert for expert, mine in pairs.items() if mine.row not in cold)
    yield from (cold[row] for row in bank.arrivals(list(cold)))


def _pairs_by_expert(topk_ids: torch.Tensor, *, row_ids: torch.Tensor, num_experts: int) -> dict[int, _Pairs]:
    """The pairs of every expert that is asked for, ascending by expert; within one by place, then token.

    The order within an expert is the stock modules' own: a matrix product may round a row by where it stands.
    """
    num_tokens = topk_ids.shape[0]
    flat = topk_ids.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    first = counts.cumsum(0) - counts
    rows = row_ids.t().reshape(-1)[order[first]]
    pieces = order.split(counts.tolist())
    return {
        expert: _Pairs(row, piece % num_tokens, piece // num_tokens)
        for expert, row, piece in zip(experts.tolist(), rows.tolist(), pieces, strict=True)
        if 0 <= expert < num_experts
    }
