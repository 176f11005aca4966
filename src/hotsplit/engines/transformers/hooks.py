"""What happens in every experts module: transformers calls the function that is registered under the name "hotsplit".

Shapes: T tokens, K top-k, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch

from hotsplit.bank.banks import EngineBanks
from hotsplit.errors import EngineError

NAME = "hotsplit"
"""Of our experts implementation."""

_ATTRIBUTE = "_hotsplit"


def register() -> None:
    """Make the experts implementation known to transformers; again is harmless."""
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, experts_forward)


def attach(module: Any, *, banks: EngineBanks, layer_id: int, dtype: torch.dtype) -> None:
    """Tie an experts module to its layer of the banks.

    Args:
        module: The experts module.
        banks: All layers' rows.
        layer_id: Its ordinal.
        dtype: What its experts compute with.
    """
    setattr(module, _ATTRIBUTE, (banks, layer_id, dtype))


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts of one layer (what transformers calls an experts implementation).

    Args:
        module: The experts module.
        hidden_states: Tokens, [T, D].
        top_k_index: Expert ids, [T, K], int64.
        top_k_weights: Router weights, [T, K].

    Raises:
        EngineError: The module has no banks, gradients are wanted, or the model was moved or cast.
    """
    attached = getattr(module, _ATTRIBUTE, None)
    if attached is None:
        raise EngineError(
            f"{type(module).__name__}", got="no hotsplit banks", do="load the model with hotsplit.load(...)"
        )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise EngineError("hotsplit models only infer", got="a forward that wants gradients", do="use torch.no_grad()")
    banks, layer_id, dtype = attached
    if hidden_states.device != banks.device:
        place = "the CPU" if banks.device.type == "cpu" else str(banks.device)
        raise EngineError(
            f"hotsplit's rows lie on {place}", got=f"tokens on {hidden_states.device}", do="do not move the model"
        )
    # On a CPU each expert converts its tokens, as the stock loop would; a GPU's kernels are of one type.
    is_converted = banks.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if hidden_states.dtype != dtype and not is_converted:
        raise EngineError(
            f"experts of {dtype}",
            got=f"tokens of {hidden_states.dtype}",
            do="pass model_kwargs={'dtype': ...} to load()",
        )
    output: torch.Tensor = banks.forward(layer_id, hidden_states, topk_ids=top_k_index, topk_weights=top_k_weights)
    return output
