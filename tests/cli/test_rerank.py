from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.learned import learned_path, save_learned

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)


def shares(path):
    counts_LE = load_histogram(path)[0].phases["decode"].counts
    return counts_LE / counts_LE.sum(axis=1, keepdims=True)


@pytest.fixture
def live(write_counts, tmp_path):
    return write_counts(tmp_path / "live.json", seed=1, tokens=50_000)


@pytest.mark.parametrize("weight", [None, 0, 0.25, 3])
def test_merged_counts_are_reference_shares_plus_weighted_live_shares(cli, counts, live, tmp_path, weight):
    path = tmp_path / "merged.json"
    option = () if weight is None else ("--live-weight", weight)
    result = cli("rerank", live, counts, "-o", path, *option)
    merged, notices = load_histogram(path)
    assert (0, []) == (result.code, notices)
    expected_LE = shares(counts) + (1 if weight is None else weight) * shares(live)
    assert merged.normalised
    np.testing.assert_allclose(expected_LE, merged.phases["decode"].counts, rtol=1e-12)


def test_json_is_one_object_and_the_note_goes_to_stderr(cli, counts, live, tmp_path):
    path = tmp_path / "merged.json"
    result = cli("rerank", live, counts, "-o", path, "--json")
    assert ["kind", "model", "normalised", "phases"] == list(json.loads(result.out))
    told = result.err.splitlines()
    assert f"merged histogram written to {path}" == told[0]
    assert f"nothing was restarted; it takes effect at the next start: hotsplit serve ... --counts {path}" == told[1]
    assert 2 == len(told)


def test_a_merged_histogram_can_be_planned_from(cli, counts, live, tmp_path, tiny_moe):
    cli("rerank", live, counts, "-o", tmp_path / "merged.json")
    assert 0 == cli("plan", tiny_moe, "--counts", tmp_path / "merged.json", "--hot-gib", 0.002).code


def test_49_999_decode_tokens_are_too_few(cli, counts, write_counts, tmp_path):
    path = tmp_path / "merged.json"
    path.write_text("mine")
    few = write_counts(tmp_path / "few.json", seed=1, tokens=49_999)
    line = cli("rerank", few, counts, "-o", path).refusal()
    assert f"the live sample {few}, layer 0: got 49999 decode tokens; wanted at least 50000" in line
    assert "--min-tokens" in line
    assert "mine" == path.read_text()


def test_the_minimum_can_be_lowered(cli, counts, write_counts, tmp_path):
    few = write_counts(tmp_path / "few.json", seed=1, tokens=100)
    assert 0 == cli("rerank", few, counts, "-o", tmp_path / "a.json", "--min-tokens", 100).code
    assert 1 == cli("rerank", few, counts, "-o", tmp_path / "b.json", "--min-tokens", 101).code
    assert not (tmp_path / "b.json").exists()


def test_a_sample_of_another_model_is_refused_by_the_field_that_differs(cli, counts, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, layers=(0, 1, 2)))
    assert "layers is" in cli("rerank", other, counts, "-o", tmp_path / "m.json").refusal()


@pytest.mark.parametrize("weight", ["-1", "nan", "inf"])
def test_a_weight_that_is_none_is_a_setting_error(cli, counts, live, tmp_path, weight):
    line = cli("rerank", live, counts, "-o", tmp_path / "m.json", "--live-weight", weight).refusal(2)
    assert "wanted a finite number >= 0" in line


def test_a_file_that_is_not_there_is_named(cli, counts, tmp_path):
    assert "gone.json" in cli("rerank", tmp_path / "gone.json", counts, "-o", tmp_path / "m.json").refusal()


def learn(state, *, seed=1, tokens=50_000, identity=TINY, stage=0):
    """Learned counts in a state folder, as a run saves them."""
    draws = np.random.default_rng(seed)
    counts_LE = draws.multinomial(4 * tokens, draws.dirichlet(np.ones(32)), size=len(identity.layers)) * 0.5
    counted = PhaseCounts(counts=counts_LE, tokens=tokens)
    save_learned(Histogram(identity=identity, phases={"decode": counted}, normalised=True), state, stage=stage)
    return counts_LE / counts_LE.sum(axis=1, keepdims=True)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.mark.parametrize("words", [("--learned",), ()], ids=["--learned", "--state-dir alone"])
