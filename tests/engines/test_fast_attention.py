"""The fast kernel in a model's attention: native where it is understood, transformers' own everywhere else, and reversible."""

from __future__ import annotations

import copy
import io
import json
import sys
import types
from collections import Counter

import pytest
import torch
from transformers.integrations import sdpa_attention as integration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from engines import tiny
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_attention import NativeAttention
from hotsplit.engines.transformers import fast_attention
from hotsplit.engines.transformers.fast_attention import NAME, attention_forward, use_native_attention

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(fast_library.load() is None, reason="the native code is not built here"),
]
SDPA = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "minimax_m2", "granitemoe", "qwen3_next")
EAGER = ("gpt_oss", "mimo_v2_flash")


@pytest.fixture
def calls(monkeypatch):
    """Shapes of all calls that were native, and of those that were transformers' own."""
    seen = {"native": Counter(), "stock": Counter()}
    real = NativeAttention.__call__
    fast_attention._others()  # what it reads once is the signature of the real one

    def native(self, call):
        seen["native"][tuple(call.query.shape)] += 1
        return real(self, call)

    def own(module, query, *args, **kwargs):
        seen["stock"][tuple(query.shape)] += 1
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(NativeAttention, "__call__", native)
    monkeypatch.setattr(integration, "sdpa_attention_forward", own)
    return seen


def both(checkpoint, load, model_type, **kwargs):
    folder = checkpoint(model_type, dtype=torch.float32)
    return tiny.stock(folder, **kwargs), load(folder, dynamic=False, kernel="fast", model_kwargs=kwargs)


def generated(model, *, length=9, **options):
    """Tokens and scores of a batch with padding on the left."""
    torch.manual_seed(0)
    inputs = tiny.prompts(length=length)
    return model.generate(
        **inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


def assert_same(stock, fast, **options):
    theirs, mine = generated(stock, **options), generated(fast, **options)
    assert torch.equal(theirs.sequences, mine.sequences)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(theirs.logits, mine.logits, strict=True))


@pytest.mark.parametrize("model_type", SDPA)
def test_decoding_is_native_and_right(checkpoint, load, calls, model_type):
    stock, fast = both(checkpoint, load, model_type)
    assert fast.config._attn_implementation == NAME
    assert_same(stock, fast)
    assert sum(calls["native"].values()) > 0
    assert {shape[2] for shape in calls["stock"]} <= {9}  # prompts of 3 x 9 tokens


@pytest.mark.parametrize("model_type", EAGER)
def test_models_that_have_not_chosen_sdpa_keep_what_they_have(checkpoint, load, calls, model_type):
    stock, fast = both(checkpoint, load, model_type)
    assert fast.config._attn_implementation == stock.config._attn_implementation == "eager"
    assert_same(stock, fast)
    assert not calls["native"]


def test_what_a_user_chose_stays(checkpoint, load, calls):
    stock, fast = both(checkpoint, load, "qwen3_moe", attn_implementation="eager")
    assert fast.config._attn_implementation == "eager"
    assert_same(stock, fast)
    assert not calls["native"]


def test_a_model_that_asks_for_the_name_keeps_it_which_is_said(checkpoint, load, calls):
    stock, fast = both(checkpoint, load, "glm_moe_dsa")
    assert fast.config._attn_implementation == "sdpa"
    assert ["exact-instead"] == [n.name for n in fast.hotsplit.notices if "asks for the name" in n.text]
    assert_same(stock, fast)
    assert not calls["native"]


