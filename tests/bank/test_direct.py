"""Direct reads give the file's bytes wherever they start and however many they are, on every file system."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank import direct
from hotsplit.bank.direct import BLOCK, DirectFiles, DirectReader
from hotsplit.errors import BankError

SIZE = 3 * 4096 + 777


def read(reader, length, *, file=0, offset=0):
    target = bytearray(length)
    reader.read_into(memoryview(target), file=file, offset=offset)
    return bytes(target)


@pytest.fixture(scope="module")
def content():
    return random.Random(0).randbytes(SIZE)


@pytest.fixture(scope="module")
def file(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("direct") / "file.bin"
    path.write_bytes(content)
    return path


@pytest.fixture
def no_direct_reads(monkeypatch):
    """A file system that refuses O_DIRECT when a file is opened."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(direct.os, "open", refuse)


@given(offset=st.integers(0, SIZE), length=st.integers(0, SIZE))
def test_any_offset_and_length_give_the_files_bytes(content, file, offset, length):
    length = min(length, SIZE - offset)
    reader = DirectReader([file])
    try:
        assert content[offset : offset + length] == read(reader, length, offset=offset)
    finally:
        reader.close()


@given(offset=st.integers(0, SIZE), length=st.integers(0, SIZE))
@settings(max_examples=25)
def test_reads_longer_than_the_buffer_are_whole(content, file, offset, length):
    length = min(length, SIZE - offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_BUFFER_BYTES", 4096)
        reader = DirectReader([file])
        try:
            assert content[offset : offset + length] == read(reader, length, offset=offset)
        finally:
            reader.close()


def test_each_file_has_its_own_number(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(path.name.encode() * 10)
    reader = DirectReader(paths)
    assert (b"aaa", b"bb") == (read(reader, 3, file=0, offset=5), read(reader, 2, file=1, offset=1))
    reader.close()


def test_only_the_target_is_written(content, file):
    around = bytearray(b"x" * 30)
    reader = DirectReader([file])
    reader.read_into(memoryview(around)[10:20], file=0, offset=4090)
    reader.close()
    assert b"x" * 10 + content[4090:4100] + b"x" * 10 == around


@pytest.mark.parametrize("offset", [0, 4096, SIZE - 5, SIZE, SIZE + 10_000])
def test_a_file_that_ends_too_early_is_an_error_that_names_it(file, offset):
    reader = DirectReader([file])
    with pytest.raises(BankError, match="file.bin ended early: got end of file"):
        read(reader, SIZE + 1, offset=offset)
    reader.close()


def test_a_file_that_is_cut_short_while_open_is_an_error(tmp_path, content):
    path = tmp_path / "cut.bin"
    path.write_bytes(content)
    reader = DirectReader([path])
    os.truncate(path, 5000)
    assert content[:100] == read(reader, 100)
    with pytest.raises(BankError, match="cut.bin ended early"):
        read(reader, 1000, offset=4500)
    reader.close()


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(BankError, match="absent.bin: got No such file or directory; check the model folder"):
        DirectReader([tmp_path / "absent.bin"])


def test_without_direct_reads_the_page_cache_serves_the_same_bytes(no_direct_reads, content, file, caplog):
    reader = DirectReader([file, file])
    assert content[1:9000] == read(reader, 8999, offset=1)
    with pytest.raises(BankError, match="ended early"):
        read(reader, SIZE, offset=1)
    reader.close()
    assert ["the file system has no direct reads"] == [
        message.split(": ")[1].split(";")[0] for message in caplog.messages
    ]


def test_a_file_system_that_refuses_only_the_first_read_is_read_through_the_page_cache(content, file, monkeypatch):
    real = os.preadv
    calls = []

    def refuse_first(handle, buffers, offset):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, buffers, offset)

    monkeypatch.setattr(direct.os, "preadv", refuse_first)
    reader = DirectReader([file])
    assert content[5:50] == read(reader, 45, offset=5)
    assert 5 == calls[-1], "a direct read would have started at a block"
    reader.close()


def test_memory_file_systems_serve_the_same_bytes(content):
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here")
    path = shm / f"hotsplit-test-{os.getpid()}"
    try:
        path.write_bytes(content)
        reader = DirectReader([path])
        assert content[3:8000] == read(reader, 7997, offset=3)
        reader.close()
    finally:
        path.unlink(missing_ok=True)


def test_a_failing_disk_is_a_bank_error(file, monkeypatch):
    reader = DirectReader([file])

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct.os, "preadv", fail)
    with pytest.raises(BankError, match="file.bin: got Input/output error"):
        read(reader, 10)
    reader.close()


