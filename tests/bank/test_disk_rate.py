from __future__ import annotations

import pytest

from hotsplit.bank import disk_rate
from hotsplit.bank.disk_rate import measure_disk, model_files
from hotsplit.errors import BankError
from hotsplit.units import MIB

ROW = 256 * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two shards, a small one and a large one, and what else a model has."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "a.safetensors").write_bytes(b"a" * (8 * MIB + 12345))
    (folder / "b.safetensors").write_bytes(b"b" * (72 * MIB))
    (folder / "config.json").write_text("{}")
    (folder / "empty.safetensors").touch()
    return folder


def test_a_disk_is_read_at_a_rate(model):
    found = measure_disk(model, row_bytes=ROW, seconds=0.2)
    assert found.rate.value > 0
    assert "in rows of 0.2 MiB at random places" in found.rate.source


def test_shards_are_read_the_largest_first_and_nothing_else(model):
    assert ["b.safetensors", "a.safetensors", "empty.safetensors"] == [path.name for path in model_files(model)]


def test_a_folder_without_shards_is_read_as_it_is(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert ["x.bin"] == [path.name for path in model_files(tmp_path)]


def test_no_place_is_read_twice_and_all_lie_within_the_files():
    sizes = [10 * ROW + 5, 3 * ROW, 0, ROW - 1]
    places = disk_rate._places(sizes, row_bytes=ROW, seed=1)
    assert 13 == len(places) == len(set(places))
    assert all(offset % ROW == 0 and offset + ROW <= sizes[file] for file, offset in places)
    assert places != sorted(places)
    assert places == disk_rate._places(sizes, row_bytes=ROW, seed=1)


def test_too_little_to_read_says_nothing_of_a_disk(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"x" * MIB)
    found = measure_disk(tmp_path)
    assert None is found.rate.value
    assert "1.0 MiB in 1 files" in found.rate.reason
    small = measure_disk(tmp_path, row_bytes=24 * 1024)
    assert "fewer than 64.0 MiB in rows of 24.0 KiB say nothing of a disk" in small.rate.reason
    assert None is measure_disk(tmp_path / "gone").rate.value


def test_a_read_that_fails_is_a_reason(model, monkeypatch):
    class Broken:
        def __init__(self, files):
            raise BankError(f"cannot open {files[0]}", got="Permission denied")

    monkeypatch.setattr(disk_rate, "DirectReader", Broken)
    assert "Permission denied" in measure_disk(model, row_bytes=ROW).rate.reason


def test_a_file_system_without_direct_reads_is_said(model, monkeypatch):
    monkeypatch.setattr(disk_rate, "reads_directly", lambda path: False)
    (notice,) = measure_disk(model, row_bytes=ROW, seconds=0.05).notices
    assert "disk-through-cache" == notice.name


def test_whether_a_file_is_read_directly_is_tried(model, tmp_path):
    assert isinstance(disk_rate.reads_directly(model / "b.safetensors"), bool)
    assert not disk_rate.reads_directly(tmp_path / "gone")
