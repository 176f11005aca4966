"""Experts weighed by config.json alone: by hand, and against real headers."""

from __future__ import annotations

import pytest

from hotsplit.errors import CheckpointError
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.outline import expert_bytes, expert_tensors, outline_sizes
from hotsplit.plan.sizes import expert_sizes
from model_configs import DEEPSEEK_V3, DEEPSEEK_V4, GPT_OSS, KIMI_K2, MIMO_FLASH, MIXTRAL, QWEN3_30B

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
}
WEIGHTS = 3 * 768 * 2048
WEIGHTS_V4 = 3 * 4096 * 2048
"""Of an expert of DeepSeek-V4-Flash, and of MiMo-V2-Flash."""


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (QWEN3_30B, WEIGHTS * 2),
        (QWEN3_30B | {"quantization_config": FP8}, WEIGHTS + 3 * 6 * 16 * 4),
        (QWEN3_30B | {"quantization_config": {"quant_method": "fp8"}}, WEIGHTS + 3 * 4),
        # packed weights, float16 scales and 4-bit zero points per group of 128, and an index per input for gptq
        (QWEN3_30B | {"quantization_config": AWQ}, WEIGHTS // 2 + WEIGHTS // 128 * 2 + WEIGHTS // 256),
        (
            QWEN3_30B | {"quantization_config": GPTQ},
            WEIGHTS // 2 + WEIGHTS // 128 * 2 + WEIGHTS // 256 + (2048 + 2048 + 768) * 4,
        ),
        (QWEN3_30B | {"quantization_config": NVFP4}, WEIGHTS // 2 + WEIGHTS // 16 + 3 * 8),
        (QWEN3_30B | {"quantization_config": CHANNEL}, WEIGHTS + (768 + 768 + 2048) * 2),
        (DEEPSEEK_V3, 3 * 2048 * 7168 + 3 * 16 * 56 * 4),
        (KIMI_K2, 22_020_096 + 2_752_512 + 48),
        (GPT_OSS, 12_441_600 + 777_600 + 17_280),
        (MIXTRAL, 3 * 4096 * 14336 * 2),
    ],
)
def test_an_expert_weighs_what_it_does_by_hand(config, nbytes):
    assert nbytes == expert_bytes(expert_tensors(config, what="x"), tp=1)


V4 = DEEPSEEK_V4 | {"quantization_config": FP8}
MX = WEIGHTS_V4 * 17 // 32


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        # four bits and a byte per 32 weights, wherever the config says so
        (V4 | {"expert_dtype": "fp4"}, MX),
        (DEEPSEEK_V4 | {"quantization_config": FP8 | {"expert_dtype": "fp4"}}, MX),
        ({"model_type": "x", "text_config": V4 | {"expert_dtype": "fp4"}}, MX),
        (V4, MX),  # silent: vLLM takes four bits
        (V4 | {"expert_dtype": "fp8"}, WEIGHTS_V4 + WEIGHTS_V4 // 128 // 128 * 4),
        (V4 | {"quantization_config": FP8 | {"moe_quant_algo": "NVFP4"}}, WEIGHTS_V4 * 9 // 16 + 3 * 8),
        (MIMO_FLASH | {"quantization_config": FP8 | {"store_dtype": "mxfp4"}}, MX),
        (MIMO_FLASH | {"quantization_config": FP8}, WEIGHTS_V4 + WEIGHTS_V4 // 128 // 128 * 4),
    ],
)
def test_routed_experts_that_are_stored_in_their_own_way_weigh_so(config, nbytes):
    assert nbytes == expert_bytes(expert_tensors(config, what="x"), tp=1)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_cut_whole_blocks_of_four_bit_experts(tp):
    config = V4 | {"expert_dtype": "fp4"}
    up, down = -(-2048 // tp) * 4096, 4096 * 32 * -(-64 // tp)
    assert (2 * up + down) * 17 // 32 == expert_bytes(expert_tensors(config, what="x"), tp=tp)


def test_a_type_of_experts_that_is_not_known_is_refused_and_not_taken_for_the_other():
    with pytest.raises(CheckpointError, match="a variant of fp8 that is not known here"):
        expert_tensors(V4 | {"expert_dtype": "int3"}, what="x")


def test_the_config_of_the_bundled_model_gives_the_bytes_of_its_headers(tiny_moe):
    checkpoint = read_headers(tiny_moe)
    for tp in (1, 2, 3, 5):
        by_headers = expert_sizes(checkpoint, tp=tp)
        by_config = outline_sizes(checkpoint.config, tp=tp, name="x", what="x")
        assert by_headers.row_bytes.tolist() == by_config.row_bytes.tolist()
        assert by_headers.identity == by_config.identity


def test_ranks_cut_whole_blocks_of_a_quantised_expert():
    # 2048 of DeepSeek-V3's expert over 3 ranks: 683 rows, in 6 of 16 blocks
    wide = 683 * 7168
    assert 3 * wide + 3 * 6 * 56 * 4 == expert_bytes(expert_tensors(DEEPSEEK_V3, what="x"), tp=3)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "modelopt", "quant_algo": "W4A8"},
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        FP8 | {"modules_to_not_convert": ["model.layers.0.mlp.experts"]},
    ],
)
def test_a_quantisation_that_is_not_known_is_refused_and_not_guessed(method):
    with pytest.raises(CheckpointError, match="safetensors headers"):
        expert_tensors(QWEN3_30B | {"quantization_config": method}, what="model config x")


def test_shared_experts_that_are_not_quantised_change_nothing():
    spared = FP8 | {"modules_to_not_convert": ["re:.*shared_experts.*", "lm_head"]}
    plain = expert_tensors(QWEN3_30B | {"quantization_config": FP8}, what="x")
    assert plain == expert_tensors(QWEN3_30B | {"quantization_config": spared}, what="x")


@pytest.mark.parametrize(
    ("lacking", "match"),
    [
        ("num_experts", "no routed experts"),
        ("num_experts_per_tok", "no top_k"),
        ("hidden_size", "no dimension of its experts"),
        ("torch_dtype", "dtype None"),
        ("model_type", "no model_type"),
    ],
)
def test_a_fact_that_is_missing_is_named(lacking, match):
    config = {key: value for key, value in QWEN3_30B.items() if key != lacking}
    with pytest.raises(CheckpointError, match=match):
        outline_sizes(config, tp=1, name="x", what="model config x")
