"""How a module of a class that is not ours gets a forward of ours: by a subclass of its own class, one instance at a time.

Parameters, state_dict and isinstance() stay what they were; a copy or a pickle has its own class again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, SupportsIndex

import torch

NATIVE: Final = "_hotsplit_native"
"""Attribute of a module: what its subclass's forward computes with."""
_OWN: Final = "_hotsplit_own_class"

Forward = Callable[..., Any]


def is_as_made(module: torch.nn.Module) -> bool:
    """Whether nobody has given a module another forward, this file neither.

    Args:
        module: Any.
    """
    return "forward" not in module.__dict__ and _OWN not in type(module).__dict__


def give(module: torch.nn.Module, *, native: object, served: Callable[[type[torch.nn.Module]], Forward]) -> None:
    """Have a module served by native code.

    Args:
        module: Whose class changes.
        native: What the forward finds as its attribute NATIVE.
        served: Makes that forward, for a class: one for all its instances.
    """
    setattr(module, NATIVE, native)
    own: Any = type(module)  # to mypy a class of modules is not hashable
    module.__class__ = _subclass(own, served)


def take_back(modules: Iterable[torch.nn.Module]) -> None:
    """Give modules their own class back; twice is harmless.

    Args:
        modules: That give() has changed.
    """
    for module in modules:
        own = type(module).__dict__.get(_OWN)
        if own is not None:  # else another library has given it one since
            module.__class__ = own
        module.__dict__.pop(NATIVE, None)


@functools.cache
def _subclass(own: Any, served: Callable[[type[torch.nn.Module]], Forward]) -> Any:
    def reduced(self: torch.nn.Module, _protocol: SupportsIndex) -> tuple[Any, ...]:
        """A copy, or what a pickle brings back, has its own class: native code is this process's."""
        state = {name: value for name, value in self.__dict__.items() if name != NATIVE}
        return object.__new__, (own,), state

    members = {
        "forward": functools.wraps(own.forward)(served(own)),
        "__reduce_ex__": reduced,
        _OWN: own,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    return type(own.__name__, (own,), members)
