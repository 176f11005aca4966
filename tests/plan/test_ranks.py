"""Several ranks, one plan (CASES T12): bytes, budgets, shards, and what is no routed expert.

That every bad knob (0, negative, nan, inf, a margin of 0.9, an unknown HOTSPLIT_ name) is refused with its range is
tested in tests/test_config.py; that swaps never touch the row of a fused shared expert, in tests/bank/test_rows.py; that
a budget which a refusal names really fits, reserve and rounding included, in tests/host/test_budget.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_files import write_model
from hotsplit.bank.rows import place
from hotsplit.errors import BudgetError, PlanError, PlanMismatchError
from hotsplit.host.budget import default_hot_bytes, require_memory
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.histogram import save_histogram
from hotsplit.plan.layouts import Place, shard_shape
from hotsplit.plan.planfile import plan_hash, to_bytes
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import expert_sizes
from hotsplit.plan.stage import require_same_hash, smallest_budget
from hotsplit.units import GIB
from plan_builders import histogram_of, sizes_of

E, K, D, F = 384, 8, 64, 257
"""Experts, top-k, model dimension and expert hidden dimension of the checkpoint below; F is odd for any number of ranks."""
SHARD = 3 * D * 65 * 2
"""Bytes of one bfloat16 expert on the widest of four ranks: 65 of 257 hidden elements."""
BUDGET = 200 * SHARD
STACK = "model.layers"

RANK = """
import hashlib, sys
from pathlib import Path
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.planfile import plan_hash, to_bytes
from hotsplit.plan.sizes import expert_sizes
folder, counts, budget = sys.argv[1:]
sizes = expert_sizes(read_headers(Path(folder)), tp=4)
plan = choose_plan(sizes, request=PlanRequest(budget_bytes=int(budget), counts=counts)).plan
assert hashlib.sha256(to_bytes(plan)).hexdigest() == plan_hash(plan)
print(plan_hash(plan))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a dense layer 0, MoE layers 1 and 2 with a shared expert each, and a draft layer 3."""
    moe = {
        "mlp.experts.gate_up_proj": ("BF16", [E, 2 * F, D]),
        "mlp.experts.down_proj": ("BF16", [E, D, F]),
        "mlp.shared_expert.up_proj.weight": ("BF16", [F, D]),
    }
    layers = [{"mlp.down_proj.weight": ("BF16", [D, F])}, moe, moe, moe]
    tensors = {f"model.layers.{n}.{name}": kind for n, layer in enumerate(layers) for name, kind in layer.items()}
    config = {"model_type": "toy_moe", "num_experts": E, "num_experts_per_tok": K, "num_hidden_layers": 3}
    return write_model(tmp_path_factory.mktemp("model"), tensors, config=config)


@pytest.fixture(scope="module")
def sizes(folder):
    return expert_sizes(read_headers(folder), tp=4)


def traffic_of(sizes, *, first=0):
    """Skewed counts of a model; the favourites of its first layer begin with expert `first`."""
    identity = sizes.identity
    falling = 10**6 // np.arange(1, identity.num_experts + 1)
    counts = histogram_of([np.roll(falling, first + layer) for layer in identity.layers], top_k=identity.top_k)
    return replace(counts, identity=identity)


def plan_of(sizes, *, budget=BUDGET, histogram=None, options=None):
    histogram = histogram or traffic_of(sizes)
    return make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options or PlanOptions())[0]


# One plan.


def test_four_processes_plan_384_experts_to_the_same_bytes(folder, sizes, tmp_path):
    save_histogram(traffic_of(sizes), tmp_path / "counts.json")
    command = [sys.executable, "-c", RANK, str(folder), str(tmp_path / "counts.json"), str(BUDGET)]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(rank)},  # noqa: TID251 - handed on, not read
        )
        for rank in range(4)
    ]
    hashes = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert [plan_hash(plan_of(sizes))] * 4 == hashes
    require_same_hash(hashes)


@pytest.mark.parametrize("num_experts", [384, 257])
@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_that_hold_the_same_counts_in_other_memory_layouts_plan_the_same_bytes(num_experts, pp):
    sizes = sizes_of([1000, 1300, 1000, 1000], num_experts=num_experts, top_k=K)
    counts_LE = traffic_of(sizes).phases["decode"].counts
    layouts = (
        counts_LE.copy(),
        np.asfortranarray(counts_LE),
        np.repeat(counts_LE, 2, axis=1)[:, ::2],
        counts_LE.astype(np.int64),
    )
    plans = []
    for layout in layouts:
        histogram = traffic_of(sizes)
        histogram = replace(histogram, phases={"decode": replace(histogram.phases["decode"], counts=layout)})
        plans.append(plan_of(sizes, budget=300_000, histogram=histogram, options=PlanOptions(pp=pp)))
    assert 1 == len({to_bytes(plan) for plan in plans})


def test_an_odd_number_of_experts_is_held_whole_by_every_rank():
    plan = plan_of(sizes_of([1000] * 2, num_experts=257, top_k=K), budget=300_000)
    rows = [place(hot, num_experts=257, spare=True, inclusive=False) for hot in plan.hot]
    assert [257 + 1] * 2 == [layer.num_rows for layer in rows]
    assert [257] * 2 == [len(layer.row_map) for layer in rows]


def test_a_rank_with_another_plan_stops_the_start_and_is_named(sizes):
    usual, odd = plan_hash(plan_of(sizes)), plan_hash(plan_of(sizes, histogram=traffic_of(sizes, first=1)))
    with pytest.raises(PlanMismatchError, match=f"ranks 0, 1, 3: {usual[:16]}; rank 2: {odd[:16]}") as caught:
        require_same_hash([usual, usual, odd, usual])
    assert [2] == caught.value.ranks


def test_ranks_that_are_all_of_different_minds_are_all_named():
    with pytest.raises(PlanMismatchError, match="rank 0: a; rank 1: b; rank 2: c"):
        require_same_hash(["a", "b", "c"])


@pytest.mark.parametrize("hashes", [[], ["a"], ["a"] * 8])
def test_equal_hashes_pass(hashes):
    assert None is require_same_hash(hashes)


# One budget.


def test_the_smallest_budget_of_a_group_rules_and_all_are_named():
    smallest, notice = smallest_budget([90 * GIB, 90 * GIB, 90 * GIB, 80 * GIB])
    assert 80 * GIB == smallest
    assert ("budgets-differ", False) == (notice.name, notice.strict)
    assert "(90, 90, 90, 80 GiB on ranks 0 to 3): the plan uses the smallest, 80 GiB" in notice.text


def test_equal_budgets_are_nothing_to_say():
    assert (90 * GIB, None) == smallest_budget([90 * GIB] * 4)
    assert (0, None) == smallest_budget([0])


def test_a_group_without_budgets_is_refused():
    with pytest.raises(PlanError, match="budgets of the ranks: got none"):
        smallest_budget([])


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=8))
def test_a_plan_under_the_smallest_budget_fits_every_rank(budgets):
    smallest, notice = smallest_budget(budgets)
    assert all(smallest <= budget for budget in budgets)
    assert smallest in budgets
    assert (len(set(budgets)) > 1) == (notice is not None)


# Shards.


@pytest.mark.parametrize(
    ("tp", "widest"), [(1, 257), (2, 129), (3, 86), (4, 65), (8, 33), (256, 2), (257, 1), (300, 1)]
)
def test_a_shard_is_the_tp_th_part_and_the_remainder(folder, tp, widest):
    assert [3 * D * widest * 2] * 2 == expert_sizes(read_headers(folder), tp=tp).row_bytes.tolist()


@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from(["up_proj", "gate_up_proj"]))
def test_the_widest_shard_is_large_enough_for_all_ranks_and_no_larger_than_one_element_more(hidden, tp, name):
    parts = 2 if name == "gate_up_proj" else 1
    up = Place(stack=STACK, layer=0, leaf=name, expert=0)
    (rows, columns) = shard_shape((parts * hidden, D), place=up, transposed=False, tp=tp)
    assert D == columns
    assert parts * hidden <= rows * tp < parts * (hidden + tp)


def test_a_plan_of_a_rank_is_charged_its_shards(sizes):
    plan = plan_of(sizes)
    hot, spares = int(plan.hot_rows().sum()), len(plan.layers)
    assert ((SHARD, SHARD), 4) == (plan.row_bytes, plan.identity.tp)
    assert 200 * SHARD == plan.stages[0].used_bytes == (hot + spares) * SHARD


# What is no routed expert of the model.


def test_draft_layers_are_planned_by_nobody_and_named(sizes):
    choice = choose_plan(sizes, request=PlanRequest(budget_bytes=BUDGET))
    (text,) = [notice.text for notice in choice.notices if notice.name == "draft-layers"]
    assert "model.layers.3 are left out" in text
    assert (1, 2) == choice.plan.layers == choice.part.layers


def test_a_fused_shared_expert_is_always_hot_and_out_of_the_ranking(sizes):
    plan = plan_of(sizes)
    assert [] == [expert for hot in plan.hot for expert in hot if expert >= E]
    for hot in plan.hot:
        rows = place(hot, num_experts=E, spare=True, inclusive=False, fixed=1)
        (row_of_shared,) = rows.fixed_rows
        assert row_of_shared < rows.first_cold
        assert row_of_shared not in rows.row_map
        assert row_of_shared != rows.spare_row


def test_counts_in_which_a_shared_expert_was_counted_are_of_another_model(sizes, tmp_path):
    wider = sizes_of([1] * 2, num_experts=E + 1, top_k=K, first_layer=1)
    identity = replace(wider.identity, model_type="toy_moe")
    save_histogram(traffic_of(replace(wider, identity=identity)), tmp_path / "counts.json")
    with pytest.raises(PlanMismatchError, match=f"num_experts is {E + 1}, not {E}"):
        choose_plan(sizes, request=PlanRequest(budget_bytes=BUDGET, counts=str(tmp_path / "counts.json")))


# What memory there is.


def test_a_model_whose_shards_all_fit_is_wholly_hot_and_nothing_is_doubted(folder, sizes):
    budget = 2 * E * SHARD
    plan, notices = make_plan(sizes, histogram=None, budget_bytes=budget + 1, options=PlanOptions())
    assert [E, E] == plan.hot_rows().tolist()
    assert ["budget-capped"] == [notice.name for notice in notices]
    assert budget == plan.stages[0].used_bytes
    whole = expert_sizes(read_headers(folder))
    assert not plan_of(whole, budget=budget + 1).hot_mask().all()


@pytest.mark.parametrize("reserve_gib", [16, 17, 10**6])
def test_a_reserve_bigger_than_what_is_free_leaves_no_budget_and_refuses_any(reserve_gib):
    free = MemoryLimit(name="MemAvailable", state=LIMITED, available_bytes=16 * GIB, source="/proc/meminfo")
    sizes, limits = sizes_of([GIB], num_experts=8), MemoryLimits(limits=(free,))
    assert 0 == default_hot_bytes(sizes, reserve_bytes=reserve_gib * GIB, limits=limits)
    with pytest.raises(
        BudgetError, match=f"a reserve of {reserve_gib}.000 GiB.*lower HOTSPLIT_VRAM_RESERVE_GIB"
    ) as caught:
        require_memory(1, sizes=sizes, reserve_bytes=reserve_gib * GIB, limits=limits)
    assert 0 == caught.value.room_bytes
