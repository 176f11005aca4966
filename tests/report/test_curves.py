from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.plan.evaluate import evaluate
from hotsplit.report.curves import POINTS, coverage_curves, ranking
from report.reports import plan_of, skewed, weighed


def curves_of(histogram, *, test=None, fraction=0.25):
    plan = plan_of(histogram, fraction=fraction)
    counts = histogram.phases["decode"].counts
    return plan, coverage_curves(plan, counts=counts, test=None if test is None else test.phases["decode"].counts)


def lines_of(curves):
    return [curves.own, curves.unseen, curves.oracle_free, curves.oracle_reachable, curves.layer_order]


def test_every_curve_begins_at_nothing_and_ends_at_everything():
    _, curves = curves_of(skewed(), test=skewed(seed=1))
    assert (0.0, 1.0) == (curves.budget[0], curves.budget[-1])
    assert [(0.0, 1.0)] * 5 == [(line[0], line[-1]) for line in lines_of(curves)]


def test_no_curve_ever_falls():
    _, curves = curves_of(skewed(), test=skewed(seed=1))
    assert [True] * 5 == [bool((np.diff(line) >= 0).all()) for line in lines_of(curves)]


@pytest.mark.parametrize("fraction", [0.125, 0.25, 0.5, 1.0])
def test_the_plan_lies_on_its_curves_with_the_rates_of_its_evaluation(fraction):
    own, unseen = skewed(), skewed(seed=1)
    plan, curves = curves_of(own, test=unseen, fraction=fraction)
    found = evaluate(plan, histogram=own, test=unseen)
    rates = [found.in_sample, found.held_out, found.test.oracle_free, found.test.oracle_reachable]
    at = [float(np.interp(found.null, curves.budget, line)) for line in lines_of(curves)[:4]]
    assert rates == pytest.approx(at, abs=1e-5)


def test_the_best_in_hindsight_is_never_below_what_the_ranking_serves():
    _, curves = curves_of(skewed(), test=skewed(seed=1))
    free, reachable, unseen = (np.array(line) for line in (curves.oracle_free, curves.oracle_reachable, curves.unseen))
    assert bool((free >= reachable - 1e-6).all())
    assert bool((reachable >= unseen - 1e-6).all())


def test_without_a_test_the_ranking_is_the_best_in_hindsight():
    _, curves = curves_of(skewed())
    assert None is curves.unseen
    assert curves.own == curves.oracle_free == curves.oracle_reachable


def test_a_page_of_many_cells_has_no_more_points_than_a_screen_shows():
    _, curves = curves_of(skewed(num_layers=40, num_experts=64))
    assert POINTS + 1 == len(curves.budget)


def test_the_rate_at_a_budget_is_of_unseen_traffic_where_there_is_any():
    own, unseen = skewed(), skewed(seed=1)
    _, alone = curves_of(own)
    _, tested = curves_of(own, test=unseen)
    assert alone.own[48] == pytest.approx(alone.at(0.5))
    assert tested.unseen[48] == pytest.approx(tested.at(0.5))


def test_stages_grow_side_by_side():
    plan = weighed(plan_of(skewed()), pp=2)
    order_N, budget_N = ranking(plan, counts=skewed().phases["decode"].counts)
    first_half = order_N[: len(order_N) // 2]
    assert 24 == (first_half < 48).sum()  # of 3 layers x 16 experts of the first stage
    assert 0.5 == pytest.approx(budget_N[48])


@given(seed=st.integers(0, 1000), num_layers=st.integers(1, 4), num_experts=st.integers(2, 9))
def test_the_ranking_names_every_cell_once(seed, num_layers, num_experts):
    histogram = skewed(seed=seed, num_layers=num_layers, num_experts=num_experts, top_k=1, tokens=50)
    order_N, budget_N = ranking(plan_of(histogram), counts=histogram.phases["decode"].counts)
    assert list(range(num_layers * num_experts)) == sorted(order_N.tolist())
    assert (0.0, 1.0) == (budget_N[0], pytest.approx(budget_N[-1]))
