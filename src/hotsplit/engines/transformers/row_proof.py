"""Proof that a GPU's rows and kernels compute what the stock module computes, on real rows, before the first step.

    checkpoint -> stock module's own loop, in float64           the truth, nothing of ours in it
    checkpoint -> converted -> kernels, in float32              the mathematics: tells a factor of 1.0001 from 1
    device rows -> kernels, in the type that serves             the rows: layout, factors, biases, types, one token and many

Both must lie within an error bound that is derived, not chosen: to first order in the unit roundoffs of the products
(float32) and of the tokens' type, with magnitudes summed where signs are not known, times two for what first order
leaves out. Where one does not, the model is refused: a wrong expert would be silently wrong.

Shapes: T tokens, K top-k, D model dim, I expert hidden dim, O outputs of the first projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from hotsplit.bank.device_banks import ExpertsKernel
from hotsplit.bank.kernels.reference import ExpertRows, activated
from hotsplit.bank.row_format import RowFormat, Tensors
from hotsplit.engines.transformers.mathematics import Prepare, stock_forward
from hotsplit.engines.transformers.row_forms import gate_of
from hotsplit.errors import UnsupportedEngineError

_NUM_TOKENS: Final = 8
_FLOAT32: Final = torch.finfo(torch.float32).eps / 2
"""Unit roundoff of the kernels' products and sums."""
_ACTIVATION: Final = 16
"""Unit roundoffs that a kernel's fast exponential may take, relative to the activation's value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One class of experts, with what is needed to look at a few of its rows."""

    module: Any
    """The experts module, its class's own forward intact."""
    form: RowFormat
    """How the kernels have its rows."""
    prepare: Prepare
    """From a stored row to the module's parameters, exactly: factors applied in float32."""
    stored: Callable[[int], Tensors]
    """An expert's tensors as the checkpoint has them."""
    on_device: Callable[[int], Tensors]
    """An expert's tensors as the device has them, on the CPU."""
    num_experts: int
    """E."""
    dtype: torch.dtype
    """Of the tokens."""


def prove_rows(subject: Subject, *, kernel: ExpertsKernel, device: torch.device) -> float:
    """Compare rows and kernels with the stock module.

    Args:
        subject: A class of experts.
        kernel: That will serve.
        device: Where it runs.

    Returns:
        The largest share of the bound that an error took, below 1.

    Raises:
        UnsupportedEngineError: An error beyond the bound.
    """
    experts = sorted({0, subject.num_experts - 1})  # of the largest models one is 350 MB in float64
    truth = _Truth(subject, experts=experts)
    kept = {
        expert: {n: t.clone() for n, t in subject.form.convert(subject.stored(expert)).items()} for expert in experts
    }
    shares = []
    mathematics = _as_rows(
        [_in_float32(kept[expert], form=subject.form) for expert in experts], form=_plain(subject.form)
    )
    shares.append(truth.share(mathematics, tokens=truth.tokens.float(), kernel=kernel, device=device))
    served = _as_rows([subject.on_device(expert) for expert in experts], form=subject.form)
    shares += [
        truth.share(served, tokens=truth.tokens[:num_tokens], kernel=kernel, device=device)
        for num_tokens in (1, _NUM_TOKENS)
    ]
    for what, share in zip(("in float32", "of one token", "of several tokens"), shares, strict=True):
        if not share < 1:  # NaN as well
            raise UnsupportedEngineError(
                f"experts of {type(subject.module).__name__} on a GPU",
                got=f"results {what} that differ from the stock module's by {share:.3g} times what rounding explains",
                wanted="at most once",
                do="use device='cpu' for this model, and report the architecture",
            )
    return max(shares)


class _Truth:
    """What the stock module computes for some tokens, in float64, and how far a kernel may be from it."""

    def __init__(self, subject: Subject, *, experts: list[int]) -> None:
        self._form, self._experts = subject.form, experts
        prepared = {
            expert: {n: t.double() for n, t in subject.prepare(subject.stored(expert)).items()} for expert in experts
        }
        self._fields = [
            {n: t.double() for n, t in _in_float32(subject.form.convert(subject.stored(e)), form=subject.form).items()}
            for e in experts
        ]
        generator = torch.Generator("cpu").manual_seed(0)
        hidden_dim = subject.form.tensors["down"][0][0]
        tokens = torch.randn(_NUM_TOKENS, hidden_dim, generator=generator, dtype=torch.float32, device="cpu")
        self.tokens = _tamed(tokens.to(subject.dtype), fields=self._fields, form=subject.form)
        """[T, D], of the type that serves."""
        self.weights = torch.rand(_NUM_TOKENS, len(experts), generator=generator, dtype=torch.float32, device="cpu")
        ids = torch.tensor(experts, device="cpu").expand(_NUM_TOKENS, -1).contiguous()
        with torch.no_grad():
            self._outputs = stock_forward(
                subject.module, prepared=prepared, trial=(self.tokens.double(), ids, self.weights.double())
            )

    def share(self, rows: ExpertRows, *, tokens: torch.Tensor, kernel: ExpertsKernel, device: torch.device) -> float:
        """The largest error of a kernel, as a share of the bound."""
        num_tokens = len(tokens)
        row_ids = torch.arange(len(self._experts), device="cpu").expand(num_tokens, -1).contiguous()
        found = kernel(
            tokens.to(device),
            row_ids=row_ids.to(device),
            topk_weights=self.weights[:num_tokens].to(device),
            rows=_to(rows, device=device),
        )
        bound = self._bound(tokens.double(), unit=torch.finfo(tokens.dtype).eps / 2)
        error = (found.cpu().double() - self._outputs[:num_tokens]).abs()
        return float((error / bound.clamp(min=torch.finfo(torch.float32).tiny)).max())

    def _bound(self, tokens: torch.Tensor, *, unit: float) -> torch.Tensor:
        """The error that rounding explains, [T, D]."""
        total = torch.zeros_like(tokens)
        size = torch.zeros_like(tokens)
        for place, fields in enumerate(self._fields):
            factors = self.weights[: len(tokens), place, None].double().abs()
            error, magnitude = _expert_bound(fields, tokens=tokens, form=self._form, unit=unit)
            total += factors * error
            size += factors * magnitude
        return 2 * (total + (unit + len(self._fields) * _FLOAT32) * size)


