"""Options that several commands share: the settings, made from the one table in config.py, and --json."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import click

from hotsplit.config import HotsplitConfig, settings

Command = Callable[..., Any]


class Integer(click.IntRange):
    """A range of integers that is called an integer where something else was typed."""

    name = "integer"


class Number(click.FloatRange):
    """A range of numbers that is called a number where something else was typed."""

    name = "number"


class Seconds(Number):
    """A range that has no place for nan, which is neither below nor above anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click does, and nan is refused.

        Args:
            value: As it was typed.
            param: Whose it is.
            ctx: Of the command.
        """
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


SEED = Integer(min=0, max=2**32 - 1)
"""What every source of random numbers takes."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
force_option = click.option("--force", is_flag=True, help="Use a plan or histogram of another model all the same.")


def setting_options(*names: str, **meanings: str) -> Callable[[Command], Command]:
    """Give a command the options of these settings; their values reach it as one checked config.

    Args:
        *names: Field names of HotsplitConfig.
        **meanings: More of them, each with its help, for a command that has another use for it than a run.
    """
    infos = [info for info in settings() if info.name in names or info.name in meanings]

    def decorate(command: Command) -> Command:
        for info in reversed(infos):
            default = f" (default {info.default})" if info.default else ""
            meaning = meanings.get(info.name, info.meaning)
            text = f"{meaning} Value: {info.values}{default}; {info.variable}."
            command = click.option(info.option, f"setting_{info.name}", metavar="VALUE", help=text)(command)
        return command

    return decorate


def config_from(options: dict[str, Any]) -> HotsplitConfig:
    """Take the settings out of a command's arguments and read the rest from the environment.

    Args:
        options: All keyword arguments of the command; those of settings are removed.

    Raises:
        ConfigError: A value is not allowed, wherever it comes from.
    """
    given = {}
    for name in [name for name in options if name.startswith("setting_")]:
        value = options.pop(name)
        if value is not None:
            given[name.removeprefix("setting_")] = value
    return HotsplitConfig.from_options(dict(os.environ), **given)
