"""The parameters that vLLM will make of a checkpoint, before it has made them: what its offloader would be shown.

Stands before the budget: `checkpoint headers -> parameters per decoder layer -> budget.py`. vLLM fuses projections and
all experts of a layer, cuts most of them in tensor-parallel parts, and shows its offloader one layer after the other:

    self_attn.{q,k,v}_proj.weight               self_attn.qkv_proj.weight                       first in the layer
    mlp.gate.weight                             mlp.gate.weight                                 whole on every rank
    mlp.experts.{0..E-1}.{gate,up}_proj.weight  mlp.experts.routed_experts.w13_weight           one tensor of all experts
    mlp.experts.{0..E-1}.down_proj.weight       mlp.experts.routed_experts.w2_weight
    input_layernorm.weight                      input_layernorm.weight                          last

Expert bytes are exact: they are those of the plan. Of the others three things are approximate: their order inside of
attention, which of an unusual architecture's small tensors every rank keeps whole, and routers that vLLM keeps in
float32. An offloader that stops in the middle of a layer is foretold to within that layer.

Source: vLLM 0.32, model_executor/models (Apache-2.0), names and order alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hotsplit.engines.vllm.budget import Parameter
from hotsplit.plan.checkpoint import Checkpoint, TensorInfo
from hotsplit.plan.layouts import DRAFT, OTHER_STACK, Place, place
from hotsplit.plan.sizes import ExpertSizes

_FUSED: Final[Mapping[str, str]] = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
}
"""Projection in the checkpoint -> the one in vLLM that it is a part of."""
_LATENT: Final = ("kv_a_proj_with_mqa", "q_a_proj")
"""The first is fused as well, where the second is there."""
_WHOLE: Final = frozenset({"gate", "router", "shared_expert_gate", *_LATENT})
"""Modules of which every rank keeps all of a matrix."""
_VOCABULARY: Final = ("embed", "lm_head", "wte")
"""In names of matrices outside the layers that are cut like the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameters:
    """What one rank holds."""

    layers: tuple[tuple[Parameter, ...], ...]
    """Of its decoder layers, in the model's order, in vLLM's order inside of each."""
    outside_bytes: int
    """Of what lies outside the decoder layers: embeddings, output head, towers."""

    @property
    def dense_bytes(self) -> int:
        """Of everything but routed experts."""
        inside = sum(one.num_bytes for layer in self.layers for one in layer if not one.is_expert)
        return inside + self.outside_bytes


def model_parameters(checkpoint: Checkpoint, *, sizes: ExpertSizes, layers: Iterable[int]) -> ModelParameters:
    """The parameters of one rank.

    Args:
        checkpoint: Headers of the model folder.
        sizes: Of its routed experts, for this tensor-parallel size.
        layers: Decoder indices of the rank's pipeline stage; dense layers too.
    """
    by_layer: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    stack, outside = _stack(checkpoint), 0
    for name, info in checkpoint.tensors.items():
        found = place(name)
        if found is not None and found.stack == stack:
            by_layer[found.layer][name.removeprefix(f"{stack}.{found.layer}.")] = info
        elif not DRAFT.search(name):
            outside += _outside_bytes(name, info, tp=sizes.tp)
    num_experts = sizes.identity.num_experts or 0
    row_bytes = dict(zip(sizes.identity.layers or (), sizes.row_bytes.tolist(), strict=True))
    made = (
        _layer(by_layer[layer], tp=sizes.tp, expert_bytes=row_bytes.get(layer, 0) * num_experts) for layer in layers
    )
    return ModelParameters(layers=tuple(made), outside_bytes=outside)


def _stack(checkpoint: Checkpoint) -> str | None:
    """The stack of layers that has most of the experts: the language model's."""
    found = (place(name) for name in checkpoint.tensors if not DRAFT.search(name))
    counts = Counter(one.stack for one in found if one and one.leaf and not OTHER_STACK.search(one.stack))
    return counts.most_common(1)[0][0] if counts else None


def _outside_bytes(name: str, info: TensorInfo, *, tp: int) -> int:
    is_cut = len(info.shape) == 2 and any(part in name for part in _VOCABULARY)
    return -(-info.nbytes // tp) if is_cut else info.nbytes


def _layer(tensors: Mapping[str, TensorInfo], *, tp: int, expert_bytes: int) -> tuple[Parameter, ...]:
    """One decoder layer. Args: tensors: by name inside of it."""
    experts: Counter[str] = Counter()
    dense: Counter[str] = Counter()
    for name, info in tensors.items():
        found = place(f"layers.0.{name}")
        if found is not None and found.role is not None and expert_bytes:
            experts[_expert_name(name, found)] += info.nbytes
        else:
            dense[_dense_name(name, siblings=tensors)] += _dense_bytes(name, info, tp=tp)
    made = [Parameter(name=name, num_bytes=num_bytes, is_expert=False) for name, num_bytes in dense.items()]
    made += _divided(experts, total=expert_bytes)
    return tuple(sorted(made, key=lambda one: (_turn(one.name), one.name if one.is_expert else "")))


def _divided(raw_bytes: Mapping[str, int], *, total: int) -> list[Parameter]:
    """Expert tensors, the bytes of all rows dealt out as the checkpoint's are."""
    left, left_raw, made = total, sum(raw_bytes.values()), []
    for name, raw in raw_bytes.items():
        mine = left * raw // left_raw if left_raw else 0
        left, left_raw = left - mine, left_raw - raw
        made.append(Parameter(name=name, num_bytes=mine, is_expert=True))
    return made


def _expert_name(name: str, found: Place) -> str:
    """vLLM's, of the tensor of all experts."""
    parent = name.split(".experts", maxsplit=1)[0] if ".experts" in name else name.rpartition(".")[0]
    kind = "w13" if found.role is not None and found.role.side == "up" else "w2"
    return f"{parent}.experts.routed_experts.{kind}_{found.suffix or 'weight'}"


def _dense_name(name: str, *, siblings: Mapping[str, TensorInfo]) -> str:
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    fused = _FUSED.get(projection, projection)
    if projection == _LATENT[0] and f"{parent}.{_LATENT[1]}.{kind}" in siblings:
        fused = _FUSED[_LATENT[1]]
    return ".".join(part for part in (parent, fused, kind) if part)


def _dense_bytes(name: str, info: TensorInfo, *, tp: int) -> int:
    module = name.rpartition(".")[0].rpartition(".")[2]
    return info.nbytes if len(info.shape) < 2 or module in _WHOLE else -(-info.nbytes // tp)


def _turn(name: str) -> tuple[int, int]:
    """When a module of the layer is made: attention, then the MLP (router, shared experts, experts), then norms."""
    first, *rest = name.split(".")
    if "norm" in first:
        return 3, 0
    if not any(part in first for part in ("mlp", "moe", "ffn", "feed_forward", "experts")):
        return 1, 0
    is_routed, is_shared = "routed_experts" in rest, any("shared" in part for part in rest)
    return 2, 2 if is_routed else int(is_shared)
