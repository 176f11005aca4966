"""Where a weight is made by create_weights, memory of ours is put behind it.

vLLM's methods ask torch for memory themselves. So the parameter's class, loader and attributes stay vLLM's, and no
full-size allocation ever happens.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

_MAKERS = frozenset({torch.empty, torch.zeros, torch.ones, torch.full})


class NewTensor(Protocol):
    """Gives memory for a weight."""

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor; None where torch's own shall do."""


class IntoRanges(TorchFunctionMode):
    """Answers torch.empty([R, ...]) and its like, as long as it is entered.

    Args:
        new_tensor: Asked for the memory of each.
        is_zero: Whether what it gives is zeros, which nobody need write then.
    """

    def __init__(self, new_tensor: NewTensor, *, is_zero: bool = False) -> None:
        super().__init__()
        self._new_tensor, self._is_zero = new_tensor, is_zero

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        asked = _asked_for(func, args, kwargs) if func in _MAKERS else None
        tensor = self._new_tensor(asked[0], dtype=asked[1]) if asked else None
        if tensor is None:
            return func(*args, **kwargs)
        if self._is_zero and func is torch.zeros:
            return tensor
        return _filled(tensor, func=func, args=args, kwargs=kwargs)


def _asked_for(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a tensor that is made in memory; None for one that holds nothing (meta)."""
    sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    is_shape = isinstance(sizes, tuple | list) and all(isinstance(size, int) for size in sizes)
    if not is_shape or torch.device(kwargs.get("device") or torch.get_default_device()).type == "meta":
        return None
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = torch.full((), _fill_value(args, kwargs)).dtype if func is torch.full else torch.get_default_dtype()
    return tuple(sizes), dtype


def _fill_value(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kwargs["fill_value"] if "fill_value" in kwargs else args[1]


def _filled(tensor: torch.Tensor, *, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The range with what the maker would have written, row by row."""
    values = {torch.zeros: 0, torch.ones: 1}
    value = _fill_value(args, kwargs) if func is torch.full else values.get(func)
    if value is not None:
        for row in tensor:
            row.fill_(value)
    return tensor
