"""Files: what a write replaces, what it never does, and what is read at all."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from hotsplit import files
from hotsplit.errors import HotsplitError, PlanError
from hotsplit.files import read_bytes, read_json, target_of, write_atomic


@pytest.fixture(params=["folder", "pipe", "socket", "link to a pipe"])
def no_file(request, tmp_path):
    """Something that is there and is no regular file, and what it is called."""
    path = tmp_path / "odd"
    if request.param == "folder":
        path.mkdir()
        yield path, "is a directory"
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
            yield path, "a socket, no regular file"
    else:
        os.mkfifo(path)
        link = tmp_path / "link"
        link.symlink_to(path)
        yield path if request.param == "pipe" else link, "a named pipe, no regular file"


def test_what_is_no_regular_file_is_never_replaced(no_file):
    path, kind = no_file
    before = os.lstat(path)
    with pytest.raises(HotsplitError, match=f"(?i)cannot write {path}: got {kind}; choose another place"):
        write_atomic(path, b"new")
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)


def test_what_is_no_regular_file_is_never_read(no_file):
    path, kind = no_file
    for read in (read_bytes, read_json):
        with pytest.raises(PlanError, match=f"plan {path}: got {kind}; wanted a readable file"):
            read(path, what="plan", error=PlanError)


def test_a_device_is_neither_read_nor_replaced():
    with pytest.raises(PlanError, match="plan /dev/zero: got a device, no regular file"):
        read_json(files.Path("/dev/zero"), what="plan", error=PlanError)
    with pytest.raises(HotsplitError, match="cannot write /dev/null: got a device, no regular file"):
        write_atomic(files.Path("/dev/null"), b"new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_write_through_a_link_replaces_the_file_that_it_names(tmp_path, is_there):
    target = tmp_path / "far" / "target"
    if is_there:
        target.parent.mkdir()
        target.write_bytes(b"old")
    (tmp_path / "middle").symlink_to(target)
    (tmp_path / "link").symlink_to("middle")
    write_atomic(tmp_path / "link", b"new")
    assert (b"new", "middle") == (target.read_bytes(), os.readlink(tmp_path / "link"))
    assert ["target"] == os.listdir(target.parent)
    assert target == target_of(tmp_path / "link")


def test_a_ring_of_links_is_one_clear_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(HotsplitError, match="cannot write .*: got Too many levels"):
        write_atomic(tmp_path / "a", b"new")


def test_a_name_that_no_file_can_have_is_one_clear_error(tmp_path):
    with pytest.raises(HotsplitError, match="cannot write"):
        write_atomic(tmp_path / "a\0b", b"new")
    with pytest.raises(PlanError, match="null"):
        read_json(tmp_path / "a\0b", what="plan", error=PlanError)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(HotsplitError, match="got No space left on device"):
        write_atomic(tmp_path / "f", b"new")
    assert (b"old", ["f"]) == ((tmp_path / "f").read_bytes(), os.listdir(tmp_path))


def test_a_replaced_file_keeps_its_mode(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "f").chmod(0o640)
    write_atomic(tmp_path / "f", b"new")
    assert 0o640 == stat.S_IMODE((tmp_path / "f").stat().st_mode)


def test_a_file_beyond_a_gibibyte_is_not_read_as_json(tmp_path):
    with (tmp_path / "long.json").open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(PlanError, match="got 1073741825 bytes; wanted at most 1073741824"):
        read_json(tmp_path / "long.json", what="plan", error=PlanError)


def test_a_limit_is_the_most_that_is_read(tmp_path):
    (tmp_path / "f").write_bytes(b"1234")
    assert b"1234" == read_bytes(tmp_path / "f", what="plan", error=PlanError, limit=4)
    with pytest.raises(PlanError, match="got 4 bytes; wanted at most 3"):
        read_bytes(tmp_path / "f", what="plan", error=PlanError, limit=3)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "a": 2}}]', '{"a": 1, "\\u0061": 2}'])
def test_a_key_that_stands_twice_is_named(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan .*f\.json: got the key 'a' twice in one object"):
        read_json(tmp_path / "f.json", what="plan", error=PlanError)


def test_the_last_of_two_equal_keys_counts_where_other_programs_read_it_so(tmp_path):
    (tmp_path / "f.json").write_text('{"a": 1, "a": 2}')
    assert {"a": 2} == read_json(tmp_path / "f.json", what="config", error=PlanError, repeats=True)
