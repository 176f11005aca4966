"""The fast kernel in a model's norms: proven, reversible, and nothing else about the model changes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from engines import tiny
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_norm import NativeNorm
from hotsplit.engines.transformers.fast_classes import NATIVE
from hotsplit.engines.transformers.fast_norms import use_native_norms

LIBRARY = fast_library.load()
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here"),
]


def class_of(model_type, name):
    return getattr(__import__(f"transformers.models.{model_type}.modeling_{model_type}", fromlist=[name]), name)


KNOWN = {
    ("qwen3_moe", "Qwen3MoeRMSNorm"): "rounded first",
    ("deepseek_v3", "DeepseekV3RMSNorm"): "rounded first",
    ("glm4_moe", "Glm4MoeRMSNorm"): "rounded first",
    ("mixtral", "MixtralRMSNorm"): "rounded first",
    ("llama4", "Llama4TextRMSNorm"): "rounded first",
    ("gpt_oss", "GptOssRMSNorm"): "rounded last",
    ("flex_olmo", "FlexOlmoRMSNorm"): "rounded last",
    ("nemotron_h", "NemotronHRMSNorm"): "rounded last",
    ("gemma4", "Gemma4RMSNorm"): "rounded last",
    ("qwen3_next", "Qwen3NextRMSNorm"): "centered",
    ("gemma", "GemmaRMSNorm"): "centered",
}
NORMS_OF = {
    "qwen3_moe": 4 * 2 + 1,
    "deepseek_v3": 4 * 2 + 1,
    "glm4_moe": 2 * 2 + 1,
    "gpt_oss": 2 * 2 + 1,
    "mixtral": 2 * 2 + 1,
    "olmoe": 4 * 2 + 1,
    "qwen3_next": 2 * 2 + 2 + 1,  # those with a gate stay torch's
}


def served(model):
    return [name for name, module in model.named_modules() if NATIVE in module.__dict__ and "orm" in name]


def norms_of(*norms, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*norms).to(dtype).requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        parameter.normal_()
    return model


@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize(("where", "variant"), KNOWN.items())
def test_classes_are_known_by_what_they_compute(where, variant, width):
    model = norms_of(class_of(*where)(width))
    x = torch.randn(2, 3, 4, width).bfloat16()
    expected = model(x)
    norms = use_native_norms(model, library=LIBRARY)
    assert [variant] == [getattr(norm, NATIVE).norm.form.variant for norm in norms.norms]
    assert isinstance(model[0], class_of(*where))
    assert torch.allclose(expected.float(), model(x).float(), rtol=2**-7, atol=0)
    # Where float32 sums are added in another order, few values in a hundred round the other way.
    assert (expected != model(x)).float().mean() < 0.03


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_native_too(dtype):
    model = norms_of(class_of("qwen3_moe", "Qwen3MoeRMSNorm")(64), dtype=dtype)
    x = torch.randn(3, 64).to(dtype)
    expected = model(x)
    assert len(use_native_norms(model, library=LIBRARY).norms) == 1
    assert torch.allclose(expected, model(x), rtol=2 * torch.finfo(dtype).eps)


class Gated(torch.nn.Module):
    """A norm that cannot do without a gate."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x, gate):
        return torch.nn.functional.rms_norm(x, (64,), self.weight, self.eps) * gate


class Clipped(Gated):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (64,), self.weight, self.eps).clamp(max=1)


class OfImages(Gated):
    def forward(self, x):
        _, _, _, _ = x.shape
        return x


class NotATensor(Gated):
    def forward(self, x):
        return x, x


def test_what_is_no_norm_of_a_known_kind_stays_torchs_without_a_word():
    group = class_of("qwen4_exp", "Qwen4ExpTextRMSNorm")(64, group_size=16)
    spark = class_of("muse_spark", "MuseSparkTextCenteredRMSNorm")(64)
    unweighted = class_of("deepseek_v4", "DeepseekV4UnweightedRMSNorm")()
    others = [Gated(), Clipped(), OfImages(), NotATensor(), group, spark, unweighted, torch.nn.LayerNorm(64)]
    norms = use_native_norms(norms_of(*others), library=LIBRARY)
    assert ([], []) == (norms.norms, norms.notices)
    assert all(type(module) is kind for module, kind in zip(others, [type(o) for o in others], strict=True))


