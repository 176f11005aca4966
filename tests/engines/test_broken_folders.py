"""Folders whose parts do not belong together: one clear line each, and never a model that computes something else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import tiny
from hotsplit.errors import CheckpointError, HotsplitError

pytestmark = pytest.mark.transformers


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "broken")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "zzz"},
        {"hidden_size": 48},
        {"vocab_size": 7},
        {"num_attention_heads": 3},
        {"architectures": ["GPT2LMHeadModel"]},
        {"rope_parameters": {"rope_type": "bogus", "rope_theta": 1.0}},
        {"dtype": "bfloat17"},
        {"quantization_config": "fp8"},
    ],
)
def test_a_config_that_does_not_fit_is_one_line(folder, load, changes):
    edit_config(folder, **changes)
    with pytest.raises(HotsplitError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("width", [16, 64])
def test_experts_of_another_width_than_config_says_are_refused(folder, load, width):
    edit_config(folder, moe_intermediate_size=width)
    with pytest.raises(CheckpointError, match=r"layer 0, gate_up_proj: got stored experts of shape \(64, 64\); wanted"):
        load(folder)


def test_a_weight_that_overflows_does_not_make_a_model_unknown(folder, load):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "experts.0.down_proj" in name)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    model, stock = load(folder), tiny.stock(folder)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert torch.equal(stock(ids).logits.isnan(), model(ids).logits.isnan())
