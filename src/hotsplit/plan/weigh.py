"""A model on the scales before it is loaded, or even downloaded: experts, dense weights, draft layers, KV cache.

The head of `fit`: `folder or config.json -> what one rank must hold`. Three sources, the best one there is:

    headers   config.json and safetensors: every tensor's bytes are known, and which of them ranks share is read off names
    index     config.json and model.safetensors.index.json: the sum is known, experts come from the config
    config    config.json alone: experts and KV cache come from it, dense weights are unknown

What is not known exactly is a range, and what has no upper end says so: nothing is guessed.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotsplit.errors import CheckpointError
from hotsplit.files import read_json
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import Checkpoint, read_headers
from hotsplit.plan.kv import KvCache, kv_cache
from hotsplit.plan.layouts import DRAFT, language_config, place
from hotsplit.plan.outline import expert_type, named_type, outline_sizes, require_plausible
from hotsplit.plan.shards import INDEX_NAME
from hotsplit.plan.sizes import ExpertSizes, expert_sizes, left_out

_CUT = re.compile(
    r"(?:^|\.)(?:[qvogbkz]_proj|qkv_proj|q_b_proj|kv_b_proj|[fg]_b_proj|w[qkvo]|gate_proj|up_proj|down_proj|gate_up_proj|"
    r"in_proj\w*|out_proj|w[123]|embed_tokens|lm_head|[qkv]?_?conv1d|sinks)(?:\.[^.]+)?$"
)
"""Modules that tensor parallelism cuts, by the end of the tensor's name."""
_WHOLE = re.compile(
    r"norm|(?:^|\.)(?:q_a_proj|kv_a_proj\w*|[fg]_a_proj|gate|router|shared_expert_gate)(?:\.[^.]+)*$|indexer|"
    r"e_score_correction_bias$|(?:^|\.)(?:A_log|dt_bias|D)$"
)
"""Modules that every rank keeps whole."""
_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bytes that are known between two ends."""

    least: int
    """They are no fewer."""
    most: int | None
    """They are no more; None where nobody knows."""

    @property
    def is_exact(self) -> bool:
        """Whether both ends are one."""
        return self.least == self.most

    def __add__(self, other: Range) -> Range:
        most = None if self.most is None or other.most is None else self.most + other.most
        return Range(least=self.least + other.least, most=most)


def exactly(nbytes: int) -> Range:
    """A range of one number.

    Args:
        nbytes: Bytes.
    """
    return Range(least=nbytes, most=nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """What one rank must hold of a model, whatever is hot."""

    source: str
    """headers, index or config."""
    sizes: ExpertSizes
    """Routed experts on the widest rank."""
    dense: Range
    """All else on one rank, without draft layers."""
    draft: Range
    """Draft (MTP) layers on one rank, experts included: they are never split, and loaded with speculation alone."""
    kv: KvCache
    """On one rank."""
    num_heads: int | None
    """Attention heads, which ranks share out."""
    notices: tuple[Notice, ...]
    """What is not exact, and why."""
    expert_type: str | None = None
    """How routed experts are stored, where they go another way than all weights."""


def weigh(model: Path, *, tp: int, kv_dtype: str | None = None) -> Weighed:
    """Weigh a model.

    Args:
        model: A folder with config.json and what else there is, or a config.json.
        tp: Tensor-parallel size, one rank per GPU.
        kv_dtype: Element type of the KV cache; None for the model's own.

    Raises:
        CheckpointError: No such folder or file; a dense model; a fact that is missing; weights that are damaged.
    """
    file, config = _config(model)
    folder = file.parent
    text = language_config(config)
    heads = text.get("num_attention_heads")
    index = _index(folder) if model.is_dir() else None
    if model.is_dir() and _has_weights(folder, index):
        sizes, dense, draft, notices = _by_headers(read_headers(folder), tp=tp)
        source = "headers"
    else:
        name = folder.resolve().name if model.is_dir() or model.stem == "config" else model.stem
        sizes = outline_sizes(config, tp=tp, name=name, what=f"model config {file}")
        whole = outline_sizes(config, tp=1, name=name, what=f"model config {file}")
        draft_layers = _draft_layers(text, index=index, num_layers=sizes.num_decoder_layers or 0)
        dense, draft, notices = _by_sum(sizes, whole=whole, index=index, draft_layers=draft_layers)
        source = "config" if index is None else "index"
    return Weighed(
        source=source,
        sizes=sizes,
        dense=dense,
        draft=draft,
        kv=kv_cache(config, tp=tp, kv_dtype=kv_dtype),
        num_heads=heads if type(heads) is int else None,
        notices=tuple(notices),
        expert_type=named_type(config) if source == "headers" else expert_type(config),
    )


def require_there(model: Path) -> None:
    """Refuse a model that is not here.

    Args:
        model: As in `weigh`.

    Raises:
        CheckpointError: No such folder or file.
    """
    if not model.exists():
        raise CheckpointError(
            f"model {model}",
            got="no such folder or file",
            wanted="a folder with config.json and safetensors files or their index, or a config.json",
            do="hub ids are not looked up: download at least config.json and the index",
        )


def _config(model: Path) -> tuple[Path, Mapping[str, Any]]:
    """The config's file and content."""
    require_there(model)
    file = model / "config.json" if model.is_dir() else model
    config = read_json(file, what="model config", error=CheckpointError, repeats=True)
    if not isinstance(config, dict):
        raise CheckpointError(f"model config {file}", got=type(config).__name__, wanted="a JSON object", file=file)
    require_plausible(config, what=f"model config {file}")
    return file, config


