"""From a stock experts module to the fast kernel's native code: how rows are stored, what they compute, and the proof.

    module + row layout -> form, as rows are stored        nothing is converted: weights are read where they lie
    real rows -> native code  <=  derived bound  =>  the stock class's own loop in float64

What the native code does not have (a norm behind every expert, rows that must be pulled apart, ...) is a reason, not an
error: the exact kernel computes those layers, which is said.

Shapes: T tokens, K top-k, E experts, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from hotsplit.bank.kernels.exact import ExpertMath, Tensors
from hotsplit.bank.kernels.fast import MOST_TOKENS, FastMath, NativeExperts, fast
from hotsplit.bank.kernels.fast_bound import Fields, output_and_bound
from hotsplit.bank.kernels.fast_library import ACTIVATIONS, KINDS, Form, Library, Matrix
from hotsplit.bank.kernels.reference import FP8
from hotsplit.bank.source import RowLayout, RowTensor
from hotsplit.engines.transformers.index import SCALE, Conversion, ExpertsLayer
from hotsplit.engines.transformers.mathematics import HotRows, Prepare, stock_forward
from hotsplit.engines.transformers.row_forms import Gate, read_gate
from hotsplit.errors import UnsupportedEngineError

_BLOCK: Final = 16
"""Inputs that share a factor must fill whole vectors: a multiple of this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The experts of one layer as the checkpoint has them."""

    layer: ExpertsLayer
    """The module's parameters."""
    layout: RowLayout
    """Of a row."""
    conversions: Mapping[str, Conversion]
    """From a row's tensors to parameters, by parameter."""

    @property
    def is_scaled(self) -> bool:
        """Whether weights have factors."""
        return any(part.name.endswith(SCALE) for part in self.layout.tensors)


def native_experts(module: Any, *, stored: Stored, library: Library, path: str | None = None) -> NativeExperts:
    """What the native code needs to compute a layer's experts.

    Args:
        module: The experts module.
        stored: Its rows.
        library: The native code.
        path: Of its paths; None for the best.

    Raises:
        UnsupportedEngineError: It cannot; `got` is the reason.
    """
    if module.has_post_expert_norm:
        raise _unfit(module, "a norm behind every expert")
    up = "gate_up_proj" if module.has_gate else "up_proj"
    biases = {f"{up}_bias", "down_proj_bias"} if module.has_bias else set()
    if set(stored.layer.parameters) != {up, "down_proj"} | biases:
        raise _unfit(module, f"parameters {sorted(stored.layer.parameters)}")
    gate, is_interleaved = read_gate(module)
    _, dtype = stored.layer.parameters[up]
    parts = {part.name: part for part in stored.layout.tensors}
    up_matrix, down_matrix = (_matrix(module, name, parts=parts, stored=stored) for name in (up, "down_proj"))
    form = Form(
        up=up_matrix,
        down=down_matrix,
        token_kind=_kind(module, dtype),
        path=len(library.paths) - 1 if path is None else library.paths.index(path),
        activation=ACTIVATIONS.index(gate.activation),
        has_gate=gate.has_gate,
        is_interleaved=gate.has_gate and is_interleaved,
        has_limit=gate.gate_limit is not None,
        limit=gate.gate_limit or 0.0,
        slope=gate.gate_slope,
        shift=gate.gate_shift,
    )
    wanted = {field: name for field, name in _names(up) if name in parts}
    return NativeExperts(library, form=form, names=wanted, dtype=dtype)


def _names(up: str) -> Iterator[tuple[str, str]]:
    """The row's tensors by the native code's fields."""
    for field, name in (("up", up), ("down", "down_proj")):
        yield from ((field, name), (f"{field}_scale", f"{name}{SCALE}"), (f"{field}_bias", f"{name}_bias"))


def _matrix(module: Any, name: str, *, parts: Mapping[str, RowTensor], stored: Stored) -> Matrix:
    """One projection, or why the native code cannot multiply with it where it lies."""
    part, conversion, scale = parts[name], stored.conversions[name], parts.get(f"{name}{SCALE}")
    _, dtype = stored.layer.parameters[name]
    is_transposed = bool(module.is_transposed) != conversion.transpose
    outputs, inputs = reversed(part.shape) if is_transposed else part.shape
    bias = parts.get(f"{name}_bias")
    if conversion.deinterleave is not None:
        raise _unfit(module, f"a stored {name} whose values must be pulled apart")
    if bias is not None and not stored.conversions[f"{name}_bias"].is_plain:
        raise _unfit(module, f"a stored {name}_bias that must be converted")
    matrix = Matrix(
        outputs=outputs,
        inputs=inputs,
        kind=_kind(module, part.dtype),
        is_transposed=is_transposed,
        bias_kind=0 if bias is None else _kind(module, bias.dtype),
    )
    if scale is None:
        # A wider type holds every value of a narrower one; the other way the stock module would round.
        if part.dtype == FP8 or dtype not in (part.dtype, torch.float32):
            raise _unfit(module, f"a {name} stored as {part.dtype} that computes in {dtype}")
        return matrix
    by_output, by_input = (_block(n, parts=count) for n, count in zip(part.shape, scale.shape, strict=True))
    by_input = by_input if by_input is None or scale.shape[1] > 1 else max(by_input, _BLOCK)
    if part.dtype != FP8 or is_transposed or by_output is None or by_input is None or by_input % _BLOCK:
        raise _unfit(module, f"a {name} of {part.dtype} {list(part.shape)} with factors {list(scale.shape)}")
    matrix.scale_kind = _kind(module, scale.dtype)
    matrix.scale_outputs, matrix.scale_inputs = by_output, by_input
    return matrix


