"""What the GPU kernels can compute of a stock module, how a stored row becomes theirs, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from engines import tiny
from hotsplit.bank.kernels.reference import FP8
from hotsplit.engines.transformers.index import SCALE, Conversion, ExpertsLayer
from hotsplit.engines.transformers.row_forms import Gate, read_gate, row_form
from hotsplit.errors import UnsupportedEngineError

pytestmark = pytest.mark.transformers

E, D, I = 4, 64, 32  # noqa: E741 - as the shapes are called everywhere


class Experts(torch.nn.Module):
    """An experts module as transformers' decorator leaves it, as far as it is looked at here."""

    def __init__(self, *, activation="silu", **changes):
        super().__init__()
        self.num_experts, self.hidden_dim, self.act_fn = E, D, ACT2FN[activation]
        flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
        for name, value in (flags | changes).items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Clamped(Experts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


class Interleaved(Experts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class InFloat32(Experts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (self.act_fn(gate) * up).to(gate_up.dtype)


class Late(Experts):
    """Its limit comes behind the activation: no kernel has that."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up


class Broken(Experts):
    def _apply_gate(self, gate_up):
        raise RuntimeError("a gate with weights of its own")


@pytest.mark.parametrize(
    ("module", "gate", "is_interleaved"),
    [
        (Experts(), {"activation": "silu"}, False),
        (Experts(activation="gelu"), {"activation": "gelu"}, False),
        (Experts(activation="gelu_pytorch_tanh"), {"activation": "gelu_tanh"}, False),
        (Experts(activation="relu"), {"activation": "relu"}, False),
        (InFloat32(), {"activation": "silu"}, False),
        (Clamped(limit=7.0), {"activation": "silu", "gate_limit": 7.0}, False),
        (Clamped(limit=0.5, swiglu=3.0), {"activation": "silu", "gate_limit": 0.5}, False),
        (
            Interleaved(limit=7.0, alpha=1.702),
            {"activation": "silu", "gate_limit": 7.0, "gate_slope": 1.702, "gate_shift": 1.0},
            True,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_a_gate_is_told_from_all_others(module, gate, is_interleaved):
    assert (Gate(has_gate=True, **gate), is_interleaved) == read_gate(module)


@pytest.mark.parametrize(("activation", "found"), [("relu2", "relu2"), ("silu", "silu"), ("gelu_new", "gelu_tanh")])
def test_an_activation_without_a_gate_is_told_from_all_others(activation, found):
    assert (Gate(activation=found, has_gate=False), False) == read_gate(Experts(activation=activation, has_gate=False))


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "mish", "quick_gelu", "leaky_relu"])
@pytest.mark.parametrize("has_gate", [True, False])
def test_an_activation_that_no_kernel_has_is_refused(activation, has_gate):
    with pytest.raises(UnsupportedEngineError, match="experts of Experts on a GPU: .* use device='cpu'"):
        read_gate(Experts(activation=activation, has_gate=has_gate))


@pytest.mark.parametrize("module", [Late(limit=2.0), Broken()], ids=["late", "broken"])
def test_a_gate_that_no_kernel_has_is_refused(module):
    with pytest.raises(UnsupportedEngineError, match=r"on a GPU: got (a gate|an activation that cannot be tried)"):
        read_gate(module)


def form_of(
    module, *, dtype=torch.bfloat16, stored_as=None, block=None, scale=torch.float32, conversions=None, more=None
):
    """The form of rows that are stored as the module's parameters are."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    shapes = {up: ((2 if module.has_gate else 1) * I, D), "down_proj": (D, I)} | (more or {})
    if module.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if module.has_bias:
        shapes |= {f"{name}_bias": (shape[-1 if module.is_transposed else 0],) for name, shape in shapes.items()}
    layer = ExpertsLayer(
        path="model.layers.0.mlp.experts",
        decoder_index=0,
        parameters={name: ((E, *shape), dtype) for name, shape in shapes.items()},
    )
    tensors = {name: (shape, stored_as or dtype) for name, shape in shapes.items()}
    if block:
        tensors |= {
            name + SCALE: (tuple(-(-n // b) for n, b in zip(shape, block, strict=True)), scale)
            for name, shape in shapes.items()
        }
    layouts = [tiny.layout_of({name: shape}, dtype=kind) for name, (shape, kind) in tensors.items()]
    layout = type(layouts[0])(tensors=tuple(one.tensors[0] for one in layouts))
    conversions = dict.fromkeys(shapes, Conversion()) | (conversions or {})
    return row_form(module, layer=layer, layout=layout, conversions=conversions, block=block)


def random_row(form_tensors, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in form_tensors.items()}


def test_a_plain_row_is_the_kernels_row():
    form = form_of(Experts())
    assert {"up": ((2 * I, D), torch.bfloat16), "down": ((D, I), torch.bfloat16)} == dict(form.tensors)
    stored = random_row({"gate_up_proj": (2 * I, D), "down_proj": (D, I)}, dtype=torch.bfloat16)
    converted = form.convert(stored)
    assert torch.equal(stored["gate_up_proj"], converted["up"])
    assert torch.equal(stored["down_proj"], converted["down"])


def test_transposed_and_interleaved_weights_and_biases_are_laid_out_once():
    module = Interleaved(limit=7.0, alpha=1.702, is_transposed=True, has_bias=True)
    form = form_of(module, dtype=torch.float32)
    shapes = {"gate_up_proj": (D, 2 * I), "down_proj": (I, D), "gate_up_proj_bias": (2 * I,), "down_proj_bias": (D,)}
    stored = random_row(shapes)
    converted = form.convert(stored)
    assert ["up", "down", "up_bias", "down_bias"] == list(converted)
    assert torch.equal(stored["gate_up_proj"][:, 0::2].T, converted["up"][:I])
    assert torch.equal(stored["gate_up_proj"][:, 1::2].T, converted["up"][I:])
    assert torch.equal(stored["down_proj"].T, converted["down"])
    assert torch.equal(stored["gate_up_proj_bias"][0::2], converted["up_bias"][:I])
    assert all(one.is_contiguous() for one in converted.values())


def test_rows_are_cast_to_the_type_that_the_model_computes_with():
    form = form_of(Experts(), dtype=torch.bfloat16, stored_as=torch.float32)
    assert {torch.bfloat16} == {dtype for _, dtype in form.tensors.values()}


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_float8_rows_keep_their_bytes_and_have_factors_in_float32(scale):
    form = form_of(Experts(), stored_as=FP8, block=(16, 16), scale=scale)
    assert (FP8, torch.float32, 16) == (
        form.tensors["up"][1],
        form.tensors["up_scale"][1],
        form.options["scale_block"],
    )
    assert ((4, 4), (4, 2)) == (form.tensors["up_scale"][0], form.tensors["down_scale"][0])


def refused(match, module=None, **options):
    with pytest.raises(UnsupportedEngineError, match=f"{match}.* use device='cpu' for this model"):
        form_of(module or Experts(), **options)


def test_what_no_kernel_computes_is_refused_by_name():
    refused("got a norm behind every expert", Experts(has_post_expert_norm=True))
    refused("got experts that are spread over processes", Experts(_is_expert_parallel=True))
    refused("got parameters .'alpha_proj', 'down_proj', 'gate_up_proj'.", more={"alpha_proj": (D, I)})


def test_float8_that_no_kernel_computes_is_refused_by_name():
    refused("got blocks of 16 x 32; wanted square blocks", stored_as=FP8, block=(16, 32))
    refused("got torch.float8_e5m2 with factors", stored_as=torch.float8_e5m2, block=(16, 16))
    refused("got torch.int8 with factors", stored_as=torch.int8, block=(16, 16))
    refused(
        "got interleaved weights; wanted gate before up",
        Interleaved(limit=7.0, alpha=1.7),
        stored_as=FP8,
        block=(16, 16),
    )
    refused(
        "got interleaved weights with factors",
        stored_as=FP8,
        block=(16, 16),
        conversions={"gate_up_proj": Conversion(deinterleave=0)},
    )
    refused("inner dim of scaled expert rows", stored_as=FP8, block=(64, 64))
    refused("pass model_kwargs=.'dtype': 'bfloat16'., or", stored_as=FP8, block=(16, 16), dtype=torch.float32)


def test_factors_without_blocks_are_refused_by_name():
    module = Experts()
    layer = ExpertsLayer(
        path="x",
        decoder_index=0,
        parameters={
            "gate_up_proj": ((E, 2 * I, D), torch.bfloat16),
            "down_proj": ((E, D, I), torch.bfloat16),
        },
    )
    shapes = {"gate_up_proj": (2 * I, D), "down_proj": (D, I), "gate_up_proj" + SCALE: (1,), "down_proj" + SCALE: (1,)}
    layout = tiny.layout_of(shapes, dtype=FP8)
    conversions = dict.fromkeys(("gate_up_proj", "down_proj"), Conversion())
    with pytest.raises(UnsupportedEngineError, match="got one factor per tensor; wanted square blocks"):
        row_form(module, layer=layer, layout=layout, conversions=conversions, block=None)
