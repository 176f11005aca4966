from __future__ import annotations

import importlib

import click
import pytest
from click.testing import CliRunner

from hotsplit.cli.main import group

COMMANDS = [
    "balance",
    "convert",
    "demo",
    "evaluate",
    "fit",
    "forecast",
    "merge",
    "plan",
    "probe",
    "profile",
    "recipe",
    "report",
    "rerank",
    "run",
    "serve",
    "simulate",
    "show",
    "top",
]


def help_of(*arguments):
    return CliRunner().invoke(group, [*arguments, "--help"], env={"COLUMNS": "80"})


def test_every_command_is_listed():
    listed = help_of().output.partition("Commands:\n")[2]
    assert COMMANDS == [line.split()[0] for line in listed.splitlines() if line[2:3] != " "]


@pytest.mark.parametrize("command", [(), *[(name,) for name in COMMANDS]])
def test_help_fits_80_columns(command):
    result = help_of(*command)
    assert 0 == result.exit_code
    assert result.output.startswith("Usage: ")
    assert [] == [line for line in result.output.splitlines() if len(line) > 80]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name):
    command = importlib.import_module(f"hotsplit.cli.{name}").command
    assert command.help
    for one in command.commands.values() if isinstance(command, click.Group) else (command,):
        options = [parameter for parameter in one.params if isinstance(parameter, click.Option)]
        assert [] == [option.name for option in options if not option.help]
        assert one.help
        assert "as_json" in [option.name for option in options]


def test_a_setting_is_explained_with_its_values_its_default_and_its_variable():
    text = " ".join(help_of("run").output.split())
    assert "A cold expert replaces a hot one" in text
    assert "Value: a finite number >= 1 (default 1.25); HOTSPLIT_DYN_MARGIN." in text


@pytest.mark.parametrize(
    ("option", "default"),
    [("--prompt-tokens", "128"), ("--decode-tokens", "64"), ("--max-prompts", "32"), ("--batch-size", "8")],
)
def test_profile_prints_its_defaults(option, default):
    text = help_of("profile").output.partition(option)[2]
    assert f"[default: {default}]" in " ".join(text.split())[:70]


def test_the_version_is_printed(cli):
    assert cli("--version").out.startswith("hotsplit, version ")


def test_no_command_shows_the_help_and_is_a_usage_error(cli):
    result = cli()
    assert 2 == result.code
    assert "Commands:" in result.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("plam",), "No such command 'plam'"),
        (("show",), "Missing argument 'FILE'"),
        (("show", "a", "b"), "unexpected extra argument"),
        (("plan", "--hot-gb", "1"), "No such option '--hot-gb'"),
        (("plan", "--hot-fraction", "half"), "'half' is not a valid float"),
        (("plan", "--tp", "0"), "'--tp'"),
        (("plan", "--pp", "-1"), "'--pp'"),
        (("rerank", "a", "b"), "Missing option '-o'"),
        (("rerank", "a", "b", "-o", "c", "--min-tokens", "-1"), "'--min-tokens'"),
        (("profile", "m", "-o", "x"), "Missing option '--data'"),
        (("profile", "m", "-o", "x", "--data", "y", "--seed", "99999999999"), "'--seed'"),
        (("run", "m"), "Missing option '--prompt'"),
        (("run", "m", "--prompt", "x", "--max-new-tokens", "0"), "'--max-new-tokens'"),
    ],
)
def test_a_wrong_call_is_a_usage_error_without_a_traceback(cli, arguments, reason):
    result = cli(*arguments)
    assert (2, "") == (result.code, result.out)
    assert reason in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("command", "needs"),
    [("forecast", "--counts"), ("report", "--counts"), ("simulate", "--plan"), ("simulate", "--hot-gib")],
)
def test_no_default_is_promised_where_a_command_has_none(command, needs):
    text = " ".join(help_of(command).output.split())
    entry = text.partition(f"{needs} VALUE")[2].partition("Value:")[0]
    assert entry
    assert "Without it" not in entry


@pytest.mark.parametrize("arguments", [(), ("recipe",)])
def test_no_line_of_a_list_of_commands_is_cut_off(arguments):
    assert "..." not in help_of(*arguments).output.partition("Commands:\n")[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fit", "x", "--gpus", "four"), "'four' is not a valid integer."),
        (("run", "x", "--temperature", "warm"), "'warm' is not a valid number."),
        (("balance", "x", "--timeout", "nan"), "'nan' is not a number."),
        (("top", "x", "--interval", "nan"), "'nan' is not a number."),
    ],
)
def test_what_is_no_number_is_called_that(arguments, said):
    done = CliRunner().invoke(group, arguments)
    assert (2, True) == (done.exit_code, said in done.output), done.output
