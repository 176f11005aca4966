"""The proof of rows and kernels: it passes where only rounding differs, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engines import tiny
from engines.test_mathematics import D, E, F, experts_class
from hotsplit.bank.kernels import reference
from hotsplit.engines.transformers.index import Conversion, ExpertsLayer
from hotsplit.engines.transformers.mathematics import preparer
from hotsplit.engines.transformers.row_forms import row_form
from hotsplit.engines.transformers.row_proof import Subject, prove_rows
from hotsplit.errors import UnsupportedEngineError

pytestmark = pytest.mark.transformers

SHAPES = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}


def subject_of(kind, *, dtype=torch.bfloat16, size=1.0):
    """A class of experts, its rows on a device that holds them as they were read."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {name: (size * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(E)
    ]
    layer = ExpertsLayer(
        path="x", decoder_index=0, parameters={name: ((E, *shape), dtype) for name, shape in SHAPES.items()}
    )
    layout, conversions = tiny.layout_of(SHAPES, dtype=dtype), dict.fromkeys(SHAPES, Conversion())
    module = kind()
    form = row_form(module, layer=layer, layout=layout, conversions=conversions, block=None)
    return Subject(
        module=module,
        form=form,
        prepare=preparer(layer, layout=layout, conversions=conversions),
        stored=rows.__getitem__,
        on_device=lambda expert: form.convert(rows[expert]),
        num_experts=E,
        dtype=dtype,
    )


def prove(subject, *, kernel=reference.experts):
    return prove_rows(subject, kernel=kernel, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_what_only_rounds_otherwise_is_proven(dtype, size):
    assert 0 < prove(subject_of(experts_class(dtype=torch.float32), dtype=dtype, size=size)) < 1


@pytest.mark.parametrize("stock", [{"dtype": "hidden"}, {"dtype": "weights"}, {"compute": torch.float32}])
def test_in_which_order_and_type_stock_adds_does_not_matter(stock):
    assert prove(subject_of(experts_class(**({"dtype": torch.float32} | stock)))) < 1


def test_weights_that_would_overflow_are_tried_with_smaller_tokens():
    assert prove(subject_of(experts_class(dtype="hidden"), dtype=torch.float16, size=300.0)) < 1


@pytest.mark.parametrize("scale", [1.01, 0.999, 1.0001])
def test_a_factor_that_no_flag_tells_of_is_noticed(scale):
    with pytest.raises(UnsupportedEngineError, match="results in float32 that differ .* report the architecture"):
        prove(subject_of(experts_class(dtype="hidden", scale=scale)))


def test_rows_in_another_place_are_noticed():
    subject = subject_of(experts_class(dtype="hidden"))
    moved = dataclasses.replace(subject, on_device=lambda expert: subject.on_device((expert + 1) % E))
    with pytest.raises(UnsupportedEngineError, match="results of one token that differ"):
        prove(moved)


def test_one_wrong_weight_of_a_row_is_noticed():
    subject = subject_of(experts_class(dtype="hidden"))

    def on_device(expert):
        tensors = {name: tensor.clone() for name, tensor in subject.on_device(expert).items()}
        tensors["down"][3, 5] += 4
        return tensors

    with pytest.raises(UnsupportedEngineError, match="results of (one token|several tokens) that differ"):
        prove(dataclasses.replace(subject, on_device=on_device))


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_kernel_that_is_wrong_for_some_number_of_tokens_is_noticed(num_tokens):
    def kernel(hidden_states, **arguments):
        outputs = reference.experts(hidden_states, **arguments)
        is_bad = len(hidden_states) == num_tokens and hidden_states.dtype == torch.bfloat16
        return outputs * 1.1 if is_bad else outputs

    with pytest.raises(UnsupportedEngineError, match="of one token" if num_tokens == 1 else "of several tokens"):
        prove(subject_of(experts_class(dtype="hidden")), kernel=kernel)


def test_outputs_that_are_no_numbers_are_noticed():
    def kernel(hidden_states, **arguments):
        return torch.full_like(hidden_states, float("nan"))

    with pytest.raises(UnsupportedEngineError, match="differ from the stock module's by nan"):
        prove(subject_of(experts_class(dtype="hidden")), kernel=kernel)
