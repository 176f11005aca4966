"""The class that stands in for vLLM's: every subclass is covered once, and a layer that is not claimed runs stock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hotsplit.bank.rows import place
from hotsplit.engines.vllm import route_op, session
from hotsplit.engines.vllm.experts import HotsplitExperts, cover_all
from hotsplit.engines.vllm.weights import Claim
from hotsplit.errors import UnsupportedEngineError


class Registry(dict):
    """vLLM's: a class is looked up by its own name when it is instantiated."""

    def register_oot(self, *, name):
        def register(cls):
            assert name not in self, f"Duplicate layer name: {name}"
            self[name] = cls
            return cls

        return register

    def covers(self, cls):
        """Whether the class has a replacement of its own, in front of it and of ours."""
        found = self.get(cls.__name__)
        return found is not None and (HotsplitExperts, cls) == found.__bases__


@pytest.fixture
def registry():
    return Registry()


def family():
    class RoutedExperts:
        pass

    class Model(RoutedExperts):
        pass

    class Child(Model):
        pass

    return RoutedExperts, Model, Child


def test_the_class_its_subclasses_and_theirs_are_covered(registry):
    classes = family()
    cover_all(classes[0], register_oot=registry.register_oot)
    assert [True, True, True] == [registry.covers(cls) for cls in classes]
    assert ["HotsplitRoutedExperts", "HotsplitModel", "HotsplitChild"] == [cls.__name__ for cls in registry.values()]


def test_a_class_that_is_defined_later_is_covered(registry):
    root, model, _ = family()
    cover_all(root, register_oot=registry.register_oot)

    class Late(model):
        pass

    class Later(Late):
        pass

    assert [True, True] == [registry.covers(cls) for cls in (Late, Later)]


def test_a_class_with_two_covered_parents_is_covered_once(registry):
    root, model, _ = family()

    class Other(root):
        pass

    class Both(model, Other):
        pass

    cover_all(root, register_oot=registry.register_oot)
    assert registry.covers(Both)


def test_covering_again_changes_nothing(registry):
    root, model, _ = family()
    for _ in range(2):
        cover_all(root, register_oot=registry.register_oot)
    assert 3 == len(registry)

    class Late(model):
        pass

    assert (4, True) == (len(registry), registry.covers(Late))


def test_without_covering_nothing_is_replaced(registry):
    root, *_ = family()

    class Late(root):
        pass

    assert {} == registry


def test_what_classes_do_when_they_are_subclassed_is_still_done_for_the_subclass(registry):
    told = []

    class Base:
        def __init_subclass__(cls, /, mark="", **kwargs):
            told.append((cls.__name__, mark))
            super().__init_subclass__(**kwargs)

    class RoutedExperts(Base):
        pass

    class Careful(RoutedExperts):
        def __init_subclass__(cls, **kwargs):
            told.append(("careful", cls.__name__))
            super().__init_subclass__(**kwargs)

    cover_all(RoutedExperts, register_oot=registry.register_oot)
    told.clear()

    class Late(RoutedExperts, mark="a"):
        pass

    class Later(Careful, mark="b"):
        pass

    ours = {("HotsplitLate", ""), ("HotsplitLater", ""), ("careful", "HotsplitLater")}
    assert [("Late", "a"), ("careful", "Later"), ("Later", "b")] == [one for one in told if one not in ours]
    assert [True, True] == [registry.covers(cls) for cls in (Late, Later)]


def test_a_root_with_a_hook_of_its_own_keeps_it(registry):
    told = []

    class RoutedExperts:
        def __init_subclass__(cls):
            told.append(cls.__name__)

    cover_all(RoutedExperts, register_oot=registry.register_oot)

    class Late(RoutedExperts):
        pass

    assert "Late" in told
    assert registry.covers(Late)


def test_a_class_that_something_else_stands_in_for_is_an_error(registry):
    root, *_ = family()
    registry["Model"] = object
    with pytest.raises(UnsupportedEngineError, match=r"Model: got another class in its place .*; uninstall the other"):
        cover_all(root, register_oot=registry.register_oot)


# -- one layer


class Method:
    is_monolithic = False

    def create_weights(self, layer, num_experts):
        layer.made_with = num_experts

    def process_weights_after_loading(self, layer):
        pass


class RoutedExperts(torch.nn.Module):
    """The stock class, as far as hotsplit goes through it."""

    method = Method

    def __init__(self, layer_name, params_dtype, moe_config, quant_config=None):
        super().__init__()
        self.layer_name, self.moe_config, self.quant_config = layer_name, moe_config, quant_config
        self.local_num_experts = 8
        self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)
        self.quant_method.create_weights(self, num_experts=moe_config.num_local_experts)

    def _get_quant_method(self, prefix, quant_config, moe_config):
        return self.method()

    def _map_global_expert_id_to_local_expert_id(self, expert_id):
        return expert_id

    def weight_loader(self):
        pass

    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None):
        return topk_ids, shared_experts


