"""What routed experts weigh where there are no weights yet: from config.json alone.

Before the sizes, for `fit`: `config.json -> shapes and quantisation -> bytes`. The tensors of one expert are written
down as the checkpoint will have them, and then cut and summed like real ones. A quantisation that is not in the table is
refused, not guessed: headers tell the bytes of any.

    hidden 2048, expert hidden 768, bfloat16: gate and up [768, 2048], down [2048, 768] = 9,437,184 bytes
    the same, fp8 in blocks of 128 x 128: one byte each, and 3 x 6 x 16 scales of 4 bytes = 4,719,744 bytes

Shapes: D model dim, F expert hidden dim; L MoE layers.

Source: tensor names and shapes are those of published checkpoints of each method; none of their code was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotsplit.errors import CheckpointError
from hotsplit.plan.checkpoint import tensor_bytes
from hotsplit.plan.identity import MAX_CELLS, MAX_INTEGER, ModelIdentity
from hotsplit.plan.kinds import moe_layers
from hotsplit.plan.layouts import Place, language_config, model_facts, quantisation, shard_shape
from hotsplit.plan.sizes import ExpertSizes

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name inside the expert -> dtype and shape."""

_Method = Callable[["ExpertShape", Mapping[str, Any]], Tensors | None]
"""What an expert is stored as; None for a variant that is not known."""

_HIDDEN = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_MAX_LAYERS = 2**14
"""Decoder layers that a config may claim: a hundred times any model, and few enough to go through one by one."""
_WITH_BIAS = ("gpt_oss",)
"""Architectures whose experts have biases, which no field of their config says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """One routed expert, before it is quantised."""

    model_dim: int
    """D: the dimension that its projections read and write."""
    hidden_dim: int
    """F."""
    is_gated: bool = True
    """Whether it has a gate beside its up projection."""
    dtype: str = "BF16"
    """Type of what is not quantised, as safetensors spells it."""
    has_bias: bool = False
    """Whether its projections have biases."""

    @property
    def up_names(self) -> tuple[str, ...]:
        """Projections from D to F."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Output and input dimension of each projection."""
        up = dict.fromkeys(self.up_names, (self.hidden_dim, self.model_dim))
        return {**up, "down_proj": (self.model_dim, self.hidden_dim)}


def outline_sizes(config: Mapping[str, Any], *, tp: int, name: str, what: str) -> ExpertSizes:
    """Weigh the routed experts of a model by its config.

    Args:
        config: config.json.
        tp: Tensor-parallel size; rows are those of the widest rank.
        name: The model's name, for people.
        what: The file, for messages.

    Returns:
        Sizes without a headers hash; `dense_bytes` is 0, since nobody knows them here.

    Raises:
        CheckpointError: No model config; a dense model; a fact that config.json lacks, or a number that no model has; a
            quantisation that is not known here.
    """
    text, facts = language_config(config), model_facts(config)
    require_plausible(config, what=what)
    if facts.num_experts is None and not any(
        one.get(n) for one in (config, text) for n in ("model_type", "architectures")
    ):
        got = "a JSON object without model_type and architectures"
        raise CheckpointError(f"{what} is no model config", got=got, do="give the model's config.json, or its folder")
    if facts.num_experts is None:
        raise CheckpointError(
            f"{what} has no routed experts", got="a dense model", do="run this model without hotsplit"
        )
    missing = [key for key in ("top_k", "num_layers") if getattr(facts, key) is None]
    model_type = config.get("model_type")
    if missing or not isinstance(model_type, str):
        raise CheckpointError(what, got=f"no {(missing or ['model_type'])[0]}", do="give the whole config.json")
    layers = moe_layers(text)
    if not layers:
        raise CheckpointError(what, got="no layer with routed experts", do="check its schedule of MoE layers")
    row = expert_bytes(expert_tensors(config, what=what), tp=tp)
    if row * facts.num_experts * len(layers) > MAX_INTEGER:
        got = f"{len(layers)} layers x {facts.num_experts} experts x {row} bytes"
        raise CheckpointError(
            what, got=got, wanted=f"at most {MAX_INTEGER} bytes of experts", do="check its dimensions"
        )
    identity = ModelIdentity(model_type=model_type, layers=layers, num_experts=facts.num_experts, top_k=facts.top_k)
    return ExpertSizes(
        identity=identity,
        row_bytes=np.full(len(layers), row, dtype=np.int64),
        fixed_bytes=np.zeros(len(layers), dtype=np.int64),
        dense_bytes=0,
        headers_hash=None,
        name=name,
        quantisation=quantisation(config),
        num_decoder_layers=facts.num_layers,
        tp=tp,
    )