def test_learned_counts_are_found_by_the_model_of_the_reference(cli, counts, state, tmp_path, words):
    learned = learn(state)
    learn(state, identity=replace(TINY, model_type="other"))
    path = tmp_path / "merged.json"
    result = cli("rerank", counts, *words, "--state-dir", state, "-o", path)
    assert 0 == result.code, result.err
    np.testing.assert_allclose(shares(counts) + learned, load_histogram(path)[0].phases["decode"].counts, rtol=1e-12)


def test_what_was_read_what_is_left_alone_and_when_it_takes_effect_is_said(cli, counts, state, tmp_path):
    learn(state)
    before = learned_path(state, TINY).read_bytes()
    err = cli("rerank", counts, "--learned", "-o", tmp_path / "m.json", env={"HOTSPLIT_STATE_DIR": str(state)}).err
    assert f"learned counts read from {learned_path(state, TINY)}\n" in err
    assert "nothing was restarted; it takes effect at the next start" in err
    assert "--learned ignore" in err
    assert before == learned_path(state, TINY).read_bytes()


def test_learned_counts_of_pipeline_stages_are_one_model(cli, counts, state, tmp_path):
    parts = [
        learn(state, seed=i, identity=replace(TINY, layers=layers), stage=i)
        for i, layers in enumerate([(0,), (1, 2, 3)])
    ]
    path = tmp_path / "merged.json"
    assert 0 == cli("rerank", counts, "--state-dir", state, "-o", path).code
    merged = load_histogram(path)[0].phases["decode"].counts
    np.testing.assert_allclose(shares(counts) + np.concatenate(parts), merged, rtol=1e-12)


def test_a_stage_that_has_learned_nothing_leaves_the_model_without(cli, counts, state, tmp_path):
    learn(state, identity=replace(TINY, layers=(0,)))
    line = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json").refusal()
    assert "but not of all pipeline stages" in line


def test_learned_counts_have_the_same_guard(cli, counts, state, tmp_path):
    learn(state, tokens=49_999)
    line = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json").refusal()
    assert f"the live sample {learned_path(state, TINY)}, layer 0: got 49999 decode tokens; wanted at least" in line
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "glm4_moe"}, "model_type is glm4_moe, not qwen3_moe"),
        ({"top_k": 2}, "top_k is 2, not 4"),
        ({"layers": (0, 1, 2, 3, 4)}, "layers is"),
        (None, "got none"),
    ],
)
def test_without_counts_of_the_model_the_field_that_differs_is_named(cli, counts, state, tmp_path, change, said):
    if change is not None:
        learn(state, identity=replace(TINY, **change))
    line = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json").refusal()
    assert said in line
    assert "--state-dir" in line


def test_two_sets_that_fit_are_refused_by_name(cli, counts, state, tmp_path):
    learn(state)
    learn(state, identity=replace(TINY, layers=(0, 1)), stage=0)
    learn(state, identity=replace(TINY, layers=(2, 3)), stage=1)
    line = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json").refusal()
    assert "wanted one set that fits" in line
    assert 2 == line.count("-stage0.json")


def test_a_damaged_file_is_skipped_aloud(cli, counts, state, tmp_path):
    learn(state)
    (state / "learned" / "x-stage0.json").write_text("{")
    result = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json")
    assert (0, True) == (result.code, "[learned-damaged]" in result.err)


@pytest.mark.parametrize("has_other", [False, True], ids=["alone", "beside another stage"])
def test_a_damaged_file_is_named_where_it_is_why_there_are_none(cli, counts, state, tmp_path, has_other):
    if has_other:
        learn(state, identity=replace(TINY, layers=(0, 1)))
    damaged = state / "learned" / "x-stage1.json"
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_text("{")
    line = cli("rerank", counts, "--state-dir", state, "-o", tmp_path / "m.json").refusal()
    assert f"{damaged} is damaged and skipped" in line
    assert ("but not of all pipeline stages" in line) == has_other


def test_learned_counts_are_never_written_over(cli, counts, state):
    learn(state)
    path = learned_path(state, TINY)
    assert "which is read" in cli("rerank", counts, "--state-dir", state, "-o", path).refusal(2)


@pytest.mark.parametrize("arguments", [("a", "b", "--learned"), ("a",), (), ("a", "b", "c")])
def test_the_number_of_histograms_must_fit(cli, tmp_path, arguments):
    result = cli("rerank", *arguments, "-o", tmp_path / "m.json")
    assert (2, True) == (result.code, "histograms; wanted" in result.err)
