"""The experts kernels, in Triton's interpreter: equal to their twin, wherever rows lie, and no other row is read.

The interpreter multiplies and adds in float32 as the twin does, in another order: results differ by rounding alone.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from bank.expert_rows import random_experts, random_tokens
from hotsplit.bank.kernels import reference, rows_triton
from hotsplit.errors import BankError

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.slow,
    # numpy's exp says so for values of which the sigmoid is 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Of the largest output: two roundings of a 16-bit type, a few of float32."""
ROW_MAP, NUM_ROWS = (6, 0, 3, 5, 2), 8


@pytest.fixture(autouse=True)
def memory_starts_as_nan(monkeypatch):
    """Outputs that are not written, and temporaries that are read before, show."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **options: poisoned(new_empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poisoned(empty_like(*args, **options)))


def rows_of(ids, row_map=ROW_MAP):
    return reference.route(ids, row_map=torch.tensor(row_map))


def compute(kernels, experts, drawn, *, row_map=ROW_MAP, num_rows=NUM_ROWS, first_cold=3):
    hidden, ids, weights = drawn
    rows = experts.placed(row_map, num_rows=num_rows, first_cold=first_cold)
    return kernels.experts(hidden, row_ids=rows_of(ids, row_map), topk_weights=weights, rows=rows)


def require_close(experts, drawn, **options):
    wanted, found = (compute(kernels, experts, drawn, **options) for kernels in (reference, rows_triton))
    assert (wanted.dtype, wanted.shape) == (found.dtype, found.shape)
    scale = wanted.float().abs().max().item()
    assert 0 < scale < 100
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES[wanted.dtype] * scale)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs_equal_the_twins_in_every_dtype(dtype, num_tokens):
    require_close(random_experts(dtype=dtype), random_tokens(num_tokens, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float8_weights_are_multiplied_by_the_factor_of_their_block(dtype, num_tokens):
    require_close(random_experts(block=16), random_tokens(num_tokens, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_blocks_of_128_may_be_cut_off_at_the_end_of_the_inputs(num_tokens):
    experts = random_experts(block=128, hidden_dim=200, inner_dim=128)
    require_close(experts, random_tokens(num_tokens, hidden_dim=200, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_every_activation_with_and_without_gate_and_bias(activation, has_gate, num_tokens):
    experts = random_experts(activation=activation, has_gate=has_gate, has_bias=True)
    require_close(experts, random_tokens(num_tokens))


GATES = {
    "limit": {"gate_limit": 0.4},
    "limit-slope-shift": {"gate_limit": 0.7, "gate_slope": 1.702, "gate_shift": 1.0},
    "shift": {"gate_shift": 1.0},
}


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_limit_slope_and_shift_of_a_gate(gate, dtype, num_tokens):
    experts = random_experts(has_bias=True, dtype=dtype, **gate)
    require_close(experts, random_tokens(num_tokens, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_limit_of_float8_rows(num_tokens):
    require_close(random_experts(block=16, gate_limit=0.3), random_tokens(num_tokens, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_another_gate_is_noticed(gate, num_tokens):
    """The comparison above can see each of them."""
    drawn = random_tokens(num_tokens)
    found = compute(rows_triton, random_experts(**gate), drawn)
    other = compute(reference, random_experts(), drawn)
    assert (found - other).abs().max() > 100 * TOLERANCES[torch.float32] * other.abs().max()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_limit_keeps_what_is_no_number(num_tokens):
    hidden, ids, weights = random_tokens(num_tokens)
    hidden[0] = float("nan")
    assert compute(rows_triton, random_experts(gate_limit=1.0), (hidden, ids, weights))[0].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("hidden_dim", "inner_dim"), [(40, 24), (8, 136), (264, 8)])
def test_sizes_need_not_be_multiples_of_a_tile(hidden_dim, inner_dim, num_tokens):
    experts = random_experts(hidden_dim=hidden_dim, inner_dim=inner_dim)
    require_close(experts, random_tokens(num_tokens, hidden_dim=hidden_dim))


def test_more_tokens_of_one_expert_than_a_tile_holds():
    experts = random_experts(num_experts=2, hidden_dim=16, inner_dim=16, dtype=torch.float16)
    drawn = random_tokens(300, hidden_dim=16, top_k=1, num_experts=2, dtype=torch.float16)
    require_close(experts, drawn, row_map=(2, 0), num_rows=3)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_what_has_no_row_adds_nothing(num_tokens):
    experts, (hidden, ids, weights) = random_experts(), random_tokens(num_tokens)
    ids[0] = torch.tensor([-1, NUM_ROWS, ids[0, 2]])
    require_close(experts, (hidden, ids, weights))
    ids[0] = -1
    assert [0.0] * 64 == compute(rows_triton, experts, (hidden, ids, weights))[0].tolist()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_ids_weights_and_tokens_may_have_any_layout(num_tokens):
    hidden, ids, weights = random_tokens(num_tokens)
    ids[0, 1] = -1
    rows = random_experts().placed(ROW_MAP, num_rows=NUM_ROWS)
    wanted = reference.experts(hidden, row_ids=rows_of(ids), topk_weights=weights, rows=rows)
    wide, ids_KT, weights_KT = torch.stack([hidden, hidden], dim=-1), rows_of(ids).int().t(), weights.t()
    found = rows_triton.experts(
        wide[..., 0], row_ids=ids_KT.contiguous().t(), topk_weights=weights_KT.contiguous().t(), rows=rows
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_pairs_without_a_row_are_not_computed(num_tokens, monkeypatch):
    """Their row would be -1: whatever lies before the rows."""
    allocated, new_empty = [], torch.Tensor.new_empty

    def remember(*args, **options):
        allocated.append(new_empty(*args, **options))
        return allocated[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", remember)
    hidden, ids, weights = random_tokens(num_tokens)
    ids[0, 1], ids[-1, 2] = -1, -1
    placed = random_experts().placed(ROW_MAP, num_rows=NUM_ROWS)
    up, down = (torch.cat([torch.zeros_like(one[:1]), one])[1:] for one in (placed.up, placed.down))
    rows = dataclasses.replace(placed, up=up, down=down)
    rows_triton.experts(hidden, row_ids=rows_of(ids), topk_weights=weights, rows=rows)
    inner, results = allocated[:2]  # the interpreter's own come after
    assert (ids < 0).flatten().tolist() == inner.isnan().all(dim=1).tolist() == results.isnan().all(dim=1).tolist()


def test_tokens_that_are_sent_to_one_tokens_experts_are_computed():
    """What padding looks like: the same rows many times."""
    hidden, ids, weights = random_tokens(20)
    ids[1:] = ids[0]
    require_close(random_experts(), (hidden, ids, weights))


def test_no_tokens_give_no_outputs():
    assert (0, 64) == compute(rows_triton, random_experts(), random_tokens(0)).shape


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("block", [None, 16])
@given(row_map=st.permutations(range(7)).map(lambda rows: rows[:5]), first_cold=st.integers(0, 7))
@settings(max_examples=8)
def test_where_rows_lie_and_which_are_cold_decides_no_bit(block, num_tokens, row_map, first_cold):
    experts, drawn, wanted = in_one_placement(block=block, num_tokens=num_tokens)
    found = compute(rows_triton, experts, drawn, row_map=row_map, num_rows=7, first_cold=first_cold)
    assert torch.equal(wanted, found)


@cache
def in_one_placement(*, block, num_tokens):
    """Experts, tokens and their outputs."""
    experts = random_experts(dtype=torch.bfloat16, block=block, hidden_dim=32, inner_dim=16)
    drawn = random_tokens(num_tokens, hidden_dim=32, dtype=torch.bfloat16)
    return experts, drawn, compute(rows_triton, experts, drawn)


@given(
    rows=st.lists(st.integers(-2, 6), min_size=1, max_size=12),
    top_k=st.integers(1, 3),
    first_cold=st.integers(0, 5),
)
def test_groups_hold_every_pair_once_cold_rows_first(rows, top_k, first_cold):
    num_rows = 5
    row_ids = torch.tensor(rows * top_k).reshape(-1, top_k)
    groups = rows_triton.group(row_ids, num_rows=num_rows, first_cold=first_cold)
    flat, starts = row_ids.flatten().tolist(), groups.starts.tolist()
    assert [*range(len(flat))] == sorted(groups.order.tolist())
    assert min(len(flat), num_rows) == len(groups.rows) == len(starts) - 1
    found = {}
    for row, start, end in zip(groups.rows.tolist(), starts, starts[1:], strict=False):
        if start < end and row >= 0:
            found[row] = groups.order[start:end].tolist()
    used = sorted({row for row in flat if 0 <= row < num_rows}, key=lambda row: (row < first_cold, row))
    assert used == list(found)
    assert {row: [pair for pair, one in enumerate(flat) if one == row] for row in used} == found


@triton.jit
def _all_pairs(  # noqa: PLR0917 - a launch passes arguments by position
    row_ids_ptr, pairs_ptr, rows_ptr, num_pairs, num_rows, first_cold, SLOTS: tl.constexpr
):
    for nth in range(num_pairs):
        pair, row = rows_triton._nth_pair(row_ids_ptr, nth, num_pairs, num_rows, first_cold, SLOTS)
        tl.store(pairs_ptr + nth, pair)
        tl.store(rows_ptr + nth, row)


@given(rows=st.lists(st.integers(-2, 6), min_size=1, max_size=9), first_cold=st.integers(0, 5))
@settings(max_examples=30)
def test_pairs_one_by_one_are_taken_cold_rows_first(rows, first_cold):
    pairs, found = torch.full((2, len(rows)), -9)
    slots = triton.next_power_of_2(len(rows))
    _all_pairs[(1,)](torch.tensor(rows), pairs, found, len(rows), 5, first_cold, SLOTS=slots)
    is_row = [0 <= row < 5 for row in rows]
    order = sorted(
        range(len(rows)), key=lambda pair: (not is_row[pair], is_row[pair] and rows[pair] < first_cold, pair)
    )
    assert order == pairs.tolist()
    assert [rows[pair] if is_row[pair] else -1 for pair in order] == found.tolist()


def test_tokens_of_another_dtype_than_the_weights_are_refused():
    with pytest.raises(BankError, match=r"got torch.float32; wanted torch.bfloat16"):
        compute(rows_triton, random_experts(dtype=torch.bfloat16), random_tokens(1))
    with pytest.raises(BankError, match=r"got torch.float32; wanted torch.bfloat16 or torch.float16"):
        compute(rows_triton, random_experts(block=16), random_tokens(1))