def test_a_native_result_that_fails_its_proof_is_said_once_for_a_class(monkeypatch):
    real = NativeNorm.__call__
    monkeypatch.setattr(NativeNorm, "__call__", lambda self, x, *, weight: real(self, x, weight=weight) * 1.01)
    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    norms = use_native_norms(norms_of(kind(64), kind(32), kind(64)), library=LIBRARY)
    assert [] == norms.norms
    assert ["exact-instead"] == [notice.name for notice in norms.notices]
    assert "Qwen3MoeRMSNorm" in norms.notices[0].text


def test_every_setting_of_a_norm_has_its_own_proof():
    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    model = norms_of(kind(64, eps=1e-6), kind(64, eps=1e-2), kind(64, eps=1e-6))
    use_native_norms(model, library=LIBRARY)
    assert [1e-6, 1e-2, 1e-6] == [getattr(norm, NATIVE).norm.form.epsilon for norm in model]
    x = 0.1 * torch.randn(1, 64).bfloat16()
    expected = norms_of(kind(64, eps=1e-2))
    expected[0].weight.copy_(model[1].weight)
    assert torch.allclose(expected[0](x).float(), model[1](x).float(), rtol=2**-7)


def test_an_epsilon_that_is_changed_later_holds():
    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    model = norms_of(kind(64))
    use_native_norms(model, library=LIBRARY)
    x = 0.1 * torch.randn(1, 64).bfloat16()
    model[0].variance_epsilon = 1.0
    assert torch.equal(kind.forward(model[0], x), model(x))


def test_closing_gives_the_classes_back_and_twice_is_harmless():
    class Own(torch.nn.Module):
        pass

    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    model = norms_of(kind(64), kind(64))
    norms = use_native_norms(model, library=LIBRARY)
    assert [] == use_native_norms(model, library=LIBRARY).norms
    model[0].forward = model[0].forward  # as a wrapper keeps it, bound to the class of now
    model[1].__class__ = Own
    norms.close()
    norms.close()
    assert [kind, Own] == [type(module) for module in model]
    assert not [module for module in model if NATIVE in module.__dict__]
    assert torch.equal(kind.forward(model[0], torch.ones(1, 64).bfloat16()), model[0](torch.ones(1, 64).bfloat16()))


def test_copies_and_pickles_have_their_own_class():
    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    model = norms_of(kind(64))
    before = (repr(model), list(model.state_dict()))
    use_native_norms(model, library=LIBRARY)
    assert before == (repr(model), list(model.state_dict()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [copy.deepcopy(model), copy.copy(model[0]), torch.load(file, weights_only=False)]
    others.append(pickle.loads(pickle.dumps(model)))
    for other in others:
        norm = other if isinstance(other, kind) else other[0]
        assert kind is type(norm)
        assert NATIVE not in norm.__dict__
        assert torch.equal(model[0].weight, norm.weight)


def test_unusual_calls_are_torchs():
    kind = class_of("qwen3_moe", "Qwen3MoeRMSNorm")
    model, stock = norms_of(kind(64)), norms_of(kind(64))
    use_native_norms(model, library=LIBRARY)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(stock[0](hidden_states=x), model[0](hidden_states=x))
    with torch.autocast("cpu"):
        assert torch.equal(stock(x), model(x))
    assert torch.equal(stock(x.float()), model(x.float()))
    assert torch.equal(stock(x[:0]), model(x[:0]))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(stock(x), compiled(x))
    model[0].weight.requires_grad_()
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(RuntimeError):
        model(x[:, :8])


@pytest.mark.parametrize("model_type", NORMS_OF)
def test_a_models_norms_are_native_until_it_is_closed(checkpoint, load, model_type):
    folder = checkpoint(model_type)
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    assert NORMS_OF[model_type] == len(served(model))
    with torch.no_grad():
        ids = tiny.prompts()["input_ids"][:1]
        assert torch.allclose(stock(ids).logits, model(ids).logits, rtol=0.1, atol=0.1)
    model.hotsplit.close()
    assert [] == served(model)
    assert {type(m) for m in stock.modules() if "Norm" in type(m).__name__} == {
        type(m) for m in model.modules() if "Norm" in type(m).__name__
    }


def test_norms_stay_torchs_without_the_fast_kernel(checkpoint, load):
    assert [] == served(load(checkpoint("qwen3_moe"), kernel="exact"))
