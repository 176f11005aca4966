"""The route op: opaque to torch.compile, which on a CPU traces through vLLM's MoE layers.

    topk_ids -> torch.ops.hotsplit.route(topk_ids, layer_name) -> row ids

Shapes: T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

Route = Callable[[torch.Tensor, str], torch.Tensor]


@cache
def define(route: Route) -> torch.library.Library:
    """Define the op, once per process.

    Args:
        route: Expert ids [T, K] and a layer's name to row ids [T, K] of the same dtype.

    Returns:
        The library, which must live as long as the op is used.
    """
    library = torch.library.Library("hotsplit", "DEF")
    library.define("route(Tensor topk_ids, str layer_name) -> Tensor")
    library.impl("route", route, "CompositeExplicitAutograd")
    torch.library.register_fake("hotsplit::route", _shape_of, lib=library)
    return library


def _shape_of(topk_ids: torch.Tensor, _layer_name: str) -> torch.Tensor:
    return torch.empty_like(topk_ids)
