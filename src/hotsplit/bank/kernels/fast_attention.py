"""Attention of a few query tokens by the fast kernel's native code: every key and value is read once, where it lies.

Scores, the sum of their exponentials and the weighted values are float32, added by number of the key, in blocks whose
borders depend on nothing; the result is rounded once to the tokens' type. Heads that share keys are computed together, so
that nothing is repeated for them.

Shapes: B batch, H heads, G heads of keys and values, T query tokens, S keys, K numbers of a key, V of a value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from hotsplit.bank.kernels.fast_library import KINDS, Library, parallel_function
from hotsplit.bank.kernels.plain_calls import is_its_bytes, only_computes

MOST_QUERIES: Final = 16
"""Query tokens of all sequences together that are computed natively; more are torch's."""
_MOST_DIM: Final = 1024
"""Numbers of a key or value, as native/attention.h has it."""
_BLOCK: Final = 256
"""Keys of one block, the same."""
_MOST_PARTS: Final = 64 << 20
"""Bytes of what blocks give every query before it is put together."""
_LEAST_SHARED: Final = 128 << 10
"""Bytes of keys and values that are worth a second thread: waking one takes microseconds."""

_FEW_HEADS: Final = 16
"""That share keys: two such groups are tried, of more one."""

_KINDS: Final = {getattr(torch, name): kind for kind, name in enumerate(KINDS[:3])}
_NO_MASK: Final = -2
_BOOLEAN_MASK: Final = -1

_UNIT: Final = torch.finfo(torch.float32).eps / 2
_TINY: Final = torch.finfo(torch.float32).tiny
_EXPONENTIAL: Final = 8
"""Unit roundoffs of an exponential, relative to it; two of them lie behind every weight."""


class _Call(ctypes.Structure):
    """One call, as native/attention.h has it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "tokens", "keys", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("kind", "path", "mask_kind", "is_causal")),
        *((f"{name}_apart", ctypes.c_int64 * 3) for name in ("query", "key", "value", "mask")),
        ("scale", ctypes.c_double),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """What a call asks for."""

    query: torch.Tensor
    """[B, H, T, K]."""
    key: torch.Tensor
    """[B, G, S, K]."""
    value: torch.Tensor
    """[B, G, S, V]."""
    mask: torch.Tensor | None
    """[B or 1, H or 1, T or 1, S]: bool, whether a key is seen, or added to its score; None for all."""
    scale: float
    """Of the scores."""
    is_causal: bool
    """Whether token t sees the keys 0 to t only; then there is no mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What the native code is tried with before it serves."""

    group: int
    """Heads that share keys."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    dtype: torch.dtype
    """Of queries, keys and values."""