@pytest.mark.parametrize("uses_cache", [False, True])
def test_closing_gives_the_handles_back_and_twice_is_harmless(file, uses_cache):
    before = len(os.listdir("/proc/self/fd"))
    reader = DirectReader([file, file], uses_cache=uses_cache)
    assert before + (4 if uses_cache else 2) == len(os.listdir("/proc/self/fd"))
    reader.close()
    reader.close()
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("uses_cache", "reads"), [(True, False), (False, True)])
def test_what_the_page_cache_holds_is_taken_from_there_where_that_is_wanted(
    content, file, monkeypatch, uses_cache, reads
):
    file.read_bytes()
    asked = []
    monkeypatch.setattr(DirectFiles, "read_some", _noted(DirectFiles.read_some, asked))
    reader = DirectReader([file], uses_cache=uses_cache)
    assert content[7 : 7 + 3 * BLOCK] == read(reader, 3 * BLOCK, offset=7)
    assert reads == bool(asked)


@pytest.mark.parametrize("held", [0, 1, BLOCK, 3 * BLOCK - 7])
def test_what_follows_behind_the_page_caches_part_is_read_from_the_file(content, file, monkeypatch, held):
    preadv = os.preadv

    def some(handle, buffers, offset, flags=0):
        if not flags:
            return preadv(handle, buffers, offset)
        if offset >= held:
            raise BlockingIOError
        return preadv(handle, [buffers[0][: held - offset]], offset)

    monkeypatch.setattr(os, "preadv", some)
    assert content[: 3 * BLOCK] == read(DirectReader([file], uses_cache=True), 3 * BLOCK)


def test_a_kernel_that_does_not_know_the_question_is_asked_for_all_of_it(content, file, monkeypatch):
    preadv = os.preadv

    def refusing(handle, buffers, offset, flags=0):
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert content[5:99] == read(DirectReader([file], uses_cache=True), 94, offset=5)


def _noted(function, log):
    def noted(*args, **kwargs):
        log.append(args)
        return function(*args, **kwargs)

    return noted


def aligned(num_bytes):
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def test_whole_blocks_are_read_straight_into_place_to_the_files_end(content, file):
    files, target = DirectFiles([file]), aligned(4 * BLOCK)
    files.read_blocks(target, file=0, offset=0, needed=SIZE)
    assert content == bytes(target[:SIZE])
    with pytest.raises(BankError, match=f"file.bin ended early: got end of file at {SIZE}; load the model again"):
        files.read_blocks(target, file=0, offset=0, needed=SIZE + 1)
    files.close()
    files.close()


@pytest.mark.parametrize("lengths", [[5000, BLOCK], [BLOCK, 3 * BLOCK], [BLOCK + 7, 2 * BLOCK, 1]])
def test_reads_that_the_kernel_cuts_short_go_on_at_a_blocks_edge(content, file, monkeypatch, lengths):
    real, left, starts = os.preadv, list(lengths), []

    def short(handle, buffers, offset):
        starts.append(offset)
        got = real(handle, buffers, offset)
        return min(got, left.pop(0)) if left else got

    files, target = DirectFiles([file]), aligned(4 * BLOCK)
    monkeypatch.setattr(direct.os, "preadv", short)
    if left[-1] < BLOCK:
        with pytest.raises(BankError, match="ended early"):
            files.read_blocks(target, file=0, offset=0, needed=SIZE)
    else:
        files.read_blocks(target, file=0, offset=0, needed=SIZE)
        assert content == bytes(target[:SIZE])
    assert all(start % BLOCK == 0 for start in starts)
    files.close()


def test_a_disk_that_fails_is_one_error_that_names_the_file(file, monkeypatch):
    files = DirectFiles([file])

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct.os, "preadv", fail)
    with pytest.raises(BankError, match="cannot read .*file.bin: got Input/output error; check the disk that holds"):
        files.read_blocks(aligned(BLOCK), file=0, offset=0, needed=10)
    files.close()


def test_a_limit_on_open_files_is_named_with_its_cure(file, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    real, opened = os.open, []

    def limited(path, flags, *args, **kwargs):
        if len(opened) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        opened.append(path)
        return real(path, flags, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.os, "open", limited)
        with pytest.raises(BankError, match=r"cannot open .*: got Too many open files; raise .*: ulimit -n 8192"):
            DirectFiles([file] * 5)
    assert before == len(os.listdir("/proc/self/fd")), "what was open is closed"
