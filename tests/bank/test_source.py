"""Row layouts: where a tensor starts, how long a row is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.source import ROW_ALIGN, RowLayout, RowTensor, align


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_align_gives_the_smallest_multiple_that_is_not_below(num_bytes, to):
    aligned = align(num_bytes, to)
    assert 0 == aligned % to
    assert num_bytes <= aligned < num_bytes + to


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        (torch.bfloat16, (8, 6), 96),
        (torch.float8_e4m3fn, (8, 6), 48),
        (torch.float32, (3,), 12),
        (torch.uint8, (), 1),
    ],
)
def test_a_tensors_bytes_are_those_of_its_stored_type(dtype, shape, num_bytes):
    assert num_bytes == RowTensor(name="weight", offset=0, dtype=dtype, shape=shape).num_bytes


def test_a_row_ends_where_the_next_one_may_start():
    weight = RowTensor(name="weight", offset=0, dtype=torch.bfloat16, shape=(8, 6))
    scale = RowTensor(name="weight.scale", offset=128, dtype=torch.uint8, shape=(5,))
    assert 2 * ROW_ALIGN == RowLayout(tensors=(weight,)).num_bytes
    assert 3 * ROW_ALIGN == RowLayout(tensors=(weight, scale)).num_bytes
