"""Writes a random mixture-of-experts checkpoint with a skewed router, one tensor at a time.

    python benchmarks/make_model.py --size full --model-dir /some/folder

The checkpoint looks as save_pretrained writes a bf16 qwen3_moe: per-expert names, sorted, in several shards. It is never
held in memory: names and shapes give the headers, and each tensor is drawn, written and forgotten.

A random router chooses almost uniformly, and then no hot set is better than another. Here the rows of every gate have
different lengths, drawn from a log-normal distribution: the longer an expert's row, the wider its logit swings, and the
more often it is among the top k. Which expert has which length is drawn anew in every layer. That is a skew without
text, language or domains in it: what it says about speed and memory holds, what it says about hit rates of real
models does not.

Shapes: E experts, D model dim, T tokens, K top-k.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

_MARK = "made_by_benchmark.json"
_STEM = "model.layers.{layer}."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A qwen3_moe model in numbers."""

    num_layers: int
    """All of them MoE layers."""
    num_experts: int
    """Routed experts per layer, E."""
    top_k: int
    """Experts per token, K."""
    hidden_dim: int
    """D."""
    expert_dim: int
    """Hidden dimension of one expert."""
    num_heads: int
    """Attention heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Of one head."""
    vocabulary: int
    """Token ids."""
    shard_bytes: int
    """Most bytes of one file."""
    skew: float = 0.8
    """Spread of the gate rows' log lengths; 0 is a uniform router."""
    seed: int = 0
    """Of everything random."""


SIZES: Mapping[str, ModelShape] = {
    "full": ModelShape(
        num_layers=12,
        num_experts=64,
        top_k=8,
        hidden_dim=1024,
        expert_dim=512,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocabulary=8192,
        shard_bytes=640 << 20,
    ),
    "tiny": ModelShape(
        num_layers=3,
        num_experts=16,
        top_k=2,
        hidden_dim=128,
        expert_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocabulary=512,
        shard_bytes=1 << 20,
    ),
}
"""2.5 GB to measure with, and 3 MB to try the benchmark itself."""


def make_model(shape: ModelShape, folder: Path) -> Path:
    """Write the checkpoint, or find it there from an earlier run.

    Args:
        shape: Of the model.
        folder: Its own folder, which must not hold anything else.

    Returns:
        The folder.

    Raises:
        SystemExit: The folder holds something else, or the disk is too full.
    """
    if _is_made(shape, folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder}: holds something else; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shards = _shards(shape)
    needed = sum(_num_bytes(size) for shard in shards for size in shard.values())
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * needed:
        raise SystemExit(f"{folder}: {free / 1e9:.1f} GB free, wanted {2 * needed / 1e9:.1f} GB (an offload copy too)")
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        place = Path(unfinished) / "model"
        place.mkdir()
        _write(shape, place, shards=shards)
        if folder.exists():
            folder.rmdir()
        place.rename(folder)
    return folder


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by its name, in the order of the model.

    Args:
        shape: Of the model.
    """
    wide, narrow = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden_dim)}
    for layer in range(shape.num_layers):
        stem = _STEM.format(layer=layer)
        tensors |= {
            f"{stem}self_attn.q_proj.weight": (wide, shape.hidden_dim),
            f"{stem}self_attn.k_proj.weight": (narrow, shape.hidden_dim),
            f"{stem}self_attn.v_proj.weight": (narrow, shape.hidden_dim),
            f"{stem}self_attn.o_proj.weight": (shape.hidden_dim, wide),
            f"{stem}self_attn.q_norm.weight": (shape.head_dim,),
            f"{stem}self_attn.k_norm.weight": (shape.head_dim,),
            f"{stem}mlp.gate.weight": (shape.num_experts, shape.hidden_dim),
            f"{stem}input_layernorm.weight": (shape.hidden_dim,),
            f"{stem}post_attention_layernorm.weight": (shape.hidden_dim,),
        }
        for expert in range(shape.num_experts):
            tensors |= {
                f"{stem}mlp.experts.{expert}.gate_proj.weight": (shape.expert_dim, shape.hidden_dim),
                f"{stem}mlp.experts.{expert}.up_proj.weight": (shape.expert_dim, shape.hidden_dim),
                f"{stem}mlp.experts.{expert}.down_proj.weight": (shape.hidden_dim, shape.expert_dim),
            }
    return tensors | {"model.norm.weight": (shape.hidden_dim,)}


def expected_skew(shape: ModelShape, *, hot_share: float = 0.25, num_tokens: int = 4000) -> float:
    """Share of routed pairs that a layer's most used experts get, if hidden states point in all directions alike.

    Args:
        shape: Of the model.
        hot_share: Which part of the experts.
        num_tokens: Random hidden states to try.

    Returns:
        Mean over layers.
    """
    shares = []
    for layer in range(shape.num_layers):
        generator = torch.Generator().manual_seed(1 + layer)
        hidden_TD = torch.randn(num_tokens, shape.hidden_dim, generator=generator)
        ids_TK = (hidden_TD @ _gate(shape, layer=layer).float().T).topk(shape.top_k).indices
        counts_E = torch.bincount(ids_TK.flatten(), minlength=shape.num_experts).sort(descending=True).values
        shares.append(float(counts_E[: int(hot_share * shape.num_experts)].sum() / counts_E.sum()))
    return sum(shares) / len(shares)


def _is_made(shape: ModelShape, folder: Path) -> bool:
    mark = folder / _MARK
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == asdict(shape)


def _shards(shape: ModelShape) -> list[dict[str, tuple[int, ...]]]:
    """Tensors by file: model order, cut where a file is full, so that a layer or an expert may lie in two."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = shape.shard_bytes
    for name, size in tensor_shapes(shape).items():
        room -= _num_bytes(size)
        if room < 0 and shards[-1]:
            shards.append({})
            room = shape.shard_bytes - _num_bytes(size)
        shards[-1][name] = size
    return shards


