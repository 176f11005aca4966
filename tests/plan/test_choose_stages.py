"""Ranks of pipeline stages: one plan of all stages from the same files, and the part that each of them holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotsplit.errors import BudgetError, ConfigError, PlanError, PlanMismatchError
from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.histogram import save_histogram
from hotsplit.plan.learned import learned_path, save_learned
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.stage import stage_sizes
from plan_builders import histogram_of, sizes_of

E, L, ROW = 8, 2, 100
SIZES = sizes_of([ROW] * L, num_experts=E)
TWO = PlanOptions(pp=2)
BUDGET = 5 * ROW
"""In dynamic mode 4 hot rows and a spare one in a stage of one layer."""


def counts_of(first, *, scale=10_000):
    """Counts that fall from expert `first` on, the same in both layers."""
    falling = np.arange(E, 0, -1) ** 2 * scale
    return histogram_of([np.roll(falling, first)] * L)


@pytest.fixture
def counts(tmp_path):
    """A reference whose favourites are experts 0, 1, 2, 3."""
    save_histogram(counts_of(0), tmp_path / "counts.json")
    return str(tmp_path / "counts.json")


def made(*, options=TWO, budget=BUDGET):
    """A plan whose hot experts are 2, 3, 4, 5."""
    return make_plan(SIZES, histogram=counts_of(2), budget_bytes=budget, options=options)[0]


def names(choice):
    return {notice.name for notice in choice.notices}


def said(choice, name):
    """The text of the one notice of that name."""
    (text,) = [notice.text for notice in choice.notices if notice.name == name]
    return text


def favourites(choice):
    """Hot experts of the first layer; the second one's are the same."""
    assert choice.plan.hot[0] == choice.plan.hot[1]
    return set(choice.plan.hot[0])


def save_stage(folder, *, stage, first, scale=10_000):
    """Learned counts of one stage of SIZES cut in two, whose favourites begin with expert `first`; scale 0: none."""
    counted = counts_of(first, scale=scale)
    rows = counted.phases["decode"].counts[:1]
    identity = stage_sizes(SIZES, [stage]).identity
    phases = {"decode": replace(counted.phases["decode"], counts=rows)}
    return save_learned(replace(counted, identity=identity, phases=phases), folder, stage=stage)


def choose(stage, *, sizes=SIZES, **request):
    given = {"budget_bytes": BUDGET, "options": TWO, "stage": stage} | request
    return choose_plan(sizes, request=PlanRequest(**given))


def test_every_stage_gets_the_same_plan_of_all_stages_and_its_own_part_of_it(counts):
    first, second = (choose(stage, counts=counts) for stage in (0, 1))
    assert first.plan == second.plan
    assert [BUDGET] * 2 == [stage.budget_bytes for stage in first.plan.stages]
    assert ((0,), (1,)) == (first.part.layers, second.part.layers)
    assert ((first.plan.hot[0],), (first.plan.hot[1],)) == (first.part.hot, second.part.hot)
    assert first.prior[:1].tolist() == first.part.rows_of(first.prior).tolist()


@pytest.mark.parametrize(("stage", "pp"), [(1, 1), (-1, 2), (2, 2), (True, 2), (0.0, 1)])
def test_a_stage_that_there_is_not_is_refused_with_its_range(stage, pp):
    with pytest.raises(ConfigError, match=f"stage: got {stage}; wanted an integer from 0 to {pp - 1}"):
        PlanRequest(budget_bytes=0, options=PlanOptions(pp=pp), stage=stage)


def test_a_plan_file_for_several_stages_is_used_by_each_of_them(tmp_path):
    save_plan(made(), tmp_path / "pp.json")
    for stage in (0, 1):
        choice = choose(stage, plan=tmp_path / "pp.json", is_budget_given=True)
        assert made() == choice.plan
        assert ((stage,), BUDGET) == (choice.part.layers, choice.part.budget_bytes)


def test_a_plan_for_one_stage_is_refused_by_several(tmp_path):
    save_plan(made(options=PlanOptions(), budget=2 * BUDGET), tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="pp is 1, not 2; make one with --pp 2"):
        choose(0, plan=tmp_path / "plan.json", force=True)


def test_a_plan_for_another_number_of_shards_is_refused_by_that_name(tmp_path):
    save_plan(made(), tmp_path / "tp1.json")
    with pytest.raises(PlanMismatchError, match="tp is 1, not 2"):
        choose(1, sizes=replace(SIZES, tp=2), plan=tmp_path / "tp1.json")


def test_a_plan_whose_stages_are_cut_elsewhere_is_refused(tmp_path):
    four = sizes_of([ROW] * 4, num_experts=E)
    cut = make_plan(four, histogram=None, budget_bytes=10 * ROW, options=TWO)[0]
    widths = (((0,), 0), ((1, 2, 3), 1))
    stages = [replace(cut.stages[n], layers=layers, budget_bytes=10**6) for layers, n in widths]
    stages = tuple(replace(stage, used_bytes=sum(len(cut.hot[n]) + 1 for n in stage.layers) * ROW) for stage in stages)
    save_plan(replace(cut, stages=stages), tmp_path / "odd.json")
    with pytest.raises(PlanMismatchError, match=r"MoE layers per stage are \[1, 3\], not \[2, 2\]"):
        choose(0, sizes=four, plan=tmp_path / "odd.json")


