from __future__ import annotations

import pytest

from hotsplit.plan.kinds import layer_kinds, moe_layers
from model_configs import DEEPSEEK_V3, DEEPSEEK_V4, GLM45, JAMBA, LFM2, MIMO_FLASH, MIXTRAL, QWEN3_30B


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["full"] * 4),
        ({"sliding_window": 128}, ["sliding"] * 4),
        ({"sliding_window": 128, "use_sliding_window": False}, ["full"] * 4),
        ({"sliding_window": 128, "max_window_layers": 3}, ["full"] * 3 + ["sliding"]),
        ({"sliding_window": 128, "sliding_window_pattern": 2}, ["sliding", "full"] * 2),
        ({"layer_types": ["chunked_attention", "full_attention"] * 2}, ["chunked", "full"] * 2),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, ["full"] * 4),
        ({"hybrid_override_pattern": "ME*-"}, ["state", "none", "full", "none"]),
        ({"hybrid_layer_pattern": [0, 1, 1, 0]}, ["full", "sliding", "sliding", "full"]),
        ({"attn_type_list": [0, 1, 0, 1]}, ["state", "full"] * 2),
        ({"linear_attn_config": {"kda_layers": [1, 3]}}, ["state", "full"] * 2),
        ({"layer_group_size": 2}, ["state", "full"] * 2),
        ({"linear_num_value_heads": 8}, ["state"] * 3 + ["full"]),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, ["state", "full", "state", "state"]),
        ({"layer_types": ["brand_new"] * 4}, ["brand_new"] * 4),
        ({"compress_ratios": [4]}, ["compress_ratios"] * 4),
        ({"compress_ratios": [0, 0, 4, 128], "sliding_window": 128}, ["compress_ratios"] * 4),
    ],
)
def test_a_schedule_is_read_whichever_way_it_is_spelled(fields, kinds):
    assert kinds == layer_kinds({"num_hidden_layers": 4, **fields})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (MIXTRAL, range(32)),
        (QWEN3_30B, range(48)),
        (QWEN3_30B | {"mlp_only_layers": [0, 5]}, [n for n in range(48) if n not in (0, 5)]),
        (QWEN3_30B | {"decoder_sparse_step": 2}, range(1, 48, 2)),
        (DEEPSEEK_V3, range(3, 61)),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, range(4, 61, 2)),
        (GLM45, range(3, 92)),
        (MIMO_FLASH, range(1, 48)),
        (JAMBA, range(1, 32, 2)),
        (LFM2, range(2, 24)),
        (DEEPSEEK_V4, range(43)),
        ({"num_hidden_layers": 6, "interleave_moe_layer_step": 2}, [1, 3, 5]),
        ({"num_hidden_layers": 6, "moe_layers_enum": "3,4,5"}, [3, 4, 5]),
        ({"num_hidden_layers": 6, "moe_layers": [1, 4]}, [1, 4]),
        ({"num_hidden_layers": 6, "hybrid_override_pattern": "MEM*ME"}, [1, 5]),
        ({"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4}, [1, 2, 3, 4]),
        ({"num_hidden_layers": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 5}, range(1, 6)),
    ],
)
def test_layers_with_experts_are_found_whichever_way_they_are_spelled(config, layers):
    assert tuple(layers) == moe_layers(config)
