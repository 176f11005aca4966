from __future__ import annotations

from dataclasses import replace

import pytest

from hotsplit.errors import PlanError
from hotsplit.plan.histogram import PhaseCounts
from hotsplit.plan.rates import GivenRates, machine_of
from hotsplit.report.speed import BUDGETS, forecast_speed
from report.reports import RATES, plan_of, skewed, weighed

PLAN = weighed(plan_of(skewed()))
COUNTS = skewed().phases["decode"].counts


def speed_of(plan=PLAN, traffic=None):
    machine, _ = machine_of(RATES, given=GivenRates(), ranks=plan.identity.tp * plan.identity.pp)
    return forecast_speed(plan, counts=COUNTS, traffic=traffic or skewed(), machine=machine)


def test_the_lower_bound_is_never_above_the_upper():
    charts = speed_of()[0].charts
    assert [] == [chart.title for chart in charts if any(map(float.__gt__, chart.low, chart.high))]


def test_the_curve_of_one_request_goes_from_all_cold_to_all_hot():
    chart = speed_of()[0].charts[0]
    touched_bytes = 6 * 2 * 2**20  # one token takes 2 experts in each of 6 layers
    assert BUDGETS == chart.at
    assert 1e3 * touched_bytes / 2e10 == pytest.approx(chart.high[0], rel=1e-5)
    assert 1e3 * touched_bytes / 1e12 == pytest.approx(chart.high[-1], rel=1e-5)


def test_the_plan_lies_on_the_curve_of_its_own_ranking():
    chart = speed_of()[0].charts[0]
    where, low, high = chart.plan
    at = chart.at.index(0.25)
    assert (0.25, chart.low[at], chart.high[at]) == pytest.approx((where, low, high), rel=1e-5)


def test_decode_counts_stand_in_for_prompts_with_a_notice():
    assert ["decode-counts-for-prefill"] == [notice.name for notice in speed_of()[1]]


def test_prompts_are_forecast_from_prefill_counts_where_there_are_any():
    own = skewed()
    prompts = replace(own, phases={**own.phases, "prefill": PhaseCounts(counts=COUNTS * 0 + 125, tokens=1000)})
    speed, notices = speed_of(traffic=prompts)
    assert [] == notices
    assert 0.25 == pytest.approx(next(step.token_hit for step in speed.steps if step.step.kind == "prefill"))


def test_every_rank_of_every_stage_needs_its_rates():
    plan = weighed(plan_of(skewed()), tp=2, pp=2)
    assert 4 == plan.identity.tp * plan.identity.pp
    assert speed_of(plan)[0].charts[0].low


def test_a_plan_without_bytes_is_refused():
    with pytest.raises(PlanError, match="leave --rates out"):
        speed_of(plan_of(skewed()))


def test_nobody_knowing_top_k_is_refused():
    own = skewed()
    blind = replace(own, identity=replace(own.identity, top_k=None))
    plan = replace(PLAN, identity=replace(PLAN.identity, model=blind.identity))
    with pytest.raises(PlanError, match="top_k"):
        speed_of(plan, traffic=blind)
