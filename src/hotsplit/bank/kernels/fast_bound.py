"""How far the fast kernel may be from the exact result: derived from its arithmetic, in float64, not chosen.

To first order in the unit roundoffs of float32 (products and sums, in any order) and of the tokens' type (inner values
and outputs), with magnitudes summed where signs are not known, times two for what first order leaves out. Numbers below
the smallest normal one may be taken as zero, so each product adds that much for either factor.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1, for the error of a dot product.

Shapes: T tokens, D model dim, F expert hidden dim, O outputs of a projection, C its inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from hotsplit.bank.kernels.reference import Inner, activated

_UNIT: Final = torch.finfo(torch.float32).eps / 2
_TINY: Final = torch.finfo(torch.float32).tiny
_VALUE: Final = 16
"""Unit roundoffs of an activation and its product with the other value, relative to them."""
_ARGUMENT: Final = 8
"""The same relative to the gate: where an exponential nearly cancels, its argument's rounding remains."""

Fields = Mapping[str, torch.Tensor]
"""One expert in float64: up [2 * F or F, D], gate before other, down [D, F], up_bias, down_bias."""


def output_and_bound(
    tokens: torch.Tensor, *, experts: Iterable[tuple[Fields, torch.Tensor]], inner: Inner, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts give together, and how far from it the fast kernel may be.

    Args:
        tokens: [T, D], float64, values of the tokens' type.
        experts: Each with its routing weight for every token, [T], float64; 0 where a token does not go there.
        inner: What lies between the projections.
        dtype: Of the tokens.

    Returns:
        Outputs and bounds, [T, D] each, float64.
    """
    unit, step = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    output, error, magnitude = (torch.zeros_like(tokens) for _ in range(3))
    num_experts = 0
    for fields, weights_T in experts:
        one, its_error, its_magnitude = _expert(fields, tokens=tokens, inner=inner, unit=unit, step=step)
        output += weights_T[:, None] * one
        error += weights_T.abs()[:, None] * its_error
        magnitude += weights_T.abs()[:, None] * its_magnitude
        num_experts += 1
    return output, 2 * (error + (unit + (num_experts + 1) * _UNIT) * magnitude + step + num_experts * _TINY)


def linear_and_bound(
    tokens: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one projection gives, and how far from it the native code may be.

    Args:
        tokens: [T, C], float64, values of the tokens' type.
        weight: [O, C], float64.
        bias: [O], float64; None for none.
        dtype: Of the tokens, and of the outputs.

    Returns:
        Outputs and bounds, [T, O] each, float64.
    """
    unit, step = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    output, error, magnitude = _projected(tokens, weight=weight, bias=bias)
    return output, 2 * (error + unit * magnitude + step)


def _expert(
    fields: Fields, *, tokens: torch.Tensor, inner: Inner, unit: float, step: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One expert's outputs, their first-order error, and their magnitude with all signs alike, [T, D] each."""
    products, moves, _ = _projected(tokens, weight=fields["up"], bias=fields.get("up_bias"))
    values = activated(products, rows=inner)
    moved = _moved(products, moves=moves, values=values, inner=inner)
    values_error = moved + (unit + _VALUE * _UNIT) * values.abs() + step
    values_error += _ARGUMENT * _UNIT * _arguments(products, inner=inner)
    outputs, own_error, magnitude = _projected(values, weight=fields["down"], bias=fields.get("down_bias"))
    return outputs, values_error @ fields["down"].abs().T + own_error, magnitude


def _projected(
    values: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A projection's outputs, their error, and their magnitude, [T, O] each."""
    num_inputs = weight.shape[1]
    products, sizes = values @ weight.T, values.abs() @ weight.abs().T
    if bias is not None:
        products, sizes = products + bias, sizes + bias.abs()
    lost = values.abs().sum(dim=1, keepdim=True) + weight.abs().sum(dim=1) + num_inputs
    return products, (num_inputs + 2) * _UNIT * sizes + _TINY * lost, sizes


def _moved(products: torch.Tensor, *, moves: torch.Tensor, values: torch.Tensor, inner: Inner) -> torch.Tensor:
    """How far inner values go when their products move, in every combination of directions."""
    moved = torch.zeros_like(values)
    for signs in itertools.product((-1.0, 1.0), repeat=2 if inner.has_gate else 1):
        sign = torch.tensor(signs, dtype=torch.float64).repeat_interleave(values.shape[1])
        moved = torch.maximum(moved, (activated(products + sign * moves, rows=inner) - values).abs())
    return moved


def _arguments(products: torch.Tensor, *, inner: Inner) -> torch.Tensor:
    """What an error of the activation, relative to its argument, is multiplied with."""
    if not inner.has_gate:
        return products.abs()
    gate, other = products.chunk(2, dim=-1)
    if inner.gate_limit is not None:
        gate, other = gate.clamp(max=inner.gate_limit), other.clamp(min=-inner.gate_limit, max=inner.gate_limit)
    return gate.abs() * (other + inner.gate_shift).abs()
