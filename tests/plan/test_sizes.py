from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_files import write_model
from hotsplit.errors import CheckpointError
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.sizes import ExpertSizes, expert_sizes

D, F, E = 16, 6, 5
"""Model dimension, expert hidden dimension, experts of the small layouts below."""

CONFIG = {"model_type": "toy_moe", "num_experts": E, "num_experts_per_tok": 2, "num_hidden_layers": 2}
TINY_MOE = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "tiny-moe"


def per_expert(up, down, *, num_experts=E, module="mlp.experts"):
    """One layer with tensors per expert; up and down: leaf -> (dtype, shape)."""
    return {f"{module}.{expert}.{leaf}": kind for expert in range(num_experts) for leaf, kind in (up | down).items()}


def linear(out, into, dtype="BF16"):
    return {"weight": (dtype, [out, into])}


def projections(gate, up, down, *, hidden=D, inter=F, extra_up=None, extra_down=None, dtype="BF16"):
    """Leaves of one expert: the three matrices and what comes with each of them."""
    ups = {
        f"{name}.{leaf}": kind
        for name in (gate, up)
        for leaf, kind in (linear(inter, hidden, dtype) | (extra_up or {})).items()
    }
    downs = {f"{down}.{leaf}": kind for leaf, kind in (linear(hidden, inter, dtype) | (extra_down or {})).items()}
    return ups, downs


def dense_layer():
    return {"mlp.down_proj.weight": ("BF16", [D, F]), "input_layernorm.weight": ("BF16", [D])}


def checkpoint_of(folder, moe, *, config=None, stack="model.layers", others=None):
    """Layer 0 dense, layer 1 with `moe`; `others` outside the layers."""
    tensors = {f"{stack}.0.{name}": kind for name, kind in dense_layer().items()}
    tensors |= {f"{stack}.1.{name}": kind for name, kind in moe.items()} | (others or {})
    return read_headers(write_model(folder, tensors, config=config or CONFIG))


def sizes_of(folder, moe, *, tp=1, **more) -> ExpertSizes:
    return expert_sizes(checkpoint_of(folder, moe, **more), tp=tp)


