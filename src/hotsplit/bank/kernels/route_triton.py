"""The route op on a GPU: one launch per layer that remaps, counts and stamps, and the small writes between steps.

    begin_step        between steps      which step is counted from now on
    publish           between steps      row_map[expert] = row, values inside the launch itself
    route_and_count   in every layer     topk_ids -> row ids, counters and stamps

Nothing here waits for the device or reads from it, and no shape depends on what lies there: every launch may be
captured in a graph. What differs from step to step (ids, padding, maps, the step and its phase) is read from memory when
the graph is replayed. The specification is reference.py.

Counters are sums of integers, so the order in which programs run does not show. Of all programs of a step exactly one
finds another number in an expert's stamp as it writes this step's: that one counts the expert as touched.

Shapes: E experts, F fixed ids behind them, T tokens, K top-k, N = T * K pairs, P phases, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from hotsplit.bank.kernels.reference import LayerCounters

# mypy: disable-error-code="untyped-decorator"
# (Triton ships no types; what its decorator makes of a function is called by its own rules.)

PAIRS_PER_PROGRAM = 256
_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. There are no floats here; said aloud, because Triton warns where nothing is said."""
MASK_BLOCK = 1024
"""Entries of the padding mask that are looked at together; the first real token is nearly always in the first block."""
PUBLISH_SIZES = (8, 128)
"""Entries that one publish launch may carry: few swaps end between two steps, and all of an update's fit into the
larger one (1 KiB of a launch's 4 KiB of arguments)."""
_ALIVE = (1 << 62) | 1
"""Bits of every packed entry. Triton compiles a kernel anew for an element of a tuple that is 1, a multiple of 16, or of
another width, whatever it is told not to specialise; with these bits no entry is any of them."""


