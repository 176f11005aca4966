"""Where a decoded token's time goes in a transformers model, by kind of module: hooks on a clock, nothing else.

Hooks cost time of their own, some microseconds each, so tokens are profiled after the timed ones and never among them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

Forward = Callable[[Sequence[int]], Any]


def profile(model: Any, forward: Forward, tokens: Sequence[int]) -> dict[str, float]:
    """Milliseconds per token by kind of module.

    Args:
        model: A transformers model.
        forward: Feeds it tokens.
        tokens: Fed one by one.

    Returns:
        experts (the routed ones, reads included), routers, linear (every other matrix: attention, shared experts, the
        head), norms, other (attention proper, rotations, caches, Python), whole.
    """
    spent: dict[str, float] = defaultdict(float)
    handles = [
        handle
        for name, module in model.named_modules()
        if (kind := _kind(name, module))
        for handle in _clocked(module, kind=kind, spent=spent)
    ]
    start = time.perf_counter()
    try:
        for token in tokens:
            forward([token])
    finally:
        for handle in handles:
            handle.remove()
    spent["whole"] = time.perf_counter() - start
    spent["other"] = spent["whole"] - sum(seconds for kind, seconds in spent.items() if kind != "whole")
    return {kind: round(seconds * 1e3 / len(tokens), 3) for kind, seconds in sorted(spent.items())}


def _kind(name: str, module: Any) -> str | None:
    """What a module's time is counted as; None for those that are only made of others."""
    import torch

    if name.endswith(".experts"):
        return "experts"
    if name.endswith("mlp.gate"):
        return "routers"
    if type(module).__name__.endswith("RMSNorm"):
        return "norms"
    return "linear" if isinstance(module, torch.nn.Linear) else None


def _clocked(module: Any, *, kind: str, spent: dict[str, float]) -> list[Any]:
    started: list[float] = []

    def before(*_: Any) -> None:
        started.append(time.perf_counter())

    def after(*_: Any) -> None:
        spent[kind] += time.perf_counter() - started.pop()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