@pytest.mark.parametrize(
    ("code", "is_fit"),
    [
        ("ALL.get_interface(self.config._attn_implementation, eager)", True),
        ("def __init__(self, config, attn_implementation: str = 'sdpa'): ...", True),
        ('if self.config._attn_implementation == "sdpa": ...', False),
        ("if self.config._attn_implementation in ('eager', 'sdpa'): ...", False),
        ('CLASSES = {"sdpa": Attention}', False),
        (None, False),
    ],
)
def test_code_that_does_more_than_call_the_function_is_found(monkeypatch, code, is_fit):
    module = types.ModuleType("some_model")
    monkeypatch.setitem(sys.modules, "some_model", module)

    def source(_):
        if code is None:
            raise OSError("no source")
        return code

    monkeypatch.setattr(fast_attention.inspect, "getsource", source)
    fast_attention._only_calls.cache_clear()
    assert is_fit is fast_attention._only_calls("some_model")
    fast_attention._only_calls.cache_clear()


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)) + "-" + str(next(iter(options.values()))),
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_every_way_to_generate_is_stocks(checkpoint, load, calls, model_type, options):
    stock, fast = both(checkpoint, load, model_type)
    if "prompt_lookup_num_tokens" in options:
        inputs = {"input_ids": tiny.prompts()["input_ids"][-1:].repeat(1, 2)}
        torch.manual_seed(0)
        found = [m.generate(**inputs, max_new_tokens=12, do_sample=False, **options) for m in (stock, fast)]
        assert torch.equal(*found)
    else:
        assert_same(stock, fast, **options)
    assert calls["native"] or "use_cache" in options


def test_assisted_decoding_is_native(checkpoint, load, calls):
    stock, fast = both(checkpoint, load, "qwen3_moe")
    inputs = {"input_ids": tiny.prompts()["input_ids"][-1:]}
    plain = stock.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, fast.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=stock))
    assert any(shape[2] > 1 for shape in calls["native"])


def test_a_sliding_window_hides_what_it_should(tmp_path, load, calls):
    changes = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
    folder = tiny.make_checkpoint(tmp_path / "m", model_type="qwen3_moe", dtype=torch.float32, changes=changes)
    stock, fast = tiny.stock(folder), load(folder, dynamic=False, kernel="fast")
    assert stock.config.sliding_window == 6
    assert_same(stock, fast)
    assert calls["native"]
    # The window is seen at all: without it the model says something else.
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(
            json.loads((folder / "config.json").read_text()) | {"use_sliding_window": False, "sliding_window": None}
        )
    )
    assert not torch.equal(generated(stock).logits[-1], generated(tiny.stock(folder)).logits[-1])


def one_step(model, **kwargs):
    return model(tiny.prompts()["input_ids"][-1:, :4], **kwargs)


def test_gradients_autocast_and_compiled_graphs_are_torchs(checkpoint, load, calls):
    stock, fast = both(checkpoint, load, "qwen3_moe")
    attention, theirs = fast.model.layers[0].self_attn, stock.model.layers[0].self_attn
    x = torch.randn(1, 4, fast.config.hidden_size)
    rotary = fast.model.rotary_emb(x, torch.arange(4)[None])

    def out(module, tokens):
        return module(tokens, position_embeddings=rotary, attention_mask=None)[0]

    with torch.no_grad():
        assert torch.allclose(out(theirs, x), out(attention, x), rtol=1e-4, atol=1e-4)
    assert sum(calls["native"].values()) == 1
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    out(attention, mine).sum().backward()
    out(theirs, its).sum().backward()
    assert torch.allclose(its.grad, mine.grad, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu"), torch.no_grad():
        out(attention, x)
    compiled = torch.compile(lambda q: attention_forward(attention, q, q, q, None)[0], backend="eager")
    with torch.no_grad():
        q = torch.randn(1, 2, 4, 16)
        attention.num_key_value_groups = 1
        compiled(q)
    assert sum(calls["native"].values()) == 1


def test_arguments_that_sdpa_does_not_ignore_go_to_it(calls):
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    arguments = [
        {},
        {"s_aux": None, "sliding_window": 4, "position_ids": torch.arange(3)},
        {"dropout": 0.0, "position_bias": None, "softcap": None, "output_attentions": False},
        {"is_causal": False},
        {"scaling": 0.5},
        {"position_bias": torch.randn(1, 4, 3, 3)},
        {"dropout": 0.5},
        {"output_attentions": True},
    ]
    found = []
    for kwargs in arguments:
        before = sum(calls["native"].values())
        mine, _ = attention_forward(module, q, k, k, None, **kwargs)
        theirs, _ = sdpa_attention_forward(module, q, k, k, None, **kwargs)
        found.append(sum(calls["native"].values()) - before)
        assert kwargs.get("dropout") or torch.allclose(theirs, mine, atol=1e-5)
    assert [1, 1, 1, 1, 1, 0, 0, 0] == found
    with pytest.raises(ValueError, match="softcap"):
        attention_forward(module, q, k, k, None, softcap=3.0)


def test_calls_that_sdpa_cuts_or_refuses_go_to_it(calls):
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16)
    mine, _ = attention_forward(module, q, k, k, None)  # upper left: token t sees t + 1 keys
    assert torch.equal(sdpa_attention_forward(module, q, k, k, None)[0], mine)
    with pytest.raises(RuntimeError):
        attention_forward(types.SimpleNamespace(), q, k[:, :1].repeat(1, 3, 1, 1), k, None)
    assert not calls["native"]


