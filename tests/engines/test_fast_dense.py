"""The fast kernel in a model's dense part: proven, reversible, and nothing else about the model changes."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch

from engines import tiny
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_linear import NativeLinear
from hotsplit.engines.transformers import cpu, fast_dense
from hotsplit.engines.transformers.fast_dense import FastLinear, use_native_linears
from hotsplit.errors import ConfigError, EngineError, UnsupportedEngineError
from hotsplit.plan.planfile import save_plan

LIBRARY = fast_library.load()
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here"),
]


@pytest.fixture
def every_layer(monkeypatch):
    """Tiny models have tiny layers."""
    real = use_native_linears
    monkeypatch.setattr(
        cpu, "use_native_linears", lambda model, *, library: real(model, library=library, least_bytes=0)
    )


def native_linears(model):
    return [name for name, module in model.named_modules() if type(module) is FastLinear]


def logits(model, *, tokens):
    with torch.no_grad():
        return model(tiny.prompts()["input_ids"][:1, :tokens]).logits


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_layers_are_native_until_the_model_is_closed(checkpoint, load, model_type):
    folder = checkpoint(model_type)
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    names = {name for name, module in stock.named_modules() if type(module) is torch.nn.Linear}
    assert names == set(native_linears(model))
    assert names
    assert torch.allclose(logits(stock, tokens=9), logits(model, tokens=9), rtol=0.1, atol=0.1)
    theirs = {name: value for name, value in stock.state_dict().items() if ".experts." not in name}
    mine = {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    model.hotsplit.close()
    assert [] == native_linears(model)
    assert not [module for module in model.modules() if "_hotsplit_native" in module.__dict__]


@pytest.mark.usefixtures("every_layer")
def test_the_bits_do_not_depend_on_the_threads(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False, kernel="fast")
    expected, threads = logits(model, tokens=1), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(expected, logits(model, tokens=1))
    finally:
        torch.set_num_threads(threads)


def test_small_layers_and_the_exact_kernel_stay_torchs(checkpoint, load):
    linears = {"exact": native_linears(load(checkpoint("qwen3_moe"), kernel="exact"))}
    model = load(checkpoint("qwen3_moe"), kernel="fast")
    small = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.nbytes < 64 << 10]
    assert small
    assert not [layer for layer in small if type(layer) is FastLinear]
    assert {"exact": []} == linears


@pytest.mark.usefixtures("every_layer")
def test_a_product_that_fails_its_proof_stays_torchs_which_is_said(checkpoint, load, monkeypatch):
    monkeypatch.setattr(NativeLinear, "share_of_bound", lambda *_, **__: float("nan"))
    model = load(checkpoint("qwen3_moe"), kernel="fast")
    assert [] == native_linears(model)
    assert {"exact-instead"} == {n.name for n in model.hotsplit.notices if "linear layers" in n.text}


def test_subclasses_and_other_types_are_left_alone():
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([Own(64, 64), torch.nn.Linear(64, 64, dtype=torch.float64), torch.nn.Linear(64, 64)])
    dense = use_native_linears(model, library=LIBRARY, least_bytes=0)
    assert [model[2]] == dense.layers
    dense.close()
    dense.close()
    assert torch.nn.Linear is type(model[2])
    assert fast_dense.FastDense().notices == []


def one_layer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16)).requires_grad_(requires_grad=False)
    return model, use_native_linears(model, library=LIBRARY, least_bytes=0), torch.randn(1, 64).bfloat16()


def test_copies_and_pickles_are_torchs_own_layers():
    model, _, x = one_layer()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.nn.Linear is type(other[0])
        assert "_hotsplit_native" not in other[0].__dict__
        assert torch.equal(torch.nn.functional.linear(x, model[0].weight, model[0].bias), other(x))
    assert FastLinear is type(model[0])


def test_what_another_library_did_to_a_layer_outlives_the_native_code():
    class Own(torch.nn.Linear):
        pass

    model, dense, x = one_layer()
    other, others, _ = one_layer()
    model[0].forward = model[0].forward  # as a wrapper keeps it, bound to the class of now
    other[0].__class__ = Own
    dense.close()
    others.close()
    assert torch.equal(torch.nn.functional.linear(x, model[0].weight, model[0].bias), model(x))
    assert Own is type(other[0])


def test_a_trained_bias_gets_its_gradient_and_a_traced_graph_its_product():
    model, _, x = one_layer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and still used
        traced = torch.jit.trace(model, x)
    assert torch.allclose(model(2 * x).float(), traced(2 * x).float(), rtol=0.1, atol=0.1)
    model[0].bias.requires_grad_()
    model(x).sum().backward()
    assert torch.equal(torch.ones(64, dtype=torch.bfloat16), model[0].bias.grad)


@pytest.mark.parametrize("kernel", ["exact", "fast"])
def test_a_router_that_is_trained_is_refused_in_one_line(checkpoint, load, kernel):
    model = load(checkpoint("qwen3_moe"), dynamic=False, kernel=kernel)
    model.get_parameter("model.layers.0.mlp.gate.weight").requires_grad_()
    with pytest.raises(EngineError, match="only infer"):
        model.model.layers[0].mlp(torch.randn(1, 3, model.config.hidden_size, dtype=model.dtype))


def test_closing_lets_the_rows_memory_go(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False, kernel="fast")
    logits(model, tokens=3)
    memory = weakref.ref(model.hotsplit.banks.rows._arena._memory)
    assert memory() is not None
    model.hotsplit.close()
    gc.collect()
    assert memory() is None


def test_notices_are_the_models_and_an_error_in_strict_mode_where_nothing_is_native(checkpoint, load, monkeypatch):
    def refuse(module, **_):
        raise UnsupportedEngineError("experts of Toy", got="a reason", wanted="another", do="use exact")

    monkeypatch.setattr(cpu, "native_experts", refuse)
    folder = checkpoint("qwen3_moe")
    model = load(folder, dynamic=False, kernel="fast")
    assert ["exact-instead"] == [notice.name for notice in model.hotsplit.notices if "a reason" in notice.text]
    plan = folder / "plan.json"  # strict mode has no doubts of its own about a plan that is given
    save_plan(model.hotsplit.plan, plan)
    with pytest.raises(ConfigError, match="exact-instead"):
        load(folder, kernel="fast", strict=True, dynamic=False, plan=plan)
