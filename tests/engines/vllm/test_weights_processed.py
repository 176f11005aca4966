"""What post-processing makes of a layer's weights ends in ranges again, row by row, and nothing is left behind."""

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
    Method,
    RoutedExperts,
    WholeExperts,
    expected,
    forward,
    layers_in,
    require_ranges,
)
from hotsplit.errors import BankError, UnsupportedEngineError


@pytest.fixture
def layer(tmp_path):
    with layers_in(tmp_path) as make:
        yield make


def put(module, name, data):
    module.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


class InPlace(RoutedExperts):
    """Scales what lies there."""

    @staticmethod
    def process(layer):
        layer.w13_weight.data.mul_(2)


class Packed(RoutedExperts):
    """The same number of bytes in a new parameter, in another order within each row."""

    @staticmethod
    def process(layer):
        put(layer, "w13_weight", layer.w13_weight.data.flip(-1))
        put(layer, "w2_weight", layer.w2_weight.data.flip(-1))

    def w13(self, row):
        return self.w13_weight[row].flip(-1)

    def w2(self, row):
        return self.w2_weight[row].flip(-1)


class OtherType(RoutedExperts):
    """The same bytes as words of another size, in another shape."""

    @staticmethod
    def process(layer):
        put(layer, "w13_weight", layer.w13_weight.data.view(torch.int16).view(-1, D * F * 2, 2).clone())

    def w13(self, row):
        return self.w13_weight[row].reshape(2 * F, -1).view(torch.float32)


class Grown(RoutedExperts):
    """Rows that are padded."""

    @staticmethod
    def process(layer):
        put(layer, "w13_weight", torch.nn.functional.pad(layer.w13_weight.data, (0, D)))

    def w13(self, row):
        return self.w13_weight[row][:, :D]


class Shrunk(RoutedExperts):
    """Rows in a smaller type."""

    @staticmethod
    def process(layer):
        put(layer, "w13_weight", layer.w13_weight.data.bfloat16())

    def w13(self, row):
        return self.w13_weight[row].float()


class NewData(RoutedExperts):
    """The same parameter over new memory."""

    @staticmethod
    def process(layer):
        layer.w2_weight.data = layer.w2_weight.data * 2


CHANGES = [InPlace, Packed, OtherType, Grown, Shrunk, NewData]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_processed_layer_computes_what_the_stock_one_does_and_lies_in_ranges(layer, kind, dynamic):
    made = layer(kind(method=Method(kind.process)), dynamic=dynamic).load()
    assert torch.equal(expected(kind, process=kind.process), made.output)
    require_ranges(made, "w13_weight", "w2_weight")


@pytest.mark.parametrize("kind", CHANGES)
def test_all_that_a_processed_row_is_made_of_moves_with_it(layer, kind):
    made = layer(kind(method=Method(kind.process))).load()
    a, b = made.rows.row_map[0], made.rows.row_map[4]
    made.memory.exchange(0, a, b)
    moved = [{a: b, b: a}.get(row, row) for row in made.rows.row_map]
    assert torch.equal(expected(kind, process=kind.process), forward(made.module, moved))
    assert not torch.equal(expected(kind, process=kind.process), made.output)


