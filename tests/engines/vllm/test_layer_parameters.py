"""The parameters of a model before it is made, held against what vLLM makes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.vllm.vllm_jobs import environment_of
from hotsplit.data import tiny_moe_path
from hotsplit.engines.vllm.budget import OffloadFlags, freed_bytes
from hotsplit.engines.vllm.layer_parameters import model_parameters
from hotsplit.plan.checkpoint import Checkpoint, TensorInfo, read_headers
from hotsplit.plan.sizes import expert_sizes

E, D, F = 32, 128, 64
"""Of the bundled model, in bf16."""


def made(checkpoint, *, tp=1, layers=range(4)):
    return model_parameters(checkpoint, sizes=expert_sizes(checkpoint, tp=tp), layers=layers)


@pytest.fixture
def tiny():
    return read_headers(tiny_moe_path())


def test_a_layer_is_attention_then_the_mlp_then_norms_in_fused_tensors(tiny):
    names = [one.name for one in made(tiny).layers[2]]
    assert {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"} < set(names[:4])
    assert "mlp.gate.weight" == names[4]
    assert ["mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight"] == names[5:7]
    assert {"input_layernorm.weight", "post_attention_layernorm.weight"} == set(names[7:])


def test_experts_weigh_what_the_plan_is_made_of(tiny):
    sizes = expert_sizes(tiny, tp=2)
    padded = replace(sizes, row_bytes=sizes.row_bytes + np.arange(4) * 512)
    found = model_parameters(tiny, sizes=padded, layers=range(4)).layers
    assert [int(row) * E for row in padded.row_bytes] == [
        sum(one.num_bytes for one in layer if one.is_expert) for layer in found
    ]
    (w13, w2) = [one.num_bytes for one in found[0] if one.is_expert]
    assert (2, E * D * F) == (w13 // w2, w2), "two of three matrices, cut in two"


def test_matrices_are_cut_and_what_every_rank_keeps_is_not(tiny):
    whole, half = ({one.name: one.num_bytes for one in made(tiny, tp=tp).layers[0]} for tp in (1, 2))
    kept = {name for name in whole if whole[name] == half[name]}
    assert {name for name in whole if "norm" in name} | {"mlp.gate.weight"} == kept
    assert all(2 * half[name] == whole[name] for name in whole.keys() - kept)
    assert made(tiny, tp=2).outside_bytes < made(tiny).outside_bytes


def test_dense_bytes_are_all_but_routed_experts(tiny):
    sizes = expert_sizes(tiny)
    assert sizes.dense_bytes == made(tiny).dense_bytes


def test_a_stage_has_the_layers_that_it_is_given(tiny):
    assert made(tiny).layers[2:4] == made(tiny, layers=range(2, 4)).layers


def checkpoint_of(tensors, **config):
    shape = {name: TensorInfo(file=Path("x"), dtype="BF16", shape=shape, offset=0, nbytes=2 * int(np.prod(shape)))
             for name, shape in tensors.items()}  # fmt: skip
    facts = {"model_type": "m", "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1} | config
    return Checkpoint(folder=Path("m"), config=facts, tensors=dict(sorted(shape.items())), entry=None)


EXPERT = {
    f"model.layers.0.mlp.experts.{expert}.{name}.weight": (4, 8)
    for expert in range(2)
    for name in ("up_proj", "down_proj")
}


def test_latent_projections_are_fused_where_both_are_there():
    both = {f"model.layers.0.self_attn.{name}.weight": (8, 8) for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    names = {one.name: one.num_bytes for one in made(checkpoint_of(both | EXPERT), layers=[0]).layers[0]}
    assert 256 == names["self_attn.fused_qkv_a_proj.weight"]
    del both["model.layers.0.self_attn.q_a_proj.weight"]
    names = {one.name for one in made(checkpoint_of(both | EXPERT), layers=[0]).layers[0]}
    assert "self_attn.kv_a_proj_with_mqa.weight" in names


def test_draft_layers_weigh_nothing_and_towers_do():
    more = {"mtp.layers.0.mlp.experts.0.up_proj.weight": (4, 8), "visual.blocks.0.proj.weight": (16, 16)}
    assert 2 * 256 == made(checkpoint_of(EXPERT | more), layers=[0]).outside_bytes


# -- the same of vLLM's own models, as its offloader is shown them


@pytest.fixture(scope="module")
def shown(checkpoint, tmp_path_factory):
    """shown("glm4_moe") -> what vLLM shows an offloader: [layer][[name, bytes]]."""
    pytest.importorskip("vllm")

    def make(name):
        place = tmp_path_factory.mktemp(f"shown-{name}")
        command = [
            sys.executable,
            str(Path(__file__).parent / "vllm_parameters.py"),
            str(checkpoint(name)),
            str(place / "x"),
        ]
        environment = environment_of({}, probe=None, cache=None, place=place)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert 0 == done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads((place / "x").read_text(encoding="utf-8"))

    return make


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_what_vllm_makes_has_these_names_and_bytes_and_an_offloader_is_foretold_to_within_a_layer(
    checkpoint, shown, name
):
    theirs = shown(name)
    ours = made(read_headers(checkpoint(name))).layers
    for layer, expected in zip(ours, theirs, strict=True):
        assert sorted(name for name, _ in expected) == sorted(one.name for one in layer)
        # vLLM keeps the routers of some models in float32.
        exact = [[one.name, one.num_bytes] for one in layer if ".gate." not in one.name]
        assert sorted(pair for pair in expected if ".gate." not in pair[0]) == sorted(exact)
        experts = [name for name, _ in expected if "routed_experts" in name]
        assert experts == [one.name for one in layer if one.is_expert]
    largest = max(sum(size for _, size in layer) for layer in theirs)
    whole = sum(size for layer in theirs for _, size in layer)
    for limit in range(0, whole, whole // 23):
        moved = 0
        for size in (size for layer in theirs for _, size in layer):
            moved += size if moved < limit else 0
        assert abs(moved - freed_bytes(ours, flags=OffloadFlags(cpu_offload_gb=limit / 2**30))) <= largest
