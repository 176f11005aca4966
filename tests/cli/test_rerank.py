from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.identity import ModelIdentity

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
    assert f"merged histogram written to {path}\n" == result.err


def test_a_merged_histogram_can_be_planned_from(cli, counts, live, tmp_path, tiny_moe):
    cli("rerank", live, counts, "-o", tmp_path / "merged.json")
    assert 0 == cli("plan", tiny_moe, "--counts", tmp_path / "merged.json", "--hot-gib", 0.002).code


def test_49_999_decode_tokens_are_too_few(cli, counts, write_counts, tmp_path):
    path = tmp_path / "merged.json"
    path.write_text("mine")
    few = write_counts(tmp_path / "few.json", seed=1, tokens=49_999)
    line = cli("rerank", few, counts, "-o", path).refusal()
    assert "the live sample, layer 0: got 49999 decode tokens; wanted at least 50000" in line
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
