"""KV bytes of every kind of layer, computed by hand from real configs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.plan.kv import kv_cache
from model_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GPT_OSS,
    GRANITE_H,
    JAMBA,
    KIMI_K2,
    KIMI_LINEAR,
    LFM2,
    MIMO_FLASH,
    MINIMAX_01,
    MIXTRAL,
    OLMOE,
    QWEN3_30B,
    QWEN3_NEXT,
    QWEN35,
)

KNOWN = {
    # layers x (keys + values) x KV heads x head dimension x bytes
    "qwen3-30b": (QWEN3_30B, {"full": 48}, 48 * 2 * 4 * 128 * 2, 0, 0),
    "mixtral": (MIXTRAL, {"full": 32}, 32 * 2 * 8 * 128 * 2, 0, 0),
    "olmoe": (OLMOE, {"full": 16}, 16 * 2 * 16 * 128 * 2, 0, 0),
    "glm-4.5": (GLM45, {"full": 92}, 376_832, 0, 0),
    # layers x (latent + rotary) x bytes
    "deepseek-v3": (DEEPSEEK_V3, {"latent": 61}, 70_272, 0, 0),
    "kimi-k2": (KIMI_K2, {"latent": 61}, 70_272, 0, 0),
    # and index keys of 128
    "deepseek-v3.2": (DEEPSEEK_V32, {"latent": 61}, 61 * (512 + 64 + 128) * 2, 0, 0),
    # half of the layers keep 128 tokens
    "gpt-oss": (GPT_OSS, {"sliding": 18, "full": 18}, 36_864, 18 * 2048 * 128, 0),
    # sliding layers have heads of their own; values are narrower than keys
    "mimo-flash": (MIMO_FLASH, {"full": 9, "sliding": 39}, 9 * 4 * (192 + 128) * 2, 39 * 8 * 320 * 2 * 128, 0),
    # 8192 x 3 convolution inputs of 2 bytes, and 32 states of 128 x 128 x 4 bytes
    "qwen3-next": (QWEN3_NEXT, {"state": 36, "full": 12}, 24_576, 0, 36 * (49_152 + 2_097_152)),
    "qwen3.5": (QWEN35, {"state": 30, "full": 10}, 20_480, 0, 30 * (49_152 + 2_097_152)),
    "kimi-linear": (KIMI_LINEAR, {"state": 20, "latent": 7}, 7 * 576 * 2, 0, 20 * (73_728 + 2_097_152)),
    "jamba": (JAMBA, {"state": 28, "full": 4}, 16_384, 0, 28 * (8192 * 3 * 2 + 8192 * 16 * 4)),
    "granite-h": (GRANITE_H, {"state": 36, "full": 4}, 8_192, 0, 36 * (3328 * 3 * 2 + 48 * 64 * 128 * 4)),
    "minimax-01": (MINIMAX_01, {"state": 70, "full": 10}, 40_960, 0, 70 * 64 * 128 * 128 * 4),
    "lfm2": (LFM2, {"state": 18, "full": 6}, 6 * 2 * 8 * 64 * 2, 0, 18 * 2048 * 2 * 2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_cache_of_a_real_architecture_weighs_what_it_does_by_hand(name):
    config, kinds, token_bytes, window_bytes, state_bytes = KNOWN[name]
    cache = kv_cache(config, tp=1)
    assert ((), kinds) == (cache.unknown, cache.kinds)
    assert (token_bytes, window_bytes, state_bytes) == (
        cache.token_bytes,
        cache.window_bytes(4096),
        cache.state_bytes,
    )


@pytest.mark.parametrize(("tp", "token_bytes"), [(1, 98_304), (2, 49_152), (4, 24_576), (8, 24_576), (3, 49_152)])
def test_ranks_share_kv_heads_out_until_each_has_one_and_then_copy_them(tp, token_bytes):
    assert token_bytes == kv_cache(QWEN3_30B, tp=tp).token_bytes


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_a_latent_cache_is_whole_on_every_rank(tp):
    assert 70_272 == kv_cache(DEEPSEEK_V3, tp=tp).token_bytes


def test_states_are_shared_out_over_ranks():
    cache = kv_cache(QWEN3_NEXT, tp=4)
    assert (12_288, 36 * (12_288 + 524_288)) == (cache.token_bytes, cache.state_bytes)


def test_groups_of_a_state_space_layer_are_copied_where_ranks_are_more():
    # (3072 + 2 x 4 x 128) / 4 inputs of the convolution, a quarter of the heads
    assert 36 * (1024 * 3 * 2 + 12 * 64 * 128 * 4) == kv_cache(GRANITE_H, tp=4).state_bytes


def test_one_byte_per_element_halves_a_cache_and_leaves_states_alone():
    half, whole = kv_cache(QWEN3_NEXT, tp=1, kv_dtype="fp8"), kv_cache(QWEN3_NEXT, tp=1)
    assert (12_288, whole.state_bytes) == (half.token_bytes, half.state_bytes)


def test_sparse_latent_layers_of_one_byte_have_scales_and_a_rotary_part_of_two():
    assert 61 * (512 + 4 * 4 + 2 * 64 + 128 + 4) == kv_cache(DEEPSEEK_V32, tp=1, kv_dtype="fp8").token_bytes


def test_layers_that_share_an_index_keep_no_keys_of_their_own():
    shared = DEEPSEEK_V32 | {"indexer_types": ["full"] + ["shared"] * 60}
    assert 61 * 576 * 2 + 128 * 2 == kv_cache(shared, tp=1).token_bytes


@pytest.mark.parametrize(
    "fields", [{"swa_num_key_value_heads": 2}, {"attention_other_setting": {"num_attention_groups": 2}}]
)
def test_sliding_layers_may_have_kv_heads_of_their_own(fields):
    cache = kv_cache({**GPT_OSS, **fields}, tp=1)
    assert (36_864, 18 * 512 * 128) == (cache.token_bytes, cache.window_bytes(4096))


@pytest.mark.parametrize(
    "spelled", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}]
)
def test_the_type_is_read_under_both_of_its_names(spelled):
    config = {key: value for key, value in QWEN3_30B.items() if key != "torch_dtype"}
    assert 98_304 == kv_cache({**config, **spelled}, tp=1).token_bytes


def test_a_short_context_fills_no_window():
    assert 18 * 2048 * 100 == kv_cache(GPT_OSS, tp=1).window_bytes(100)


def test_a_sequence_keeps_tokens_windows_and_states():
    cache = kv_cache(GPT_OSS, tp=1)
    assert 36_864 * 1000 + 18 * 2048 * 128 == cache.sequence_bytes(1000)


def test_the_type_of_a_state_is_the_config_s_where_it_says_one():
    halved = QWEN3_NEXT | {"mamba_ssm_dtype": "bfloat16"}
    assert 36 * (49_152 + 1_048_576) == kv_cache(halved, tp=1).state_bytes


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DEEPSEEK_V4, "heavily_compressed_attention"),
        # as its checkpoint spells it: the window is one of several things that a layer keeps
        (
            {k: v for k, v in DEEPSEEK_V4.items() if k != "layer_types"} | {"compress_ratios": [0, 4] * 22},
            "layers with compress_ratios in config.json keep",
        ),
        ({**QWEN3_30B, "torch_dtype": "int4"}, "name one with --kv-dtype"),
        ({key: value for key, value in GPT_OSS.items() if key != "sliding_window"}, "lacks sliding_window"),
        ({**JAMBA, "attn_layer_period": None}, "mamba_d_state"),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 3}, "another length"),
        ({**MIXTRAL, "layer_types": ["linear_attention"] * 32}, "the shape of their state"),
        ({k: v for k, v in MIMO_FLASH.items() if k != "swa_num_key_value_heads"}, "lacks swa_num_key_value_heads"),
        ({**GPT_OSS, "num_kv_shared_layers": 10}, "num_kv_shared_layers changes what layers keep"),
        ({**DEEPSEEK_V3, "zero_expert_num": 256}, "zero_expert_num"),
        ({"model_type": "x", "torch_dtype": "bfloat16"}, "unknown number of layers"),
    ],
)
def test_what_the_fields_do_not_tell_is_unknown_and_says_why(config, reason):
    assert reason in " ".join(kv_cache(config, tp=1).unknown)


def test_a_type_of_ones_own_stands_in_for_one_that_is_not_known():
    assert () == kv_cache({**QWEN3_30B, "torch_dtype": None}, tp=1, kv_dtype="bfloat16").unknown


@given(st.sampled_from(sorted(KNOWN)), st.integers(1, 64), st.integers(1, 64))
def test_more_ranks_never_hold_more_each(name, fewer, more):
    fewer, more = sorted((fewer, more))
    small, large = (kv_cache(KNOWN[name][0], tp=tp) for tp in (more, fewer))
    assert small.token_bytes <= large.token_bytes
    assert small.window_bytes(10**6) <= large.window_bytes(10**6)
