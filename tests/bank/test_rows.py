"""The numbering of a layer's rows, exclusive and inclusive, with and without a spare row and fused shared experts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.build import place_layers
from hotsplit.bank.rows import place
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Swapper


@st.composite
def placements(draw):
    """Arguments of place(), the hot experts first."""
    num_experts = draw(st.integers(1, 12))
    hot = draw(st.permutations(range(num_experts)).map(tuple))[: draw(st.integers(0, num_experts))]
    return hot, {
        "num_experts": num_experts,
        "spare": draw(st.booleans()),
        "inclusive": draw(st.booleans()),
        "fixed": draw(st.integers(0, 3)),
    }


@given(placements())
def test_every_expert_has_a_row_of_its_own_below_the_number_of_rows(placement):
    hot, given_as = placement
    rows = place(hot, **given_as)
    taken = [*rows.row_map, *rows.fixed_rows]
    assert given_as["num_experts"] + given_as["fixed"] == len(set(taken)) == len(taken)
    assert all(0 <= row < rows.num_rows for row in taken)


@given(placements())
def test_hot_experts_take_the_first_rows_in_their_order_and_no_other_expert_does(placement):
    hot, given_as = placement
    rows = place(hot, **given_as)
    assert list(range(len(hot))) == [rows.row_map[expert] for expert in hot]
    assert set(hot) == {expert for expert, row in enumerate(rows.row_map) if row < rows.first_cold}


@given(placements())
def test_the_spare_row_is_the_last_fast_row_and_belongs_to_nobody(placement):
    hot, given_as = placement
    rows = place(hot, **given_as)
    if rows.spare_row is not None:
        assert len(hot) + given_as["fixed"] == rows.spare_row == rows.first_cold - 1
        assert rows.spare_row not in [*rows.row_map, *rows.fixed_rows]


@given(placements())
def test_inclusive_cold_experts_lie_at_home_and_every_expert_has_a_home(placement):
    hot, given_as = placement
    rows = place(hot, **given_as | {"inclusive": True})
    experts = range(given_as["num_experts"])
    assert tuple(rows.first_cold + expert for expert in experts) == rows.home_row
    assert all(rows.row_map[expert] == rows.home_row[expert] for expert in set(experts) - set(hot))


@given(placements())
def test_fused_shared_experts_follow_the_hot_ones_in_fast_memory(placement):
    hot, given_as = placement
    rows = place(hot, **given_as)
    assert list(range(len(hot), len(hot) + given_as["fixed"])) == list(rows.fixed_rows)
    assert all(row < rows.first_cold for row in rows.fixed_rows)


@given(placements())
def test_fused_shared_experts_only_move_the_rows_behind_them(placement):
    hot, given_as = placement
    rows, without = place(hot, **given_as), place(hot, **given_as | {"fixed": 0})
    num_fixed, num_hot = given_as["fixed"], len(hot)
    assert rows.row_map == tuple(row if row < num_hot else row + num_fixed for row in without.row_map)
    assert (num_hot, num_fixed) == (rows.num_hot, rows.num_fixed)
    assert num_fixed == rows.num_rows - without.num_rows == rows.first_cold - without.first_cold


@pytest.mark.parametrize(
    ("hot", "spare", "inclusive", "num_rows"),
    [((0, 1), True, False, 5), ((0, 1), False, False, 4), ((0, 1), True, True, 7), ((0, 1), False, True, 6)],
)
@pytest.mark.parametrize("fixed", [0, 2])
def test_the_number_of_rows_is_as_the_table_says(hot, spare, inclusive, num_rows, fixed):
    assert num_rows + fixed == place(hot, num_experts=4, spare=spare, inclusive=inclusive, fixed=fixed).num_rows


@pytest.mark.parametrize("hot", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("inclusive", [False, True])
def test_a_layer_that_is_wholly_hot_or_wholly_cold_has_no_spare_row(hot, inclusive):
    rows = place(hot, num_experts=4, spare=True, inclusive=inclusive)
    assert (None, len(hot)) == (rows.spare_row, rows.first_cold)


@pytest.mark.parametrize("hot", [(), (0, 1, 2, 3)])
def test_fused_shared_experts_make_no_layer_swap_that_could_not(hot):
    rows = place(hot, num_experts=4, spare=True, inclusive=False, fixed=1)
    assert (None, len(hot) + 1) == (rows.spare_row, rows.first_cold)


def test_only_dynamic_layers_get_a_spare_row():
    hot = [(0, 1), (), (0, 1, 2)]
    dynamic = place_layers(hot, num_experts=3, dynamic=True, inclusive=True)
    static = place_layers(hot, num_experts=3, dynamic=False, inclusive=True)
    assert [2, None, None] == [rows.spare_row for rows in dynamic]
    assert [None, None, None] == [rows.spare_row for rows in static]


class WatchedBackend(SimBackend):
    """Remembers which rows copies write and publishes name."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.written, self.named = set(), set()

    def copy(self, stream, *, layer_id, source_row, target_row):
        self.written.add(target_row)
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=target_row)

    def publish(self, layer_id, *, expert, row):
        self.named.add(row)
        super().publish(layer_id, expert=expert, row=row)


@pytest.mark.parametrize("inclusive", [False, True])
def test_swaps_reach_every_hot_row_and_never_the_row_of_a_fused_shared_expert(inclusive):
    num_experts, random = 8, Random(0)
    rows = place((5, 1, 2), num_experts=num_experts, spare=True, inclusive=inclusive, fixed=1)
    backend = WatchedBackend([rows])
    swapper = Swapper(backend, layouts=[rows])
    for _ in range(60):
        hot = sorted(swapper.hot_experts(0))
        cold = sorted(set(range(num_experts)) - set(hot))
        swapper.request(0, expert_in=random.choice(cold), expert_out=random.choice(hot))
        while not swapper.is_idle():
            swapper.tick()
            backend.drain()
    fast = set(range(rows.first_cold))
    assert [3] == list(rows.fixed_rows)
    assert fast - {3} == backend.written & fast == backend.named & fast
    assert 3 == len(swapper.hot_experts(0))
