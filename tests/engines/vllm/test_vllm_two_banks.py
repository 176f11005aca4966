"""Two banks inside vLLM, on a CPU: what it gives is near stock while experts move, and its own kernel is refused.

vLLM's CPU kernel ignores expert maps, so a plugin of the tests (two_bank_plugin) teaches it what one means. In float32,
so that what is left of the difference is the order of sums, and a wrong row could not be taken for rounding.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engines.vllm.conftest import once
from engines.vllm.vllm_jobs import Job, run
from engines.vllm.vllm_models import hot_gib

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PLUGIN = Path(__file__).parent / "two_bank_plugin"
MODELS = ["qwen3_moe", "deepseek_v3"]
"""One without shared experts and one with."""
ENGINE = {"dtype": "float32"}
NEAR = 1e-3
"""Of log-probabilities, which are rounded by some 1e-6 in each of four layers; a wrong expert moves them by tenths."""


@pytest.fixture(scope="module")
def single(checkpoint, tmp_path_factory):
    """single("qwen3_moe") -> the checkpoint in float32."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(f"{name}-single")
        shutil.copytree(checkpoint(name), folder, dirs_exist_ok=True)
        for path in folder.glob("*.safetensors"):
            save_file({key: one.float() for key, one in load_file(path).items()}, path, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="module")
def plain(single, prompts, tmp_path_factory):
    """plain("qwen3_moe") -> what vLLM without hotsplit gives."""

    @once
    def play(name):
        job = Job(model=single(name), prompts=prompts(name), engine=ENGINE)
        return run(job, place=tmp_path_factory.mktemp(f"plain-{name}"))

    return play


@pytest.fixture(scope="module")
def banked(single, prompts, tmp_path_factory):
    """banked("qwen3_moe") -> the same in two banks, with swaps all the time; the last pass with wrong maps."""

    @once
    def play(name):
        job = Job(
            model=single(name),
            prompts=prompts(name),
            settings={
                "HOTSPLIT_HOT_GIB": hot_gib(single(name), share=0.25),
                "HOTSPLIT_DYN_STEPS": "3",
                "TWO_BANKS": "honour",
                "PYTHONPATH": str(PLUGIN),
            },
            passes=[["report"], ["shift maps"]],
            last=["report"],
            engine=ENGINE,
        )
        return run(job, place=tmp_path_factory.mktemp(f"banked-{name}"))

    return play


def farthest(expected, answers):
    """The largest difference of log-probabilities, over all tokens that both name, up to the first that differs."""
    found, num_steps = 0.0, 0
    for one, other in zip(expected, answers, strict=True):
        for number, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            pairs = [(float.fromhex(a[token]), float.fromhex(b[token])) for token in a.keys() & b.keys()]
            found, num_steps = max([found, *(abs(x - y) for x, y in pairs)]), num_steps + 1
            if one["tokens"][number] != other["tokens"][number]:
                break
    return found, num_steps


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_near_those_of_stock_while_experts_move(plain, banked, name):
    found, num_steps = farthest(plain(name).answers(0), banked(name).answers(0))
    assert (8 * 48, True) == (num_steps, found < NEAR), f"{found} in {num_steps} steps"
    (snapshot,) = banked(name).snapshots
    assert snapshot.swaps_done > 10
    first, last = (told["report"][0]["row_map"] for told in (banked(name).passes[0]["told"], banked(name).last))
    assert first != last


@pytest.mark.parametrize("name", MODELS)
def test_a_map_that_is_off_by_one_row_is_seen_at_once(plain, banked, name):
    found, _ = farthest(plain(name).answers(0), banked(name).answers(1))
    assert found > 100 * NEAR


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_two_banks_whose_cold_rows_are_registered_pages(banked, name):
    (report,) = banked(name).last["report"]
    assert {2} == set(report["banks"])
    hot, cold = report["rows"][0::2], report["rows"][1::2]
    assert {16 + 1} == {a + b for a, b in zip(hot, cold, strict=True)}
    assert 2 * len(report["banks"]) == report["registrations"], "two tensors a layer"


@pytest.mark.parametrize("name", MODELS)
def test_the_log_says_that_there_are_two_calls_and_that_they_are_not_equal_to_the_bit(banked, name):
    assert "is called once for each bank; two calls differ from one by" in banked(name).log
    assert "are not equal to the bit" in banked(name).log


def test_vllms_own_cpu_kernel_ignores_the_map_and_is_refused_by_name(checkpoint, prompts, settings, tmp_path):
    asked = settings("qwen3_moe", TWO_BANKS="stock", PYTHONPATH=str(PLUGIN))
    with pytest.raises(AssertionError) as caught:
        run(Job(model=checkpoint("qwen3_moe"), prompts=prompts("qwen3_moe"), settings=asked), place=tmp_path)
    assert "two banks with UnquantizedFusedMoEMethod: got two calls that differ from one by" in str(caught.value)
    assert "wanted a kernel that honours an expert map" in str(caught.value)
