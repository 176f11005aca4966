"""Tiny random checkpoints of many architectures, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 128
HIDDEN = 64

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v3": _MLA | _ROUTED | _GROUPS,
    "deepseek_v4": _MLA
    | _ROUTED
    | {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
        "n_shared_experts": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_hash_layers": 1,
    },
    "glm4_moe": _ROUTED | _GROUPS | {"head_dim": 16},
    "glm_moe_dsa": _MLA | _ROUTED | _GROUPS | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "mimo_v2_flash": _ROUTED
    | {
        "head_dim": 16,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 16,
        "moe_layer_freq": [0, 1],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "nemotron_h": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["attention", "moe"],
    },
}
"""Model type to what differs from the base."""


def make_checkpoint(folder: Path, *, model_type: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random checkpoint, saved as a user would get it."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **(_BASE | CONFIGS[model_type]))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "correction_bias" in name or name.endswith("tid2eid"):
            continue
        if parameter.is_floating_point():
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(folder)
    return folder
