"""Checkpoints of every form: block-FP8, fused and transposed, split over shards, loaded in another type than stored."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import core_model_loading as loading

from engines import tiny
from engines.copies import until_swapped
from hotsplit.bank.source import RowLayout
from hotsplit.engines.transformers.index import SCALE, Conversion, ExpertsLayer, _conversion, _Part
from hotsplit.engines.transformers.mathematics import preparer
from hotsplit.errors import CheckpointError, UnsupportedEngineError
from hotsplit.plan.checkpoint import TensorInfo, read_headers

pytestmark = pytest.mark.transformers

E = 8


def same(expected, got):
    return [torch.equal(*pair) for pair in zip(expected, got, strict=True)]


def stored_row(model, layer_id, expert):
    """The tensors of an expert as the banks keep them."""
    banks = model.hotsplit.banks
    return banks.rows.tensors(layer_id, banks.router.row_map[layer_id, expert].item())


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_a_block_fp8_checkpoint_equals_stock_to_the_bit(checkpoint, expected, load, model_type, hot):
    folder = checkpoint(model_type, fp8=True)
    assert [True] * 3 == same(expected(folder), tiny.play(load(folder, hot=hot, dynamic=False)))


def test_block_fp8_experts_swap_and_stay_equal(checkpoint, expected, load):
    folder = checkpoint("qwen3_moe", fp8=True)
    model = load(folder, hot=0.5, dyn_steps=3, dyn_margin=1, dyn_half_life=1)
    for _ in range(2):
        assert [True] * 3 == same(expected(folder), tiny.play(model))
    until_swapped(model, lambda: tiny.play(model))


def test_block_fp8_is_not_what_the_unquantised_model_gives(checkpoint, expected):
    assert [False] * 3 == same(expected(checkpoint("qwen3_moe")), expected(checkpoint("qwen3_moe", fp8=True)))


def test_block_fp8_rows_stay_fp8_hot_and_cold(checkpoint, load):
    folder = checkpoint("qwen3_moe", fp8=True)
    model = load(folder, hot=0.5, dynamic=False)
    banks, files = model.hotsplit.banks, load_file(folder / "model.safetensors")
    hot = banks.router.hot_mask()
    assert {True, False} == set(hot[0].tolist())
    for expert in range(E):
        row, prefix = stored_row(model, 0, expert), f"model.layers.0.mlp.experts.{expert}"
        types = {name: tensor.dtype for name, tensor in row.items()}
        assert {
            "gate_up_proj": torch.float8_e4m3fn,
            "gate_up_proj.scale": torch.float32,
            "down_proj": torch.float8_e4m3fn,
            "down_proj.scale": torch.float32,
        } == types
        for name, suffix in (("", ""), (SCALE, "_scale_inv")):
            parts = [files[f"{prefix}.{part}_proj.weight{suffix}"] for part in ("gate", "up")]
            assert torch.equal(torch.cat(parts).view(torch.uint8), row[f"gate_up_proj{name}"].view(torch.uint8))
            down = files[f"{prefix}.down_proj.weight{suffix}"]
            assert torch.equal(down.view(torch.uint8), row[f"down_proj{name}"].view(torch.uint8))


def test_block_fp8_rows_take_a_byte_per_weight(checkpoint, load):
    model = load(checkpoint("qwen3_moe", fp8=True), hot=1.0, dynamic=False)
    weights = 3 * tiny.HIDDEN * 32
    # Gate and up behind one another, their 2 x 2 x 1 scales, down, its scales: each tensor starts on a cache line.
    row = weights + 64 + 64
    assert [row] * 2 == model.hotsplit.sizes.row_bytes.tolist()
    assert 2 * E * row == model.hotsplit.banks.hot_bytes
    assert weights * 2 <= load(checkpoint("qwen3_moe"), hot=1.0, dynamic=False).hotsplit.sizes.row_bytes[0]


def test_block_fp8_with_bf16_scales_equals_stock(checkpoint, expected, load, tmp_path):
    folder = tiny.quantise(checkpoint("qwen3_moe"), tmp_path / "fp8", scale_dtype=torch.bfloat16)
    assert [True] * 3 == same(expected(folder), tiny.play(load(folder, dynamic=False)))


def test_an_experts_missing_scale_is_one_clear_error(checkpoint, load, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "fp8"
    shutil.copytree(checkpoint("qwen3_moe", fp8=True), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expert 3.*weight_scale_inv"):
        load(folder)


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_a_fused_and_transposed_checkpoint_equals_stock_to_the_bit(checkpoint, expected, load, hot):
    folder = checkpoint("qwen3_vl_moe")
    (name,) = [name for name in load_file(folder / "model.safetensors") if "layers.0.mlp.experts.gate_up_proj" in name]
    assert name.startswith("model.language_model.")
    model = load(folder, hot=hot, dynamic=False)
    assert [True] * 3 == same(expected(folder), tiny.play(model))


@pytest.fixture
def transposed(checkpoint, tmp_path):
    """The same model with its experts stored [E, in, out], as its makers publish it."""
    from safetensors.torch import save_file

    folder = tmp_path / "transposed"
    shutil.copytree(checkpoint("qwen3_vl_moe"), folder)
    tensors = load_file(folder / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_experts_that_are_stored_the_other_way_round_are_turned(checkpoint, expected, load, transposed, hot):
    model = load(transposed, hot=hot, dynamic=False)
    assert [True] * 3 == same(expected(checkpoint("qwen3_vl_moe")), tiny.play(model))
    assert [True] * 3 == same(expected(transposed), tiny.play(model))


def stored_as(*shape):
    info = TensorInfo(file=None, dtype="BF16", shape=shape, offset=0, nbytes=0)
    return {None: [_Part(order=0, info=info)]}


def converter(*operations):
    return loading.WeightConverter(source_patterns="a", target_patterns="b", operations=list(operations))


def test_a_transpose_that_checks_shapes_turns_only_what_differs():
    turn = converter(loading.Transpose(1, 2, check_dims=True))
    assert Conversion(transpose=True) == _conversion(turn, stored=stored_as(8, 4, 6), shape=(8, 6, 4))
    assert Conversion() == _conversion(turn, stored=stored_as(8, 6, 4), shape=(8, 6, 4))


def test_a_transpose_that_checks_nothing_always_turns():
    turn = converter(loading.Transpose(1, 2))
    assert Conversion(transpose=True) == _conversion(turn, stored=stored_as(8, 4, 4), shape=(8, 4, 4))


def test_merging_concatenating_and_dequantising_need_no_conversion():
    plain = converter(loading.MergeModulelist(dim=0), loading.Concatenate(dim=1))
    assert _conversion(plain, stored=stored_as(8, 4, 6), shape=(8, 4, 6)).is_plain
    assert _conversion(None, stored=stored_as(8, 4, 6), shape=(8, 4, 6)).is_plain


@pytest.mark.parametrize(
    "operation", [loading.Transpose(0, 1), loading.Interleave(dim=0), loading.Chunk(dim=0), loading.Concatenate(dim=2)]
)
def test_a_conversion_that_is_not_known_is_refused_by_name(operation):
    with pytest.raises(UnsupportedEngineError, match=f"checkpoint conversion {type(operation).__name__}"):
        _conversion(converter(operation), stored=stored_as(8, 4, 6), shape=(8, 4, 6))


@pytest.mark.parametrize(
    "operation",
    [
        loading.Interleave(dim=1),
        loading.Interleave(dim=2),
        loading.Interleave(dim=1, inverse=True),
        loading.Interleave(dim=2, inverse=True),
        loading.Transpose(1, 2),
    ],
)
def test_preparing_one_expert_equals_transformers_operation_on_all(operation):
    whole = torch.randn(E, 6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    ((_, expected),) = operation.convert({"a": whole}, source_patterns=["a"], target_patterns=["b"]).items()
    conversion = _conversion(converter(operation), stored=stored_as(*whole.shape), shape=tuple(expected.shape))
    layer = ExpertsLayer(path="x", decoder_index=0, parameters={"w": (tuple(expected.shape), torch.bfloat16)})
    prepare = preparer(layer, layout=tiny.layout_of({"w": (6, 4)}), conversions={"w": conversion})
    for expert in range(E):
        got = prepare({"w": whole[expert]})["w"]
        assert torch.equal(expected[expert], got)
        assert got.is_contiguous()


def test_a_plain_conversion_copies_nothing():
    layer = ExpertsLayer(path="x", decoder_index=0, parameters={"w": ((E, 6, 4), torch.bfloat16)})
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    prepare = preparer(layer, layout=tiny.layout_of({"w": (6, 4)}), conversions={"w": Conversion()})
    assert weight.data_ptr() == prepare({"w": weight})["w"].data_ptr()


@pytest.mark.parametrize("phase", [0, 24])
def test_a_float32_weight_is_computed_with_where_the_stock_engine_has_it(phase):
    """torch's product of one token rounds with the weight's address."""
    layer = ExpertsLayer(path="x", decoder_index=0, parameters={"w": ((E, 6, 4), torch.float32)})
    layout = tiny.layout_of({"w": (6, 4)}, dtype=torch.float32, phase=phase)
    prepare = preparer(layer, layout=layout, conversions={"w": Conversion()})
    for shift in (0, 2, 6):
        weight = torch.randn(24 + shift)[shift:].view(6, 4)
        got = prepare({"w": weight})["w"]
        assert torch.equal(weight, got)
        assert phase == got.data_ptr() % 64
        assert (weight.data_ptr() % 64 == phase) == (got.data_ptr() == weight.data_ptr())


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_experts_that_are_split_over_shards_equal_stock(expected, load, tmp_path, hot):
    folder = tiny.make_checkpoint(tmp_path / "model", model_type="qwen3_moe", max_shard_size="30KB")
    model = load(folder, hot=hot, dynamic=False)
    source = model.hotsplit.banks._source
    files = [{span.file for span in source.spans(n, expert)} for n in range(2) for expert in range(E)]
    assert len(source.files) > 5
    assert any(len(numbers) > 1 for numbers in files), "the case needs an expert in two files"
    assert [True] * 3 == same(expected(folder), tiny.play(model))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_another_computing_type_than_stored_equals_stock_and_rows_stay_as_stored(
    checkpoint, expected, load, model_type, hot
):
    folder = checkpoint(model_type)
    model = load(folder, hot=hot, dynamic=False, model_kwargs={"dtype": torch.float32})
    got = tiny.play(model)
    assert torch.float32 == got[0].dtype
    assert [True] * 3 == same(expected(folder, dtype=torch.float32), got)
    assert {torch.bfloat16} == {tensor.dtype for tensor in stored_row(model, 0, 0).values()}


def test_a_float32_checkpoint_in_bf16_equals_stock(checkpoint, expected, load):
    folder = checkpoint("qwen3_moe", dtype=torch.float32)
    model = load(folder, dynamic=False, model_kwargs={"dtype": torch.bfloat16})
    assert [True] * 3 == same(expected(folder, dtype=torch.bfloat16), tiny.play(model))
    assert torch.float32 == stored_row(model, 0, 0)["down_proj"].dtype


@pytest.mark.parametrize("model_type", sorted(tiny.CONFIGS))
def test_every_expert_of_every_layer_has_the_stock_models_parameters(checkpoint, load, model_type):
    folder = checkpoint(model_type)
    model, stock = load(folder, hot=0.5, dynamic=False), tiny.stock(folder)
    source = model.hotsplit.banks._source
    for layer_id, layer in enumerate(source.layers):
        module = stock.get_submodule(layer.path)
        prepare = preparer(layer, layout=source.layouts[layer_id], conversions=source.conversions)
        names = {name for name, _ in module.named_parameters(recurse=False)}
        assert set(layer.parameters) <= names
        for expert in range(E):
            for name, parameter in prepare(stored_row(model, layer_id, expert)).items():
                assert torch.equal(getattr(module, name)[expert], parameter), f"layer {layer_id}, {expert}, {name}"


def test_rows_of_the_plan_are_as_wide_as_the_real_ones(checkpoint, load):
    for model_type in sorted(tiny.CONFIGS):
        model = load(checkpoint(model_type), hot=1.0, dynamic=False)
        layouts = model.hotsplit.banks._source.layouts
        assert all(isinstance(layout, RowLayout) for layout in layouts)
        assert [layout.num_bytes for layout in layouts] == list(model.hotsplit.plan.row_bytes)


def test_layers_are_named_by_their_decoder_index(checkpoint, load):
    folder = checkpoint("deepseek_v3")
    assert 1 == json.loads((folder / "config.json").read_text())["first_k_dense_replace"]
    model = load(folder, dynamic=False)
    assert (1,) == model.hotsplit.plan.layers
    assert ["1"] == [str(layer) for layer in model.hotsplit.snapshot().counts["decode"]]


def test_headers_that_lack_an_expert_are_refused(checkpoint, load, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_moe"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(tensors) == len(read_headers(folder).tensors)
    with pytest.raises(CheckpointError, match="model.layers.1, expert 3"):
        load(folder)
