"""The fast kernel in a model's routers: native logits, everything else the router's own code."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from engines import tiny
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_linear import MOST_ROWS, NativeLinear
from hotsplit.engines.transformers.fast_classes import NATIVE
from hotsplit.engines.transformers.fast_routers import use_native_routers

LIBRARY = fast_library.load()
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here"),
]
ROUTERS_OF = {
    "qwen3_moe": 2,
    "mixtral": 2,
    "olmoe": 2,
    "gpt_oss": 2,
    "granitemoe": 2,
    "minimax_m2": 2,
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "deepseek_v4": 2,
    "nemotron_h": 1,
}
IN_FLOAT32 = {"deepseek_v3", "glm4_moe", "nemotron_h"}


@pytest.fixture
def products(monkeypatch):
    """Every native product: types of tokens and of its result."""
    real, seen = NativeLinear.__call__, []

    def watched(self, tokens, *, weight, bias):
        out = real(self, tokens, weight=weight, bias=bias)
        seen.append((tokens.dtype, weight.dtype, out.dtype))
        return out

    monkeypatch.setattr(NativeLinear, "__call__", watched)
    return seen


def routers(model):
    return [module for module in model.modules() if NATIVE in module.__dict__]


def called(router, x):
    """With whatever else a router's forward wants."""
    extras = {
        "MiniMaxM2TopKRouter": lambda: (torch.zeros(router.weight.shape[0]),),
        "DeepseekV4HashRouter": lambda: (torch.arange(3, 3 + x.shape[0]),),
    }
    return router(x, *extras.get(type(router).__name__, tuple)())


def toy(name="qwen3_moe", **settings):
    """One router of a model's class."""
    kinds = {"qwen3_moe": "Qwen3MoeTopKRouter", "glm4_moe": "Glm4MoeTopkRouter", "gpt_oss": "GptOssTopKRouter"}
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    config = tiny.transformers.AutoConfig.for_model(name, **(tiny._BASE | tiny.CONFIGS[name]))
    torch.manual_seed(0)
    router = getattr(module, kinds[name])(config).to(torch.bfloat16).requires_grad_(requires_grad=False)
    for parameter in router.parameters():
        parameter.normal_(std=0.3)
    return torch.nn.Sequential(router)


@pytest.mark.parametrize("model_type", ROUTERS_OF)
def test_logits_are_native_and_the_rest_is_the_routers_own(checkpoint, products, model_type):
    stock, model = (tiny.stock(checkpoint(model_type)) for _ in range(2))
    kinds = [type(module) for module in model.modules()]
    served = use_native_routers(model, library=LIBRARY)
    assert ROUTERS_OF[model_type] == len(served.routers)
    assert kinds != [type(module) for module in model.modules()]
    theirs = [module for module in stock.modules() if type(module) in {type(r).__base__ for r in served.routers}]
    products.clear()
    for router, own in zip(served.routers, theirs, strict=True):
        for num_tokens in (1, MOST_ROWS, MOST_ROWS + 1):
            x = torch.randn(num_tokens, tiny.HIDDEN).bfloat16()
            with torch.no_grad():
                mine, other = called(router, x), called(own, x)
            assert [o.dtype for o in other] == [m.dtype for m in mine]
            assert all(type(m) is torch.Tensor for m in mine)
            assert torch.allclose(other[0].float(), mine[0].float(), rtol=2**-6, atol=2**-6)
            assert torch.equal(other[2].sort().values, mine[2].sort().values)
            assert torch.allclose(other[1].float().sort().values, mine[1].float().sort().values, rtol=2**-5, atol=2**-5)
    tokens = torch.float32 if model_type in IN_FLOAT32 else torch.bfloat16
    assert [(tokens, torch.bfloat16, tokens)] * (2 * len(theirs)) == products
    served.close()
    served.close()
    assert kinds == [type(module) for module in model.modules()]
    assert [] == routers(model)


def test_a_weight_is_read_where_it_lies_at_the_time_of_the_call():
    model = toy()
    use_native_routers(model, library=LIBRARY)
    x = torch.randn(2, tiny.HIDDEN).bfloat16()
    with torch.no_grad():
        before = model(x)[0]
        model[0].weight.mul_(2)
        assert torch.equal(2 * before, model(x)[0])
        model[0].weight.data = 4 * model[0].weight.data
        assert torch.equal(8 * before, model(x)[0])


