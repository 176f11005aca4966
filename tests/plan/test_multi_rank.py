"""Several ranks of real models at their real size (CASES T12), by the facts that ship: 69 layers x 384 experts on four GPUs.

tests/plan/test_ranks.py has the same on small checkpoints, with remainders; tests/plan/test_forecast.py that a step goes at
the pace of its slowest rank.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.outline import expert_bytes, expert_tensors
from hotsplit.plan.planfile import plan_hash
from hotsplit.plan.stage import require_same_hash, smallest_budget
from hotsplit.recipes import load
from hotsplit.recipes.planning import recipe_plan, recipe_sizes
from hotsplit.units import GIB
from model_configs import DEEPSEEK_V4

RANK = """
from hotsplit.plan.planfile import plan_hash
from hotsplit.recipes import load
from hotsplit.recipes.planning import recipe_plan
print(plan_hash(recipe_plan(load("mimo-v2.6-pro"))[0]))
"""


def planned(budget):
    recipe = load("mimo-v2.6-pro")
    request = PlanRequest(budget_bytes=budget, is_budget_given=True, counts=str(recipe.counts.file))
    return choose_plan(recipe_sizes(recipe), request=request).plan


def test_four_processes_plan_a_model_of_its_real_size_to_the_same_bytes():
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(rank)},  # noqa: TID251 - handed on, not read
        )
        for rank in range(4)
    ]
    hashes = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert [plan_hash(recipe_plan(load("mimo-v2.6-pro"))[0])] * 4 == hashes
    require_same_hash(hashes)


def test_of_budgets_that_differ_the_smallest_rules_and_fits_every_rank():
    budgets = [90 * GIB, 90 * GIB, 90 * GIB, 80 * GIB]
    smallest, notice = smallest_budget(budgets)
    plan = planned(smallest)
    assert ("budgets-differ", 80 * GIB) == (notice.name, plan.stages[0].budget_bytes)
    largest_row = max(plan.row_bytes)
    assert 80 * GIB - largest_row < plan.stages[0].used_bytes <= min(budgets)
    assert planned(90 * GIB).proof.hit_rate > plan.proof.hit_rate


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 8])
def test_shards_of_four_bit_experts_hold_the_whole_expert_and_one_block_more_at_most(tp):
    config = DEEPSEEK_V4 | {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    tensors = expert_tensors(config, what="x")
    whole, shard = expert_bytes(tensors, tp=1), expert_bytes(tensors, tp=tp)
    slack = tp * (2 * 4096 + 4096 * 32) * 17 // 32
    assert whole <= tp * shard <= whole + slack
    assert (whole == tp * shard) == (2048 % (32 * tp) == 0)
