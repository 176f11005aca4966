from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from checkpoint_files import write_model
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import load_plan, plan_hash

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
ROW_GIB = 49152 / 2**30
"""One expert of the bundled model."""
RATES = ["hit_rate", "held_out", "null", "oracle_free", "oracle_reachable", "bound", "gap", "worst_layer"]
KEYS = [
    "kind", "model", "objective", "hash", "hot_experts", "hot_rows", "hot", "budget_bytes", "used_bytes", *RATES, "layer_order",
    "drift", "scores", "notices",
]  # fmt: skip


def best_rate(path, *, experts):
    """Hit rate of the best experts, in one ranking of shares over all layers."""
    counts_LE = load_histogram(path)[0].phases["decode"].counts
    shares_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    return math.fsum(sorted(shares_LE.ravel(), reverse=True)[:experts]) / len(counts_LE)


def test_a_plan_for_a_model_is_written_within_its_budget(cli, counts, tiny_moe, tmp_path):
    path = tmp_path / "plan.json"
    result = cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 50 * ROW_GIB, "-o", path)
    plan = load_plan(path)
    assert 0 == result.code
    assert 46 == plan.hot_rows().sum()  # and a spare row in each of 4 layers
    assert f"plan written to {path}\n" == result.err
    assert "46 of 128 experts are hot" in result.out
    assert "uses 2.3 MiB of 2.3 MiB" in result.out


def test_a_static_plan_has_no_spare_rows(cli, counts, tiny_moe):
    options = ("--counts", counts, "--hot-gib", 50 * ROW_GIB, "--dynamic", 0, "--json")
    assert 50 == json.loads(cli("plan", tiny_moe, *options).out)["hot_experts"]


def test_json_is_one_object_with_stable_keys(cli, counts, tiny_moe):
    result = cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.002, "--json")
    value = json.loads(result.out)
    assert KEYS == list(value)
    assert None is value["held_out"]
    assert (
        0 < value["null"] < value["hit_rate"] <= value["oracle_reachable"] <= value["oracle_free"] <= value["bound"] < 1
    )


def test_without_a_model_json_has_the_same_keys(cli, counts):
    value = json.loads(cli("plan", "--counts", counts, "--hot-fraction", 0.3, "--json").out)
    assert KEYS == list(value)
    assert 38 == value["hot_experts"]  # floor(0.3 x 128)


@pytest.mark.parametrize(("fraction", "experts"), [(0, 0), (0.1, 12), (0.25, 32), (0.29, 37), (1, 128)])
def test_a_fraction_takes_the_most_used_of_all_experts(cli, counts, fraction, experts):
    value = json.loads(cli("plan", "--counts", counts, "--hot-fraction", fraction, "--json").out)
    assert experts == value["hot_experts"]
    assert best_rate(counts, experts=experts) == pytest.approx(value["hit_rate"], abs=1e-9)
    assert experts / 128 == pytest.approx(value["null"], abs=1e-9)


def test_published_counts_give_the_published_rates(cli, shared_data):
    path = shared_data / "histograms" / "qwen3-30b-a3b.decode.json"
    rates = [
        json.loads(cli("plan", "--counts", path, "--hot-fraction", share, "--json").out)["hit_rate"]
        for share in (0.1, 0.2, 0.3, 0.5)
    ]
    assert [0.360, 0.573, 0.719, 0.890] == [round(rate, 3) for rate in rates]


def test_a_test_histogram_gives_the_held_out_rate(cli, counts, write_counts, tmp_path):
    same = write_counts(tmp_path / "same.json", seed=0, tokens=90_000)
    value = json.loads(cli("plan", "--counts", counts, "--hot-fraction", 0.3, "--test", same, "--json").out)
    assert value["hit_rate"] == pytest.approx(value["held_out"], abs=0.01)
    assert ["in-sample", "held-out"] == [score["traffic"] for score in value["scores"]]


