"""From a stock experts module to rows that the GPU kernels compute with: which tensors, and how a stored row becomes them.

    module + checkpoint layout -> gate, activation -> RowFormat (bank/row_format.py), or a refusal by name

The kernels know one layout: up [2 * I, D] with the gate's outputs first, down [D, I], both with their inputs side by
side. Checkpoints and modules know several, so a row is transposed or pulled apart once, while it is read. What a gate
computes is found by trying: the module's own function is compared with every one that the kernels have, in float64.
row_proof.py then proves the whole, on real rows.

Shapes: D model dim, I expert hidden dim, N values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch

from hotsplit.bank.kernels.reference import ACTIVATIONS, FP8, activated
from hotsplit.bank.row_format import RowFormat, Tensors
from hotsplit.bank.source import RowLayout
from hotsplit.engines.transformers.index import SCALE, Conversion, ExpertsLayer
from hotsplit.engines.transformers.mathematics import converted
from hotsplit.errors import BankError, UnsupportedEngineError

_WAY_OUT: Final = "use device='cpu' for this model"
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_ORDER: Final = ("up", "down", "up_scale", "down_scale", "up_bias", "down_bias")
_LARGEST: Final = 100.0
"""Numbers from here on are no limit or slope of a gate, but sizes."""
_SAME: Final = 1e-6
"""Relative: a module may compute its activation in float32, and the nearest two of ours differ by more."""
_EXACT: Final = 1e-12
"""Relative: nothing else can be nearer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What lies between an expert's projections, in the kernels' words; fields of ExpertRows."""

    activation: str
    """One of the kernels' ACTIVATIONS."""
    has_gate: bool
    """Whether there is a gate."""
    gate_limit: float | None = None
    """Of gate and others, before all else."""
    gate_slope: float = 1.0
    """Of silu."""
    gate_shift: float = 0.0
    """Added to the others."""


def row_form(
    module: Any,
    *,
    layer: ExpertsLayer,
    layout: RowLayout,
    conversions: Mapping[str, Conversion],
    block: tuple[int, int] | None,
) -> RowFormat:
    """How the kernels want the experts of one layer.

    Args:
        module: The experts module; its parameters may be on the meta device or gone.
        layer: Its parameters.
        layout: Of its stored rows.
        conversions: By parameter name.
        block: Outputs and inputs that share a factor, of a float8 checkpoint; None for none.

    Raises:
        UnsupportedEngineError: The kernels cannot compute this; it names what, and the way out.
    """
    _require_flags(module)
    stored = {part.name: part for part in layout.tensors}
    up = "gate_up_proj" if module.has_gate else "up_proj"
    is_scaled = any(name.endswith(SCALE) for name in stored)
    gate, is_interleaved = read_gate(module)
    _require_names(layer, up=up, has_bias=module.has_bias)
    if is_scaled:
        _require_scaled(stored, layer=layer, names=(up, "down_proj"), block=block, is_interleaved=is_interleaved)
        if any(conversions[name].deinterleave is not None for name in (up, "down_proj")):
            raise _refused(module, got="interleaved weights with factors per block")
    convert = _converter(
        module,
        layer=layer,
        conversions=conversions,
        names={up: "up", "down_proj": "down"},
        is_interleaved=is_interleaved,
    )
    options = asdict(gate) | ({"scale_block": block[0]} if block and is_scaled else {})
    empty = {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in stored.items()}
    tensors = {name: (tuple(value.shape), value.dtype) for name, value in convert(empty).items()}
    form = RowFormat(tensors=tensors, options=options, convert=convert)
    _require_rows(form, module=module)
    return form


def gate_of(form: RowFormat) -> Gate:
    """What lies between the projections.

    Args:
        form: From row_form().
    """
    return Gate(**{one.name: form.options[one.name] for one in fields(Gate)})


