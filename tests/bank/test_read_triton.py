"""The kernel that only reads: equal to its twin in Triton's interpreter, and as wide as a load can be on every target."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton")

import triton

from bank.compiled import TARGETS, compiled, recorded
from hotsplit.bank.checks import read_rows, read_triton
from hotsplit.bank.checks.bench import DRY, FULL


@pytest.mark.interpreted
@settings(max_examples=25)
@given(
    row_words=st.sampled_from([4, 64, 4096, 16_384, 16_388, 50_000]),
    order=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_sums_equal_the_twins_over_whole_rows(row_words, order, seed):
    generator = torch.Generator().manual_seed(seed)
    # Sums stay within 32 bits: a GPU wraps where the interpreter refuses.
    rows = torch.randint(-(2**16), 2**16, (5, row_words), dtype=torch.int32, generator=generator)
    wanted = read_rows.sum_rows(rows, order=torch.tensor(order))
    assert torch.equal(wanted, read_triton.sum_rows(rows, order=torch.tensor(order)))


@pytest.mark.interpreted
def test_no_word_of_another_row_is_read():
    rows = torch.zeros(3, 5000, dtype=torch.int32)
    rows[[0, 2]] = 7
    assert not read_triton.sum_rows(rows, order=torch.tensor([1, 1])).any()


@pytest.mark.slow
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process, it does not compile")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("row_bytes", [FULL.read_row_bytes, DRY.read_row_bytes])
def test_rows_are_read_in_16_byte_pieces_of_which_several_are_under_way(row_bytes, target):
    rows = torch.empty(200, row_bytes // 4, dtype=torch.int32, device="meta")
    with recorded() as launches:
        read_triton.sum_rows(rows, order=torch.empty(100, dtype=torch.int64, device="meta"))
    made = compiled(launches[0], target=target)
    assert 32 == made.count(r"LDG\.E\S*\.128\S*")
    assert 0 == made.count(r"(LDL|STL)\b.*")
    assert 128 >= made.registers