def test_parameters_copies_and_pickles_are_what_they_were():
    model = toy()
    own, before = type(model[0]), (repr(model), list(model.state_dict()), model[0].weight)
    use_native_routers(model, library=LIBRARY)
    assert isinstance(model[0], own)
    assert before[:2] == (repr(model), list(model.state_dict()))
    assert model[0].weight is before[2]
    assert torch.nn.Parameter is type(model[0].weight)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert own is type(other[0])
        assert NATIVE not in other[0].__dict__
    use_native_routers(copy.deepcopy(model), library=LIBRARY)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_unusual_calls_are_torchs(products, name):
    stock, model = toy(name), toy(name)
    x = torch.randn(2, tiny.HIDDEN).bfloat16()
    use_native_routers(model, library=LIBRARY)
    products.clear()
    with torch.autocast("cpu"):
        assert torch.equal(stock(x)[0], model(x)[0])
    assert torch.equal(stock[0](hidden_states=x)[0], model[0](hidden_states=x)[0])
    assert torch.equal(stock(x)[0], torch.compile(model, backend="eager", fullgraph=True)(x)[0])
    model[0].weight.requires_grad_()
    model(x)[1].sum().backward()
    assert model[0].weight.grad is not None
    assert [] == products


class Odd(torch.nn.Module):
    """Does all sorts of things with its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.top_k, self.calls = torch.nn.Parameter(torch.randn(8, 64).bfloat16()), 3, 0

    def forward(self, x):
        self.calls += 1
        wide = self.weight.float()
        logits = torch.nn.functional.linear(x.float(), weight=wide)
        size = (wide * wide).sum() + torch.cat([wide, self.weight.to(torch.float32)]).abs().max()
        others = torch.nn.functional.linear(x, self.weight)
        doubled = x @ (2 * self.weight).T + self.weight.shape[0] + torch.einsum("tc,oc->to", x, self.weight)
        return logits, size, others, doubled, wide.dtype, self.weight.dtype, self.helped(), super().extra_repr()

    def helped(self):
        return self.weight.sum(), self.weight.type()


@torch.no_grad()
def test_whatever_else_a_forward_does_with_its_weight_is_done_with_the_real_one(products):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Odd())
    x = torch.randn(2, 64).bfloat16()
    expected = model(x)
    use_native_routers(model, library=LIBRARY)
    products.clear()
    found = model(x)
    assert 2 == model[0].calls
    assert [torch.float32, torch.bfloat16] == [tokens for tokens, _, _ in products]
    assert torch.allclose(expected[0], found[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(expected[2].float(), found[2].float(), rtol=2**-6, atol=2**-6)
    assert all(torch.equal(expected[i], found[i]) for i in (1, 3))
    assert expected[4:6] == found[4:6] == (torch.float32, torch.bfloat16)
    assert torch.equal(expected[6][0], found[6][0])
    assert expected[6][1] == found[6][1]


class Elsewhere(torch.nn.Parameter):
    """Numbers that may lie where no address says."""


@pytest.mark.parametrize("change", ["cast", "cut", "subclass", "wrapped"])
@torch.no_grad()
def test_a_router_that_was_changed_since_is_torchs(products, change):
    model = toy()
    use_native_routers(model, library=LIBRARY)
    products.clear()
    x, router = torch.randn(2, tiny.HIDDEN).bfloat16(), model[0]
    if change == "cast":
        model, x = model.float(), x.float()
    elif change == "cut":
        router.weight = torch.nn.Parameter(router.weight[:5].clone(), requires_grad=False)
    elif change == "subclass":
        router.weight = Elsewhere(router.weight.data)
        assert Elsewhere is type(router.weight)
    else:
        kind = type(router).__base__
        router.forward = lambda tokens: kind.forward(router, tokens)
    expected = torch.nn.functional.linear(x, router.weight)
    assert torch.equal(expected, model(x)[0])
    assert [] == products


def test_a_product_that_fails_its_proof_stays_torchs_which_is_said(monkeypatch):
    monkeypatch.setattr(NativeLinear, "share_of_bound", lambda *_, **__: float("nan"))
    served = use_native_routers(toy(), library=LIBRARY)
    assert [] == served.routers
    assert ["exact-instead"] * 2 == [notice.name for notice in served.notices]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe"])
def test_a_loaded_models_routers_are_native_until_it_is_closed(checkpoint, load, model_type):
    model = load(checkpoint(model_type), dynamic=False, kernel="fast")
    own = {type(m) for m in tiny.stock(checkpoint(model_type)).modules() if "outer" in type(m).__name__}
    mine = [m for m in model.modules() if "outer" in type(m).__name__]
    assert all(NATIVE in m.__dict__ and type(m).__base__ in own for m in mine)
    out = model(tiny.prompts()["input_ids"][:1, :5], output_router_logits=True) if model_type == "qwen3_moe" else None
    assert out is None or len(out.router_logits) == 2
    model.hotsplit.close()
    assert own == {type(m) for m in mine}
