from __future__ import annotations

import pytest

from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.layouts import model_facts
from hotsplit.plan.sizes import expert_sizes


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"num_local_experts": 8, "num_experts_per_token": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"moe_num_experts": 8, "moe_topk": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"moe_num_experts": 8, "moe_k": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"num_experts": 8, "top_k_experts": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"num_experts": 8, "experts_per_token": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"language_config": {"num_experts": 8}, "num_experts_per_tok": 2, "num_hidden_layers": 3}, (8, 2, 3)),
        ({"thinker_config": {"text_config": {"num_experts": 8, "num_hidden_layers": 3}}}, (8, None, 3)),
        ({"num_experts": 8, "layers_block_type": ["moe", "mamba", "moe"]}, (8, None, 3)),
        ({"num_experts": 8, "top_k": 50, "num_hidden_layers": 3}, (8, None, 3)),
        ({"num_experts": None, "top_k_experts": None, "num_hidden_layers": 3}, (None, None, 3)),
        ({"moe_num_experts": [8, 4], "moe_topk": [1, 2]}, (None, None, None)),
    ],
)
def test_numbers_are_found_under_the_names_in_use(config, wanted):
    facts = model_facts(config)
    assert wanted == (facts.num_experts, facts.top_k, facts.num_layers)


TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "expert_layer_period": 2,
              "expert_layer_offset": 1, "attn_layer_period": 3, "attn_layer_offset": 0},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": [2, 2, 2], "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12},
}  # fmt: skip


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_sizes_are_the_bytes_of_the_loaded_experts(tmp_path, model_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **TINY | ARCHITECTURES[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    sizes = expert_sizes(read_headers(tmp_path))
    experts = {int(name.split(".")[2]): module for name, module in model.named_modules() if name.endswith(".experts")}
    bytes_of = {
        layer: sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for layer, module in experts.items()
    }
    num_experts = sizes.identity.num_experts
    assert bytes_of == {
        layer: int(row) * num_experts for layer, row in zip(sizes.identity.layers, sizes.row_bytes, strict=True)
    }
    assert (model_type, 2) == (sizes.identity.model_type, sizes.identity.top_k)