def _expert_bound(
    fields: Tensors, *, tokens: torch.Tensor, form: RowFormat, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """First-order error of one expert's output, and the output's magnitude with all signs alike, [T, D] each."""
    products, sizes = _products(fields["up"], tokens, bias=fields.get("up_bias"))
    moves = (tokens.shape[1] + 2) * _FLOAT32 * sizes
    shape = gate_of(form)
    inner = activated(products, rows=shape)
    moved = torch.zeros_like(inner)
    for signs in itertools.product((-1.0, 1.0), repeat=2 if shape.has_gate else 1):
        sign = torch.tensor(signs, dtype=torch.float64, device="cpu").repeat_interleave(inner.shape[1])
        moved = torch.maximum(moved, (activated(products + sign * moves, rows=shape) - inner).abs())
    inner_error = moved + (unit + _ACTIVATION * _FLOAT32) * inner.abs()
    down = fields["down"].abs()
    bias = fields["down_bias"].abs() if "down_bias" in fields else 0.0
    magnitude = inner.abs() @ down.T + bias
    return inner_error @ down.T + (inner.shape[1] + 2) * _FLOAT32 * magnitude, magnitude


def _products(
    weight: torch.Tensor, tokens: torch.Tensor, *, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first projection, and its magnitude with all signs alike, [T, O] each."""
    products, sizes = tokens @ weight.T, tokens.abs() @ weight.abs().T
    return (products, sizes) if bias is None else (products + bias, sizes + bias.abs())


def _tamed(tokens: torch.Tensor, *, fields: Sequence[Tensors], form: RowFormat) -> torch.Tensor:
    """Tokens small enough that nothing between the projections overflows their type: halved until it is so."""
    shape = gate_of(form)
    largest = torch.finfo(tokens.dtype).max / 4
    for _ in range(64):
        inner = [
            activated(_products(one["up"], tokens.double(), bias=one.get("up_bias"))[0], rows=shape) for one in fields
        ]
        outputs = [(one @ each["down"].T).abs().max() for one, each in zip(inner, fields, strict=True)]
        if max(float(one.abs().max()) for one in inner) < largest and max(map(float, outputs)) < largest:
            break
        tokens = tokens / 2
    return tokens


def _in_float32(fields: Tensors, *, form: RowFormat) -> dict[str, torch.Tensor]:
    """The same experts without factors."""
    found = {}
    for name in ("up", "down", "up_bias", "down_bias"):
        if name not in fields:
            continue
        value = fields[name].float()
        if (scale := fields.get(f"{name}_scale")) is not None:
            block = form.options["scale_block"]
            spread = scale.repeat_interleave(block, dim=0).repeat_interleave(block, dim=1)
            value = value * spread[: value.shape[0], : value.shape[1]]
        found[name] = value
    return found


def _plain(form: RowFormat) -> RowFormat:
    """The form of those."""
    return replace(form, options={name: value for name, value in form.options.items() if name != "scale_block"})


def _as_rows(experts: list[Mapping[str, torch.Tensor]], *, form: RowFormat) -> ExpertRows:
    """A few experts, one row each."""
    return form.rows({name: _stacked([one[name] for one in experts]) for name in experts[0]}, first_cold=1)


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """torch.stack, also of float8, which it does not know everywhere."""
    if values[0].dtype.itemsize > 1:
        return torch.stack(values)
    return torch.stack([value.view(torch.uint8) for value in values]).view(values[0].dtype)


def _to(rows: ExpertRows, *, device: torch.device) -> ExpertRows:
    names = ("up", "down", "up_scale", "down_scale", "up_bias", "down_bias")
    tensors = {name: getattr(rows, name) for name in names}
    return replace(rows, **{name: value.to(device) for name, value in tensors.items() if value is not None})
