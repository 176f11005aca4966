"""Tiny random checkpoints of many architectures, made on the spot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from hotsplit.bank.source import RowLayout, RowTensor, align

VOCABULARY = 128
HIDDEN = 64

# Three experts per token: two may be added in either order, and a wrong order would go unseen.

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
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
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
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 16},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
    "nemotron_h": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
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


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}


def make_checkpoint(
    folder: Path,
    *,
    model_type: str,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A random checkpoint, saved as a user would get it.

    Args:
        folder: Where to.
        model_type: A name of CONFIGS.
        seed: Of the weights.
        dtype: Of the weights.
        max_shard_size: Of a safetensors file.
        changes: What differs from the configuration in CONFIGS.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **(_BASE | CONFIGS[model_type] | dict(changes or {})))
    save(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype), folder, max_shard_size=max_shard_size)
    return folder


def make_vision_checkpoint(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A qwen3_vl_moe: its experts are stored fused and transposed, and its language model is not at the top."""
    torch.manual_seed(0)
    text = _BASE | CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 48}  # no matrix is square: shapes tell all
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    save(transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=dtype), folder)
    return folder


def save(model: Any, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Randomise every weight and save the model."""
    for name, parameter in model.named_parameters():
        if "correction_bias" in name or name.endswith("tid2eid"):
            continue
        if parameter.is_floating_point():
            # Experts loud enough that a wrong one changes the text, norms near one.
            is_norm = parameter.ndim == 1 and "norm" in name
            torch.nn.init.normal_(parameter.data, mean=float(is_norm), std=0.3 if "experts" in name else 0.1)
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)


def quantise(folder: Path, target: Path, *, block: int = 32, scale_dtype: torch.dtype = torch.float32) -> Path:
    """Turn a checkpoint into a block-FP8 one, as model makers publish them: e4m3 weights and a scale per block.

    Args:
        folder: One safetensors file, experts stored one by one.
        target: Where to.
        block: Rows and columns of a block.
        scale_dtype: Of the scales.
    """
    tensors, quantised = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        # Linear layers, shared and routed experts; no embeddings, norms, routers or output head.
        is_linear = name.endswith("_proj.weight") and tensor.ndim == 2 and not any(n % block for n in tensor.shape)
        if not is_linear:
            quantised[name] = tensor
            continue
        blocks = tensor.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max).to(scale_dtype)
        values = blocks / scale.float()[:, None, :, None]
        quantised[name] = values.reshape(tensor.shape).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(quantised, target / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        target,
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [block, block],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    )
    return target


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stock(folder: Path, **kwargs: Any) -> Any:
    """The stock model with the eager experts: what everything is compared with."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder, experts_implementation="eager", **kwargs).eval()


def prompts(*, batch: int = 3, length: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch of prompts of different lengths, padded on the left; no prompt holds a special token."""
    ids = torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def greedy(tokens: int) -> dict[str, Any]:
    """Arguments of generate() for exactly so many tokens, none of them the one that ended sequences are fed."""
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "suppress_tokens": [0]}


@torch.no_grad()
def play(model: Any, *, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of one prompt, logits of a padded batch, and the batch's greedy continuation."""
    batch = prompts()
    alone = model(batch["input_ids"][:1]).logits
    padded = model(**batch).logits
    generated = model.generate(**batch, **greedy(tokens))
    return alone, padded, generated


@contextmanager
def routers_watched(model: Any) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Decoder index and router logits of every call of a qwen3_moe's routers, read off their own outputs."""
    seen: list[tuple[int, torch.Tensor]] = []
    handles = []
    for index, layer in enumerate(model.model.layers):

        def watch(module: Any, args: Any, output: Any, index: int = index) -> None:
            seen.append((index, output[0]))

        handles.append(layer.mlp.gate.register_forward_hook(watch))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def layout_of(shapes, *, dtype=torch.bfloat16, phase=0):
    """A row of these tensors, each at the same place within a cache line."""
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(RowTensor(name=name, offset=offset + phase, dtype=dtype, shape=tuple(shape)))
        offset = align(offset + phase + tensors[-1].num_bytes)
    return RowLayout(tensors=tuple(tensors))