def _index(folder: Path) -> dict[str, Any] | None:
    """The index, if there is one that says which tensors there are."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    index = read_json(path, what="index", error=CheckpointError, repeats=True)
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"index {path}", got="no weight_map", wanted="tensor names with the shard of each")
    return index


def _has_weights(folder: Path, index: dict[str, Any] | None) -> bool:
    """Whether the headers can be read: every shard that is named, or any file where none is."""
    if (folder / "model.safetensors").is_file() or index is None:
        return any(folder.glob("*.safetensors"))
    return all((folder / str(shard)).is_file() for shard in set(index["weight_map"].values()))


def _by_headers(checkpoint: Checkpoint, *, tp: int) -> tuple[ExpertSizes, Range, Range, list[Notice]]:
    """Every tensor is known; of those with names that are not, whether ranks share them is not."""
    sizes = expert_sizes(checkpoint, tp=tp)
    whole = expert_sizes(checkpoint, tp=1)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    draft = total - whole.dense_bytes - whole.expert_bytes
    kv_heads = language_config(checkpoint.config).get("num_key_value_heads")
    least, most, named = 0, 0, 0
    for name, info in checkpoint.tensors.items():
        if _is_dense(name, num_layers=sizes.num_decoder_layers or 0):
            cut = _cut_bytes(name, nbytes=info.nbytes, tp=tp, kv_heads=kv_heads if type(kv_heads) is int else None)
            least, most, named = least + cut.least, most + (cut.most or 0), named + info.nbytes
    other = whole.dense_bytes - named  # of other stacks, or under an experts module without being an expert's
    least, most = least + -(-other // tp), most + other
    unsure = most - least
    notices = left_out(sizes)
    if unsure:
        text = f"up to {unsure} bytes of dense weights have names that do not tell whether ranks share them"
        notices.append(Notice(name="dense-unsure", text=text, strict=False))
    return sizes, Range(least=least, most=most), Range(least=-(-draft // tp), most=draft), notices


def _is_dense(name: str, *, num_layers: int) -> bool:
    """Whether a tensor's name says that it is no routed expert's, nor a draft layer's."""
    found = place(name)
    if DRAFT.search(name) or (found is not None and found.layer >= num_layers):
        return False
    return found is None or found.leaf is None


def _cut_bytes(name: str, *, nbytes: int, tp: int, kv_heads: int | None) -> Range:
    """A dense tensor's bytes on one rank."""
    if tp == 1 or (_WHOLE.search(name) and not _CUT.search(name)):
        return exactly(nbytes)
    if not _CUT.search(name):
        return Range(least=-(-nbytes // tp), most=nbytes)
    if kv_heads is not None and re.search(r"\.[kv]_proj\.[^.]+$", name):
        return exactly(-(-nbytes * max(1, -(-kv_heads // tp)) // kv_heads))
    return exactly(-(-nbytes // tp))


def _draft_layers(text: Mapping[str, Any], *, index: dict[str, Any] | None, num_layers: int) -> int:
    """How many draft layers with routed experts the tensors' names show, or the config says."""
    if index is None:
        return next((text[name] for name in _DRAFT_LAYERS if type(text.get(name)) is int), 0)
    found = [(name, place(name)) for name in index["weight_map"]]
    return len(
        {
            (where.stack, where.layer)
            for name, where in found
            if where is not None and where.leaf is not None and (DRAFT.search(name) or where.layer >= num_layers)
        }
    )


def _by_sum(
    sizes: ExpertSizes, *, whole: ExpertSizes, index: dict[str, Any] | None, draft_layers: int
) -> tuple[Range, Range, list[Notice]]:
    """Dense bytes are what the index's sum leaves; without a sum they are unknown."""
    each = int(whole.row_bytes[0]) * (whole.identity.num_experts or 0)
    cut = int(sizes.row_bytes[0]) * (sizes.identity.num_experts or 0)
    draft = Range(least=cut * draft_layers, most=None if draft_layers else 0)
    text = "there are no safetensors headers: expert bytes are computed from config.json's shapes and quantisation"
    notices = [Notice(name="bytes-from-config", text=text, strict=False)]
    metadata = index.get("metadata") if index is not None else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total) is not int:
        text = "dense bytes are unknown: what fits hot is an upper end, and what the host holds a lower one"
        return Range(least=0, most=None), draft, [*notices, Notice(name="dense-unknown", text=text, strict=False)]
    rest = total - whole.expert_bytes - each * draft_layers
    if rest < 0:
        raise CheckpointError(
            "the index's total_size",
            got=f"{total} bytes",
            wanted=f"at least the {whole.expert_bytes} bytes of experts that config.json describes",
            do="give the folder with safetensors headers",
        )
    if draft_layers:
        text = "dense bytes include those of draft layers, which an index does not tell apart"
        notices.append(Notice(name="draft-in-dense", text=text, strict=False))
    return Range(least=-(-rest // sizes.tp), most=rest), draft, notices


def with_dense(weighed: Weighed, nbytes: int) -> Weighed:
    """Take the user's word for the dense bytes on one rank.

    Args:
        weighed: A model.
        nbytes: Bytes on one rank.
    """
    notices = tuple(notice for notice in weighed.notices if not notice.name.startswith("dense-"))
    return replace(weighed, dense=exactly(nbytes), notices=notices)
