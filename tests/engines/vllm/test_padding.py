"""Rows as the CPU kernels make them, and what a GPU keeps beside hot rows, are what the plan is made of."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hotsplit.engines.vllm.budget import Parameter
from hotsplit.engines.vllm.padding import GPU_PAGE_BYTES, as_padded, fixed_bytes, padded_bytes, with_pages
from plan_builders import sizes_of


def padded(*, tp=1, quantisation=None, row_bytes=3 * 48 * 100, **text):
    """Row bytes of a model with this text configuration."""
    sizes = sizes_of([row_bytes, 2 * row_bytes], num_experts=4)
    sizes = type(sizes)(
        **{name: getattr(sizes, name) for name in sizes.__slots__} | {"tp": tp, "quantisation": quantisation}
    )
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text)))
    return as_padded(sizes, vllm_config=config).row_bytes.tolist()


@pytest.mark.parametrize(
    ("intermediate", "tp", "own", "made"),
    [(64, 1, 64, 64), (96, 2, 48, 64), (33, 1, 33, 64), (100, 3, 34, 64), (768, 8, 96, 96), (1, 1, 1, 32)],
)
def test_the_intermediate_size_of_a_rank_is_rounded_up_to_a_multiple_of_32(intermediate, tp, own, made):
    assert made * 10 == padded_bytes(own * 10, intermediate=intermediate, tp=tp)
    assert [made * 10, made * 20] == padded_bytes(
        np.array([own * 10, own * 20]), intermediate=intermediate, tp=tp
    ).tolist()


def test_the_size_of_an_expert_goes_before_that_of_a_dense_layer():
    assert [3 * 64 * 100, 2 * 3 * 64 * 100] == padded(moe_intermediate_size=48, intermediate_size=64)
    assert [3 * 64 * 100, 2 * 3 * 64 * 100] == padded(intermediate_size=48)
    assert [3 * 64 * 100, 2 * 3 * 64 * 100] == padded(moe_intermediate_size=None, intermediate_size=96, tp=2)


@pytest.mark.parametrize(
    "more",
    [
        {"moe_intermediate_size": 64},
        {},
        {"moe_intermediate_size": [48]},
        {"moe_intermediate_size": 48, "model_type": "gpt_oss"},
    ],
    ids=["a multiple", "no size", "a size per layer", "interleaved"],
)
def test_what_the_kernels_do_not_pad_stays_as_it_is(more):
    assert [3 * 48 * 100, 2 * 3 * 48 * 100] == padded(**more)


def test_quantised_rows_stay_as_they_are():
    assert [3 * 48 * 100, 2 * 3 * 48 * 100] == padded(moe_intermediate_size=48, quantisation="fp8")


# -- on a GPU


def parameters(**row_bytes):
    """One layer of four experts, and a dense tensor that counts for nothing."""
    made = [Parameter(name=name, num_bytes=4 * size, is_expert=True) for name, size in row_bytes.items()]
    return [Parameter(name="self_attn.o_proj.weight", num_bytes=10**9, is_expert=False), *made]


def test_every_tensor_that_is_split_is_charged_one_page():
    sizes = with_pages(sizes_of([1, 1], num_experts=4), layers=[parameters(w13=51200, w2=25600), parameters(w13=512)])
    assert [2 * GPU_PAGE_BYTES, GPU_PAGE_BYTES] == sizes.fixed_bytes.tolist()


@pytest.mark.parametrize(
    ("scale", "is_split"), [(512, False), (1024, True), (1000, False)], ids=["too small", "large", "rows do not align"]
)
def test_a_tensor_that_is_not_split_is_charged_for_all_experts_and_the_spare_row(scale, is_split):
    layer = parameters(w13=51200, w2=25600, scale=scale)
    wanted = 2 * GPU_PAGE_BYTES + (GPU_PAGE_BYTES if is_split else 5 * scale)
    assert wanted == fixed_bytes([layer, parameters()], sizes=sizes_of([1], num_experts=4))