FP8 = {"weight_scale_inv": ("F32", [1, 1])}
GPTQ_UP = {
    "qweight": ("I32", [D // 8, F * 8]),
    "scales": ("F16", [2, F * 8]),
    "qzeros": ("I32", [2, F]),
    "g_idx": ("I32", [D]),
}
GPTQ_DOWN = {
    "qweight": ("I32", [F, D]),
    "scales": ("F16", [3, D]),
    "qzeros": ("I32", [3, 2]),
    "g_idx": ("I32", [F * 8]),
}

LAYOUTS = {
    "gate, up, down per expert": (
        per_expert(*projections("gate_proj", "up_proj", "down_proj")),
        3 * D * F * 2,
    ),
    "w1, w3, w2 per expert": (
        per_expert(*projections("w1", "w3", "w2"), module="block_sparse_moe.experts"),
        3 * D * F * 2,
    ),
    "experts beside the dense MLP": (
        per_expert(*projections("gate_proj", "up_proj", "down_proj"), module="experts"),
        3 * D * F * 2,
    ),
    "up and down per expert, no gate": (
        per_expert({"up_proj.weight": ("BF16", [F, D])}, {"down_proj.weight": ("BF16", [D, F])}, module="mixer.experts"),
        2 * D * F * 2,
    ),
    "block FP8 with weight_scale_inv": (
        per_expert(*projections("gate_proj", "up_proj", "down_proj", extra_up=FP8, extra_down=FP8, dtype="F8_E4M3")),
        3 * (D * F + 4),
    ),
    "packed FP4 with scale": (
        per_expert(
            {f"{w}.{leaf}": kind for w in ("w1", "w3") for leaf, kind in
             {"weight": ("I8", [F, D // 2]), "scale": ("F8_E8M0", [F, 1])}.items()},
            {"w2.weight": ("I8", [D, F // 2]), "w2.scale": ("F8_E8M0", [D, 1])},
            module="ffn.experts",
        ),
        2 * (F * D // 2 + F) + D * F // 2 + D,
    ),
    "FP8 per tensor with qscale_weight and an activation scale": (
        per_expert(*projections(
            "w1", "w3", "w2", extra_up={"qscale_weight": ("F32", []), "qscale_act": ("F32", [])},
            extra_down={"qscale_weight": ("F32", []), "qscale_act": ("F32", [])}, dtype="F8_E4M3",
        ), module="experts"),
        3 * (D * F + 8),
    ),
    "biases per expert": (
        per_expert(*projections(
            "gate_proj", "up_proj", "down_proj", extra_up={"bias": ("BF16", [F])}, extra_down={"bias": ("BF16", [D])},
        )),
        3 * D * F * 2 + 2 * F * 2 + D * 2,
    ),
    "GPTQ with qweight, scales, qzeros, g_idx": (
        per_expert(
            {f"{name}.{leaf}": kind for name in ("gate_proj", "up_proj") for leaf, kind in GPTQ_UP.items()},
            {f"down_proj.{leaf}": kind for leaf, kind in GPTQ_DOWN.items()},
        ),
        2 * (2 * 48 * 4 + 2 * 48 * 2 + 2 * 6 * 4 + 16 * 4) + 6 * 16 * 4 + 3 * 16 * 2 + 3 * 2 * 4 + 48 * 4,
    ),
    "fused gate_up_proj and down_proj": (
        {"mlp.experts.gate_up_proj": ("BF16", [E, 2 * F, D]), "mlp.experts.down_proj": ("BF16", [E, D, F])},
        3 * D * F * 2,
    ),
    "fused, stored input first, with biases": (
        {
            "mlp.experts.gate_up_proj": ("BF16", [E, D, 2 * F]), "mlp.experts.gate_up_proj_bias": ("BF16", [E, 2 * F]),
            "mlp.experts.down_proj": ("BF16", [E, F, D]), "mlp.experts.down_proj_bias": ("BF16", [E, D]),
        },
        3 * D * F * 2 + 2 * F * 2 + D * 2,
    ),
    "fused MXFP4 with blocks, scales and biases": (
        {
            "mlp.experts.gate_up_proj_blocks": ("U8", [E, 2 * F, 2, 4]), "mlp.experts.gate_up_proj_scales": ("U8", [E, 2 * F, 2]),
            "mlp.experts.gate_up_proj_bias": ("BF16", [E, 2 * F]), "mlp.experts.down_proj_blocks": ("U8", [E, D, 3, 1]),
            "mlp.experts.down_proj_scales": ("U8", [E, D, 3]), "mlp.experts.down_proj_bias": ("BF16", [E, D]),
        },
        2 * F * 8 + 2 * F * 2 + 2 * F * 2 + D * 3 + D * 3 + D * 2,
    ),
    "fused under block_sparse_moe.experts": (
        {
            "block_sparse_moe.experts.gate_up_proj": ("BF16", [E, 2 * F, D]),
            "block_sparse_moe.experts.down_proj": ("BF16", [E, D, F]),
        },
        3 * D * F * 2,
    ),
    "fused input_linear and output_linear": (
        {
            "block_sparse_moe.input_linear.weight": ("BF16", [E, 2 * F, D]),
            "block_sparse_moe.output_linear.weight": ("BF16", [E, D, F]),
        },
        3 * D * F * 2,
    ),
    "fused fc1 and fc2, stored input first": (
        {"mlp.experts.fc1.weight": ("BF16", [E, D, 2 * F]), "mlp.experts.fc2.weight": ("BF16", [E, F, D])},
        3 * D * F * 2,
    ),
    "fused w13 and w2 with scales": (
        {
            "mlp.experts.w13_weight": ("F8_E4M3", [E, 2 * F, D]), "mlp.experts.w13_weight_scale": ("F32", [E]),
            "mlp.experts.w2_weight": ("F8_E4M3", [E, D, F]), "mlp.experts.w2_weight_scale": ("F32", [E]),
        },
        3 * D * F + 8,
    ),
    "gate, up, down stacked under moe": (
        {f"moe.{name}.weight": ("BF16", [E, F, D]) for name in ("gate_proj", "up_proj")}
        | {"moe.down_proj.weight": ("BF16", [E, D, F])},
        3 * D * F * 2,
    ),
    "up and down fused, no gate, stored input first": (
        {"mixer.experts.gate_and_up_projs": ("BF16", [E, D, F]), "mixer.experts.down_projs": ("BF16", [E, F, D])},
        2 * D * F * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_known_layout_weighs_its_tensors(tmp_path, layout):
    moe, row_bytes = LAYOUTS[layout]
    sizes = sizes_of(tmp_path, moe)
    assert [row_bytes] == sizes.row_bytes.tolist()
    assert [0] == sizes.fixed_bytes.tolist()
    assert (1,) == sizes.identity.layers
    assert D * F * 2 + D * 2 == sizes.dense_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_bytes_are_either_routed_or_dense(tmp_path, layout):
    checkpoint = checkpoint_of(tmp_path, LAYOUTS[layout][0], others={"lm_head.weight": ("F32", [3, D])})
    sizes = expert_sizes(checkpoint)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == sizes.expert_bytes + sizes.dense_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_widest_rank_shrinks_with_tp_but_never_below_its_part(tmp_path, layout):
    checkpoint = checkpoint_of(tmp_path, LAYOUTS[layout][0])
    rows = [int(expert_sizes(checkpoint, tp=tp).row_bytes[0]) for tp in (1, 2, 3, 4, 64)]
    assert sorted(rows, reverse=True) == rows
    assert all(row * tp >= rows[0] for row, tp in zip(rows, (1, 2, 3, 4, 64), strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        "gate, up, down per expert",
        "fused gate_up_proj and down_proj",
        "fused input_linear and output_linear",
        "fused fc1 and fc2, stored input first",
        "gate, up, down stacked under moe",
    ],
)
def test_four_ranks_of_six_hidden_elements_hold_two_at_most(tmp_path, layout):
    assert [3 * D * 2 * 2] == sizes_of(tmp_path, LAYOUTS[layout][0], tp=4).row_bytes.tolist()


def test_matrices_without_a_gate_that_are_stored_input_first_are_cut_at_the_right_end(tmp_path):
    moe = LAYOUTS["up and down fused, no gate, stored input first"][0]
    assert [2 * D * 2 * 2] == sizes_of(tmp_path, moe, tp=4).row_bytes.tolist()


def test_up_biases_are_sharded_and_down_biases_are_not(tmp_path):
    moe = LAYOUTS["biases per expert"][0]
    assert [3 * D * 2 * 2 + 2 * 2 * 2 + D * 2] == sizes_of(tmp_path, moe, tp=4).row_bytes.tolist()


def test_fused_input_first_tensors_are_sharded_like_per_expert_ones(tmp_path):
    moe = LAYOUTS["fused, stored input first, with biases"][0]
    assert [3 * D * 2 * 2 + 2 * 2 * 2 + D * 2] == sizes_of(tmp_path, moe, tp=4).row_bytes.tolist()


def test_mxfp4_blocks_and_scales_are_sharded_alike(tmp_path):
    moe = LAYOUTS["fused MXFP4 with blocks, scales and biases"][0]
    # 4 of 12 gate and up rows; 1 of 3 input blocks of down; its bias whole.
    assert [4 * 8 + 4 * 2 + 4 * 2 + D * 1 + D * 1 + D * 2] == sizes_of(tmp_path, moe, tp=4).row_bytes.tolist()


def test_block_scales_are_divided_with_the_remainder(tmp_path):
    scales_up, scales_down = {"weight_scale_inv": ("F32", [3, 2])}, {"weight_scale_inv": ("F32", [2, 3])}
    ups, downs = projections(
        "gate_proj",
        "up_proj",
        "down_proj",
        hidden=256,
        inter=300,
        extra_up=scales_up,
        extra_down=scales_down,
        dtype="F8_E4M3",
    )
    # 150 of 300 hidden elements, 2 of 3 blocks.
    assert [3 * (150 * 256 + 2 * 2 * 4)] == sizes_of(tmp_path, per_expert(ups, downs), tp=2).row_bytes.tolist()


def test_gptq_tensors_are_cut_along_the_hidden_dimension(tmp_path):
    moe = LAYOUTS["GPTQ with qweight, scales, qzeros, g_idx"][0]
    # 24 of 48 hidden elements; up keeps its input index whole, down halves it; 2 of 3 groups of down.
    up = 2 * 24 * 4 + 2 * 24 * 2 + 2 * 3 * 4 + 16 * 4
    down = 3 * 16 * 4 + 2 * 16 * 2 + 2 * 2 * 4 + 24 * 4
    assert [2 * up + down] == sizes_of(tmp_path, moe, tp=2).row_bytes.tolist()


def test_scalars_and_shape_vectors_stay_whole_on_every_rank(tmp_path):
    extra = {"weight_scale": ("F32", [1]), "input_scale": ("F32", []), "weight_shape": ("I64", [2])}
    ups, downs = projections("gate_proj", "up_proj", "down_proj", extra_up=extra, extra_down=extra)
    moe = per_expert(ups, downs)
    assert [3 * (D * 1 * 2 + 4 + 4 + 16)] == sizes_of(tmp_path, moe, tp=6).row_bytes.tolist()


def test_an_unknown_tensor_of_an_expert_counts_whole_on_every_rank(tmp_path):
    ups, downs = projections("gate_proj", "up_proj", "down_proj")
    moe = per_expert(ups, downs | {"norm.weight": ("BF16", [F])})
    assert [3 * D * 2 * 2 + F * 2] == sizes_of(tmp_path, moe, tp=4).row_bytes.tolist()


def test_257_experts_are_all_weighed(tmp_path):
    moe = per_expert(*projections("gate_proj", "up_proj", "down_proj"), num_experts=257)
    sizes = sizes_of(tmp_path, moe, config=CONFIG | {"num_experts": 257}, tp=4)
    assert 257 * 3 * D * 2 * 2 == sizes.expert_bytes
    assert 257 == sizes.identity.num_experts


def test_layers_may_have_rows_of_different_sizes(tmp_path):
    tensors = {}
    for layer, inter in ((0, 4), (1, 6)):
        layout = per_expert(*projections("gate_proj", "up_proj", "down_proj", inter=inter))
        tensors |= {f"model.layers.{layer}.{name}": kind for name, kind in layout.items()}
    sizes = expert_sizes(read_headers(write_model(tmp_path, tensors, config=CONFIG)))
    assert [3 * D * 4 * 2, 3 * D * 6 * 2] == sizes.row_bytes.tolist()


@pytest.mark.parametrize(
    "shared",
    [
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.share_expert.up_proj.weight",
        "mlp.shared_experts.0.up_proj.weight",
        "mlp.experts.shared_w13_weight",
        "shared_mlp.input_linear.weight",
        "mlp.experts.e_score_correction_bias",
        "mlp.experts.post_expert_norm.weight",
        "mlp.experts.gate_up_proj_global_scale",
        "block_sparse_moe.gate.weight",
        "mlp.gate.weight",
    ],
)
def test_what_every_token_uses_is_dense(tmp_path, shared):
    moe = LAYOUTS["gate, up, down per expert"][0] | {shared: ("BF16", [1] if "global" in shared else [E])}
    sizes = sizes_of(tmp_path, moe)
    assert [3 * D * F * 2] == sizes.row_bytes.tolist()
    assert D * F * 2 + D * 2 + (2 if "global" in shared else E * 2) == sizes.dense_bytes


@pytest.mark.parametrize(
    "prefix", ["model.layers.2", "mtp.layers.0", "model.mtp.layers.0", "mtp.0", "model.mtp_layers.0"]
)
def test_draft_layers_are_named_and_weigh_nothing(tmp_path, prefix):
    moe = LAYOUTS["gate, up, down per expert"][0]
    drafts = {f"{prefix}.{name}": kind for name, kind in moe.items()}
    drafts |= {f"{prefix}.eh_proj.weight": ("BF16", [D, 2 * D])}
    sizes = sizes_of(tmp_path, moe, others=drafts)
    assert (prefix,) == sizes.excluded
    assert (1,) == sizes.identity.layers
    assert D * F * 2 + D * 2 == sizes.dense_bytes


def test_experts_of_another_modality_are_named_and_dense(tmp_path):
    moe = LAYOUTS["gate, up, down per expert"][0]
    others = {f"talker.model.layers.7.{name}": kind for name, kind in moe.items()}
    sizes = sizes_of(tmp_path, moe, stack="thinker.model.layers", others=others)
    assert ("talker.model.layers",) == sizes.excluded
    assert D * F * 2 + D * 2 + E * 3 * D * F * 2 == sizes.dense_bytes


@pytest.mark.parametrize(
    "stack", ["model.layers", "layers", "backbone.layers", "model.language_model.layers", "model.llm.layers"]
)
def test_the_decoder_is_found_under_any_prefix(tmp_path, stack):
    vision = {f"model.visual.blocks.{layer}.mlp.up_proj.weight": ("BF16", [2, 2]) for layer in range(9)}
    sizes = sizes_of(tmp_path, LAYOUTS["gate, up, down per expert"][0], stack=stack, others=vision)
    assert ((1,), ()) == (sizes.identity.layers, sizes.excluded)


def test_identity_and_quantisation_come_from_the_config(tmp_path):
    text = {"model_type": "inner", "n_routed_experts": E, "moe_topk": [2, 2], "num_hidden_layers": 2}
    config = {"model_type": "outer", "text_config": text, "vision_config": {"num_hidden_layers": 99},
              "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    sizes = sizes_of(tmp_path / "the-model", LAYOUTS["gate, up, down per expert"][0], config=config)
    identity = sizes.identity
    assert ("outer", E, 2) == (identity.model_type, identity.num_experts, identity.top_k)
    assert ("fp8", "the-model", 2) == (sizes.quantisation, sizes.name, sizes.num_decoder_layers)
    assert 64 == len(sizes.headers_hash)


def error_of(folder, moe, **more) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        sizes_of(folder, moe, **more)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_dense_model_has_no_routed_experts(tmp_path):
    config = {name: CONFIG[name] for name in ("model_type", "num_hidden_layers")}
    error = error_of(tmp_path, dense_layer(), config=config)
    assert str(error) == (
        f"model folder {tmp_path} has no routed experts: got a dense model: config.json names no number of experts; "
        "wanted a mixture-of-experts model in a known layout; run this model without hotsplit"
    )


def test_a_layout_that_is_not_known_has_no_routed_experts(tmp_path):
    moe = {"ffn.experts.mlp.w1": ("BF16", [E * F, D])}
    assert f"no routed experts: got no tensor of the {E} experts" in str(error_of(tmp_path, moe))


@pytest.mark.parametrize("gone", ["model_type", "num_experts_per_tok", "num_hidden_layers"])
def test_a_config_without_a_fact_says_which(tmp_path, gone):
    config = {name: value for name, value in CONFIG.items() if name != gone}
    words = {
        "model_type": "no model_type",
        "num_experts_per_tok": "no experts per token",
        "num_hidden_layers": "no number of layers",
    }
    assert words[gone] in str(error_of(tmp_path, LAYOUTS["gate, up, down per expert"][0], config=config))


def test_more_experts_per_token_than_experts_are_refused(tmp_path):
    config = CONFIG | {"num_experts_per_tok": E + 1}
    assert f"got {E + 1} experts per token; wanted at most the {E}" in str(
        error_of(tmp_path, LAYOUTS["w1, w3, w2 per expert"][0], config=config)
    )


def test_a_missing_expert_is_named(tmp_path):
    moe = {name: kind for name, kind in LAYOUTS["gate, up, down per expert"][0].items() if ".experts.3." not in name}
    error = error_of(tmp_path, moe)
    assert "model.layers.1, expert 3: got no tensor of it; wanted experts 0..4" in str(error)
    assert (1, 3) == (error.layer, error.expert)


def test_an_expert_too_many_is_named(tmp_path):
    moe = per_expert(*projections("gate_proj", "up_proj", "down_proj"), num_experts=E + 1)
    assert "model.layers.1, expert 5: got an expert too many" in str(error_of(tmp_path, moe))


def test_an_expert_that_lacks_a_tensor_is_named(tmp_path):
    moe = dict(LAYOUTS["gate, up, down per expert"][0])
    del moe["mlp.experts.0.up_proj.weight"]
    error = error_of(tmp_path, moe)
    assert "model.layers.1, expert 0: got no up_proj.weight of BF16 [6, 16]; wanted the same tensors" in str(error)


@pytest.mark.parametrize("odd", [("BF16", [D, F + 1]), ("F32", [D, F])])
def test_an_expert_of_another_size_is_named(tmp_path, odd):
    moe = LAYOUTS["gate, up, down per expert"][0] | {"mlp.experts.2.down_proj.weight": odd}
    assert f"expert 2: got down_proj.weight of {odd[0]} {odd[1]}" in str(error_of(tmp_path, moe))


def test_a_fused_tensor_with_another_number_of_experts_is_refused(tmp_path):
    moe = LAYOUTS["fused gate_up_proj and down_proj"][0] | {"mlp.experts.down_proj": ("BF16", [E - 1, D, F])}
    error = error_of(tmp_path, moe)
    assert "model.layers.1, fused experts down_proj: got shape [4, 16, 6]; wanted 5 experts" in str(error)


def test_experts_without_one_side_are_refused(tmp_path):
    moe = {name: kind for name, kind in LAYOUTS["gate, up, down per expert"][0].items() if "down" not in name}
    assert "model.layers.1, experts: got no tensors of side down" in str(error_of(tmp_path, moe))


def test_a_layer_without_any_tensor_is_named(tmp_path):
    error = error_of(tmp_path, LAYOUTS["gate, up, down per expert"][0], config=CONFIG | {"num_hidden_layers": 4})
    assert "lacks tensors: got none of model.layers.2; wanted all of 4 layers" in str(error)


def test_two_language_models_in_one_folder_are_refused(tmp_path):
    moe = LAYOUTS["gate, up, down per expert"][0]
    others = {f"decoder.layers.1.{name}": kind for name, kind in moe.items()}
    assert "experts in decoder.layers and model.layers; wanted one" in str(error_of(tmp_path, moe, others=others))


def test_tp_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tp is 0"):
        sizes_of(tmp_path, LAYOUTS["gate, up, down per expert"][0], tp=0)


def test_the_bundled_model_weighs_what_its_card_says():
    if not TINY_MOE.is_dir():
        pytest.skip("the shared models are not beside this checkout")
    sizes = expert_sizes(read_headers(TINY_MOE))
    assert ("qwen3_moe", (0, 1, 2, 3), 32, 4) == (
        sizes.identity.model_type, sizes.identity.layers, sizes.identity.num_experts, sizes.identity.top_k,
    )  # fmt: skip
    assert [49_152] * 4 == sizes.row_bytes.tolist()