@triton.jit
def _first_real_token(
    padding_ptr: tl.tensor, padding_stride: tl.tensor, num_tokens: tl.tensor, MASK_BLOCK: tl.constexpr
) -> tl.tensor:
    """The first token that is no padding; num_tokens where there is none."""
    first = num_tokens
    start = 0
    while (first == num_tokens) & (start < num_tokens):
        token = start + tl.arange(0, MASK_BLOCK)
        padding = tl.load(padding_ptr + token * padding_stride, mask=token < num_tokens, other=1)
        first = tl.min(tl.where(padding == 0, token, num_tokens), 0)
        start += MASK_BLOCK
    return first


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_experts", "num_mapped", "first_cold",
        "ids_stride_T", "ids_stride_K", "padding_stride", "pairs_stride", "totals_stride",
    ],
    do_not_specialize_on_alignment=[
        "ids_ptr", "rows_ptr", "map_ptr", "padding_ptr", "pairs_ptr", "totals_ptr", "stamps_ptr", "step_ptr",
    ],
)  # fmt: skip
def _route_kernel(  # noqa: PLR0913, PLR0917 - a launch passes arguments by position
    ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    map_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    stamps_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    num_mapped: tl.tensor,
    first_cold: tl.tensor,
    ids_stride_T: tl.tensor,
    ids_stride_K: tl.tensor,
    padding_stride: tl.tensor,
    pairs_stride: tl.tensor,
    totals_stride: tl.tensor,
    TOP_K: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    REDIRECTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
) -> None:
    """BLOCK pairs: their rows, and what they add to the counters. Grid: pairs in blocks."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = pair // TOP_K
    place = pair % TOP_K
    is_pair = token < num_tokens
    is_real = is_pair
    source = token
    if HAS_PADDING:
        is_real = is_pair & (tl.load(padding_ptr + token * padding_stride, mask=is_pair, other=1) == 0)
        if REDIRECTS:
            first = _first_real_token(padding_ptr, padding_stride, num_tokens, MASK_BLOCK)
            own = tl.load(ids_ptr + token.to(tl.int64) * ids_stride_T + place * ids_stride_K, mask=is_pair, other=0)
            source = tl.where(is_real | (own < 0), token, first)
    has_source = is_pair & (source < num_tokens)
    expert = tl.load(ids_ptr + source.to(tl.int64) * ids_stride_T + place * ids_stride_K, mask=has_source, other=0)
    # Looked at before it is an index: -1 and other sentinels stay what they are. Where no token is real, 0 stays 0.
    is_mapped = has_source & (expert >= 0) & (expert < num_mapped)
    row = tl.load(map_ptr + expert, mask=is_mapped, other=0).to(expert.dtype)
    row = tl.where(is_mapped, row, expert)
    tl.store(rows_ptr + pair, row, mask=is_pair)

    step = tl.load(step_ptr)
    phase = tl.load(step_ptr + 1)
    if phase >= 0:
        is_counted = is_real & (expert >= 0) & (expert < num_experts)
        tl.atomic_add(
            pairs_ptr + phase * pairs_stride + expert, is_counted.to(tl.int64), mask=is_counted, sem="relaxed"
        )
        before = tl.atomic_xchg(stamps_ptr + expert, step + tl.zeros_like(pair), mask=is_counted, sem="relaxed")
        is_hot = row < first_cold
        is_new = is_counted & (before != step)
        # The order of reference.TOTALS, as one atomic of four lanes.
        column = tl.arange(0, 4)
        sums = tl.where(column == 0, tl.sum((is_counted & is_hot).to(tl.int32), 0), 0)
        sums = tl.where(column == 1, tl.sum((is_real & (place == 0)).to(tl.int32), 0), sums)
        sums = tl.where(column == 2, tl.sum((is_new & is_hot).to(tl.int32), 0), sums)
        sums = tl.where(column == 3, tl.sum((is_new & (is_hot == 0)).to(tl.int32), 0), sums)
        tl.atomic_add(totals_ptr + phase * totals_stride + column, sums.to(tl.int64), mask=sums > 0, sem="relaxed")


def route_and_count(
    topk_ids: torch.Tensor,
    *,
    row_map: torch.Tensor,
    is_padding: torch.Tensor | None,
    counters: LayerCounters,
    first_cold: int,
    redirect_padding: bool = True,
) -> torch.Tensor:
    """Replace expert ids by row numbers and count the pairs at once: reference.route_and_count in one launch.

    Args:
        topk_ids: The router's choice, [T, K], int32 or int64. Ids 0..E-1 are mapped and counted, E..E+F-1 (fixed rows)
            mapped alone; any other id is a sentinel and stays as it is.
        row_map: Row of every id, [E + F], int32 or int64, contiguous.
        is_padding: Tokens that nobody asked for, at least [T], bool; None for none. They are never counted.
        counters: Written to.
        first_cold: The layer's lowest cold row.
        redirect_padding: Send padding to the first real token's rows, or to row 0 where there is none.

    Returns:
        Row ids, [T, K], of topk_ids' dtype.
    """
    row_ids = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)
    num_tokens, top_k = topk_ids.shape
    if not topk_ids.numel():
        return row_ids
    _route_kernel[(triton.cdiv(topk_ids.numel(), PAIRS_PER_PROGRAM),)](
        topk_ids,
        row_ids,
        row_map,
        # Never read where there is none; a pointer all the same, so that a mask changes no signature.
        counters.step if is_padding is None else is_padding.view(torch.uint8),
        counters.pairs,
        counters.totals,
        counters.stamps,
        counters.step,
        num_tokens,
        counters.stamps.numel(),
        row_map.numel(),
        first_cold,
        topk_ids.stride(0),
        topk_ids.stride(1),
        0 if is_padding is None else is_padding.stride(0),
        counters.pairs.stride(0),
        counters.totals.stride(0),
        TOP_K=top_k,
        HAS_PADDING=is_padding is not None,
        REDIRECTS=redirect_padding and is_padding is not None,
        BLOCK=PAIRS_PER_PROGRAM,
        MASK_BLOCK=MASK_BLOCK,
        num_warps=4,
        **_OPTIONS,
    )
    return row_ids


@triton.jit(do_not_specialize=["number", "phase"])
def _begin_step_kernel(step_ptr: tl.tensor, number: tl.int64, phase: tl.int64) -> None:
    tl.store(step_ptr, number)
    tl.store(step_ptr + 1, phase)


def begin_step(step: torch.Tensor, *, number: int, phase: int) -> None:
    """Say which step the route op counts from now on, in stream order.

    Args:
        step: LayerCounters.step, [2], int64.
        number: Of the step.
        phase: Index of its phase; -1 counts nothing.
    """
    _begin_step_kernel[(1,)](step, number, phase, num_warps=1, **_OPTIONS)


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "second_ptr"])
def _publish_kernel(first_ptr: tl.tensor, second_ptr: tl.tensor, entries: tl.tuple, SIZE: tl.constexpr) -> None:
    """All entries, one behind the other, so that the last of two for one place holds. Grid: 1."""
    for i in tl.static_range(SIZE):
        place = (entries[i] >> 32) & 0x3FFFFFFF
        row = (entries[i] >> 1) & 0x7FFFFFFF
        tl.store(first_ptr + place, row.to(first_ptr.dtype.element_ty))
        tl.store(second_ptr + place, row.to(second_ptr.dtype.element_ty))


def publish(row_maps: Sequence[torch.Tensor], *, entries: Sequence[tuple[int, int, int]]) -> None:
    """Change entries of the row map, in stream order: steps launched before see none of them, later ones see all.

    The entries travel in the launch, by value: no staging buffer that a later publish could overwrite too early. Launch
    it once with any entry as it is before serving: a kernel is loaded when it first runs, and that takes long.

    Args:
        row_maps: One map, or the same map as int32 and as int64, [L, at least E] each, contiguous.
        entries: Layer, expert, row; the last of two for the same expert holds.
    """
    first, second = row_maps[0], row_maps[-1]
    packed = [_ALIVE | (layer_id * first.shape[1] + expert) << 32 | row << 1 for layer_id, expert, row in entries]
    for values in _launches(packed):
        _publish_kernel[(1,)](first, second, values, SIZE=len(values), num_warps=1, **_OPTIONS)


def _launches(packed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The entries in tuples of the allowed sizes; the last entry, written again, fills the last of them up."""
    for start in range(0, len(packed), PUBLISH_SIZES[-1]):
        values = packed[start : start + PUBLISH_SIZES[-1]]
        size = next(size for size in PUBLISH_SIZES if size >= len(values))
        yield (*values, *[values[-1]] * (size - len(values)))