def require_plausible(config: Mapping[str, Any], *, what: str) -> None:
    """Refuse numbers that no model has before anything is computed with them.

    Args:
        config: config.json.
        what: The file, for messages.

    Raises:
        CheckpointError: An integer beyond what JSON parsers hold exactly; too many layers, or layers x experts.
    """
    open_values: list[tuple[str, Any]] = list(config.items())
    while open_values:
        name, value = open_values.pop()
        if isinstance(value, dict):
            open_values.extend(value.items())
        elif isinstance(value, list):
            open_values.extend((name, entry) for entry in value)
        elif type(value) is int and abs(value) > MAX_INTEGER:
            raise CheckpointError(f"{what}, {name}", got="an integer beyond 2^53", wanted=f"at most {MAX_INTEGER}")
    facts = model_facts(config)
    num_layers, num_experts = facts.num_layers or 0, facts.num_experts or 1
    if num_layers > _MAX_LAYERS:
        raise CheckpointError(what, got=f"{num_layers} layers", wanted=f"at most {_MAX_LAYERS}")
    if num_layers * num_experts > MAX_CELLS:
        got = f"{num_layers} layers x {num_experts} experts"
        raise CheckpointError(what, got=got, wanted=f"at most {MAX_CELLS} together")


def expert_bytes(tensors: Tensors, *, tp: int) -> int:
    """Bytes of one expert on the widest rank.

    Args:
        tensors: From `expert_tensors`.
        tp: Tensor-parallel size.
    """
    total = 0
    for leaf, (dtype, shape) in tensors.items():
        place = Place(stack="model.layers", layer=0, leaf=leaf, expert=0)
        total += tensor_bytes(dtype, shard_shape(shape, place=place, transposed=False, tp=tp))
    return total


def expert_tensors(config: Mapping[str, Any], *, what: str) -> Tensors:
    """The tensors of one routed expert.

    Args:
        config: config.json.
        what: The file, for messages.

    Raises:
        CheckpointError: A dimension that config.json lacks, or a quantisation that is not known here.
    """
    method = _method(config)
    shape = expert_shape(config, what=what)
    if not isinstance(method, dict):
        return _plain(shape, {})
    name = str(method.get("quant_method", method.get("quant_algo", ""))).lower()
    if name not in _METHODS or _spares_experts(method):
        got = f"quantisation {name!r}" + (" that leaves experts out" if name in _METHODS else "")
        known = ", ".join(_METHODS)
        raise CheckpointError(what, got=got, wanted=f"one of {known}", do="give the folder with safetensors headers")
    tensors = (_own_method(config) or _METHODS[name])(shape, method)
    if tensors is None:
        got = f"a variant of {name} that is not known here"
        raise CheckpointError(what, got=got, do="give the folder with safetensors headers")
    return tensors


def named_type(config: Mapping[str, Any]) -> str | None:
    """How a config says that routed experts are stored; None where they go the way of all weights.

    Three spellings: `expert_dtype` beside or inside the method (DeepSeek-V4), `moe_quant_algo` (its NVFP4 checkpoints),
    and `store_dtype` (MiMo-V2.6).

    Args:
        config: config.json.
    """
    text, method = language_config(config), _method(config)
    if not isinstance(method, dict):
        return None
    keys = ("moe_quant_algo", "expert_dtype", "store_dtype")
    named = [part.get(key) for key in keys for part in (method, text, config)]
    return next((str(value).lower() for value in named if isinstance(value, str)), None)


