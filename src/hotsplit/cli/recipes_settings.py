"""Settings of a command line with a recipe beneath them."""

from __future__ import annotations

from typing import Any

from hotsplit.config import HotsplitConfig, as_written, variable_name
from hotsplit.recipes.recipe import Recipe


def given_settings(options: dict[str, Any]) -> dict[str, object]:
    """Take the settings out of a command's options.

    Args:
        options: All of the command; those of settings are removed.

    Returns:
        By field name; those that were not given are None.
    """
    prefix = "setting_"
    return {name.removeprefix(prefix): options.pop(name) for name in list(options) if name.startswith(prefix)}


def recipe_settings(recipe: Recipe) -> dict[str, object]:
    """A recipe's settings by field name, its reference counts among them.

    Args:
        recipe: A recipe.
    """
    counts = {} if recipe.counts.file is None else {"counts": str(recipe.counts.file)}
    return {**counts, **recipe.settings}


def recipe_variables(recipe: Recipe) -> dict[str, str]:
    """A recipe's settings as variables: without one of them vLLM would start without hotsplit.

    Args:
        recipe: A recipe.
    """
    settings = recipe_settings(recipe)
    config = HotsplitConfig.from_options({}, settings)
    written = {variable_name(name): as_written(getattr(config, name)) for name in settings}
    return {name: value for name, value in written.items() if value} or {variable_name("enable"): "1"}
