"""--device: what is not there is one line, and what is computes there; the GPU is a stand-in."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from engines.stand_in import StandIn
from hotsplit.bank.fake_driver import NOTHING
from hotsplit.data import text_path
from hotsplit.plan.histogram import save_histogram

pytestmark = pytest.mark.transformers

load_module = importlib.import_module("hotsplit.engines.transformers.loading")


@pytest.fixture
def asked(monkeypatch):
    """The devices that load() was asked for, each given a GPU of no substance."""
    machines, seen = [], []

    def place_of(device):
        seen.append(device)
        machines.append(StandIn())
        return machines[-1].place()

    monkeypatch.setattr(load_module, "place_of", place_of)
    yield seen
    assert [NOTHING] * len(machines) == [machine.driver.held for machine in machines]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("command", ["run", "profile", "demo"])
def test_a_device_that_is_not_there_is_one_line(cli, tiny_moe, tmp_path, command):
    options = {
        "run": (tiny_moe, "--prompt", "def"),
        "profile": (tiny_moe, "--data", text_path("python"), "-o", tmp_path / "hist.json"),
        "demo": (),
    }
    line = cli(command, *options[command], "--device", "cuda").refusal(2)
    assert line.startswith("hotsplit: device cuda: got ")
    assert "leave it out, or use cpu" in line
    assert not (tmp_path / "hist.json").exists()


def run(cli, tiny_moe, tmp_path, *options):
    arguments = ("--prompt", "def main():", "--max-new-tokens", 8, "--state-dir", tmp_path / "state", "--json")
    return json.loads(cli("run", tiny_moe, *arguments, *options).out)


def test_run_gives_the_same_text_there(cli, tiny_moe, tmp_path, asked):
    on_gpu = run(cli, tiny_moe, tmp_path, "--hot-gib", 0.002, "--device", "cuda:0")
    assert ["cuda:0"] == asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "place_of", lambda device: None)
        on_cpu = run(cli, tiny_moe, tmp_path, "--hot-gib", 0.002)
    assert on_cpu["text"] == on_gpu["text"]
    assert 0 < on_gpu["hot_experts"] <= on_cpu["hot_experts"]
    assert 0 < on_gpu["hit_rate"] < 1


def test_a_profile_counts_the_same_there(cli, tiny_moe, tmp_path, asked):
    def profile(name, *options):
        arguments = ("--data", text_path("python"), "--prompt-tokens", 32, "--decode-tokens", 4, "--max-prompts", 3)
        files = ("-o", tmp_path / f"{name}.json", "--trace", tmp_path / f"{name}.npz", "--temperature", 0)
        result = cli("profile", tiny_moe, *arguments, *files, *options)
        assert 0 == result.code, result.err
        return json.loads((tmp_path / f"{name}.json").read_text())["phases"]

    on_gpu = profile("gpu", "--device", "cuda", "--hot-gib", 0.002)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "place_of", lambda device: None)
        on_cpu = profile("cpu", "--hot-gib", 0.002)
    assert ["cuda"] == asked
    assert on_cpu.keys() == on_gpu.keys()
    for phase, counts in on_cpu.items():
        assert counts["tokens"] == on_gpu[phase]["tokens"]


def test_the_demos_budget_on_a_gpu_is_a_plan_for_it(tmp_path, monkeypatch, asked):
    demonstration = importlib.import_module("hotsplit.cli.demonstration")
    monkeypatch.setattr(demonstration, "place_of", lambda device: None)
    demo = demonstration.Demonstration("cuda:0")
    demo._scratch = tmp_path
    assert {"device": "cuda:0", "learned": "ignore", "state_dir": tmp_path} == demo._quiet()
    histogram = demo._count(demo._train["python"][:2], "profiling")
    save_histogram(histogram, tmp_path / "from.json")
    share = demo._share(tmp_path / "from.json")
    model = demonstration.load(
        demo._folder, counts=str(tmp_path / "from.json"), **share, **demonstration.CADENCE, **demo._quiet()
    )
    hot_rows = model.hotsplit.plan.hot_rows()
    model.hotsplit.close()
    assert 0 < hot_rows.sum() < 128
    assert ["cuda:0"] * 2 == asked