def test_a_form_that_fails_its_trial_stays_torchs_which_is_said_once(checkpoint, load, calls, monkeypatch, caplog):
    monkeypatch.setattr(NativeAttention, "share_of_bound", lambda *_: float("nan"))
    fast_attention._is_proven.cache_clear()
    stock, fast = both(checkpoint, load, "qwen3_moe")
    with caplog.at_level("WARNING"):
        assert_same(stock, fast)
    fast_attention._is_proven.cache_clear()
    assert not calls["native"]
    assert 1 == sum("stays torch's" in record.message for record in caplog.records)


def test_without_memory_or_native_code_it_is_sdpa(checkpoint, load, calls, monkeypatch):
    stock, fast = both(checkpoint, load, "qwen3_moe")
    assert_same(stock, fast)
    monkeypatch.setattr(fast_attention, "_kernel", lambda: None)
    native = sum(calls["native"].values())
    assert_same(stock, fast)
    assert native == sum(calls["native"].values())
    monkeypatch.undo()
    monkeypatch.setattr(NativeAttention, "__call__", lambda *_: None)
    assert_same(stock, fast)


def test_the_name_is_given_back_and_is_in_no_file_copy_or_pickle(checkpoint, load, tmp_path):
    _, fast = both(checkpoint, load, "qwen3_moe")
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward  # nobody else's is replaced
    assert fast.model.config._attn_implementation == NAME == "hotsplit_sdpa"
    assert copy.deepcopy(fast.config)._attn_implementation == "sdpa"
    file = io.BytesIO()
    torch.save(fast.config, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)._attn_implementation) is str
    fast.config.save_pretrained(tmp_path / "saved")
    assert "hotsplit" not in (tmp_path / "saved" / "config.json").read_text()
    assert "hotsplit_sdpa" not in fast.config.to_json_string(use_diff=False)
    fast.hotsplit.close()
    assert fast.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_choice_after_loading_outlives_the_model(checkpoint, load, calls, name):
    _, fast = both(checkpoint, load, "qwen3_moe")
    fast.set_attn_implementation(name)
    generated(fast)
    assert not calls["native"]
    fast.hotsplit.close()
    assert fast.config._attn_implementation == name


def test_a_part_with_a_configuration_of_its_own_is_judged_alone(checkpoint, load, calls):
    folder = checkpoint("qwen3_vl_moe")
    fast = load(folder, dynamic=False, kernel="fast")
    assert fast.config.text_config._attn_implementation == NAME
    ids = tiny.prompts()["input_ids"][-1:]
    with torch.no_grad():
        theirs, mine = tiny.stock(folder)(ids[:, :1]).logits, fast(ids[:, :1]).logits
    assert torch.allclose(theirs.float(), mine.float(), rtol=0.1, atol=0.2)
    assert calls["native"]


def test_other_models_and_kernels_are_as_they_were(checkpoint, load, calls):
    exact = load(checkpoint("qwen3_moe", dtype=torch.float32), dynamic=False, kernel="exact")
    assert exact.config._attn_implementation == "sdpa"
    generated(exact)
    assert not calls["native"]
    assert [] == use_native_attention(torch.nn.Linear(4, 4)).configs
