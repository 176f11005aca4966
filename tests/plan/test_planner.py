"""Plans as a whole: acceptance numbers, fallbacks, invariants (CASES T5, T10)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.errors import BudgetError, ConfigError, HistogramError, PlanError, PlanMismatchError
from hotsplit.plan.evaluate import drift
from hotsplit.plan.planfile import to_bytes
from hotsplit.plan.planner import PlanOptions, make_plan, plan_fraction
from plan_builders import histogram_of, published, sizes_of

SKEWED = [[70.0, 10.0, 10.0, 10.0], [40.0, 30.0, 20.0, 10.0]]


def _static(**options):
    return PlanOptions(dynamic=False, **options)


@pytest.mark.parametrize(("fraction", "expected"), [(0.1, 0.360), (0.2, 0.573), (0.3, 0.719), (0.5, 0.890)])
def test_qwen3_30b_serves_its_published_traffic(fraction, expected):
    plan, _ = plan_fraction(published("qwen3-30b-a3b.decode.json"), fraction=fraction, options=PlanOptions())
    assert expected == round(plan.proof.hit_rate, 3)


@pytest.mark.parametrize(("fraction", "percent"), [(0.1, 34.2), (0.2, 51.6), (0.3, 64.5), (0.5, 83.0)])
def test_mimo_v2_serves_its_published_traffic(fraction, percent):
    plan, _ = plan_fraction(published("mimo-v2.6-pro.8prompt.json"), fraction=fraction, options=PlanOptions())
    assert percent == round(100 * plan.proof.hit_rate, 1)


def test_a_hot_set_ranked_on_books_serves_29_percent_of_code_where_codes_own_serves_84():
    github = published("olmoe-1b-7b.domains.json#github")
    book = published("olmoe-1b-7b.domains.json#book")
    plan, notices = plan_fraction(book, fraction=0.5, options=PlanOptions(test=github))
    own, _ = plan_fraction(github, fraction=0.5, options=PlanOptions())
    assert "held-out-no-better" in [notice.name for notice in notices]
    assert (0.292, 0.5) == (round(plan.proof.held_out, 3), plan.proof.null)
    assert {32} == set(plan.hot_rows().tolist())
    assert 84.3 == round(100 * own.proof.hit_rate, 1)


def test_a_plan_of_equal_rows_takes_the_best_experts_of_all_layers():
    plan, notices = make_plan(
        sizes_of([8, 8], num_experts=4), histogram=histogram_of(SKEWED), budget_bytes=4 * 8, options=_static()
    )
    assert ((0,), (0, 1, 2)) == plan.hot
    assert (0.8, 0.5, 0.8, 0.0) == (plan.proof.hit_rate, plan.proof.null, plan.proof.bound, plan.proof.gap)
    assert [] == notices


def test_a_dynamic_plan_pays_for_top_k_rows_and_a_spare_in_every_layer():
    plan, _ = make_plan(
        sizes_of([8, 8], num_experts=4), histogram=histogram_of(SKEWED), budget_bytes=5 * 8, options=PlanOptions()
    )
    assert ((0,), (0, 1)) == plan.hot
    assert (40, 40) == (plan.stages[0].budget_bytes, plan.stages[0].used_bytes)


def test_a_dynamic_budget_below_its_minimum_is_refused_with_the_minimum():
    with pytest.raises(BudgetError, match="HOTSPLIT_DYNAMIC=0") as caught:
        make_plan(sizes_of([8, 8], num_experts=4), histogram=None, budget_bytes=31, options=PlanOptions())
    assert 32 == caught.value.minimum_bytes


def test_no_budget_at_all_is_a_static_plan_with_everything_cold():
    plan, _ = make_plan(
        sizes_of([8, 8], num_experts=4), histogram=histogram_of(SKEWED), budget_bytes=0, options=_static()
    )
    assert ((), ()) == plan.hot
    assert 0.0 == plan.proof.hit_rate


def test_fixed_bytes_are_charged_before_any_row():
    plan, _ = make_plan(
        sizes_of([8, 8], num_experts=4, fixed_bytes=4),
        histogram=histogram_of(SKEWED),
        budget_bytes=4 * 8,
        options=_static(),
    )
    assert (8, 32) == (plan.stages[0].fixed_bytes, plan.stages[0].used_bytes)
    assert 3 == plan.hot_rows().sum()


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_budget_above_the_expert_bytes_is_capped_with_a_notice(dynamic):
    plan, notices = make_plan(
        sizes_of([8, 8], num_experts=4, fixed_bytes=4),
        histogram=histogram_of(SKEWED),
        budget_bytes=10**6,
        options=PlanOptions(dynamic=dynamic, strict=True),
    )
    assert ["budget-capped"] == [notice.name for notice in notices]
    assert (72, 72) == (plan.stages[0].budget_bytes, plan.stages[0].used_bytes)
    assert plan.hot_mask().all()


def test_without_counts_every_layer_gets_the_same_number_of_rows():
    plan, notices = make_plan(sizes_of([8] * 3, num_experts=4), histogram=None, budget_bytes=7 * 8, options=_static())
    assert [3, 2, 2] == plan.hot_rows().tolist()
    assert ["no-histogram"] == [notice.name for notice in notices]
    assert (None, None, None) == (plan.proof.hit_rate, plan.proof.bound, plan.proof.held_out)


def test_flat_counts_spread_evenly_rather_than_layer_by_layer():
    plan, notices = make_plan(
        sizes_of([8] * 3, num_experts=4), histogram=histogram_of(np.ones((3, 4))), budget_bytes=6 * 8, options=_static()
    )
    assert [2, 2, 2] == plan.hot_rows().tolist()
    assert ["no-skew"] == [notice.name for notice in notices]


def _domains(seed=0, *, num_layers=4, num_experts=16):
    """Two samples of one domain and one of a disjoint domain."""
    random = np.random.default_rng(seed)
    half = np.tile(np.repeat([9.0, 0.0], num_experts // 2), (num_layers, 1))
    first, second = (random.poisson(200 * half / 9) for _ in range(2))
    return histogram_of(first), histogram_of(second), histogram_of(first[:, ::-1].copy())


def test_traffic_of_another_domain_is_warned_of_and_spreads_evenly():
    own, _, foreign = _domains()
    plan, notices = plan_fraction(own, fraction=0.25, options=PlanOptions(test=foreign))
    assert ["held-out-no-better"] == [notice.name for notice in notices]
    assert {4} == set(plan.hot_rows().tolist())
    assert (0.0, 0.25) == (plan.proof.held_out, plan.proof.null)
    assert "serves 0.0 %, a blind choice 25.0 %" in notices[0].text
    assert "worst layer" in notices[0].text


def test_traffic_of_the_same_domain_raises_nothing():
    own, again, _ = _domains()
    plan, notices = plan_fraction(own, fraction=0.25, options=PlanOptions(test=again, strict=True))
    assert [] == notices
    assert plan.proof.null + 0.2 < plan.proof.held_out <= plan.proof.oracle_reachable <= plan.proof.oracle_free


@pytest.mark.parametrize("fraction", [0.0, 0.005, 0.995, 1.0])
def test_good_counts_pass_even_where_two_points_cannot_be_gained(fraction):
    own, again, _ = _domains(num_layers=16)
    _, notices = plan_fraction(own, fraction=fraction, options=PlanOptions(test=again))
    assert [] == notices


def test_strict_mode_refuses_counts_that_are_of_no_use():
    own, _, foreign = _domains()
    with pytest.raises(PlanError, match="held-out-no-better"):
        plan_fraction(own, fraction=0.25, options=PlanOptions(test=foreign, strict=True))
    with pytest.raises(PlanError, match="no-histogram"):
        make_plan(sizes_of([8], num_experts=4), histogram=None, budget_bytes=24, options=PlanOptions(strict=True))


def test_an_oracle_is_of_the_test_traffic_where_there_is_some():
    own, again, _ = _domains()
    with_test, _ = plan_fraction(own, fraction=0.25, options=PlanOptions(test=again))
    other, _ = plan_fraction(again, fraction=0.25, options=PlanOptions())
    assert other.proof.oracle_free == with_test.proof.oracle_free


def test_counts_of_another_model_are_refused():
    with pytest.raises(PlanMismatchError, match="num_experts is 4, not 8"):
        make_plan(sizes_of([8, 8], num_experts=8), histogram=histogram_of(SKEWED), budget_bytes=64, options=_static())


def test_counts_that_cannot_be_believed_are_refused():
    with pytest.raises(HistogramError, match="expert 1"):
        plan_fraction(histogram_of([[1.0, float("nan")]]), fraction=0.5, options=PlanOptions())


def test_prefill_counts_stand_in_with_a_notice():
    _, notices = plan_fraction(histogram_of(SKEWED, phase="prefill"), fraction=0.5, options=PlanOptions())
    assert ["prefill-counts"] == [notice.name for notice in notices]


def test_every_pipeline_stage_has_the_whole_budget():
    plan, _ = make_plan(
        sizes_of([8] * 4, num_experts=4),
        histogram=histogram_of(SKEWED + SKEWED),
        budget_bytes=3 * 8,
        options=_static(pp=2),
    )
    assert [(0, 1), (2, 3)] == [stage.layers for stage in plan.stages]
    assert [24, 24] == [stage.used_bytes for stage in plan.stages]
    assert plan.hot[:2] == plan.hot[2:]


def test_a_pipeline_stage_without_moe_layers_takes_nothing():
    plan, _ = make_plan(
        sizes_of([8, 8], num_experts=4, first_layer=2),
        histogram=histogram_of(SKEWED, first_layer=2),
        budget_bytes=5 * 8,
        options=PlanOptions(pp=2),
    )
    assert [((), 0), ((2, 3), 40)] == [(stage.layers, stage.used_bytes) for stage in plan.stages]


@pytest.mark.parametrize(("fraction", "rows"), [(0.29, 29), (0.57, 57), (0.1, 10), (1, 100)])
def test_a_fraction_means_what_is_written_not_its_binary_neighbour(fraction, rows):
    counts = np.arange(100.0).reshape(4, 25)
    assert rows == plan_fraction(histogram_of(counts), fraction=fraction, options=PlanOptions())[0].hot_rows().sum()


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        plan_fraction(histogram_of(SKEWED), fraction=fraction, options=PlanOptions())


@pytest.mark.parametrize(
    ("options", "wanted"), [({"objective": "speed"}, "share or time"), ({"pp": 0}, "integer >= 1")]
)
def test_bad_options_are_refused(options, wanted):
    with pytest.raises(ConfigError, match=wanted):
        PlanOptions(**options)


def _wide_layers():
    """43 layers, five of them with rows 2.6 times as wide."""
    rows = np.full(43, 10)
    rows[[4, 13, 22, 31, 40]] = 26
    counts = np.random.default_rng(3).zipf(1.6, (43, 24)).clip(0, 10_000)
    return sizes_of(rows, num_experts=24, top_k=2), histogram_of(counts, top_k=2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_mixed_rows_are_priced_at_their_own_width(dynamic):
    sizes, histogram = _wide_layers()
    for budget_bytes in range(2_000, sizes.expert_bytes + 1, 37):
        plan, _ = make_plan(sizes, histogram=histogram, budget_bytes=budget_bytes, options=PlanOptions(dynamic=dynamic))
        rows = plan.hot_rows()
        used = int(((rows + (dynamic & (rows < 24))) * sizes.row_bytes).sum())
        left = budget_bytes - used
        assert used == plan.stages[0].used_bytes <= budget_bytes
        assert left < sizes.row_bytes[rows < 24 - dynamic].min(initial=10**9)


@pytest.mark.parametrize("dynamic", [True, False])
def test_raising_the_budget_of_mixed_rows_never_lowers_the_hit_rate(dynamic):
    sizes, histogram = _wide_layers()
    options = PlanOptions(dynamic=dynamic)
    rates = [
        make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options)[0].proof.hit_rate
        for budget in range(2_000, 10_000, 11)
    ]
    assert sorted(rates) == rates
    assert rates[0] < rates[len(rates) // 2] < rates[-1]


@st.composite
def models(draw):
    """Sizes, counts and two budgets that are enough, the smaller first."""
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    cells = st.lists(st.integers(0, 99), min_size=num_experts, max_size=num_experts)
    counts = [draw(cells) for _ in range(num_layers)]
    rows = draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
    sizes = sizes_of(rows, num_experts=num_experts, fixed_bytes=draw(st.integers(0, 3)))
    least, most = 2 * sum(rows) + 3 * num_layers, num_experts * sum(rows) + 3 * num_layers
    budgets = st.integers(least, max(least, most))
    return sizes, histogram_of(counts), sorted(draw(st.tuples(budgets, budgets)))


OPTIONS = st.builds(PlanOptions, dynamic=st.booleans(), objective=st.sampled_from(["share", "time"]))


@given(models(), OPTIONS)
def test_a_plan_fits_its_budget_and_counts_its_bytes_exactly(model, options):
    sizes, histogram, (budget, _) = model
    plan, _ = make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options)
    rows, num_experts = plan.hot_rows(), sizes.identity.num_experts
    spare = (rows < num_experts) if options.dynamic else 0
    used = int(((rows + spare) * sizes.row_bytes + sizes.fixed_bytes).sum())
    assert used == plan.stages[0].used_bytes <= plan.stages[0].budget_bytes <= budget


@given(models(), OPTIONS)
def test_the_same_input_makes_the_same_bytes(model, options):
    sizes, histogram, (budget, _) = model
    first, second = (
        to_bytes(make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options)[0]) for _ in range(2)
    )
    assert first == second


@given(models(), st.booleans())
def test_raising_the_budget_never_lowers_the_hit_rate(model, dynamic):
    sizes, histogram, budgets = model
    rates = [
        make_plan(sizes, histogram=histogram, budget_bytes=budget, options=PlanOptions(dynamic=dynamic))[
            0
        ].proof.hit_rate
        for budget in budgets
    ]
    assert rates[0] <= rates[1]


@given(models(), OPTIONS)
def test_no_plan_beats_its_bound(model, options):
    sizes, histogram, (budget, _) = model
    proof = make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options)[0].proof
    assert 0 <= proof.hit_rate <= proof.bound <= 1
    assert proof.hit_rate <= proof.oracle_reachable <= proof.oracle_free


@given(models(), OPTIONS, st.randoms(use_true_random=False))
def test_renumbering_the_experts_renumbers_the_plan(model, options, random):
    sizes, histogram, (budget, _) = model
    num_layers, num_experts = histogram.phases["decode"].counts.shape
    # Different counts everywhere: no tie is left for the numbers to break, and no fallback goes by number.
    counts = histogram.phases["decode"].counts * 1000 + 1 + np.arange(num_layers * num_experts).reshape(num_layers, -1)
    order = list(range(num_experts))
    random.shuffle(order)
    plan, renumbered = (
        make_plan(sizes, histogram=histogram_of(c), budget_bytes=budget, options=options)[0]
        for c in (counts, counts[:, order])
    )
    if drift(counts, np.ones_like(counts)) >= 0.02:
        assert plan.hot == tuple(tuple(order[expert] for expert in experts) for experts in renumbered.hot)
    assert replace(plan, hot=()).stages == replace(renumbered, hot=()).stages


@settings(max_examples=25)
@given(models())
def test_every_layer_of_a_dynamic_plan_takes_part(model):
    sizes, histogram, (budget, _) = model
    plan, _ = make_plan(sizes, histogram=histogram, budget_bytes=budget, options=PlanOptions())
    assert min(plan.hot_rows()) >= 1
