"""Writes a random checkpoint that is larger than this machine's memory, one tensor at a time, with traffic that drifts.

    python benchmarks/make_large_model.py --size large --model-dir /some/folder

It looks as save_pretrained writes a bf16 glm4_moe: a small dense part, many experts, per-expert names. A file is one
layer. A run that breaks off is taken up by the next one: files appear under their names only when they are whole.

The routing of random weights is uniform, and then no hot set is better than another. Two things are planted here:

- every layer's `e_score_correction_bias` is random: some experts are chosen more often by any traffic;
- two domains. Each is a direction of the hidden space, which the embeddings of its tokens carry (the lower half of the
  vocabulary is domain 0, the upper half domain 1), and every router row leans towards or away from each direction by a
  random amount. So each domain has favourites of its own in every layer, and traffic that changes its domain changes
  its experts. Layers add little to the residual stream, so that the directions reach the last layer.

How skewed routing becomes by that is for the benchmark to measure; the constants were chosen so that a quarter of a
layer's experts takes about 60 % of a domain's pairs. Shapes: E experts, D model dim, V token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from make_model import default_folder

_MARK = "made_by_benchmark.json"
_MARGIN_BYTES = 1 << 30
NUM_DOMAINS = 2
"""Halves of the vocabulary, each with favourite experts of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeShape:
    """A glm4_moe model in numbers."""

    num_layers: int
    """MoE layers; one dense layer stands before them."""
    num_experts: int
    """Routed experts per layer, E."""
    top_k: int
    """Experts per token."""
    hidden_dim: int
    """D."""
    expert_dim: int
    """Hidden dimension of one expert, and of the one that all tokens share."""
    dense_dim: int
    """Hidden dimension of the dense layer."""
    num_heads: int
    """Attention heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Of one head; half of it is rotated."""
    vocabulary: int
    """Token ids, V."""
    bias_spread: float = 0.02
    """Spread of e_score_correction_bias, in scores, which lie in [0, 1]."""
    domain_spread: float = 0.38
    """Spread of what a domain adds to an expert's logit; what a token adds of its own has spread 1."""
    domain_share: float = 0.05
    """Part of an embedding's square length that is its domain's direction."""
    layer_gain: float = 0.1
    """Length of what a layer adds to the residual stream, whose own length is 1 at first."""
    seed: int = 0
    """Of everything random."""


SIZES: Mapping[str, LargeShape] = {
    "large": LargeShape(
        num_layers=24,
        num_experts=128,
        top_k=4,
        hidden_dim=2048,
        expert_dim=768,
        dense_dim=4096,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        vocabulary=8192,
    ),
    "medium": LargeShape(
        num_layers=12,
        num_experts=64,
        top_k=4,
        hidden_dim=1024,
        expert_dim=512,
        dense_dim=2048,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        vocabulary=8192,
    ),
    "tiny": LargeShape(
        num_layers=3,
        num_experts=16,
        top_k=2,
        hidden_dim=128,
        expert_dim=64,
        dense_dim=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocabulary=512,
        domain_share=0.3,
    ),
}
"""29 GB, of whose experts a token touches 1 in 32 as in DeepSeek-V3; 2.6 GB, to be raced within a memory limit; and 3 MB to
try the benchmark itself."""


def make_large_model(shape: LargeShape, folder: Path) -> Path:
    """Write the checkpoint, or find it there from an earlier run, or finish what an earlier run began.

    Args:
        shape: Of the model.
        folder: Its own folder; while the model is unfinished it lies in one beside it, named .partial.

    Returns:
        The folder.

    Raises:
        SystemExit: A folder holds something else, or the disk is too full.
    """
    if _says(folder, shape):
        return folder
    if folder.exists():
        raise SystemExit(f"{folder}: holds something else; name another folder")
    place = folder.with_name(f"{folder.name}.partial")
    if place.exists() and not _says(place, shape):
        raise SystemExit(f"{place}: is another model's unfinished folder; remove it or name another folder")
    place.mkdir(parents=True, exist_ok=True)
    (place / _MARK).write_text(json.dumps(asdict(shape)), encoding="utf-8")
    shards = _shards(shape)
    missing = {name: shard for name, shard in shards.items() if not (place / name).exists()}
    _check_disk(place, wanted=sum(_total(shard) for shard in missing.values()))
    _write_missing(shape, place, missing=missing)
    where = {tensor: name for name, shard in shards.items() for tensor in shard}
    index = {"metadata": {"total_size": model_bytes(shape)}, "weight_map": dict(sorted(where.items()))}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    _write_config(shape, place)
    place.rename(folder)
    return folder


