"""Native norms: every output in its derived interval, on every path the same bits, whoever computes them."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_norm import VARIANTS, NativeNorm, NormForm, interval, is_inside, native_norm
from hotsplit.host.libc import checked

LIBRARY = fast_library.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")
PATHS = LIBRARY.paths if LIBRARY else ()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def form(width=64, *, dtype=torch.bfloat16, weight=None, variant="rounded first", epsilon=1e-6):
    return NormForm(width=width, dtype=dtype, weight_dtype=weight or dtype, variant=variant, epsilon=epsilon)


def parts(of, *, rows=5, scale=1.0):
    generator = torch.Generator().manual_seed(of.width * 31 + rows)
    x = scale * torch.randn(rows, of.width, generator=generator)
    return x.to(of.dtype), torch.randn(of.width, generator=generator).to(of.weight_dtype)


def stock(x, weight, *, of):
    """As the classes of transformers write it."""
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + of.epsilon)
    if of.variant == "rounded first":
        return weight * values.to(x.dtype)
    factor = weight.float() if of.variant == "rounded last" else 1.0 + weight.float()
    return (values * factor).to(x.dtype)


FORMS = st.builds(
    form,
    st.integers(1, 1300),
    dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(VARIANTS),
    epsilon=st.sampled_from([1e-5, 1e-6, 1e-12]),
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60)
@given(of=FORMS, rows=st.integers(1, 20), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_outputs_lie_in_their_interval_as_those_of_torch_do(path, of, rows, scale):
    x, weight = parts(of, rows=rows, scale=scale)
    low, high = interval(x, weight=weight, form=of)
    found = NativeNorm(LIBRARY, form=of, path=path)(x, weight=weight)
    assert (of.dtype, x.shape) == (found.dtype, found.shape)
    assert is_inside(found, low=low, high=high)
    assert is_inside(stock(x, weight, of=of), low=low, high=high)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 2048, 7168])
def test_an_interval_is_mostly_one_number(dtype, width):
    of = form(width, dtype=dtype)
    x, weight = parts(of, rows=16)
    low, high = interval(x, weight=weight, form=of)
    assert (low != high).float().mean() < 0.2
    assert (NativeNorm(LIBRARY, form=of)(x, weight=weight) != stock(x, weight, of=of)).float().mean() < 0.001


@settings(max_examples=60)
@given(of=FORMS, rows=st.integers(1, 20))
def test_bits_depend_on_no_path(of, rows):
    x, weight = parts(of, rows=rows)
    found = [NativeNorm(LIBRARY, form=of, path=path)(x, weight=weight) for path in PATHS]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_bits_depend_neither_on_threads_nor_on_other_rows_nor_on_addresses(path, dtype):
    of = form(330, dtype=dtype)
    x, weight = parts(of, rows=400)
    native, threads = NativeNorm(LIBRARY, form=of, path=path), torch.get_num_threads()
    together = native(x, weight=weight)
    moved = torch.empty(weight.numel() + 1, dtype=dtype)[1:].copy_(weight)
    try:
        torch.set_num_threads(2)
        others = [native(x, weight=moved)]
    finally:
        torch.set_num_threads(threads)
    others += [torch.cat([native(part, weight=weight) for part in x.split(n)]) for n in (1, 3, 16)]
    others.append(native(x.T.contiguous().T, weight=weight))
    assert [True] * 5 == [torch.equal(together, other) for other in others]


@pytest.mark.parametrize("width", [16, 64, 7168])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_variant_is_found_by_its_roundings(dtype, variant, width):
    of = form(width, dtype=dtype, variant=variant)
    native, is_known = native_norm(LIBRARY, form=of, stock=lambda x, weight: stock(x, weight, of=of))
    assert is_known
    assert variant == native.form.variant


def test_a_float32_weight_belongs_to_the_variants_that_round_last():
    of = form(64, weight=torch.float32, variant="rounded last")
    native, _ = native_norm(LIBRARY, form=of, stock=lambda x, weight: stock(x, weight, of=of))
    assert "rounded last" == native.form.variant
    x, weight = parts(of)
    assert native.takes(x, weight=weight)
    assert torch.bfloat16 == native(x, weight=weight).dtype


def slightly_scaled(x, weight, *, of):
    return stock(x, weight * (1 + 2**-6), of=of)


def another_epsilon(x, weight, *, of):
    return stock(x, weight, of=dataclasses.replace(of, epsilon=2 * of.epsilon))


def of_another_mean(x, weight, *, of):
    values = x.float()
    return weight * (values * torch.rsqrt(values.var(-1, keepdim=True) + of.epsilon)).to(x.dtype)


def one_row_dropped(x, weight, *, of):
    return stock(x.index_fill(0, torch.tensor([2]), 0), weight, of=of)


def in_another_type(x, weight, *, of):
    return stock(x, weight, of=of).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [slightly_scaled, another_epsilon, of_another_mean, one_row_dropped, in_another_type])
def test_what_computes_something_else_is_no_norm(dtype, wrong):
    of = form(64, dtype=dtype)
    assert (None, False) == native_norm(LIBRARY, form=of, stock=lambda x, weight: wrong(x, weight, of=of))


@pytest.mark.parametrize("position", [0, 40, 63])
def test_native_code_that_computes_something_else_does_not_serve(position):
    def broken(*arguments):
        LIBRARY.norm(*arguments)
        ctypes.c_uint16.from_address(arguments[4] + 2 * position).value ^= 1 << 6

    of = form(64)
    library = dataclasses.replace(LIBRARY, norm=broken)
    assert (None, True) == native_norm(library, form=of, stock=lambda x, weight: stock(x, weight, of=of))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0])
def test_what_is_no_number_is_the_same_as_torchs(dtype, number):
    of = form(40, dtype=dtype, epsilon=0.0)
    x, weight = parts(of, rows=3)
    x[1] = number
    found, theirs = NativeNorm(LIBRARY, form=of)(x, weight=weight), stock(x, weight, of=of)
    assert torch.equal(theirs.isnan(), found.isnan())
    assert found[[0, 2]].isfinite().all()


class Elsewhere(torch.Tensor):
    """Numbers that may lie where no address says."""


def test_other_calls_are_torchs():
    of = form(32)
    x, weight = parts(of)
    native = NativeNorm(LIBRARY, form=of)
    assert native.takes(x, weight=weight)
    assert native.takes(x.view(1, 5, 1, 32), weight=torch.nn.Parameter(weight, requires_grad=False))
    calls = [(x.float(), weight), (x[:0], weight), (x[:, :8], weight), (x, weight[:8]), (x, weight.float())]
    calls += [(x, weight.repeat(2)[::2]), (x.as_subclass(Elsewhere), weight), (x, weight.as_subclass(Elsewhere))]
    calls += [(x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_()), (x.to("meta"), weight)]
    assert [False] * 11 == [native.takes(tokens, weight=its) for tokens, its in calls]
    with torch.autocast("cpu"):
        assert not native.takes(x, weight=weight)
    with torch.no_grad():
        assert native.takes(x.clone().requires_grad_(), weight=weight)


def at_the_edge(value):
    """The same values, right before a page that nobody may touch."""
    pages = -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    checked("mprotect", ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages, mmap.PAGESIZE, 0)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=pages)
    return whole[pages - value.nbytes :].view(value.dtype).view(value.shape).copy_(value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 31, 64, 513])
def test_nothing_is_read_behind_the_last_byte(path, dtype, width):
    of = form(width, dtype=dtype)
    x, weight = parts(of, rows=3)
    native = NativeNorm(LIBRARY, form=of, path=path)
    assert torch.equal(native(x, weight=weight), native(at_the_edge(x), weight=at_the_edge(weight)))