class NativeAttention:
    """Attention over keys and values of one shape and type.

    Args:
        library: The native code.
        path: Of the library's paths; None for the best.
    """

    def __init__(self, library: Library, *, path: str | None = None) -> None:
        self._library = library
        self._path = len(library.paths) - 1 if path is None else library.paths.index(path)

    def takes(self, call: Attention) -> bool:
        """Whether this call is one for the native code.

        Args:
            call: What is asked for.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        return (
            only_computes(query, key, value, mask)
            and _is_plain(query, like=query)
            and query.dtype in _KINDS
            and _is_plain(key, like=query)
            and _is_plain(value, like=query)
            and _fits(query.shape, key=key.shape, value=value.shape)
            and (mask is None or (not call.is_causal and _masks(mask, query=query, keys=key.shape[2])))
        )

    def __call__(self, call: Attention) -> torch.Tensor | None:
        """The attention of one call that takes() has.

        Args:
            call: What is asked for.

        Returns:
            [B, T, H, V], of the query's type; None where there is no memory for it.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        batch, heads, tokens, key_dim = query.shape
        _, key_heads, keys, value_dim = value.shape
        native = _Call(
            batch,
            heads,
            key_heads,
            tokens,
            keys,
            key_dim,
            value_dim,
            _KINDS[query.dtype],
            self._path,
            _NO_MASK if mask is None else _BOOLEAN_MASK if mask.dtype == torch.bool else _KINDS[mask.dtype],
            call.is_causal,
            query.stride()[:3],
            key.stride()[:3],
            value.stride()[:3],
            (0, 0, 0) if mask is None else _mask_apart(mask),
            call.scale,
        )
        out = torch.empty((batch, tokens, heads, value_dim), dtype=query.dtype, device="cpu")
        is_small = batch * key_heads * keys * (key_dim + value_dim) * query.itemsize < _LEAST_SHARED
        failed = self._library.attention(
            ctypes.byref(native),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            1 if is_small else torch.get_num_threads(),
            parallel_function(),
        )
        return None if failed else out

    def share_of_bound(self, form: Heads) -> float:
        """How much of what rounding explains the errors of random numbers take, against float64.

        Args:
            form: What is tried.

        Returns:
            The largest share: below 1 where the native code computes what it should, inf where it gives no number.
        """
        shares = []
        for trial in _trials(form):
            found, (truth, bound) = self(trial), attention_and_bound(trial)
            errors = torch.full_like(bound, float("inf")) if found is None else (found.double() - truth).abs() / bound
            shares.append(float(errors.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
        return max(shares)


def _trials(form: Heads) -> Iterator[Attention]:
    """One token over more than a block, some over two with a mask, and the first ones of a text."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shared = 2 if form.group <= _FEW_HEADS else 1
    for tokens, keys, is_causal in ((1, _BLOCK + 37, False), (2, 2 * _BLOCK + 5, False), (5, 5, True)):
        shapes = (
            (1, shared * form.group, tokens, form.key_dim),
            (1, shared, keys, form.key_dim),
            (1, shared, keys, form.value_dim),
        )
        query, key, value = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(form.dtype)
            for shape in shapes
        )
        places = torch.arange(keys, device="cpu")
        mask = (places + tokens - keys <= places[:tokens, None])[None, None] if 1 < tokens < keys else None
        scale = form.key_dim**-0.5
        yield Attention(query=query, key=key, value=value, mask=mask, scale=scale, is_causal=is_causal)


def attention_and_bound(call: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention gives, and how far from it the native code may be: to first order, and doubled for the rest.

    An error of a score is one of its weight, relative to it; so are those of both exponentials that make the weight, of
    their arguments, and of adding at most so many numbers as a block has, and then the blocks. They move the weighted
    values, and the sum that those are divided by.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1, for the error of a dot product.

    Args:
        call: What is asked for.

    Returns:
        Outputs and bounds, [B, T, H, V] each, float64.
    """
    query, key, value = (t.double() for t in (call.query, call.key, call.value))
    group, dtype = query.shape[1] // key.shape[1], call.query.dtype
    (tokens, key_dim), keys = query.shape[2:], key.shape[2]
    sizes = abs(call.scale) * _times(query.abs(), key.abs().mT)
    key_sizes = key.abs().sum(-1)[:, :, None].repeat_interleave(group, dim=1)
    lost = abs(call.scale) * _TINY * (query.abs().sum(-1, keepdim=True) + key_sizes + key_dim)
    scores = call.scale * _times(query, key.mT)
    if call.is_causal:
        later = torch.ones(tokens, keys, dtype=torch.bool, device="cpu").triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, float("-inf"))
    elif call.mask is not None:
        scores = scores + call.mask.double()
    below = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min) - scores
    weights = torch.exp(-below)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    adding = min(keys, _BLOCK) + -(-keys // _BLOCK) + 2
    # What is hidden has no weight at all; a score is rounded once more where a mask is added to it.
    of_scores = (key_dim + 3) * _UNIT * sizes + lost + _UNIT * scores.abs()
    relative = of_scores + _UNIT * (below + 2 * _EXPONENTIAL + adding)
    moved = torch.where(weights > 0, weights * relative, 0.0)
    output, magnitude = _times(weights, value), _times(weights, value.abs())
    unit, step = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = _times(moved, value.abs()) + magnitude * moved.sum(-1, keepdim=True) + (unit + 2 * _UNIT) * magnitude
    # Weights too small for a normal number count as zero, and so may products.
    value_sizes = value.abs().sum(-2, keepdim=True).repeat_interleave(group, dim=1)
    error = error + step + 4 * _TINY * (value_sizes + keys)
    return output.transpose(1, 2), 2 * error.transpose(1, 2)


def _times(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Products [B, H, T, Y] of rows [B, H, T, X] and what their heads share, [B, G, X, Y]."""
    batch, heads, tokens, width = rows.shape
    key_heads = shared.shape[1]
    return (rows.reshape(batch, key_heads, -1, width) @ shared).reshape(batch, heads, tokens, -1)


def _is_plain(values: torch.Tensor, *, like: torch.Tensor) -> bool:
    """Whether the native code finds a tensor's numbers by an address and strides."""
    return (
        type(values) is torch.Tensor
        and is_its_bytes(values)
        and values.dtype == like.dtype
        and values.ndim == 4
        and (values.stride(3) == 1 or values.shape[3] == 1)
    )


def _fits(query: torch.Size, *, key: torch.Size, value: torch.Size) -> bool:
    """Whether the shapes belong together, are few tokens, and leave room."""
    batch, heads, tokens, key_dim = query
    key_heads, keys, value_dim = value[1:]
    parts = -(-keys // _BLOCK) * batch * heads * tokens * (value_dim + 32) * 4
    return (
        0 < batch * tokens <= MOST_QUERIES
        and key == (batch, key_heads, keys, key_dim)
        and value[0] == batch
        and 0 < key_heads <= heads
        and heads % key_heads == 0
        and 0 < key_dim <= _MOST_DIM
        and 0 < value_dim <= _MOST_DIM
        and keys > 0
        and parts <= _MOST_PARTS
    )


def _masks(mask: torch.Tensor, *, query: torch.Tensor, keys: int) -> bool:
    """Whether a mask is one for every query and key, and lies as it is read."""
    batch, heads, tokens, _ = query.shape
    return (
        type(mask) is torch.Tensor
        and is_its_bytes(mask)
        and mask.ndim == 4
        and mask.dtype in (torch.bool, query.dtype)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and mask.shape[2] in (1, tokens)
        and mask.shape[3] == keys
        and (mask.stride(3) == 1 or keys == 1)
    )


def _mask_apart(mask: torch.Tensor) -> tuple[int, ...]:
    """Strides of sequence, head and token; 0 where all share one."""
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