def test_every_stages_budget_is_held_against_the_one_that_is_named(tmp_path):
    both = made()
    stages = (both.stages[0], replace(both.stages[1], budget_bytes=BUDGET + 1))
    save_plan(replace(both, stages=stages), tmp_path / "pp.json")
    for stage in (0, 1):
        with pytest.raises(PlanError, match="stage 1: got a budget of .* in the plan and .* given"):
            choose(stage, plan=tmp_path / "pp.json", is_budget_given=True)
        assert stages[1] == choose(stage, plan=tmp_path / "pp.json").plan.stages[1]


def test_every_rank_refuses_a_plan_of_which_one_stage_has_no_room_for_its_spare_rows(tmp_path):
    static = made(options=replace(TWO, dynamic=False), budget=BUDGET)
    roomy = replace(static.stages[0], budget_bytes=10 * ROW)
    save_plan(replace(static, stages=(roomy, static.stages[1])), tmp_path / "static.json")
    for stage in (0, 1):
        with pytest.raises(BudgetError, match="stage 1: got .* with its spare rows"):
            choose(stage, plan=tmp_path / "static.json")


def test_what_every_stage_learned_is_planned_from_together(tmp_path):
    save_stage(tmp_path, stage=0, first=4)
    save_stage(tmp_path, stage=1, first=2)
    first, second = (choose(stage, state_dir=tmp_path) for stage in (0, 1))
    assert first.plan == second.plan
    assert ({4, 5, 6, 7}, {2, 3, 4, 5}) == tuple(set(hot) for hot in first.plan.hot)
    np.testing.assert_array_equal(counts_of(2).phases["decode"].counts[1:], second.part.rows_of(second.prior))


def test_what_every_stage_learned_is_merged_into_a_reference(tmp_path, counts):
    save_stage(tmp_path, stage=0, first=4)
    save_stage(tmp_path, stage=1, first=4)
    assert {0, 1, 4, 5} == favourites(choose(0, counts=counts, state_dir=tmp_path))


def test_the_stage_that_saw_the_fewest_tokens_says_whether_a_reference_moves(tmp_path, counts):
    save_stage(tmp_path, stage=0, first=4)
    save_stage(tmp_path, stage=1, first=4, scale=1)
    choice = choose(0, counts=counts, state_dir=tmp_path)
    assert {0, 1, 2, 3} == favourites(choice)
    assert f"got {sum(n * n for n in range(1, E + 1))} decode tokens" in said(choice, "learned-skipped")


@pytest.mark.parametrize("stage", [0, 1])
def test_learned_counts_are_of_all_stages_or_of_none(tmp_path, counts, stage):
    save_stage(tmp_path, stage=stage, first=4)
    choice = choose(0, counts=counts, state_dir=tmp_path)
    assert {0, 1, 2, 3} == favourites(choice)
    assert f"of all 2 pipeline stages or of none: stage {1 - stage} has none" in said(choice, "learned-skipped")


def test_a_stage_that_counted_nothing_is_not_ranked_by_the_others_skew(tmp_path):
    save_stage(tmp_path, stage=0, first=4)
    save_stage(tmp_path, stage=1, first=4, scale=0)
    choice = choose(0, state_dir=tmp_path)
    assert "counts: none, every layer alike; no learned counts" == choice.origin
    assert choice.prior is None


def test_a_damaged_file_of_one_stage_is_named_and_no_stage_is_used(tmp_path):
    save_stage(tmp_path, stage=0, first=4)
    save_stage(tmp_path, stage=1, first=4).write_text("{")
    choice = choose(1, state_dir=tmp_path)
    assert {"learned-damaged", "learned-skipped", "no-histogram"} <= names(choice)
    assert choice.prior is None


def test_a_stage_without_moe_layers_learns_nothing_and_hinders_nobody(tmp_path):
    late = replace(sizes_of([ROW] * L, num_experts=E, first_layer=2), num_decoder_layers=4)
    counted = counts_of(4)
    save_learned(replace(counted, identity=late.identity), tmp_path, stage=1)
    first, second = (choose(stage, sizes=late, state_dir=tmp_path, budget_bytes=2 * BUDGET) for stage in (0, 1))
    assert ((), ()) == (first.part.layers, first.part.hot)
    assert {4, 5, 6, 7} == favourites(second) == favourites(first)
    assert (2, 3) == second.part.layers


def test_the_whole_models_counts_are_never_taken_for_one_stages(tmp_path):
    save_learned(counts_of(4), tmp_path)
    choice = choose(0, state_dir=tmp_path)
    assert "layers is [0, 1], not [0]" in said(choice, "learned-mismatch")
    assert choice.prior is None


def test_a_stages_learned_file_is_that_of_the_identity_of_its_part(tmp_path):
    path = save_stage(tmp_path, stage=1, first=4)
    part = choose(1).part
    assert path == learned_path(tmp_path, part.identity, stage=part.stage)
