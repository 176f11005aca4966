"""What checkpoints call routed experts: the names in config.json and of tensors, as tables.

Stands between the headers and the sizes: `checkpoint headers -> sizes -> plan`. A tensor's name says which decoder
layer it belongs to, which routed expert (or all of them, fused along a leading dimension), which side of the expert it
is, and how it is sharded. A new architecture is an entry in a table here.

    model.layers.3.mlp.experts.7.up_proj.weight      layer 3, expert 7, up side
    model.layers.3.mlp.experts.down_proj_scales      layer 3, all experts, down side
    model.layers.3.mlp.shared_experts.up_proj.weight no routed expert
    mtp.layers.0.mlp.experts.7.up_proj.weight        a draft layer's expert

Source: the names are those of the model classes and of the checkpoint conversion table in transformers 5.23
(Apache-2.0); only names were taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal configs keep the language model's; looked into one inside the other, innermost first."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
# NOTE: a bare "top_k" is not among them: in old configs it is the sampling parameter, 50 unless changed.
NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
LAYER_LISTS = ("layers_block_type", "layer_types")
"""A list with one entry per decoder layer, for configs without a number."""

DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|draft)[^.]*(?:\.|$)")
"""A module of a draft (multi-token prediction) head, by a part of its path."""
OTHER_STACK = re.compile(r"(?:^|\.)(?:vision|visual|audio|speech|talker)[^.]*(?:\.|$)")
"""A stack of layers that is not the language model's."""