def read_gate(module: Any) -> tuple[Gate, bool]:
    """What a module computes between the projections, found by comparing with what the kernels can.

    Args:
        module: The experts module: its flags, activation and attributes.

    Returns:
        The kernels' words for it, and whether its gate and other outputs alternate instead of following one another.

    Raises:
        UnsupportedEngineError: No function of the kernels equals it.
    """
    values = _probe_values(_numbers_of(module))
    products = torch.cartesian_prod(values, values) if module.has_gate else values
    try:
        stock = _stock_values(module, products)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # an activation may be any code
        raise _refused(module, got=f"an activation that cannot be tried ({type(error).__name__})") from error
    # Gates before others, as the kernels have them.
    joined = (products.T if module.has_gate else products).flatten()[None]
    found: list[tuple[float, Gate, bool]] = []
    for gate in _candidates(module):
        mine = activated(joined, rows=gate)[0]
        errors = [(_error(mine, wanted), gate, is_interleaved) for is_interleaved, wanted in stock.items()]
        found += [one for one in errors if one[0] <= _SAME]
        if found and found[-1][0] <= _EXACT:
            break
    if not found:
        raise _refused(module, got="a gate or an activation that they do not have")
    _, gate, is_interleaved = min(found, key=lambda one: one[0])
    return gate, is_interleaved


def _stock_values(module: Any, products: torch.Tensor) -> dict[bool, torch.Tensor]:
    """What the module's own function makes of the products, as they would alternate and as they would not."""
    if not module.has_gate:
        return {False: module.act_fn(products)}
    return {
        False: module._apply_gate(products.T.flatten()[None])[0],
        True: module._apply_gate(products.flatten()[None])[0],
    }


def _error(mine: torch.Tensor, stock: torch.Tensor) -> float:
    if mine.shape != stock.shape:
        return float("inf")
    return float(((stock.double() - mine).abs() / (1 + mine.abs())).max())


def _numbers_of(module: Any) -> list[float]:
    """Positive numbers among a module's attributes: a limit or a slope of its gate is one of them."""
    plain = [value for value in vars(module).values() if isinstance(value, float | int) and not isinstance(value, bool)]
    return sorted({float(value) for value in plain if value > 0})


def _probe_values(numbers: list[float]) -> torch.Tensor:
    """Values on both sides of zero and of every number that may be a limit, [N], float64."""
    around = [
        sign * number * part for number in numbers if number < _LARGEST for sign in (-1, 1) for part in (0.9, 1.3)
    ]
    return torch.cat([torch.linspace(-6, 6, 41, dtype=torch.float64), torch.tensor(around, dtype=torch.float64)])


def _candidates(module: Any) -> Iterator[Gate]:
    """Everything that the kernels can compute with this module's numbers, the usual first."""
    if not module.has_gate:
        yield from (Gate(activation=name, has_gate=False) for name in ACTIVATIONS)
        return
    numbers = [number for number in _numbers_of(module) if number < _LARGEST]
    for limit, shift, activation in itertools.product((None, *numbers), (0.0, 1.0), ACTIVATIONS):
        for slope in (1.0, *(n for n in numbers if n != 1)) if activation == "silu" else (1.0,):
            yield Gate(activation=activation, has_gate=True, gate_limit=limit, gate_slope=slope, gate_shift=shift)