def test_counts_that_are_no_use_on_the_test_spread_evenly_with_a_notice(cli, counts, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", seed=5)
    shuffled = json.loads(other.read_text())
    mine = json.loads(counts.read_text())["phases"]["decode"]["layers"]
    for layer, row in mine.items():  # what is used most here is used least there
        order = np.argsort(np.argsort(row))
        shuffled["phases"]["decode"]["layers"][layer] = np.sort(row)[::-1][order].tolist()
    other.write_text(json.dumps(shuffled))
    result = cli("plan", "--counts", counts, "--hot-fraction", 0.25, "--test", other, "--json")
    assert {"0": 8, "1": 8, "2": 8, "3": 8} == json.loads(result.out)["hot_rows"]
    assert "[held-out-no-better]" in result.err


def test_a_plan_without_counts_says_so_and_is_even(cli, tiny_moe):
    result = cli("plan", tiny_moe, "--hot-gib", 44 * ROW_GIB, "--json")
    value = json.loads(result.out)
    assert {"0": 10, "1": 10, "2": 10, "3": 10} == value["hot_rows"]
    assert None is value["hit_rate"]
    assert "[no-histogram]" in result.err


def test_without_a_budget_the_machines_own_is_used_and_said(cli, counts, tiny_moe):
    result = cli("plan", tiny_moe, "--counts", counts, "--vram-reserve-gib", 0)
    assert 0 == result.code
    assert "[default-budget]" in result.err
    assert "128 of 128 experts are hot" in result.out


def test_what_is_printed_fits_78_columns(cli, counts, tiny_moe):
    result = cli("plan", tiny_moe, "--counts", counts, "--test", counts, "--hot-gib", 0.002)
    assert [] == [line for line in result.out.splitlines() if len(line) > 78 or line != line.rstrip()]
    rows = [line for line in result.out.splitlines() if line.startswith("in-sample, decode")]
    assert 1 == len(rows)
    assert rows[0].split("decode")[1].replace(" %", "%").split()[0].endswith("%")


def test_the_same_input_gives_the_same_bytes(cli, counts, tiny_moe, tmp_path):
    for name in ("a.json", "b.json"):
        cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.002, "-o", tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_pipeline_stages_each_have_the_budget(cli, counts, tiny_moe, tmp_path):
    path = tmp_path / "plan.json"
    result = cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 30 * ROW_GIB, "--pp", 2, "--tp", 2, "-o", path)
    plan = load_plan(path)
    assert [(0, 1), (2, 3)] == [stage.layers for stage in plan.stages]
    assert [True, True] == [58 <= stage.used_bytes / (49152 / 2) <= 60 for stage in plan.stages]
    assert "stage 1: uses" in result.out


def test_a_missing_folder_for_the_plan_is_made(cli, counts, tmp_path):
    path = tmp_path / "not" / "yet" / "plan.json"
    assert 0 == cli("plan", "--counts", counts, "--hot-fraction", 0.3, "-o", path).code
    assert plan_hash(load_plan(path)) == json.loads(cli("show", path, "--json").out)["hash"]


# What is refused. The user's own file stays in every case.


@pytest.fixture
def refused(cli, tmp_path):
    """refused(*arguments, code=1) -> the one line, after a look at the file that must not change."""
    path = tmp_path / "mine.json"
    path.write_text("mine")

    def run(*arguments, code=1, env=None):
        line = cli("plan", *arguments, "-o", path, env=env).refusal(code)
        assert "mine" == path.read_text()
        assert [path] == list(tmp_path.glob("*mine.json*"))
        return line

    return run


def test_a_dense_model_is_refused(refused, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 1}
    tensors = {"model.layers.0.mlp.up_proj.weight": ("BF16", (4, 4))}
    line = refused(write_model(tmp_path / "dense", tensors, config=config), "--hot-gib", 1)
    assert "has no routed experts" in line
    assert "run this model without hotsplit" in line


def test_a_model_folder_that_is_not_there_is_refused(refused, tmp_path):
    assert f"model folder {tmp_path / 'none'}: got no such folder" in refused(tmp_path / "none", "--hot-gib", 1)


