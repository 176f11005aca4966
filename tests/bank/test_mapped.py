"""Mapped files: what is not there is read before it is touched, and what cannot be read is an error, not a signal."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
from dataclasses import replace

import pytest

from hotsplit.bank import mapped
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.source import Span
from hotsplit.errors import BankError

PAGE = mmap.PAGESIZE
SIZE = 300 * PAGE + 123


@pytest.fixture
def content():
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path, content):
    path = tmp_path / "part.bin"
    path.write_bytes(content)
    return path


def span(offset, num_bytes):
    return Span(file=0, offset=offset, num_bytes=num_bytes, row_offset=0)


def drop(files, path):
    files.drop()
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_bytes():
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def bytes_of(files, one):
    return files.content(one).numpy().tobytes()


@pytest.mark.parametrize("where", [(0, SIZE), (5, 1), (PAGE, PAGE), (PAGE - 1, 2), (SIZE - 1, 1), (777, 200 * PAGE)])
def test_what_was_made_present_is_present_and_the_files_bytes(path, content, where):
    files, one = MappedFiles([path]), span(*where)
    files.make_present([one])
    assert files.is_present([one])
    assert content[where[0] : sum(where)] == bytes_of(files, one)


def test_what_was_dropped_is_not_present_and_comes_back(path, content):
    files, one = MappedFiles([path]), span(10 * PAGE + 5, 100 * PAGE)
    drop(files, path)
    if files.is_present([one]):
        pytest.skip("this file system keeps its pages in memory")
    files.make_present([one])
    assert files.is_present([one])
    assert content[one.offset : one.offset + one.num_bytes] == bytes_of(files, one)


def test_exactly_the_pages_that_are_asked_for_are_read(path):
    files = MappedFiles([path])
    wanted = [span(10 * PAGE + 5, 100 * PAGE), span(150 * PAGE, 80 * PAGE)]
    drop(files, path)
    before = read_bytes()
    files.make_present(wanted)
    read = read_bytes() - before
    if not read:
        pytest.skip("this file system tells of no reads")
    assert 181 * PAGE == read


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_file_that_is_cut_short_under_the_map_is_an_error_and_not_a_signal(path, is_dropped):
    files, one = MappedFiles([path]), span(100 * PAGE, 20 * PAGE)
    files.make_present([one])
    if is_dropped:
        drop(files, path)
    os.truncate(path, 110 * PAGE)
    assert not files.is_present([one])
    with pytest.raises(BankError, match=rf"cannot read .*part.bin: got a file of {110 * PAGE} bytes now; wanted"):
        files.make_present([one])
    head = span(100 * PAGE, 10 * PAGE)
    files.make_present([head])
    assert files.is_present([head])


def test_a_disk_that_cannot_be_read_is_an_error_that_names_file_and_place(path, monkeypatch):
    files = MappedFiles([path])

    def refuse(name, *_):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT), name)

    monkeypatch.setattr(mapped, "checked", refuse)
    assert not files.is_present([span(0, 10)])
    with pytest.raises(BankError, match="part.bin: got Bad address; wanted 10 bytes from byte 7 on; check the disk"):
        files.make_present([span(7, 10)])


class Unadvised:
    """A mapping whose kernel takes no advice."""

    def __init__(self, memory, number):
        self._memory, self._number = memory, number
        self.asked = []

    def madvise(self, *advice):
        self.asked.append(advice[0])
        raise OSError(self._number, os.strerror(self._number))

    def size(self):
        return self._memory.size()


@pytest.fixture(params=[errno.EIO, errno.ENOMEM, errno.EBADF], ids=errno.errorcode.get)
def unadvised(path, request):
    files = MappedFiles([path])
    files._maps = [replace(one, memory=Unadvised(one.memory, request.param)) for one in files._maps]
    return files


def test_advice_that_is_not_taken_is_no_error_and_the_wait_reads(unadvised, content):
    unadvised.read_ahead([span(7, 10)])
    assert [mmap.MADV_WILLNEED] == unadvised._maps[0].memory.asked
    unadvised.make_present([span(777, 50 * PAGE)])
    assert content[777 : 777 + 50 * PAGE] == bytes_of(unadvised, span(777, 50 * PAGE))


def test_what_the_wait_cannot_read_either_is_one_error_that_names_file_and_place(unadvised, monkeypatch):
    def refuse(name, *_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    monkeypatch.setattr(mapped, "checked", refuse)
    with pytest.raises(BankError, match="part.bin: got Input/output error; wanted 10 bytes from byte 7 on"):
        unadvised.make_present([span(7, 10)])


def test_a_kernel_without_the_call_reads_all_the_same(path, content, monkeypatch):
    files = MappedFiles([path])
    monkeypatch.setattr(mapped, "MADV_POPULATE_READ", 999)
    files.make_present([span(7, 10)])
    assert content[7:17] == bytes_of(files, span(7, 10))


def test_of_a_file_of_somebody_else_the_kernel_is_not_believed(path, monkeypatch):
    monkeypatch.setattr(mapped.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(mapped.os, "access", lambda *_: False)
    files = MappedFiles([path])
    files.make_present([span(0, SIZE)])
    assert not files.is_present([span(0, SIZE)])


def test_a_header_that_promises_more_than_the_file_has_is_an_error(path):
    with pytest.raises(BankError, match="got a file shorter than its header says"):
        MappedFiles([path]).make_present([span(SIZE - 5, 10)])


def test_a_file_that_goes_or_is_replaced_keeps_its_bytes_under_the_map(path, content, tmp_path):
    files = MappedFiles([path])
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    shutil.move(other, path)
    drop(files, path)
    files.make_present([span(0, SIZE)])
    assert content == bytes_of(files, span(0, SIZE))
    path.unlink()
    files.make_present([span(0, SIZE)])
    assert content == bytes_of(files, span(0, SIZE))


def test_no_more_files_may_be_opened_is_one_clear_error(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mapped, "GuardedMemory", refuse)
    with pytest.raises(BankError, match=r"cannot map .*part.bin: got .*Too many open files.*; .*ulimit -n"):
        MappedFiles([path])