def expert_type(config: Mapping[str, Any]) -> str | None:
    """How routed experts are stored, by their config alone.

    Args:
        config: config.json.
    """
    named = named_type(config)
    is_v4 = isinstance(_method(config), dict) and str(config.get("model_type")).startswith("deepseek_v4")
    # fp4 is what vLLM 0.32 and DeepSeek's own code take where the config is silent
    return "fp4" if named is None and is_v4 else named


def _method(config: Mapping[str, Any]) -> object:
    """How all weights are quantised, as config.json has it."""
    return language_config(config).get("quantization_config") or config.get("quantization_config")


def _own_method(config: Mapping[str, Any]) -> _Method | None:
    """How to write such experts down. What is named and not known is no variant of anything: nothing is guessed."""
    own = expert_type(config)
    return None if own is None else _OWN_METHODS.get(own, lambda _shape, _method: None)


def expert_shape(config: Mapping[str, Any], *, what: str) -> ExpertShape:
    """One routed expert's dimensions.

    Args:
        config: config.json.
        what: The file, for messages.

    Raises:
        CheckpointError: One is missing.
    """
    text = language_config(config)
    hidden = next((size for key in _HIDDEN if (size := _size(text.get(key)))), None)
    model = _size(text.get("moe_latent_size")) or _size(text.get("hidden_size"))
    if hidden is None or model is None:
        wanted = " or ".join(_HIDDEN) if hidden is None else "hidden_size"
        raise CheckpointError(what, got="no dimension of its experts", wanted=wanted, do="give the whole config.json")
    dtype = next((c[n] for c in (text, config) for n in ("dtype", "torch_dtype") if isinstance(c.get(n), str)), None)
    if dtype not in _TYPES:
        raise CheckpointError(what, got=f"dtype {dtype!r}", wanted=f"one of {', '.join(_TYPES)}")
    activation = text.get("mlp_hidden_act") or text.get("hidden_act") or ""
    return ExpertShape(
        model_dim=model,
        hidden_dim=hidden,
        is_gated=not str(activation).startswith("relu2"),
        dtype=_TYPES[dtype],
        has_bias=str(text.get("model_type", "")).startswith(_WITH_BIAS),
    )


