"""The routed experts of one layer on one GPU, straight from their rows: hot ones in its memory, cold ones over the link.

    row ids -> group -> project (up, activation) -> project (down, routing weight) -> combine -> outputs

A weight is one tensor [R, outputs, inputs] and a row is read at base + row * stride, in 16-byte pieces; the kernels do
not know which memory it lies in. Every piece of an expert's weight is read once per block of its tokens, and the programs
of cold rows start first, so that the slow link is busy from the beginning.

Where a row lies decides no bit: the pairs of an expert keep their order whatever its row number, a program computes with
one expert alone, and a token's outputs are added in the order of its top-k places, without atomics. How many tokens
come together does decide bits, as in every matrix product: it chooses the tiles.

Factors of float8 weights are applied in float32 to the products of their block. The tokens are never quantised, so the
result is closer to the weights than that of kernels which multiply float8 by float8. The specification is reference.py.

Shapes: T tokens, K top-k, P = T * K pairs, G groups (pairs of one row), R rows, D model dim, I expert hidden dim. Of one
projection: M tokens and N outputs of a tile, C inputs. Outputs of a gate and the others alternate within a tile, so
that both of a pair lie in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hotsplit.bank.kernels.reference import ExpertRows, require_tokens

# mypy: disable-error-code="untyped-decorator"
# (Triton ships no types; what its decorator makes of a function is called by its own rules.)

GEMV_TOKENS = 1
"""Up to so many tokens each pair is computed alone: no two pairs of one token share an expert."""
COMBINE_BLOCK = 1024
"""Outputs of one token that are added by one program."""
_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. Said aloud: the default changes between versions of Triton, and with it the last bits."""
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter keeps bfloat16 as 16-bit integers: tl.dot multiplies the bit patterns, and a conversion to it cuts
off instead of rounding. There, and only there, operands are widened first and values rounded by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How one projection is cut."""

    block_m: int
    """Pairs of a tile; 1 for the kernel that takes pairs one by one."""
    block_n: int
    """Outputs of a tile."""
    block_k: int
    """Inputs of a tile."""
    num_warps: int
    """Of a program."""
    num_stages: int
    """Tiles under way at once: with 64 KiB in flight per multiprocessor a link of 50 GB/s is full."""


def tiles(num_tokens: int, *, itemsize: int, scale_block: int) -> Tiles:
    """The tiles for a number of tokens.

    Args:
        num_tokens: T.
        itemsize: Of a weight, bytes.
        scale_block: Inputs that share a factor; 0 where there are none. A tile never straddles two of them.
    """
    limit = scale_block or 512
    if num_tokens <= GEMV_TOKENS:
        block_n = 32 if itemsize == 1 else 16
        return Tiles(block_m=1, block_n=block_n, block_k=min(512 // itemsize, limit), num_warps=4, num_stages=4)
    block_k = min(256 // max(itemsize, 2), limit)
    if num_tokens <= 16:
        return Tiles(block_m=16, block_n=128, block_k=block_k, num_warps=4, num_stages=3)
    if itemsize == 4:
        return Tiles(block_m=64, block_n=64, block_k=32, num_warps=8, num_stages=3)
    # With factors a tile keeps the products of a block apart from their sum, so it takes twice the registers.
    block_m, block_n = 64 if num_tokens <= 256 else 128, 64 if scale_block else 128
    return Tiles(block_m=block_m, block_n=block_n, block_k=min(block_k, 64), num_warps=8, num_stages=3)


@triton.jit
def _activate(values: tl.tensor, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr) -> tl.tensor:
    """reference.ACTIVATIONS, in float32; "none" for the second projection. Of silu alone the slope may be another than 1."""
    tl.static_assert(
        (ACTIVATION == "none") | (ACTIVATION == "silu") | (ACTIVATION == "gelu") | (ACTIVATION == "gelu_tanh")
        | (ACTIVATION == "relu") | (ACTIVATION == "relu2")
    )  # fmt: skip
    if ACTIVATION == "silu":
        values = values * tl.sigmoid(values if SLOPE == 1.0 else values * SLOPE)
    elif ACTIVATION == "gelu":
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 * sigmoid(2 * u), with u = sqrt(2 / pi) * (x + 0.044715 * x^3).
        values = values * tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    elif ACTIVATION == "relu":
        values = tl.maximum(values, 0.0)
    elif ACTIVATION == "relu2":
        values = tl.maximum(values, 0.0)
        values = values * values
    return values


@triton.jit
def _outputs_of(
    block: tl.tensor, NUM_RESULTS: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The outputs of a tile, [N]: gate 0, other 0, gate 1, other 1, ... or 0, 1, 2, ...; past the end the last ones."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_GATE:
        return tl.minimum(n // 2, NUM_RESULTS - 1) + (n % 2) * NUM_RESULTS
    else:
        return tl.minimum(n, NUM_RESULTS - 1)


@triton.jit
def _finish(  # noqa: PLR0913, PLR0917 - a kernel passes arguments by position
    products: tl.tensor,
    bias_ptrs: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """From products [M, N] to results, [M, N / 2] with a gate. A limit of 0 is none."""
    if HAS_BIAS:
        products += tl.load(bias_ptrs).to(tl.float32)[None, :]
    if HAS_GATE:
        gate, other = tl.split(tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2)))
        if LIMIT > 0:
            # By comparison and not by tl.minimum: NaN must stay NaN.
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            other = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
        gate = _activate(gate, ACTIVATION, SLOPE)
        if SHIFT != 0.0:
            other += SHIFT
        return gate * other
    else:
        return _activate(products, ACTIVATION, SLOPE)


@triton.jit
def _rounded(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 as DTYPE, to the nearest, ties to even: as every GPU does it."""
    if _IS_INTERPRETED and DTYPE.is_bf16():
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _nth_pair(
    row_ids_ptr: tl.tensor,
    nth: tl.tensor,
    num_pairs: tl.tensor,
    num_rows: tl.tensor,
    first_cold: tl.tensor,
    SLOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The nth pair and its row, cold rows first; row -1 where the pair contributes nothing."""
    slot = tl.arange(0, SLOTS)
    row = tl.load(row_ids_ptr + slot, mask=slot < num_pairs, other=-1).to(tl.int32)
    is_row = (row >= 0) & (row < num_rows)
    key = slot + tl.where(is_row, tl.where(row < first_cold, SLOTS, 0), 2 * SLOTS)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    pair = tl.sum(tl.where(rank == nth, slot, 0), 0)
    return pair, tl.max(tl.where((rank == nth) & is_row, row, -1), 0)


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "first_cold", "scale_stride", "bias_stride"])
def _gemv_kernel(  # noqa: PLR0913, PLR0917 - a launch passes arguments by position
    x_ptr: tl.tensor,
    results_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    row_ids_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_rows: tl.tensor,
    first_cold: tl.tensor,
    row_stride: tl.tensor,
    scale_stride: tl.tensor,
    bias_stride: tl.tensor,
    PAIRS_PER_X: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_RESULTS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """N outputs of one pair. Grid: outputs in blocks, pairs."""
    block = tl.program_id(0)
    pair, row = _nth_pair(row_ids_ptr, tl.program_id(1), num_pairs, num_rows, first_cold, SLOTS)
    if row >= 0:
        row64 = row.to(tl.int64)
        output = _outputs_of(block, NUM_RESULTS, HAS_GATE, BLOCK_N)
        weight_ptrs = weight_ptr + row64 * row_stride + output * NUM_INPUTS
        scale_ptrs = scale_ptr + row64 * scale_stride
        if SCALE_BLOCK > 0:
            scale_ptrs += (output // SCALE_BLOCK) * ((NUM_INPUTS + SCALE_BLOCK - 1) // SCALE_BLOCK)
        x_row = x_ptr + (pair // PAIRS_PER_X) * NUM_INPUTS
        products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.range(0, NUM_INPUTS, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            if NUM_INPUTS % BLOCK_K == 0:
                weight = tl.load(weight_ptrs[:, None] + k[None, :])
                x = tl.load(x_row + k)
            else:
                weight = tl.load(weight_ptrs[:, None] + k[None, :], mask=k[None, :] < NUM_INPUTS, other=0.0)
                x = tl.load(x_row + k, mask=k < NUM_INPUTS, other=0.0)
            x = x.to(tl.float32)[None, :]
            if SCALE_BLOCK > 0:
                x = x * tl.load(scale_ptrs + start // SCALE_BLOCK)[:, None]
            products += weight.to(tl.float32) * x
        bias_ptrs = bias_ptr + row64 * bias_stride + output
        products = tl.sum(products, 1)[None, :]
        results = _finish(products, bias_ptrs, HAS_BIAS, HAS_GATE, ACTIVATION, LIMIT, SLOPE, SHIFT)
        RESULTS: tl.constexpr = BLOCK_N // 2 if HAS_GATE else BLOCK_N
        if factors_ptr is not None:
            results = results * tl.load(factors_ptr + pair).to(tl.float32)
        result = block * RESULTS + tl.arange(0, RESULTS)
        tl.store(
            results_ptr + pair * NUM_RESULTS + result[None, :],
            _rounded(results, results_ptr.dtype.element_ty),
            mask=result[None, :] < NUM_RESULTS,
        )


@triton.jit(do_not_specialize=["scale_stride", "bias_stride"])
def _grouped_kernel(  # noqa: PLR0913, PLR0917 - a launch passes arguments by position
    x_ptr: tl.tensor,
    results_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    group_rows_ptr: tl.tensor,
    num_inputs: tl.tensor,
    row_stride: tl.tensor,
    scale_stride: tl.tensor,
    bias_stride: tl.tensor,
    PAIRS_PER_X: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_RESULTS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """N outputs of all pairs of one row, M pairs at a time. Grid: outputs in blocks, groups."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    begin = tl.load(starts_ptr + group)
    end = tl.load(starts_ptr + group + 1)
    row = tl.load(group_rows_ptr + group).to(tl.int64)
    if (begin < end) & (row >= 0):
        output = _outputs_of(block, NUM_RESULTS, HAS_GATE, BLOCK_N)
        weight_ptrs = weight_ptr + row * row_stride + output * NUM_INPUTS
        scale_ptrs = scale_ptr + row * scale_stride
        if SCALE_BLOCK > 0:
            scale_ptrs += (output // SCALE_BLOCK) * ((NUM_INPUTS + SCALE_BLOCK - 1) // SCALE_BLOCK)
        bias_ptrs = bias_ptr + row * bias_stride + output
        RESULTS: tl.constexpr = BLOCK_N // 2 if HAS_GATE else BLOCK_N
        result = block * RESULTS + tl.arange(0, RESULTS)
        for first in range(begin, end, BLOCK_M):
            position = first + tl.arange(0, BLOCK_M)
            # Past the end the last pair is computed again and not stored: no mask in the way of wide loads.
            pair = tl.load(order_ptr + tl.minimum(position, end - 1))
            x_rows = x_ptr + (pair // PAIRS_PER_X) * NUM_INPUTS
            products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # NUM_INPUTS, but not known to the compiler: it would unroll the whole loop and run out of registers.
            for start in range(0, num_inputs, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                if NUM_INPUTS % BLOCK_K == 0:
                    weight = tl.load(weight_ptrs[:, None] + k[None, :])
                    x = tl.load(x_rows[:, None] + k[None, :])
                else:
                    weight = tl.load(weight_ptrs[:, None] + k[None, :], mask=k[None, :] < NUM_INPUTS, other=0.0)
                    x = tl.load(x_rows[:, None] + k[None, :], mask=k[None, :] < NUM_INPUTS, other=0.0)
                if _IS_INTERPRETED:
                    x = x.to(tl.float32)
                weight = tl.trans(weight.to(x.dtype))
                if SCALE_BLOCK > 0:
                    scale = tl.load(scale_ptrs + start // SCALE_BLOCK)
                    products += tl.dot(x, weight, input_precision="ieee") * scale[None, :]
                else:
                    products = tl.dot(x, weight, products, input_precision="ieee")
            results = _finish(products, bias_ptrs, HAS_BIAS, HAS_GATE, ACTIVATION, LIMIT, SLOPE, SHIFT)
            if factors_ptr is not None:
                results = results * tl.load(factors_ptr + pair).to(tl.float32)[:, None]
            tl.store(
                results_ptr + pair[:, None] * NUM_RESULTS + result[None, :],
                _rounded(results, results_ptr.dtype.element_ty),
                mask=(position[:, None] < end) & (result[None, :] < NUM_RESULTS),
            )


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(  # noqa: PLR0913, PLR0917 - a launch passes arguments by position
    results_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    TOP_K: tl.constexpr,
    HIDDEN_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK outputs of one token: the sum over its top-k places, in their order. Grid: tokens, outputs in blocks."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        row = tl.load(row_ids_ptr + pair)
        # What contributes nothing was never written.
        num_written = tl.where((row >= 0) & (row < num_rows), HIDDEN_DIM, 0)
        total += tl.load(results_ptr + pair * HIDDEN_DIM + d, mask=d < num_written, other=0.0)
    tl.store(out_ptr + token * HIDDEN_DIM + d, _rounded(total, out_ptr.dtype.element_ty), mask=d < HIDDEN_DIM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The pairs of one layer by row, cold rows first; all shapes follow from T, K and R alone."""

    order: torch.Tensor
    """Pairs by group, [P], int64; within a group in the order of tokens, then places."""
    starts: torch.Tensor
    """Where in `order` a group begins, [G + 1], int64; groups that do not exist are empty."""
    rows: torch.Tensor
    """Row of a group, [G], int64; -1 for the pairs that contribute nothing."""


def group(row_ids: torch.Tensor, *, num_rows: int, first_cold: int) -> Groups:
    """Bring the pairs of every row together, without a word from the device to the host.

    Args:
        row_ids: Rows, [T, K], integer; others than 0..R-1 belong to no group that is computed.
        num_rows: R.
        first_cold: The lowest cold row.

    >>> groups = group(torch.tensor([[0, 2], [2, -1]]), num_rows=3, first_cold=2)
    >>> groups.order.tolist(), groups.starts.tolist(), groups.rows.tolist()
    ([1, 2, 0, 3], [0, 2, 3, 4], [2, 0, -1])
    """
    rows_P = row_ids.reshape(-1).long()
    is_row_P = (rows_P >= 0) & (rows_P < num_rows)
    # Rows counted from the first cold one on, so that the hot ones come after the last.
    keys_P, order_P = torch.where(is_row_P, (rows_P - first_cold) % num_rows, num_rows).sort(stable=True)
    is_first_P = torch.ones_like(is_row_P)
    is_first_P[1:] = keys_P[1:] != keys_P[:-1]
    num_groups = min(len(rows_P), num_rows)
    wanted_G = torch.arange(num_groups + 1, device=row_ids.device)
    starts_G = torch.searchsorted(is_first_P.cumsum(0) - 1, wanted_G)
    keys_G = keys_P[starts_G[:-1].clamp(max=len(rows_P) - 1)]
    rows_G = torch.where(keys_G < num_rows, (keys_G + first_cold) % num_rows, -1)
    return Groups(order=order_P, starts=starts_G, rows=rows_G)


def experts(
    hidden_states: torch.Tensor, *, row_ids: torch.Tensor, topk_weights: torch.Tensor, rows: ExpertRows
) -> torch.Tensor:
    """The routed experts of one layer: reference.experts on a GPU.

    It takes T * K * (4 * D + I * itemsize) bytes for the time it runs, so a long prefill is better cut into pieces.

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
    x_TD, row_ids_TK, factors_TK = hidden_states.contiguous(), row_ids.contiguous(), topk_weights.contiguous()
    out_TD = torch.empty_like(x_TD)
    num_tokens, top_k = row_ids.shape
    num_rows, hidden_dim, inner_dim = rows.down.shape
    if not num_tokens:
        return out_TD
    cut = tiles(num_tokens, itemsize=rows.up.itemsize, scale_block=rows.scale_block if rows.is_scaled else 0)
    inner_PI = x_TD.new_empty(num_tokens * top_k, inner_dim)
    results_PD = x_TD.new_empty(num_tokens * top_k, hidden_dim, dtype=torch.float32)
    pairs = _pairs(row_ids_TK, rows=rows, one_by_one=cut.block_m == 1)
    up, down = _projections(rows, top_k=top_k)
    _launch(up, x_TD, inner_PI, factors=None, pairs=pairs, cut=cut)
    _launch(down, inner_PI, results_PD, factors=factors_TK, pairs=pairs, cut=cut)
    _combine_kernel[(num_tokens, triton.cdiv(hidden_dim, COMBINE_BLOCK))](
        results_PD,
        out_TD,
        row_ids_TK,
        num_rows,
        TOP_K=top_k,
        HIDDEN_DIM=hidden_dim,
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
        **_OPTIONS,
    )
    return out_TD


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pairs:
    """Which pairs a kernel computes."""

    arguments: tuple[torch.Tensor | int, ...]
    """Row ids, P, R and the first cold row for the kernel that takes them one by one; order, starts and rows for the
    other."""
    grid: int
    """Pairs or groups."""


def _pairs(row_ids: torch.Tensor, *, rows: ExpertRows, one_by_one: bool) -> _Pairs:
    num_rows, num_pairs = len(rows.down), row_ids.numel()
    if one_by_one:
        return _Pairs(arguments=(row_ids, num_pairs, num_rows, rows.first_cold), grid=num_pairs)
    groups = group(row_ids, num_rows=num_rows, first_cold=rows.first_cold)
    return _Pairs(arguments=(groups.order, groups.starts, groups.rows), grid=len(groups.rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Projection:
    """One of an expert's two products, and what is done with it."""

    tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    """Weight, factors, bias, each over all rows."""
    constants: dict[str, Any]
    """What the kernel is compiled for."""


def _projections(rows: ExpertRows, *, top_k: int) -> tuple[_Projection, _Projection]:
    """The first and the second projection."""
    _, hidden_dim, inner_dim = rows.down.shape
    scale_block = rows.scale_block if rows.is_scaled else 0
    up = {"PAIRS_PER_X": top_k, "NUM_INPUTS": hidden_dim, "NUM_RESULTS": inner_dim, "SCALE_BLOCK": scale_block}
    down = {"PAIRS_PER_X": 1, "NUM_INPUTS": inner_dim, "NUM_RESULTS": hidden_dim, "SCALE_BLOCK": scale_block}
    gate = {"LIMIT": rows.gate_limit or 0.0, "SLOPE": rows.gate_slope, "SHIFT": rows.gate_shift}
    linear = {"HAS_GATE": False, "ACTIVATION": "none", "LIMIT": 0.0, "SLOPE": 1.0, "SHIFT": 0.0}
    return (
        _Projection(
            tensors=(rows.up, rows.up_scale, rows.up_bias),
            constants=up | {"HAS_GATE": rows.has_gate, "ACTIVATION": rows.activation} | gate,
        ),
        _Projection(tensors=(rows.down, rows.down_scale, rows.down_bias), constants=down | linear),
    )


def _launch(
    projection: _Projection,
    x: torch.Tensor,
    results: torch.Tensor,
    *,
    factors: torch.Tensor | None,
    pairs: _Pairs,
    cut: Tiles,
) -> None:
    """Compute one projection, pair by pair or group by group."""
    weight, scale, bias = projection.tensors
    # A pointer in place of what is not there, never read.
    tensors = (x, results, weight, weight if scale is None else scale, weight if bias is None else bias, factors)
    strides = [0 if tensor is None else tensor.stride(0) for tensor in projection.tensors]
    constants = projection.constants | {"HAS_BIAS": bias is not None, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
    grid = (triton.cdiv(weight.shape[1], cut.block_n), pairs.grid)
    if cut.block_m == 1:
        kernel, bounds = _gemv_kernel, []
        constants |= {"SLOTS": triton.next_power_of_2(pairs.grid), "STAGES": cut.num_stages}
    else:
        kernel, bounds = _grouped_kernel, [weight.shape[2]]
        constants |= {"BLOCK_M": cut.block_m, "num_stages": cut.num_stages}
    kernel[grid](*tensors, *pairs.arguments, *bounds, *strides, **constants, **_OPTIONS, num_warps=cut.num_warps)
