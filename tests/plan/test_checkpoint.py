from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint_files import write_header, write_model, write_shard
from hotsplit.errors import CheckpointError
from hotsplit.plan.checkpoint import DTYPE_BITS, read_header, read_headers, require_loadable, tensor_bytes

CONFIG = {"model_type": "toy"}
TENSORS = {"a": ("F32", [2, 3]), "b": ("BF16", [4]), "c": ("F8_E8M0", []), "d": ("F4", [3])}


def entry(**changes: object) -> bytes:
    fields = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes
    return json.dumps({"w": fields}).encode()


def two(first: list[int], second: list[int]) -> bytes:
    """Tensors a and b at these offsets."""
    places = {"a": first, "b": second}
    return json.dumps(
        {name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at} for name, at in places.items()}
    ).encode()


def metadata(value: object) -> bytes:
    fields = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    return json.dumps({"__metadata__": value, "w": fields}).encode()


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_bytes_at_the_offsets_are_the_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arrays = {"x": np.arange(6, dtype=np.int16).reshape(2, 3), "y": np.linspace(0, 1, 5), "z": np.array(7, np.uint8)}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    tensors = read_headers(tmp_path).tensors
    assert ["x", "y", "z"] == list(tensors)
    for name, array in arrays.items():
        info = tensors[name]
        data = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert array.tobytes() == data
        assert array.shape == info.shape


def test_every_dtype_of_the_format_is_read(tmp_path):
    write_model(tmp_path, {dtype: (dtype, [3, 8]) for dtype in DTYPE_BITS}, config=CONFIG)
    tensors = read_headers(tmp_path).tensors
    assert {dtype: 3 * bits for dtype, bits in DTYPE_BITS.items()} == {
        name: info.nbytes for name, info in tensors.items()
    }


def test_elements_below_a_byte_round_up_to_whole_bytes():
    assert (2, 1, 3) == (tensor_bytes("F4", (3,)), tensor_bytes("F6_E2M3", ()), tensor_bytes("F6_E3M2", (2, 2)))


def test_shards_are_those_of_the_index_and_the_others_are_left_alone(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=3)
    write_shard(tmp_path / "consolidated.safetensors", {"other": ("U8", [1])})
    tensors = read_headers(tmp_path).tensors
    assert sorted(TENSORS) == sorted(tensors)
    assert "model-00002-of-00003.safetensors" == tensors["b"].file.name


def test_without_an_index_the_single_file_is_read_alone(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG)
    write_shard(tmp_path / "consolidated.safetensors", {"other": ("U8", [1])})
    assert sorted(TENSORS) == sorted(read_headers(tmp_path).tensors)


