"""One layer of vLLM seen through one bank: the same class and settings, with one part of the rows in place of all.

A kernel takes weights from the layer, and scales, zero points and biases from its quantisation method, down to the
kernel objects that keep them. A view is a shallow copy of the layer in which every tensor of R rows is replaced, in each
of these places; what holds none is shared with the layer. It computes what the kernel computes for an expert-parallel
rank with these rows: the expert map says which they are.

    layer   w13_weight [R, ...]   quant_method -> moe_kernel -> ... -> w1_scale [R, ...]   _expert_map  None
    view    w13_weight [n, ...]   copies of those that hold one     -> w1_scale [n, ...]   _expert_map  [R], -1 elsewhere

Shapes: R rows of the layer, n rows of the bank.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Replace: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What stands for a tensor of R rows."""


def expert_map(first: int, past: int, *, num_rows: int, device: torch.device) -> torch.Tensor:
    """The map by which a kernel computes some rows alone.

    Args:
        first: The lowest of them.
        past: The one behind the highest.
        num_rows: R.
        device: Of the kernel.

    Returns:
        Row inside the bank by row of the layer, -1 for those that are not there, [R], int32.
    """
    map_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    map_R[first:past] = torch.arange(past - first, dtype=torch.int32, device=device)
    return map_R


def bank_view(module: Any, *, replace: Replace, num_rows: int, num_local: int, map_R: torch.Tensor | None) -> Any:
    """See a layer through a bank.

    Args:
        module: vLLM's experts module, post-processed.
        replace: What stands for its tensors of R rows; asked once for each.
        num_rows: R.
        num_local: Rows of what replace() gives.
        map_R: Expert map; None where the bank has all rows.

    Returns:
        A module of the same class, whose stock forward takes row ids of the layer. What is assigned to the layer from
        now on does not reach it.
    """
    made = _Remembered(replace, num_rows=num_rows)
    view = copy.copy(module)
    fields = vars(view)
    method = copied(module.quant_method, replace=made, num_rows=num_rows)
    for held in ("_parameters", "_buffers", "_modules"):
        fields[held] = {name: made(one) if _is_tensor(one) else one for name, one in vars(module)[held].items()}
    fields["_buffers"]["_expert_map"] = map_R
    # It may be a module itself, and then lies among those.
    (fields["_modules"] if "quant_method" in fields["_modules"] else fields)["quant_method"] = method
    fields |= {"global_num_experts": num_rows, "local_num_experts": num_local, "hotsplit_calls": None}
    return view


