"""A model before it is loaded: what headers, an index, or a config alone tell of one rank."""

from __future__ import annotations

import json

import pytest

from checkpoint_files import write_model
from hotsplit.errors import CheckpointError
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.weigh import Range, exactly, weigh, with_dense
from model_configs import DEEPSEEK_V3, QWEN3_30B

D, F, E = 64, 32, 4
CONFIG = {
    "model_type": "glm4_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": D,
    "intermediate_size": 128,
    "moe_intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
EXPERT = 3 * D * F * 2


def experts(prefix):
    return {
        f"{prefix}.mlp.experts.{expert}.{name}.weight": ("BF16", shape)
        for expert in range(E)
        for name, shape in {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items()
    }


CUT = {
    "model.embed_tokens.weight": ("BF16", (100, D)),
    "lm_head.weight": ("BF16", (100, D)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (128, D)),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (64, D)),
    "model.layers.1.self_attn.o_proj.weight": ("BF16", (D, 64)),
    "model.layers.1.mlp.shared_experts.gate_proj.weight": ("BF16", (F, D)),
}
KV = {"model.layers.0.self_attn.k_proj.weight": ("BF16", (16, D))}
WHOLE = {
    "model.norm.weight": ("BF16", (D,)),
    "model.layers.1.mlp.gate.weight": ("F32", (E, D)),
    "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (E,)),
}
STRANGE = {"model.layers.0.novelty.weight": ("BF16", (D, D))}
DRAFT = {**experts("model.layers.2"), "model.layers.2.eh_proj.weight": ("BF16", (D, 2 * D))}


def nbytes(tensors):
    size = {"BF16": 2, "F32": 4}
    return sum(size[dtype] * (shape[0] * (shape[1] if len(shape) > 1 else 1)) for dtype, shape in tensors.values())


@pytest.fixture
def folder(tmp_path):
    tensors = {**CUT, **KV, **WHOLE, **experts("model.layers.1"), **DRAFT}
    return write_model(tmp_path / "model", tensors, config=CONFIG)


def test_on_one_rank_every_byte_is_dense_routed_or_a_draft(folder):
    found = weigh(folder, tp=1)
    assert ("headers", exactly(nbytes({**CUT, **KV, **WHOLE}))) == (found.source, found.dense)
    assert exactly(nbytes(DRAFT)) == found.draft
    total = sum(info.nbytes for info in read_headers(folder).tensors.values())
    assert total == found.dense.least + found.draft.least + found.sizes.expert_bytes


def test_ranks_share_what_tensor_parallelism_cuts_and_keep_the_rest_whole(folder):
    assert exactly(nbytes(CUT) // 2 + nbytes(KV) // 2 + nbytes(WHOLE)) == weigh(folder, tp=2).dense


def test_keys_and_values_are_copied_where_ranks_are_more_than_heads(folder):
    assert exactly(nbytes(CUT) // 8 + nbytes(KV) // 2 + nbytes(WHOLE)) == weigh(folder, tp=8).dense


def test_a_name_that_does_not_tell_makes_a_range_and_says_so(tmp_path):
    tensors = {**CUT, **STRANGE, **experts("model.layers.1")}
    found = weigh(write_model(tmp_path / "model", tensors, config=CONFIG), tp=4)
    known = nbytes(CUT) // 4
    assert Range(least=known + nbytes(STRANGE) // 4, most=known + nbytes(STRANGE)) == found.dense
    assert ["dense-unsure"] == [notice.name for notice in found.notices]


def write_index(folder, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": nbytes(tensors)}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_sum_of_an_index_holds_between_its_ends_what_headers_tell(tmp_path, tp):
    tensors = {**CUT, **KV, **WHOLE, **experts("model.layers.1")}
    found = weigh(write_index(tmp_path / "index", tensors), tp=tp)
    exact = weigh(write_model(tmp_path / "whole", tensors, config=CONFIG), tp=tp)
    rest = nbytes({**CUT, **KV, **WHOLE})
    assert ("index", Range(least=-(-rest // tp), most=rest)) == (found.source, found.dense)
    assert found.dense.least <= exact.dense.least <= found.dense.most
    assert exact.sizes.row_bytes.tolist() == found.sizes.row_bytes.tolist()
    assert (exactly(0), ["bytes-from-config"]) == (found.draft, [notice.name for notice in found.notices])


def test_an_index_tells_experts_of_draft_layers_by_their_names_and_not_their_dense_weights(tmp_path):
    tensors = {**CUT, **experts("model.layers.1"), **DRAFT}
    found = weigh(write_index(tmp_path / "index", tensors), tp=2)
    assert Range(least=E * EXPERT // 2, most=None) == found.draft
    assert nbytes(CUT) + D * 2 * D * 2 == found.dense.most
    assert ["bytes-from-config", "draft-in-dense"] == [notice.name for notice in found.notices]


def test_an_index_whose_sum_is_below_its_experts_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": 10}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match="total_size: got 10 bytes"):
        weigh(tmp_path, tp=1)


def test_a_config_alone_tells_experts_and_cache_and_leaves_dense_bytes_unknown(tmp_path):
    file = tmp_path / "deepseek.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    found = weigh(file, tp=4)
    assert ("config", "deepseek", Range(least=0, most=None)) == (found.source, found.sizes.name, found.dense)
    assert (58, 61, 70_272) == (len(found.sizes.row_bytes), found.sizes.num_decoder_layers, found.kv.token_bytes)
    assert Range(least=256 * int(found.sizes.row_bytes[0]), most=None) == found.draft
    assert ["bytes-from-config", "dense-unknown"] == [notice.name for notice in found.notices]


def test_the_user_s_word_for_dense_bytes_is_taken(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    found = with_dense(weigh(tmp_path, tp=1), 3 * 2**30)
    assert (exactly(3 * 2**30), exactly(0)) == (found.dense, found.draft)
    assert ["bytes-from-config"] == [notice.name for notice in found.notices]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama", "hidden_size": 8}'])
def test_what_is_no_config_of_a_mixture_of_experts_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError):
        weigh(tmp_path, tp=1)


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="gone"):
        weigh(tmp_path / "gone", tp=1)
