"""Hand-made checkpoints for tests: right headers over zeros, sparse on disk, in any dtype and layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotsplit.plan.checkpoint import tensor_bytes

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""Name -> (dtype, shape)."""


def write_shard(path: Path, tensors: Tensors) -> Path:
    """Write one safetensors file; its data are a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + tensor_bytes(dtype, tuple(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return write_header(path, json.dumps(header).encode(), data_bytes=end)


def write_header(path: Path, header: bytes, *, data_bytes: int = 0, length: int | None = None) -> Path:
    """Write a file with any header, valid or not."""
    with path.open("wb") as file:
        file.write((len(header) if length is None else length).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_bytes)
    return path


def write_model(folder: Path, tensors: Tensors, *, config: Mapping[str, Any], num_shards: int = 1) -> Path:
    """Write a model folder: one model.safetensors, or shards (tensors dealt out in turn) with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        write_shard(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for number in range(num_shards):
        shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::num_shards])
        write_shard(folder / shard, part)
        weight_map.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
