"""Which files of a model folder hold its weights.

First step of the flow, under `checkpoint`. The order is that of transformers, so that the expert rows that we read and
the dense weights that it loads come from the same files:

    config.json's transformers_weights; else model.safetensors; else model.safetensors.index.json and its shards

A folder of loose *.safetensors files with neither can be planned for, and cannot be loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.errors import CheckpointError
from hotsplit.files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_SHARD = re.compile(r"-\d+-of-(?P<total>\d+)\.safetensors$")
_OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """A folder's weights, before any header is read."""

    files: tuple[Path, ...]
    """The safetensors files, in name order."""
    entry: Path | None
    """The file that a loader starts from, an index or the only file; None for loose files."""
    index: Mapping[str, str] | None = None
    """Tensor name -> shard name; None without an index."""


def weight_files(folder: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Find the weights as transformers does.

    Args:
        folder: The model folder.
        config: Its config.json.

    Raises:
        CheckpointError: No safetensors; a shard is missing; the index is unreadable; what config.json names is not in
            the folder.
    """
    entry = _entry(folder, config)
    if entry is None:
        return WeightFiles(files=tuple(_loose_files(folder)), entry=None)
    if entry.suffix != ".json":
        return WeightFiles(files=(entry,), entry=entry)
    index = _read_index(entry)
    return WeightFiles(files=tuple(_index_files(entry, index)), entry=entry, index=index)


def _entry(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The file to start from."""
    named = config.get("transformers_weights")
    if named is not None:
        return _named_entry(folder, named)
    return next((folder / name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name).is_file()), None)


def _named_entry(folder: Path, named: object) -> Path:
    """The file that config.json names, which lies in the folder."""
    is_possible = isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
    path = folder / named if isinstance(named, str) else folder
    if is_possible and path.is_file() and path.absolute().resolve().parent.is_relative_to(folder.resolve()):
        return path
    raise CheckpointError(
        f"model config {folder / 'config.json'}, transformers_weights",
        got=repr(named)[:60],
        wanted="a .safetensors file of the folder, or the .safetensors.index.json of its shards",
        do="download the model again",
        folder=folder,
    )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard name."""
    index = read_json(path, what="index", error=CheckpointError, repeats=True)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(
            f"index {path}",
            got="no weight_map",
            wanted="tensor names with the shard of each",
            do="download it again",
            file=path,
        )
    return shards


def _index_files(path: Path, index: Mapping[str, str]) -> list[Path]:
    """The shards that an index names, all there."""
    folder, names = path.parent, sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"model folder {folder} lacks {len(missing)} of {len(names)} shards that {path.name} names",
            got=f"no {_some(missing)}",
            do="download the model again",
            missing=missing,
        )
    return [folder / name for name in names]


def _loose_files(folder: Path) -> list[Path]:
    """Every safetensors file of a folder that says nothing about them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"model folder {folder}", got=_what_else(folder), wanted="*.safetensors", do=_cure(folder), folder=folder
        )
    _check_numbers(folder, files)
    return files


def _check_numbers(folder: Path, files: list[Path]) -> None:
    """Without an index, the numbers in the names still tell that a shard is missing."""
    totals = Counter(shard["total"] for file in files if (shard := _SHARD.search(file.name)))
    for total, present in totals.items():
        if present < int(total):
            raise CheckpointError(
                f"model folder {folder} lacks shards",
                got=f"{present} files named *-of-{total}.safetensors",
                wanted=str(int(total)),
                do="download the model again",
                folder=folder,
            )


def _other_weights(folder: Path) -> list[str]:
    return sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))


def _what_else(folder: Path) -> str:
    others = _other_weights(folder)
    return f"{_some(others)} only" if others else "no weights"


def _cure(folder: Path) -> str:
    return "convert the model to safetensors" if _other_weights(folder) else "download the model's weights"


def _some(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
