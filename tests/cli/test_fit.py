"""`hotsplit fit`: the bill of a GPU and of the host, before anything is bought."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.sizes import expert_sizes
from model_configs import DEEPSEEK_V3, DEEPSEEK_V4, GPT_OSS, KIMI_K2, MIXTRAL, OLMOE, QWEN3_30B, QWEN3_NEXT, QWEN35

MACHINE = ("--vram-gib", 96, "--ram-gib", 512)


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "model.json"
        path.write_text(json.dumps(content))
        return path

    return write


def fitted(cli, *arguments):
    result = cli("fit", *arguments, "--json")
    assert 0 == result.code, result.err
    return json.loads(result.out)


def test_a_folder_with_headers_is_exact(cli, tiny_moe):
    sizes = expert_sizes(read_headers(tiny_moe))
    small = ("--vram-gib", 0.005, "--ram-gib", 1, "--vram-reserve-gib", 0, "--ram-reserve-gib", 0, "--context", 100)
    found = fitted(cli, tiny_moe, *small)
    assert ("headers", True, sizes.expert_bytes) == (found["source"], found["fits"], found["expert_bytes"])
    assert {"least": sizes.dense_bytes, "most": sizes.dense_bytes} == found["dense_bytes"]
    # 4 layers x 2 x 2 heads x 64 x 2 bytes
    assert (2048, 204_800) == (found["kv"]["bytes_per_token"], found["kv"]["bytes"]["most"])
    sure = found["sure"]
    assert sure == found["best"]
    assert sizes.expert_bytes == sum(sure["hot_rows"].values()) * 49_152 + sure["cold_bytes"]
    assert sure["used_bytes"] == (sum(sure["hot_rows"].values()) + 4) * 49_152 <= found["room_bytes"]["most"]


def test_a_plan_takes_the_room_that_a_fit_promises(cli, tiny_moe):
    small = ("--vram-gib", 0.005, "--ram-gib", 1, "--vram-reserve-gib", 0, "--ram-reserve-gib", 0, "--context", 100)
    sure = fitted(cli, tiny_moe, *small)["sure"]
    planned = cli("plan", tiny_moe, "--hot-gib", f"{sure['room_bytes'] / 2**30:.9f}", "--json")
    plan = json.loads(planned.out)
    assert sure["hot_rows"] == plan["hot_rows"]
    assert [sure["used_bytes"]] == plan["used_bytes"]


def test_a_big_model_by_its_config_alone(cli, config):
    found = fitted(cli, config(DEEPSEEK_V3), "--gpus", 8, *MACHINE, "--dense-gib", 4, "--link", 25)
    row = 3 * 256 * 7168 + 3 * 2 * 56 * 4
    assert (58 * 256 * row, "config", "fp8") == (found["expert_bytes"], found["source"], found["model"]["quantisation"])
    assert {"latent": 61} == found["kv"]["layers"]
    sure = found["sure"]
    assert sure["token_cold_bytes"] / 25e9 == pytest.approx(sure["token_link_seconds"])
    assert 8 * sure["cold_bytes"] == sure["host_bytes"]


@pytest.mark.parametrize("model", [GPT_OSS, KIMI_K2, MIXTRAL, OLMOE, QWEN3_30B, QWEN3_NEXT, QWEN35])
def test_every_usual_architecture_is_recognised_by_its_config(cli, config, model):
    found = fitted(cli, config(model), "--gpus", 2, *MACHINE)
    assert ([], None) == (found["kv"]["unknown"], found["dense_bytes"]["most"])
    assert found["best"] is not None
    assert found["sure"] is None


def test_what_is_unknown_is_said_to_be(cli, config):
    unquantised = {key: value for key, value in DEEPSEEK_V4.items() if key != "quantization_config"}
    result = cli("fit", config(unquantised), "--gpus", 8, *MACHINE)
    assert 0 == result.code, result.err
    assert "the KV cache is unknown" in " ".join(result.out.split())
    assert "dense weights" in result.out
    assert "[dense-unknown]" in result.err
    assert "whether it fits is open" in result.out


def test_the_number_that_binds_is_named_with_the_way_out(cli, config):
    arguments = ("--gpus", 4, *MACHINE, "--dense-gib", 5, "--context", 131_072, "--concurrency", 16)
    result = cli("fit", config(DEEPSEEK_V3), *arguments)
    text = " ".join(result.out.split())
    assert "GPU memory binds" in text
    assert "tokens of KV cache in all (asked: 2,097,152)" in text
    assert text.endswith("it does not fit")
    host = cli("fit", config(DEEPSEEK_V3), "--gpus", 4, "--vram-gib", 48, "--ram-gib", 256, "--dense-gib", 5)
    assert "host memory binds" in " ".join(host.out.split())


def test_the_host_s_bytes_are_told_per_numa_node(cli, config):
    found = fitted(
        cli,
        config(DEEPSEEK_V3),
        "--gpus",
        4,
        "--vram-gib",
        96,
        "--ram-gib",
        "400,400",
        "--numa",
        "0,0,1,1",
        "--dense-gib",
        5,
    )
    cold = found["sure"]["cold_bytes"]
    assert {"0": 2 * cold, "1": 2 * cold} == found["sure"]["host_bytes_per_node"]


def test_draft_layers_are_named_and_charged_when_they_are_loaded(cli, config):
    path = config(DEEPSEEK_V3)
    without = fitted(cli, path, "--gpus", 8, *MACHINE, "--dense-gib", 4)
    loaded = fitted(cli, path, "--gpus", 8, *MACHINE, "--dense-gib", 4, "--draft")
    draft = without["draft_bytes"]["least"]
    assert draft == without["room_bytes"]["most"] - loaded["room_bytes"]["most"] > 2**30
    assert "not loaded without --draft" in cli("fit", path, "--gpus", 8, *MACHINE).out


def test_a_model_that_fits_is_told_to_run_whole(cli, config):
    result = cli("fit", config(OLMOE), *MACHINE, "--dense-gib", 2)
    assert "every expert fits" in result.out
    assert "it fits" in result.out


def test_every_layer_is_shown_on_demand(cli, config):
    result = cli(
        "fit", config(OLMOE), "--vram-gib", 8, "--ram-gib", 64, "--dense-gib", 2, "--context", 4096, "--per-layer"
    )
    rows = [line.split()[:2] for line in result.out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [[str(layer), "12,582,912"] for layer in range(16)] == rows


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--vram-gib", -1, "--ram-gib", 1), "--vram-gib"),
        (("--vram-gib", "nan", "--ram-gib", 1), "--vram-gib"),
        (("--vram-gib", "1e300", "--ram-gib", 1), "--vram-gib"),
        (("--vram-gib", 80e9, "--ram-gib", 1), "wanted 0 to 8,388,608 GiB; check the unit"),
        (("--vram-gib", 1, "--ram-gib", "a"), "--ram-gib"),
        (("--vram-gib", 1, "--ram-gib", "1,2"), "--ram-gib"),
        (("--vram-gib", 1, "--ram-gib", 1, "--numa", "x"), "--numa"),
        (("--vram-gib", 1, "--ram-gib", 1, "--numa", "0,1"), "--numa"),
        (("--vram-gib", 1, "--ram-gib", 1, "--link", 25e9), "--link"),
        (("--vram-gib", 1, "--ram-gib", 1, "--dense-gib", -1), "--dense-gib"),
    ],
)
def test_a_number_that_is_not_possible_is_refused_by_its_option(cli, tiny_moe, arguments, match):
    assert match in cli("fit", tiny_moe, *arguments).refusal(2)


@pytest.mark.parametrize(
    "content", [{}, {"model_type": "llama"}, QWEN3_30B | {"quantization_config": {"quant_method": "exl3"}}]
)
def test_what_cannot_be_weighed_is_one_clear_line(cli, config, content):
    assert "model.json" in cli("fit", config(content), *MACHINE).refusal()


def test_a_folder_that_is_not_there_is_one_clear_line(cli, tmp_path):
    assert "gone" in cli("fit", tmp_path / "gone", *MACHINE).refusal()


def test_the_example_of_the_page_is_what_the_command_prints(cli, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    command, shown = re.search(r"    (hotsplit fit deepseek-v3 .*)\n\n((?:    .*\n)+)", page).groups()
    (tmp_path / "deepseek-v3").mkdir()
    (tmp_path / "deepseek-v3" / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    result = cli("fit", tmp_path / "deepseek-v3", *command.split()[3:])
    expected = [line.removeprefix("    ").rstrip() for line in shown.splitlines()]
    assert expected == [line.rstrip() for line in result.out.splitlines()]


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [("--gpus", 10**9, "4096"), ("--context", 10**400, "1000000000"), ("--concurrency", 10**400, "1000000")],
)
def test_more_than_any_machine_has_is_refused_with_the_limit(cli, config, option, value, most):
    result = cli("fit", config(DEEPSEEK_V3), *MACHINE, option, value)
    assert (2, "") == (result.code, result.out)
    assert f"1<=x<={most}" in result.err


@pytest.mark.parametrize(
    ("claim", "match"),
    [
        ({"num_hidden_layers": 10**7}, "10000000 layers"),
        ({"num_hidden_layers": 10**4, "num_experts": 10**4}, "10000 layers x 10000 experts"),
        ({"hidden_size": 10**18}, "hidden_size"),
        ({"hidden_size": 10**15}, "bytes of experts"),
        ({"head_dim": 10**400}, "head_dim"),
    ],
)
def test_numbers_that_no_model_has_are_one_clear_line(cli, config, claim, match):
    assert match in cli("fit", config(QWEN3_30B | claim), *MACHINE).refusal()


def test_a_json_file_of_another_kind_is_not_taken_for_a_dense_model(cli, config):
    assert "is no model config" in cli("fit", config({"version": "1.0", "added_tokens": []}), *MACHINE).refusal()
    assert "a dense model" in cli("fit", config({"model_type": "llama"}), *MACHINE).refusal()


def test_a_hub_id_is_told_that_it_is_not_looked_up(cli):
    line = cli("fit", "deepseek-v3-that-is-not-here", *MACHINE).refusal()
    assert "hub ids are not looked up" in line
    assert "index" in line


def test_what_unknown_dense_weights_bound_is_marked_as_a_bound(cli, config):
    arguments = (config(OLMOE), "--vram-gib", 8, "--ram-gib", 64, "--context", 4096)
    text = " ".join(cli("fit", *arguments).out.split())
    assert "uniform traffic reads at least " in text
    most = fitted(cli, *arguments)["kv"]["most_tokens"]
    assert 0 == most["least"]
    assert f"with the fewest hot rows, at most {most['most']:,} tokens of it would fit" in text


def test_a_model_that_does_not_fit_is_an_answer_and_no_failure(cli, config):
    result = cli("fit", config(DEEPSEEK_V3), "--vram-gib", 8, "--ram-gib", 64, "--dense-gib", 4)
    assert (0, True) == (result.code, result.out.rstrip().endswith("it does not fit"))
    assert "exit code is 0" in " ".join(cli("fit", "--help").out.split())


@pytest.mark.parametrize(("ram", "fits"), [(215, False), (230, None), (256, None), (310, None), (320, True)])
def test_a_host_that_holds_the_cold_experts_at_one_end_alone_is_no_fit(cli, ram, fits):
    arguments = ("fit", "mimo-v2.6-pro", "--ram-gib", ram)
    text = " ".join(cli(*arguments).out.split())
    assert "the host holds 214.596 GiB to 311.491 GiB of cold experts" in text
    last = {False: "it does not fit", None: "whether it fits is open", True: "it fits"}[fits]
    assert text.endswith(f" {last}")
    found = json.loads(cli(*arguments, "--json").out)
    named = {None: ["ram-open"], False: ["ram"], True: []}[fits]
    assert (fits, named) == (found["fits"], [finding["name"] for finding in found["findings"]])


def test_experts_that_are_stored_their_own_way_are_named_by_it(cli):
    assert ", top-8, experts mxfp4, all else fp8\n" in cli("fit", "mimo-v2.6-pro").out
    model = fitted(cli, "mimo-v2.6-pro")["model"]
    assert ("fp8", "mxfp4") == (model["quantisation"], model["expert_type"])


def test_a_misspelt_recipe_is_told_before_any_missing_option(cli):
    line = cli("fit", "mimo").refusal(2)
    assert "hotsplit: MODEL mimo: got no recipe or folder of that name; did you mean mimo-v2.6-pro?" == line
    assert "no such folder or file" in cli("fit", "foo").refusal()


def test_missing_options_are_named_together(cli, tiny_moe):
    result = cli("fit", tiny_moe)
    assert (2, "") == (result.code, result.out)
    assert "Missing --vram-gib and --ram-gib" in result.err
    assert "Missing --ram-gib:" in cli("fit", tiny_moe, "--vram-gib", 1).err


@pytest.mark.parametrize("model", ["mimo-v2.6-pro", "deepseek-v4-pro", "qwen3.8-2.4t-a95b"])
def test_a_bill_fits_a_terminal(cli, model):
    lines = cli("fit", model).out.splitlines()
    assert max(map(len, lines)) <= 110
    assert [] == [line for line in lines if line != line.rstrip()]
