"""What one expert computes, read off the stock module and proven against it.

The decorator of transformers' experts classes leaves flags (gate, bias, transposed, post-norm) and the module keeps
its activation. From these one generic function follows. Two things no flag tells: in which dtype the stock loop adds
the experts' outputs, and whether it computes in float32. They are found by trial: the stock module's own forward runs
on a few real rows, and the candidate that equals it to the bit is taken. Where none does, the model is refused: a
guess would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hotsplit.bank.kernels.exact import ExpertFunction, ExpertMath, Tensors, exact
from hotsplit.bank.source import ROW_ALIGN, RowLayout
from hotsplit.engines.transformers.index import SCALE, Conversion, ExpertsLayer
from hotsplit.errors import UnsupportedEngineError

Prepare = Callable[[Tensors], Tensors]
"""From the tensors of a row, as stored, to the parameters of one expert, as the module computes with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One way in which a stock loop may treat precision."""

    accumulate: torch.dtype | Literal["hidden"] | None
    """Dtype of the sum: a dtype, that of the hidden states, or None for that of the routing weights."""
    compute: torch.dtype | None = None
    """Dtype of the products; None for that of the model."""


_CANDIDATES = (
    Precision(accumulate="hidden"),
    Precision(accumulate=None),
    Precision(accumulate=torch.float32),
    Precision(accumulate=torch.float32, compute=torch.float32),
)


def preparer(layer: ExpertsLayer, *, layout: RowLayout, conversions: Mapping[str, Conversion]) -> Prepare:
    """How a stored row becomes parameters: dequantise, transpose, pull apart, cast. Nothing, for most models.

    Args:
        layer: The experts module's parameters.
        layout: Of its rows.
        conversions: By parameter name.
    """
    phases = {part.name: part.offset % ROW_ALIGN for part in layout.tensors}

    def prepare(tensors: Tensors) -> Tensors:
        return {
            name: _in_phase(
                _parameter(tensors[name], scale=tensors.get(name + SCALE), dtype=dtype, conversion=conversions[name]),
                phase=phases[name],
            )
            for name, (_, dtype) in layer.parameters.items()
        }

    return prepare


def _parameter(
    stored: torch.Tensor, *, scale: torch.Tensor | None, dtype: torch.dtype, conversion: Conversion
) -> torch.Tensor:
    value = stored if scale is None else _dequantise(stored, scale=scale, dtype=dtype)
    return converted(value, conversion=conversion).to(dtype)


def converted(value: torch.Tensor, *, conversion: Conversion) -> torch.Tensor:
    """A stored tensor of one expert with its values where the module's parameter has them.

    Args:
        value: As stored, or dequantised.
        conversion: Of its parameter.
    """
    if conversion.transpose:
        value = value.transpose(-2, -1).contiguous()
    if conversion.deinterleave is not None:
        value = _deinterleave(value, dim=conversion.deinterleave, inverse=conversion.interleave_inverse)
    return value


def _in_phase(value: torch.Tensor, *, phase: int) -> torch.Tensor:
    """The tensor at the stock engine's place within a cache line, copied there if need be.

    torch's float32 product of one token rounds differently with the weight's address modulo 16; the 16-bit ones do
    not look at it. Only a cold row of a float32 checkpoint can stand elsewhere.
    """
    if value.dtype != torch.float32 or value.ndim < 2 or value.data_ptr() % ROW_ALIGN == phase:
        return value
    buffer = torch.empty(value.numel() + ROW_ALIGN // value.itemsize, dtype=value.dtype, device=value.device)
    start = (phase - buffer.data_ptr()) % ROW_ALIGN // value.itemsize
    return buffer[start : start + value.numel()].view(value.shape).copy_(value)


def _dequantise(stored: torch.Tensor, *, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Block scales applied by transformers' own operation, so that the bits are those of a stock load."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    value: torch.Tensor = Fp8Dequantize(None)._dequantize_one(stored, scale, output_dtype=dtype)
    return value


def _deinterleave(value: torch.Tensor, *, dim: int, inverse: bool) -> torch.Tensor:
    shape = list(value.shape)
    half = shape[dim] // 2
    shape[dim : dim + 1] = [2, half] if inverse else [half, 2]
    return value.reshape(shape).transpose(dim, dim + 1).reshape(value.shape).contiguous()


def expert_function(module: Any, *, prepare: Prepare, compute: torch.dtype | None) -> ExpertFunction:
    """One expert's mathematics.

    Args:
        module: The experts module: its flags, activation and norm.
        prepare: From stored row to parameters.
        compute: Dtype of the products; None for that of the model.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"

    def project(tokens_ND: torch.Tensor, parameters: Tensors, name: str) -> torch.Tensor:
        weight = parameters[name] if compute is None else parameters[name].to(compute)
        product = tokens_ND @ weight if module.is_transposed else torch.nn.functional.linear(tokens_ND, weight)
        if not module.has_bias:
            return product
        bias = parameters[f"{name}_bias"]
        return product + (bias if compute is None else bias.to(compute))

    def run(stored: Tensors, tokens_ND: torch.Tensor) -> torch.Tensor:
        parameters = prepare(stored)
        inner = project(tokens_ND if compute is None else tokens_ND.to(compute), parameters, up_name)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        output = project(inner if compute is None else inner.to(compute), parameters, "down_proj")
        return module.post_expert_norm(output) if module.has_post_expert_norm else output

    return run


