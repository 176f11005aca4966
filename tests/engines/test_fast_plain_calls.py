"""Kernel fast leaves to torch what is more than numbers, and tensors that are not the bytes at their address."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from engines import tiny
from hotsplit.bank.kernels.fast_linear import NativeLinear
from hotsplit.engines.transformers import cpu
from hotsplit.engines.transformers.fast_dense import use_native_linears


@pytest.fixture
def model(checkpoint, load, monkeypatch):
    """Of float32, with every linear layer native."""
    monkeypatch.setattr(
        cpu, "use_native_linears", lambda model, *, library: use_native_linears(model, library=library, least_bytes=0)
    )
    return load(checkpoint("qwen3_moe", dtype=torch.float32), dynamic=False, kernel="fast")


def modules_of(model):
    layer = model.model.layers[0]
    return {"linear": layer.self_attn.q_proj, "norm": layer.input_layernorm, "experts": layer.mlp}


def numbers(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def tokens():
    return torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0))


def test_a_default_device_does_not_move_what_native_code_writes_to(model):
    ids = torch.arange(7)[None]
    with torch.no_grad():
        before = model(ids).logits
        with torch.device("meta"):
            during = [module(torch.ones(1, 2, 64, device="cpu")) for module in modules_of(model).values()]
    assert all(numbers(out).is_cpu for out in during)
    assert before.is_cpu


@pytest.mark.parametrize("name", ["linear", "norm", "experts"])
def test_a_tensor_that_is_still_to_be_negated_has_its_values(model, tokens, name):
    module = modules_of(model)[name]
    lazy = torch._neg_view(tokens.neg())
    assert torch.equal(tokens, lazy)
    with torch.no_grad():
        assert torch.allclose(numbers(module(tokens)), numbers(module(lazy)), atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "norm"])
def test_zeros_that_lie_nowhere_are_zeros(model, name):
    with torch.no_grad():
        assert not numbers(modules_of(model)[name](torch._efficientzerotensor((1, 3, 64)))).any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", ["linear", "norm"])
def test_forward_derivatives_are_torchs(model, tokens, name):
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(tokens, torch.ones_like(tokens))
        assert forward_ad.unpack_dual(numbers(modules_of(model)[name](dual))).tangent is not None


@pytest.mark.parametrize("name", ["linear", "norm"])
def test_a_vectorised_call_is_torchs(model, tokens, name):
    module = modules_of(model)[name]
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(module)(tokens), module(tokens), atol=1e-5)


@pytest.mark.parametrize("where", ["norm", "router"])
def test_a_weight_that_is_computed_is_seen(model, where):
    layer, ids = model.model.layers[0], torch.arange(7)[None]
    module = layer.input_layernorm if where == "norm" else layer.mlp.gate
    with torch.no_grad():
        before = model(ids).logits
        torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Identity())
        assert torch.allclose(before, model(ids).logits, atol=1e-4)
        module.parametrizations.weight.original.mul_(0)
        assert not torch.allclose(before, model(ids).logits, atol=1e-4)


def test_without_all_that_the_native_code_is_what_runs(model, tokens, monkeypatch):
    calls = []
    real = NativeLinear.__call__
    monkeypatch.setattr(
        NativeLinear, "__call__", lambda self, *args, **kwargs: (calls.append(1), real(self, *args, **kwargs))[1]
    )
    with torch.no_grad():
        modules_of(model)["linear"](tokens)
        tiny.play(model)
    assert len(calls) > 1