@pytest.mark.parametrize(
    ("kind", "row_bytes"),
    [
        (Packed, W13_BYTES + W2_BYTES + 12),
        (Grown, 2 * W13_BYTES + W2_BYTES + 12),
        (Shrunk, W13_BYTES // 2 + W2_BYTES + 12),
    ],
)
def test_the_bytes_of_a_row_are_those_of_the_processed_one(layer, kind, row_bytes):
    made = layer(kind(method=Method(kind.process))).load()
    assert row_bytes == made.memory.row_bytes(0)


@pytest.mark.parametrize(("kind", "is_same"), [(Packed, True), (OtherType, True), (Grown, False), (Shrunk, False)])
def test_rows_of_the_same_size_go_back_into_the_same_range(layer, kind, is_same):
    made = layer(kind(method=Method(kind.process))).create()
    before = {one.address for one in made.memory.ranges}
    made.module.load()
    made.finish()
    assert is_same == (before == {one.address for one in made.memory.ranges})


def test_a_type_whose_elements_do_not_fill_the_old_last_dimension_goes_back_into_the_same_range(layer):
    class Odd(Method):
        def create_weights(self, module, num_experts, **_):
            super().create_weights(module, num_experts)
            put(module, "odd", torch.zeros(num_experts, 64, 3, dtype=torch.uint8))

    def process(module):
        module.odd.data[:, 1, 2] = 7
        put(module, "odd", module.odd.data.view(-1, 192).clone().view(torch.int32))

    made = layer(RoutedExperts(method=Odd(process))).load()
    require_ranges(made, "w13_weight", "w2_weight", "odd")
    assert [[0, 7 * 2**8, 0]] * 7 == made.module.odd[:, :3].tolist()


def test_a_renamed_weight_takes_the_range_of_the_old_name(layer):
    class Renamed(RoutedExperts):
        def w13(self, row):
            return self.w13_packed[row]

    def process(module):
        data = module.w13_weight.data.clone()
        del module.w13_weight
        put(module, "w13_packed", data)

    made = layer(Renamed(method=Method(process))).load()
    assert torch.equal(expected(Renamed, process=process), made.output)
    require_ranges(made, "w13_packed", "w2_weight")


def test_two_weights_made_into_one_leave_one_range(layer):
    class Joined(RoutedExperts):
        def w13(self, row):
            return self.weight[row, : 2 * F * D].view(2 * F, D)

        def w2(self, row):
            return self.weight[row, 2 * F * D :].view(D, F)

    def process(module):
        data = torch.cat([module.w13_weight.data.flatten(1), module.w2_weight.data.flatten(1)], dim=1)
        del module.w13_weight, module.w2_weight
        put(module, "weight", data)

    made = layer(Joined(method=Method(process))).load()
    assert torch.equal(expected(Joined, process=process), made.output)
    require_ranges(made, "weight")


def test_what_the_kernel_has_been_given_stays_where_it_is_and_moves_too(layer):
    class Given(RoutedExperts):
        def w2(self, row):
            return self.quant_method.moe_quant_config.w2.scale[row]

    def process(module):
        module.quant_method.moe_quant_config = SimpleNamespace(w2=SimpleNamespace(scale=module.w2_weight.data))
        put(module, "w2_weight", torch.empty(0))

    made = layer(Given(method=Method(process))).load()
    assert torch.equal(expected(Given, process=process), made.output)
    assert (2, W13_BYTES + W2_BYTES + 12) == (len(made.memory.ranges), made.memory.row_bytes(0))
    assert made.memory.owns(made.module.quant_method.moe_quant_config.w2.scale)


def test_weights_whose_rows_do_not_lie_apart_are_refused(layer):
    def process(module):
        put(module, "w2_weight", module.w2_weight.data.clone().transpose(1, 2))

    made = layer(RoutedExperts(method=Method(process))).create()
    made.module.load()
    with pytest.raises(UnsupportedEngineError, match=r"experts.w2_weight: got strides \(128, 1, 8\); wanted rows that"):
        made.finish()


def test_a_weight_that_lost_its_spare_row_is_an_error(layer):
    def process(module):
        put(module, "w2_weight", module.w2_weight.data[:E].clone())

    made = layer(RoutedExperts(method=Method(process))).create()
    made.module.get_expert_weights = lambda: list(made.module.parameters())
    made.module.load()
    with pytest.raises(BankError, match=r"got a tensor \(6, 16, 8\) .* wanted 7 rows"):
        made.finish()


@pytest.mark.parametrize("kind", [RoutedExperts, WholeExperts])
def test_the_spare_row_is_filled_before_the_layer_is_processed(layer, kind):
    seen = {}
    method = Method(lambda module: seen.update({name: one.tolist() for name, one in module.named_parameters()}))
    made = layer(kind(method=method)).load()
    assert ["w13_weight", "w2_weight", "w2_bias"] == list(seen)
    for rows in seen.values():
        assert rows[made.rows.row_map[0]] == rows[made.rows.spare_row]


def test_a_method_may_be_a_module(layer):
    class ModuleMethod(Method, torch.nn.Module):
        def __init__(self):
            torch.nn.Module.__init__(self)
            Method.__init__(self)

    made = layer(RoutedExperts(method=ModuleMethod())).load()
    assert torch.equal(expected(), made.output)
    require_ranges(made, "w13_weight", "w2_weight")
