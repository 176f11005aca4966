"""One layer's experts in their natural order, and what vLLM's own code makes of them.

Shapes: E experts, K top-k, T tokens, D model dim, N numbers of a row, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Copy:
    """An unpermuted copy of a layer.

    Args:
        layer: The experts module, whose per-expert tensors have R rows.
        apply: vLLM's own kernel call.
        row_map_E: Row of every expert, [E].
    """

    def __init__(self, layer: Any, *, apply: Callable[..., torch.Tensor], row_map_E: torch.Tensor) -> None:
        self._layer, self._apply = layer, apply
        self._rows = [rows_RN[row_map_E].clone() for rows_RN in layer.get_expert_weights()]
        per_row = {name: value for name, value in layer.named_parameters() if len(value) == layer.local_num_experts}
        self._has_biases = any(name.endswith("_bias") for name in per_row)
        self._stock = SimpleNamespace(
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=len(row_map_E),
            expert_map=None,
            **{name: value[row_map_E].clone() for name, value in per_row.items()},
        )

    def compute(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """The layer's output as stock vLLM computes it.

        Args:
            x: Hidden states, [T, D].
            topk_weights: Router weights, [T, K].
            topk_ids: Expert ids, [T, K].
        """
        if self._has_biases:
            raise NotImplementedError("a kernel keeps biases to itself: they cannot be handed to it per call")
        return self._apply(self._stock, x, topk_weights, topk_ids, None, None)

    def is_intact(self, row_map_E: torch.Tensor) -> bool:
        """Whether every expert's bytes are still what they were, wherever they lie by now.

        Args:
            row_map_E: Row of every expert now, [E].
        """
        pairs = zip(self._rows, self._layer.get_expert_weights(), strict=True)
        return all(same_bits(mine_EN, rows_RN[row_map_E]) for mine_EN, rows_RN in pairs)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit; a NaN equals itself, 0.0 is not -0.0.

    Args:
        one: Any tensor.
        other: Another.
    """
    same_form = one.shape == other.shape and one.dtype == other.dtype
    return same_form and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
