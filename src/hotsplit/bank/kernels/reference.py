"""The plain torch twins of the bank's kernels: they are the specification.

route_and_count and publish are the twins of route_triton.py, experts that of rows_triton.py: same names, same
signatures, same results.

Shapes: E experts, F fixed ids behind them, T tokens, K top-k, P phases, L layers, R rows, D model dim, I expert hidden
dim, O and C outputs and inputs of one projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hotsplit.errors import BankError


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

    A pair without a row stays without one: an engine that leaves its padding out itself has saved that work already.

    Args:
        row_ids: Rows of all tokens, [T, K], integer; a negative one is a sentinel.
        is_padding: Tokens that nobody asked for, [T], bool.

    Returns:
        Row ids, [T, K], of the same dtype.

    >>> redirect(torch.tensor([[3, 4], [-1, -1], [1, 2]]), is_padding=torch.tensor([True, True, False])).tolist()
    [[1, 2], [-1, -1], [1, 2]]
    """
    real = (~is_padding).nonzero()
    stand_in_K = row_ids[real[0, 0]] if real.numel() else torch.zeros_like(row_ids[0])
    return torch.where(is_padding[:, None] & (row_ids >= 0), stand_in_K, row_ids)


TOTALS = ("hits", "tokens", "touched_hot", "touched_cold")
"""The columns of LayerCounters.totals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounters:
    """Where the routing of one layer is counted, while it is routed: tensors on its device that only grow."""

    pairs: torch.Tensor
    """Routed pairs per phase and expert, [P, E], int64; experts lie side by side."""
    totals: torch.Tensor
    """Per phase: pairs whose row was hot, tokens, distinct hot and distinct cold experts summed over steps, [P, 4],
    int64; as TOTALS names them."""
    stamps: torch.Tensor
    """The last step in which an expert was routed to, [E], int64."""
    step: torch.Tensor
    """The step that runs and the index of its phase, [2], int64, one tensor for all layers. It is read when a step runs,
    so a captured graph counts the step that replays it. Every counted step has a number of its own, other than the
    stamps' first value; phase -1 counts nothing (warm-up, capture)."""


def route_and_count(
    topk_ids: torch.Tensor,
    *,
    row_map: torch.Tensor,
    is_padding: torch.Tensor | None,
    counters: LayerCounters,
    first_cold: int,
    redirect_padding: bool = True,
) -> torch.Tensor:
    """Replace expert ids by row numbers and count the pairs at once.

    Args:
        topk_ids: The router's choice, [T, K], int32 or int64. Ids 0..E-1 are mapped and counted, E..E+F-1 (fixed rows)
            mapped alone; any other id is a sentinel and stays as it is.
        row_map: Row of every id, [E + F], integer.
        is_padding: Tokens that nobody asked for, at least [T], bool; None for none. They are never counted.
        counters: Written to.
        first_cold: The layer's lowest cold row.
        redirect_padding: Send padding to the first real token's rows, or to row 0 where there is none; its sentinels
            stay.

    Returns:
        Row ids, [T, K], of topk_ids' dtype.

    >>> zeros = torch.zeros(2, dtype=torch.int64)
    >>> counters = LayerCounters(pairs=zeros.new_zeros(1, 2), totals=zeros.new_zeros(1, 4), stamps=zeros, step=zeros + 7)
    >>> counters.step[1] = 0  # step 7, the first phase
    >>> ids, row_map = torch.tensor([[1, 2], [1, -1]]), torch.tensor([5, 0, 1])  # two experts and a fixed row
    >>> route_and_count(ids, row_map=row_map, is_padding=None, counters=counters, first_cold=2).tolist()
    [[0, 1], [0, -1]]
    >>> counters.pairs.tolist(), counters.stamps.tolist(), dict(zip(TOTALS, counters.totals[0].tolist()))
    ([[0, 2]], [0, 7], {'hits': 2, 'tokens': 2, 'touched_hot': 1, 'touched_cold': 0})
    """
    num_tokens, num_experts = len(topk_ids), counters.stamps.numel()
    mask_T = None if is_padding is None else is_padding[:num_tokens]
    rows_TK = route(topk_ids, row_map=row_map, is_padding=mask_T, redirect_padding=redirect_padding)
    step, phase = counters.step.tolist()
    if phase >= 0:
        ids_TK = topk_ids if mask_T is None else topk_ids[~mask_T]
        experts_N = ids_TK[(ids_TK >= 0) & (ids_TK < num_experts)].long()
        pairs_E = torch.bincount(experts_N, minlength=num_experts)
        is_hot_E = row_map[:num_experts] < first_cold
        touched_E = (pairs_E > 0) & (counters.stamps != step)
        counters.pairs[phase] += pairs_E
        counters.totals[phase] += torch.stack(
            [pairs_E[is_hot_E].sum(), pairs_E.new_tensor(len(ids_TK))]
            + [(touched_E & is_hot).sum() for is_hot in (is_hot_E, ~is_hot_E)]
        )
        counters.stamps[pairs_E > 0] = step
    return rows_TK.to(topk_ids.dtype)


