"""The plan of a recipe: its sizes and counts, handed to the one planner that plans for all.

Nothing here ranks or buys experts: `plan/planner` does, with what `hotsplit plan` would give it.
"""

from __future__ import annotations

from hotsplit.config import HotsplitConfig
from hotsplit.errors import BudgetError, CheckpointError
from hotsplit.files import read_json
from hotsplit.notices import Notice
from hotsplit.plan.choose import read_counts
from hotsplit.plan.fit import Fit
from hotsplit.plan.outline import outline_sizes
from hotsplit.plan.planfile import Plan
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.recipes.recipe import Recipe
from hotsplit.recipes.weighing import fit_recipe


def recipe_plan(
    recipe: Recipe, *, sizes: ExpertSizes | None = None, budget_bytes: int | None = None
) -> tuple[Plan, list[Notice]]:
    """Plan a recipe's model on its reference counts, evenly where it has none.

    Args:
        recipe: A recipe.
        sizes: Of the experts, from a checkpoint's headers; None to weigh them by the recipe's facts.
        budget_bytes: On one rank; None for `recipe_budget`.

    Raises:
        BudgetError: Nothing fits.
        PlanMismatchError: The reference counts are of another model.
        HistogramError: They cannot be believed.
        CheckpointError: The facts do not describe a model.
    """
    config = HotsplitConfig.from_options({}, recipe.settings)
    sizes = recipe_sizes(recipe) if sizes is None else sizes
    counts, notices = read_counts(None if recipe.counts.file is None else str(recipe.counts.file), sizes=sizes)
    budget = recipe_budget(recipe, found=fit_recipe(recipe)[1]) if budget_bytes is None else budget_bytes
    options = PlanOptions(dynamic=config.dynamic, objective=config.objective, pp=recipe.pp)
    plan, said = make_plan(sizes, histogram=counts, budget_bytes=budget, options=options)
    return plan, notices + said


def recipe_sizes(recipe: Recipe) -> ExpertSizes:
    """Bytes of the experts on one rank, by the recipe's facts.

    Args:
        recipe: A recipe.

    Raises:
        CheckpointError: The facts do not describe a model.
    """
    config = read_json(recipe.facts.file, what="facts", error=CheckpointError)
    return outline_sizes(config, tp=recipe.tp, name=recipe.name, what=f"facts {recipe.facts.file}")


def recipe_budget(recipe: Recipe, *, found: Fit) -> int:
    """Hot bytes on one rank: the recipe's own, or what surely fits beside all else, or at best.

    Args:
        recipe: A recipe.
        found: From `fit_recipe`.

    Raises:
        BudgetError: Nothing fits.
    """
    own = HotsplitConfig.from_options({}, recipe.settings).hot_bytes
    if own is not None:
        return own
    if found.placement is None:
        binding = next((finding.text for finding in found.findings if finding.binds), "nothing fits")
        raise BudgetError(f"recipe {recipe.name}", got=binding, do="choose a smaller context, or more memory")
    return found.placement.room_bytes
