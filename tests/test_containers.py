"""The files in examples/containers: what they name exists, in this repository and in hotsplit's commands."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from hotsplit.cli.main import group
from hotsplit.config import HotsplitConfig, settings
from hotsplit.recipes.flags import shipped_flags

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "containers"
FILES = ("Dockerfile", "compose.yaml", "README.md")


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def instructions():
    """The Dockerfile's instructions as (name, rest), without comments; none goes over several lines."""
    lines = [line for line in read("Dockerfile").splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


@pytest.fixture
def service():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(read("compose.yaml"))["services"]["hotsplit"]


def require_command(words):
    """That hotsplit has this command, with these options before `--`."""
    name, *rest = words
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"no command {name}"
    ours = rest[: rest.index("--")] if "--" in rest else rest
    known = {option for parameter in command.params for option in parameter.opts}
    unknown = [word.split("=")[0] for word in ours if word.startswith("-") and word.split("=")[0] not in known]
    assert [] == unknown, f"hotsplit {name}"


@pytest.mark.parametrize("name", FILES)
def test_every_hotsplit_variable_is_a_setting(name):
    known = {info.variable for info in settings()}
    assert set() == set(re.findall(r"HOTSPLIT_[A-Z_]+", read(name))) - known


def test_the_variables_pass_hotsplits_own_check(service):
    config = HotsplitConfig.from_env({name: str(value) for name, value in service["environment"].items()})
    mounts = [volume.rsplit(":", 1)[-1] for volume in service["volumes"]]
    assert str(config.state_dir) in mounts
    assert {"HOTSPLIT_STATE_DIR=/state"} == {rest for name, rest in instructions() if name == "ENV"}


def test_the_server_is_started_by_a_command_with_options_that_there_are(service):
    require_command(service["command"])
    assert {"serve", "/model", "--"} <= set(service["command"])


def readme_lines():
    """Commands of the README, as words."""
    lines = [line.strip() for line in read("README.md").splitlines() if line.startswith("    ")]
    return [shlex.split(line) for line in lines]


def test_every_hotsplit_command_of_the_readme_has_its_options():
    found = []
    for words in readme_lines():
        if "hotsplit" in words:
            ours = words[len(words) - words[::-1].index("hotsplit") :]
            require_command(ours)
            found.append(ours[0])
    assert ["probe", "serve", "top"] == found


def test_the_ranks_are_as_many_as_the_gpus(service):
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert f"--tensor-parallel-size={devices['count']}" in service["command"]
    assert ("nvidia", ["gpu"]) == (devices["driver"], devices["capabilities"])


def test_what_cold_rows_need_is_granted(service):
    assert -1 == service["ulimits"]["memlock"]
    assert {"SYS_NICE", "IPC_LOCK"} == set(service["cap_add"])
    assert "host" == service["ipc"]
    assert "shm_size" not in service, "Docker heeds one of the two"


def test_the_port_is_the_same_everywhere(service):
    port = next(word.split("=")[1] for word in service["command"] if word.startswith("--port="))
    assert [f"127.0.0.1:{port}:{port}"] == service["ports"]
    assert f"127.0.0.1:{port}/health" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_named_volumes_are_declared_and_the_model_is_read_only(service):
    yaml = pytest.importorskip("yaml")
    named = {volume.split(":")[0] for volume in service["volumes"] if volume[0].isalpha()}
    assert named == set(yaml.safe_load(read("compose.yaml"))["volumes"])
    (model,) = [volume for volume in service["volumes"] if ":/model" in volume]
    assert model.endswith(":ro")


def test_the_build_finds_its_files(service):
    root = (FOLDER / service["build"]["context"]).resolve()
    assert ROOT == root
    assert FOLDER / "Dockerfile" == root / service["build"]["dockerfile"]
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            assert target.startswith("/opt/hotsplit")
            assert [] == [source for source in sources if not (root / source).exists()]


def test_what_is_copied_is_enough_for_a_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]
    needed = ["pyproject.toml", project["readme"], *project["license-files"]]
    assert [] == [path for path in needed if path.split("/")[0] not in copied]


def test_the_image_is_a_vllm_that_hotsplit_is_tested_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = [rest.split("=v")[1] for name, rest in instructions() if name == "ARG"]
    (vllm,) = [each for each in project["optional-dependencies"]["vllm"] if each.startswith("vllm")]
    low, high = re.findall(r"[<>]=?([\d.]+)", vllm)
    numbers = [tuple(map(int, text.split("."))) for text in (low, version, high)]
    assert numbers[0] <= numbers[1] < numbers[2]
    assert ("FROM", "vllm/vllm-openai:${VLLM_VERSION}") in instructions()


def test_the_entry_point_is_our_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,) = [rest for name, rest in instructions() if name == "ENTRYPOINT"]
    assert list(project["scripts"]) == json.loads(entry)


def test_vllm_has_the_flags_that_stand_behind_the_two_dashes(service):
    flags = service["command"][service["command"].index("--") + 1 :]
    known = [shipped_flags().find(word) for word in flags]
    assert [word.split("=")[0] for word in flags] == [flag and flag.names[0] for flag in known]
