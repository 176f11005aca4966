"""What a model folder holds, from config.json and the safetensors headers: names, types, shapes, places, no weights.

First step of the flow: `checkpoint headers -> sizes -> plan`. The banks read expert rows straight from these files,
so the offsets are from the start of the file. A header that promises bytes which the file does not have is found
here, before anything is allocated.

A safetensors file is eight bytes of header length (little endian), the header (JSON) and the data; the header gives
every tensor's dtype, shape and range of bytes inside the data:

    | length: u64 | {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}} | 12 bytes of data |

Source: the format is described in the safetensors repository, Apache-2.0; this reader is our own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hotsplit.errors import CheckpointError
from hotsplit.files import read_json, require_regular, unique_keys
from hotsplit.plan.shards import INDEX_NAME, SINGLE_NAME, weight_files

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a longer length field means that this is no safetensors file."""

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits per element of every dtype of the format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    file: Path
    """The safetensors file."""
    dtype: str
    """Element type as the format spells it, a key of DTYPE_BITS."""
    shape: tuple[int, ...]
    """Elements per dimension; empty for a scalar."""
    offset: int
    """First byte, from the start of the file."""
    nbytes: int
    """Bytes of the whole tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One model folder, headers only."""

    folder: Path
    """The model folder."""
    config: Mapping[str, Any]
    """config.json as it is."""
    tensors: Mapping[str, TensorInfo]
    """By checkpoint name, in name order."""
    entry: Path | None
    """The file that a loader starts from, model.safetensors or an index; None where it is neither: the headers can be
    read, and no engine can load them."""

    @property
    def headers_hash(self) -> str:
        """SHA-256 over the sorted (name, dtype, shape) of all tensors, in hexadecimal; how they are sharded is left out."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(json.dumps([name, info.dtype, list(info.shape)], separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()


def read_headers(folder: Path) -> Checkpoint:
    """Read config.json and every safetensors header of a model folder.

    The files are those that transformers loads: the one that config.json names in transformers_weights, if it does;
    else model.safetensors, alone, even where there is an index as well; else the shards of
    model.safetensors.index.json. Without any of them every *.safetensors file of the folder is read: that is enough to
    plan, and not to load (`require_loadable`).

    Args:
        folder: The model folder.

    Returns:
        Names and places of all tensors.

    Raises:
        CheckpointError: No such folder; config.json missing or not a JSON object; no safetensors; a shard that is missing,
            truncated or has an unreadable header; a tensor that the index promises and the shard lacks.
    """
    config = _read_config(folder)
    found = weight_files(folder, config)
    tensors: dict[str, TensorInfo] = {}
    for file in found.files:
        for name, info in read_header(file).items():
            _take(tensors, name, info=info, index=found.index)
    if found.index is not None:
        _check_index(tensors, found.index)
    return Checkpoint(folder=folder, config=config, tensors=dict(sorted(tensors.items())), entry=found.entry)


def require_loadable(checkpoint: Checkpoint) -> None:
    """Refuse a folder whose files transformers would not find, before it says so at greater length.

    Args:
        checkpoint: From `read_headers`.

    Raises:
        CheckpointError: Loose safetensors files, with neither an index nor the one name that is known.
    """
    if checkpoint.entry is None:
        raise CheckpointError(
            f"model folder {checkpoint.folder}",
            got=f"safetensors files without {INDEX_NAME}",
            wanted=f"that index beside its shards, or one file {SINGLE_NAME}",
            do="download the index too",
            folder=checkpoint.folder,
        )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file.

    Args:
        file: The file.

    Returns:
        Its tensors by name; empty for a file without any.

    Raises:
        CheckpointError: The file cannot be read, is no safetensors file, or is truncated.
    """
    header, start, size = _read_raw_header(file)
    _check_metadata(file, header)
    tensors = {
        name: _tensor_info(file, name, entry=entry, start=start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end = max((info.offset + info.nbytes for info in tensors.values()), default=start)
    if end > size:
        raise CheckpointError(
            f"shard {file} is truncated",
            got=f"{size} bytes",
            wanted=f"{end}, as its header says",
            do="download it again",
            file=file,
        )
    if end < size:
        raise _bad_header(file, f"{size - end} bytes after its last tensor", wanted="none")
    _check_places(file, tensors, start=start)
    return tensors


def _check_metadata(file: Path, header: Mapping[str, Any]) -> None:
    """`__metadata__`, where it is there, holds text by name."""
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad_header(file, "a __metadata__ that is no object of strings")


def _check_places(file: Path, tensors: Mapping[str, TensorInfo], *, start: int) -> None:
    """The format has no tensor inside another and no byte between two. Args: start: where the data begins, bytes."""
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            how = "overlaps another tensor" if info.offset < end else f"begins {info.offset - end} bytes late"
            raise _bad_header(file, f"tensor {name} that {how}", wanted="tensors one after the other")
        end += info.nbytes


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(
            f"model folder {folder}", got=got, wanted="a folder with config.json and *.safetensors", folder=folder
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"model folder {folder}", got="no config.json", do="give the folder of a transformers model", folder=folder
        )
    config = read_json(path, what="model config", error=CheckpointError, repeats=True)
    if not isinstance(config, dict):
        raise CheckpointError(f"model config {path}", got=type(config).__name__, wanted="a JSON object", file=path)
    return config


def _take(tensors: dict[str, TensorInfo], name: str, *, info: TensorInfo, index: Mapping[str, str] | None) -> None:
    """Add a tensor; of one that lies in two shards, keep the index's."""
    other = tensors.get(name)
    if other is None or (index is not None and index.get(name) == info.file.name):
        tensors[name] = info
    elif index is None or index.get(name) != other.file.name:
        raise CheckpointError(
            f"tensor {name}",
            got=f"one in {other.file.name} and one in {info.file.name}",
            wanted="one",
            do="remove the file that is not of this model",
            tensor=name,
        )


def _check_index(tensors: Mapping[str, TensorInfo], index: Mapping[str, str]) -> None:
    for name, shard in index.items():
        if name not in tensors or tensors[name].file.name != Path(shard).name:
            raise CheckpointError(
                f"shard {shard}",
                got=f"no tensor {name}",
                wanted=f"it there, as {INDEX_NAME} says",
                do="download the shard and the index again",
                tensor=name,
            )


def _read_raw_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header as JSON, where the data begins, and the size of the file in bytes."""
    try:
        size = require_regular(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _no_header(file, prefix=prefix, length=length, size=size)
            data = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            f"shard {file}", got=error.strerror or str(error), wanted="a readable file", file=file
        ) from error
    try:
        header = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _bad_header(file, f"a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _bad_header(file, "a header that is no JSON object")
    return header, 8 + length, size


def _no_header(file: Path, *, prefix: bytes, length: int, size: int) -> CheckpointError:
    """Tell a file that was cut inside its header from one that never was a safetensors file."""
    if prefix == b"version ":
        return CheckpointError(
            f"shard {file}", got="a git-lfs pointer", wanted="the weights", do="run git lfs pull", file=file
        )
    if length > MAX_HEADER_BYTES:
        return _bad_header(file, f"a header length of {length} bytes")
    wanted = f"{8 + length} and more" if len(prefix) == 8 else "a header"
    return CheckpointError(
        f"shard {file} is truncated", got=f"{size} bytes", wanted=wanted, do="download it again", file=file
    )


def _tensor_info(file: Path, name: str, *, entry: Any, start: int) -> TensorInfo:
    """Check one entry of a header. Args: start: where the data begins, bytes."""
    what = f"tensor {name}"
    if not isinstance(entry, dict):
        raise _bad_header(file, f"{what} without dtype and shape")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad_header(file, f"{what} of dtype {dtype}", wanted=f"one of {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape):
        raise _bad_header(file, f"{what} of shape {shape}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _bad_header(file, f"{what} at offsets {offsets}")
    nbytes = tensor_bytes(dtype, shape)
    if offsets[1] - offsets[0] != nbytes:
        raise _bad_header(file, f"{what} of {offsets[1] - offsets[0]} bytes", wanted=f"{nbytes} for {dtype} {shape}")
    return TensorInfo(file=file, dtype=dtype, shape=tuple(shape), offset=start + offsets[0], nbytes=nbytes)


def tensor_bytes(dtype: str, shape: tuple[int, ...] | list[int]) -> int:
    """Bytes of a tensor, rounded up to whole bytes where elements are smaller.

    Args:
        dtype: A key of DTYPE_BITS.
        shape: Elements per dimension.

    >>> tensor_bytes("BF16", (2, 3)), tensor_bytes("F4", (3,)), tensor_bytes("F32", ())
    (12, 2, 4)
    """
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _bad_header(file: Path, got: str, *, wanted: str = "a safetensors header") -> CheckpointError:
    return CheckpointError(f"shard {file}", got=got, wanted=wanted, do="download it again", file=file)
