"""The native code of the fast kernel: it reads nothing behind a tensor's last byte, and old compilers build it.

A weight may end on the last page of a mapped file. A read past it would end this process, which nobody overlooks.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
from pathlib import Path

import pytest
import torch

from bank.test_fast import DTYPES, FP8, LIBRARY, PATHS, Bank, Case, run, traffic
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_linear import NativeLinear
from hotsplit.host.libc import checked

NATIVE = Path(fast_library.__file__).parent / "native"
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")


def at_the_edge(value):
    """The same values, right before a page that nobody may touch."""
    pages = -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    checked("mprotect", ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages, mmap.PAGESIZE, 0)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=pages)
    return whole[pages - value.nbytes :].view(value.dtype).view(value.shape).copy_(value)


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stored", "is_transposed"), [*itertools.product(DTYPES, (False, True)), (FP8, False)])
@pytest.mark.parametrize(("hidden_dim", "inner_dim"), [(40, 24), (33, 17), (7, 3), (64, 32), (290, 261)])
def test_experts_read_nothing_behind_their_last_byte(path, stored, is_transposed, hidden_dim, inner_dim):
    dtype = torch.bfloat16 if stored == FP8 else stored
    case = Case(
        hidden_dim=hidden_dim,
        inner_dim=inner_dim,
        dtype=dtype,
        weights=stored,
        is_transposed=is_transposed,
        has_bias=True,
    )
    rows = [case.as_stored(row) for row in case.experts()]
    bank, edge = Bank(rows), Bank(rows)
    edge.rows = [{name: at_the_edge(value) for name, value in row.items()} for row in rows]
    for num_tokens in (1, 3, 16):
        hidden, ids, weights = traffic(case, num_tokens)
        expected = run(case, (hidden, ids, weights), bank=bank, path=path)
        assert torch.equal(expected, run(case, (at_the_edge(hidden), ids, weights), bank=edge, path=path))


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 31), (65, 32), (64, 33), (7, 95)])
def test_linear_layers_read_nothing_behind_their_last_byte(path, dtype, outputs, inputs):
    native = NativeLinear(LIBRARY, outputs=outputs, inputs=inputs, dtype=dtype, path=path)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, inputs), (outputs, inputs), (outputs,)))
    expected = native(x, weight=weight, bias=bias)
    edge = native(at_the_edge(x), weight=at_the_edge(weight), bias=at_the_edge(bias))
    assert torch.equal(expected, edge)


def test_compilers_are_asked_only_for_instructions_whose_names_old_ones_know():
    # An older clang (15, say) refuses "f16c", and then the whole library stays unbuilt.
    names = re.findall(r'__builtin_cpu_supports\("(\w+)"\)', (NATIVE / "paths.c").read_text())
    assert {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16"} == set(names)
