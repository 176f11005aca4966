from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotsplit.errors import BudgetError, HistogramError, PlanError, PlanMismatchError
from hotsplit.plan.choose import PlanRequest, choose_plan, needed_bytes, read_counts
from hotsplit.plan.histogram import save_histogram
from hotsplit.plan.learned import save_learned
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.planner import PlanOptions, make_plan, plan_fraction
from plan_builders import histogram_of, sizes_of

E, L, ROW = 8, 2, 100
SIZES = sizes_of([ROW] * L, num_experts=E)
BUDGET = 10 * ROW
"""In dynamic mode 4 hot rows and a spare one per layer."""
STATIC, DYNAMIC = PlanOptions(dynamic=False), PlanOptions()


def counts_of(first, *, scale=10_000):
    """Counts that fall from expert `first` on, the same in both layers."""
    falling = np.arange(E, 0, -1) ** 2 * scale
    return histogram_of([np.roll(falling, first)] * L)


@pytest.fixture
def counts(tmp_path):
    """A reference whose favourites are experts 0, 1, 2, 3."""
    save_histogram(counts_of(0), tmp_path / "counts.json")
    return str(tmp_path / "counts.json")


@pytest.fixture
def learned(tmp_path):
    """State of earlier runs, whose favourites are experts 4, 5, 6, 7."""
    save_learned(counts_of(4), tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def plan(tmp_path):
    """A plan file whose hot experts are 2, 3, 4, 5."""
    save_plan(made(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def made(*, sizes=SIZES, options=DYNAMIC, budget=BUDGET):
    return make_plan(sizes, histogram=counts_of(2), budget_bytes=budget, options=options)[0]


def choose(sizes=SIZES, **request):
    return choose_plan(sizes, request=PlanRequest(**{"budget_bytes": BUDGET} | request))


def names(choice):
    return {notice.name for notice in choice.notices}


def favourites(choice):
    """Hot experts of the first layer; the second one's are the same."""
    assert choice.plan.hot[0] == choice.plan.hot[1]
    return set(choice.plan.hot[0])


# Which counts rule.


def test_with_nothing_every_layer_is_alike_and_nothing_is_expected(tmp_path):
    choice = choose(state_dir=tmp_path)
    assert [4, 4] == choice.plan.hot_rows().tolist()
    assert choice.prior is None
    assert "no-histogram" in names(choice)
    assert "counts: none, every layer alike; no learned counts" == choice.origin


def test_counts_choose_where_nothing_was_learned(counts, tmp_path):
    choice = choose(counts=counts, state_dir=tmp_path)
    assert {0, 1, 2, 3} == favourites(choice)
    np.testing.assert_array_equal(counts_of(0).phases["decode"].counts, choice.prior)


def test_learned_counts_alone_choose_where_there_are_no_others(learned):
    choice = choose(state_dir=learned)
    assert {4, 5, 6, 7} == favourites(choice)
    np.testing.assert_array_equal(counts_of(4).phases["decode"].counts, choice.prior)
    assert "learned alone, weight 1" in choice.origin


def test_counts_and_learned_ones_choose_together_with_equal_weight(counts, learned):
    choice = choose(counts=counts, state_dir=learned)
    both = [counts_of(first).phases["decode"].counts for first in (0, 4)]
    np.testing.assert_allclose(sum(each / each.sum(axis=1, keepdims=True) for each in both), choice.prior)
    assert {0, 1, 4, 5} == favourites(choice)
    assert "weight 1 + learned weight 1" in choice.origin
    assert "learned" in choice.origin


def test_few_learned_counts_do_not_move_a_reference_but_are_carried_on(counts, tmp_path):
    save_learned(counts_of(4, scale=1), tmp_path / "state")
    choice = choose(counts=counts, state_dir=tmp_path / "state")
    assert {0, 1, 2, 3} == favourites(choice)
    assert "learned-skipped" in names(choice)
    assert "learned" in choice.origin


def test_without_a_state_folder_nothing_learned_is_looked_for(counts, learned):
    choice = choose(counts=counts, state_dir=None)
    assert {0, 1, 2, 3} == favourites(choice)
    assert "no learned counts" in choice.origin


def test_a_plan_file_rules_and_counts_only_score_it(counts, plan):
    choice = choose(counts=counts, plan=plan)
    assert made() == choice.plan
    assert "counts-score-plan" in names(choice)
    (text,) = [notice.text for notice in choice.notices if notice.name == "counts-score-plan"]
    assert f"serves {(36 + 25 + 16 + 9) / 204:.3f} of their decode pairs" in text


def test_under_a_plan_file_learned_counts_are_where_the_live_ones_start_from(plan, learned):
    choice = choose(plan=plan, state_dir=learned)
    assert {2, 3, 4, 5} == favourites(choice)
    np.testing.assert_array_equal(counts_of(4).phases["decode"].counts, choice.prior)
    assert choice.origin.startswith(f"plan {plan}; the live loop starts from counts: learned alone")


def test_counts_that_the_planner_does_not_believe_are_nothing_to_start_from(tmp_path):
    save_histogram(histogram_of([[100_000] * 7 + [100_001]] * L), tmp_path / "flat.json")
    choice = choose(counts=str(tmp_path / "flat.json"))
    assert "no-skew" in names(choice)
    assert None is choice.prior


def test_one_stage_holds_the_whole_plan(counts):
    choice = choose(counts=counts)
    assert (choice.plan.hot, choice.plan.layers, 0) == (choice.part.hot, choice.part.layers, choice.part.stage)
    assert SIZES.identity == choice.part.identity


# The budget of a plan file.


def test_a_plan_file_brings_its_own_budget_where_none_is_named(plan):
    assert BUDGET == choose(plan=plan, budget_bytes=1).plan.stages[0].budget_bytes


def test_a_plan_file_with_the_budget_that_is_named_is_used(plan):
    assert made() == choose(plan=plan, is_budget_given=True).plan


@pytest.mark.parametrize("budget", [BUDGET - 1, BUDGET + 1, 2 * BUDGET])
def test_a_plan_file_with_another_budget_than_the_one_named_is_refused(plan, budget):
    with pytest.raises(PlanError, match="leave HOTSPLIT_HOT_GIB out"):
        choose(plan=plan, is_budget_given=True, budget_bytes=budget)


def test_budgets_above_all_experts_are_the_same_budget(tmp_path):
    save_plan(made(budget=10**9), tmp_path / "all.json")
    choice = choose(plan=tmp_path / "all.json", is_budget_given=True, budget_bytes=10**10)
    assert [E, E] == choice.plan.hot_rows().tolist()


def test_a_static_plan_is_refused_in_dynamic_mode_where_its_spare_rows_do_not_fit(tmp_path):
    save_plan(made(options=STATIC), tmp_path / "static.json")
    with pytest.raises(BudgetError, match="with its spare rows.*or set HOTSPLIT_DYNAMIC=0"):
        choose(plan=tmp_path / "static.json")
    assert [5, 5] == choose(plan=tmp_path / "static.json", options=STATIC).plan.hot_rows().tolist()


def test_a_static_plan_with_room_for_spare_rows_is_used_in_dynamic_mode(tmp_path):
    roomy = made(options=STATIC)
    stage = replace(roomy.stages[0], budget_bytes=BUDGET + L * ROW)
    save_plan(replace(roomy, stages=(stage,)), tmp_path / "static.json")
    assert [5, 5] == choose(plan=tmp_path / "static.json").plan.hot_rows().tolist()


@pytest.mark.parametrize(("hot_rows", "short"), [((5, 2), "layer 4: got 2"), ((0, 8), "layer 3: got 0")])
def test_a_plan_with_fewer_hot_rows_than_a_token_chooses_is_refused_in_dynamic_mode(tmp_path, hot_rows, short):
    path = written(tmp_path, hot_rows=hot_rows)
    with pytest.raises(BudgetError, match=f"{short} hot experts; wanted at least 3 .*HOTSPLIT_DYNAMIC=0") as caught:
        choose(sizes=THREE, plan=path)
    assert 3 == caught.value.minimum_rows
    assert list(hot_rows) == choose(sizes=THREE, plan=path, options=STATIC).plan.hot_rows().tolist()


@pytest.mark.parametrize("hot_rows", [(3, 5), (3, 3), (8, 3), (8, 8)])
def test_a_plan_with_as_many_hot_rows_as_a_token_chooses_is_used_in_dynamic_mode(tmp_path, hot_rows):
    path = written(tmp_path, hot_rows=hot_rows)
    assert list(hot_rows) == choose(sizes=THREE, plan=path).plan.hot_rows().tolist()


THREE = sizes_of([ROW] * L, num_experts=E, top_k=3, first_layer=3)


def written(folder, *, hot_rows):
    """A plan for THREE with these hot rows and room for all."""
    plan = make_plan(THREE, histogram=None, budget_bytes=BUDGET, options=STATIC)[0]
    stage = replace(plan.stages[0], budget_bytes=2 * E * ROW, used_bytes=sum(hot_rows) * ROW)
    hot = tuple(tuple(range(count)) for count in hot_rows)
    save_plan(replace(plan, hot=hot, stages=(stage,)), folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.parametrize(
    ("hot_rows", "dynamic", "rows"), [((0, 8), True, 8), ((3, 8), True, 12), ((3, 5), True, 10), ((3, 5), False, 8)]
)
def test_a_plan_needs_its_hot_rows_and_a_spare_one_where_swaps_can_happen(hot_rows, dynamic, rows):
    plan = replace(made(), hot=tuple(tuple(range(count)) for count in hot_rows))
    assert rows * ROW == needed_bytes(plan, sizes=SIZES, dynamic=dynamic)
    fixed = sizes_of([ROW] * L, num_experts=E, fixed_bytes=7)
    assert rows * ROW + 14 == needed_bytes(plan, sizes=fixed, dynamic=dynamic)


def test_a_budget_above_rows_and_fixed_bytes_together_is_the_plans_own(tmp_path):
    sizes = sizes_of([ROW] * L, num_experts=E, fixed_bytes=7)
    save_plan(made(sizes=sizes, budget=10**9), tmp_path / "all.json")
    choice = choose(sizes, plan=tmp_path / "all.json", is_budget_given=True, budget_bytes=10**10)
    assert [E, E] == choice.plan.hot_rows().tolist()


# Files of another model.


def test_under_a_forced_plan_of_other_layers_the_counts_are_still_this_models(tmp_path):
    save_plan(made(sizes=sizes_of([ROW] * L, num_experts=E)), tmp_path / "plan.json")
    moved = sizes_of([ROW] * L, num_experts=E, first_layer=3)
    choice = choose(moved, plan=tmp_path / "plan.json", force=True)
    assert ((0, 1), (3, 4)) == (choice.plan.layers, choice.part.layers)


def test_a_plan_of_another_checkpoint_is_refused_by_the_field_and_forced_aloud(plan):
    other = replace(SIZES, headers_hash="1" * 64)
    with pytest.raises(PlanMismatchError, match="headers_hash"):
        choose(other, plan=plan)
    assert "plan-forced" in names(choose(other, plan=plan, force=True))


def test_a_plan_for_several_stages_is_refused_by_that_name(tmp_path):
    save_plan(made(options=PlanOptions(pp=2)), tmp_path / "pp.json")
    with pytest.raises(PlanMismatchError, match="pp is 2, not 1"):
        choose(plan=tmp_path / "pp.json")


def test_a_plan_without_a_model_is_refused(tmp_path):
    save_plan(plan_fraction(counts_of(0), fraction=0.5, options=STATIC)[0], tmp_path / "fraction.json")
    with pytest.raises(PlanMismatchError, match="made without a model"):
        choose(plan=tmp_path / "fraction.json")


def test_counts_of_another_model_are_refused_by_the_field_and_forced_aloud(tmp_path):
    histogram = counts_of(0)
    foreign = replace(histogram, identity=replace(histogram.identity, model_type="other"))
    save_histogram(foreign, tmp_path / "foreign.json")
    with pytest.raises(PlanMismatchError, match="model_type is other, not toy"):
        choose(counts=str(tmp_path / "foreign.json"))
    choice = choose(counts=str(tmp_path / "foreign.json"), force=True)
    assert "identity-forced" in names(choice)
    assert {0, 1, 2, 3} == favourites(choice)


def test_counts_of_another_top_k_are_forced_without_their_totals(tmp_path):
    histogram = counts_of(0)
    total = int(histogram.phases["decode"].counts[0].sum())
    counted = replace(histogram.phases["decode"], tokens=total // 2)
    identity = replace(histogram.identity, top_k=2)
    save_histogram(replace(histogram, identity=identity, phases={"decode": counted}), tmp_path / "two.json")
    with pytest.raises(PlanMismatchError, match="top_k is 2, not 1"):
        choose(counts=str(tmp_path / "two.json"))
    assert {0, 1, 2, 3} == favourites(choose(counts=str(tmp_path / "two.json"), force=True))


def test_counts_of_other_layers_cannot_be_forced(tmp_path):
    save_histogram(histogram_of([[3, 2, 1, 0, 0, 0, 0, 0]] * L, first_layer=5), tmp_path / "far.json")
    with pytest.raises(PlanMismatchError, match="--force cannot help here"):
        choose(counts=str(tmp_path / "far.json"), force=True)


def test_counts_get_the_models_own_identity(counts):
    histogram, _ = read_counts(counts, sizes=SIZES)
    assert SIZES.identity == histogram.identity
    assert (None, []) == read_counts(None, sizes=SIZES)


def test_strict_mode_refuses_doubtful_counts(tmp_path):
    save_histogram(histogram_of([[5] * E] * L), tmp_path / "flat.json")
    with pytest.raises(HistogramError, match="flat-counts"):
        choose(counts=str(tmp_path / "flat.json"), options=PlanOptions(strict=True))
    assert "flat-counts" in names(choose(counts=str(tmp_path / "flat.json")))
