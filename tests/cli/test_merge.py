"""`hotsplit merge`: shares, pairs and ranks (CASES T3)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from histogram_files import ROWS, csv, flat, pairs
from histogram_files import counts as counts_form
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.identity import ModelIdentity

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)


def matrix(path):
    return load_histogram(path)[0].phases["decode"].counts


def shares(path):
    counts_LE = matrix(path)
    return counts_LE / counts_LE.sum(axis=1, keepdims=True)


@pytest.fixture
def other(write_counts, tmp_path):
    return write_counts(tmp_path / "other.json", seed=1, tokens=500)


@pytest.mark.parametrize("weights", [(), (1, 0.25), (0, 3)])
def test_shares_are_weighted_and_added_per_layer(cli, counts, other, tmp_path, weights):
    options = [argument for weight in weights for argument in ("--weight", weight)]
    assert 0 == cli("merge", counts, other, "-o", tmp_path / "m.json", *options).code
    first, second = weights or (1, 1)
    assert first * shares(counts) + second * shares(other) == pytest.approx(matrix(tmp_path / "m.json"), abs=1e-12)


def test_a_merge_does_not_depend_on_the_order(cli, counts, other, write_counts, tmp_path):
    third = write_counts(tmp_path / "third.json", seed=2)
    cli("merge", counts, other, third, "--weight", 1, "--weight", 2, "--weight", 3, "-o", tmp_path / "a.json")
    cli("merge", third, other, counts, "--weight", 3, "--weight", 2, "--weight", 1, "-o", tmp_path / "b.json")
    assert matrix(tmp_path / "a.json").tolist() == matrix(tmp_path / "b.json").tolist()


def test_sums_add_pairs_and_tokens(cli, counts, other, tmp_path):
    assert 0 == cli("merge", counts, other, "--rule", "sum", "-o", tmp_path / "m.json").code
    assert (matrix(counts) + matrix(other)).tolist() == matrix(tmp_path / "m.json").tolist()
    assert 60_500 == load_histogram(tmp_path / "m.json")[0].phases["decode"].tokens


def write(path, content):
    if isinstance(content, np.ndarray):
        with path.open("wb") as file:
            np.save(file, content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_same_counts_in_every_form_are_one_matrix(cli, tmp_path):
    array = np.array(list(ROWS.values()))
    left = {"3,0": 6, "3,1": 3, "4,0": 5, "4,1": 5}
    right = "layer,expert,count\n3,2,1\n3,3,0\n4,2,0\n4,3,0\n"
    files = {
        "array": ([write(tmp_path / "a.npy", array[None])], ("--layers", "3,4")),
        "csv": ([write(tmp_path / "b.csv", csv())], ()),
        "keys": ([write(tmp_path / "d.json", flat())], ()),
        "expert parallel": ([write(tmp_path / "e0.json", left), write(tmp_path / "e1.csv", right)], ()),
        "tensor parallel": ([write(tmp_path / "f0.json", counts_form()), write(tmp_path / "f1.json", pairs())], ()),
    }
    found = {}
    for name, (paths, options) in files.items():
        out = tmp_path / f"{name}.json"
        command = ("convert", "--to", "hotsplit") if len(paths) == 1 else ("merge", "--rule", "ranks")
        result = cli(*command, *paths, "-o", out, *options)
        assert 0 == result.code, result.err
        histogram = load_histogram(out)[0]
        found[name] = (histogram.layers, histogram.phases["decode"].counts.tolist())
    assert dict.fromkeys(files, ((3, 4), [list(map(float, row)) for row in ROWS.values()])) == found


def test_ranks_that_disagree_are_one_clear_line_and_nothing_is_written(cli, tmp_path):
    write(tmp_path / "f0.json", flat(tokens=None))
    write(tmp_path / "f1.json", flat({"3": [6, 3, 1, 0], "4": [5, 4, 1, 0]}, tokens=None))
    line = cli(
        "merge", tmp_path / "f0.json", tmp_path / "f1.json", "--rule", "ranks", "-o", tmp_path / "m.json"
    ).refusal()
    assert "layer 3, expert 0 (decode): got counts 6 and 6 from different ranks" in line
    assert not (tmp_path / "m.json").exists()


def test_ranks_whose_totals_are_not_tokens_times_top_k_are_refused(cli, tmp_path):
    write(tmp_path / "e0.json", flat({"3": [6, 3, 0, 0], "4": [5, 5, 0, 0]}))
    write(tmp_path / "e1.json", flat({"3": [0, 0, 2, 0], "4": [0, 0, 0, 0]}))
    line = cli(
        "merge", tmp_path / "e0.json", tmp_path / "e1.json", "--rule", "ranks", "-o", tmp_path / "m.json"
    ).refusal()
    assert "layer 3 (decode): got 11 routed pairs; wanted tokens x top_k = 5 x 2 = 10" in line


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--weight", 1), "one for each of 2 files"),
        (("--weight", 1, "--weight", -1), "a finite number >= 0"),
        (("--weight", 1, "--weight", "nan"), "a finite number >= 0"),
        (("--rule", "sum", "--weight", 1, "--weight", 1), "with --rule sum"),
    ],
)
def test_what_cannot_be_merged_so_is_one_clear_line(cli, counts, other, tmp_path, arguments, match):
    assert match in cli("merge", counts, other, "-o", tmp_path / "m.json", *arguments).refusal(2)
    assert not (tmp_path / "m.json").exists()


def test_one_file_is_nothing_to_merge(cli, counts, tmp_path):
    assert "wanted two or more" in cli("merge", counts, "-o", tmp_path / "m.json").refusal(2)


def test_files_of_other_models_are_refused_by_the_field(cli, counts, write_counts, tmp_path):
    foreign = write_counts(tmp_path / "foreign.json", identity=replace(TINY, top_k=2))
    assert "top_k is 2, not 4" in cli("merge", counts, foreign, "-o", tmp_path / "m.json").refusal()


def test_the_result_names_its_files(cli, counts, other, tmp_path):
    cli("merge", counts, other, "-o", tmp_path / "m.json")
    assert ["counts.json", "other.json"] == load_histogram(tmp_path / "m.json")[0].source["names"]