def test_a_folder_without_config_is_refused(refused, tmp_path):
    assert "got no config.json" in refused(tmp_path, "--hot-gib", 1)


def test_a_missing_shard_is_named(refused, tmp_path):
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{leaf}_proj.weight": ("BF16", (8, 8))
        for expert in range(4)
        for leaf in ("gate", "up", "down")
    }
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    folder = write_model(tmp_path / "sharded", experts, config=config, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(folder, "--hot-gib", 1)


def test_a_truncated_shard_is_named(refused, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "cut")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5_000_000)
    line = refused(folder, "--hot-gib", 1)
    assert "model.safetensors is truncated" in line
    assert "download it again" in line


@pytest.mark.parametrize(
    ("change", "field"),
    [({"model_type": "mixtral"}, "model_type is mixtral"), ({"top_k": 2}, "top_k is 2"), ({"layers": (1, 2, 3, 4)}, "layers is")],
)  # fmt: skip
def test_counts_of_another_model_are_refused_by_the_field_that_differs(
    refused, write_counts, tiny_moe, tmp_path, change, field
):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, **change))
    line = refused(tiny_moe, "--counts", other, "--hot-gib", 0.002)
    assert field in line
    assert "--force" in line


def test_force_uses_counts_of_another_model_and_says_so(cli, write_counts, tiny_moe, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, model_type="mixtral"))
    result = cli("plan", tiny_moe, "--counts", other, "--hot-gib", 0.002, "--force", "--json")
    assert 0 == result.code
    assert "[identity-forced]" in result.err
    assert "qwen3_moe" == json.loads(result.out)["model"]["model_type"]


def test_force_cannot_bend_counts_of_other_layers(refused, write_counts, tiny_moe, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, layers=(1, 2, 3, 4)))
    assert "--force cannot help" in refused(tiny_moe, "--counts", other, "--hot-gib", 0.002, "--force")


def test_a_count_that_is_nan_is_named_by_layer_and_expert(refused, tiny_moe, tmp_path):
    rows = {str(layer): [1.5] * 32 for layer in range(4)}
    rows["2"][7] = math.nan
    (tmp_path / "nan.json").write_text(json.dumps({"train": {"decode": rows}}))
    line = refused(tiny_moe, "--counts", tmp_path / "nan.json", "--hot-gib", 0.002)
    assert "layer 2, expert 7 (decode): got NaN" in line


def test_one_set_of_several_must_be_chosen(cli, refused, tmp_path):
    path = tmp_path / "sets.json"
    rows = {f"{domain}/{layer}": [3, 2, 1] for domain in ("code", "prose") for layer in range(2)}
    path.write_text(json.dumps({"phase": "decode", "tokens": {"code": 6, "prose": 6}, "top_k": 1, "layers": rows}))
    assert "2 sets and none chosen; wanted FILE#set with one of code, prose" in refused(
        "--counts", path, "--hot-fraction", 0.5
    )
    assert "no set 'poetry'" in refused("--counts", f"{path}#poetry", "--hot-fraction", 0.5)
    assert 0 == cli("plan", "--counts", f"{path}#prose", "--hot-fraction", 0.5).code


def test_a_form_that_is_not_known_lists_those_that_are(refused, tmp_path):
    (tmp_path / "odd.json").write_text('{"weights": 1}')
    assert "wanted one of: ours" in refused("--counts", tmp_path / "odd.json", "--hot-fraction", 0.5)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(b""), "JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "no UTF-8"),
        (lambda path: path.write_text("[1]"), "wanted a JSON object"),
    ],
)
def test_counts_that_cannot_be_read_are_refused(refused, tmp_path, make, reason):
    make(tmp_path / "bad.json")
    assert reason in refused("--counts", tmp_path / "bad.json", "--hot-fraction", 0.5)


