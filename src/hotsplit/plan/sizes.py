"""What every routed expert weighs on one rank, from config.json and safetensors headers alone.

Stands before the planner: `checkpoint headers -> sizes -> plan`. No weight is read. plan/layouts.py knows the names;
here the tensors are gathered into layers, checked for completeness and summed.

    model.layers.0.mlp.experts.{0..63}.{gate,up}_proj.weight  BF16 [512, 1024]   sharded along 512
    model.layers.0.mlp.experts.{0..63}.down_proj.weight       BF16 [1024, 512]   sharded along 512
    tp=1: row_bytes[0] = 3 x 512 x 1024 x 2 = 3,145,728;  tp=3: the widest rank holds 171 of 512, 1,050,624

Bytes are those of the checkpoint's types; an engine that loads in another type checks again when it builds its banks.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hotsplit.errors import CheckpointError
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import Checkpoint, TensorInfo, tensor_bytes
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.layouts import (
    DRAFT,
    NUM_LAYERS,
    OTHER_STACK,
    TOP_K,
    Place,
    model_facts,
    place,
    quantisation,
    shard_shape,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """Bytes of one model's routed experts on one rank."""

    identity: ModelIdentity
    """Complete: all four fields are known."""
    row_bytes: npt.NDArray[np.int64]
    """Bytes of one expert's row, all its tensors, on the widest rank, [L], int64."""
    fixed_bytes: npt.NDArray[np.int64]
    """Bytes per layer that stay in fast memory for all experts, whatever is hot, [L], int64."""
    dense_bytes: int
    """Bytes of everything that is no routed expert (whole model, not sharded); draft layers are left out."""
    headers_hash: str | None
    """SHA-256 over the sorted (name, dtype, shape) of all tensors; None where no checkpoint was read."""
    name: str | None = None
    """The model's name, for people."""
    quantisation: str | None = None
    """Quantisation method as config.json names it."""
    num_decoder_layers: int | None = None
    """All decoder layers, dense ones included: what pipeline stages are cut from."""
    excluded: tuple[str, ...] = ()
    """Modules whose experts are left out: draft (MTP) layers, "model.layers.61" for one, which weigh nothing here, and
    stacks of another modality, "talker.model.layers" for one, which count as dense."""
    tp: int = 1
    """Tensor-parallel size that the row bytes are for."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts on one rank."""
        experts = self.identity.num_experts or 0
        return int(self.row_bytes.sum()) * experts


_Leaves: TypeAlias = dict[str, tuple[Place, TensorInfo]]
"""Tensors by their name inside the expert, or inside the experts module."""


def left_out(sizes: ExpertSizes) -> list[Notice]:
    """Name the draft layers and other stacks whose experts are not planned: nothing is left out quietly.

    Args:
        sizes: Of a model.
    """
    if not sizes.excluded:
        return []
    text = (
        f"the experts of {', '.join(sizes.excluded)} are left out: draft (MTP) layers or another stack, never counted"
    )
    return [Notice(name="draft-layers", text=text, strict=False)]


