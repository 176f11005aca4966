"""This machine's CPU: what load() decides and builds there; gpu.py has the same for a GPU.

Hot rows lie in an arena of private memory, cold ones stay in the checkpoint's own mapped files.

Shapes: D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hotsplit.bank.banks import Banks
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.index import CheckpointSource, ExpertsLayer
from hotsplit.engines.transformers.mathematics import Precision, expert_math, preparer, prove
from hotsplit.host.budget import default_hot_bytes
from hotsplit.notices import Notice
from hotsplit.plan.sizes import ExpertSizes


def idle_on_cpu(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on there.

    Args:
        config: Settings.
    """
    idle = {
        "numa_policy": "on a CPU rows lie in plain memory and mapped files",
        "bank_dir": "the transformers engine reads cold rows from the model's own files",
    }
    for name, reason in idle.items():
        if config.origin(name) != "default":
            text = f"{variable_name(name)} has no effect: {reason}"
            yield Notice(name="no-effect", text=text, strict=False)


def default_budget(sizes: ExpertSizes, *, config: HotsplitConfig) -> int:
    """Hot bytes where nobody says.

    Args:
        sizes: Of the model.
        config: Settings.
    """
    return default_hot_bytes(sizes, reserve_bytes=config.vram_reserve_bytes)


def teach(loaded: Any, *, banks: Banks, source: CheckpointSource) -> None:
    """Give every layer its mathematics; one proof per class of experts.

    Args:
        loaded: The model without experts.
        banks: Its rows.
        source: Where the experts lie.

    Raises:
        UnsupportedEngineError: A class of experts computes something that is not known here.
    """
    proven: dict[type, Precision] = {}
    for layer_id, layer in enumerate(source.layers):
        module = loaded.get_submodule(layer.path)
        prepare = preparer(layer, layout=source.layouts[layer_id], conversions=source.conversions)
        if type(module) not in proven:
            proven[type(module)] = prove(
                module,
                prepare=prepare,
                read=_reader(banks, layer_id),
                num_experts=source.num_experts,
                hidden_dim=_hidden_dim(module, layer=layer),
            )
        math = expert_math(
            module,
            layer=layer,
            prepare=prepare,
            precision=proven[type(module)],
            num_experts=source.num_experts,
        )
        banks.use_math(layer_id, math)
        _, dtype = next(iter(layer.parameters.values()))
        hooks.attach(module, banks=banks, layer_id=layer_id, dtype=dtype)


def _reader(banks: Banks, layer_id: int) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """An expert's stored tensors, wherever it lies."""
    row_map = banks.router.row_map[layer_id].tolist()
    return lambda expert: banks.rows.tensors(layer_id, row_map[expert])


def _hidden_dim(module: Any, *, layer: ExpertsLayer) -> int:
    """D, from the shape of the first projection."""
    shape, _ = layer.parameters["gate_up_proj" if module.has_gate else "up_proj"]
    return shape[1] if module.is_transposed else shape[2]
