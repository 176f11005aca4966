"""Which bytes of a checkpoint make up which expert, for every decorated architecture and without per-model code.

transformers itself knows how checkpoint names become parameters (its conversion mapping); this module asks it, name by
name, and turns the answer into spans of files. First step of the engine: `checkpoint + empty model -> ExpertSource`.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hotsplit.bank.source import ROW_ALIGN, RowLayout, RowTensor, Span, align
from hotsplit.errors import CheckpointError, UnsupportedEngineError
from hotsplit.plan.checkpoint import Checkpoint, TensorInfo

SCALE = ".scale"
"""Suffix of the row tensor that holds a quantised weight's block scales."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What turns a stored expert tensor into the module's parameter, beyond laying parts side by side."""

    transpose: bool = False
    """Exchange the last two dimensions."""
    deinterleave: int | None = None
    """Dimension (of one expert's tensor) along which pairs are pulled apart; None for none."""
    interleave_inverse: bool = False
    """The other direction of it."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to do."""
        return not self.transpose and self.deinterleave is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsLayer:
    """One experts module of the model."""

    path: str
    """Module path, "model.layers.3.mlp.experts"."""
    decoder_index: int
    """Index of its decoder layer."""
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Per-expert parameters: name -> ([E, ...] shape, dtype that the module computes with)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSource:
    """The ExpertSource of a safetensors checkpoint."""

    files: tuple[Path, ...]
    """The checkpoint's files."""
    num_experts: int
    """E."""
    layouts: tuple[RowLayout, ...]
    """Row layout per layer, L of them."""
    layers: tuple[ExpertsLayer, ...]
    """The modules, in decoder order, L of them."""
    conversions: Mapping[str, Conversion]
    """By parameter name; the same in every layer."""
    rows: Mapping[tuple[int, int], tuple[Span, ...]] = field(repr=False)
    """Spans of (layer_id, expert)."""

    def spans(self, layer_id: int, expert: int) -> Sequence[Span]:
        """The bytes of one expert, in row order.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
        """
        return self.rows[layer_id, expert]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One stored tensor that ends up in a parameter."""

    order: int
    """Place among the parts that are laid side by side (gate before up)."""
    info: TensorInfo
    """Where it lies."""


_Stored = dict[int | None, list[_Part]]
"""The parts of one parameter by expert; under None the tensors that hold all experts."""


def find_experts(model: torch.nn.Module) -> list[ExpertsLayer]:
    """The experts modules of a model, by what transformers' decorator leaves on them.

    Args:
        model: Any model; its parameters may be on the meta device.

    Raises:
        UnsupportedEngineError: Two experts modules share a decoder layer, or a path names no layer.
    """
    layers: dict[int, ExpertsLayer] = {}
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        numbers = re.findall(r"\.(\d+)(?=\.)", f".{path}.")
        if not numbers:
            raise UnsupportedEngineError(f"experts module {path}", got="no layer number in its path")
        index = int(numbers[0])
        if index in layers:
            raise UnsupportedEngineError(
                f"decoder layer {index}",
                got=f"two experts modules, {layers[index].path} and {path}",
                wanted="one per layer",
                do="run this model with stock transformers",
            )
        layers[index] = ExpertsLayer(path=path, decoder_index=index, parameters=expert_parameters(module))
    return [layers[index] for index in sorted(layers)]


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers' experts decorator made this module's class.

    Args:
        module: Any module.
    """
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def expert_parameters(module: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The parameters of an experts module that have one slice per expert.

    Args:
        module: An experts module.
    """
    return {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2 and parameter.shape[0] == module.num_experts
    }


def index_experts(
    checkpoint: Checkpoint, *, model: torch.nn.Module, layers: Sequence[ExpertsLayer], hf_quantizer: Any = None
) -> CheckpointSource:
    """Find every expert's bytes.

    Args:
        checkpoint: Headers of the safetensors files.
        model: The model on the meta device, with all its parameters.
        layers: Its experts modules, from find_experts.
        hf_quantizer: transformers' quantizer of a quantised checkpoint.

    Raises:
        CheckpointError: An expert's tensor is missing.
        UnsupportedEngineError: The checkpoint needs a conversion that is not known here.
    """
    converters, found = _collect(checkpoint, model=model, layers=layers, hf_quantizer=hf_quantizer)
    files = tuple(sorted({info.file for info in checkpoint.tensors.values()}))
    number = {path: i for i, path in enumerate(files)}
    num_experts = next(iter(layers[0].parameters.values()))[0][0]
    layouts, rows = [], {}
    for layer_id, layer in enumerate(layers):
        parts = {
            name: parts
            for parameter in layer.parameters
            for name in (parameter, parameter + SCALE)
            if (parts := found.get(f"{layer.path}.{name}"))
        }
        if missing := [name for name in layer.parameters if name not in parts]:
            raise CheckpointError(
                f"layer {layer.decoder_index}", got=f"no tensor for {layer.path}.{missing[0]}", wanted="a whole model"
            )
        _check_complete(parts, layer=layer, num_experts=num_experts)
        layout = _layout(parts, phases=_phases(parts, layer=layer, converters=converters))
        layouts.append(layout)
        for expert in range(num_experts):
            rows[layer_id, expert] = _spans(parts, layout=layout, expert=expert, number=number)
    shapes = layers[0].parameters
    conversions = {
        name: _conversion(converters.get(name), stored=found[f"{layers[0].path}.{name}"], shape=shape)
        for name, (shape, _) in shapes.items()
    }
    for layer, layout in zip(layers, layouts, strict=True):
        _check_shapes(layout, layer=layer, conversions=conversions)
    return CheckpointSource(
        files=files,
        num_experts=num_experts,
        layouts=tuple(layouts),
        layers=tuple(layers),
        conversions=conversions,
        rows=rows,
    )


def _collect(
    checkpoint: Checkpoint, *, model: Any, layers: Sequence[ExpertsLayer], hf_quantizer: Any
) -> tuple[dict[str, Any], dict[str, _Stored]]:
    """Converters by parameter name, and stored parts by full parameter name (scales under name.scale)."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model, hf_quantizer=hf_quantizer)
    renamings: list[Any] = [item for item in transforms if not isinstance(item, loading.WeightConverter)]
    converters = [item for item in transforms if isinstance(item, loading.WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    state = model.state_dict()
    wanted = {f"{layer.path}.{name}" for layer in layers for name in layer.parameters}
    used: dict[str, Any] = {}
    found: dict[str, _Stored] = defaultdict(lambda: defaultdict(list))
    for key, info in checkpoint.tensors.items():
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        # Scales of a fused tensor arrive under the parameter's own name with this suffix.
        base = name.removesuffix("_scale_inv")
        if base not in wanted:
            continue
        converter = by_pattern.get(pattern) if pattern else None
        is_scale = name != base or bool(pattern and "scale_inv" in pattern)
        if converter is not None:
            used[base.rpartition(".")[2]] = converter
        order = list(converter.source_patterns).index(pattern) if converter is not None and pattern else 0
        stored = found[base + (SCALE if is_scale else "")]
        stored[_expert_of(key, pattern)].append(_Part(order=order, info=info))
    for stored in found.values():
        for parts in stored.values():
            parts.sort(key=lambda part: part.order)
    return used, found


def _expert_of(key: str, pattern: str | None) -> int | None:
    """The number that stands where the source pattern has its star."""
    if pattern is None or "*" not in pattern:
        return None
    numbers = re.findall(r"\.experts\.(\d+)\.", key)
    return int(numbers[-1]) if numbers else None


def _check_complete(parts: Mapping[str, _Stored], *, layer: ExpertsLayer, num_experts: int) -> None:
    """Every expert has every part, or one tensor has all experts."""
    for name, stored in parts.items():
        experts: list[int | None] = [None] if None in stored else list(range(num_experts))
        orders = {part.order for found in stored.values() for part in found}
        for expert in experts:
            found = stored.get(expert, [])
            whole = expert is not None or found[0].info.shape[0] == num_experts
            if {part.order for part in found} != orders or not whole:
                raise CheckpointError(
                    f"layer {layer.decoder_index}, expert {0 if expert is None else expert}",
                    got=f"no whole tensor for {name}",
                    wanted=f"{num_experts} whole experts",
                    do="download the model again",
                )


def _check_shapes(layout: RowLayout, *, layer: ExpertsLayer, conversions: Mapping[str, Conversion]) -> None:
    """What is stored must become the module's own parameters; packed FP4 holds two columns per byte."""
    for part in layout.tensors:
        if part.name.endswith(SCALE):
            continue
        shape = list(part.shape)
        if part.dtype == torch.int8:
            shape[-1] *= 2
        if conversions[part.name].transpose:
            shape[-2:] = reversed(shape[-2:])
        wanted = layer.parameters[part.name][0][1:]
        if tuple(shape) != wanted:
            raise CheckpointError(
                f"layer {layer.decoder_index}, {part.name}",
                got=f"stored experts of shape {tuple(shape)}",
                wanted=f"{wanted}, as config.json says",
                do="check that config.json belongs to these weights",
            )


def _phases(parts: Mapping[str, _Stored], *, layer: ExpertsLayer, converters: Mapping[str, Any]) -> dict[str, int]:
    """Addresses modulo ROW_ALIGN that a stock load gives float32 weights, where they are not 0.

    A stacked or converted tensor is fresh memory and starts on a cache line; one that is stored as it is computed
    with stays where the mapped file has it.
    """
    return {
        name: stored[None][0].info.offset % ROW_ALIGN
        for name, stored in parts.items()
        if None in stored
        and name not in converters
        and _dtype(stored[None][0].info) == layer.parameters.get(name, (None, None))[1] == torch.float32
    }


def _layout(parts: Mapping[str, _Stored], *, phases: Mapping[str, int]) -> RowLayout:
    """The row of one expert: each parameter's parts side by side, then its scales."""
    tensors, offset = [], 0
    for name, stored in parts.items():
        shapes, dtypes = [], set()
        for part in _parts_of(stored, expert=0):
            shapes.append(part.info.shape[1:] if None in stored else part.info.shape)
            dtypes.add(_dtype(part.info))
        if len({shape[1:] for shape in shapes}) != 1 or len(dtypes) != 1:
            raise UnsupportedEngineError(name, got=f"parts of shapes {shapes}", wanted="parts that fit side by side")
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        start = offset + phases.get(name, 0)
        tensors.append(RowTensor(name=name, offset=start, dtype=dtypes.pop(), shape=shape))
        offset = align(start + tensors[-1].num_bytes)
    return RowLayout(tensors=tuple(tensors))


def _parts_of(stored: _Stored, *, expert: int) -> list[_Part]:
    return stored[None] if None in stored else stored[expert]


def _spans(
    parts: Mapping[str, _Stored], *, layout: RowLayout, expert: int, number: Mapping[Path, int]
) -> tuple[Span, ...]:
    spans = []
    for tensor in layout.tensors:
        row_offset, stored = tensor.offset, parts[tensor.name]
        for part in _parts_of(stored, expert=expert):
            info, offset, num_bytes = part.info, part.info.offset, part.info.nbytes
            if None in stored:
                num_bytes //= info.shape[0]
                offset += expert * num_bytes
            spans.append(Span(file=number[info.file], offset=offset, num_bytes=num_bytes, row_offset=row_offset))
            row_offset += num_bytes
        if row_offset != tensor.offset + tensor.num_bytes:
            raise CheckpointError(f"expert {expert}, {tensor.name}", got="tensors of another size than expert 0's")
    return tuple(spans)


def _dtype(info: TensorInfo) -> torch.dtype:
    if info.dtype not in _DTYPES:
        raise UnsupportedEngineError(
            "expert weights",
            got=f"dtype {info.dtype}",
            wanted=f"one of {', '.join(_DTYPES)}",
            do="use another checkpoint",
        )
    return _DTYPES[info.dtype]


def _conversion(converter: Any, *, stored: _Stored, shape: tuple[int, ...]) -> Conversion:
    """Read a converter's operations; what this module does not know is refused by name."""
    transpose, deinterleave, inverse = False, None, False
    operations = [] if converter is None else converter.operations
    for operation in operations:
        kind = type(operation).__name__
        if kind in ("Fp8Dequantize", "_IdentityOp") or (kind == "MergeModulelist" and operation.dim == 0):
            continue
        if kind == "Concatenate" and operation.dim == 1:
            continue
        if kind == "Transpose" and {operation.dim0 % 3, operation.dim1 % 3} == {1, 2}:
            transpose = not (operation.check_dims and _parts_of(stored, expert=0)[0].info.shape == shape)
        elif kind == "Interleave" and operation.dim in (1, 2):
            deinterleave, inverse = operation.dim - 1, operation.inverse
        else:
            raise UnsupportedEngineError(
                f"checkpoint conversion {kind}",
                got="an operation that hotsplit does not know",
                wanted="merge, concatenate, transpose, interleave or FP8 dequantisation",
                do="run this model with stock transformers",
            )
    return Conversion(transpose=transpose, deinterleave=deinterleave, interleave_inverse=inverse)