def expert_math(
    module: Any, *, layer: ExpertsLayer, prepare: Prepare, precision: Precision, num_experts: int
) -> ExpertMath:
    """The mathematics of one layer.

    Args:
        module: The experts module.
        layer: Its parameters.
        prepare: From stored row to parameters.
        precision: As prove() found it for this class.
        num_experts: E.
    """
    _, dtype = next(iter(layer.parameters.values()))
    return ExpertMath(
        function=expert_function(module, prepare=prepare, compute=precision.compute),
        num_experts=num_experts,
        accumulate=_accumulate(precision, hidden=dtype),
    )


def prove(
    module: Any, *, prepare: Prepare, read: Callable[[int], Tensors], num_experts: int, hidden_dim: int
) -> Precision:
    """The treatment of precision with which our mathematics equals the stock module's forward to the bit.

    Args:
        module: The experts module, its class's own forward intact.
        prepare: From stored row to parameters.
        read: The stored tensors of an expert, wherever it lies.
        num_experts: E.
        hidden_dim: D.

    Raises:
        UnsupportedEngineError: None of the known treatments does.
    """
    experts = sorted({0, num_experts // 2, num_experts - 1})
    rows = {expert: read(expert) for expert in experts}
    trials = _trials(prepare(rows[0]), experts=experts, hidden_dim=hidden_dim)
    prepared = {expert: prepare(tensors) for expert, tensors in rows.items()}
    stock = [stock_forward(module, prepared=prepared, trial=trial) for trial in trials]
    for precision in _CANDIDATES:
        function = expert_function(module, prepare=prepare, compute=precision.compute)
        mine = [
            _run(function, rows=rows, precision=precision, trial=trial, num_experts=num_experts) for trial in trials
        ]
        if all(_same_bits(a, b) for a, b in zip(stock, mine, strict=True)):
            return precision
    raise UnsupportedEngineError(
        f"experts of {type(module).__name__}",
        got="results that differ from the stock module's",
        wanted="equality to the bit",
        do="run this model with stock transformers and report the architecture",
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and NaN where the other is: weights may overflow in the trial as they would in a run."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


Trial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, expert ids, weights."""


def _trials(parameters: Tensors, *, experts: list[int], hidden_dim: int) -> list[Trial]:
    """Tokens, ids and weights, once with float32 weights and once with the model's dtype: it tells the sums apart."""
    dtype = next(iter(parameters.values())).dtype
    generator = torch.Generator().manual_seed(0)
    # float32 said aloud: the process's default dtype is not ours, and must not decide what is proven.
    hidden = torch.randn(8, hidden_dim, generator=generator, dtype=torch.float32).to(dtype)
    ids = torch.tensor(experts).expand(8, -1).contiguous()
    weights = torch.rand(8, len(experts), generator=generator, dtype=torch.float32)
    return [(hidden, ids, weights), (hidden, ids, weights.to(dtype))]


class _Rows:
    """Stands in for a stacked parameter: indexing it gives one expert's slice."""

    def __init__(self, slices: Mapping[int, torch.Tensor]) -> None:
        self._slices = slices

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._slices[int(expert)]


class _Stand:
    """The module, with rows for parameters."""

    def __init__(self, module: Any, rows: Mapping[str, _Rows]) -> None:
        self._module = module
        self.__dict__.update(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stock_forward(module: Any, *, prepared: Mapping[int, Tensors], trial: Trial) -> torch.Tensor:
    """What the class's own loop computes, which the decorator keeps under its wrapper.

    Args:
        module: The experts module.
        prepared: Parameters of the experts that the trial asks for.
        trial: Tokens [T, D], expert ids [T, K], weights [T, K].
    """
    names = next(iter(prepared.values()))
    stand = _Stand(module, {name: _Rows({e: tensors[name] for e, tensors in prepared.items()}) for name in names})
    with torch.no_grad():
        result: torch.Tensor = type(module).forward.__wrapped__(stand, *trial)
    return result


def _run(
    function: ExpertFunction, *, rows: Mapping[int, Tensors], precision: Precision, trial: Trial, num_experts: int
) -> torch.Tensor:
    hidden, ids, weights = trial
    math = ExpertMath(
        function=function, num_experts=num_experts, accumulate=_accumulate(precision, hidden=hidden.dtype)
    )
    with torch.no_grad():
        bank = HotRows(rows)
        return exact(hidden, topk_ids=ids, topk_weights=weights, row_ids=ids, bank=bank, math=math)


def _accumulate(precision: Precision, *, hidden: torch.dtype) -> torch.dtype | None:
    return hidden if precision.accumulate == "hidden" else precision.accumulate


class HotRows:
    """Rows in hand, all of them hot (a LayerBank): row number = expert id.

    Args:
        rows: By expert.
    """

    def __init__(self, rows: Mapping[int, Tensors]) -> None:
        self._rows = rows
        self.first_cold = max(rows) + 1

    def tensors(self, row: int) -> Tensors:
        """Of an expert."""
        return self._rows[row]

    def ask(self, rows: Iterable[int]) -> None:
        """Nothing is cold."""

    def arrivals(self, rows: Iterable[int]) -> Iterator[int]:
        """As they are."""
        return iter(rows)
