"""hotsplit recipe, serve --recipe and fit NAME: what a user sees, and what vLLM gets."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace

import pytest

import recipe_files
from hotsplit.cli import recipes_vllm, vllm_process
from hotsplit.cli.vllm_process import Vllm
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.planfile import to_bytes
from hotsplit.plan.sizes import expert_sizes
from hotsplit.recipes import load, names
from hotsplit.recipes.planning import recipe_plan

HERE = Vllm(version="0.32.0", ready_timeout_s=600, has_command=True, has_plugin=True)


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch, tmp_path):
    """No vLLM is asked for its flags, and the user's state folder is this test's own."""
    monkeypatch.setattr(recipes_vllm, "installed_flags", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def handed(monkeypatch):
    """Every start of vLLM, which does not take place."""
    starts = []
    monkeypatch.setattr(vllm_process, "find_vllm", lambda: HERE)
    monkeypatch.setattr(os, "execve", lambda _, arguments, environ: starts.append((list(arguments), dict(environ))))
    return starts


def as_json(cli, *arguments, env=None):
    result = cli(*arguments, "--json", env=env)
    assert 0 == result.code, result.err
    return json.loads(result.out)


def names_of(value):
    return [text.rpartition("[")[2].rstrip("]") for text in value["notices"]]


def test_the_list_has_every_recipe(cli):
    value = as_json(cli, "recipe", "list")
    assert list(names()) == [one["name"] for one in value["recipes"]]
    assert all(name in cli("recipe", "list").out for name in names())


@pytest.mark.parametrize("name", names())
def test_all_of_a_recipe_is_shown(cli, name):
    result = cli("recipe", "show", name)
    assert 0 == result.code, result.err
    recipe, text = load(name), "".join(result.out.split())
    for words in (
        *recipe.facts.source,
        *recipe.facts.unknown,
        *(bad.why for bad in recipe.known_bad if not bad.is_refused),
    ):
        assert "".join(words.split()) in text
    assert all("".join(one.source.split()) in text for one in recipe.results)
    value = as_json(cli, "recipe", "show", name)
    assert value["command"] in result.out
    assert ("recipe", recipe.name, recipe.tp) == (value["kind"], value["name"], value["tp"])


def test_what_hotsplit_refuses_anyway_is_one_point(cli):
    result = cli("recipe", "show", "mimo-v2.6-pro")
    refused = [bad for bad in load("mimo-v2.6-pro").known_bad if bad.is_refused]
    assert len(refused) >= 10
    line = f"- refused by hotsplit: {', '.join(map(str, refused))} (docs/vllm.md, What is refused)"
    assert line in " ".join(result.out.split())
    assert not any(bad.why in " ".join(result.out.split()) for bad in refused)


def test_every_recipe_is_checked_and_right(cli):
    value = as_json(cli, "recipe", "check")
    assert (True, False, "0.32.0") == (value["is_right"], value["is_installed"], value["vllm"])
    assert list(names()) == list(value["recipes"])
    assert "nothing is wrong" in cli("recipe", "check", "glm-5.3").out


def test_a_recipe_with_a_fault_ends_with_1_and_names_it(cli, tmp_path):
    path = recipe_files.write_recipe(tmp_path, ("experts = 32", "experts = 64"))
    result = cli("recipe", "check", path)
    assert 1 == result.code
    assert "wrong experts: the recipe says 64, its config 32" in " ".join(result.out.split())
    assert not json.loads(cli("recipe", "check", path, "--json").out)["is_right"]


def test_a_malformed_recipe_is_one_line_with_file_and_key(cli, tmp_path):
    path = recipe_files.write_recipe(tmp_path, ("top_k = 4", "topk = 4"))
    for command in (("recipe", "show"), ("recipe", "check"), ("serve", "--recipe"), ("fit",)):
        assert f"recipe {path}, facts.top_k: got nothing; add top_k; is topk meant for it?" in cli(
            *command, path
        ).refusal(2)


def test_an_unknown_name_is_one_line_with_the_nearest(cli):
    assert "did you mean glm-5.3?" in cli("recipe", "show", "glm").refusal(2)


def test_serve_hands_on_what_the_recipe_says(cli, handed):
    result = cli("serve", "--recipe", "mimo-v2.6-pro", "--", "--port", "8000")
    assert 0 == result.code, result.err
    ((arguments, environ),) = handed
    recipe = load("mimo-v2.6-pro")
    assert ["serve", recipe.model] == arguments[4:6]
    assert ["--port", "8000"] == arguments[-2:]
    assert {"4"} == {arguments[arguments.index(flag) + 1] for flag in ("--tensor-parallel-size", "--max-num-seqs")}
    assert ("0", "4", str(recipe.counts.file)) == tuple(
        environ[name] for name in ("VLLM_USE_DEEP_GEMM", "HOTSPLIT_VRAM_RESERVE_GIB", "HOTSPLIT_COUNTS")
    )


def test_the_command_that_is_printed_is_the_one_that_runs(cli, handed):
    arguments = ("serve", "--recipe", "deepseek-v4.1-flash", "--", "--served-model-name", "a b")
    line = as_json(cli, *arguments[:3], "--check")["command"]
    assert "--engram-config '{\"cpu_offload\": true}'" in line
    printed = cli(*arguments).out
    (started, environ), *_ = handed
    (line,) = [line for line in printed.splitlines() if "vllm.entrypoints" in line]
    words = shlex.split(line)
    given = dict(word.split("=", 1) for word in words[: words.index(started[0])])
    assert started == words[len(given) :]
    assert given.items() <= environ.items()
    assert given["HOTSPLIT_VRAM_RESERVE_GIB"] == "4"


def test_the_table_says_where_each_value_comes_from(cli, handed):
    env = {"HOTSPLIT_DYN_STEPS": "50"}
    value = as_json(cli, "serve", "--recipe", "mimo-v2.6-pro", "--hot-gib", 40, "--check", env=env)
    origins = {name: one["origin"] for name, one in value["settings"].items()}
    assert ("option", "environment", "recipe", "recipe", "default") == tuple(
        origins[f"HOTSPLIT_{name}"] for name in ("HOT_GIB", "DYN_STEPS", "VRAM_RESERVE_GIB", "COUNTS", "OBJECTIVE")
    )
    assert "mimo-v2.6-pro" == value["recipe"]


def test_what_a_user_overrides_is_said(cli, handed):
    env = {"HOTSPLIT_VRAM_RESERVE_GIB": "6", "VLLM_USE_DEEP_GEMM": "1"}
    result = cli("serve", "--recipe", "mimo-v2.6-pro", "--counts", "", "--", "--max-model-len", "1000", env=env)
    assert 0 == result.code, result.err
    for text in (
        "your HOTSPLIT_VRAM_RESERVE_GIB (environment: 6.0) beats the recipe's 4",
        "your HOTSPLIT_COUNTS (option: nothing) beats the recipe's",
        "VLLM_USE_DEEP_GEMM=1 of the environment beats the recipe's 0",
        "your --max-model-len 1000 beats the recipe's --max-model-len 262144",
    ):
        assert text in result.err
    assert "HOTSPLIT_COUNTS" not in handed[0][1]


def test_a_known_bad_flag_is_loud_and_an_error_in_strict_mode(cli, handed):
    flags = ("--", "--load-format", "runai_streamer")
    loud = cli("serve", "--recipe", "mimo-v2.6-pro", *flags)
    assert 0 == loud.code
    assert "--load-format runai_streamer is known to be bad here: it loads this model's fused FP8" in loud.err
    assert 1 == len(handed)
    strict = cli("serve", "--recipe", "mimo-v2.6-pro", "--strict", 1, *flags)
    assert "is known to be bad here" in strict.refusal(2)
    assert 1 == len(handed)


def test_a_model_of_ones_own_takes_the_recipes_place_and_is_looked_into(cli, handed, tiny_moe, tmp_path):
    path = recipe_files.write_recipe(tmp_path)
    value = as_json(cli, "serve", tiny_moe, "--recipe", path, "--check")
    assert (str(tiny_moe), "tiny") == (value["model"], value["recipe"])
    assert "recipe-mismatch" not in names_of(value)
    assert value["plan"]["hit_rate"] == pytest.approx(recipe_plan(load(str(path)))[0].proof.hit_rate)


def test_another_model_than_the_recipes_is_a_doubt(cli, handed, tiny_moe):
    result = cli("serve", tiny_moe, "--recipe", "glm-5.3", "--check")
    assert "the model is not the one that recipe glm-5.3 is for: model_type is qwen3_moe, not glm_moe_dsa" in result.err
    assert "[recipe-mismatch]" in cli("serve", tiny_moe, "--recipe", "glm-5.3", "--strict", 1, "--check").refusal()


def test_serve_wants_a_model_or_a_recipe(cli, handed):
    result = cli("serve")
    assert 2 == result.code
    assert "a folder, a hub id, or --recipe NAME in its place" in result.err


@pytest.mark.parametrize("name", names())
def test_the_command_that_is_shown_starts_hotsplit_as_serve_would(cli, handed, name):
    line = as_json(cli, "recipe", "show", name)["command"]
    words = shlex.split(line)
    at = words.index("vllm")
    shown = dict(word.split("=", 1) for word in words[:at])
    cli("serve", "--recipe", name)
    ((arguments, environ),) = handed
    assert shown.items() <= environ.items()
    assert any(variable.startswith("HOTSPLIT_") for variable in shown)
    assert {variable for variable in environ if variable.startswith("HOTSPLIT_")} <= shown.keys()
    assert words[at + 1 :] == arguments[4:]


def test_a_recipe_without_settings_is_shown_with_what_turns_hotsplit_on(cli, tmp_path):
    path = recipe_files.write_recipe(
        tmp_path,
        ("vram_reserve_gib = 0.001\nhot_gib = 0.002", ""),
        ('file = "counts.json"\nsource = "made up"\nlicence = "none"', "steps = 'count'"),
    )
    assert "HOTSPLIT_ENABLE=1 vllm serve" in as_json(cli, "recipe", "show", path)["command"]


def test_another_hub_id_than_the_recipes_is_said(cli, handed):
    result = cli("serve", "me/other", "--recipe", "mimo-v2.6-pro")
    assert "your MODEL me/other beats the recipe's XiaomiMiMo/MiMo-V2.6-Pro-RL" in " ".join(result.err.split())
    assert "your MODEL" not in cli("serve", "XiaomiMiMo/MiMo-V2.6-Pro-RL", "--recipe", "mimo-v2.6-pro").err


def test_a_model_behind_the_dashes_is_refused(cli, handed):
    result = cli("serve", "--recipe", "mimo-v2.6-pro", "--", "me/other", "--port", "8000")
    assert 2 == result.code
    assert "me/other behind -- is no flag: MODEL stands before --" in " ".join(result.err.split())
    assert [] == handed


def test_without_vllm_serve_says_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert (
        "vLLM is not installed: in hotsplit's checkout run pip install"
        in cli("serve", "--recipe", "glm-5.3", "--check").refusal()
    )


def test_a_cache_of_another_type_is_not_the_one_that_the_recipe_chose(cli):
    value = as_json(cli, "fit", "glm-5.3", "--kv-dtype", "bfloat16")["kv"]
    assert {"latent": 78} == value["layers"]
    token_bytes = 78 * (512 + 64) * 2 + 21 * 128 * 2
    assert (token_bytes, 2 * 131072 * token_bytes) == (value["bytes_per_token"], value["bytes"]["most"])


@pytest.mark.parametrize("name", names())
def test_fit_knows_a_recipes_model_and_machine_offline(cli, name):
    value, recipe = as_json(cli, "fit", name), load(name)
    assert ("recipe", name, recipe.machine.gpus) == (value["source"], value["model"]["name"], value["gpus"])
    assert (recipe.kv.context, recipe.kv.concurrency) == (value["kv"]["context"], value["kv"]["concurrency"])
    assert value["fits"] is not False


def test_a_cache_that_a_recipe_chose_is_called_that_and_no_bytes_per_token_are_made_up(cli):
    value = as_json(cli, "fit", "deepseek-v4-pro")
    assert (None, 8 * 2**30) == (value["kv"]["bytes_per_token"], value["kv"]["bytes"]["most"])
    assert "KV cache: as the recipe chose" in " ".join(cli("fit", "deepseek-v4-pro").out.split())


def test_what_a_user_says_to_fit_beats_the_recipe(cli):
    value = as_json(cli, "fit", "mimo-v2.6-pro", "--gpus", 8, "--context", 1000, "--vram-gib", 40, "--ram-gib", "256,256",
                    "--numa", "0,0,0,0,1,1,1,1", "--vram-reserve-gib", 1)  # fmt: skip
    assert (8, 1000, 2**30) == (value["gpus"], value["kv"]["context"], value["reserve_bytes"])
    assert {"0", "1"} == set(value["best"]["host_bytes_per_node"])


def test_a_misspelt_recipe_is_told_from_a_model_that_is_not_there(cli):
    assert "did you mean mimo-v2.6-pro?" in cli("fit", "mimo-v26-pro").refusal(2)
    assert "no such folder or file" in cli("fit", "my-model", "--vram-gib", 9, "--ram-gib", 9).refusal()


def test_a_folder_of_a_recipes_name_is_a_folder(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glm-5.3").mkdir()
    assert "glm-5.3/config.json" in cli("fit", "glm-5.3", "--vram-gib", 9, "--ram-gib", 9).refusal()


def test_fit_of_a_folder_still_asks_for_the_machine(cli, tiny_moe):
    result = cli("fit", tiny_moe)
    assert 2 == result.code
    assert "Missing --vram-gib and --ram-gib" in result.err


def test_a_table_on_the_host_counts_against_it(cli):
    small = ("--vram-gib", 40, "--ram-gib", 300)  # 178 GiB of cold experts, and 189 of the table
    assert as_json(cli, "fit", "deepseek-v4.1-flash", *small)["fits"] is False


def test_the_plan_is_the_file_that_the_command_writes(cli, tiny_moe, tmp_path):
    recipe = load(str(recipe_files.write_recipe(tmp_path)))
    sizes = expert_sizes(read_headers(tiny_moe), tp=recipe.tp)
    plan, _ = recipe_plan(recipe, sizes=sizes)
    written = tmp_path / "plan.json"
    made = cli("plan", tiny_moe, "--hot-gib", 0.002, "--counts", recipe.counts.file, "-o", written)
    assert 0 == made.code, made.err
    assert written.read_bytes() == to_bytes(plan)
    by_facts, _ = recipe_plan(recipe)
    theirs = replace(plan, identity=replace(plan.identity, headers_hash=None))
    assert to_bytes(theirs) == to_bytes(by_facts)


def test_the_command_with_another_budget_writes_another_file(cli, tiny_moe, tmp_path):
    recipe = load(str(recipe_files.write_recipe(tmp_path)))
    plan, _ = recipe_plan(recipe, sizes=expert_sizes(read_headers(tiny_moe), tp=1))
    written = tmp_path / "plan.json"
    cli("plan", tiny_moe, "--hot-gib", 0.003, "--counts", recipe.counts.file, "-o", written)
    assert written.read_bytes() != to_bytes(plan)
