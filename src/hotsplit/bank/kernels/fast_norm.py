"""RMSNorms by the fast kernel's native code, of any number of rows.

A RMSNorm is known by its arithmetic: which of three orders of rounding it has. The order fixes an interval for every
output, derived from the roundings of float32 in between; mostly that is one number of the tokens' type. What
has all its outputs inside computes this norm, be it the native code or a class of somebody else's.

Shapes: R rows, D their width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from hotsplit.bank.kernels.fast_library import KINDS, Library, parallel_function
from hotsplit.bank.kernels.plain_calls import is_its_bytes, only_computes

VARIANTS: Final = ("rounded first", "rounded last", "centered")
"""In the order of native/norms.c: round(weight * round(value)), round(weight * value), round((1 + weight) * value)."""
_UNIT: Final = torch.finfo(torch.float32).eps / 2
_TINY: Final = torch.finfo(torch.float32).tiny
_PROVEN_ROWS: Final = 12
_FEW: Final = 1 << 15
"""Numbers that one thread is done with before another has woken up."""
_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)
"""A subclass may have its numbers elsewhere."""


class Norm(ctypes.Structure):
    """One norm, as native/norms.c has it."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("token_kind", ctypes.c_int64),
        ("weight_kind", ctypes.c_int64),
        ("variant", ctypes.c_int64),
        ("path", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormForm:
    """What a norm computes."""

    width: int
    """D."""
    dtype: torch.dtype
    """Of tokens and outputs: one of the first three KINDS."""
    weight_dtype: torch.dtype
    """Of the weight, the same."""
    variant: str
    """One of VARIANTS."""
    epsilon: float
    """Added to the mean of squares."""


class NativeNorm:
    """The norms of one form.

    Args:
        library: The native code.
        form: What is computed.
        path: Of the library's paths; None for the best.
    """

    def __init__(self, library: Library, *, form: NormForm, path: str | None = None) -> None:
        self.form = form
        """What is computed."""
        self._norm = Norm(
            width=form.width,
            token_kind=_kind(form.dtype),
            weight_kind=_kind(form.weight_dtype),
            variant=VARIANTS.index(form.variant),
            path=len(library.paths) - 1 if path is None else library.paths.index(path),
            epsilon=form.epsilon,
        )
        self._call, self._address = library.norm, ctypes.addressof(self._norm)
        self._shape, self._dtype, self._weight_dtype = (form.width,), form.dtype, form.weight_dtype

    def takes(self, tokens: torch.Tensor, *, weight: torch.Tensor) -> bool:
        """Whether this call is one for the native code.

        Args:
            tokens: [..., D].
            weight: As it is now: a model may have been cast, moved or changed since it was loaded.
        """
        return (
            only_computes(tokens, weight)
            and type(tokens) is torch.Tensor
            and tokens.dtype is self._dtype
            and is_its_bytes(tokens)
            and tokens.shape[-1:] == self._shape
            and tokens.numel() > 0
            and self._reads(weight)
        )

    def _reads(self, weight: torch.Tensor) -> bool:
        """Whether a weight lies as the native code reads it: it looks at nothing but an address."""
        return (
            weight.dtype is self._weight_dtype
            and type(weight) in _PLAIN
            and is_its_bytes(weight)
            and weight.shape == self._shape
            and weight.is_contiguous()
        )

    def __call__(self, tokens: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
        """All rows' norms.

        Args:
            tokens: [..., D].
            weight: [D].

        Returns:
            [..., D], of the tokens' type.
        """
        tokens = tokens.contiguous()
        out = torch.empty_like(tokens)
        count = tokens.numel()
        num_threads, parallel = (1, 0) if count < _FEW else (torch.get_num_threads(), parallel_function())
        self._call(
            self._address,
            weight.data_ptr(),
            tokens.data_ptr(),
            count // self.form.width,
            out.data_ptr(),
            num_threads,
            parallel,
        )
        return out


def native_norm(
    library: Library, *, form: NormForm, stock: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[NativeNorm | None, bool]:
    """The native norm that computes what another one does, found and proven on random rows and a random weight.

    The rows' magnitudes are that of epsilon's root, one, and more, so that a wrong epsilon is found as well.

    Args:
        library: The native code.
        form: Of the other one; its variant is looked for.
        stock: The other one: tokens, [R, D], and weight, [D], to outputs, [R, D].

    Returns:
        The native norm; None where its results or the other one's are not explained. And whether the other one's are.
    """
    tokens, weight = _examples(form)
    theirs = stock(tokens, weight)
    is_like_tokens = theirs.dtype == form.dtype and theirs.shape == tokens.shape
    for variant in VARIANTS if is_like_tokens else ():
        known = replace(form, variant=variant)
        low, high = interval(tokens, weight=weight, form=known)
        if not is_inside(theirs, low=low, high=high):
            continue
        native = NativeNorm(library, form=known)
        one_by_one = torch.cat([native(row, weight=weight) for row in tokens.split(1)])
        mine = native(tokens, weight=weight)
        is_proven = torch.equal(mine, one_by_one) and is_inside(mine, low=low, high=high)
        return (native if is_proven else None), True
    return None, False


def interval(tokens: torch.Tensor, *, weight: torch.Tensor, form: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Between which numbers every output lies if nothing but float32 arithmetic and the form's roundings are in between.

    With u the unit roundoff of float32: D squares added in eight lanes or more, or in pairs, and divided, epsilon added to
    them, are (D / 8 + 8) u, of which the root leaves half; root, inverse (or a power, of two u) and product are 3 u, and
    with the weight, or one more, 2 u. The sum is doubled for what first order leaves out. Native code has sixteen lanes and
    torch has pairs of vectors; a class that adds one by one may fall out, and stays torch's.

    Args:
        tokens: [R, D].
        weight: [D].
        form: What is computed.

    Returns:
        Lowest and highest outputs, [R, D] each, of the form's type.
    """
    values = tokens.double()
    values = values / (values.square().mean(dim=-1, keepdim=True) + form.epsilon).sqrt()
    factor = weight.double() + (1 if form.variant == "centered" else 0)
    relative = (-(-form.width // 8) + 18) * _UNIT
    if form.variant == "rounded first":
        ends = [
            _rounded(values + sign * (relative * values.abs() + _TINY), dtype=form.dtype).double() * factor
            for sign in (-1, 1)
        ]
    else:
        values = values * factor
        ends = [values + sign * (relative * values.abs() + _TINY) for sign in (-1, 1)]
    return _rounded(torch.minimum(*ends), dtype=form.dtype), _rounded(torch.maximum(*ends), dtype=form.dtype)


def is_inside(outputs: torch.Tensor, *, low: torch.Tensor, high: torch.Tensor) -> bool:
    """Whether every output lies in its interval; what is no number does not.

    Args:
        outputs: [R, D].
        low: [R, D].
        high: [R, D].
    """
    return bool(((outputs >= low) & (outputs <= high)).all())


def _rounded(values: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """As float32 arithmetic rounds: to that first."""
    return values.float().to(dtype)


def _examples(form: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, [R, D], and a weight, [D], that tell all variants apart."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([form.epsilon**0.5 or 1.0, 1.0, 64.0]).repeat(_PROVEN_ROWS // 3)
    tokens = scales[:, None] * torch.randn(_PROVEN_ROWS, form.width, generator=generator, dtype=torch.float32)
    weight = 1 + 0.5 * torch.randn(form.width, generator=generator, dtype=torch.float32)
    return tokens.to(form.dtype), weight.to(form.weight_dtype)


def _kind(dtype: torch.dtype) -> int:
    return KINDS.index(str(dtype).removeprefix("torch."))
