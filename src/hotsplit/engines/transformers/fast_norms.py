"""The fast kernel in a model's RMSNorms, each proven to compute what its own class does before it serves.

Every model file of transformers has a class of its own for them. They are known by what they are: one parameter, a
vector called weight; an epsilon; and results that native/norms.c has too. A module is changed by its class alone, to a
subclass of its own, and closing the model gives its own back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hotsplit.bank.kernels.fast_library import KINDS, Library
from hotsplit.bank.kernels.fast_norm import NativeNorm, NormForm, native_norm
from hotsplit.engines.transformers.fast_classes import NATIVE, Forward, give, is_as_made, take_back
from hotsplit.notices import Notice

_EPSILONS: Final = ("variance_epsilon", "eps")
"""What the classes of transformers and torch call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """What a module's forward computes with."""

    norm: NativeNorm
    """Proven."""
    epsilon_name: str
    """Attribute that was read for it; another value now is torch's."""


@dataclass(kw_only=True, slots=True)
class FastNorms:
    """What was changed in a model, and what must be said about it."""

    norms: list[torch.nn.Module] = field(default_factory=list)
    """That the native code serves."""
    notices: list[Notice] = field(default_factory=list)
    """Classes that stay torch's though their arithmetic is known."""

    def close(self) -> None:
        """Give every norm its own class back; twice is harmless."""
        take_back(self.norms)
        self.norms = []


def use_native_norms(model: Any, *, library: Library) -> FastNorms:
    """Have a model's RMSNorms computed natively, where that is proven.

    Args:
        model: On the CPU.
        library: The native code.
    """
    norms = FastNorms()
    proven: dict[tuple[object, ...], NativeNorm | None] = {}
    refused: set[type] = set()
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    for module in _candidates(model):
        form = _form(module, dtype=dtype)
        if form is None:
            continue
        key = (type(module), form, _settings(module))
        if key not in proven:
            proven[key], is_known = _proven(module, form=form, library=library)
            if is_known and proven[key] is None and type(module) not in refused:
                refused.add(type(module))
                norms.notices.append(_refusal(module, form=form))
        native = proven[key]
        if native is not None:
            give(module, native=_Served(norm=native, epsilon_name=_epsilon_names(module)[0]), served=_served)
            norms.norms.append(module)
    return norms


def _candidates(model: Any) -> Iterator[torch.nn.Module]:
    """Modules that hold one parameter and an epsilon, as they were made, and are called with one tensor."""
    for module in model.modules():
        names = [name for name, _ in module.named_parameters()]
        is_bare = names == ["weight"] and next(module.buffers(), None) is None
        if is_bare and is_as_made(module) and len(_epsilon_names(module)) == 1 and _takes_one(type(module).forward):
            yield module


def _epsilon_names(module: torch.nn.Module) -> list[str]:
    return [name for name in _EPSILONS if isinstance(module.__dict__.get(name), float)]


@functools.cache
def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether a method can do with one tensor: a gated norm cannot."""
    wanted = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
    return len([p for p in wanted if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]) == 2


def _form(module: torch.nn.Module, *, dtype: torch.dtype) -> NormForm | None:
    """What a norm of tokens of a type is, as far as it can be seen; the variant is still open."""
    weight, (name,) = module._parameters.get("weight"), _epsilon_names(module)
    if weight is None or weight.ndim != 1 or not module.__dict__[name] >= 0:
        return None
    is_plain = weight.is_contiguous() and weight.device.type == "cpu" and type(weight) is torch.nn.Parameter
    if not is_plain or any(str(one).removeprefix("torch.") not in KINDS[:3] for one in (dtype, weight.dtype)):
        return None
    return NormForm(
        width=weight.shape[0],
        dtype=dtype,
        weight_dtype=weight.dtype,
        variant="",
        epsilon=module.__dict__[name],
    )


def _settings(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """Whatever else a norm's results may depend on."""
    return tuple((name, repr(value)) for name, value in sorted(vars(module).items()) if not name.startswith("_"))


def _proven(module: torch.nn.Module, *, form: NormForm, library: Library) -> tuple[NativeNorm | None, bool]:
    """The native norm, and whether the module is a RMSNorm of a known kind at all."""

    def stock(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(module, {"weight": weight}, (tokens,))
        return outputs if isinstance(outputs, torch.Tensor) else torch.empty(0)

    try:
        with torch.no_grad():
            return native_norm(library, form=form, stock=stock)
    except (RuntimeError, TypeError, ValueError, IndexError):  # a module that wants something else than rows
        return None, False


def _refusal(module: torch.nn.Module, *, form: NormForm) -> Notice:
    what = f"norms of {type(module).__name__}, {form.width} wide, of {form.dtype}"
    text = f"{what} stay torch's: native results differ by more than rounding explains"
    return Notice(name="exact-instead", text=text, strict=False)


def _served(own: type[torch.nn.Module]) -> Forward:
    def forward(self: torch.nn.Module, *tokens: Any, **others: Any) -> Any:
        served: _Served | None = self.__dict__.get(NATIVE)
        if served is not None and len(tokens) == 1 and not others:
            norm, weight = served.norm, self._parameters.get("weight")
            is_as_proven = self.__dict__.get(served.epsilon_name) == norm.form.epsilon
            if is_as_proven and weight is not None and norm.takes(tokens[0], weight=weight):
                return norm(tokens[0], weight=weight)
        # Not super(): who has wrapped this method may call it when the class has been given back.
        return own.forward(self, *tokens, **others)

    return forward
