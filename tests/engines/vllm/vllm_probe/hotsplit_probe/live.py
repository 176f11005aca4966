"""The only lines that know hotsplit's objects: what the probe reads of the running session."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def session() -> Any | None:
    """The worker's session; None in stock vLLM."""
    try:
        from hotsplit.engines.vllm import session as module
    except ImportError:
        return None
    return module.current()


def layers() -> list[Any]:
    """The expert modules by layer_id."""
    return list(session().layers)


def row_map(layer_id: int) -> torch.Tensor:
    """Row of every expert of a layer as it is now, [E], int64: the live tensor, not a copy."""
    return session().banks.router.row_map[layer_id]


def hot_mask() -> np.ndarray:
    """Which experts are hot now, [L, E], bool."""
    return session().banks.router.hot_mask()


def evict() -> None:
    """Push all cold pages out of memory."""
    session().banks.rows.evict()