def _converter(
    module: Any,
    *,
    layer: ExpertsLayer,
    conversions: Mapping[str, Conversion],
    names: Mapping[str, str],
    is_interleaved: bool,
) -> Callable[[Tensors], Tensors]:
    """From a stored row to the kernels' tensors: what turns it into parameters, and those into up and down."""
    is_transposed, is_gated = bool(module.is_transposed), bool(module.has_gate)

    def laid_out(value: torch.Tensor, *, is_up: bool) -> torch.Tensor:
        """A parameter [inputs, outputs] or [outputs, inputs], or a bias [outputs]."""
        if value.ndim == 2 and is_transposed:
            value = value.T
        if is_up and is_gated and is_interleaved:
            value = torch.cat([value[0::2], value[1::2]])
        return value.contiguous()

    def convert(stored: Tensors) -> Tensors:
        found = {}
        for name, field in names.items():
            scale = stored.get(name + SCALE)
            dtype = layer.parameters[name][1] if scale is None else stored[name].dtype
            weight = converted(stored[name], conversion=conversions[name]).to(dtype)
            found[field] = laid_out(weight, is_up=field == "up")
            if scale is not None:
                factors = converted(scale, conversion=conversions[name]).to(torch.float32)
                found[f"{field}_scale"] = factors.T.contiguous() if is_transposed else factors.contiguous()
            if (bias := stored.get(f"{name}_bias")) is not None:
                bias = converted(bias, conversion=conversions[f"{name}_bias"])
                found[f"{field}_bias"] = laid_out(bias.to(layer.parameters[f"{name}_bias"][1]), is_up=field == "up")
        return {name: found[name] for name in _ORDER if name in found}

    return convert


def _require_flags(module: Any) -> None:
    if module.has_post_expert_norm:
        raise _refused(module, got="a norm behind every expert")
    if getattr(module, "_is_expert_parallel", False):
        raise _refused(module, got="experts that are spread over processes")


def _require_names(layer: ExpertsLayer, *, up: str, has_bias: bool) -> None:
    """The module's parameters are those that are looked at here, and no others."""
    known = {up, "down_proj"} | ({f"{up}_bias", "down_proj_bias"} if has_bias else set())
    if set(layer.parameters) != known:
        raise UnsupportedEngineError(
            f"experts module {layer.path}",
            got=f"parameters {sorted(layer.parameters)}",
            wanted=f"{sorted(known)} for the GPU's kernels",
            do=_WAY_OUT,
        )


def _require_scaled(
    stored: Mapping[str, Any],
    *,
    layer: ExpertsLayer,
    names: tuple[str, str],
    block: tuple[int, int] | None,
    is_interleaved: bool,
) -> None:
    """Float8 weights with square blocks of factors, both projections."""
    what = f"factors of {layer.path}"
    if block is None or block[0] != block[1]:
        got = "one factor per tensor" if block is None else f"blocks of {block[0]} x {block[1]}"
        raise UnsupportedEngineError(what, got=got, wanted="square blocks for the GPU's kernels", do=_WAY_OUT)
    if is_interleaved:
        raise UnsupportedEngineError(what, got="interleaved weights", wanted="gate before up", do=_WAY_OUT)
    for name in names:
        if stored[name].dtype != FP8 or name + SCALE not in stored:
            got = f"{stored[name].dtype} with{'' if name + SCALE in stored else 'out'} factors"
            raise UnsupportedEngineError(f"{name} of {layer.path}", got=got, wanted=f"{FP8} with factors", do=_WAY_OUT)
        if layer.parameters[name][1] not in _FLOATS[:2]:
            got = f"tokens of {layer.parameters[name][1]} with float8 experts"
            do = f"pass model_kwargs={{'dtype': 'bfloat16'}}, or {_WAY_OUT}"
            raise UnsupportedEngineError(layer.path, got=got, wanted="bfloat16 or float16 on a GPU", do=do)


def _require_rows(form: RowFormat, *, module: Any) -> None:
    """What the kernels themselves would refuse, found before anything is read."""
    tensors = {
        name: torch.empty((1, *shape), dtype=dtype, device="meta") for name, (shape, dtype) in form.tensors.items()
    }
    try:
        form.rows(tensors, first_cold=0)
    except BankError as error:
        raise _refused(module, got=str(error)) from error
    if set(form.divided) < {"up", "down"}:
        raise _refused(module, got=f"rows that no page edge can divide ({form.tensors})")


def _refused(module: Any, *, got: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"experts of {type(module).__name__} on a GPU",
        got=got,
        wanted="what its kernels of rows compute",
        do=_WAY_OUT,
    )
