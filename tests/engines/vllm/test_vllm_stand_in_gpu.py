"""vLLM with a GPU's backend over stand-ins: tokens and log-probabilities of stock, whatever is hot and while experts swap.

Real vLLM on its CPU build; below it the memory, the router and the swaps of a GPU, on a fake driver and simulated
streams (vllm_probe/hotsplit_probe/gpu.py). Nothing here was run on a GPU.
"""

from __future__ import annotations

import pytest

from engines.vllm.conftest import once
from engines.vllm.vllm_jobs import Job, run

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODELS = ["qwen3_moe", "deepseek_v3"]
"""One without shared experts and one with."""
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def on_stand_in(checkpoint, settings, prompts, tmp_path_factory):
    """on_stand_in("qwen3_moe", dynamic=False) -> a run with the probe watching."""

    @once
    def play(name, *, dynamic=True, kind="whole"):
        job = Job(
            model=checkpoint(name),
            prompts=prompts(name),
            settings=settings(name, HOTSPLIT_DYNAMIC=str(int(dynamic))),
            probe={"VLLM_PROBE_GPU": kind, "VLLM_PROBE_EVERY": "5"},
            passes=[["pad 5"]] if kind == "whole" else [[]],
            last=["report", "check rows"],
        )
        return run(job, place=tmp_path_factory.mktemp(f"stand-in-{name}"))

    return play


@every_model
def test_tokens_and_log_probabilities_are_those_of_stock_while_experts_swap(on_stand_in, stock, name):
    found = on_stand_in(name)
    assert stock(name).answers(0) == found.answers(0)
    (snapshot,), (report,) = found.snapshots, found.last["report"]
    assert snapshot.swaps_done > 8
    assert (0, 0) == (snapshot.swaps_failed, snapshot.update_failures)
    assert report["half_swapped_steps"] > 0, "no step ran between the two halves of a swap"
    assert (0, report["calls"] // 5) == (report["mismatches"], report["compared"])


def test_the_same_in_static_mode(on_stand_in, stock):
    found = on_stand_in("qwen3_moe", dynamic=False)
    assert stock("qwen3_moe").answers(0) == found.answers(0)
    (snapshot,) = found.snapshots
    assert 0 == snapshot.swaps_done
    assert 0 < snapshot.hit_pairs["decode"] < snapshot.pairs["decode"], "some experts must be cold"


@every_model
def test_every_expert_keeps_its_bytes_and_a_row_of_its_own(on_stand_in, name):
    assert [{"rows_intact": True, "rows_distinct": True}] == on_stand_in(name).told("check rows")


@every_model
def test_what_the_device_counts_is_what_the_router_chose_without_padding(on_stand_in, name):
    (snapshot,), (report,) = on_stand_in(name).snapshots, on_stand_in(name).last["report"]
    assert report["padding_tokens"] > 500
    assert 0 == report["padding_rows_of_its_own"]
    for what, found in {"tokens": snapshot.tokens, "pairs": snapshot.pairs, "hits": snapshot.hit_pairs}.items():
        assert report[what] == dict(found)
    assert report["steps"] == snapshot.steps


def test_the_log_says_what_backs_the_rows(on_stand_in):
    (snapshot,) = on_stand_in("qwen3_moe").snapshots
    assert "cuda-stitched" == snapshot.backend
    assert "backend=cuda-stitched rank=0" in on_stand_in("qwen3_moe").log


def test_a_device_that_loses_what_is_published_gives_other_tokens(on_stand_in, stock):
    found = on_stand_in("qwen3_moe", kind="deaf")
    (snapshot,), (report,) = found.snapshots, found.last["report"]
    assert snapshot.swaps_done > 8
    assert stock("qwen3_moe").answers(0) != found.answers(0)
    assert report["mismatches"] > 0
