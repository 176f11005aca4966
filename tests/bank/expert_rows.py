"""Experts in rows, for tests of the kernels that compute with them; what is nobody's row is poison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hotsplit.bank.kernels.reference import FP8, ExpertRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of one layer, by expert id."""

    tensors: dict[str, torch.Tensor]
    """By field of ExpertRows, [E, ...] each."""
    options: dict[str, Any]
    """The other fields."""

    @property
    def num_experts(self):
        """E."""
        return len(self.tensors["down"])

    def placed(self, row_map, *, num_rows, first_cold=0):
        """The experts in their rows; every other row is NaN."""
        tensors = {}
        for name, tensor in self.tensors.items():
            tensors[name] = torch.full((num_rows, *tensor.shape[1:]), float("nan")).to(tensor.dtype)
            tensors[name][list(row_map)] = tensor
        return ExpertRows(first_cold=first_cold, **tensors, **self.options)


def random_experts(
    *, num_experts=5, hidden_dim=64, inner_dim=32, dtype=torch.float32, block=None, has_bias=False, **options
):
    """Experts whose values neither grow nor vanish from the tokens to the outputs; with a block float8 and factors."""
    generator = torch.Generator().manual_seed(0)
    outputs = inner_dim * (2 if options.get("has_gate", True) else 1)
    shapes = {"up": (outputs, hidden_dim), "down": (hidden_dim, inner_dim)}
    tensors = {}
    for name, (rows, columns) in shapes.items():
        values = torch.randn(num_experts, rows, columns, generator=generator) / columns**0.5
        if block:
            # Odd magnitudes, so that no factor may be forgotten or applied to its neighbours.
            factors = torch.rand(num_experts, -(-rows // block), -(-columns // block), generator=generator) / 8 + 0.01
            tensors |= {name: (values * 8).to(FP8), f"{name}_scale": factors}
        else:
            tensors[name] = values.to(dtype)
        if has_bias:
            tensors[f"{name}_bias"] = (torch.randn(num_experts, rows, generator=generator) / 4).to(dtype)
    if block:
        options["scale_block"] = block
    return Experts(tensors=tensors, options=options)


def random_tokens(num_tokens, *, hidden_dim=64, top_k=3, num_experts=5, dtype=torch.float32, seed=1):
    """Tokens, expert ids without repetition, and routing weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_dim, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    return hidden, ids, torch.rand(num_tokens, top_k, generator=generator)