def model_bytes(shape: LargeShape) -> int:
    """Bytes of all weights.

    Args:
        shape: Of the model.
    """
    return sum(_total(shard) for shard in _shards(shape).values())


def domain_tokens(shape: LargeShape, *, domain: int, number: int, seed: int) -> list[int]:
    """Random token ids of one domain.

    Args:
        shape: Of the model.
        domain: 0 or 1.
        number: How many.
        seed: Of the choice.
    """
    half = shape.vocabulary // NUM_DOMAINS
    dice = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(domain * half, (domain + 1) * half, (number,), generator=dice).tolist()
    return ids


def _shards(shape: LargeShape) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes by file and tensor: what belongs to no layer, and one file per layer."""
    number = shape.num_layers + 2
    parts = [_outer(shape), *(_layer(shape, layer) for layer in range(shape.num_layers + 1))]
    return {f"model-{place:05d}-of-{number:05d}.safetensors": part for place, part in enumerate(parts, start=1)}


def _outer(shape: LargeShape) -> dict[str, tuple[int, ...]]:
    table = (shape.vocabulary, shape.hidden_dim)
    return {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (shape.hidden_dim,)}


def _layer(shape: LargeShape, layer: int) -> dict[str, tuple[int, ...]]:
    stem, dim = f"model.layers.{layer}.", shape.hidden_dim
    wide, narrow = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        f"{stem}input_layernorm.weight": (dim,),
        f"{stem}post_attention_layernorm.weight": (dim,),
        f"{stem}self_attn.q_proj.weight": (wide, dim),
        f"{stem}self_attn.k_proj.weight": (narrow, dim),
        f"{stem}self_attn.v_proj.weight": (narrow, dim),
        f"{stem}self_attn.o_proj.weight": (dim, wide),
    }
    if layer == 0:
        return tensors | _gated(f"{stem}mlp.", dim=dim, inner=shape.dense_dim)
    tensors |= {
        f"{stem}mlp.gate.weight": (shape.num_experts, dim),
        f"{stem}mlp.gate.e_score_correction_bias": (shape.num_experts,),
    }
    tensors |= _gated(f"{stem}mlp.shared_experts.", dim=dim, inner=shape.expert_dim)
    for expert in range(shape.num_experts):
        tensors |= _gated(f"{stem}mlp.experts.{expert}.", dim=dim, inner=shape.expert_dim)
    return tensors


def _gated(stem: str, *, dim: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{stem}gate_proj.weight": (inner, dim),
        f"{stem}up_proj.weight": (inner, dim),
        f"{stem}down_proj.weight": (dim, inner),
    }


def _check_disk(place: Path, *, wanted: int) -> None:
    free = shutil.disk_usage(place).free
    if free < wanted + _MARGIN_BYTES:
        raise SystemExit(
            f"{place}: {free / 1e9:.1f} GB free, wanted {(wanted + _MARGIN_BYTES) / 1e9:.1f} GB; "
            "free some or name another disk (--model-dir)"
        )


def _write_missing(shape: LargeShape, place: Path, *, missing: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Shard by shard, each first under a name that no one takes for whole."""
    total, done, start = sum(_total(shard) for shard in missing.values()), 0, time.perf_counter()
    for name, shard in missing.items():
        unfinished = place / f"{name}.unfinished"
        _write_shard(unfinished, shard=shard, shape=shape)
        unfinished.rename(place / name)
        done += _total(shard)
        left = (time.perf_counter() - start) / done * (total - done)
        print(
            f"model: {done / 1e9:.1f} of {total / 1e9:.1f} GB written, {left:.0f} s left", file=sys.stderr, flush=True
        )


