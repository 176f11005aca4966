"""`recipe check`: what is held against what, and what a fault looks like."""

from __future__ import annotations

import pytest

from hotsplit.recipes import load, names
from hotsplit.recipes.checks import check_recipe
from hotsplit.recipes.flags import shipped_flags


def checked(recipe):
    return check_recipe(recipe, vllm=shipped_flags(), whose="vLLM 0.32.0")


def wrong(found):
    return {check.name: check.text for check in found.checks if check.verdict == "wrong"}


@pytest.mark.parametrize("name", names())
def test_nothing_is_wrong_with_a_recipe_that_ships(name):
    found = checked(load(name))
    assert {} == wrong(found)
    assert found.is_right
    assert {"ranks", "fits", "flags", "histogram", "facts-experts", "context", "rows", "tp-divides"} <= {
        check.name for check in found.checks
    }


FAULTS = {
    "facts-experts": (("experts = 32", "experts = 64"), "the recipe says 64, its config 32"),
    "facts-layers": (("layers = 4\nmoe", "layers = 5\nmoe"), "the recipe says 5, its config 4"),
    "facts-moe_layers": (("moe_layers = 4", "moe_layers = 3"), "the recipe says 3, its config 4"),
    "facts-top_k": (("top_k = 4", "top_k = 2"), "the recipe says 2, its config 4"),
    "ranks": (("gpus = 1", "gpus = 2"), "1 tensor-parallel x 1 pipeline-parallel ranks on 2 GPUs"),
    "context": (("context = 256", "context = 1000000"), "context 1,000,000 of at most"),
    "fits": (("vram_gib = 0.02", "vram_gib = 0.001"), "does not fit"),
    "flag": (('"--moe-backend"', '"--moe-backened"'), "no such flag; did you mean --moe-backend?"),
    "known-bad": (
        ('flag = "--moe-backend"\nvalue = "triton"', 'flag = "--enable-eplb"'),
        "among the recipe's own flags",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(write_recipe, name):
    change, said = FAULTS[name]
    found = checked(load(str(write_recipe(change))))
    assert not found.is_right
    assert said in wrong(found)[name]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ('"--moe-backend"\nvalue = "tritn"', "tritn is none of"),
        ('"--enable-eplb"\nvalue = "yes"', "a switch, got yes"),
        ('"--port"', "takes a value, got none"),
        ('"--port"\nvalue = [1, 2]', "takes one value, got 2"),
        ('"--no-enable-prefix-caching"', "not its long spelling, --enable-prefix-caching"),
    ],
)
def test_a_flag_that_vllm_would_not_take_is_found(write_recipe, flag, said):
    found = checked(load(str(write_recipe(('"--moe-backend"\nvalue = "triton"', flag)))))
    assert said in wrong(found)["flag"]


def test_ranks_that_do_not_divide_are_found(write_recipe):
    path = write_recipe(("[kv]", "[parallel]\ntp = 3\n\n[kv]"), ("gpus = 1", "gpus = 3"))
    assert "over 3 ranks: not each" in wrong(checked(load(str(path))))["tp-divides"]


def test_counts_of_another_model_are_found(write_recipe):
    found = checked(load(str(write_recipe(config={"num_experts": 31}))))
    assert "num_experts is 32, not 31" in wrong(found)["plan"]


def test_facts_that_are_no_model_stop_the_rest_with_the_reason(write_recipe):
    found = checked(load(str(write_recipe(config={"num_hidden_layers": None}))))
    assert (None, None) == (found.fit, found.plan)
    assert "num_layers" in wrong(found)["facts"]


STRANGE = [
    {"quantization_config": {"quant_method": "fp8", "ignore": 3}},
    {"mlp_only_layers": 5},
    {"mlp_layer_types": [{}]},
    {"moe_layers_enum": [[1]]},
    {"layer_types": [None] * 4},
    {"linear_attn_config": {"kda_layers": [1, 2], "num_heads": "a"}},
    {"max_position_embeddings": "a"},
    {"num_key_value_heads": -3, "head_dim": "z"},
]


@pytest.mark.parametrize("fields", STRANGE, ids=str)
def test_a_config_with_strange_fields_is_checked_and_no_crash(write_recipe, fields):
    found = checked(load(str(write_recipe(config=fields))))
    assert found.checks