class Experts(HotsplitExperts, RoutedExperts):
    pass


ROUTED = []


@pytest.fixture(scope="module")
def route():
    """The op, once in this process: it adds a hundred."""
    return route_op.define(lambda topk_ids, layer_name: (ROUTED.append(layer_name), topk_ids + 100)[1])


def config(**more):
    return SimpleNamespace(num_experts=8, num_local_experts=8, **more)


def begin(monkeypatch, *, claimed):
    rows = place((2, 5), num_experts=8, spare=True, inclusive=False)
    memory = SimpleNamespace(memory=SimpleNamespace(num_banks=1))
    claim = Claim(layer_id=4, name="a", rows=rows, memory=memory, row_bytes=1, watch=SimpleNamespace(), prover=None)
    claim.watch.advance = lambda num_bytes: None
    adopted = []
    fake = SimpleNamespace(claim=lambda name, moe_config: claim if claimed else None, adopt=adopted.append)
    monkeypatch.setattr(session, "_current", fake)
    return rows, adopted


def test_a_claimed_layer_has_rows_in_place_of_experts(monkeypatch):
    _, adopted = begin(monkeypatch, claimed=True)
    moe_config = config(require_decomposed_backend=False)
    layer = Experts("a", torch.float32, moe_config)
    assert (9, 9, 9, 9) == (
        layer.made_with,
        layer.local_num_experts,
        moe_config.num_experts,
        moe_config.num_local_experts,
    )
    assert (4, [layer], True) == (layer.hotsplit_layer_id, adopted, moe_config.require_decomposed_backend)


def test_a_claimed_layer_loads_experts_into_planned_rows_and_routes(monkeypatch, route):
    rows, _ = begin(monkeypatch, claimed=True)
    layer, ids = Experts("a", torch.float32, config()), torch.tensor([[1, 2]])
    assert list(rows.row_map) == [layer._map_global_expert_id_to_local_expert_id(expert) for expert in range(8)]
    ROUTED.clear()
    routed, shared = layer.forward_modular(None, None, ids, shared_experts="shared")
    assert ([[101, 102]], "shared", ["a"]) == (routed.tolist(), shared, ROUTED)
    assert [[1, 2]] == layer.forward_rows(None, None, ids)[0].tolist()
    assert ["a"] == ROUTED, "rows that are known already are not routed again"


def test_a_layer_in_two_banks_is_called_as_its_two_calls_say_with_row_ids_and_shared_experts(monkeypatch, route):
    begin(monkeypatch, claimed=True)
    layer, asked = Experts("a", torch.float32, config()), []
    object.__setattr__(layer, "hotsplit_calls", lambda *args, **kwargs: asked.append((args, kwargs)) or "the sum")
    ids = torch.tensor([[1, 2]])
    assert "the sum" == layer.forward_modular("x", "weights", ids, shared_experts="shared")
    ((x, weights, row_ids), more) = asked.pop()
    assert ("x", "weights", [[101, 102]], {"shared_experts": "shared"}) == (x, weights, row_ids.tolist(), more)
    assert "the sum" == layer.forward_rows("x", "weights", ids)
    assert [(("x", "weights", ids), {})] == asked


def test_a_layer_that_is_left_alone_is_the_stock_one(monkeypatch, route):
    _, adopted = begin(monkeypatch, claimed=False)
    moe_config = config(require_decomposed_backend=False)
    layer = Experts("b", torch.float32, moe_config)
    ROUTED.clear()
    assert [[1, 2]] == layer.forward_modular(None, None, torch.tensor([[1, 2]]))[0].tolist()
    assert (8, 8, 5, None) == (
        layer.made_with,
        layer.local_num_experts,
        layer._map_global_expert_id_to_local_expert_id(5),
        layer.hotsplit_layer_id,
    )
    assert ([], [], False) == (adopted, ROUTED, moe_config.require_decomposed_backend)


@pytest.mark.parametrize("claimed", [True, False])
def test_a_monolithic_kernel_is_refused_with_the_flag_that_avoids_it_where_the_layer_is_ours(monkeypatch, claimed):
    class Monolithic(Method):
        is_monolithic = True

    class Other(Experts):
        method = Monolithic

    begin(monkeypatch, claimed=claimed)
    if not claimed:
        assert 8 == Other("a", torch.float32, config()).made_with
        return
    with pytest.raises(UnsupportedEngineError, match=r"a: Monolithic: got a monolithic kernel.*--moe-backend"):
        Other("a", torch.float32, config())


def test_the_op_tells_a_compiler_its_shape_and_type(route):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        told = torch.ops.hotsplit.route(torch.empty(5, 2, dtype=torch.int32), "a")
    assert ((5, 2), torch.int32) == (tuple(told.shape), told.dtype)
