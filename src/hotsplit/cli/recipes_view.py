"""How recipes look: a list, one in full, and what a check found."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.recipes_settings import recipe_variables
from hotsplit.plan.planfile import plan_hash
from hotsplit.recipes.checks import Checked
from hotsplit.recipes.compose import Composed, compose, layout_flags
from hotsplit.recipes.flags import VllmFlags
from hotsplit.recipes.recipe import KnownBad, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A recipe and the command that it makes."""

    recipe: Recipe
    """As it was read."""
    composed: Composed
    """With no wishes of a user's."""

    @property
    def command(self) -> str:
        """What `hotsplit serve --recipe NAME` would hand to vLLM, in a shell's words: it may be pasted as it is."""
        given = {**self.composed.variables, **recipe_variables(self.recipe)}
        variables = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
        return " ".join((*variables, shlex.join(["vllm", "serve", self.recipe.model, *self.composed.flags])))


def show(recipe: Recipe, *, vllm: VllmFlags) -> Shown:
    """Make a recipe's command.

    Args:
        recipe: A recipe.
        vllm: How flags may be spelled.
    """
    return Shown(recipe=recipe, composed=compose(recipe, flags=(), environ={}, vllm=vllm))


def headline_json(recipe: Recipe) -> dict[str, Any]:
    """What stands in a list.

    Args:
        recipe: A recipe.
    """
    machine = recipe.machine
    return {
        "name": recipe.name,
        "title": recipe.title,
        "model": recipe.model,
        "status": recipe.status,
        "gpus": machine.gpus,
        "vram_gib": machine.vram_gib,
        "ram_gib": machine.ram_gib,
        "has_histogram": recipe.counts.file is not None,
    }


def print_list(recipes: Sequence[Recipe]) -> None:
    """One line each.

    Args:
        recipes: Those that ship.
    """
    rows = [
        [
            recipe.name,
            f"{recipe.machine.gpus} x {recipe.machine.vram_gib:g} GiB",
            f"{recipe.machine.ram_gib:g} GiB",
            "yes" if recipe.counts.file else "no",
        ]
        for recipe in recipes
    ]
    console.table("recipes that ship", columns=["name", "GPUs", "host memory", "counts"], rows=rows)
    console.prose("hotsplit recipe show NAME tells all; hotsplit serve --recipe NAME runs one")


def shown_json(shown: Shown) -> dict[str, Any]:
    """All of a recipe, with stable keys.

    Args:
        shown: From `show`.
    """
    recipe = shown.recipe
    return {
        "kind": "recipe",
        **headline_json(recipe),
        "path": str(recipe.path),
        "facts": {**asdict(recipe.facts), "file": str(recipe.facts.file)},
        "tp": recipe.tp,
        "pp": recipe.pp,
        "kv": asdict(recipe.kv),
        "settings": dict(recipe.settings),
        "flags": [asdict(flag) for flag in (*layout_flags(recipe), *recipe.flags)],
        "variables": [asdict(one) for one in recipe.variables],
        "known_bad": [asdict(bad) for bad in recipe.known_bad],
        "results": [asdict(result) for result in recipe.results],
        "histogram": {**asdict(recipe.counts), "file": None if recipe.counts.file is None else str(recipe.counts.file)},
        "command": shown.command,
    }


def print_shown(shown: Shown) -> None:
    """All of a recipe, for people.

    Args:
        shown: From `show`.
    """
    recipe = shown.recipe
    machine, kv = recipe.machine, recipe.kv
    console.out.print(f"{recipe.name}: {recipe.title}", style="bold")
    console.prose(recipe.status)
    console.prose(
        f"{machine.gpus} x {machine.vram_gib:g} GiB, {machine.ram_gib:g} GiB of host memory; {kv.concurrency} x "
        f"{kv.context:,} tokens of KV cache"
    )
    _heading("what vLLM gets")
    console.out.print(shown.command)
    settings = [f"{name} = {value}" for name, value in recipe.settings.items()]
    _list("settings", settings)
    flags = (*layout_flags(recipe), *recipe.flags)
    _list("why", [f"{_words(flag.flag, flag.value)}: {flag.why}" for flag in flags if flag.why])
    _list("variables", [f"{one.name}={one.value}: {one.why}" for one in recipe.variables])
    _list("known to be bad", _bad(recipe.known_bad))
    _list("known results", [f"{one.what}: {one.value}; {one.on} ({one.source})" for one in recipe.results])
    counts = recipe.counts
    made = [] if counts.file is None else [f"{counts.file} ({counts.licence}): {counts.source}"]
    _list("counts", [*made, *counts.steps])
    _list("facts", [*recipe.facts.source, *(f"unknown: {text}" for text in recipe.facts.unknown)])


def _bad(known_bad: Sequence[KnownBad]) -> list[str]:
    """What one may run into, each with its reason; what hotsplit refuses, which says why when it does, on one line."""
    refused = [str(bad) for bad in known_bad if bad.is_refused]
    told = [f"{bad}: {bad.why} ({bad.source})" for bad in known_bad if not bad.is_refused]
    return told + ([f"refused by hotsplit: {', '.join(refused)} (docs/vllm.md, What is refused)"] if refused else [])


def _heading(text: str) -> None:
    console.out.print()
    console.out.print(text, style="bold")


def _list(heading: str, texts: Iterable[str]) -> None:
    """A heading and its points; nothing where there are none."""
    for number, text in enumerate(texts):
        if number == 0:
            _heading(heading)
        console.prose(text, indent=2, label="- ")


def _words(flag: str, value: tuple[str, ...]) -> str:
    return " ".join((flag, *value))


def checked_json(checked: Mapping[str, Checked], *, vllm: str, is_installed: bool) -> dict[str, Any]:
    """What checks found, with stable keys.

    Args:
        checked: By the recipe's name.
        vllm: Version whose flags were looked at.
        is_installed: Whether it is the one that is installed.
    """
    return {
        "kind": "recipe-check",
        "vllm": vllm,
        "is_installed": is_installed,
        "is_right": all(one.is_right for one in checked.values()),
        "recipes": {
            name: {
                "is_right": one.is_right,
                "checks": [asdict(check) for check in one.checks],
                "plan_hash": None if one.plan is None else plan_hash(one.plan),
            }
            for name, one in checked.items()
        },
    }


def print_checked(checked: Mapping[str, Checked]) -> None:
    """What checks found, for people.

    Args:
        checked: By the recipe's name.
    """
    for name, one in checked.items():
        console.out.print(name, style="bold")
        for check in one.checks:
            console.prose(check.text, indent=8, label=f"  {check.verdict:<5} ")
    wrong = [name for name, one in checked.items() if not one.is_right]
    console.prose(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong", style="bold")
