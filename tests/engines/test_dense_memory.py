"""Dense weights leave the mapped checkpoint: no parameter's bytes are a file's, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from engines import tiny
from hotsplit.engines.transformers.dense_memory import FileMappings, move_out_of_files

pytestmark = pytest.mark.transformers


def in_files(model):
    mappings = FileMappings()
    return [name for name, tensor in model.state_dict().items() if mappings.at(tensor.data_ptr())]


@pytest.mark.parametrize("kernel", ["exact", "fast"])
def test_no_weight_of_a_loaded_model_lies_in_a_file(checkpoint, load, expected, kernel):
    folder = checkpoint("qwen3_moe")
    assert in_files(tiny.stock(folder)), "stock has stopped mapping weights: this module has lost its reason"
    model = load(folder, kernel=kernel)
    assert [] == in_files(model)
    if kernel == "exact":
        assert torch.equal(expected(folder)[0], tiny.play(model)[0])


def test_tied_weights_stay_tied_and_large_ones_have_storages_of_their_own(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (3 << 13))
    file = torch.from_file(str(path), shared=False, size=6 << 20, dtype=torch.uint8).view(torch.float32)
    model = torch.nn.Module()
    model.large = torch.nn.Parameter(file[: 3 << 18], requires_grad=False)
    model.tied = torch.nn.Parameter(file[: 3 << 18], requires_grad=False)
    model.same = model.large
    model.register_buffer("small", file[-5:])
    model.own = torch.nn.Parameter(torch.ones(3))
    places = [tensor.data_ptr() % 64 for tensor in (model.large, model.small)]
    before, own = {name: value.clone() for name, value in model.state_dict().items()}, model.own.data_ptr()
    assert (3 << 20) + 20 == move_out_of_files(model)
    assert [] == in_files(model)
    assert model.large.data_ptr() == model.tied.data_ptr() == model.same.data_ptr()
    assert own == model.own.data_ptr()
    assert places == [tensor.data_ptr() % 64 for tensor in (model.large, model.small)]
    assert 3 << 20 == model.large.untyped_storage().nbytes()
    after = model.state_dict()
    assert all(before[name].view(torch.int32).equal(after[name].view(torch.int32)) for name in before)
    assert 0 == move_out_of_files(model)


def test_where_no_mappings_are_told_nothing_moves(tmp_path):
    assert FileMappings(root=tmp_path).at(id(tmp_path)) is None