def _write_shard(path: Path, *, shard: Mapping[str, tuple[int, ...]], shape: LargeShape) -> None:
    """One safetensors file: length of the header, header, tensors by name, as its own writer sorts them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in sorted(shard.items()):
        length = _num_bytes(name, size)
        kind = "F32" if _is_float32(name) else "BF16"
        header[name] = {"dtype": kind, "shape": size, "data_offsets": [offset, offset + length]}
        offset += length
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in _tensors(shard, shape=shape):
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _tensors(shard: Mapping[str, tuple[int, ...]], *, shape: LargeShape) -> Iterator[torch.Tensor]:
    """In the file's order; each depends on its name alone, so that a file can be written without those before it."""
    for name in sorted(shard):
        dice = torch.Generator().manual_seed(shape.seed * 1_000_003 + zlib.crc32(name.encode()))
        yield _tensor(name, size=shard[name], shape=shape, dice=dice)


def _tensor(name: str, *, size: tuple[int, ...], shape: LargeShape, dice: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(size, dtype=torch.bfloat16)
    if _is_float32(name):
        return torch.randn(size, generator=dice) * shape.bias_spread
    if name.endswith("mlp.gate.weight"):
        return _router(shape, dice=dice)
    if name == "model.embed_tokens.weight":
        return _embeddings(shape, dice=dice)
    gain = shape.layer_gain if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    weights = torch.empty(size, dtype=torch.bfloat16)
    return weights.normal_(0, gain / math.sqrt(size[-1]), generator=dice)


def _directions(shape: LargeShape) -> torch.Tensor:
    """One of length 1 per domain, at right angles, [2, D]."""
    dice = torch.Generator().manual_seed(shape.seed * 1_000_003 + 17)
    orthogonal: torch.Tensor = torch.linalg.qr(torch.randn(shape.hidden_dim, NUM_DOMAINS, generator=dice)).Q
    return orthogonal.T


def _embeddings(shape: LargeShape, *, dice: torch.Generator) -> torch.Tensor:
    """Noise and a domain's direction, of mean square 1 together, [V, D]."""
    noise_VD = torch.randn(shape.vocabulary, shape.hidden_dim, generator=dice) * math.sqrt(1 - shape.domain_share)
    domain_V = torch.arange(shape.vocabulary) // (shape.vocabulary // NUM_DOMAINS)
    length = math.sqrt(shape.domain_share * shape.hidden_dim)
    return (noise_VD + length * _directions(shape)[domain_V.clamp(max=NUM_DOMAINS - 1)]).to(torch.bfloat16)


def _router(shape: LargeShape, *, dice: torch.Generator) -> torch.Tensor:
    """Noise, and leanings towards the domains that give logits of spread domain_spread, [E, D]."""
    noise_ED = torch.randn(shape.num_experts, shape.hidden_dim, generator=dice) / math.sqrt(shape.hidden_dim)
    leaning_E2 = torch.randn(shape.num_experts, NUM_DOMAINS, generator=dice) * shape.domain_spread
    length = math.sqrt(shape.domain_share * shape.hidden_dim)
    return (noise_ED + leaning_E2 @ _directions(shape) / length).to(torch.bfloat16)


def _write_config(shape: LargeShape, folder: Path) -> None:
    """As transformers writes them."""
    from transformers import GenerationConfig, Glm4MoeConfig

    facts: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": shape.num_layers + 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "hidden_size": shape.hidden_dim,
        "intermediate_size": shape.dense_dim,
        "moe_intermediate_size": shape.expert_dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
    }
    Glm4MoeConfig(**facts).save_pretrained(folder)
    GenerationConfig(pad_token_id=0).save_pretrained(folder)


def _says(folder: Path, shape: LargeShape) -> bool:
    mark = folder / _MARK
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == asdict(shape)


def _is_float32(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def _num_bytes(name: str, size: tuple[int, ...]) -> int:
    return math.prod(size) * (4 if _is_float32(name) else 2)


def _total(shard: Mapping[str, tuple[int, ...]]) -> int:
    return sum(_num_bytes(name, size) for name, size in shard.items())


def main(arguments: Sequence[str]) -> int:
    """Write a model and say what it is."""
    parser = argparse.ArgumentParser(description="Write a random glm4_moe checkpoint larger than memory.")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--model-dir", type=Path, help="folder of the model (default: under the temporary folder)")
    options = parser.parse_args(arguments)
    shape = SIZES[options.size]
    try:
        folder = make_large_model(shape, options.model_dir or default_folder(options.size))
    except KeyboardInterrupt:
        print("interrupted: what is whole stays, and the next run goes on from there", file=sys.stderr)
        return 130
    print(f"{folder}: {model_bytes(shape) / 1e9:.2f} GB in {len(_shards(shape))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