def _block(whole: int, *, parts: int) -> int | None:
    """How many share a factor, a power of two; None where none gives so many parts.

    Two of them give the same number of parts only where there is one part, and then either is right.
    """
    block = 1
    while -(-whole // block) > parts:
        block *= 2
    return block if -(-whole // block) == parts else None


def _kind(module: Any, dtype: torch.dtype) -> int:
    name = str(dtype).removeprefix("torch.")
    if name not in KINDS:
        raise _unfit(module, f"numbers of {dtype}")
    return KINDS.index(name)


def _unfit(module: Any, got: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"experts of {type(module).__name__}", got=got, wanted="what the fast kernel computes", do="use kernel='exact'"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What is needed to hold the native code against the stock module on a few real rows."""

    module: Any
    """The experts module, its class's own forward intact."""
    prepare: Prepare
    """From a stored row to the module's parameters, exactly: factors applied in float32."""
    read: Callable[[int], Tensors]
    """The stored tensors of an expert, wherever it lies."""
    math: FastMath
    """That will serve."""


def prove_native(proof: Proof) -> float:
    """Compare the fast kernel with the stock module in float64, for one token and for as many as it takes at once.

    Args:
        proof: A layer.

    Returns:
        The largest share of the bound that an error took, below 1.

    Raises:
        UnsupportedEngineError: An error beyond the bound.
    """
    experts = sorted({0, proof.math.num_experts - 1})  # of the largest models one is 350 MB in float64
    rows = {expert: proof.read(expert) for expert in experts}
    prepared = {e: {n: t.double() for n, t in proof.prepare(row).items()} for e, row in rows.items()}
    gate, is_interleaved = read_gate(proof.module)
    fields = [_fields(proof.module, prepared[expert], is_interleaved=is_interleaved) for expert in experts]
    tokens, weights = _tamed_trial(fields, gate=gate, dtype=proof.math.native.dtype)
    ids = torch.tensor(experts).expand(len(tokens), -1).contiguous()
    truth = stock_forward(proof.module, prepared=prepared, trial=(tokens.double(), ids, weights.double()))
    pairs = [(one, weights[:, place].double()) for place, one in enumerate(fields)]
    _, bound = output_and_bound(tokens.double(), experts=pairs, inner=gate, dtype=tokens.dtype)
    share = max(
        _share(proof.math, rows=rows, trial=(tokens[:n], ids[:n], weights[:n]), truth=truth[:n], bound=bound[:n])
        for n in (1, len(tokens))
    )
    proof.math.native.forget()  # the banks' rows lie elsewhere
    if not share < 1:  # NaN as well
        raise _unfit(
            proof.module, f"results that differ from the stock module's by {share:.3g} times what rounding explains"
        )
    return share


def _share(
    math: FastMath,
    *,
    rows: Mapping[int, Tensors],
    trial: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    truth: torch.Tensor,
    bound: torch.Tensor,
) -> float:
    tokens, ids, weights = trial
    bank = HotRows(rows)
    found = fast(tokens, topk_ids=ids, topk_weights=weights, row_ids=ids, bank=bank, math=math)
    return float(((found.double() - truth).abs() / bound).nan_to_num(nan=float("inf")).max())


def _fields(module: Any, parameters: Tensors, *, is_interleaved: bool) -> Fields:
    """The module's parameters as the bound has them: [outputs, inputs], gate before other."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    found = {}
    for field, name in (("up", up), ("down", "down_proj")):
        weight, bias = parameters[name], parameters.get(f"{name}_bias")
        for key, value in ((field, weight.T if module.is_transposed else weight), (f"{field}_bias", bias)):
            if value is not None:
                is_apart = field == "up" and module.has_gate and is_interleaved
                found[key] = torch.cat([value[0::2], value[1::2]]) if is_apart else value
    return found


def _tamed_trial(fields: list[Fields], *, gate: Gate, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, D] and weights [T, K], the tokens halved until nothing overflows their type."""
    generator = torch.Generator().manual_seed(0)
    hidden_dim = fields[0]["down"].shape[0]
    tokens = torch.randn(MOST_TOKENS, hidden_dim, generator=generator, dtype=torch.float32).to(dtype)
    weights = torch.rand(MOST_TOKENS, len(fields), generator=generator, dtype=torch.float32)
    largest = torch.finfo(dtype).max / 8
    for _ in range(64):
        pairs = [(one, weights[:, place].double()) for place, one in enumerate(fields)]
        output, bound = output_and_bound(tokens.double(), experts=pairs, inner=gate, dtype=dtype)
        if bool((output.abs() < largest).all() and (bound < largest).all()):
            break
        tokens = tokens / 2
    return tokens, weights


def with_native(math: ExpertMath, *, native: NativeExperts) -> FastMath:
    """A layer's mathematics for both: few tokens natively, many by the library's products.

    Args:
        math: As proven for the exact kernel.
        native: The native code's view.
    """
    return FastMath(function=math.function, num_experts=math.num_experts, accumulate=math.accumulate, native=native)
