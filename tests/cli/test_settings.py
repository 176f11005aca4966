from __future__ import annotations

import json

import pytest

RUN = ("run", "model", "--prompt", "x")

BAD = [
    ("--hot-gib", "-1", "a finite number >= 0"),
    ("--hot-gib", "nan", "a finite number >= 0"),
    ("--hot-gib", "inf", "a finite number >= 0"),
    ("--hot-gib", "2GB", "a finite number >= 0"),
    ("--dynamic", "2", "0 or 1"),
    ("--dynamic", "yes", "0 or 1"),
    ("--strict", "-1", "0 or 1"),
    ("--vram-reserve-gib", "-1", "a finite number >= 0"),
    ("--objective", "speed", "share or time"),
]
BAD_OF_RUN = [
    ("--dyn-steps", "0", "an integer >= 1"),
    ("--dyn-steps", "-1", "an integer >= 1"),
    ("--dyn-steps", "1.5", "an integer >= 1"),
    ("--dyn-max-swaps", "0", "an integer >= 1"),
    ("--dyn-margin", "0.9", "a finite number >= 1"),
    ("--dyn-margin", "nan", "a finite number >= 1"),
    ("--dyn-margin", "inf", "a finite number >= 1"),
    ("--dyn-half-life", "0", "a finite number > 0"),
    ("--learned", "no", "use or ignore"),
    ("--enable", "2", "0 or 1"),
    ("--kernel", "turbo", "exact"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), BAD)
def test_a_bad_value_of_plan_is_refused_with_what_is_allowed(cli, tiny_moe, option, value, allowed):
    line = cli("plan", tiny_moe, option, value).refusal(2)
    assert f"got '{value}'; wanted {allowed}" in line
    name = option.removeprefix("--").replace("-", "_")
    assert f"hotsplit: {name} ({option}): got" in line


@pytest.mark.transformers
@pytest.mark.parametrize(("option", "value", "allowed"), BAD + BAD_OF_RUN)
def test_a_bad_value_of_run_is_refused_with_what_is_allowed(cli, option, value, allowed):
    assert f"got '{value}'; wanted {allowed}" in cli(*RUN, option, value).refusal(2)


@pytest.mark.parametrize(("option", "value", "allowed"), BAD + BAD_OF_RUN)
def test_a_bad_value_in_the_environment_is_refused_by_every_command_with_settings(cli, option, value, allowed):
    name = "HOTSPLIT_" + option.removeprefix("--").replace("-", "_").upper()
    line = cli("plan", "model", env={name: value}).refusal(2)
    assert f"hotsplit: {name}: got '{value}'; wanted {allowed}" in line


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("HOTSPLIT_HOT_GB", "HOTSPLIT_HOT_GIB"),
        ("HOTSPLIT_MARGIN", "HOTSPLIT_DYN_MARGIN"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(cli, name, nearest):
    line = cli("plan", "model", env={name: "1"}).refusal(2)
    assert f"hotsplit: {name}: got an unknown setting; did you mean {nearest}?" == line


def test_an_option_beats_the_environment(cli, counts, tiny_moe):
    arguments = ("plan", tiny_moe, "--counts", counts, "--json", "--hot-gib", "0.002")
    value = json.loads(cli(*arguments, env={"HOTSPLIT_HOT_GIB": "0.004"}).out)
    assert [int(0.002 * 2**30)] == value["budget_bytes"]


def test_settings_come_from_the_environment(cli, counts, tiny_moe):
    env = {"HOTSPLIT_HOT_GIB": "0.003", "HOTSPLIT_COUNTS": str(counts), "HOTSPLIT_OBJECTIVE": "time"}
    value = json.loads(cli("plan", tiny_moe, "--json", env=env).out)
    assert ([int(0.003 * 2**30)], "time") == (value["budget_bytes"], value["objective"])
    assert value["hit_rate"] is not None
