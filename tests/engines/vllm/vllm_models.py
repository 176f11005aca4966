"""The models that vLLM serves in these tests: tiny random checkpoints made on the spot, and two trained ones.

vLLM's CPU build sets the shapes. Its expert kernel wants hidden and expert dimensions that 32 divides, also after they
are cut in two by tensor parallelism; its latent attention knows one head size, 512 + 64; and a DeepSeek configuration
must name `noaux_tc` itself, which transformers does not write.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hotsplit.data import DOMAINS, text_path, tiny_moe_path
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.sizes import expert_sizes

REPOSITORY = Path(__file__).parents[3]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
VOCABULARY = 512

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 64}
_SHARED: dict[str, Any] = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": _BASE | _ROUTED | {"head_dim": 32, "num_experts": 16, "norm_topk_prob": True},
    "glm4_moe": _BASE | _ROUTED | _SHARED | {"head_dim": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "deepseek_v3": _BASE
    | _ROUTED
    | _SHARED
    | {
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
    "mixtral": _BASE | {"head_dim": 32, "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 64},
    "gpt_oss": _BASE
    | {
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""What makes each architecture tiny: all but the first dense layers of GLM and DeepSeek have 16 experts."""


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write a random bf16 checkpoint with a tokenizer.

    Args:
        name: A model_type of CONFIGS, or "small-moe", "tiny-moe" or "large" for the models that need no making here.
        folder: Where it goes.
    """
    if name in _OTHERS:
        return _OTHERS[name]()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    config.dtype = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    _draw(model)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def hot_gib(folder: Path, *, share: float, ranks: int = 1) -> str:
    """HOTSPLIT_HOT_GIB for a part of the experts: their rows, a spare row per layer, and what page edges waste.

    Args:
        folder: The checkpoint.
        share: Part of each layer's experts.
        ranks: Tensor-parallel ranks that a row is cut for.
    """
    sizes = expert_sizes(read_headers(folder))
    rows = int(share * (sizes.identity.num_experts or 0)) + 1
    page_edges = 2 * 4096
    return repr(sum(int(row_bytes) // ranks * rows + page_edges for row_bytes in sizes.row_bytes) / 2**30)


def rows_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of all routed experts, and of all other tensors.

    Args:
        folder: The checkpoint.
    """
    headers = read_headers(folder)
    sizes = expert_sizes(headers)
    experts = int(sizes.row_bytes.sum()) * (sizes.identity.num_experts or 0)
    return experts, sum(path.stat().st_size for path in folder.glob("*.safetensors")) - experts


def corpus(domain: str) -> str:
    """Held-out text of one domain of small-moe's training, without the lines that name sources.

    Args:
        domain: "python", "english", "chinese", ...
    """
    path = SHARED_DATA / "corpus" / f"{domain}.heldout.txt"
    if not path.is_file():
        pytest.skip("the folder shared/data/corpus is not beside this repository")
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("### "))


def text_prompts(folder: Path, *, number: int = 8) -> list[list[int]]:
    """Prompts of mixed lengths from the texts that ship, as a trained model's own tokenizer cuts them.

    Args:
        folder: The checkpoint.
        number: Of prompts.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [text_path(domain).read_text(encoding="utf-8") for domain in DOMAINS]
    pieces = [texts[i % len(texts)][500 * i :][: 40 + 30 * i] for i in range(number)]
    return [tokenizer(piece)["input_ids"] for piece in pieces]


def _small_moe() -> Path:
    folder = SHARED_DATA / "models" / "small-moe"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the model shared/data/models/small-moe is not beside this repository")
    return folder


def _large() -> Path:
    """A random model of 2.5 GB, written once, shard by shard, by the benchmark that needs the same one."""
    script = REPOSITORY / "benchmarks" / "make_model.py"
    folder = Path(tempfile.gettempdir()) / "hotsplit-benchmarks" / "qwen3-moe-full"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 - handed on, not read
    subprocess.run([sys.executable, script, "--model-dir", folder], check=True, capture_output=True, env=environment)
    return folder


_OTHERS = {"small-moe": _small_moe, "tiny-moe": tiny_moe_path, "large": _large}


def _draw(model: torch.nn.Module) -> None:
    """Weights whose outputs differ from token to token: transformers' own are so small that the first argmax stays."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "embed" in name else 0.08)
            elif "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.02)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.zero_()


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level one of 512 entries, learned from a text that ships."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([text_path("english").read_text(encoding="utf-8")], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def config_of(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Args:
        folder: The checkpoint.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