_LAYER = re.compile(r"^(?P<stack>(?:.+?\.)?(?:layers|blocks|h|mtp\w*))\.(?P<layer>\d+)\.(?P<inner>.+)$")
_SHARED = re.compile(r"(?:^|\.)shared?_")
_EXPERT = re.compile(r"(?:^|\.)experts\.(?P<expert>\d+)\.(?P<leaf>.+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What a projection is to its expert."""

    side: str
    """"up" (its output dimension is the expert's hidden one, and sharded) or "down" (its input dimension is)."""
    parts: int = 1
    """2 where gate and up lie in one tensor, each of which is sharded by itself."""
    transposed: bool = False
    """Stored [in, out] whatever the shapes seem to say."""


ROLES: Mapping[str, Role] = {
    "gate_up_proj": Role(side="up", parts=2),
    "input_linear": Role(side="up", parts=2),
    "w13": Role(side="up", parts=2),
    "fc1": Role(side="up", parts=2),
    "gate_proj": Role(side="up"),
    "up_proj": Role(side="up"),
    "w1": Role(side="up"),
    "w3": Role(side="up"),
    "gate_and_up_projs": Role(side="up", transposed=True),
    "down_proj": Role(side="down"),
    "output_linear": Role(side="down"),
    "w2": Role(side="down"),
    "fc2": Role(side="down"),
    "down_projs": Role(side="down", transposed=True),
}
"""By the first word of the tensor's name inside the experts module."""

_PROJECTION = rf"(?P<role>{'|'.join(ROLES)})(?:[._](?P<suffix>.+))?"
_LEAF = re.compile(rf"^{_PROJECTION}$")
_FUSED = re.compile(rf"(?:^|\.)(?:experts|block_sparse_moe|moe)\.(?P<leaf>{_PROJECTION})$")

INPUT_FIRST = frozenset({"qweight", "qzeros", "scales", "g_idx", "weight_g_idx"})
"""Suffixes of one expert's GPTQ and AWQ tensors, which are stored [in, out]."""
OVER_INPUT = frozenset({"g_idx", "weight_g_idx"})
"""Suffixes of vectors that run over the input dimension; all other vectors run over the output."""
WHOLE = frozenset({"weight_shape"})
"""Suffixes of tensors that every rank keeps whole although they are no scalars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What config.json says of the routed experts."""

    num_experts: int | None
    """Routed experts per MoE layer; None in a dense model."""
    top_k: int | None
    """Experts chosen per token."""
    num_layers: int | None
    """Decoder layers, dense ones included, draft ones not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the model a tensor belongs."""

    stack: str
    """Module path of the stack of layers, "model.layers"."""
    layer: int
    """Index in the stack: the decoder index in the language model's."""
    leaf: str | None = None
    """Name inside the routed expert, "up_proj.weight"; None for what belongs to no routed expert."""
    expert: int | None = None
    """The routed expert; None for a tensor that holds all of them along its leading dimension."""

    @property
    def role(self) -> Role | None:
        """What the tensor is to its expert; None for a name that the table lacks: kept whole on every rank."""
        match = _LEAF.match(self.leaf or "")
        return ROLES[match["role"]] if match else None

    @property
    def suffix(self) -> str:
        """What follows the projection's name: "weight", "scales", or nothing."""
        match = _LEAF.match(self.leaf or "")
        return (match["suffix"] or "") if match else ""


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Read the numbers that describe routed experts under all the names in use.

    Args:
        config: config.json.

    >>> model_facts({"text_config": {"n_routed_experts": 64, "moe_topk": [6, 6], "num_hidden_layers": 2}})
    ModelFacts(num_experts=64, top_k=6, num_layers=2)
    """
    configs = [config]
    while inner := next((configs[0][name] for name in TEXT_CONFIGS if isinstance(configs[0].get(name), dict)), None):
        configs.insert(0, inner)
    num_layers = _number(configs, NUM_LAYERS)
    if num_layers is None:
        lists = [one.get(name) for one in configs for name in LAYER_LISTS]
        num_layers = next((len(value) for value in lists if isinstance(value, list) and value), None)
    return ModelFacts(num_experts=_number(configs, NUM_EXPERTS), top_k=_number(configs, TOP_K), num_layers=num_layers)


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: the innermost of those that multimodal configs nest.

    Args:
        config: config.json.

    >>> language_config({"model_type": "vlm", "text_config": {"num_hidden_layers": 2}})
    {'num_hidden_layers': 2}
    """
    inner = next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    return config if inner is None else language_config(inner)


def _number(configs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int | None:
    """The first positive integer under one of the names; a list counts where its entries agree."""
    for config in configs:
        for name in names:
            value = config.get(name)
            if isinstance(value, list) and value and all(entry == value[0] for entry in value):
                value = value[0]
            if type(value) is int and value > 0:
                return value
    return None


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The quantisation method as config.json names it, at the top or in the language model's part."""
    for one in [config, *(config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict))]:
        method = one.get("quantization_config") or {}
        for name in ("quant_method", "quant_algo"):
            if isinstance(method, dict) and isinstance(method.get(name), str):
                return str(method[name])
    return None


def place(name: str) -> Place | None:
    """Read a tensor's name.

    Args:
        name: As in the checkpoint.

    Returns:
        Where it belongs; None for a tensor outside any layer. Whether a tensor without an expert id really holds all
        experts is for its shape to say.

    >>> place("layers.3.ffn.experts.7.w1.scale")
    Place(stack='layers', layer=3, leaf='w1.scale', expert=7)
    >>> place("model.layers.3.mlp.shared_experts.up_proj.weight")
    Place(stack='model.layers', layer=3, leaf=None, expert=None)
    """
    match = _LAYER.match(name)
    if match is None:
        return None
    stack, layer, inner = match["stack"], int(match["layer"]), match["inner"]
    if _SHARED.search(inner):
        return Place(stack=stack, layer=layer)
    if single := _EXPERT.search(inner):
        return Place(stack=stack, layer=layer, leaf=single["leaf"], expert=int(single["expert"]))
    if fused := _FUSED.search(inner):
        return Place(stack=stack, layer=layer, leaf=fused["leaf"])
    return Place(stack=stack, layer=layer)


def shard_shape(shape: Sequence[int], *, place: Place, transposed: bool, tp: int) -> tuple[int, ...]:
    """The widest rank's shape of one expert's tensor.

    The up side is cut along its output dimension, the down side along its input dimension, in whole elements; block scales,
    group scales and packed integers are cut as many times. What does not have that dimension (a down bias, a scale
    per tensor) is kept whole.

    Args:
        shape: Of one expert's tensor, without the experts dimension.
        place: What the tensor is.
        transposed: Whether the fused tensors of this layer are stored [in, out].
        tp: Tensor-parallel size.
    """
    dim = _sharded_dim(len(shape), place=place, transposed=transposed)
    role = place.role
    if dim is None or role is None:
        return tuple(shape)
    size = shape[dim]
    part = -(-size // role.parts)
    widest = min(size, role.parts * -(-part // tp))
    return (*shape[:dim], widest, *shape[dim + 1 :])


def _sharded_dim(rank: int, *, place: Place, transposed: bool) -> int | None:
    role, suffix = place.role, place.suffix
    if role is None or rank == 0 or suffix in WHOLE:
        return None
    if rank == 1:
        runs_over = "down" if suffix in OVER_INPUT else "up"
        return 0 if role.side == runs_over else None
    input_first = suffix in INPUT_FIRST if place.expert is not None else transposed or role.transposed
    return int(input_first) if role.side == "up" else int(not input_first)
