"""Writes a checkpoint of make_model.py or make_large_model.py as one GGUF file of the same weights, for llama.cpp.

    python benchmarks/make_gguf.py MODEL_FOLDER MODEL.gguf

Runs in a Python that has numpy and gguf, without torch. bf16 stays bf16, bit for bit; norms, routers and biases become
float32, as llama.cpp wants them. There is no vocabulary: token ids are fed as numbers. The experts of a layer become one
tensor each of gate, up and down, which is llama.cpp's layout. Nothing is held in memory: files are mapped and copied.

Names and keys: gguf-py's constants (MIT), for the architectures qwen3moe and glm4moe.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MARGIN_BYTES = 1 << 28
_PARTS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{ours}.weight": f"{theirs}.weight" for ours, theirs in _PARTS.items()},
    **{f"mlp.shared_experts.{ours}.weight": f"{theirs}_shexp.weight" for ours, theirs in _PARTS.items()},
}
_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "qwen3_moe": ("qwen3moe", "ffn_norm.weight"),
    "glm4_moe": ("glm4moe", "post_attention_norm.weight"),
}
"""By model_type: llama.cpp's name, and what it calls the norm before the experts."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the GGUF file."""

    name: str
    """As llama.cpp calls it."""
    sources: tuple[str, ...]
    """Tensors of the checkpoint: one, or that of every expert in order, which become one."""


Array = npt.NDArray[Any]


def make_gguf(folder: Path, target: Path) -> Path:
    """Write the file, or find it there from an earlier run.

    Args:
        folder: The checkpoint.
        target: The GGUF file; it appears only when it is whole.

    Returns:
        The file.

    Raises:
        SystemExit: The model is of another type, or the disk is too full.
    """
    if target.exists():
        return target
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in _ARCHITECTURES:
        raise SystemExit(f"{folder}: model_type {config['model_type']}, wanted one of {', '.join(_ARCHITECTURES)}")
    arrays = _arrays(folder)
    total = sum(array.nbytes for array in arrays.values())
    free = shutil.disk_usage(target.parent).free
    if free < total + _MARGIN_BYTES:
        raise SystemExit(
            f"{target}: {free / 1e9:.1f} GB free, wanted {(total + _MARGIN_BYTES) / 1e9:.1f} GB; free some"
        )
    unfinished = target.with_name(f"{target.name}.partial")
    try:
        _write(unfinished, arrays=arrays, config=config, total=total)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """What the GGUF file has, in the order of the layers; names that the checkpoint lacks included.

    Args:
        config: The checkpoint's config.json.
    """
    norm = _ARCHITECTURES[config["model_type"]][1]
    names = [Tensor(theirs, (ours,)) for ours, theirs in _OUTER.items()]
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        pairs = {**_LAYER, "post_attention_layernorm.weight": norm}
        names += [Tensor(theirs + new, (ours + old,)) for old, new in pairs.items()]
        for old, new in _PARTS.items():
            experts = range(_num_experts(config))
            names.append(
                Tensor(f"{theirs}{new}_exps.weight", tuple(f"{ours}mlp.experts.{e}.{old}.weight" for e in experts))
            )
    return names


def _write(path: Path, *, arrays: Mapping[str, Array], config: Mapping[str, Any], total: int) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    wanted = [tensor for tensor in tensors(config) if tensor.sources[0] in arrays]
    homeless = arrays.keys() - {source for tensor in wanted for source in tensor.sources}
    if homeless:
        raise SystemExit(f"{path}: no place in a GGUF file for {len(homeless)} tensors, {min(homeless)} for one")
    writer = GGUFWriter(path, _ARCHITECTURES[config["model_type"]][0])
    _add_facts(writer, config=config)
    for tensor in wanted:
        first = arrays[tensor.sources[0]]
        shape = first.shape if len(tensor.sources) == 1 else (len(tensor.sources), *first.shape)
        kind = GGMLQuantizationType.F32 if _is_float32(tensor.name) else GGMLQuantizationType.BF16
        length = int(np.prod(shape)) * (4 if _is_float32(tensor.name) else 2)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint16), length, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    say = _progress(total)
    for tensor in wanted:
        writer.write_tensor_data(_joined(tensor, arrays=arrays))
        say(sum(arrays[source].nbytes for source in tensor.sources))
    writer.close()


def _joined(tensor: Tensor, *, arrays: Mapping[str, Array]) -> Array:
    """At most one tensor of one layer's experts is held: 400 MB for the largest model here."""
    parts = [arrays[source] for source in tensor.sources]
    whole: Array = parts[0] if len(parts) == 1 else np.stack(parts)
    if not _is_float32(tensor.name) or whole.dtype == np.float32:
        return whole
    return (whole.astype(np.uint32) << 16).view(np.float32)


def _is_float32(name: str) -> bool:
    return name.endswith(("norm.weight", "ffn_gate_inp.weight", ".bias"))


def _add_facts(writer: Any, *, config: Mapping[str, Any]) -> None:
    """Everything that llama.cpp asks of a model, and no vocabulary."""
    rope = config.get("rope_parameters") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
    writer.add_expert_count(_num_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if config["model_type"] == "glm4_moe":
        from gguf import ExpertGatingFuncType

        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(
        next(config[name] for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in config)
    )


def _arrays(folder: Path) -> dict[str, Array]:
    """Every tensor of the checkpoint, mapped: bf16 as uint16."""
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in _mapped(path)}


def _mapped(path: Path) -> Iterator[tuple[str, Array]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, facts in header.items():
        if name != "__metadata__":
            kind = np.dtype(np.float32 if facts["dtype"] == "F32" else np.uint16)
            start = 8 + length + facts["data_offsets"][0]
            yield name, np.memmap(path, dtype=kind, mode="r", offset=start, shape=tuple(facts["shape"]))


def _progress(total: int) -> Callable[[int], None]:
    """A function that is told bytes and says every five seconds how far it is."""
    start = time.perf_counter()
    done, said = 0, start

    def say(num_bytes: int) -> None:
        nonlocal done, said
        done += num_bytes
        now = time.perf_counter()
        if now - said > 5 or done == total:
            said, left = now, (now - start) / done * (total - done)
            print(
                f"gguf: {done / 1e9:.1f} of {total / 1e9:.1f} GB written, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    return say


def main(arguments: list[str]) -> int:
    """Write one file."""
    folder, target = map(Path, arguments)
    try:
        print(make_gguf(folder, target))
    except KeyboardInterrupt:
        print("interrupted: nothing half-written stays", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
