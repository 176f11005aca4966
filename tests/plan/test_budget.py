"""What fits: greedy, bounds, stages, spares (CASES T5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import BudgetError, PlanError
from hotsplit.plan.budget import (
    GIB,
    StageBudget,
    best_subset,
    fractional_bound,
    gib_to_ask,
    greedy,
    places,
    require_enough,
    spend,
    spread,
    stage_bound,
    stage_layers,
)
from hotsplit.plan.objectives import OBJECTIVES, shares_of, touched

MIXED_SIZES = np.array([[4, 1, 1, 1, 1]])
MIXED_COUNTS = np.array([[30.0, 10.0, 9.0, 8.0, 7.0]])


def _mixed_choice(objective):
    scores = OBJECTIVES[objective](MIXED_COUNTS, sizes=MIXED_SIZES, top_k=1)
    return greedy(scores, sizes=MIXED_SIZES, budget=4)


def _cold_byte_units(hot):
    return float((MIXED_COUNTS * MIXED_SIZES)[~hot].sum())


def test_share_takes_the_four_small_experts_for_34_of_64_tokens():
    hot = _mixed_choice("share")
    assert [[False, True, True, True, True]] == hot.tolist()
    assert (34.0, 120.0) == (MIXED_COUNTS[hot].sum(), _cold_byte_units(hot))


def test_time_takes_the_big_expert_for_34_cold_byte_units():
    hot = _mixed_choice("time")
    assert [[True, False, False, False, False]] == hot.tolist()
    assert (30.0, 34.0) == (MIXED_COUNTS[hot].sum(), _cold_byte_units(hot))


def test_greedy_gets_60_where_the_optimum_is_90_and_the_bound_96():
    values, sizes = np.array([[60.0, 45.0, 45.0]]), np.array([[6, 5, 5]])
    assert 60.0 == values[greedy(values / sizes, sizes=sizes, budget=10)].sum()
    assert 90.0 == values[best_subset(values, sizes=sizes, budget=10)].sum()
    assert 96.0 == fractional_bound(values, sizes=sizes, budget=10)


def test_greedy_breaks_ties_by_layer_then_expert():
    ones = np.ones((2, 3))
    expected = [[True, True, True], [True, False, False]]
    assert expected == greedy(ones, sizes=np.ones((2, 3), dtype=np.int64), budget=4).tolist()


def test_greedy_goes_on_past_an_expert_that_does_not_fit():
    scores, sizes = np.array([[3.0, 2.0, 1.0]]), np.array([[2, 5, 1]])
    assert [[True, False, True]] == greedy(scores, sizes=sizes, budget=3).tolist()


def test_best_subset_refuses_more_cells_than_it_can_try():
    with pytest.raises(PlanError, match="17 cells"):
        best_subset(np.ones(17), sizes=np.ones(17, dtype=np.int64), budget=3)


@st.composite
def knapsacks(draw):
    """Values, sizes [1, N] and two budgets, the smaller first."""
    count = draw(st.integers(1, 9))
    row = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    values = np.array([draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))], dtype=np.float64)
    sizes = np.array([draw(row)], dtype=np.int64)
    return values, sizes, sorted(draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))


@given(knapsacks())
def test_greedy_fits_and_neither_beats_the_optimum_nor_the_optimum_the_bound(knapsack):
    values, sizes, (budget, _) = knapsack
    taken = greedy(values / sizes, sizes=sizes, budget=budget)
    optimum = values[best_subset(values, sizes=sizes, budget=budget)].sum()
    assert sizes[taken].sum() <= budget
    assert values[taken].sum() <= optimum <= fractional_bound(values, sizes=sizes, budget=budget) + 1e-9


@given(knapsacks())
def test_raising_the_budget_never_lowers_what_greedy_takes(knapsack):
    values, sizes, (less, more) = knapsack
    worth = [values[greedy(values / sizes, sizes=sizes, budget=budget)].sum() for budget in (less, more)]
    assert worth[0] <= worth[1]


@given(knapsacks())
def test_greedy_leaves_no_room_for_a_cold_expert(knapsack):
    values, sizes, (budget, _) = knapsack
    taken = greedy(values / sizes, sizes=sizes, budget=budget)
    assert all(size > budget - sizes[taken].sum() for size in sizes[~taken])


@given(knapsacks(), st.randoms(use_true_random=False))
def test_greedy_takes_the_same_experts_in_whatever_order_they_are_numbered(knapsack, random):
    values, sizes, (budget, _) = knapsack
    scores = values + np.arange(values.size) / 100
    order = list(range(values.size))
    random.shuffle(order)
    taken = greedy(scores, sizes=sizes, budget=budget)
    renumbered = greedy(scores[:, order], sizes=sizes[:, order], budget=budget)
    assert taken[:, order].tolist() == renumbered.tolist()


def test_an_empty_layer_has_uniform_shares():
    assert [[0.75, 0.25], [0.5, 0.5]] == shares_of(np.array([[3.0, 1.0], [0.0, 0.0]])).tolist()


def test_an_expert_is_touched_in_a_step_of_b_tokens_with_chance_one_minus_one_minus_p_to_the_b():
    shares = np.array([[0.25, 0.5]])
    assert [[0.25, 0.5]] == touched(shares, top_k=1).tolist()
    assert [[1 - 0.5**8, 1.0]] == touched(shares, top_k=2, batch=8).tolist()


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8))
def test_share_and_time_agree_for_equal_sizes(counts):
    sizes = np.full((1, len(counts)), 7)
    orders = [places(rank(np.array([counts], dtype=float), sizes=sizes, top_k=1)) for rank in OBJECTIVES.values()]
    assert orders[0].tolist() == orders[1].tolist()


def _stage(row_bytes, *, budget_bytes, num_experts=4, swap_rows=1, fixed_bytes=0):
    return StageBudget(
        layers=tuple(range(len(row_bytes))),
        row_bytes=np.array(row_bytes, dtype=np.int64),
        num_experts=num_experts,
        budget_bytes=budget_bytes,
        fixed_bytes=fixed_bytes,
        swap_rows=swap_rows,
    )


@pytest.mark.parametrize(("budget_bytes", "hot_rows"), [(3, 2), (4, 4)])
def test_only_a_wholly_hot_layer_has_no_spare_row(budget_bytes, hot_rows):
    stage = _stage([1], budget_bytes=budget_bytes)
    assert hot_rows == spend(np.array([[4.0, 3.0, 2.0, 1.0]]), stage=stage).sum()
    assert budget_bytes == stage.used_bytes(np.array([hot_rows]))


def test_the_last_expert_of_a_layer_takes_the_place_of_the_spare_row():
    stage = _stage([1, 1], budget_bytes=6)
    hot = spend(np.array([[9.0, 8.0, 7.0, 1.0], [6.0, 5.0, 4.0, 3.0]]), stage=stage)
    assert [[True] * 4, [True, False, False, False]] == hot.tolist()
    assert 6 == stage.used_bytes(hot.sum(axis=1))


@pytest.mark.parametrize(("budget_bytes", "hot_rows", "served"), [(12, [1, 2], 1.17), (13, [3, 1], 1.34)])
def test_small_change_buys_no_free_expert_that_a_larger_budget_would_lose(budget_bytes, hot_rows, served):
    # Twelve bytes leave two after every layer's minimum: too few for the wide layer's row, which is wanted more. Were
    # the narrow layer's last expert free as well, twelve bytes would serve 1.5 layers and thirteen only 1.34.
    shares = np.array([[0.5, 0.5, 0.0], [0.34, 0.33, 0.33]])
    hot = spend(shares / [[3], [2]], stage=_stage([3, 2], num_experts=3, budget_bytes=budget_bytes))
    assert hot_rows == hot.sum(axis=1).tolist()
    assert served == pytest.approx(shares[hot].sum())


def test_a_model_of_two_experts_keeps_both_hot_rather_than_one_and_a_spare():
    assert (2, 2) == (
        _stage([1], num_experts=2, budget_bytes=2).least_rows,
        _stage([1], num_experts=2, budget_bytes=2).least_bytes,
    )


def test_a_budget_below_the_minimum_names_it_and_the_static_mode():
    stage = _stage([GIB, GIB], budget_bytes=GIB, fixed_bytes=GIB // 2)
    with pytest.raises(
        BudgetError, match=r"got 1 GiB; wanted at least 4\.5 GiB .*HOT_GIB=4\.5, or HOTSPLIT_DYNAMIC=0"
    ) as caught:
        require_enough([stage])
    assert 2 * 2 * GIB + GIB // 2 == caught.value.minimum_bytes


def test_a_static_budget_below_the_fixed_bytes_is_refused():
    with pytest.raises(BudgetError) as caught:
        require_enough([_stage([8], budget_bytes=3, swap_rows=0, fixed_bytes=4)])
    assert "DYNAMIC" not in str(caught.value)


@given(st.integers(1, 2**45))
def test_the_gib_that_a_message_asks_for_are_enough_when_typed_back(nbytes):
    assert float(gib_to_ask(nbytes)) * GIB >= nbytes


@st.composite
def staged(draw):
    """Shares [S, E], a stage without a budget, and two budgets that hold its minimum, the smaller first."""
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cells = st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts)
    counts = np.array([draw(cells) for _ in range(num_layers)], dtype=np.float64)
    rows = draw(st.lists(st.integers(1, 7), min_size=num_layers, max_size=num_layers))
    swap_rows = draw(st.integers(0, min(2, num_experts)))
    stage = _stage(
        rows, budget_bytes=0, num_experts=num_experts, swap_rows=swap_rows, fixed_bytes=draw(st.integers(0, 5))
    )
    budgets = st.integers(stage.least_bytes, stage.all_bytes)
    return shares_of(counts), stage, sorted(draw(st.tuples(budgets, budgets)))


def _with(stage, budget_bytes):
    return _stage(
        stage.row_bytes,
        budget_bytes=budget_bytes,
        num_experts=stage.num_experts,
        swap_rows=stage.swap_rows,
        fixed_bytes=stage.fixed_bytes,
    )


@given(staged())
def test_a_stage_spends_within_its_budget_and_leaves_no_room_for_a_cold_expert(case):
    shares, stage, (budget, _) = case
    hot_rows = spend(shares / stage.row_bytes[:, None], stage=_with(stage, budget)).sum(axis=1)
    used = stage.used_bytes(hot_rows)
    cold = [
        int(size)
        for size, rows in zip(stage.row_bytes, hot_rows, strict=True)
        if rows < stage.num_experts - bool(stage.swap_rows)
    ]
    assert used <= budget
    assert all(size > budget - used for size in cold)


@given(staged())
def test_raising_a_stages_budget_never_lowers_the_share_served_with_mixed_sizes_and_spare_rows(case):
    shares, stage, budgets = case
    served = [shares[spend(shares / stage.row_bytes[:, None], stage=_with(stage, budget))].sum() for budget in budgets]
    assert served[0] <= served[1] + 1e-12


@given(staged())
def test_raising_a_stages_budget_never_raises_cold_bytes_under_time(case):
    shares, stage, budgets = case
    bytes_per_step = shares * stage.row_bytes[:, None]
    cold = [bytes_per_step[~spend(touched(shares, top_k=1), stage=_with(stage, budget))].sum() for budget in budgets]
    assert cold[0] >= cold[1] - 1e-12


@given(staged())
def test_no_stage_plan_beats_its_bound(case):
    shares, stage, (budget, _) = case
    funded = _with(stage, budget)
    for hot in (spend(shares / stage.row_bytes[:, None], stage=funded), spread(funded)):
        assert shares[hot].sum() <= stage_bound(shares, stage=funded) + 1e-12


@given(staged())
def test_spreading_fits_and_gives_every_layer_the_same_number_of_rows_but_one(case):
    _, stage, budgets = case
    for budget in budgets:
        rows = spread(_with(stage, budget)).sum(axis=1)
        assert stage.used_bytes(rows) <= budget
        assert rows.max() - rows.min() <= 1


@given(staged())
def test_every_layer_of_a_dynamic_stage_keeps_its_minimum(case):
    shares, stage, (budget, _) = case
    hot = spend(shares / stage.row_bytes[:, None], stage=_with(stage, budget))
    assert hot.sum(axis=1).min() >= stage.least_rows


def test_pipeline_stages_are_cut_as_vllm_cuts_them():
    # 61 decoder layers, the first three dense, on 4 stages: 15, 15, 16, 15.
    stages = stage_layers(range(3, 61), num_decoder_layers=61, pp=4)
    assert [(3, 14), (15, 29), (30, 45), (46, 60)] == [(stage[0], stage[-1]) for stage in stages]


def test_a_pipeline_stage_may_have_no_moe_layer():
    assert ((), (2, 3)) == stage_layers([2, 3], num_decoder_layers=4, pp=2)


@pytest.mark.parametrize(("num_decoder_layers", "pp"), [(None, 2), (3, 4)])
def test_a_decoder_that_cannot_be_cut_is_refused(num_decoder_layers, pp):
    with pytest.raises(PlanError, match=f"pipeline size {pp}"):
        stage_layers([0, 1, 2], num_decoder_layers=num_decoder_layers, pp=pp)


@given(st.integers(1, 40), st.data())
def test_pipeline_stages_partition_the_layers_evenly(num_decoder_layers, data):
    pp = data.draw(st.integers(1, num_decoder_layers))
    stages = stage_layers(range(num_decoder_layers), num_decoder_layers=num_decoder_layers, pp=pp)
    lengths = [len(stage) for stage in stages]
    assert list(range(num_decoder_layers)) == [layer for stage in stages for layer in stage]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)
