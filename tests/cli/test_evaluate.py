"""`hotsplit evaluate`: scores and verdicts on traffic that a plan was not made from (CASES T10)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)


@pytest.fixture
def plan(cli, counts, tmp_path):
    assert 0 == cli("plan", "--counts", counts, "--hot-fraction", 0.25, "-o", tmp_path / "plan.json").code
    return tmp_path / "plan.json"


@pytest.fixture
def same(write_counts, tmp_path):
    """Other tokens of the same traffic."""
    return write_counts(tmp_path / "same.json", tokens=20_000)


@pytest.fixture
def other(counts, tmp_path):
    """Traffic that loves what the plan's own ignores."""
    histogram = load_histogram(counts)[0]
    counts_LE = histogram.phases["decode"].counts
    ranks_LE = np.argsort(np.argsort(counts_LE, axis=1), axis=1)
    turned_LE = np.take_along_axis(np.sort(counts_LE, axis=1), 31 - ranks_LE, axis=1)
    save_histogram(replace(histogram, phases={"decode": PhaseCounts(counts=turned_LE)}), tmp_path / "other.json")
    return tmp_path / "other.json"


def evaluated(cli, plan, *arguments):
    result = cli("evaluate", plan, *arguments, "--json")
    assert 0 == result.code, result.err
    return json.loads(result.out), result.err


def test_on_the_same_traffic_the_plan_holds_and_nothing_is_warned_of(cli, plan, counts, same):
    found, err = evaluated(cli, plan, "--counts", same, "--train", counts)
    (test,) = found["tests"]
    assert ("holds", "the plan holds", []) == (test["verdict"], test["words"], found["notices"])
    assert 0 < test["drift"] < 0.05
    assert "" == err


def test_on_turned_traffic_it_is_no_better_than_chance_and_says_so(cli, plan, counts, other):
    found, err = evaluated(cli, plan, "--counts", other, "--train", counts)
    assert "no better than chance" == found["tests"][0]["words"]
    assert "[plan-is-chance]" in err
    line = cli("evaluate", plan, "--counts", other, "--strict", 1).refusal()
    assert "no better than a blind choice" in line


def test_a_mix_of_both_is_told_to_be_made_for_other_traffic_or_to_hold_in_part(cli, plan, counts, other, tmp_path):
    words = {}
    for share in (0.35, 0.7):
        arguments = ("--weight", share, "--weight", 1 - share, "-o", tmp_path / "mix.json")
        assert 0 == cli("merge", counts, other, *arguments).code
        found, _ = evaluated(cli, plan, "--counts", tmp_path / "mix.json")
        words[share] = found["tests"][0]["words"]
    assert {0.35: "made for other traffic", 0.7: "the plan holds in part"} == words


def test_every_rate_of_the_proof_is_there_and_in_its_order(cli, plan, counts, same):
    found, _ = evaluated(cli, plan, "--counts", same, "--train", counts)
    (score,) = found["tests"][0]["scores"]
    assert 0.25 == found["null"] == score["layer_order"]
    assert score["layer_order"] < score["hit_rate"] <= score["oracle_reachable"] <= score["oracle_free"]
    assert found["in_sample"][0]["hit_rate"] > found["null"]
    assert {"0", "1", "2", "3"} == set(score["per_layer"])
    assert min(score["per_layer"].values()) == score["worst_rate"] == score["per_layer"][str(score["worst_layer"])]


def test_every_test_is_judged_by_itself(cli, plan, same, other):
    found, _ = evaluated(cli, plan, "--counts", same, other)
    assert ["holds", "chance"] == [test["verdict"] for test in found["tests"]]
    assert [None, None] == [test["drift"] for test in found["tests"]]


def test_decode_and_prefill_are_judged_apart_and_decode_counts(cli, plan, same, other, tmp_path):
    decode, prefill = (load_histogram(path)[0].phases["decode"] for path in (same, other))
    both = Histogram(identity=TINY, phases={"decode": decode, "prefill": prefill})
    save_histogram(both, tmp_path / "both.json")
    found, _ = evaluated(cli, plan, "--counts", tmp_path / "both.json", "--strict", 1)
    (test,) = found["tests"]
    assert ("holds", ["holds", "chance"]) == (test["verdict"], [score["verdict"] for score in test["scores"]])


def test_the_tables_name_the_worst_layer_and_every_layer_on_demand(cli, plan, counts, same):
    result = cli("evaluate", plan, "--counts", same, "--train", counts)
    assert 0 == result.code
    assert "same.json, decode: the plan holds" in result.out
    assert "in-sample, decode" in result.out
    assert "drift" in result.out
    layers = cli("evaluate", plan, "--counts", same, "--per-layer").out.partition("layer ")[2]
    assert ["0", "1", "2", "3"] == [line.split()[0] for line in layers.splitlines()[-4:]]


def test_testing_on_what_it_was_made_from_is_told(cli, plan, counts):
    found, err = evaluated(cli, plan, "--counts", counts, "--train", counts)
    assert "[test-is-train]" in err
    assert 0 == found["tests"][0]["drift"]


def test_a_small_test_is_told_to_be_noise(cli, plan, write_counts, tmp_path):
    _, err = evaluated(cli, plan, "--counts", write_counts(tmp_path / "few.json", tokens=20))
    assert "[small-test]" in err


def test_counts_of_another_model_are_refused(cli, plan, write_counts, tmp_path):
    foreign = write_counts(tmp_path / "foreign.json", identity=replace(TINY, num_experts=16))
    assert "num_experts is 16, not 32" in cli("evaluate", plan, "--counts", foreign).refusal()


@pytest.mark.parametrize(("plan_text", "test_text"), [("{", None), (None, "{"), (None, '{"layers": {"0": [1, NaN]}}')])
def test_a_damaged_file_is_one_clear_line(cli, plan, same, plan_text, test_text):
    if plan_text is not None:
        plan.write_text(plan_text)
    if test_text is not None:
        same.write_text(test_text)
    assert ("plan.json" if plan_text else "same.json") in cli("evaluate", plan, "--counts", same).refusal()


def test_domains_of_a_trace_are_tests(cli, shared_data, tmp_path):
    traces = shared_data / "traces"
    english = f"{traces / 'small-moe-histograms.json'}#english"
    cli("plan", "--counts", english, "--hot-fraction", 0.25, "-o", tmp_path / "p.json")
    found, _ = evaluated(cli, tmp_path / "p.json", "--counts", f"{traces / 'small-moe.npz'}#python", "--train", english)
    (test,) = found["tests"]
    assert ("other-traffic", 0.353, 0.667) == (
        test["verdict"],
        round(test["scores"][0]["hit_rate"], 3),
        round(test["scores"][0]["oracle_reachable"], 3),
    )


def test_testing_on_the_plans_own_counts_is_told_without_train(cli, plan, counts):
    _, err = evaluated(cli, plan, "--counts", counts)
    assert "[test-is-train]" in err
    assert "[test-is-train]" in cli("evaluate", plan, "--counts", counts, "--strict", 1).refusal()


def test_counts_that_the_plan_was_not_made_from_are_told(cli, plan, same, other):
    _, err = evaluated(cli, plan, "--counts", same, "--train", other)
    assert 1 == err.count("[not-the-plans-counts]")
    line = cli("evaluate", plan, "--counts", same, "--train", other, "--strict", 1).refusal()
    assert "[not-the-plans-counts]" in line


def test_test_is_another_name_of_counts(cli, plan, same, other):
    found, _ = evaluated(cli, plan, "--test", same, "--counts", other)
    assert [str(same), str(other)] == [test["name"] for test in found["tests"]]
