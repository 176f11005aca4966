"""The default budget on a GPU follows transformers' own device map: its placement and ours are compared on real models."""

from __future__ import annotations

import importlib

import pytest
import torch

from engines import tiny
from engines.stand_in import StandIn
from hotsplit.engines.transformers.gpu import on_gpu
from hotsplit.engines.transformers.opening import open_model
from hotsplit.host.budget import kept_by_device_map
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.sizes import expert_sizes

pytest.importorskip("accelerate", reason="needs accelerate")

theirs = importlib.import_module("transformers.integrations.accelerate")

pytestmark = pytest.mark.transformers


def opened(folder):
    checkpoint = read_headers(folder)
    return open_model(folder, checkpoint=checkpoint, sizes=expert_sizes(checkpoint), kwargs={})


def resident_bytes(meta, *, room):
    """Weight bytes on the GPU by transformers' own map, for a GPU that it may fill up to `room`."""
    found = theirs.infer_auto_device_map(
        meta, max_memory={0: room, "cpu": 1 << 40}, no_split_module_classes=set(meta._no_split_modules)
    )
    places = {path: where for path, where in found.items() if where == 0}

    def is_there(name):
        return any(not path or name == path or name.startswith(f"{path}.") for path in places)

    tensors = [*meta.named_parameters(), *meta.named_buffers()]
    return sum(tensor.nbytes for name, tensor in tensors if is_there(name))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "nemotron_h", "mixtral"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_bytes_kept_are_those_of_transformers_own_map(tmp_path, model_type, tie):
    folder = tiny.make_checkpoint(tmp_path / "model", model_type=model_type, changes={"tie_word_embeddings": tie})
    model = opened(folder)
    modules = on_gpu(StandIn().place(), opened=model).modules
    total = sum(one.num_bytes for one in modules)
    for share in torch.linspace(0.05, 1.5, 60).tolist():
        room = int(total * share)
        kept = sum(one.num_bytes for one in kept_by_device_map(modules, free_bytes=int(room / 0.9)))
        assert kept == resident_bytes(model.meta, room=int(0.9 * int(room / 0.9))), share
