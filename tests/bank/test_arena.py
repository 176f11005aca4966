"""The arena: exact, private, on a huge page's edge; what the kernel refuses is said and harms nothing."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
import torch

from hotsplit.bank import arena
from hotsplit.bank.arena import Arena
from hotsplit.errors import BankError
from hotsplit.host.numa import Placement
from hotsplit.host.pages import HUGE_PAGE_BYTES
from hotsplit.notices import Notice


def names(one):
    return [notice.name for notice in one.notices]


def refuse(code):
    def call(name, *_):
        raise OSError(code, os.strerror(code), name)

    return call


def swap_of(tmp_path, text):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    return tmp_path


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_it_has_exactly_the_bytes_that_were_asked_for_on_a_huge_pages_edge(num_bytes):
    made = Arena(num_bytes)
    assert (num_bytes, torch.uint8) == (made.content.numel(), made.content.dtype)
    assert not num_bytes or 0 == made.content.data_ptr() % HUGE_PAGE_BYTES
    made.settle()
    made.close()
    made.close()
    assert 0 == made.num_bytes


def test_a_part_is_the_memory_itself():
    made = Arena(100)
    made.part(10, 5)[:] = b"hello"
    assert b"\0hello\0" == made.content[9:16].numpy().tobytes()
    assert 5 == len(made.part(10, 5))


def test_no_huge_page_reaches_past_its_end(monkeypatch):
    asked = []

    class Spy(mmap.mmap):
        def madvise(self, *arguments):
            asked.append(arguments)
            super().madvise(*arguments)

    monkeypatch.setattr(arena.mmap, "mmap", Spy)
    Arena(2 * HUGE_PAGE_BYTES + 5)
    Arena(HUGE_PAGE_BYTES - 1)
    assert [(mmap.MADV_HUGEPAGE, 2 * HUGE_PAGE_BYTES)] == [(option, length) for option, _, length in asked]


def test_a_kernel_without_huge_pages_is_said(monkeypatch):
    class Without(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(arena.mmap, "mmap", Without)
    made = Arena(HUGE_PAGE_BYTES)
    assert ["no-huge-pages"] == names(made)
    made.part(0, 1)[:] = b"x"


def test_without_swap_nothing_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(arena, "checked", refuse(errno.ENOMEM))
    made = Arena(5000)
    made.settle(root=swap_of(tmp_path, "SwapTotal:             0 kB\n"))
    assert [] == names(made)


@pytest.mark.parametrize("text", ["SwapTotal:       8388608 kB\n", ""])
def test_where_rows_may_be_swapped_out_they_are_locked_or_that_is_said(tmp_path, monkeypatch, text):
    root, calls = swap_of(tmp_path, text), []
    monkeypatch.setattr(arena, "checked", lambda *arguments: calls.append(arguments))
    made = Arena(5000)
    made.settle(root=root)
    assert ([("mlock", made.content.data_ptr(), 5000)], []) == (calls, names(made))
    monkeypatch.setattr(arena, "checked", refuse(errno.ENOMEM))
    monkeypatch.setattr(arena.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    made.settle(root=root)
    assert ["not-locked"] == names(made)
    assert "Cannot allocate memory, limit 8.0 MiB: raise it with ulimit -l" in made.notices[0].text


def test_the_real_kernel_locks_or_refuses(tmp_path):
    made = Arena(5000)
    made.settle(root=swap_of(tmp_path, ""))
    assert names(made) in ([], ["not-locked"])


def test_pages_are_placed_before_they_are_touched(monkeypatch):
    asked = []

    def bind(address, num_bytes, *, placement):
        asked.append((address, num_bytes, placement))
        return [Notice(name="numa-refused", text="no", strict=False)]

    monkeypatch.setattr(arena, "bind_pages", bind)
    placement = Placement(policy="preferred", node=0)
    made = Arena(5000, placement=placement)
    assert [(made.content.data_ptr(), 2 * mmap.PAGESIZE, placement)] == asked
    made.settle()
    assert ["numa-refused"] == names(made), "where they lie is not asked of a kernel that has refused"


def test_memory_that_cannot_be_had_is_one_clear_error():
    with pytest.raises(BankError, match="the hot bank: got .*; wanted .* bytes; lower HOTSPLIT_HOT_GIB"):
        Arena(1 << 62)