def begin_step(step: torch.Tensor, *, number: int, phase: int) -> None:
    """Say which step the route op counts from now on, in stream order.

    Args:
        step: LayerCounters.step, [2], int64.
        number: Of the step.
        phase: Index of its phase; -1 counts nothing.
    """
    step[0], step[1] = number, phase


def publish(row_maps: Sequence[torch.Tensor], *, entries: Sequence[tuple[int, int, int]]) -> None:
    """Change entries of the row map, in stream order: steps launched before see none of them, later ones see all.

    Args:
        row_maps: One map, or the same map as int32 and as int64, [L, at least E] each, contiguous.
        entries: Layer, expert, row; the last of two for the same expert holds.

    >>> row_map = torch.tensor([[0, 1], [2, 3]])
    >>> publish([row_map], entries=[(1, 0, 7)])
    >>> row_map.tolist()
    [[0, 1], [7, 3]]
    """
    for layer_id, expert, row in entries:
        for row_map in row_maps:
            row_map[layer_id, expert] = row


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda inner: torch.nn.functional.gelu(inner, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda inner: torch.relu(inner).square(),
}
"""What a row may apply to its inner values (to the gate's, where it has one)."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of tokens and of weights without factors; with factors the tokens have one of the first two."""
FP8 = torch.float8_e4m3fn
"""Dtype of block-scaled weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The experts of one layer: every tensor is one tensor over all rows, wherever they lie.

    Raises:
        BankError: Tensors that do not belong together, or that no kernel here computes with.
    """

    up: torch.Tensor
    """First projection, [R, 2 * I, D] with the gate's outputs before the others, or [R, I, D] without a gate."""
    down: torch.Tensor
    """Second projection, [R, D, I]."""
    up_scale: torch.Tensor | None = None
    """Factors of up where it is float8_e4m3fn, [R, outputs / block, ceil(D / block)], float32."""
    down_scale: torch.Tensor | None = None
    """Factors of down, [R, ceil(D / block), ceil(I / block)], float32."""
    up_bias: torch.Tensor | None = None
    """Added to up's outputs, [R, 2 * I] or [R, I]."""
    down_bias: torch.Tensor | None = None
    """Added to down's outputs, before the routing weight, [R, D]."""
    activation: str = "silu"
    """One of ACTIVATIONS."""
    has_gate: bool = True
    """Whether the inner values are activation(gate) * (other + gate_shift), not activation(all)."""
    gate_limit: float | None = None
    """Where set, the gate is at most this and the others lie between it and its negative, before all else."""
    gate_slope: float = 1.0
    """Of "silu" alone: x * sigmoid(gate_slope * x)."""
    gate_shift: float = 0.0
    """Added to the others."""
    scale_block: int = 128
    """Outputs and inputs that share a factor, a power of two >= 16: blocks are square."""
    first_cold: int = 0
    """The lowest cold row: cold rows are begun with. It decides no result."""

    def __post_init__(self) -> None:
        parts = 1 + self.has_gate
        num_rows, hidden_dim, inner_dim = self.down.shape
        block = self.scale_block
        wanted = {
            "up": (num_rows, parts * inner_dim, hidden_dim),
            "up_scale": (num_rows, parts * inner_dim // block, -(-hidden_dim // block)),
            "down_scale": (num_rows, -(-hidden_dim // block), -(-inner_dim // block)),
            "up_bias": (num_rows, parts * inner_dim),
            "down_bias": (num_rows, hidden_dim),
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise BankError(f"{name} of expert rows", got=f"shape {tuple(tensor.shape)}", wanted=str(shape))
        _require_computable(self)

    @property
    def is_scaled(self) -> bool:
        """Whether the weights are float8 with a factor per block."""
        return self.up_scale is not None


def _require_computable(rows: ExpertRows) -> None:
    """Dtypes, activation and layout."""
    dtypes = {rows.up.dtype, rows.down.dtype}
    is_whole = rows.is_scaled == (rows.down_scale is not None)
    if not is_whole or len(dtypes) > 1 or not dtypes <= ({FP8} if rows.is_scaled else set(_FLOATS)):
        got = " and ".join(sorted(map(str, dtypes))) + (" with" if rows.is_scaled else " without") + " factors of up"
        raise BankError("weights of expert rows", got=got, wanted=f"{FP8} with factors, or one of {_FLOATS} without")
    for name in ("up_scale", "down_scale"):
        scale = getattr(rows, name)
        if scale is not None and scale.dtype != torch.float32:
            raise BankError(f"{name} of expert rows", got=str(scale.dtype), wanted=str(torch.float32))
    if rows.scale_block < 16 or rows.scale_block & (rows.scale_block - 1):
        raise BankError("block of scaled expert rows", got=str(rows.scale_block), wanted="a power of two >= 16")
    if rows.is_scaled and rows.down.shape[2] % rows.scale_block:
        wanted = f"a multiple of the block of {rows.scale_block}"
        raise BankError("inner dim of scaled expert rows", got=str(rows.down.shape[2]), wanted=wanted)
    _require_activation(rows)
    for name in ("up", "down", "up_scale", "down_scale", "up_bias", "down_bias"):
        tensor = getattr(rows, name)
        if tensor is not None and not tensor.is_contiguous():
            raise BankError(f"{name} of expert rows", got="a strided view", wanted="rows one behind the other")


def _require_activation(rows: ExpertRows) -> None:
    """A known activation, and a gate's options only where there is what they act on."""
    if rows.activation not in ACTIVATIONS:
        wanted = f"one of {', '.join(ACTIVATIONS)}"
        raise BankError("activation of expert rows", got=rows.activation, wanted=wanted)
    if rows.gate_slope != 1 and rows.activation != "silu":
        raise BankError("slope of expert rows", got=f"{rows.gate_slope} with {rows.activation}", wanted="1, or silu")
    if not rows.has_gate and (rows.gate_limit is not None or rows.gate_slope != 1 or rows.gate_shift):
        raise BankError("limit, slope and shift of a gate", got="rows without a gate", wanted="none of them")
    if rows.gate_limit is not None and not rows.gate_limit > 0:
        raise BankError("limit of a gate", got=str(rows.gate_limit), wanted="more than 0, or None")


def experts(
    hidden_states: torch.Tensor, *, row_ids: torch.Tensor, topk_weights: torch.Tensor, rows: ExpertRows
) -> torch.Tensor:
    """The routed experts of one layer: products and sums in float32, inner values and results in the tokens' dtype.

    Where a row lies decides no bit: pairs keep their order within a row, and a token's outputs are added in the order
    of its top-k places.

    Args:
        hidden_states: Tokens, [T, D], of the weights' dtype, or bfloat16 or float16 where those are float8.
        row_ids: Rows from the route op, [T, K], int32 or int64; one outside 0..R-1 contributes nothing.
        topk_weights: Routing weights, [T, K], floating point.
        rows: The layer's experts.

    Returns:
        Outputs, [T, D], of hidden_states' dtype.

    Raises:
        BankError: The tokens' dtype does not go with that of the weights.
    """
    require_tokens(hidden_states, rows=rows)
    out_TKD = torch.zeros(*row_ids.shape, hidden_states.shape[1], dtype=torch.float32, device=hidden_states.device)
    for row in row_ids.unique().tolist():
        if not 0 <= row < len(rows.down):
            continue
        tokens_N, places_N = (row_ids == row).nonzero(as_tuple=True)
        inner_NI = _inner(hidden_states[tokens_N].float(), rows=rows, row=row).to(hidden_states.dtype)
        output_ND = inner_NI.float() @ _weight(rows.down, scale=rows.down_scale, row=row, block=rows.scale_block).T
        if rows.down_bias is not None:
            output_ND = output_ND + rows.down_bias[row].float()
        out_TKD[tokens_N, places_N] = output_ND * topk_weights[tokens_N, places_N, None].float()
    total_TD = torch.zeros_like(out_TKD[:, 0])
    for place in range(row_ids.shape[1]):
        total_TD += out_TKD[:, place]
    return total_TD.to(hidden_states.dtype)


def require_tokens(hidden_states: torch.Tensor, *, rows: ExpertRows) -> None:
    """Refuse tokens that the rows cannot compute with.

    Args:
        hidden_states: Tokens, [T, D].
        rows: The layer's experts.

    Raises:
        BankError: Of another dtype than theirs, or neither bfloat16 nor float16 for float8.
    """
    wanted = _FLOATS[:2] if rows.is_scaled else (rows.up.dtype,)
    if hidden_states.dtype not in wanted:
        raise BankError("tokens for expert rows", got=str(hidden_states.dtype), wanted=" or ".join(map(str, wanted)))


def _inner(tokens_ND: torch.Tensor, *, rows: ExpertRows, row: int) -> torch.Tensor:
    """The values between the projections, [N, I], float32."""
    inner = tokens_ND @ _weight(rows.up, scale=rows.up_scale, row=row, block=rows.scale_block).T
    if rows.up_bias is not None:
        inner = inner + rows.up_bias[row].float()
    return activated(inner, rows=rows)


class Inner(Protocol):
    """What an expert computes between its projections; these fields of ExpertRows, which say what they mean."""

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS."""

    @property
    def has_gate(self) -> bool:
        """Whether there is one."""

    @property
    def gate_limit(self) -> float | None:
        """Of gate and others."""

    @property
    def gate_slope(self) -> float:
        """Of silu."""

    @property
    def gate_shift(self) -> float:
        """Of the others."""


def activated(products: torch.Tensor, *, rows: Inner) -> torch.Tensor:
    """What lies between the projections, in the type of the products.

    Args:
        products: The first projection's outputs, bias added, [N, 2 * I] or [N, I].
        rows: Activation and gate.

    Returns:
        Inner values, [N, I].
    """
    activation = ACTIVATIONS[rows.activation]
    if not rows.has_gate:
        return activation(products)
    gate, other = products.chunk(2, dim=-1)
    if rows.gate_limit is not None:
        gate, other = gate.clamp(max=rows.gate_limit), other.clamp(min=-rows.gate_limit, max=rows.gate_limit)
    gate = activation(gate) if rows.gate_slope == 1 else gate * torch.sigmoid(rows.gate_slope * gate)
    return gate * (other + rows.gate_shift)


def _weight(weight: torch.Tensor, *, scale: torch.Tensor | None, row: int, block: int) -> torch.Tensor:
    """One row's weight, [O, C], float32."""
    weight_OC = weight[row].float()
    if scale is None:
        return weight_OC
    num_outputs, num_inputs = weight_OC.shape
    scale_OC = scale[row].repeat_interleave(block, dim=0).repeat_interleave(block, dim=1)
    return weight_OC * scale_OC[:num_outputs, :num_inputs]
