"""Open a model: all its facts before anything heavy is loaded.

`folder + headers -> configuration -> empty model on the meta device -> where every expert lies -> runtime sizes`.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.index import CheckpointSource, find_experts, index_experts
from hotsplit.engines.transformers.resolve import model_class
from hotsplit.errors import CheckpointError, HotsplitError, UnsupportedEngineError
from hotsplit.plan.checkpoint import Checkpoint
from hotsplit.plan.sizes import ExpertSizes

_READABLE_QUANTISATIONS = ("fp8",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model's facts before anything heavy is loaded."""

    folder: Path
    """The model's."""
    config: Any
    """As transformers reads it."""
    model_class: type
    """That transformers loads it with."""
    source: CheckpointSource
    """Where every expert lies."""
    experts_classes: tuple[type, ...]
    """Classes of its experts modules."""
    sizes: ExpertSizes
    """With the rows as they are laid out here."""
    meta: Any
    """The model on the meta device, with all its parameters."""


def open_model(folder: Path, *, checkpoint: Checkpoint, sizes: ExpertSizes, kwargs: Mapping[str, Any]) -> Opened:
    """Build the model on the meta device and find every expert's bytes.

    Args:
        folder: The model's.
        checkpoint: Its headers.
        sizes: From those headers.
        kwargs: For transformers' from_pretrained.

    Raises:
        CheckpointError: Configuration and weights do not fit together.
        UnsupportedEngineError: The architecture or its quantisation cannot be served.
    """
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    hooks.register()
    with one_line(f"the configuration of {folder}"):
        config = transformers.AutoConfig.from_pretrained(folder, **trusted(kwargs))
    kind = model_class(config)
    quantisation = getattr(config, "quantization_config", None)
    method = None if quantisation is None else dict(quantisation).get("quant_method")
    if quantisation is not None and method not in _READABLE_QUANTISATIONS:
        raise UnsupportedEngineError(
            f"quantisation {method}",
            got="expert rows that the transformers engine cannot read",
            wanted="bf16, fp16, fp32 or block-FP8 experts",
            do="use an unquantised or FP8 checkpoint of this model",
        )
    quantizer = None
    if quantisation is not None:
        # Dense weights are dequantised at load, as stock does on a CPU, also where the machine has a GPU.
        config.quantization_config = quantisation = {**dict(quantisation), "dequantize": True}
        quantizer = AutoHfQuantizer.from_config(quantisation, pre_quantized=True)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "auto"))
    with one_line(f"the model that {folder / 'config.json'} describes"):
        meta = _meta_model(kind, config=config, dtype=dtype)
    layers = find_experts(meta)
    if not layers:
        raise UnsupportedEngineError(
            f"{kind.__name__}",
            got="no experts module that transformers lets others implement",
            wanted="an architecture whose experts use transformers' experts interface",
            do="run this model with stock transformers",
        )
    layers = [layer for layer in layers if layer.decoder_index in (sizes.identity.layers or ())]
    source = index_experts(checkpoint, model=meta, layers=layers, hf_quantizer=quantizer)
    classes = {type(meta.get_submodule(layer.path)) for layer in layers}
    return Opened(
        folder=folder,
        config=config,
        model_class=kind,
        source=source,
        experts_classes=tuple(classes),
        sizes=_runtime_sizes(sizes, source=source),
        meta=meta,
    )


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """What transformers raises on a folder that does not fit together is anything at all: say it in one line.

    Args:
        what: Was being made of the folder.
    """
    try:
        yield
    except (HotsplitError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            what,
            got=f"{type(error).__name__}: {lines[0][:300]}",
            wanted="a model that transformers loads",
            do="check config.json and the weights, or download the model again",
        ) from error


def trusted(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The argument of from_pretrained that reading a configuration takes as well.

    Args:
        kwargs: For from_pretrained.
    """
    return {name: kwargs[name] for name in ("trust_remote_code",) if name in kwargs}


def _meta_model(kind: Any, *, config: Any, dtype: Any) -> Any:
    """The model without storage, with the dtypes that a load would give it."""
    if dtype in ("auto", None):
        dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind._from_config(config, dtype=dtype)


def _runtime_sizes(sizes: ExpertSizes, *, source: CheckpointSource) -> ExpertSizes:
    """Sizes with the rows as they really are laid out, checked layer by layer against the headers."""
    layers = tuple(layer.decoder_index for layer in source.layers)
    if layers != sizes.identity.layers or source.num_experts != sizes.identity.num_experts:
        raise UnsupportedEngineError(
            "experts of the model",
            got=f"modules for layers {layers} with {source.num_experts} experts",
            wanted=f"layers {sizes.identity.layers} with {sizes.identity.num_experts}, as the checkpoint has",
            do="run this model with stock transformers",
        )
    rows_L = np.array([layout.num_bytes for layout in source.layouts], dtype=np.int64)
    return replace(sizes, row_bytes=rows_L)
