"""A layer in two banks: loaded through a stage, split row by row, called twice, and near the stock one."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engines.vllm.toy_experts import (
    HOT,
    W2_BYTES,
    W13_BYTES,
    D,
    Declares,
    E,
    F,
    IgnoresMap,
    KernelMethod,
    MappedExperts,
    WholeExperts,
    bias_of,
    forward,
    layers_in,
    memory_of,
    near,
    stock,
    weights_of,
)
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.engines.vllm import two_calls
from hotsplit.engines.vllm.into_ranges import IntoRanges
from hotsplit.engines.vllm.two_calls import TwoCalls, staged
from hotsplit.errors import BankError, UnsupportedEngineError


class WholeMapped(MappedExperts):
    """Loads all experts in one copy."""

    weight_loader, load = WholeExperts.weight_loader, WholeExperts.load


class Doubled(MappedExperts):
    """Post-processing makes new tensors, of another order within each row."""

    @staticmethod
    def process(layer):
        for name in ("w13_weight", "w2_weight"):
            data = getattr(layer, name).data.flip(-1)
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def w13(self, row):
        return self.w13_weight[row].flip(-1)

    def w2(self, row):
        return self.w2_weight[row].flip(-1)


@pytest.fixture
def driver():
    made = FakeDriver()
    yield made
    gc.collect()
    assert made.held == NOTHING


@pytest.fixture
def layer(tmp_path, driver):
    """layer(module) -> on its way into two banks."""
    with layers_in(tmp_path) as make:
        yield lambda module=None, **options: make(
            module or MappedExperts(), memory=memory_of(driver), **{"row_bytes": W13_BYTES + W2_BYTES} | options
        )


# Loading.


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", [MappedExperts, WholeMapped])
def test_a_layer_in_two_banks_computes_what_the_stock_one_does(layer, kind, dynamic):
    made = layer(kind(), dynamic=dynamic).load()
    assert 2 == len(made.module.hotsplit_calls.views)
    assert near(stock(kind), made.output)
    assert (E * (W13_BYTES + W2_BYTES), 1) == (made.watch.done_bytes, made.watch.done_layers)


def test_a_processed_layer_computes_what_the_stock_one_does(layer):
    made = layer(Doubled(method=KernelMethod(Doubled.process))).load()
    assert near(stock(Doubled, process=Doubled.process), made.output)


def test_every_expert_lies_in_its_planned_row_of_its_bank(layer):
    made = layer().load()
    views, first_cold = made.module.hotsplit_calls.views, made.rows.first_cold
    assert [(first_cold, 2 * F, D), (7 - first_cold, 2 * F, D)] == [tuple(one.w13_weight.shape) for one in views]
    for expert, row in enumerate(made.rows.row_map):
        view, local = views[row >= first_cold], row % first_cold if row < first_cold else row - first_cold
        w13, w2 = weights_of(expert)
        assert torch.equal(w13, view.w13_weight[local])
        assert torch.equal(w2, view.w2_weight[local])
        assert torch.equal(bias_of(expert), view.w2_bias[local])
        assert 1 + bias_of(expert).sum() / 64 == view.quant_method.moe_quant_config.scale[local]
    assert [expert in HOT for expert in range(E)] == [row < first_cold for row in made.rows.row_map]


def test_cold_rows_are_host_pages_and_small_tensors_stay_on_the_device_for_all_experts(layer, driver):
    made = layer().load()
    hot, cold = made.module.hotsplit_calls.views
    assert 2 == driver.held.registrations
    pages = {one.pages.address for one in made.memory.ranges}
    assert pages == {cold.w13_weight.data_ptr(), cold.w2_weight.data_ptr()}
    assert made.module.w2_bias.data_ptr() == hot.w2_bias.data_ptr()
    assert made.module.w2_bias[made.rows.first_cold].data_ptr() == cold.w2_bias.data_ptr()
    assert W13_BYTES + W2_BYTES + 3 * 4 + 4 == made.memory.row_bytes(0)


def test_the_layer_keeps_the_parts_under_names_of_their_own_and_no_tensor_of_all_rows(layer):
    made = layer().load()
    big = ["w13_weight_hot", "w13_weight_cold", "w2_weight_hot", "w2_weight_cold"]
    assert {"w2_bias", *big} == {name for name, _ in made.module.named_parameters()}
    assert not hasattr(made.module, "w13_weight")
    hot, cold = made.module.hotsplit_calls.views
    assert made.module.w13_weight_hot is hot.w13_weight
    assert made.module.w13_weight_cold is cold.w13_weight
    assert [False, True] == [getattr(one, "_vllm_is_uva_offloaded", False) for one in (hot.w2_weight, cold.w2_weight)]


def test_what_is_emptied_on_the_layer_is_empty_in_its_views(layer):
    made = layer().load()
    made.module.w13_weight_cold.data = torch.empty(0)
    assert 0 == made.module.hotsplit_calls.views[1].w13_weight.numel()


@pytest.mark.parametrize(("hot", "names"), [(range(E), ["hot"]), ((), ["cold"])])
def test_a_layer_that_is_wholly_in_one_bank_is_called_once_and_equal_to_the_bit(layer, hot, names):
    made = layer(hot=tuple(hot)).load()
    (view,) = made.module.hotsplit_calls.views
    assert view._expert_map is None
    assert {f"w13_weight_{name}" for name in names} <= {name for name, _ in made.module.named_parameters()}
    assert torch.equal(stock(), made.output)


@pytest.mark.parametrize("kernel", [IgnoresMap, Declares])
def test_a_layer_that_is_wholly_in_one_bank_needs_no_kernel_with_a_map(layer, kernel):
    made = layer(MappedExperts(method=KernelMethod(kernel=kernel)), hot=()).load()
    assert torch.equal(stock(), made.output)


def test_fused_shared_experts_alone_in_the_hot_bank_are_a_bank_too(layer):
    made = layer(hot=(), dynamic=False, fixed=1).create()
    made.module.load()
    fixed = made.rows.fixed_rows[0]
    for one in made.module.parameters():
        one.data[fixed] = one.data[made.rows.row_map[2]]
    made.finish()
    assert [1, E] == [len(view.w13_weight) for view in made.module.hotsplit_calls.views]
    rows = list(made.rows.row_map)
    rows[2] = fixed
    assert near(stock(), forward(made.module, rows))


def test_the_stage_and_the_methods_own_tensors_are_let_go_layer_by_layer(layer, monkeypatch):
    held, process = [], KernelMethod.process_weights_after_loading

    class Pages(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            made = super().__new__(cls, *args, **kwargs)
            held.append(weakref.ref(made))
            return made

    def watched(method, module):
        process(method, module)
        held.append(weakref.ref(method.moe_kernel.fused_experts))

    monkeypatch.setattr(two_calls.mmap, "mmap", Pages)
    monkeypatch.setattr(KernelMethod, "process_weights_after_loading", watched)
    made = layer().create()
    made.module.load()
    assert [True, True] == [one() is not None for one in held], "two stages"
    gc.disable()
    try:
        made.finish()
        assert [False] * 3 == [one() is not None for one in held], "at once, without a sweep of the collector"
    finally:
        gc.enable()


def test_a_stage_costs_nothing_until_it_is_written_to():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    held = staged((64, 1 << 30), dtype=torch.uint8)
    held[3, : 1 << 20] = 1
    assert 1 << 20 <= resident() - before < 64 << 20
    assert [0, 1] == held[2:4, 5].tolist()


@pytest.mark.parametrize(("make", "value"), [(torch.zeros, 0), (torch.ones, 1)])
def test_a_stage_of_zeros_is_not_written_and_others_are(layer, monkeypatch, make, value):
    made, filled = layer(), []
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: (filled.append(value), fill(tensor, value))[1])
    with IntoRanges(made.weights.new_tensor, is_zero=True):
        tensor = make(7, 4, 64)
    assert (7 * [1] * value, value) == (filled, int(tensor[3, 2, 1]))


def test_a_stage_that_no_addresses_are_left_for_is_an_error():
    with pytest.raises(BankError, match="host memory to load experts into: .*; look at ulimit -v"):
        staged((1 << 10, 1 << 52), dtype=torch.uint8)


def test_experts_that_were_never_loaded_are_named(layer):
    for kind in (MappedExperts, WholeMapped):
        made = layer(kind()).create()
        made.module.load(experts=[0, 1, 3, 5])
        with pytest.raises(UnsupportedEngineError, match="the weights of 2 of 6 experts"):
            made.finish()


def test_a_bank_that_does_not_fit_is_an_error_and_nothing_is_held(tmp_path):
    driver = FakeDriver(FakeMachine(lockable_bytes=4096))
    with layers_in(tmp_path) as make:
        made = make(MappedExperts(), memory=memory_of(driver)).create()
        made.module.load()
        with pytest.raises(BankError, match="cannot be locked"):
            made.finish()
    assert driver.held == NOTHING


# Rows that move.


@pytest.mark.parametrize(("a", "b"), [(0, 4), (1, 2), (3, 5)])
def test_all_that_a_row_is_made_of_moves_with_it_between_and_within_banks(layer, a, b):
    made = layer().load()
    rows = made.rows.row_map
    made.memory.exchange(0, rows[a], rows[b])
    moved = [{rows[a]: rows[b], rows[b]: rows[a]}.get(row, row) for row in rows]
    assert near(stock(), forward(made.module, moved))
    assert not near(stock(), made.output)


def test_an_expert_that_is_swapped_in_through_the_spare_row_is_computed_from_the_hot_bank(layer):
    made = layer().load()
    rows = list(made.rows.row_map)
    cold = next(expert for expert, row in enumerate(rows) if row >= made.rows.first_cold)
    made.memory.copy_row(0, source_row=rows[cold], target_row=made.rows.spare_row)
    made.module.hotsplit_calls.views[1].w13_weight[rows[cold] - made.rows.first_cold] = torch.nan
    assert made.output.isnan().any()
    rows[cold] = made.rows.spare_row
    assert near(stock(), forward(made.module, rows))


# The calls.


def test_shared_experts_are_computed_once(layer):
    made, told = layer().load(), []
    x, weights = torch.randn(3, D), torch.ones(3, 2)
    ids = torch.tensor([[0, 6], [1, 5], [2, 3]])
    made.module.forward_modular(x, weights, ids, shared_experts=lambda: told.append("shared"))
    assert ["shared"] == told
    made.module.forward_modular(x, weights, ids, lambda: told.append("by position"))
    assert ["shared", "by position"] == told


def test_the_output_is_the_sum_of_the_banks_and_each_is_asked_with_the_layers_row_ids():
    asked = []

    def view(value):
        return SimpleNamespace(
            forward_rows=lambda *args, **more: (asked.append((args, more)), torch.full((2,), value))[1]
        )

    calls = TwoCalls([view(1.0), view(2.5)])
    assert [3.5, 3.5] == calls("x", "weights", "rows", "shared", by="name").tolist()
    assert [(("x", "weights", "rows", "shared"), {"by": "name"}), (("x", "weights", "rows"), {})] == asked


def test_both_calls_have_shapes_that_no_value_decides_and_ask_the_host_nothing(layer):
    from torch._subclasses import FakeTensorMode

    made = layer().load()
    with FakeTensorMode(allow_non_fake_inputs=True):
        # A look at a value, or a shape that depends on one, is an error here.
        told = made.module.forward_rows(torch.empty(5, D), torch.empty(5, 2), torch.zeros(5, 2, dtype=torch.int64))
    assert (5, D) == tuple(told.shape)


def test_neither_addresses_nor_maps_change_from_step_to_step(layer):
    made = layer().load()

    def places():
        views = made.module.hotsplit_calls.views
        return [(one.w13_weight.data_ptr(), one.w2_weight.data_ptr(), one._expert_map.data_ptr()) for one in views]

    before = places()
    for _ in range(2):
        made.memory.exchange(0, 0, 6)
        assert made.output.isfinite().all()
    assert before == places()
