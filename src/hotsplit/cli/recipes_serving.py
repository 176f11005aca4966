"""From what was typed to a task for `serve`: with a recipe, whose flags and settings yield to the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hotsplit.cli.recipes_settings import given_settings, recipe_settings
from hotsplit.cli.serving import ServeTask
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.errors import ConfigError
from hotsplit.notices import Notice, enforce
from hotsplit.recipes import load
from hotsplit.recipes.compose import compose
from hotsplit.recipes.flags import shipped_flags
from hotsplit.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeWish:
    """What was typed."""

    model: str | None
    """Folder or hub id; None for the recipe's."""
    recipe: str | None
    """Name or file; None for none."""
    flags: tuple[str, ...]
    """Behind the dashes."""
    options: dict[str, Any]
    """Of the command; those of settings are taken out."""


def serve_task(wish: ServeWish, *, environ: Mapping[str, str]) -> ServeTask:
    """Make the task of a command line.

    Args:
        wish: What was typed.
        environ: The environment.

    Raises:
        UsageError: Neither a model nor a recipe.
        ConfigError: A setting or the recipe is wrong; in strict mode, a flag that is known to be bad.
    """
    given = given_settings(wish.options)
    if wish.recipe is None:
        if wish.model is None:
            raise click.UsageError("Missing argument 'MODEL': a folder, a hub id, or --recipe NAME in its place.")
        config = HotsplitConfig.from_options(environ, **given)
        return ServeTask(model=wish.model, flags=wish.flags, config=config, environ=environ)
    recipe = load(wish.recipe)
    settings = recipe_settings(recipe)
    config = HotsplitConfig.from_options(environ, settings, **given)
    composed = compose(recipe, flags=wish.flags, environ=environ, vllm=shipped_flags())
    notices = (*_other_model(wish.model, recipe), *_beaten_settings(config, settings), *composed.notices)
    enforce(notices, strict=config.strict, error=ConfigError)
    return ServeTask(
        model=wish.model or recipe.model,
        flags=composed.flags,
        config=config,
        environ=environ,
        recipe=recipe,
        variables=composed.variables,
        notices=notices,
    )


def _other_model(model: str | None, recipe: Recipe) -> list[Notice]:
    """A hub id that is not the recipe's: nothing of it is here to be checked; the headers of a folder are."""
    if model is None or model == recipe.model or model.count("/") != 1 or Path(model).expanduser().exists():
        return []
    text = f"your MODEL {model} beats the recipe's {recipe.model}; its layout is not known here"
    return [Notice(name="recipe-overridden", text=text, strict=False)]


def _beaten_settings(config: HotsplitConfig, settings: Mapping[str, object]) -> list[Notice]:
    """Settings that the user made otherwise than the recipe."""
    notices = []
    ours = HotsplitConfig.from_options({}, settings)
    for name in settings:
        theirs = getattr(config, name)
        if config.origin(name) != "recipe" and theirs != getattr(ours, name):
            value = "nothing" if theirs is None else theirs
            text = f"your {variable_name(name)} ({config.origin(name)}: {value}) beats the recipe's {settings[name]}"
            notices.append(Notice(name="recipe-overridden", text=text, strict=False))
    return notices
