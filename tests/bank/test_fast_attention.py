"""Native attention: within its derived bound on every path, and the same bits whoever computes it, beside whatever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_attention import (
    MOST_QUERIES,
    Attention,
    Heads,
    NativeAttention,
    attention_and_bound,
)

LIBRARY = fast_library.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")
PATHS = LIBRARY.paths if LIBRARY else ()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def some_call(*, tokens=1, keys=300, dtype=torch.bfloat16, batch=1, key_heads=2, group=4, dims=(64, 64), seed=0):
    generator = torch.Generator().manual_seed(seed)
    key_dim, value_dim = dims
    shapes = (
        (batch, key_heads * group, tokens, key_dim),
        (batch, key_heads, keys, key_dim),
        (batch, key_heads, keys, value_dim),
    )
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return Attention(query=query, key=key, value=value, mask=None, scale=key_dim**-0.5, is_causal=False)


def seen(call):
    """What token t of a text sees that ends with the last of them, [1, 1, T, S]."""
    tokens, keys = call.query.shape[2], call.key.shape[2]
    return (torch.arange(keys) <= torch.arange(tokens)[:, None] + keys - tokens)[None, None]


def masked(call, kind, *, seed=0):
    """The call with a mask of some kind; every query sees something."""
    if kind == "none":
        return call
    if kind == "causal":
        keys = call.query.shape[2]
        return replace(call, key=call.key[:, :, :keys], value=call.value[:, :, :keys], is_causal=True)
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, _ = call.query.shape
    shape = (batch, heads if kind == "of heads" else 1, tokens, call.key.shape[2])
    chosen = torch.rand(shape, generator=generator) < 0.5
    chosen[..., :1] = True
    if kind == "added":
        return replace(call, mask=torch.randn(shape, generator=generator).to(call.query.dtype))
    if kind == "infinite":
        return replace(call, mask=torch.zeros(shape, dtype=call.query.dtype).masked_fill(~chosen, float("-inf")))
    return replace(call, mask=chosen)


def share(call, *, found):
    truth, bound = attention_and_bound(call)
    return float(((found.double() - truth).abs() / bound).nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 8),
    batch=st.integers(1, 2),
    keys=st.integers(8, 600),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dims=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["none", "causal", "of tokens", "of heads", "added", "infinite"]),
    loud=st.sampled_from([1.0, 8.0]),
)
def test_results_are_within_the_bound(path, dims, kind, loud, **shape):
    call = masked(some_call(dims=dims, **shape), kind)
    call = replace(call, query=call.query * loud)  # the largest score takes all
    native = NativeAttention(LIBRARY, path=path)
    assert native.takes(call)
    found = native(call)
    assert found.dtype == call.query.dtype
    assert (call.query.shape[0], call.query.shape[2], call.query.shape[1], dims[1]) == found.shape
    assert found.is_contiguous()
    assert share(call, found=found) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_bits_depend_neither_on_threads_nor_on_neighbours_nor_on_addresses(path, dtype):
    call = some_call(tokens=8, keys=1100, batch=2, dtype=dtype, dims=(72, 80))
    call = replace(call, mask=seen(call))
    native, threads = NativeAttention(LIBRARY, path=path), torch.get_num_threads()
    together = native(call)
    try:
        torch.set_num_threads(2)
        others = [native(call) for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    moved = torch.empty(call.key.numel() + 1, dtype=dtype)[1:].view_as(call.key).copy_(call.key)
    apart = call.value.transpose(1, 2).contiguous().transpose(1, 2)
    others.append(native(replace(call, key=moved, value=apart)))
    assert all(torch.equal(together, other) for other in others)
    for b in range(2):
        for t in range(8):  # a step of its own, which has only the keys until then
            keys = 1100 - 8 + t + 1
            one = replace(
                call,
                query=call.query[b : b + 1, :, t : t + 1],
                key=call.key[b : b + 1, :, :keys],
                value=call.value[b : b + 1, :, :keys],
                mask=None,
            )
            assert torch.equal(together[b : b + 1, t : t + 1], native(one))
    heads = replace(call, query=call.query[:, 4:5], key=call.key[:, 1:], value=call.value[:, 1:])
    assert torch.equal(together[:, :, 4:5], native(heads))


def test_a_boolean_mask_an_infinite_one_and_causality_hide_alike():
    call = some_call(tokens=6, keys=6)
    native = NativeAttention(LIBRARY)
    hidden = torch.zeros(1, 1, 6, 6, dtype=torch.bfloat16).masked_fill(~seen(call), float("-inf"))
    found = [native(replace(call, mask=seen(call))), native(replace(call, mask=hidden))]
    assert [True] * 2 == [torch.equal(native(replace(call, is_causal=True)), other) for other in found]


@pytest.mark.parametrize("path", PATHS)
def test_wrong_results_are_beyond_the_bound(path):
    call, native = some_call(), NativeAttention(LIBRARY, path=path)
    shorter = replace(call, key=call.key[:, :, :-1], value=call.value[:, :, :-1])
    swapped = replace(call, key=call.key.roll(1, dims=2))
    other = replace(call, key=call.key.roll(1, dims=1), value=call.value.roll(1, dims=1))
    wrong = [replace(call, scale=call.scale * 1.1), shorter, swapped, other]
    assert share(call, found=native(call)) < 1
    assert all(share(call, found=native(one)) > 1 for one in wrong)


def test_the_proof_at_load_fails_where_the_code_is_wrong(monkeypatch):
    form = Heads(group=4, key_dim=48, value_dim=32, dtype=torch.bfloat16)
    native = NativeAttention(LIBRARY)
    assert native.share_of_bound(form) < 1
    real = NativeAttention.__call__
    monkeypatch.setattr(NativeAttention, "__call__", lambda self, call: real(self, replace(call, scale=call.scale * 2)))
    assert native.share_of_bound(form) > 1
    monkeypatch.setattr(NativeAttention, "__call__", lambda self, call: None)
    assert native.share_of_bound(form) == float("inf")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_gives_what_torch_gives(path, dtype):
    call = some_call(tokens=3, keys=270, dtype=dtype)
    mask = seen(call).clone()
    mask[:, :, 1] = False
    call = replace(call, mask=mask)
    stock = torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=mask, scale=call.scale, enable_gqa=True
    )
    found = NativeAttention(LIBRARY, path=path)(call)
    assert torch.equal(torch.zeros_like(found[:, 1]), found[:, 1])
    assert torch.equal(torch.zeros_like(stock[:, :, 1]), stock[:, :, 1])
    assert (found[:, [0, 2]] != 0).any()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_number_stays_none_and_touches_nobody_else(path, number):
    call = some_call(tokens=2, keys=300)
    call.query[0, 3, 1, 5] = number
    found = NativeAttention(LIBRARY, path=path)(replace(call, mask=seen(call)))
    assert found[0, 1, 3].isnan().all()
    found[0, 1, 3] = 0
    assert found.isfinite().all()


class Elsewhere(torch.Tensor):
    """Numbers that may lie where no address says."""


def test_other_calls_are_torchs():
    call = some_call(tokens=2)
    native = NativeAttention(LIBRARY)
    key, query, value = call.key, call.query, call.value
    others = [
        replace(call, query=query[:, :, :1].expand(-1, -1, MOST_QUERIES + 1, -1)),
        replace(call, query=query[:, :, :0]),
        replace(call, query=query[:, :7]),
        replace(call, query=query[..., :-1]),
        replace(call, query=query.double(), key=key.double(), value=value.double()),
        replace(call, query=query.float()),
        replace(call, query=query[0]),
        replace(call, query=query.as_subclass(Elsewhere)),
        replace(call, query=query.clone().requires_grad_()),
        replace(call, key=key[:, :, :-1]),
        replace(call, key=key[:, :, :0], value=value[:, :, :0]),
        replace(call, key=key.mT.contiguous().mT),
        replace(call, value=value.expand(2, -1, -1, -1)),
        replace(call, mask=seen(call)[0]),
        replace(call, mask=seen(call)[..., :-1]),
        replace(call, mask=seen(call).expand(3, -1, -1, -1)),
        replace(call, mask=seen(call).float()),
        replace(call, mask=seen(call).to(torch.uint8)),
        replace(call, mask=seen(call), is_causal=True),
        replace(call, mask=seen(call)[..., :1].expand(-1, -1, -1, 300)),
    ]
    assert native.takes(call)
    assert native.takes(replace(call, mask=seen(call)))
    assert [False] * len(others) == [native.takes(other) for other in others]
    with torch.autocast("cpu"):
        assert not native.takes(call)


def test_more_keys_than_there_is_memory_for_are_torchs():
    call = some_call(keys=4)
    long = replace(
        call, key=call.key[:, :, :1].expand(-1, -1, 8 << 20, -1), value=call.value[:, :, :1].expand(-1, -1, 8 << 20, -1)
    )
    assert NativeAttention(LIBRARY).takes(call)
    assert not NativeAttention(LIBRARY).takes(long)
