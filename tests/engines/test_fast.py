"""The fast kernel behind real architectures: native where it can be, proven at load, equal to the bit across placements."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from engines import tiny
from engines.copies import until_swapped
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast import FastMath
from hotsplit.engines.transformers import cpu, fast_forms
from hotsplit.errors import ConfigError

LIBRARY = fast_library.load()
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here"),
]
ARCHITECTURES = sorted(tiny.CONFIGS)
OTHERS = [("qwen3_moe", torch.float32), ("gpt_oss", torch.float16), ("gpt_oss", torch.float32)]


def native_layers(model):
    return [isinstance(math, FastMath) for math in model.hotsplit.banks._maths.values()]


def decoded(model, *, tokens=9):
    """Logits of a prompt that is fed token by token: every step is native."""
    ids, cache, logits = tiny.prompts()["input_ids"][:1], None, []
    for at in range(tokens):
        with torch.no_grad():
            output = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("model_type", "dtype"), [*((name, torch.bfloat16) for name in ARCHITECTURES), *OTHERS])
def test_every_architecture_is_proven_and_equal_to_the_bit_wherever_experts_lie(checkpoint, load, model_type, dtype):
    folder = checkpoint(model_type, dtype=dtype)
    models = [load(folder, hot=hot, dynamic=False, kernel="fast") for hot in (0.0, 0.5, 1.0)]
    assert {True} == {is_native for model in models for is_native in native_layers(model)}
    expected, *others = [decoded(model) for model in models]
    assert [True, True] == [torch.equal(expected, other) for other in others]


def test_while_experts_swap_the_bits_stay(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    expected = decoded(load(folder, hot=1.0, dynamic=False, kernel="fast"))
    model = load(folder, hot=0.5, dyn_steps=3, dyn_margin=1, dyn_half_life=1, kernel="fast")
    assert [True] * 3 == [torch.equal(expected, decoded(model)) for _ in range(3)]
    until_swapped(model, lambda: decoded(model))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_in_float32_the_tokens_are_stocks(checkpoint, load, model_type):
    folder = checkpoint(model_type, dtype=torch.float32)
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    batch = tiny.prompts()
    with torch.no_grad():
        assert torch.equal(stock.generate(**batch, **tiny.greedy(12)), model.generate(**batch, **tiny.greedy(12)))


def test_block_float8_rows_are_multiplied_as_they_are_stored(checkpoint, load):
    folder = checkpoint("qwen3_moe", fp8=True)
    models = [load(folder, hot=hot, dynamic=False, kernel="fast") for hot in (0.0, 1.0)]
    assert {True} == {is_native for model in models for is_native in native_layers(model)}
    assert torch.equal(*[decoded(model) for model in models])


def test_the_log_says_which_instructions_run(checkpoint, load, caplog):
    with caplog.at_level(logging.INFO, logger="hotsplit"):
        load(checkpoint("qwen3_moe"), kernel="fast")
    assert f"kernel fast: {LIBRARY.paths[-1]}, " in caplog.text


@pytest.mark.parametrize("change", [{"gate_slope": 1.05}, {"gate_shift": 0.05}, {"activation": "gelu"}])
def test_a_gate_that_was_read_wrongly_is_found_and_exact_runs_instead(checkpoint, load, caplog, monkeypatch, change):
    real = fast_forms.read_gate

    def wrong(module):
        gate, is_interleaved = real(module)
        return dataclasses.replace(gate, **change), is_interleaved

    monkeypatch.setattr(fast_forms, "read_gate", wrong)
    folder = checkpoint("qwen3_moe", dtype=torch.float32)
    model = load(folder, hot=0.5, dynamic=False, kernel="fast")
    assert {False} == set(native_layers(model))
    assert "[exact-instead]" in caplog.text
    for give_back in model.hotsplit.banks.on_close:
        give_back()  # the dense part, which is not torch's to the bit
    assert torch.equal(tiny.play(tiny.stock(folder))[0], tiny.play(model)[0])


def test_rows_of_another_layout_are_found(checkpoint, load, monkeypatch):
    real = fast_forms.native_experts

    def wrong(*args, **kwargs):
        native = real(*args, **kwargs)
        native.form.is_interleaved = not native.form.is_interleaved
        return native

    monkeypatch.setattr(cpu, "native_experts", wrong)
    assert {False} == set(native_layers(load(checkpoint("qwen3_moe"), kernel="fast")))


def test_without_the_native_code_exact_runs_which_is_said_and_refused_in_strict_mode(
    checkpoint, load, caplog, monkeypatch
):
    monkeypatch.setattr(cpu.fast_library, "load", lambda: None)
    folder = checkpoint("qwen3_moe")
    model = load(folder, dynamic=False, kernel="fast")
    assert "[no-native-code]" in caplog.text
    assert torch.equal(tiny.play(tiny.stock(folder))[0], tiny.play(model)[0])
    with pytest.raises(ConfigError, match="no-native-code"):
        load(folder, kernel="fast", strict=True)
