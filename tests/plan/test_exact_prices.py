"""Rows of different sizes are charged what they weigh, never the widest one's price (CASES T5 iii)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.plan.evaluate import hit_rate
from hotsplit.plan.fit import place_experts
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planner import PlanOptions, make_plan
from plan_builders import histogram_of, sizes_of

NUM_EXPERTS = 64
WIDE = (4, 11, 20, 31, 42)
ROWS = [2_600_000 if layer in WIDE else 1_000_000 for layer in range(43)]
SIZES = sizes_of(ROWS, num_experts=NUM_EXPERTS, top_k=6)
ALL = SIZES.expert_bytes
COUNTS = np.random.default_rng(5).zipf(1.6, size=(43, NUM_EXPERTS)).clip(1, 10**6).astype(float)


def planned(budget, *, dynamic):
    options = PlanOptions(dynamic=dynamic)
    return make_plan(SIZES, histogram=histogram_of(COUNTS, top_k=6), budget_bytes=budget, options=options)[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("part", [0.2, 0.37, 0.5, 0.93])
def test_a_plan_takes_the_sum_of_its_real_rows(dynamic, part):
    plan = planned(int(part * ALL), dynamic=dynamic)
    hot_L = plan.hot_rows()
    spare_L = (hot_L < NUM_EXPERTS) if dynamic else np.zeros(43, dtype=int)
    assert int(((hot_L + spare_L) * ROWS).sum()) == plan.stages[0].used_bytes


@pytest.mark.parametrize("part", [0.2, 0.37, 0.5, 0.93])
def test_a_plan_leaves_less_than_the_smallest_cold_expert_that_could_fit(part):
    plan = planned(int(part * ALL), dynamic=False)
    smallest = min(row for row, hot in zip(ROWS, plan.hot_rows(), strict=True) if hot < NUM_EXPERTS)
    assert plan.stages[0].budget_bytes - plan.stages[0].used_bytes < smallest


def test_pricing_at_the_widest_row_would_have_left_half_of_the_budget_idle():
    budget = ALL // 2
    at_widest = budget // 2_600_000
    assert planned(budget, dynamic=False).hot_rows().sum() > 1.9 * at_widest


@given(st.integers(0, ALL), st.integers(0, ALL))
def test_more_budget_never_serves_less(one, two):
    low, high = sorted((one, two))
    shares_LE = shares_of(COUNTS)
    rates = [hit_rate(planned(budget, dynamic=False).hot_mask(), counts=shares_LE) for budget in (low, high)]
    assert rates[0] <= rates[1] + 1e-12


def test_4_and_10_gib_differ():
    sizes = sizes_of([24 * 2**20] * 40, num_experts=64, top_k=6)
    histogram = histogram_of(COUNTS[:40], top_k=6)
    four, ten = (
        make_plan(sizes, histogram=histogram, budget_bytes=budget, options=PlanOptions(dynamic=False))[0]
        for budget in (4 * 2**30, 10 * 2**30)
    )
    assert (170, 426) == (four.hot_rows().sum(), ten.hot_rows().sum())
    assert ten.proof.hit_rate > four.proof.hit_rate + 0.05


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dry_run_charges_real_rows_too(dynamic):
    found = place_experts(SIZES, room=ALL // 3, dynamic=dynamic)
    hot_L = np.array(found.hot_rows)
    spare_L = (hot_L < NUM_EXPERTS) if dynamic else 0 * hot_L
    assert int(((hot_L + spare_L) * ROWS).sum()) == found.used_bytes <= ALL // 3
    assert int(((NUM_EXPERTS - hot_L) * ROWS).sum()) == found.cold_bytes
    assert ALL == int((hot_L * ROWS).sum()) + found.cold_bytes


@given(st.integers(0, ALL + 10**6), st.integers(0, ALL + 10**6), st.booleans())
def test_more_room_never_leaves_more_on_the_host(one, two, dynamic):
    small, large = (place_experts(SIZES, room=room, dynamic=dynamic) for room in sorted((one, two)))
    assert small is None or large is not None
    if small is not None:
        assert large.cold_bytes <= small.cold_bytes
        assert large.used_bytes <= max(one, two)
