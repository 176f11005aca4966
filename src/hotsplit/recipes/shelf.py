"""The recipes that ship, by name, and a user's own, by path."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hotsplit.errors import ConfigError
from hotsplit.nearest import nearest
from hotsplit.recipes.reading import open_table, read_known_bad, read_recipe
from hotsplit.recipes.recipe import KnownBad, Recipe

EVERYWHERE = "hotsplit-known-bad"
"""Format of the file of flags that are bad with any model."""


def data_folder() -> Path:
    """Where the recipes lie that ship."""
    # A wheel is always unpacked when it is installed, so the resources are files.
    return Path(str(files("hotsplit.recipes"))) / "data"


def names() -> tuple[str, ...]:
    """Of the recipes that ship, sorted."""
    return tuple(sorted(path.stem for path in data_folder().glob("*.toml")))


def is_recipe(name: str) -> bool:
    """Whether a word on the command line means a recipe, shipped or one's own.

    Args:
        name: As it was typed.
    """
    return name in names() or name.endswith(".toml")


def nearest_recipe(name: str) -> str | None:
    """The one that ships whose name a word looks like a misspelling of; None where there is none.

    Args:
        name: As it was typed.
    """
    return nearest(name, names())


def load(name: str) -> Recipe:
    """Read a recipe.

    Args:
        name: Of one that ships, or the path of a TOML file.

    Raises:
        ConfigError: There is no such recipe, or it is wrong; names file and key.
    """
    known = names()
    if name in known:
        return read_recipe(data_folder() / f"{name}.toml", everywhere=known_bad_everywhere())
    if name.endswith(".toml") or "/" in name:
        return read_recipe(_expanded(name), everywhere=known_bad_everywhere())
    near = nearest_recipe(name)
    raise ConfigError(
        f"recipe {name}",
        got="no recipe of that name",
        wanted=f"one of {', '.join(known)}, or the path of a .toml file",
        do=f"did you mean {near}?" if near else None,
    )


def _expanded(name: str) -> Path:
    """A path with the home of its user; as it is where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def known_bad_everywhere() -> tuple[KnownBad, ...]:
    """Flags and variables that are bad with any model."""
    table = open_table(data_folder() / "common" / "known-bad.toml", form=EVERYWHERE)
    bad = read_known_bad(table)
    table.close()
    return bad
