"""Whole models whose norms, routers and linear layers are native: every way to generate, and what is not theirs."""

from __future__ import annotations

import pytest
import torch

from engines import tiny
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_norm import NativeNorm
from hotsplit.engines.transformers import cpu
from hotsplit.engines.transformers.fast_dense import use_native_linears

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(fast_library.load() is None, reason="the native code is not built here"),
]
MODEL_TYPES = ["qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "gpt_oss", "qwen3_next", "granitemoe"]
WAYS = {
    "padded batch": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 4},
}
WRONG = 0.15
"""How far a token of a wrong model may be behind stock's best and pass for it; logits are of about 1."""


@pytest.fixture(autouse=True)
def _every_layer(monkeypatch):
    """Tiny models have tiny layers."""
    monkeypatch.setattr(
        cpu, "use_native_linears", lambda model, *, library: use_native_linears(model, library=library, least_bytes=0)
    )


def behind(stock, sequences, *, prompt, mask):
    """How far each generated token's logit is below the best one of the stock model, given the same text before it."""
    mask = torch.cat([mask, torch.ones_like(sequences[:, mask.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = stock(sequences, attention_mask=mask).logits[:, prompt - 1 : -1].float()
    logits[..., 0] = -torch.inf  # suppressed, so that no sequence ends
    chosen = logits.gather(2, sequences[:, prompt:, None])[..., 0]
    return logits.max(dim=-1).values - chosen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generated_tokens_are_among_stocks_best(checkpoint, load, model_type, way):
    folder = checkpoint(model_type, dtype=torch.float32)
    if model_type == "qwen3_next" and way == "prompt lookup":
        pytest.skip("transformers has no assisted generation for models with a state")
    batch = tiny.prompts(batch=1 if way == "prompt lookup" else 3)
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    with torch.no_grad():
        mine = model.generate(**batch, **tiny.greedy(8), **WAYS[way])
        theirs = stock.generate(**batch, **tiny.greedy(8), **WAYS[way])
    assert torch.equal(theirs, mine)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bfloat16_is_as_near_to_float32_as_stocks(checkpoint, load, model_type):
    """By the median token: where two experts all but tie, either may take the other one."""
    folder = checkpoint(model_type)
    texts = torch.randint(1, 100, (8, 1, 16), generator=torch.Generator().manual_seed(0))
    model, stock, truth = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder), tiny.stock(folder).float()
    with torch.no_grad():
        errors = {
            one: torch.cat([(one(text).logits.float() - truth(text).logits).abs().mean(dim=-1) for text in texts])
            for one in (model, stock)
        }
    assert errors[model].median() < 1.25 * errors[stock].median()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_norm_that_is_wrong_is_seen_in_the_tokens(checkpoint, load, model_type, monkeypatch):
    folder, batch = checkpoint(model_type, dtype=torch.float32), tiny.prompts()
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    real = NativeNorm.__call__
    monkeypatch.setattr(NativeNorm, "__call__", lambda self, x, *, weight: real(self, x, weight=weight) * 1.3)
    with torch.no_grad():
        mine = model.generate(**batch, **tiny.greedy(8))
    assert behind(stock, mine, prompt=9, mask=batch["attention_mask"]).max() > WRONG


def test_an_assistant_and_outputs_of_the_inside(checkpoint, load):
    folder, batch = checkpoint("qwen3_moe", dtype=torch.float32), tiny.prompts(batch=1)
    model, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    with torch.no_grad():
        assisted = model.generate(**batch, **tiny.greedy(8), assistant_model=stock)
        assert torch.equal(stock.generate(**batch, **tiny.greedy(8)), assisted)
        for one in (model, stock):
            one.set_attn_implementation("eager")
        wanted = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
        mine, theirs = model(**batch, **wanted), stock(**batch, **wanted)
    for name in ("attentions", "hidden_states", "router_logits"):
        assert len(theirs[name]) == len(mine[name])
        for a, b in zip(theirs[name], mine[name], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
