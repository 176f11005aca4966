from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import load_plan, save_plan

pytestmark = pytest.mark.transformers

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
KEYS = [
    "text", "prompt_tokens", "new_tokens", "seconds", "hit_rate", "byte_hit_rate", "kept_rate", "hot_experts", "experts",
    "hot_bytes", "budget_bytes", "swaps", "updates", "plan_hash", "mode",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(cli, tiny_moe, tmp_path):
    """run(*options) -> Result of 8 tokens from the bundled model, its state under tmp_path."""

    def go(*options, model=tiny_moe, prompt="def main():", env=None):
        state = ("--state-dir", tmp_path / "state")
        return cli("run", model, "--prompt", prompt, "--max-new-tokens", 8, *state, *options, env=env)

    return go


def plan_of(cli, tiny_moe, path, *options):
    assert 0 == cli("plan", tiny_moe, *options, "-o", path).code
    return path


def test_the_text_goes_to_stdout_and_the_numbers_to_stderr(run):
    result = run("--hot-gib", 0.002)
    value = json.loads(run("--hot-gib", 0.002, "--json").out)
    assert f"{value['text']}\n" == result.out
    assert "8 tokens in" in result.err
    assert "39 of 128 experts hot, 2.0 MiB of 2.0 MiB; " in result.err
    assert re.search(r"hit rate \d+\.\d % \(byte hit rate \d+\.\d %\)", result.err)
    assert 0 == value["kept_rate"]


def test_json_is_one_object_with_stable_keys(run):
    value = json.loads(run("--hot-gib", 0.002, "--json").out)
    assert KEYS == list(value)
    assert (8, 39, 128, "dynamic") == (value["new_tokens"], value["hot_experts"], value["experts"], value["mode"])
    assert 0 < value["hit_rate"] < 1


@pytest.mark.parametrize("options", [("--hot-gib", 1), ("--enable", 0)])
def test_a_stock_run_has_the_same_keys_and_the_same_text(run, options):
    value = json.loads(run(*options, "--json").out)
    assert KEYS == list(value)
    assert None is value["hit_rate"]
    assert value["text"] == json.loads(run("--hot-gib", 0.002, "--json").out)["text"]


def test_a_model_that_fits_is_run_stock_with_a_notice(run):
    result = run("--hot-gib", 1)
    assert 0 == result.code
    assert "[fits]" in result.err
    assert "[off]" in run("--enable", 0).err


def test_updates_are_logged_one_line_each(run):
    result = run("--hot-gib", 0.002, "--dyn-steps", 2, "--json")
    lines = [line for line in result.err.splitlines() if line.startswith("hotsplit update=")]
    assert json.loads(result.out)["updates"] == len(lines) > 0
    assert "swaps=" in lines[0]


def test_what_is_learned_is_saved_and_taken_up_at_the_next_start(run, tmp_path):
    assert "no learned counts" in run("--hot-gib", 0.002).err
    assert 1 == len(list((tmp_path / "state" / "learned").glob("*.json")))
    assert "learned alone, weight 1" in run("--hot-gib", 0.002).err
    ignoring = run("--hot-gib", 0.002, "--learned", "ignore").err
    assert "every layer alike" in ignoring
    assert "learned counts saved" not in ignoring


def test_a_seed_draws_the_same_text_again(run):
    drawn = [run("--hot-gib", 0.002, "--temperature", 1, "--seed", seed).out for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_chat_prompt_goes_through_the_template(run):
    assert 0 == run("--hot-gib", 0.002, "--chat").code


def test_tabs_and_emoji_codes_of_a_text_are_printed_as_they_are(capsys):
    from hotsplit.cli.views import print_run

    print_run({"text": "\ta[b] :cat:", "new_tokens": 1, "seconds": 1.0, "hit_rate": None})
    assert "\ta[b] :cat:\n" == capsys.readouterr().out


def test_a_plan_rules_and_counts_only_score_it(cli, run, counts, tiny_moe, tmp_path):
    plan = plan_of(cli, tiny_moe, tmp_path / "plan.json", "--counts", counts, "--hot-gib", 0.002)
    result = run("--plan", plan, "--counts", counts, "--json")
    assert 0 == result.code, result.err
    assert "[counts-score-plan]" in result.err
    assert json.loads(cli("show", plan, "--json").out)["hash"] == json.loads(result.out)["plan_hash"]


def test_a_plan_with_the_budget_it_was_made_for_is_taken(cli, run, counts, tiny_moe, tmp_path):
    plan = plan_of(cli, tiny_moe, tmp_path / "plan.json", "--counts", counts, "--hot-gib", 0.002)
    assert 0 == run("--plan", plan, "--hot-gib", 0.002).code


def test_a_plan_with_another_budget_is_refused(cli, run, counts, tiny_moe, tmp_path):
    plan = plan_of(cli, tiny_moe, tmp_path / "plan.json", "--counts", counts, "--hot-gib", 0.002)
    assert "a budget of 2.0 MiB in the plan and 3.1 MiB given" in run("--plan", plan, "--hot-gib", 0.003).refusal()


def test_a_static_plan_without_room_for_spare_rows_is_refused_in_dynamic_mode(cli, run, counts, tiny_moe, tmp_path):
    options = ("--counts", counts, "--hot-gib", 50 * 49152 / 2**30, "--dynamic", 0)
    plan = plan_of(cli, tiny_moe, tmp_path / "plan.json", *options)
    line = run("--plan", plan).refusal()
    assert "with its spare rows" in line
    assert "HOTSPLIT_DYNAMIC=0" in line
    assert 0 == run("--plan", plan, "--dynamic", 0).code


def test_a_plan_of_another_model_is_refused_by_the_field_and_forced_aloud(cli, run, counts, tiny_moe, tmp_path):
    plan = plan_of(cli, tiny_moe, tmp_path / "plan.json", "--counts", counts, "--hot-gib", 0.002)
    made = load_plan(plan)
    save_plan(replace(made, identity=replace(made.identity, model=replace(TINY, model_type="mixtral"))), plan)
    assert "model_type is mixtral, not qwen3_moe" in run("--plan", plan).refusal()
    assert "[identity-forced]" in run("--plan", plan, "--force").err


def test_counts_of_another_model_are_refused_by_the_field_and_forced_aloud(run, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, top_k=2))
    assert "top_k is 2, not 4" in run("--counts", other, "--hot-gib", 0.002).refusal()
    assert "[identity-forced]" in run("--counts", other, "--hot-gib", 0.002, "--force").err


def test_a_plan_file_that_is_none_is_refused(run, counts, tmp_path):
    assert "no such file" in run("--plan", tmp_path / "gone.json").refusal()
    assert "got a histogram, not a plan" in run("--plan", counts).refusal()


def test_a_budget_below_the_minimum_names_it_and_static_mode(run):
    line = run("--hot-gib", 0.0001).refusal()
    assert "4 layers x (4 + 1) rows" in line
    assert line.endswith("or HOTSPLIT_DYNAMIC=0")


@pytest.mark.parametrize("hot_gib", [0.003, 1])
def test_a_budget_above_real_memory_is_refused_after_it_is_capped(run, monkeypatch, hot_gib):
    small = MemoryLimit(name="MemAvailable", state=LIMITED, available_bytes=3 * 2**20, source="/proc/meminfo")
    monkeypatch.setattr("hotsplit.host.budget.memory_limits", lambda: MemoryLimits(limits=(small,)))
    line = run("--hot-gib", hot_gib, "--vram-reserve-gib", 0).refusal()
    assert "the hot budget exceeds real memory" in line
    assert "by MemAvailable (/proc/meminfo)" in line
    assert "set HOTSPLIT_HOT_GIB=" in line


def test_a_dense_model_is_refused(run, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    dense = {key: value for key, value in config.items() if "expert" not in key}
    (folder / "config.json").write_text(
        json.dumps(dense | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    assert "has no routed experts" in run("--hot-gib", 1, model=folder).refusal()


def test_a_missing_shard_is_named(run, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in run("--hot-gib", 1, model=folder).refusal()


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(run):
    line = run("--hot-gib", 1, model="no-such-org/no-such-model").refusal()
    assert "model no-such-org/no-such-model: got no such folder, and the hub does not give it out" in line


@pytest.mark.parametrize(("prompt", "reason"), [("", "no tokens"), ("\udcff", "bytes that are no UTF-8")])
def test_a_prompt_that_is_no_text_is_refused(run, prompt, reason):
    assert reason in run("--hot-gib", 0.002, prompt=prompt).refusal(2)


def test_a_chat_without_a_template_is_refused(run, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "a model without a chat template" in run("--hot-gib", 0.002, "--chat", model=folder).refusal(2)


@pytest.mark.parametrize("temperature", ["nan", "inf"])
def test_a_temperature_that_is_none_is_a_setting_error(run, temperature):
    assert "wanted a finite number >= 0" in run("--temperature", temperature).refusal(2)
