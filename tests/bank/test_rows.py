"""The numbering of a layer's rows, exclusive and inclusive, with and without a spare row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.build import place_layers
from hotsplit.bank.rows import place


@st.composite
def placements(draw):
    num_experts = draw(st.integers(1, 12))
    hot = draw(st.permutations(range(num_experts)).map(tuple))[: draw(st.integers(0, num_experts))]
    return hot, num_experts, draw(st.booleans()), draw(st.booleans())


@given(placements())
def test_every_expert_has_a_row_of_its_own_below_the_number_of_rows(placement):
    hot, num_experts, spare, inclusive = placement
    rows = place(hot, num_experts=num_experts, spare=spare, inclusive=inclusive)
    assert num_experts == len(set(rows.row_map)) == len(rows.row_map)
    assert all(0 <= row < rows.num_rows for row in rows.row_map)


@given(placements())
def test_hot_experts_take_the_first_rows_in_their_order_and_no_other_expert_does(placement):
    hot, num_experts, spare, inclusive = placement
    rows = place(hot, num_experts=num_experts, spare=spare, inclusive=inclusive)
    assert list(range(len(hot))) == [rows.row_map[expert] for expert in hot]
    assert set(hot) == {expert for expert in range(num_experts) if rows.row_map[expert] < rows.first_cold}


@given(placements())
def test_the_spare_row_is_the_last_hot_row_and_belongs_to_nobody(placement):
    hot, num_experts, spare, inclusive = placement
    rows = place(hot, num_experts=num_experts, spare=spare, inclusive=inclusive)
    if rows.spare_row is not None:
        assert len(hot) == rows.spare_row == rows.first_cold - 1
        assert rows.spare_row not in rows.row_map


@given(placements())
def test_inclusive_cold_experts_lie_at_home_and_every_expert_has_a_home(placement):
    hot, num_experts, spare, _ = placement
    rows = place(hot, num_experts=num_experts, spare=spare, inclusive=True)
    assert tuple(rows.first_cold + expert for expert in range(num_experts)) == rows.home_row
    assert all(rows.row_map[expert] == rows.home_row[expert] for expert in set(range(num_experts)) - set(hot))


@pytest.mark.parametrize(
    ("hot", "spare", "inclusive", "num_rows"),
    [((0, 1), True, False, 5), ((0, 1), False, False, 4), ((0, 1), True, True, 7), ((0, 1), False, True, 6)],
)
def test_the_number_of_rows_is_as_the_table_says(hot, spare, inclusive, num_rows):
    assert num_rows == place(hot, num_experts=4, spare=spare, inclusive=inclusive).num_rows


@pytest.mark.parametrize("hot", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("inclusive", [False, True])
def test_a_layer_that_is_wholly_hot_or_wholly_cold_has_no_spare_row(hot, inclusive):
    rows = place(hot, num_experts=4, spare=True, inclusive=inclusive)
    assert (None, len(hot)) == (rows.spare_row, rows.first_cold)


def test_only_dynamic_layers_get_a_spare_row():
    hot = [(0, 1), (), (0, 1, 2)]
    dynamic = place_layers(hot, num_experts=3, dynamic=True, inclusive=True)
    static = place_layers(hot, num_experts=3, dynamic=False, inclusive=True)
    assert [2, None, None] == [rows.spare_row for rows in dynamic]
    assert [None, None, None] == [rows.spare_row for rows in static]
