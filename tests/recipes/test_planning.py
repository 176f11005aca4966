"""One planner for all: a recipe's plan is byte for byte what `hotsplit plan` writes for the same input."""

from __future__ import annotations

import json

import numpy as np
import pytest

from checkpoint_files import write_model
from hotsplit.config import HotsplitConfig
from hotsplit.errors import BudgetError, PlanMismatchError
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.outline import expert_tensors
from hotsplit.plan.planfile import plan_hash, to_bytes
from hotsplit.plan.planner import PlanOptions
from hotsplit.plan.sizes import expert_sizes
from hotsplit.recipes import load, names
from hotsplit.recipes.planning import recipe_budget, recipe_plan, recipe_sizes
from hotsplit.recipes.weighing import fit_recipe


def checkpoint_of(recipe, folder):
    """Headers as the recipe's facts describe them, experts fused, over a hole: nothing of it is on disk."""
    config = json.loads(recipe.facts.file.read_text())
    leaves = expert_tensors(config, what="facts")
    layers = recipe_sizes(recipe).identity.layers
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}": kind
        for layer in layers[:1]
        for expert in range(recipe.facts.experts)
        for leaf, kind in leaves.items()
    }
    tensors |= {f"model.layers.{dense}.input_layernorm.weight": ("BF16", [1]) for dense in range(layers[0])}
    text = config.get("text_config", config)
    cut = {"num_hidden_layers": layers[0] + 1}
    for name in ("moe_layer_freq", "hybrid_layer_pattern"):
        if isinstance(text.get(name), list):
            cut[name] = text[name][: layers[0] + 1]
    (text if text is not config else config).update(cut)
    return write_model(folder, tensors, config=config)


def options_of(recipe):
    config = HotsplitConfig.from_options({}, recipe.settings)
    return PlanOptions(dynamic=config.dynamic, objective=config.objective, pp=recipe.pp)


def by_the_engine(recipe, *, budget, counts):
    """The way of an engine's worker: the same sizes, the file of counts by its name."""
    request = PlanRequest(
        budget_bytes=budget,
        is_budget_given=True,
        counts=None if counts is None else str(counts),
        options=options_of(recipe),
    )
    return choose_plan(recipe_sizes(recipe), request=request).plan


@pytest.mark.parametrize("name", names())
def test_every_recipe_plans_what_the_planner_plans(name):
    recipe = load(name)
    plan, _ = recipe_plan(recipe)
    budget = recipe_budget(recipe, found=fit_recipe(recipe)[1])
    assert budget >= plan.stages[0].used_bytes
    assert to_bytes(by_the_engine(recipe, budget=budget, counts=recipe.counts.file)) == to_bytes(plan)


@pytest.mark.parametrize("name", ["mimo-v2.6-pro", "qwen3-30b-a3b"])
def test_other_counts_or_another_budget_make_another_plan(name):
    recipe = load(name)
    plan, _ = recipe_plan(recipe)
    budget = recipe_budget(recipe, found=fit_recipe(recipe)[1])
    assert plan_hash(by_the_engine(recipe, budget=budget, counts=None)) != plan_hash(plan)
    assert plan_hash(by_the_engine(recipe, budget=budget // 2, counts=recipe.counts.file)) != plan_hash(plan)


@pytest.mark.parametrize("name", names())
def test_facts_give_the_rows_of_a_checkpoint_with_such_headers(name, tmp_path):
    recipe = load(name)
    real = expert_sizes(read_headers(checkpoint_of(recipe, tmp_path / "model")), tp=recipe.tp)
    sizes = recipe_sizes(recipe)
    assert sizes.row_bytes[0] == real.row_bytes[0]
    assert (sizes.identity.num_experts, sizes.identity.top_k) == (real.identity.num_experts, real.identity.top_k)
    assert (sizes.identity.model_type, sizes.identity.layers[0]) == (real.identity.model_type, real.identity.layers[0])


def test_a_recipe_without_counts_is_planned_evenly_and_says_so():
    plan, notices = recipe_plan(load("glm-5.3"))
    assert "no-histogram" in [notice.name for notice in notices]
    assert np.ptp(plan.hot_rows()) <= 1


def test_counts_of_another_model_are_refused(write_recipe):
    recipe = load(str(write_recipe(config={"num_experts": 31})))
    with pytest.raises(PlanMismatchError, match="num_experts is 32, not 31"):
        recipe_plan(recipe)


def test_a_machine_that_is_too_small_says_what_binds(write_recipe):
    recipe = load(str(write_recipe(("vram_gib = 0.02", "vram_gib = 0.001"), ("hot_gib = 0.002", ""))))
    with pytest.raises(BudgetError, match="recipe tiny: got GPU memory binds"):
        recipe_plan(recipe)