def _size(value: object) -> int | None:
    """A positive size; a list counts where its entries agree."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    return value if type(value) is int and value > 0 else None


def _spares_experts(method: Mapping[str, Any]) -> bool:
    """Whether routed experts are among what the method leaves out."""
    lists = [method.get(key) for key in ("ignore", "modules_to_not_convert")]
    spared = [entry for listed in lists if isinstance(listed, list) for entry in listed]
    routed = [str(entry) for entry in spared if "experts" in str(entry) and "shared_expert" not in str(entry)]
    return bool(routed)


def _plain(shape: ExpertShape, _method: Mapping[str, Any]) -> Tensors:
    """Not quantised."""
    weights: Tensors = {f"{name}.weight": (shape.dtype, dims) for name, dims in shape.projections.items()}
    return weights | _biases(shape)


def _biases(shape: ExpertShape) -> Tensors:
    if not shape.has_bias:
        return {}
    return {f"{name}.bias": (shape.dtype, (dims[0],)) for name, dims in shape.projections.items()}


def _fp8(shape: ExpertShape, method: Mapping[str, Any]) -> Tensors | None:
    """One byte per weight; float32 scales per block, or one per tensor."""
    block = method.get("weight_block_size")
    tensors: Tensors = {}
    for name, (rows, columns) in shape.projections.items():
        tensors[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        if isinstance(block, list) and len(block) == 2 and all(_size(side) for side in block):
            tensors[f"{name}.weight_scale_inv"] = ("F32", (-(-rows // block[0]), -(-columns // block[1])))
        elif block is None:
            tensors[f"{name}.weight_scale"] = ("F32", ())
        else:
            return None
    return tensors


def _mxfp4(shape: ExpertShape, _method: Mapping[str, Any]) -> Tensors:
    """Four bits per weight, one byte per block of 32."""
    tensors: Tensors = {}
    for name, (rows, columns) in shape.projections.items():
        tensors[f"{name}.weight_blocks"] = ("U8", (rows, columns // 32, 16))
        tensors[f"{name}.weight_scales"] = ("U8", (rows, columns // 32))
    return tensors | _biases(shape)


def _packed_integers(shape: ExpertShape, method: Mapping[str, Any], *, is_gptq: bool) -> Tensors | None:
    """GPTQ and AWQ: 32 // bits weights in an int32, float16 scales and zero points per group, stored [in, out]."""
    bits, group = _size(method.get("bits")), _size(method.get("group_size"))
    if bits not in (2, 4, 8) or group is None:
        return None
    tensors: Tensors = {}
    for name, (rows, columns) in shape.projections.items():
        packed = (columns * bits // 32, rows) if is_gptq else (columns, rows * bits // 32)
        tensors[f"{name}.qweight"] = ("I32", packed)
        tensors[f"{name}.scales"] = ("F16", (columns // group, rows))
        tensors[f"{name}.qzeros"] = ("I32", (columns // group, rows * bits // 32))
        if is_gptq:
            tensors[f"{name}.g_idx"] = ("I32", (columns,))
    return tensors


def _gptq(shape: ExpertShape, method: Mapping[str, Any]) -> Tensors | None:
    return _packed_integers(shape, method, is_gptq=True)


def _awq(shape: ExpertShape, method: Mapping[str, Any]) -> Tensors | None:
    return _packed_integers(shape, method, is_gptq=False)


def _modelopt(shape: ExpertShape, method: Mapping[str, Any]) -> Tensors | None:
    """NVFP4: four bits per weight, one byte per block of 16; or FP8 with one scale per tensor."""
    algorithm = str(method.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        scales: Tensors = {f"{name}.input_scale": ("F32", ()) for name in shape.projections}
        return (_fp8(shape, {}) or {}) | scales
    if algorithm != "NVFP4":
        return None
    tensors: Tensors = {}
    for name, (rows, columns) in shape.projections.items():
        tensors[f"{name}.weight"] = ("U8", (rows, columns // 2))
        tensors[f"{name}.weight_scale"] = ("F8_E4M3", (rows, columns // 16))
        tensors |= {f"{name}.{scale}": ("F32", ()) for scale in ("weight_scale_2", "input_scale")}
    return tensors


def _compressed_tensors(shape: ExpertShape, method: Mapping[str, Any]) -> Tensors | None:
    """One group of weights for all: packed integers, FP8 or NVFP4."""
    groups = method.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    form = str((group.get("format") if isinstance(group, dict) else None) or method.get("format", ""))
    bits, size = weights.get("num_bits"), _size(weights.get("group_size"))
    tensors: Tensors = {}
    for name, (rows, columns) in shape.projections.items():
        if form == "pack-quantized" and bits in (4, 8) and weights.get("symmetric", True) is True:
            tensors[f"{name}.weight_packed"] = ("I32", (rows, columns * bits // 32))
            tensors[f"{name}.weight_scale"] = (shape.dtype, (rows, columns // size if size else 1))
            tensors[f"{name}.weight_shape"] = ("I64", (2,))
        elif form == "float-quantized" and bits == 8 and weights.get("strategy") == "channel":
            tensors[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
            tensors[f"{name}.weight_scale"] = (shape.dtype, (rows, 1))
        elif form == "nvfp4-pack-quantized" and bits == 4 and size == 16:
            tensors[f"{name}.weight_packed"] = ("U8", (rows, columns // 2))
            tensors[f"{name}.weight_scale"] = ("F8_E4M3", (rows, columns // 16))
            tensors |= {f"{name}.{scale}": ("F32", (1,)) for scale in ("weight_global_scale", "input_global_scale")}
        else:
            return None
    return tensors


def _nvfp4(shape: ExpertShape, _method: Mapping[str, Any]) -> Tensors | None:
    return _modelopt(shape, {"quant_algo": "NVFP4"})


_METHODS: Mapping[str, _Method] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}
"""By quant_method; None for a variant that is not known."""
_OWN_METHODS: Mapping[str, _Method] = {"fp4": _mxfp4, "mxfp4": _mxfp4, "fp8": _fp8, "nvfp4": _nvfp4}
"""By what a config says of its routed experts alone."""