def test_beside_an_index_the_single_file_is_read_alone_as_transformers_does(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    write_model(tmp_path, {"a": ("U8", [1])}, config=CONFIG)
    checkpoint = read_headers(tmp_path)
    assert (["a"], "model.safetensors") == (list(checkpoint.tensors), checkpoint.entry.name)


@pytest.mark.parametrize("name", ["other.safetensors", "sub/other.safetensors"])
def test_the_file_that_the_config_names_comes_first(tmp_path, name):
    write_model(tmp_path, TENSORS, config=CONFIG | {"transformers_weights": name})
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_shard(tmp_path / name, {"other": ("U8", [1])})
    assert ["other"] == list(read_headers(tmp_path).tensors)


def test_the_index_that_the_config_names_comes_first(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "own.safetensors.index.json")
    write_model(tmp_path, {"x": ("U8", [1])}, config=CONFIG | {"transformers_weights": "own.safetensors.index.json"})
    assert sorted(TENSORS) == list(read_headers(tmp_path).tensors)


@pytest.mark.parametrize("name", ["gone.safetensors", "../far.safetensors", "config.json", 7, ""])
def test_a_file_that_the_config_names_and_the_folder_lacks_is_refused(tmp_path, name):
    write_model(tmp_path / "model", TENSORS, config=CONFIG | {"transformers_weights": name})
    write_shard(tmp_path / "far.safetensors", TENSORS)
    assert f"transformers_weights: got {name!r}; wanted a .safetensors file" in error_of(tmp_path / "model")


def test_a_folder_with_one_file_or_an_index_is_loadable(tmp_path):
    require_loadable(read_headers(write_model(tmp_path / "one", TENSORS, config=CONFIG)))
    require_loadable(read_headers(write_model(tmp_path / "three", TENSORS, config=CONFIG, num_shards=3)))


def test_shards_without_an_index_can_be_read_and_not_loaded(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = read_headers(tmp_path)
    assert (sorted(TENSORS), None) == (list(checkpoint.tensors), checkpoint.entry)
    with pytest.raises(CheckpointError, match="without model.safetensors.index.json; wanted .*; download the index"):
        require_loadable(checkpoint)


def test_without_index_and_single_file_every_safetensors_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_shard(tmp_path / "one.safetensors", {"a": ("U8", [1])})
    write_shard(tmp_path / "two.safetensors", {"b": ("U8", [1])})
    assert ["a", "b"] == list(read_headers(tmp_path).tensors)


def test_a_file_without_tensors_is_read_as_empty(tmp_path):
    assert {} == read_header(write_header(tmp_path / "x.safetensors", b"{}"))


def test_the_hash_does_not_depend_on_how_tensors_are_sharded(tmp_path):
    one = read_headers(write_model(tmp_path / "one", TENSORS, config=CONFIG))
    three = read_headers(write_model(tmp_path / "three", TENSORS, config=CONFIG, num_shards=3))
    assert one.headers_hash == three.headers_hash
    assert 64 == len(one.headers_hash)


@pytest.mark.parametrize("changed", [{"a": ("F32", [3, 2])}, {"a": ("I32", [2, 3])}, {"e": ("U8", [1])}])
def test_the_hash_depends_on_names_dtypes_and_shapes(tmp_path, changed):
    one = read_headers(write_model(tmp_path / "one", TENSORS, config=CONFIG))
    other = read_headers(write_model(tmp_path / "other", TENSORS | changed, config=CONFIG))
    assert one.headers_hash != other.headers_hash


def test_a_missing_folder_is_named(tmp_path):
    folder = tmp_path / "nowhere"
    assert f"model folder {folder}: got no such folder" in error_of(folder)


def test_a_file_is_no_model_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert "got a file; wanted a folder" in error_of(path)


def test_a_missing_config_is_named(tmp_path):
    write_shard(tmp_path / "model.safetensors", TENSORS)
    assert "got no config.json" in error_of(tmp_path)


@pytest.mark.parametrize(("text", "wanted"), [("{", "wanted JSON"), ("[1]", "got list; wanted a JSON object")])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text, wanted):
    write_model(tmp_path, TENSORS, config=CONFIG)
    (tmp_path / "config.json").write_text(text)
    assert wanted in error_of(tmp_path)


def test_other_weight_formats_are_named_with_the_cure(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "got pytorch_model.bin only; wanted *.safetensors; convert the model to safetensors" in error_of(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "got no weights" in error_of(tmp_path)


def test_a_shard_that_the_index_names_and_is_missing_is_named(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of 3 shards" in error_of(tmp_path)
    assert "no model-00002-of-00003.safetensors" in error_of(tmp_path)


def test_a_shard_missing_by_its_number_is_found_without_an_index(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    assert "lacks shards: got 2 files named *-of-00003.safetensors; wanted 3" in error_of(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path, index):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "got no weight_map" in error_of(tmp_path)


def test_a_tensor_of_the_index_that_no_shard_has_is_named(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert "shard model-00001-of-00002.safetensors: got no tensor ghost" in error_of(tmp_path)


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_shard(tmp_path / "one.safetensors", {"a": ("U8", [1])})
    write_shard(tmp_path / "two.safetensors", {"a": ("U8", [1])})
    assert "tensor a: got one in one.safetensors and one in two.safetensors" in error_of(tmp_path)


def test_of_a_tensor_in_two_shards_the_index_chooses(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    write_shard(second, {"b": ("BF16", [4]), "d": ("F4", [3]), "a": ("U8", [1])})
    assert first == read_headers(tmp_path).tensors["a"].file


@pytest.mark.parametrize("cut", [1, 30])
def test_a_shard_cut_in_its_data_is_found(tmp_path, cut):
    path = write_model(tmp_path, TENSORS, config=CONFIG) / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - cut)
    assert f"is truncated: got {size - cut} bytes; wanted {size}" in error_of(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_shard_cut_in_its_header_is_found(tmp_path, size):
    path = write_model(tmp_path, TENSORS, config=CONFIG) / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(size)
    assert f"is truncated: got {size} bytes" in error_of(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    path = write_model(tmp_path, TENSORS, config=CONFIG) / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "got a git-lfs pointer; wanted the weights; run git lfs pull" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (b"{nonsense", "a header that is no JSON"),
        (b"\xff\xfe", "a header that is no JSON"),
        (b"[]", "a header that is no JSON object"),
        (b'{"w": 1}', "tensor w without dtype and shape"),
        (entry(dtype="F9"), "tensor w of dtype F9"),
        (entry(dtype=["U8"]), "tensor w of dtype"),
        (entry(shape=[-4]), "tensor w of shape [-4]"),
        (entry(shape=None), "tensor w of shape None"),
        (entry(shape=[4.0]), "tensor w of shape [4.0]"),
        (entry(data_offsets=[0]), "tensor w at offsets [0]"),
        (entry(data_offsets=[4, 0]), "tensor w of -4 bytes; wanted 4 for U8 [4]"),
        (entry(data_offsets=[0, 3]), "tensor w of 3 bytes; wanted 4 for U8 [4]"),
        (entry(data_offsets=[10**12, 10**12 + 4]), "is truncated"),
        (entry(shape=[3], data_offsets=[0, 3]), "got 1 bytes after its last tensor"),
        (entry(shape=[3], data_offsets=[1, 4]), "tensor w that begins 1 bytes late"),
        (two([0, 4], [2, 4]), "tensor b that overlaps another tensor"),
        (two([0, 2], [1, 4]), "tensor b that overlaps another tensor"),
        (two([0, 1], [3, 4]), "tensor b that begins 2 bytes late"),
        (b'{"w": {}, "w": {}}', "the key 'w' twice"),
        (metadata([]), "a __metadata__ that is no object of strings"),
        (metadata(None), "a __metadata__ that is no object of strings"),
        (metadata({"format": 1}), "a __metadata__ that is no object of strings"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(tmp_path, header, wanted):
    write_model(tmp_path, TENSORS, config=CONFIG)
    write_header(tmp_path / "model.safetensors", header, data_bytes=4)
    assert wanted in error_of(tmp_path)


def test_a_length_beyond_the_formats_limit_is_no_safetensors_file(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG)
    write_header(tmp_path / "model.safetensors", b"{}", length=10**15)
    assert "got a header length of 1000000000000000 bytes" in error_of(tmp_path)


def test_an_unreadable_shard_says_why(tmp_path):
    write_model(tmp_path, TENSORS, config=CONFIG, num_shards=2)
    folder = tmp_path / "x.safetensors"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"x\.safetensors: got Is a directory; wanted a readable file"):
        read_header(folder)


def test_a_named_pipe_in_a_shards_place_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: got a named pipe, no regular file"):
        read_header(tmp_path / "x.safetensors")
