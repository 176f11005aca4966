"""One layer's weights: big tensors are ranges from the start, loaders fill planned rows, and nothing is lost behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engines.vllm.toy_experts import (
    W2_BYTES,
    W13_BYTES,
    D,
    E,
    F,
    RoutedExperts,
    WholeExperts,
    bias_of,
    expected,
    layers_in,
    require_ranges,
    weights_of,
)
from hotsplit.engines.vllm.into_ranges import IntoRanges
from hotsplit.errors import EngineError, UnsupportedEngineError


@pytest.fixture
def layer(tmp_path):
    with layers_in(tmp_path) as make:
        yield make


def test_big_tensors_are_ranges_from_the_start_and_small_ones_are_plain(layer):
    made = layer().create()
    require_ranges(made, "w13_weight", "w2_weight")
    assert [(7, 2 * F, D), (7, D, F), (7, 3)] == [tuple(one.shape) for one in made.module.parameters()]
    assert not any(one.requires_grad for one in made.module.parameters())
    assert 0 == made.module.w2_bias.abs().sum()


MAKERS = {
    "empty, sizes apart": (lambda: torch.empty(7, 4, 16), None),
    "empty, a tuple": (lambda: torch.empty((7, 4, 16)), None),
    "empty, a Size": (lambda: torch.empty(torch.Size([7, 4, 16])), None),
    "empty, by name": (lambda: torch.empty(size=(7, 4, 16)), None),
    "zeros, sizes apart": (lambda: torch.zeros(7, 4, 16), 0.0),
    "zeros, a list by name": (lambda: torch.zeros(size=[7, 4, 16]), 0.0),
    "ones": (lambda: torch.ones(7, 4, 16, device="cpu"), 1.0),
    "full": (lambda: torch.full((7, 4, 16), 2.5), 2.5),
    "full, value by name": (lambda: torch.full((7, 4, 16), fill_value=2.5), 2.5),
    "full, all by name": (lambda: torch.full(size=(7, 4, 16), fill_value=2.5), 2.5),
}


@pytest.mark.parametrize(("make", "value"), MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_every_maker_gives_a_range_of_its_shape_type_and_value(layer, make, value, default):
    made = layer()
    torch.set_default_dtype(default)
    try:
        with IntoRanges(made.weights.new_tensor):
            tensor = make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.memory.owns(tensor)
    assert ((7, 4, 16), default) == (tuple(tensor.shape), tensor.dtype)
    assert value is None or bool((tensor == value).all())


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.empty(7, 4, 64, dtype=torch.uint8), torch.uint8),
        (lambda: torch.zeros((7, 4, 64), dtype=torch.float8_e4m3fn), torch.float8_e4m3fn),
        (lambda: torch.full((7, 4, 16), 3), torch.int64),
        (lambda: torch.full((7, 4, 64), fill_value=True), torch.bool),
        (lambda: torch.full((7, 4, 16), 3, dtype=torch.float16), torch.float16),
    ],
)
def test_a_range_has_the_type_that_the_maker_would_have_given(layer, make, dtype):
    made = layer()
    with IntoRanges(made.weights.new_tensor):
        tensor = make()
    assert (True, dtype, make().dtype) == (made.memory.owns(tensor), tensor.dtype, dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(7),
        lambda: torch.empty(6, 4, 16),
        lambda: torch.zeros(7, 3),
        lambda: torch.empty(7, 10),
        lambda: torch.empty(7, 4, 16, device="meta"),
        lambda: torch.rand(7, 4, 16),
        lambda: torch.empty([]),
    ],
    ids=["one dimension", "other rows", "under 1 %", "unaligned", "meta", "another maker", "a number"],
)
def test_what_is_not_for_a_range_is_made_as_ever(layer, make):
    made = layer()
    with IntoRanges(made.weights.new_tensor):
        tensor = make()
    assert ((), make().shape, make().device) == (made.memory.ranges, tensor.shape, tensor.device)


@pytest.mark.parametrize(("row_bytes", "is_range"), [(6400, True), (6401, False)])
def test_a_kind_of_tensor_is_a_range_from_one_percent_of_an_expert_on(layer, row_bytes, is_range):
    made = layer(row_bytes=row_bytes)
    with IntoRanges(made.weights.new_tensor):
        tensor = torch.empty(7, 16)
    assert is_range == made.memory.owns(tensor)


def test_what_is_made_on_meta_by_default_holds_nothing(layer):
    made = layer()
    with torch.device("meta"), IntoRanges(made.weights.new_tensor):
        assert "meta" == torch.empty(7, 4, 16).device.type
    assert () == made.memory.ranges


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loaded_layer_computes_what_the_stock_one_does(layer, dynamic):
    made = layer(dynamic=dynamic).load()
    assert torch.equal(expected(), made.output)
    require_ranges(made, "w13_weight", "w2_weight")
    assert (W13_BYTES + W2_BYTES + 3 * 4) == made.memory.row_bytes(0)


def test_the_loader_writes_every_expert_straight_into_its_planned_row(layer):
    made = layer().create()
    made.module.load()
    for expert, row in enumerate(made.rows.row_map):
        w13, w2 = weights_of(expert)
        assert torch.equal(w13, made.module.w13_weight[row])
        assert torch.equal(w2, made.module.w2_weight[row])
        assert torch.equal(bias_of(expert), made.module.w2_bias[row])


def test_rows_to_load_are_planned_then_fixed_then_the_spare_one(layer):
    weights = layer(fixed=2).weights
    assert [5, 1, 6, 7, 0, 8] == [weights.row_to_load(expert) for expert in range(E)]
    assert [2, 3, 4] == [weights.row_to_load(expert) for expert in (E, E + 1, E + 2)]


def test_an_expert_without_a_row_is_an_error(layer):
    with pytest.raises(EngineError, match=r"layers.3.mlp.experts, expert 6: got an expert that has no row"):
        layer(dynamic=False).weights.row_to_load(E)


def test_bytes_are_reported_once_for_each_expert_and_the_layer_when_it_is_done(layer):
    made = layer().create()
    made.module.load(experts=[0, 2])
    assert (2 * (W13_BYTES + W2_BYTES), 0) == (made.watch.done_bytes, made.watch.done_layers)
    made.module.load(experts=[0, 1, 3, 4, 5])
    made.finish()
    assert (E * (W13_BYTES + W2_BYTES), 1) == (made.watch.done_bytes, made.watch.done_layers)


def test_a_loader_of_whole_tensors_sees_exactly_the_experts_and_rows_are_permuted_after(layer):
    made = layer(WholeExperts()).create()
    assert made.weights.is_in_order
    assert [E, E, E] == [one.shape[0] for one in made.module.parameters()]
    assert 5 == made.weights.row_to_load(5)
    made.module.load()
    made.finish()
    assert [7, 7, 7] == [one.shape[0] for one in made.module.parameters()]
    assert torch.equal(expected(), made.output)
    require_ranges(made, "w13_weight", "w2_weight")
    assert (E * (W13_BYTES + W2_BYTES), 1) == (made.watch.done_bytes, made.watch.done_layers)


def test_whole_tensors_without_a_spare_row_are_permuted_too(layer):
    assert torch.equal(expected(), layer(WholeExperts(), dynamic=False).load().output)


def named(name):
    return SimpleNamespace(get_name=lambda: name)


class Inherits(RoutedExperts):
    """A model's own class, with the stock loader."""


class Hotsplit(Inherits):
    """As the covering class stands in front of it."""


class HotsplitWhole(WholeExperts):
    """The same in front of one with a loader of its own."""


@pytest.mark.parametrize(
    ("module", "is_in_order"),
    [
        (RoutedExperts(), False),
        (Hotsplit(), False),
        (HotsplitWhole(), True),
        (Hotsplit(quant_config=named("fp8")), False),
        (Hotsplit(quant_config=named("gpt_oss_mxfp4")), True),
    ],
)
def test_a_loader_of_ones_own_or_a_combined_format_loads_in_the_order_of_experts(layer, module, is_in_order):
    made = layer(module).create()
    assert is_in_order == made.weights.is_in_order


@pytest.mark.parametrize("kind", [RoutedExperts, WholeExperts])
def test_experts_that_were_never_loaded_are_named(layer, kind):
    made = layer(kind()).create()
    made.module.load(experts=[0, 1, 3, 5])
    with pytest.raises(UnsupportedEngineError, match="the weights of 2 of 6 experts: got a loader that goes") as caught:
        made.finish()
    assert [2, 4] == caught.value.missing
    assert 0 == made.watch.done_layers