@dataclass(kw_only=True, slots=True)
class _Layer:
    """Tensors of one layer's routed experts, while they are gathered."""

    single: dict[int, _Leaves] = field(default_factory=lambda: defaultdict(dict))
    """By expert and name inside the expert: layouts with tensors per expert."""
    fused: _Leaves = field(default_factory=dict)
    """By name inside the experts module: layouts with all experts along the leading dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """The facts of config.json, complete."""

    folder: str
    model_type: str
    num_experts: int
    top_k: int
    num_layers: int


def expert_sizes(checkpoint: Checkpoint, *, tp: int = 1) -> ExpertSizes:
    """Weigh the routed experts of a checkpoint.

    The identity's `model_type` is the one at the top of config.json, also for multimodal models: it is the one by
    which an engine chooses the model.

    Args:
        checkpoint: Headers of the model folder.
        tp: Tensor-parallel size; rows are those of the widest rank.

    Returns:
        Row bytes per MoE layer of the language model, in decoder order; `fixed_bytes` is zero, since no checkpoint tensor
        stays fast by itself (the engine's alignment rules may say so later).

    Raises:
        CheckpointError: A dense model; an unknown layout; a layer or an expert that is missing or differs from its
            siblings; config.json without the facts.
    """
    if tp < 1:
        raise ValueError(f"tp is {tp}: wanted an integer >= 1")
    model = _model(checkpoint)
    places = {name: found for name in checkpoint.tensors if (found := place(name)) is not None}
    routed = {name: found for name, found in places.items() if _is_routed(found, checkpoint.tensors[name], model)}
    stack = _decoder_stack(routed, model)
    drafts = {name for name in checkpoint.tensors if _is_draft(name, places.get(name), stack=stack, model=model)}
    ours = {name: found for name, found in routed.items() if found.stack == stack and name not in drafts}
    _check_layers_present([found for found in places.values() if found.stack == stack], stack=stack, model=model)
    layers = _gather(ours, checkpoint.tensors)
    for layer, tensors in layers.items():
        _check_layer(tensors, where=f"{stack}.{layer}", layer=layer, model=model)
    rows = [_row_bytes(tensors, tp=tp) for tensors in layers.values()]
    dense = sum(info.nbytes for name, info in checkpoint.tensors.items() if name not in ours and name not in drafts)
    return ExpertSizes(
        identity=ModelIdentity(
            model_type=model.model_type,
            layers=tuple(layers),
            num_experts=model.num_experts,
            top_k=model.top_k,
        ),
        row_bytes=np.array(rows, dtype=np.int64),
        fixed_bytes=np.zeros(len(rows), dtype=np.int64),
        dense_bytes=dense,
        headers_hash=checkpoint.headers_hash,
        name=checkpoint.folder.resolve().name,
        quantisation=quantisation(checkpoint.config),
        num_decoder_layers=model.num_layers,
        excluded=_excluded(routed, drafts=drafts, stack=stack),
        tp=tp,
    )


def _model(checkpoint: Checkpoint) -> _Model:
    """The facts, or an error that says which is missing."""
    facts = model_facts(checkpoint.config)
    path = checkpoint.folder / "config.json"
    if facts.num_experts is None:
        raise _no_routed_experts(str(checkpoint.folder), got="a dense model: config.json names no number of experts")
    if facts.top_k is None:
        raise CheckpointError(f"model config {path}", got="no experts per token", wanted=f"one of {', '.join(TOP_K)}")
    if facts.num_layers is None:
        raise CheckpointError(
            f"model config {path}", got="no number of layers", wanted=f"one of {', '.join(NUM_LAYERS)}"
        )
    if facts.top_k > facts.num_experts:
        raise CheckpointError(
            f"model config {path}",
            got=f"{facts.top_k} experts per token",
            wanted=f"at most the {facts.num_experts} there are",
        )
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"model config {path}", got="no model_type", wanted="the architecture's name")
    return _Model(
        folder=str(checkpoint.folder),
        model_type=model_type,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        num_layers=facts.num_layers,
    )


def _no_routed_experts(folder: str, *, got: str) -> CheckpointError:
    return CheckpointError(
        f"model folder {folder} has no routed experts",
        got=got,
        wanted="a mixture-of-experts model in a known layout",
        do="run this model without hotsplit",
        folder=folder,
    )


def _is_routed(found: Place, info: TensorInfo, model: _Model) -> bool:
    """Whether a tensor holds routed experts: not a module's global scale, nor a dense MLP under the same module name."""
    if found.leaf is None or found.expert is not None:
        return found.leaf is not None
    is_matrix = found.suffix in ("", "weight")
    if is_matrix and len(info.shape) < 3:
        return False
    if info.shape[:1] != (model.num_experts,) and is_matrix:
        raise CheckpointError(
            f"{found.stack}.{found.layer}, fused experts {found.leaf}",
            got=f"shape {list(info.shape)}",
            wanted=f"{model.num_experts} experts along the first dimension, as config.json says",
            layer=found.layer,
        )
    return info.shape[:1] == (model.num_experts,)


def _decoder_stack(routed: Mapping[str, Place], model: _Model) -> str:
    """The one stack of layers whose experts are planned."""
    stacks = {found.stack for found in routed.values()}
    ours = sorted(stack for stack in stacks if not DRAFT.search(stack) and not OTHER_STACK.search(stack))
    if not ours:
        raise _no_routed_experts(
            model.folder, got=f"no tensor of the {model.num_experts} experts that config.json names"
        )
    if len(ours) > 1:
        raise CheckpointError(
            f"model folder {model.folder}", got=f"experts in {' and '.join(ours)}", wanted="one language model"
        )
    return ours[0]


def _is_draft(name: str, found: Place | None, *, stack: str, model: _Model) -> bool:
    beyond = found is not None and found.stack == stack and found.layer >= model.num_layers
    return beyond or DRAFT.search(name) is not None


def _check_layers_present(places: Sequence[Place], *, stack: str, model: _Model) -> None:
    missing = sorted(set(range(model.num_layers)) - {found.layer for found in places})
    if missing:
        raise CheckpointError(
            f"model folder {model.folder} lacks tensors",
            got=f"none of {stack}.{missing[0]}",
            wanted=f"all of {model.num_layers} layers",
            do="download the missing shards",
            layer=missing[0],
        )


def _gather(routed: Mapping[str, Place], tensors: Mapping[str, TensorInfo]) -> dict[int, _Layer]:
    """By decoder index, ascending."""
    layers: dict[int, _Layer] = defaultdict(_Layer)
    for name, found in routed.items():
        leaves = layers[found.layer].fused if found.expert is None else layers[found.layer].single[found.expert]
        leaves[found.leaf or ""] = (found, tensors[name])
    return dict(sorted(layers.items()))


def _excluded(routed: Mapping[str, Place], *, drafts: set[str], stack: str) -> tuple[str, ...]:
    draft_layers = {(found.stack, found.layer) for name, found in routed.items() if name in drafts}
    others = {found.stack for name, found in routed.items() if name not in drafts and found.stack != stack}
    return (*(f"{prefix}.{layer}" for prefix, layer in sorted(draft_layers)), *sorted(others))


def _check_layer(tensors: _Layer, *, where: str, layer: int, model: _Model) -> None:
    """All experts are there and alike, and have both sides."""
    if tensors.single:
        _check_experts_present(tensors.single, where=where, layer=layer, model=model)
        _check_experts_alike(tensors.single, where=where, layer=layer)
    found = [entry[0] for leaves in (tensors.fused, *tensors.single.values()) for entry in leaves.values()]
    sides = {one.role.side for one in found if one.role is not None}
    if sides != {"up", "down"}:
        raise CheckpointError(
            f"{where}, experts",
            got=f"no tensors of side {min({'up', 'down'} - sides)}",
            wanted="both",
            do="download the missing shards",
            layer=layer,
        )


def _check_experts_present(experts: Mapping[int, _Leaves], *, where: str, layer: int, model: _Model) -> None:
    odd = sorted(set(experts) ^ set(range(model.num_experts)))
    if odd:
        raise CheckpointError(
            f"{where}, expert {odd[0]}",
            got="an expert too many" if odd[0] in experts else "no tensor of it",
            wanted=f"experts 0..{model.num_experts - 1}, as config.json says",
            layer=layer,
            expert=odd[0],
        )


def _check_experts_alike(experts: Mapping[int, _Leaves], *, where: str, layer: int) -> None:
    """None is bigger than its siblings, none lacks a tensor: a row fits them all."""
    kinds = {
        expert: tuple(sorted((leaf, info.dtype, info.shape) for leaf, (_, info) in leaves.items()))
        for expert, leaves in experts.items()
    }
    usual = Counter(kinds.values()).most_common(1)[0][0]
    for expert, kind in sorted(kinds.items()):
        if kind != usual:
            extra = sorted(set(kind) - set(usual))
            leaf, dtype, shape = extra[0] if extra else min(set(usual) - set(kind))
            raise CheckpointError(
                f"{where}, expert {expert}",
                got=f"{'' if extra else 'no '}{leaf} of {dtype} {list(shape)}",
                wanted="the same tensors as its siblings",
                layer=layer,
                expert=expert,
            )


def _row_bytes(layer: _Layer, *, tp: int) -> int:
    """Bytes of one expert on the widest rank; all experts of the layer are alike."""
    one = next(iter(layer.single.values()), {}).values()
    shapes = [(found, info.dtype, info.shape) for found, info in one]
    shapes += [(found, info.dtype, info.shape[1:]) for found, info in layer.fused.values()]
    transposed = _is_transposed(layer.fused)
    return sum(
        tensor_bytes(dtype, shard_shape(shape, place=found, transposed=transposed, tp=tp))
        for found, dtype, shape in shapes
    )


def _is_transposed(fused: _Leaves) -> bool:
    """Whether a layer's fused matrices are stored [E, in, out]: their shapes tell where gate and up lie in one tensor."""
    matrices = {
        found.role.side: (found.role.parts, info.shape)
        for found, info in fused.values()
        if found.role is not None and found.suffix in ("", "weight") and len(info.shape) == 3
    }
    if set(matrices) != {"up", "down"} or matrices["up"][0] == 1:
        return False
    (parts, (_, rows, columns)), (_, (_, down_rows, down_columns)) = matrices["up"], matrices["down"]
    return rows != parts * down_columns and columns == parts * down_rows
