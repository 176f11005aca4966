"""The flags that ship for `recipe check`, against the parser of the vLLM that is installed, asked in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from hotsplit.recipes import load, names
from hotsplit.recipes.checks import check_recipe
from hotsplit.recipes.flags import SHIPPED, VllmFlag, VllmFlags, shipped_flags

pytestmark = pytest.mark.vllm

ASK = """
import json
from dataclasses import asdict
from hotsplit.cli.recipes_vllm import installed_flags
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
flags = installed_flags()
parsers = {"--tool-call-parser": ToolParserManager, "--reasoning-parser": ReasoningParserManager}
print(json.dumps({
    "version": flags.version,
    "flags": [asdict(option) for option in flags.options],
    "parsers": {flag: manager.list_registered() for flag, manager in parsers.items()},
}))
"""


@pytest.fixture(scope="module")
def told():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def here(told):
    options = [
        VllmFlag(
            names=tuple(one["names"]),
            takes=one["takes"],
            choices=None if one["choices"] is None else tuple(one["choices"]),
        )
        for one in told["flags"]
    ]
    return VllmFlags(version=told["version"], options=tuple(options))


def test_the_shipped_flags_are_those_of_the_release_they_name(here):
    if here.version != SHIPPED:
        pytest.skip(f"vLLM {here.version} is here, the flags that ship are of {SHIPPED}")
    assert len(here.options) > 200
    assert here == shipped_flags()


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_right_for_the_vllm_that_is_here(here, name):
    found = check_recipe(load(name), vllm=here, whose="the vLLM here")
    assert [] == [check.text for check in found.checks if check.verdict == "wrong"]


@pytest.mark.parametrize("name", names())
def test_the_parsers_of_a_recipe_are_registered(told, name):
    parsers = [flag for flag in load(name).flags if flag.flag in told["parsers"]]
    assert parsers
    assert [] == [flag.value[0] for flag in parsers if flag.value[0] not in told["parsers"][flag.flag]]