def _write(shape: ModelShape, folder: Path, *, shards: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Shards, index, configuration, and last the mark that all is there."""
    generator = torch.Generator().manual_seed(shape.seed)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard=shard, shape=shape, generator=generator)
    total = sum(_num_bytes(size) for shard in shards for size in shard.values())
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    _write_config(shape, folder)
    (folder / _MARK).write_text(json.dumps(asdict(shape)), encoding="utf-8")


def _write_shard(
    path: Path, *, shard: Mapping[str, tuple[int, ...]], shape: ModelShape, generator: torch.Generator
) -> None:
    """One safetensors file: length of the header, header, tensors by name, as its own writer sorts them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in sorted(shard.items()):
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, offset + _num_bytes(size)]}
        offset += _num_bytes(size)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in (_tensor(name, size=shard[name], shape=shape, generator=generator) for name in sorted(shard)):
            _write_tensor(file, tensor)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _tensor(name: str, *, size: tuple[int, ...], shape: ModelShape, generator: torch.Generator) -> torch.Tensor:
    """Norms are ones, gates are skewed, all else keeps the variance of what goes through it."""
    if "norm" in name:
        return torch.ones(size, dtype=torch.bfloat16)
    if name.endswith("mlp.gate.weight"):
        return _gate(shape, layer=int(name.split(".")[2]))
    # Embeddings much smaller than a layer's output: no token then predicts itself for ever through the tied head.
    scale = 0.1 if "embed" in name else 1 / math.sqrt(size[-1])
    return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16)


def _gate(shape: ModelShape, *, layer: int) -> torch.Tensor:
    """A layer's router, [E, D], whose rows differ in length."""
    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + layer + 1)
    lengths_E = torch.exp(shape.skew * torch.randn(shape.num_experts, generator=generator))
    rows_ED = torch.randn(shape.num_experts, shape.hidden_dim, generator=generator) / math.sqrt(shape.hidden_dim)
    return (rows_ED * lengths_E[:, None]).to(torch.bfloat16)


def _write_config(shape: ModelShape, folder: Path) -> None:
    """As transformers writes them."""
    from transformers import GenerationConfig, Qwen3MoeConfig

    facts: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "hidden_size": shape.hidden_dim,
        "intermediate_size": 2 * shape.hidden_dim,
        "moe_intermediate_size": shape.expert_dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    Qwen3MoeConfig(**facts).save_pretrained(folder)
    GenerationConfig(pad_token_id=0).save_pretrained(folder)


def _num_bytes(size: tuple[int, ...]) -> int:
    return math.prod(size) * torch.bfloat16.itemsize


def default_folder(size: str) -> Path:
    """Where a model of a size is kept when nobody names a folder.

    Args:
        size: Name in SIZES.
    """
    return Path(tempfile.gettempdir()) / "hotsplit-benchmarks" / f"qwen3-moe-{size}"


def files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files.

    Args:
        folder: Of the model.
    """
    return sorted(folder.glob("*.safetensors"))


def main(arguments: Sequence[str]) -> int:
    """Write a model and say what it is."""
    parser = argparse.ArgumentParser(description="Write a random qwen3_moe checkpoint with a skewed router.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model-dir", type=Path, help="folder of the model (default: under the temporary folder)")
    options = parser.parse_args(arguments)
    shape = SIZES[options.size]
    folder = make_model(shape, options.model_dir or default_folder(options.size))
    total = sum(path.stat().st_size for path in files(folder))
    print(f"{folder}: {total / 1e9:.2f} GB in {len(files(folder))} files")
    print(f"router: for isotropic hidden states 25 % of the experts get {expected_skew(shape):.0%} of the pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
