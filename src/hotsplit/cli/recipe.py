"""`hotsplit recipe`: what is known of a model on a machine, listed, shown and checked."""

from __future__ import annotations

import sys

import click

from hotsplit.cli import console
from hotsplit.cli.options import json_option


@click.group("recipe")
def command() -> None:
    """Recipes: flags, layout, KV cache, known-bad flags and known results of a model, with their sources.

    A recipe is a TOML file; NAME is one that ships, or the path of your own. `hotsplit serve --recipe NAME` runs it,
    `hotsplit fit NAME` weighs its model with no file of it here.
    """


@command.command("list")
@json_option
def list_recipes(*, as_json: bool) -> None:
    """List the recipes that ship."""
    from hotsplit.cli import recipes_view
    from hotsplit.recipes import load, names

    recipes = [load(name) for name in names()]
    if as_json:
        console.print_json({"kind": "recipes", "recipes": [recipes_view.headline_json(recipe) for recipe in recipes]})
    else:
        recipes_view.print_list(recipes)


@command.command("show", short_help="Show a recipe: the command, its reasons, what is known.")
@click.argument("name")
@json_option
def show(name: str, *, as_json: bool) -> None:
    """Show all of recipe NAME: the command, its reasons, what is known, and what is not."""
    from hotsplit.cli import recipes_view
    from hotsplit.recipes import load
    from hotsplit.recipes.flags import shipped_flags

    recipe = load(name)
    shown = recipes_view.show(recipe, vllm=shipped_flags())
    if as_json:
        console.print_json(recipes_view.shown_json(shown))
    else:
        recipes_view.print_shown(shown)


@command.command("check", short_help="Check recipes against facts, machine, counts, flags.")
@click.argument("name", required=False)
@json_option
def check(name: str | None, *, as_json: bool) -> None:
    """Check recipe NAME, or all that ship, against facts, machine, counts and vLLM's flags.

    The flags are those of the vLLM that is installed, or of the tested release. The exit code is 1 where anything is
    wrong; what nobody can tell here is open, and no fault.
    """
    from hotsplit.cli import recipes_view
    from hotsplit.cli.recipes_vllm import installed_flags
    from hotsplit.recipes import load, names
    from hotsplit.recipes.checks import check_recipe
    from hotsplit.recipes.flags import shipped_flags

    here = installed_flags()
    vllm = here or shipped_flags()
    whose = f"the vLLM here, {vllm.version}" if here else f"vLLM {vllm.version}"
    recipes = [load(one) for one in ((name,) if name else names())]
    checked = {recipe.name: check_recipe(recipe, vllm=vllm, whose=whose) for recipe in recipes}
    if as_json:
        console.print_json(recipes_view.checked_json(checked, vllm=vllm.version, is_installed=here is not None))
    else:
        recipes_view.print_checked(checked)
    if not all(one.is_right for one in checked.values()):
        sys.exit(1)