def test_a_budget_below_the_minimum_names_it_and_static_mode(cli, refused, counts, tiny_moe):
    line = refused(tiny_moe, "--counts", counts, "--hot-gib", 0.0001)
    minimum = line.partition("set HOTSPLIT_HOT_GIB=")[2].partition(",")[0]
    assert "4 layers x (4 + 1) rows" in line
    assert line.endswith("or HOTSPLIT_DYNAMIC=0")
    assert 0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", minimum).code
    assert 0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.0001, "--dynamic", 0).code


def test_no_budget_at_all_needs_static_mode(cli, refused, counts, tiny_moe):
    assert "HOTSPLIT_DYNAMIC=0" in refused(tiny_moe, "--counts", counts, "--hot-gib", 0)
    result = cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0, "--dynamic", 0, "--json")
    assert 0 == json.loads(result.out)["hot_experts"]


def test_without_memory_for_a_default_budget_one_is_asked_for(refused, counts, tiny_moe):
    assert "pass --hot-gib" in refused(tiny_moe, "--counts", counts, "--vram-reserve-gib", 1_000_000)


def test_totals_that_do_not_match_the_models_top_k_are_refused_by_file_name(refused, tiny_moe, tmp_path):
    rows = {str(layer): [3] * 8 + [0] * 24 for layer in range(4)}
    (tmp_path / "flat.json").write_text(json.dumps({"phase": "decode", "tokens": 12, "layers": rows}))
    line = refused(tiny_moe, "--counts", tmp_path / "flat.json", "--hot-gib", 0.002)
    assert f"histogram {tmp_path / 'flat.json'}, layer 0 (decode): got 24 routed pairs" in line
    assert "12 x 4 = 48" in line


@pytest.mark.parametrize("fraction", ["-0.1", "1.01", "nan", "inf"])
def test_a_fraction_out_of_range_is_a_setting_error(refused, counts, fraction):
    assert "wanted a number from 0 to 1" in refused("--counts", counts, "--hot-fraction", fraction, code=2)


def test_a_fraction_and_a_budget_exclude_each_other(refused, counts):
    line = refused("--counts", counts, "--hot-fraction", 0.3, "--hot-gib", 1, code=2)
    assert "--hot-fraction and --hot-gib" in line


def test_a_fraction_and_a_model_exclude_each_other(refused, counts, tiny_moe):
    assert "MODEL and --hot-fraction" in refused(tiny_moe, "--counts", counts, "--hot-fraction", 0.3, code=2)


def test_a_fraction_needs_counts(refused):
    assert "no --counts" in refused("--hot-fraction", 0.3, code=2)


def test_neither_model_nor_fraction_is_refused(refused, counts):
    assert "neither MODEL nor --hot-fraction" in refused("--counts", counts, code=2)


def test_strict_mode_refuses_doubtful_counts(cli, refused, tmp_path):
    path = tmp_path / "flat.json"
    path.write_text(json.dumps({"phase": "decode", "top_k": 1, "layers": {"0": [5, 5, 5, 5], "1": [5, 5, 5, 5]}}))
    assert "[flat-counts]" in cli("plan", "--counts", path, "--hot-fraction", 0.5).err
    assert "[flat-counts]" in refused("--counts", path, "--hot-fraction", 0.5, "--strict", 1)


def test_more_stages_than_layers_are_refused(refused, counts, tiny_moe):
    assert "pipeline size 5" in refused(tiny_moe, "--counts", counts, "--hot-gib", 1, "--pp", 5)


def test_a_test_histogram_of_another_model_is_refused(refused, counts, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, top_k=2))
    assert "top_k is 2, not 4" in refused("--counts", counts, "--hot-fraction", 0.3, "--test", other)


def test_a_test_that_is_the_counts_is_told(cli, counts, tmp_path):
    arguments = ("plan", "--counts", counts, "--hot-fraction", 0.3, "--test", counts, "-o", tmp_path / "plan.json")
    line = cli(*arguments, "--strict", 1).refusal()
    assert "[test-is-train]" in line
    assert not (tmp_path / "plan.json").exists()
    assert "[test-is-train]" in cli(*arguments).err
