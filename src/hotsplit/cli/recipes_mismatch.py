"""Whether a model at hand is the one that a recipe is for."""

from __future__ import annotations

from hotsplit.errors import PlanMismatchError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.recipes.planning import recipe_sizes
from hotsplit.recipes.recipe import Recipe


def recipe_mismatch(recipe: Recipe, *, sizes: ExpertSizes, strict: bool) -> list[Notice]:
    """Say where a model differs from the recipe's.

    Args:
        recipe: A recipe.
        sizes: Of the model.
        strict: Whether that is an error.

    Raises:
        PlanMismatchError: In strict mode, where it differs.
    """
    theirs, mine = recipe_sizes(recipe).identity.to_json(), sizes.identity.to_json()
    other = [f"{name} is {mine[name]}, not {value}" for name, value in theirs.items() if mine[name] != value]
    if not other:
        return []
    text = f"the model is not the one that recipe {recipe.name} is for: {_short('; '.join(other))}"
    notices = [Notice(name="recipe-mismatch", text=text)]
    enforce(notices, strict=strict, error=PlanMismatchError)
    return notices


def _short(text: str) -> str:
    """A list of layers may be long."""
    return text if len(text) <= 300 else f"{text[:297]}..."
