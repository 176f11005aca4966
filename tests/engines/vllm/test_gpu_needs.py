"""What vLLM takes of a GPU beside weights, told from its configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hotsplit.engines.vllm.gpu_needs import Activations, KvShape, activations, kv_shape, request_bytes


def config(*, cache_dtype="auto", use_mla=False, **text):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=use_mla,
            get_num_layers=lambda _: 3,
            get_num_kv_heads=lambda _: 1 if use_mla else 4,
            get_head_size=lambda: 576 if use_mla else 128,
            hf_text_config=SimpleNamespace(
                **{"hidden_size": 64, "vocab_size": 1000, "moe_intermediate_size": 48} | text
            ),
        ),
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100, max_num_seqs=256),
    )


@pytest.mark.parametrize(
    ("kind", "use_mla", "token_bytes"),
    [
        ("auto", False, 3 * 2 * 4 * 128 * 2),
        ("bfloat16", False, 3 * 2 * 4 * 128 * 2),
        ("fp8_e4m3", False, 3 * 2 * 4 * 128),
        ("nvfp4", False, 3 * 2 * 4 * 128),
        ("auto", True, 3 * 576 * 2),
        ("fp8_ds_mla", True, 3 * 576),
    ],
)
def test_a_token_keeps_keys_and_values_of_every_layer_or_one_latent_vector(kind, use_mla, token_bytes):
    assert token_bytes == kv_shape(config(cache_dtype=kind, use_mla=use_mla)).token_bytes


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 2), (16, 2), (17, 3), (160, 11)])
def test_a_request_takes_whole_blocks_and_the_one_that_vllm_keeps_back(num_tokens, blocks):
    shape = KvShape(num_layers=1, num_heads=1, head_dim=1, element_bytes=1)
    assert blocks * 16 * 2 == request_bytes(shape, num_tokens=num_tokens)


def test_activations_grow_with_tokens_experts_and_words():
    base = {"num_tokens": 64, "top_k": 2, "hidden": 32, "intermediate": 16}
    assert (64 * 2 * (32 + 32) + 4 * 64 * 32) * 2 == Activations(**base).num_bytes
    assert (64 * 2 * (80 + 160) + 4 * 64 * 32) * 2 == Activations(**base | {"intermediate": 80}).num_bytes
    words = Activations(**base, num_requests=5, vocabulary=100).num_bytes
    assert 5 * 100 * 8 == words - Activations(**base).num_bytes


def test_the_expert_size_of_a_rank_is_cut_and_goes_before_that_of_a_dense_layer():
    assert 24 == activations(config(intermediate_size=500), top_k=2, tp=2).intermediate
    assert 167 == activations(config(moe_intermediate_size=[1, 2], intermediate_size=500), top_k=2, tp=3).intermediate
    assert 0 == activations(config(moe_intermediate_size=None), top_k=2, tp=3).intermediate


def test_no_more_requests_are_sampled_than_there_are_tokens():
    assert (100, 100) == (
        activations(config(), top_k=2, tp=1).num_requests,
        activations(config(), top_k=2, tp=1).num_tokens,
    )
