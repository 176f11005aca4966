"""The fast kernel in a model's dense part: its plain linear layers, each shape proven before it serves.

A layer is changed by its class alone, one instance at a time: parameters, state_dict and tied weights are not touched, and
closing the model gives the class back. What has a class of its own (a router with a bare parameter, say) is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, SupportsIndex

import torch

from hotsplit.bank.kernels.fast_library import KINDS, Library
from hotsplit.bank.kernels.fast_linear import NativeLinear
from hotsplit.notices import Notice

_LEAST_BYTES: Final = 64 << 10
"""Of a weight: a smaller one lies in the processor's cache, and a call costs as much as its product."""
_NATIVE: Final = "_hotsplit_native"


class FastLinear(torch.nn.Linear):
    """A linear layer whose products of a few tokens are native; all else is torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name for it
        """One product.

        Args:
            input: Tokens, [..., inputs].
        """
        native: NativeLinear | None = self.__dict__.get(_NATIVE)
        if native is not None:
            weight, bias = self.weight, self.bias  # each takes torch longer to find than all that takes() asks
            if native.takes(input, weight=weight, bias=bias):
                return native(input, weight=weight, bias=bias)
        # Not super(): who has wrapped this method may call it when the class has been given back.
        return torch.nn.Linear.forward(self, input)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """A copy, or what a pickle brings back, is torch's own layer: native code is this process's.

        Args:
            protocol: Of the pickle.
        """
        state = {name: value for name, value in self.__dict__.items() if name != _NATIVE}
        return object.__new__, (torch.nn.Linear,), state


@dataclass(kw_only=True, slots=True)
class FastDense:
    """What was changed in a model, and what must be said about it."""

    layers: list[torch.nn.Linear] = field(default_factory=list)
    """That the native code serves."""
    notices: list[Notice] = field(default_factory=list)
    """Shapes that stay torch's."""
    share: float = 0.0
    """The largest share of the bound that an error took."""

    def close(self) -> None:
        """Give every layer its own class back; twice is harmless."""
        for layer in self.layers:
            kind: type = type(layer)
            if kind is FastLinear:  # else another library has given it one since
                layer.__class__ = torch.nn.Linear
            layer.__dict__.pop(_NATIVE, None)
        self.layers = []


def use_native_linears(model: Any, *, library: Library, least_bytes: int = _LEAST_BYTES) -> FastDense:
    """Have a model's large plain linear layers computed natively for a few tokens, where that is proven.

    Args:
        model: On the CPU.
        library: The native code.
        least_bytes: Of a weight that is worth it.
    """
    dense = FastDense()
    proven: dict[tuple[int, int, torch.dtype, bool], NativeLinear | None] = {}
    for layer in _candidates(model, least_bytes=least_bytes):
        key = (layer.out_features, layer.in_features, layer.weight.dtype, layer.bias is not None)
        if key not in proven:
            proven[key] = _proven(layer, library=library, dense=dense)
        native = proven[key]
        if native is not None:
            setattr(layer, _NATIVE, native)
            layer.__class__ = FastLinear
            dense.layers.append(layer)
    return dense


def _candidates(model: Any, *, least_bytes: int) -> Iterator[torch.nn.Linear]:
    """Linear layers of torch's own class and one type, as they were made."""
    for layer in model.modules():
        if type(layer) is not torch.nn.Linear or "forward" in layer.__dict__:
            continue
        weight = layer.weight
        bias: torch.Tensor | None = layer.bias  # torch's stubs say that there always is one
        is_plain = weight.is_contiguous() and weight.device.type == "cpu" and type(weight) is torch.nn.Parameter
        is_known = str(weight.dtype).removeprefix("torch.") in KINDS[:3] and (
            bias is None or bias.dtype == weight.dtype
        )
        if is_plain and is_known and weight.nbytes >= least_bytes:
            yield layer


def _proven(layer: torch.nn.Linear, *, library: Library, dense: FastDense) -> NativeLinear | None:
    native = NativeLinear(library, outputs=layer.out_features, inputs=layer.in_features, dtype=layer.weight.dtype)
    bias: torch.Tensor | None = layer.bias
    share = native.share_of_bound(weight=layer.weight.detach(), bias=None if bias is None else bias.detach())
    if share < 1:  # not NaN either
        dense.share = max(dense.share, share)
        return native
    what = f"linear layers {layer.out_features} x {layer.in_features} of {layer.weight.dtype}"
    text = f"{what} stay torch's: native results differ by {share:.3g} times what rounding explains"
    dense.notices.append(Notice(name="exact-instead", text=text, strict=False))
    return None
