"""The fast kernel in a model's routers: logits are native for a few tokens, all else stays the router's own code.

Most routers hold a bare weight and call `linear(tokens, self.weight)`, some in float32. Their own forward runs here with a
stand-in for the module: it has the module's own state, and its weight is a tensor whose product is native. A weight that
forward widens to float32 first is not copied: the native code multiplies it as it is stored with tokens of float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hotsplit.bank.kernels.fast_library import KINDS, Library
from hotsplit.bank.kernels.fast_linear import MOST_ROWS, NativeLinear
from hotsplit.bank.kernels.plain_calls import only_computes
from hotsplit.engines.transformers.fast_classes import NATIVE, Forward, give, is_as_made, take_back
from hotsplit.notices import Notice

Products = Mapping[torch.dtype, NativeLinear]
"""By type of the tokens."""
_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)
"""A subclass may have its numbers elsewhere."""
_WIDENING: Final = (torch.Tensor.float, torch.Tensor.type, torch.Tensor.to)


@dataclass(kw_only=True, slots=True)
class FastRouters:
    """What was changed in a model, and what must be said about it."""

    routers: list[torch.nn.Module] = field(default_factory=list)
    """Whose logits are native."""
    notices: list[Notice] = field(default_factory=list)
    """Shapes that stay torch's."""
    share: float = 0.0
    """The largest share of the bound that an error took."""

    def close(self) -> None:
        """Give every router its own class back; twice is harmless."""
        take_back(self.routers)
        self.routers = []


def use_native_routers(model: Any, *, library: Library) -> FastRouters:
    """Have the logits of a model's routers computed natively for a few tokens, where that is proven.

    Args:
        model: On the CPU.
        library: The native code.
    """
    routers = FastRouters()
    proven: dict[tuple[int, int, torch.dtype, bool], Products] = {}
    for module in _candidates(model):
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if weight is None:
            continue
        key = (*weight.shape, weight.dtype, bias is not None)
        if key not in proven:
            proven[key] = _proven(weight.detach(), bias=bias, library=library, routers=routers)
        if proven[key]:
            give(module, native=proven[key], served=_served)
            routers.routers.append(module)
    return routers


def _candidates(model: Any) -> Iterator[torch.nn.Module]:
    """Modules of any class but torch's linear one, as they were made, that multiply a bare weight of their own."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or isinstance(module, torch.nn.Linear) or not is_as_made(module):
            continue
        is_plain = weight.is_contiguous() and weight.device.type == "cpu" and type(weight) is torch.nn.Parameter
        is_known = str(weight.dtype).removeprefix("torch.") in KINDS[:3]
        if is_plain and is_known and _multiplies(type(module).forward):
            yield module


@functools.cache
def _multiplies(forward: Forward) -> bool:
    """Whether a method calls something named linear, and has a weight."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"linear", "weight"} <= set(code.co_names)


def _proven(
    weight: torch.Tensor, *, bias: torch.Tensor | None, library: Library, routers: FastRouters
) -> dict[torch.dtype, NativeLinear]:
    """The products that are within their bound: with tokens of the weight's type, and of float32."""
    products = {}
    for dtype in dict.fromkeys((weight.dtype, torch.float32)):
        outputs, inputs = weight.shape
        native = NativeLinear(library, outputs=outputs, inputs=inputs, dtype=weight.dtype, token_dtype=dtype)
        share = native.share_of_bound(weight=weight, bias=None if bias is None else bias.detach())
        if share < 1:  # not NaN either
            routers.share = max(routers.share, share)
            products[dtype] = native
            continue
        what = f"logits of routers {outputs} x {inputs} of {weight.dtype} with tokens of {dtype}"
        text = f"{what} stay torch's: native results differ by {share:.3g} times what rounding explains"
        routers.notices.append(Notice(name="exact-instead", text=text, strict=False))
    return products


def _served(own: type[torch.nn.Module]) -> Forward:
    stand_in = type(own.__name__, (own,), {"weight": property(_weight)})

    def forward(self: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
        if NATIVE in self.__dict__ and inputs and _is_short(inputs[0], weight=self._parameters.get("weight")):
            # The same state, another class: whatever forward reads, calls or sets is the module's, but for its weight.
            passing: Any = object.__new__(stand_in)
            passing.__dict__ = self.__dict__
            return own.forward(passing, *inputs, **named)
        # Not super(): who has wrapped this method may call it when the class has been given back.
        return own.forward(self, *inputs, **named)

    return forward


def _weight(passing: torch.nn.Module) -> _Weight:
    state = passing.__dict__
    return _Weight.of(state["_parameters"]["weight"], products=state.get(NATIVE, {}))  # {}: closed by another thread


def _is_short(tokens: object, *, weight: torch.Tensor | None) -> bool:
    return (
        type(tokens) is torch.Tensor
        and weight is not None
        and type(weight) in _PLAIN
        and tokens.numel() <= MOST_ROWS * weight.shape[-1]
        and only_computes(tokens, weight)
    )


class _Weight(torch.Tensor):
    """A router's weight whose linear() is native; for everything else it is the tensor that it was made of."""

    _stands_for: tuple[torch.Tensor, Products, bool]
    """The weight as it is stored, products of it, and whether this passes for a copy in float32."""

    @classmethod
    def of(cls, plain: torch.Tensor, *, products: Products, is_widened: bool = False) -> _Weight:
        """Another name for the same numbers.

        Args:
            plain: The weight as it is stored.
            products: Of it.
            is_widened: Whether it passes for a copy in float32.
        """
        weight = plain.as_subclass(cls)
        weight._stands_for = (plain, products, is_widened)
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch asks before it computes anything with such a weight."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        if func in _WIDENING and not kwargs and args[1:] in {(), (torch.float32,)}:
            plain, products, _ = args[0]._stands_for
            if func is torch.Tensor.float or args[1:]:
                return cls.of(plain, products=products, is_widened=True)
        return func(*(_as_stored(arg) for arg in args), **{name: _as_stored(arg) for name, arg in kwargs.items()})


def _as_stored(value: Any) -> Any:
    """What a weight stands for, also in a list."""
    if isinstance(value, (list, tuple)):
        return type(value)([_as_stored(one) for one in value])
    if not isinstance(value, _Weight):
        return value
    plain, _, is_widened = value._stands_for
    return plain.float() if is_widened else plain


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if type(weight) is _Weight and type(tokens) is torch.Tensor:
        plain, products, is_widened = weight._stands_for
        native = products.get(tokens.dtype)
        is_fitting = tokens.dtype == (torch.float32 if is_widened else plain.dtype)
        if native is not None and is_fitting and native.takes(tokens, weight=plain, bias=bias):
            return native(tokens, weight=plain, bias=bias)
    return torch.nn.functional.linear(_as_stored(tokens), _as_stored(weight), _as_stored(bias))
