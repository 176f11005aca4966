"""Native linear layers: within their derived bound on every path, and the same bits whoever computes them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_bound import linear_and_bound
from hotsplit.bank.kernels.fast_linear import MOST_ROWS, NativeLinear

LIBRARY = fast_library.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")
PATHS = LIBRARY.paths if LIBRARY else ()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parts(*, tokens, outputs, inputs, dtype):
    generator = torch.Generator().manual_seed(outputs * 151 + inputs)
    shapes = ((tokens, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(
    tokens=st.integers(1, MOST_ROWS),
    outputs=st.integers(1, 200),
    inputs=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_results_are_within_the_bound(path, tokens, outputs, inputs, dtype, has_bias):
    x, weight, bias = parts(tokens=tokens, outputs=outputs, inputs=inputs, dtype=dtype)
    bias = bias if has_bias else None
    native = NativeLinear(LIBRARY, outputs=outputs, inputs=inputs, dtype=dtype, path=path)
    assert native.takes(x, weight=weight, bias=bias)
    truth, bound = linear_and_bound(
        x.double(), weight=weight.double(), bias=None if bias is None else bias.double(), dtype=dtype
    )
    found = native(x, weight=weight, bias=bias)
    assert found.dtype == dtype
    assert ((found.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(
    tokens=st.integers(1, MOST_ROWS),
    outputs=st.integers(1, 200),
    inputs=st.integers(1, 150),
    weights=st.sampled_from((torch.bfloat16, torch.float16)),
)
def test_tokens_of_float32_meet_weights_as_they_are_stored(path, tokens, outputs, inputs, weights):
    x, _, _ = parts(tokens=tokens, outputs=outputs, inputs=inputs, dtype=torch.float32)
    _, weight, _ = parts(tokens=tokens, outputs=outputs, inputs=inputs, dtype=weights)
    sizes = {"outputs": outputs, "inputs": inputs}
    native = NativeLinear(LIBRARY, **sizes, dtype=weights, token_dtype=torch.float32, path=path)
    assert native.takes(x, weight=weight, bias=None)
    assert not native.takes(x.to(weights), weight=weight, bias=None)
    assert not native.takes(x, weight=weight.float(), bias=None)
    truth, bound = linear_and_bound(x.double(), weight=weight.double(), bias=None, dtype=torch.float32)
    found = native(x, weight=weight, bias=None)
    assert torch.float32 == found.dtype
    assert ((found.double() - truth).abs() <= bound).all()
    widened = NativeLinear(LIBRARY, **sizes, dtype=torch.float32, path=path)
    assert torch.equal(widened(x, weight=weight.float(), bias=None), found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_threads_nor_on_other_tokens_nor_on_addresses(path, dtype):
    x, weight, bias = parts(tokens=MOST_ROWS, outputs=331, inputs=77, dtype=dtype)
    native = NativeLinear(LIBRARY, outputs=331, inputs=77, dtype=dtype, path=path)
    together = native(x, weight=weight, bias=bias)
    moved = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight).copy_(weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        others = [native(x, weight=moved, bias=bias)]
    finally:
        torch.set_num_threads(threads)
    others += [torch.cat([native(part, weight=weight, bias=bias) for part in x.split(n)]) for n in (1, 3, 5)]
    assert [True] * 4 == [torch.equal(together, other) for other in others]


def test_a_wrong_weight_is_beyond_the_bound():
    _, weight, bias = parts(tokens=1, outputs=96, inputs=64, dtype=torch.bfloat16)
    native = NativeLinear(LIBRARY, outputs=96, inputs=64, dtype=torch.bfloat16)
    assert native.share_of_bound(weight=weight, bias=bias) < 1
    truth, bound = linear_and_bound(torch.ones(1, 64).double(), weight=weight.double(), bias=None, dtype=torch.bfloat16)
    weight[5, 7] += 8
    found = native(torch.ones(1, 64, dtype=torch.bfloat16), weight=weight, bias=None)
    assert [5] == ((found.double() - truth).abs() > bound)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(number):
    x, weight, _ = parts(tokens=2, outputs=70, inputs=40, dtype=torch.bfloat16)
    x[1, 3] = number
    found = NativeLinear(LIBRARY, outputs=70, inputs=40, dtype=torch.bfloat16)(x, weight=weight, bias=None)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


def test_other_calls_are_torchs():
    x, weight, _ = parts(tokens=MOST_ROWS + 1, outputs=8, inputs=32, dtype=torch.float32)
    native = NativeLinear(LIBRARY, outputs=8, inputs=32, dtype=torch.float32)
    assert native.takes(x[:MOST_ROWS], weight=weight, bias=None)
    calls = [(x, weight), (x[:0], weight), (x[:1].double(), weight), (x[:1], weight.bfloat16())]
    calls += [(x[:1].clone().requires_grad_(), weight), (x[:1], weight.T.contiguous().T)]
    assert [False] * 6 == [native.takes(tokens, weight=its, bias=None) for tokens, its in calls]
    with torch.autocast("cpu"):
        assert not native.takes(x[:1], weight=weight, bias=None)


class Elsewhere(torch.Tensor):
    """Numbers that may lie where no address says."""


def test_values_that_have_changed_since_the_proof_are_torchs():
    x, weight, bias = parts(tokens=1, outputs=8, inputs=32, dtype=torch.bfloat16)
    native = NativeLinear(LIBRARY, outputs=8, inputs=32, dtype=torch.bfloat16)
    assert native.takes(x, weight=weight, bias=bias)
    calls = [
        (x, weight[:5], None),  # fewer rows than the native code would read
        (x, weight, bias.float()),
        (x, weight, bias[:1].expand(8)),
        (x, weight, bias[:5]),
        (x, weight, bias.clone().requires_grad_()),
        (x, weight.as_subclass(Elsewhere), bias),
        (x.as_subclass(Elsewhere), weight, bias),
    ]
    assert [False] * 7 == [native.takes(tokens, weight=its, bias=other) for tokens, its, other in calls]


def test_a_forked_process_computes_alone_where_it_would_wait_for_threads_for_ever():
    x, weight, bias = parts(tokens=1, outputs=1024, inputs=64, dtype=torch.bfloat16)
    native, threads = NativeLinear(LIBRARY, outputs=1024, inputs=64, dtype=torch.bfloat16), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = native(x, weight=weight, bias=bias)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whoever counts the time of tests may have taken it
            signal.alarm(20)
            os._exit(0 if torch.equal(expected, native(x, weight=weight, bias=bias)) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)