class BankTensors:
    """What stands for tensors of R rows in a bank: memory of its own for some, rows of the tensor itself for others.

    Args:
        first: The lowest row of the bank.
        past: The one behind its highest.
        apart: Contiguous tensors [R, row bytes], uint8, whose rows lie in another place, and that place, [n, row bytes].
    """

    def __init__(self, first: int, past: int, *, apart: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._first, self._past, self._apart = first, past, tuple(apart)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bank's rows of a tensor, with its dtype and strides.

        Args:
            tensor: [R, ...].
        """
        for whole_RB, part_NB in self._apart:
            offset = tensor.data_ptr() - whole_RB.data_ptr()
            if 0 <= offset < whole_RB.shape[1] and tensor.stride(0) * tensor.itemsize == whole_RB.shape[1]:
                shape = (self._past - self._first, *tensor.shape[1:])
                return part_NB.view(-1).view(tensor.dtype).as_strided(shape, tensor.stride(), offset // tensor.itemsize)
        return tensor[self._first : self._past]


def turned(tensor: torch.Tensor, *, first: int) -> torch.Tensor:
    """A copy whose rows begin with the bank's; the others follow, so that no row id of the layer points outside.

    Args:
        tensor: [R, ...].
        first: The lowest row of the bank.
    """
    if not tensor.stride(0):
        return tensor  # one row for all
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    made[: len(tensor) - first].copy_(tensor[first:])
    made[len(tensor) - first :].copy_(tensor[:first])
    return made


def copied(root: Any, *, replace: Replace, num_rows: int) -> Any:
    """Copy an object, and below it every object that leads to a tensor of R rows; all others are shared.

    Args:
        root: A quantisation method.
        replace: What stands for a tensor of R rows.
        num_rows: R.

    Returns:
        The copy; the object itself where it leads to none.
    """
    return _Copier(_holders(root, num_rows=num_rows), replace=replace).copy_of(root)


def held_by(root: Any, *, num_rows: int) -> list[str]:
    """Which attributes of an object lead to a tensor of R rows.

    Args:
        root: A quantisation method.
        num_rows: R.
    """
    holders = _holders(root, num_rows=num_rows)
    return [name for name, one in _attributes(root).items() if id(one) in holders or _has_rows(one, num_rows=num_rows)]


class _Remembered:
    """The same tensor gives the same replacement, wherever it is met; tensors of other shapes stay.

    Args:
        replace: What stands for a tensor of R rows.
        num_rows: R.
    """

    def __init__(self, replace: Replace, *, num_rows: int) -> None:
        self._replace, self._num_rows = replace, num_rows
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first keeps its id from being used again

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _has_rows(tensor, num_rows=self._num_rows):
            return tensor
        if id(tensor) not in self._made:
            made = self._replace(tensor.data)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=False)
                vars(made).update(vars(tensor))  # kernels read marks of their own there
            self._made[id(tensor)] = (tensor, made)
        return self._made[id(tensor)][1]


class _Copier:
    """Copies holders, each once, and before what they hold where that can be: it may lead back to them.

    Args:
        holders: By id: what leads to a tensor of R rows.
        replace: What stands for such a tensor.
    """

    def __init__(self, holders: Mapping[int, Any], *, replace: Replace) -> None:
        self._holders, self._replace = holders, replace
        self._copies: dict[int, Any] = {}

    def copy_of(self, value: Any) -> Any:
        """What stands for a value; the value itself where it is no holder."""
        if _is_tensor(value):
            return self._replace(value)
        if id(value) not in self._holders:
            return value
        if id(value) not in self._copies:
            self._copy(value)
        return self._copies[id(value)]

    def _copy(self, value: Any) -> None:
        copies, number = self._copies, id(value)
        if isinstance(value, types.MethodType):
            copies[number] = types.MethodType(value.__func__, self.copy_of(value.__self__))
        elif isinstance(value, tuple):
            parts = [self.copy_of(one) for one in value]
            copies[number] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif isinstance(value, list):
            copies[number] = items = list(value)
            items[:] = [self.copy_of(one) for one in value]
        elif isinstance(value, dict):
            copies[number] = entries = copy.copy(value)
            for key, one in value.items():
                entries[key] = self.copy_of(one)
        else:
            copies[number] = made = copy.copy(value)
            for name, one in _attributes(value).items():
                object.__setattr__(made, name, self.copy_of(one))  # frozen dataclasses too


def _holders(root: Any, *, num_rows: int) -> dict[int, Any]:
    """By id: all that leads from the root to a tensor of R rows."""
    parents: dict[int, list[Any]] = {}
    seen, waiting, reached = {id(root): root}, [root], []
    while waiting:
        value = waiting.pop()
        for child in _children(value, root=root):
            if _has_rows(child, num_rows=num_rows):
                reached.append(value)
            elif not _is_tensor(child):
                parents.setdefault(id(child), []).append(value)
                if id(child) not in seen:
                    seen[id(child)] = child
                    waiting.append(child)
    holders: dict[int, Any] = {}
    while reached:
        value = reached.pop()
        if id(value) not in holders:
            holders[id(value)] = value
            reached += parents.get(id(value), [])
    return holders


def _children(value: Any, *, root: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif value is root or not isinstance(value, _OPAQUE):
        yield from _attributes(value).values()


_OPAQUE = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, enum.Enum, torch.device)
"""What no tensor of a kernel lies behind, or another layer's."""


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object, with and without slots."""
    slots = (name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ())))
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_rows(value: Any, *, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows
