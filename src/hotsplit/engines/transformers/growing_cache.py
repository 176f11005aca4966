"""A cache of keys and values that grows in place: a token is written behind the others, and they are not copied for it.

transformers' own layer makes a new tensor of all tokens for every step. Here a layer that is grown twice in a row, and that
nobody has touched between, gets room behind its tokens; `keys` and `values` are views of what is filled, the same numbers.
Whatever else happens to it (cropped, reordered, repeated, assigned, copied) makes other tensors of them, and those are
grown as transformers does: a view that somebody holds never changes.

Shapes: B batch, G heads of keys and values, S tokens.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex

import torch
from transformers.cache_utils import DynamicLayer

_FACTOR: Final = 1.25
_MORE: Final = 64
"""Tokens of room: a copy of all of them is worth a quarter of as many that come, and a few."""
_ROOM: Final = "_hotsplit_room"


@dataclass(kw_only=True, slots=True)
class _Half:
    """A layer's keys or its values, as they were given out last."""

    tensor: weakref.ref[torch.Tensor]
    """Themselves: the layer alone holds them."""
    place: int
    """Their address."""
    shape: torch.Size
    """Their shape."""
    room: int
    """Tokens that there is room for, those that are there included."""

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether this is that tensor, as it was, and may be written behind."""
        return (
            self.tensor() is tensor
            and self.place == tensor.data_ptr()
            and self.shape == tensor.shape
            and (torch.is_inference_mode_enabled() or not tensor.is_inference())
        )

    def grown(self, states: torch.Tensor, *, behind: torch.Tensor) -> torch.Tensor:
        """All tokens, and this is what was given out."""
        num_old, num_new = self.shape[-2], states.shape[-2]
        shape = (*self.shape[:-2], num_old + num_new, self.shape[-1])
        if num_old + num_new <= self.room:
            whole = behind.as_strided(shape, behind.stride())
        else:
            self.room = int(_FACTOR * (num_old + num_new)) + _MORE
            buffer = behind.new_empty((*self.shape[:-2], self.room, self.shape[-1]))
            whole = buffer.narrow(-2, 0, num_old + num_new)
            whole.narrow(-2, 0, num_old).copy_(behind)
        whole.narrow(-2, num_old, num_new).copy_(states)
        self.tensor, self.place, self.shape = weakref.ref(whole), whole.data_ptr(), whole.shape
        return whole


class GrowingLayer(DynamicLayer):
    """A layer of a cache that keeps room for the tokens that come; grow_in_place() makes one of transformers' own."""

    _layer_type = None  # it is nobody's default

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer with some more tokens.

        Args:
            key_states: Their keys, [B, G, T, K].
            value_states: Their values, [B, G, T, V].
            *args: Not used, by transformers' own layer neither.
            **kwargs: The same.

        Returns:
            All keys and all values.
        """
        if not _is_free():
            return DynamicLayer.update(self, key_states, value_states, *args, **kwargs)
        # Taken first: what breaks off leaves no room behind.
        owner, of_keys, of_values = self.__dict__.pop(_ROOM, (None, None, None))
        keys, values = self.keys, self.values
        if (
            owner is not None
            and owner() is self  # else these are another layer's attributes
            and keys is not None
            and values is not None
            and of_keys.is_still(keys)
            and of_values.is_still(values)
            and _follows(key_states, behind=keys)
            and _follows(value_states, behind=values)
        ):
            self.keys = keys = of_keys.grown(key_states, behind=keys)
            self.values = values = of_values.grown(value_states, behind=values)
            self.__dict__[_ROOM] = (owner, of_keys, of_values)
        else:
            keys, values = DynamicLayer.update(self, key_states, value_states, *args, **kwargs)
            if _is_plain(keys) and _is_plain(values):
                self.__dict__[_ROOM] = (weakref.ref(self), _half(keys), _half(values))
        return keys, values

    def __copy__(self) -> DynamicLayer:
        """Transformers' own layer with the same tensors."""
        layer = object.__new__(DynamicLayer)
        layer.__dict__.update(_without_room(self))
        return layer

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """A deep copy, or what a pickle brings back, is transformers' own layer, without the room.

        Args:
            protocol: Of the pickle.
        """
        state = _without_room(self)
        for name in ("keys", "values"):
            tensor = state.get(name)
            if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
                state[name] = tensor.clone(memory_format=torch.contiguous_format)
        return object.__new__, (DynamicLayer,), state


def grow_in_place(cache: Any) -> None:
    """Have the layers of a cache grow in place that are plainly transformers' own.

    Args:
        cache: Of a step, on the CPU; any other object has no such layers.
    """
    layers = getattr(cache, "layers", None)
    for layer in layers if isinstance(layers, list) else ():
        if type(layer) is DynamicLayer:
            layer.__class__ = GrowingLayer


def _without_room(layer: GrowingLayer) -> dict[str, Any]:
    return {name: value for name, value in layer.__dict__.items() if name != _ROOM}


def _half(tensor: torch.Tensor) -> _Half:
    """What transformers' own layer has made, without room."""
    return _Half(tensor=weakref.ref(tensor), place=tensor.data_ptr(), shape=tensor.shape, room=tensor.shape[-2])


def _is_free() -> bool:
    """Whether what is written behind a tensor's tokens is nobody's business: no graph knows of it."""
    return (
        not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie on the CPU, where it says."""
    return type(tensor) is torch.Tensor and tensor.is_cpu


def _follows(states: torch.Tensor, *, behind: torch.Tensor) -> bool:
    """Whether new tokens are of the same kind as those that are there."""
    return (
        _is_plain(states)
        and states.dtype == behind.dtype
        and states.shape[:-2] == behind.shape[:-2]
        and states.shape[-1] == behind.shape[-1]
    )
