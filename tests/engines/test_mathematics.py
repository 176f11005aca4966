"""The proof at load: it finds how the stock module adds, and refuses a module that no candidate equals."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.activations import ACT2FN

from engines import tiny
from hotsplit.engines.transformers.index import Conversion, ExpertsLayer
from hotsplit.engines.transformers.mathematics import Precision, preparer, prove
from hotsplit.errors import UnsupportedEngineError

pytestmark = pytest.mark.transformers

E, D, F = 5, 32, 16


def experts_class(*, dtype=None, compute=None, order="ascending", scale=1.0):
    """An experts module as transformers' decorator leaves it, whose stock loop adds in its own way."""

    class Experts(torch.nn.Module):
        has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm = True, False, False, True, False

        def __init__(self):
            super().__init__()
            self.num_experts, self.act_fn = E, ACT2FN["silu"]

        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

        def _stock(self, hidden_states, top_k_index, top_k_weights):
            sums_in = {"hidden": hidden_states.dtype, "weights": top_k_weights.dtype}.get(dtype, dtype)
            out = torch.zeros_like(hidden_states, dtype=sums_in)
            experts = sorted(set(top_k_index.flatten().tolist()), reverse=order == "descending")
            for expert in experts:
                places, tokens = torch.where((top_k_index == expert).T)
                gate_up, down = (getattr(self, name)[expert] for name in ("gate_up_proj", "down_proj"))
                state = hidden_states[tokens]
                if compute is not None:
                    gate_up, down, state = gate_up.to(compute), down.to(compute), state.to(compute)
                inner = self._apply_gate(torch.nn.functional.linear(state, gate_up))
                output = torch.nn.functional.linear(inner, down) * scale
                out.index_add_(0, tokens, (output * top_k_weights[tokens, places, None]).to(out.dtype))
            return out.to(hidden_states.dtype)

        @functools.wraps(_stock)
        def forward(self, *args):
            raise AssertionError("the decorated forward dispatches elsewhere")

    return Experts


def prove_it(kind, *, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}
    rows = [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()} for _ in range(E)
    ]
    layer = ExpertsLayer(
        path="x", decoder_index=0, parameters={name: ((E, *shape), dtype) for name, shape in shapes.items()}
    )
    layout = tiny.layout_of(shapes, dtype=dtype)
    prepare = preparer(layer, layout=layout, conversions=dict.fromkeys(shapes, Conversion()))
    return prove(kind(), prepare=prepare, read=rows.__getitem__, num_experts=E, hidden_dim=D)


@pytest.mark.parametrize(
    ("stock", "found"),
    [
        ({"dtype": "hidden"}, Precision(accumulate="hidden")),
        ({"dtype": "weights"}, Precision(accumulate=None)),
        ({"dtype": torch.float32}, Precision(accumulate=torch.float32)),
        (
            {"dtype": torch.float32, "compute": torch.float32},
            Precision(accumulate=torch.float32, compute=torch.float32),
        ),
    ],
)
def test_each_way_of_adding_is_told_from_the_others(stock, found):
    assert found == prove_it(experts_class(**stock))


def test_in_float32_the_ways_are_one():
    assert Precision(accumulate="hidden") == prove_it(experts_class(dtype="weights"), dtype=torch.float32)


@pytest.mark.parametrize(
    "stock",
    [
        {"dtype": "hidden", "order": "descending"},
        {"dtype": torch.float16},
        {"dtype": "hidden", "scale": 1.01},
        {"dtype": "hidden", "compute": torch.float32},
    ],
)
def test_a_module_that_computes_otherwise_is_refused(stock):
    with pytest.raises(UnsupportedEngineError, match="experts of Experts: got results that differ.*wanted equality"):
        prove_it(experts_class(**stock))


def test_a_flag_that_lies_is_noticed():
    kind = experts_class(dtype="hidden")
    kind.has_post_expert_norm, kind.post_expert_norm = True, torch.nn.Softsign()
    with pytest.raises(UnsupportedEngineError, match="wanted equality to the bit"):
        prove_it(kind)


def test_the_modules_own_gate_is_used():
    kind = experts_class(dtype="hidden")
    kind._apply_gate = lambda self, gate_up: self.act_fn(gate_up[:, 1::2]) * gate_up[:, ::2]
    assert Precision(accumulate="hidden") == prove_it(kind)


def test_the_proof_does_not_depend_on_the_process_wide_default_type():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert Precision(accumulate=None) == prove_it(experts_class(dtype="weights"))
    finally:
        torch.set_default_dtype(before)
