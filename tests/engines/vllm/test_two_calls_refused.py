"""Kernels that cannot be called for each of two banks are refused at start, with what they did instead."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from engines.vllm.toy_experts import (
    W2_BYTES,
    W13_BYTES,
    Declares,
    IgnoresMap,
    Kernel,
    KernelMethod,
    MappedExperts,
    layers_in,
    memory_of,
    near,
    stock,
)
from hotsplit.bank.fake_driver import NOTHING, FakeDriver
from hotsplit.engines.vllm import selftest, two_calls
from hotsplit.errors import UnsupportedEngineError


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


def load_with(layer, kernel, **options):
    return layer(MappedExperts(method=KernelMethod(kernel=kernel)), **options).load()


class SaysYes(Kernel):
    def supports_expert_map(self):
        return True


def test_a_kernel_that_declares_to_take_no_expert_map_is_refused_by_its_name_and_never_called(layer):
    expected = "layers.3.mlp.experts: two banks with KernelMethod: got Declares, which supports no expert map; wanted"
    with pytest.raises(UnsupportedEngineError, match=expected) as caught:
        load_with(layer, Declares)
    assert all(
        way_out in str(caught.value) for way_out in ("--moe-backend", "--cap-add SYS_NICE", "unset the HOTSPLIT_")
    )


def test_a_kernel_that_declares_to_take_one_is_believed_after_the_proof(layer):
    assert near(stock(), load_with(layer, SaysYes).output)


class Raises(Kernel):
    def local(self, layer, row_ids):
        if layer._expert_map is not None:
            raise NotImplementedError("expert maps")
        return row_ids


class AddsForeignPairs(Kernel):
    """Takes pairs without a row for pairs of row 0."""

    def local(self, layer, row_ids):
        return super().local(layer, row_ids).clamp(min=0)


class LeavesNonsense(Kernel):
    """Does not write what it does not compute."""

    def apply(self, layer, x, topk_weights, row_ids):
        output = super().apply(layer, x, topk_weights, row_ids)
        if layer._expert_map is None:
            return output
        is_foreign = (self.local(layer, row_ids) < 0).any(dim=1)
        return torch.where(is_foreign[:, None], torch.nan, output)


class Coarse(Kernel):
    """Rounds far more than its type would, and otherwise in each call."""

    def apply(self, layer, x, topk_weights, row_ids):
        output = super().apply(layer, x, topk_weights, row_ids)
        return output if layer._expert_map is None else output * (1 + 2**-6)


class Constant(Kernel):
    """The second bank's rows have no part in what it gives."""

    def apply(self, layer, x, topk_weights, row_ids):
        return torch.zeros_like(x)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (IgnoresMap, "two calls that differ from one by"),
        (AddsForeignPairs, "two calls that differ from one by"),
        (LeavesNonsense, "two calls that differ from one by inf times what rounding can do"),
        (Coarse, "two calls that differ from one by"),
        (Raises, "NotImplementedError: expert maps"),
        (Constant, "an output that does not depend on the rows of one bank"),
    ],
)
def test_a_kernel_that_does_not_honour_a_map_is_refused_with_what_it_did(layer, driver, kernel, what):
    with pytest.raises(UnsupportedEngineError) as caught:
        load_with(layer, kernel)
    assert f"two banks with KernelMethod: got {what}" in str(caught.value)
    assert "wanted a kernel that honours an expert map" in str(caught.value)
    assert driver.held == NOTHING, "before any row is put into a bank"


class ByPosition(Kernel):
    """The number of a row inside its bank plays a part."""

    def apply(self, layer, x, topk_weights, row_ids):
        output = super().apply(layer, x, topk_weights, row_ids)
        local_TK = self.local(layer, row_ids)
        return output * (1 + local_TK.clamp(min=0).sum(dim=1, keepdim=True) * (len(layer.w13_weight) < 7))


def test_rows_that_are_bound_to_their_place_are_refused_once_they_lie_in_the_banks(layer):
    with pytest.raises(UnsupportedEngineError, match="quantisation method KernelMethod: got an output that changed"):
        load_with(layer, ByPosition)


def shifted(make, *, by):
    """Expert maps that are off by so many rows."""
    return lambda *args, **kwargs: make(*args, **kwargs).roll(by)


@pytest.mark.parametrize("by", [1, -1, 3])
def test_a_wrong_map_is_seen(layer, monkeypatch, by):
    monkeypatch.setattr(two_calls, "expert_map", shifted(two_calls.expert_map, by=by))
    with pytest.raises(UnsupportedEngineError, match="two calls that differ from one"):
        layer().load()


def test_cold_rows_in_another_order_are_seen(layer, monkeypatch):
    fill = two_calls._filled_parts

    def swapped(memory, layer_id, whole_RB):
        hot, cold = fill(memory, layer_id, whole_RB)
        cold.copy_(cold.flip(0))
        return hot, cold

    monkeypatch.setattr(two_calls, "_filled_parts", swapped)
    assert not near(stock(), layer().load().output)


def test_kinds_are_proven_once_and_what_the_proof_found_is_said(layer, monkeypatch, caplog):
    caplog.set_level("INFO", logger="hotsplit.engines.vllm.selftest")
    proven, prove = [], selftest._prove_calls
    monkeypatch.setattr(selftest, "_prove_calls", lambda *args, **more: (proven.append(1), prove(*args, **more)))
    first, second = layer().create(), layer().create()
    second.weights._claim = first.weights._claim.__class__(
        **{
            name: getattr(first.weights._claim if name == "prover" else second.weights._claim, name)
            for name in first.weights._claim.__slots__
        }
    )
    for made in (first, second):
        made.module.load()
        made.finish()
    assert [1] == proven
    (said,) = [record.getMessage() for record in caplog.records]
    assert "KernelMethod is called once for each bank; two calls differ from one by" in said
    assert "not equal to the bit" in said


@pytest.mark.parametrize(("dtype", "top_k"), [(torch.bfloat16, 8), (torch.float16, 4), (torch.float32, 22)])
def test_the_bound_is_what_rounding_can_do(dtype, top_k):
    module = SimpleNamespace(
        top_k=top_k, quant_method=None, hidden_size=512, moe_config=SimpleNamespace(in_dtype=dtype)
    )
    module.parameters = lambda: iter([torch.empty(1)])
    trial = selftest._Trial(module, rows=SimpleNamespace(row_map=range(32)))
    unit = torch.finfo(dtype).eps / 2
    assert 10 * unit + 2048 * 2**-24 == pytest.approx(trial.bound(10))
