"""One stage's part of a plan, its sizes, and its rows as they turn out at start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import BudgetError, PlanError
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.stage import revalidate, stage_of, stage_sizes
from hotsplit.units import GIB
from plan_builders import histogram_of, sizes_of

E = 8
SIZES = sizes_of([100, 100, 300, 100], num_experts=E, first_layer=3, fixed_bytes=7)
"""Seven decoder layers, the first three dense: of two stages the first has one MoE layer, the second three."""
MIB = 2**20


def plan_of(sizes=SIZES, *, budget_bytes=2000, dynamic=True, pp=2):
    histogram = histogram_of([np.arange(E) ** 2] * len(sizes.row_bytes), first_layer=sizes.identity.layers[0])
    options = PlanOptions(dynamic=dynamic, pp=pp)
    return make_plan(sizes, histogram=histogram, budget_bytes=budget_bytes, options=options)[0]


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_the_stages_parts_together_are_the_plan(pp):
    plan = plan_of(pp=pp)
    parts = [stage_of(plan, stage) for stage in range(pp)]
    assert plan.layers == sum((part.layers for part in parts), ())
    assert plan.hot == sum((part.hot for part in parts), ())
    assert plan.row_bytes == sum((part.row_bytes for part in parts), ())
    assert [stage.budget_bytes for stage in plan.stages] == [part.budget_bytes for part in parts]
    assert [stage.used_bytes for stage in plan.stages] == [part.needed_bytes(dynamic=True) for part in parts]
    assert list(range(4)) == [layer_id for part in parts for layer_id in part.layer_ids]


def test_a_stage_takes_its_rows_of_an_array_over_all_layers():
    counts = np.arange(4 * E, dtype=np.float64).reshape(4, E)
    parts = [stage_of(plan_of(), stage) for stage in (0, 1)]
    assert [1, 3] == [len(part.layers) for part in parts]
    assert counts.tolist() == np.concatenate([part.rows_of(counts) for part in parts]).tolist()
    assert [100] == parts[0].rows_of(SIZES.row_bytes).tolist()


@pytest.mark.parametrize("rows", [0, 3, 5])
def test_an_array_over_other_layers_is_refused(rows):
    with pytest.raises(
        PlanError, match=f"stage 1 of: got {rows} rows; wanted one for each of the model's 4 MoE layers"
    ):
        stage_of(plan_of(), 1).rows_of(np.zeros((rows, E)))


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_the_plan_has_not_is_refused(stage):
    with pytest.raises(PlanError, match=f"pipeline stage {stage}: got a plan of 2 stages"):
        stage_of(plan_of(), stage)


def test_sizes_of_a_stage_are_those_of_its_layers_and_dense_bytes_stay_the_models():
    sizes = replace(SIZES, dense_bytes=11, tp=4)
    part = stage_sizes(sizes, (4, 5))
    assert (4, 5) == part.identity.layers
    assert ([100, 300], [7, 7]) == (part.row_bytes.tolist(), part.fixed_bytes.tolist())
    assert 400 * E == part.expert_bytes
    assert (11, 4, 7, sizes.headers_hash) == (
        part.dense_bytes,
        part.tp,
        part.num_decoder_layers,
        part.headers_hash,
    )
    assert SIZES.identity == stage_sizes(SIZES, SIZES.identity.layers).identity


def test_a_stage_may_have_no_sizes():
    part = stage_sizes(SIZES, ())
    assert ((), 0, 0) == (part.identity.layers, part.expert_bytes, part.fixed_bytes.size)


@pytest.mark.parametrize(("layers", "got"), [((2, 3), "layer 2"), ((4, 3), r"\[4, 3\]"), ((3, 3), r"\[3, 3\]")])
def test_layers_that_are_no_stage_of_the_model_are_refused(layers, got):
    with pytest.raises(PlanError, match=f"layers of a pipeline stage: got {got}; wanted MoE layers of the model"):
        stage_sizes(SIZES, layers)


# Rows as they are at start.

ONE = sizes_of([10 * MIB] * 2, num_experts=E, fixed_bytes=MIB)
ONE_BUDGET = 62 * MIB
"""Two hot rows and a spare one per layer, and the fixed bytes."""
PART = stage_of(plan_of(ONE, budget_bytes=ONE_BUDGET, pp=1), 0)


def check(row_mib, *, fixed_mib=2, budget_mib=62, dynamic=True, part=PART):
    row_bytes = [int(mib * MIB) for mib in row_mib]
    limits = {"fixed_bytes": fixed_mib * MIB, "budget_bytes": budget_mib * MIB}
    return revalidate(part, row_bytes=row_bytes, dynamic=dynamic, **limits)


def test_rows_as_planned_are_nothing_to_say():
    assert ONE_BUDGET == PART.needed_bytes(dynamic=True)
    assert [] == check([10, 10])


@pytest.mark.parametrize(
    ("row_mib", "fixed_mib", "text"),
    [
        ([10, 9], 2, f"a row of layer 1 has {9 * MIB} bytes where the plan has {10 * MIB}"),
        ([11, 9], 2, f"a row of layer 0 has {11 * MIB} bytes where the plan has {10 * MIB}"),
        ([10, 10], 0, f"0 bytes stay fast for all experts where the plan has {2 * MIB}"),
    ],
)
def test_other_bytes_that_fit_are_a_notice(row_mib, fixed_mib, text):
    (notice,) = check(row_mib, fixed_mib=fixed_mib)
    assert ("row-bytes-differ", False) == (notice.name, notice.strict)
    assert text in notice.text
    assert "still fit their budget" in notice.text


def test_heavier_rows_fit_a_budget_that_the_plan_had_only_capped():
    assert ["row-bytes-differ"] == [notice.name for notice in check([11, 11], budget_mib=68)]


def test_one_byte_too_many_is_refused():
    with pytest.raises(BudgetError, match="hot rows of pipeline stage 0 as they are at start") as caught:
        check([10 + 1 / MIB, 10])
    assert (ONE_BUDGET, ONE_BUDGET + 3) == (caught.value.budget_bytes, caught.value.minimum_bytes)


def test_without_spare_rows_fewer_bytes_are_needed():
    assert ["row-bytes-differ"] == [notice.name for notice in check([15, 15], dynamic=False)]
    with pytest.raises(BudgetError):
        check([15, 15])


def test_a_budget_that_shrank_since_the_plan_was_made_is_refused_without_blaming_the_rows():
    with pytest.raises(
        BudgetError, match=r"got 0\.060547 GiB; wanted at most .*; HOTSPLIT_HOT_GIB=0\.060547 holds"
    ) as caught:
        check([10, 10], budget_mib=61)
    assert "would have fitted" not in str(caught.value)


def test_fixed_bytes_beyond_the_budget_leave_no_plan_that_would_have_fitted():
    with pytest.raises(BudgetError) as caught:
        check([10, 10], fixed_mib=63)
    assert "would have fitted" not in str(caught.value)


def test_rows_of_another_number_of_layers_are_refused():
    with pytest.raises(PlanError, match="rows of 1 layers; wanted 2, those of stage 0"):
        check([10])


@st.composite
def rows_that_do_not_fit(draw):
    """Sizes as planned, real row bytes and fixed bytes, a budget, and the refusal."""
    num_layers = draw(st.integers(1, 3))
    row = st.integers(1, 9).map(lambda n: n * MIB)
    planned = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    real = [nbytes + draw(st.integers(0, 4 * MIB)) for nbytes in planned]
    sizes = sizes_of(planned, num_experts=E, fixed_bytes=draw(st.integers(0, 5)))
    fixed_bytes = draw(st.integers(0, 20))
    budget_bytes = draw(st.integers(num_layers * 30 * MIB, num_layers * 90 * MIB))
    part = stage_of(plan_of(sizes, budget_bytes=budget_bytes, pp=1), 0)
    return sizes, part, {"row_bytes": real, "fixed_bytes": fixed_bytes, "budget_bytes": budget_bytes, "dynamic": True}


@given(rows_that_do_not_fit())
def test_the_budgets_that_a_refusal_names_are_enough_and_would_have_been(case):
    sizes, part, start = case
    try:
        revalidate(part, **start)
    except BudgetError as refusal:
        smallest, _, rest = str(refusal).partition("HOTSPLIT_HOT_GIB=")[2].partition(" holds these rows")
        revalidate(part, **start | {"budget_bytes": int(float(smallest) * GIB)})
        named = rest.partition("a plan made for ")[2].partition(" GiB would have fitted")[0]
        if named and float(named) * GIB >= 2 * sum(part.row_bytes) + part.fixed_bytes:
            another = stage_of(plan_of(sizes, budget_bytes=int(float(named) * GIB), pp=1), 0)
            revalidate(another, **start)
    else:
        assert part.needed_bytes(**{key: start[key] for key in start if key != "budget_bytes"}) <= start["budget_bytes"]
