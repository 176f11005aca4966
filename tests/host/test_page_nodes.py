"""Where pages lie: counted by node, absent and unknown told apart, and held against the placement."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import BankError
from hotsplit.host import page_nodes as module
from hotsplit.host.libc import READ_WRITE, checked
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.host.page_nodes import PageNodes, check_placement, page_nodes, total_nodes

PAGE = mmap.PAGESIZE
GIB = 2**30
ON_1, BOUND_TO_1 = Placement(policy="preferred", node=1), Placement(policy="bind", node=1)


def told(monkeypatch, status):
    """Let the kernel tell these nodes, page by page; returns the addresses that it was asked for."""
    asked = []

    def query(addresses):
        asked.extend(addresses.tolist())
        return np.array([status[len(asked) - addresses.size + i] for i in range(addresses.size)], dtype=np.int32)

    monkeypatch.setattr(module, "_query", query)
    return asked


def test_pages_are_asked_for_one_by_one_and_the_last_counts_for_what_there_is_of_it(monkeypatch):
    asked = told(monkeypatch, [0, 1, 1, -errno.ENOENT, -errno.EFAULT, 0])
    found = page_nodes(16 * PAGE, 5 * PAGE + 100)
    assert [(16 + i) * PAGE for i in range(6)] == asked
    assert {0: PAGE + 100, 1: 2 * PAGE} == found.node_bytes
    assert (PAGE, PAGE, "move_pages tells nothing of these pages") == (
        found.absent_bytes,
        found.unknown_bytes,
        found.reason,
    )


def test_one_page_in_many_counts_for_all_of_them(monkeypatch):
    asked = told(monkeypatch, [0, 1, 0])
    found = page_nodes(0, 5 * PAGE, step_bytes=2 * PAGE)
    assert ([0, 2 * PAGE, 4 * PAGE], {0: 3 * PAGE, 1: 2 * PAGE}) == (asked, found.node_bytes)


def test_many_pages_are_asked_for_in_several_calls(monkeypatch):
    monkeypatch.setattr(module, "_PAGES_PER_CALL", 3)
    asked = told(monkeypatch, [0, 1] * 4)
    assert {0: 4 * PAGE, 1: 4 * PAGE} == page_nodes(0, 8 * PAGE).node_bytes
    assert [i * PAGE for i in range(8)] == asked


@given(
    status=st.lists(st.sampled_from([0, 1, 5, -errno.ENOENT, -errno.EFAULT, -errno.EIO]), min_size=1, max_size=40),
    less=st.integers(0, PAGE - 1),
    batch=st.integers(1, 50),
)
def test_every_byte_is_counted_once(status, less, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAGES_PER_CALL", batch)
        told(patch, status)
        found = page_nodes(0, len(status) * PAGE - less)
    assert len(status) * PAGE - less == sum(found.node_bytes.values()) + found.absent_bytes + found.unknown_bytes


def test_a_kernel_or_container_that_refuses_makes_all_of_it_unknown_and_says_why(monkeypatch):
    def refuse(name, *arguments):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), name)

    monkeypatch.setattr(module, "system_call", refuse)
    found = page_nodes(0, 3 * PAGE)
    assert ({}, 0, 3 * PAGE) == (found.node_bytes, found.absent_bytes, found.unknown_bytes)
    assert "move_pages: Operation not permitted; in a container, start it with --cap-add SYS_NICE" == found.reason
    assert found.share(0) is None


def test_touched_and_untouched_pages_of_this_machine_are_told_apart():
    address = checked("mmap", 0, 8 * PAGE, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    checked("madvise", address, 8 * PAGE, 15)  # small pages, so that the first touch is one page's
    ctypes.memset(address, 1, 3 * PAGE)
    found = page_nodes(address, 8 * PAGE)
    checked("munmap", address, 8 * PAGE)
    if found.unknown_bytes:
        pytest.skip(f"this machine does not tell where pages lie: {found.reason}")
    assert (3 * PAGE, 5 * PAGE) == (sum(found.node_bytes.values()), found.absent_bytes)


@pytest.mark.parametrize(
    ("found", "node", "expected"),
    [
        (PageNodes(), 0, "nothing"),
        (PageNodes(node_bytes={1: GIB, 0: 3 * GIB}), 1, "node 0: 3.000 GiB, node 1: 1.000 GiB (25.0 % on node 1)"),
        (PageNodes(node_bytes={1: GIB}), None, "node 1: 1.000 GiB"),
        (PageNodes(node_bytes={1: GIB}), 0, "node 1: 1.000 GiB (0.0 % on node 0)"),
        (PageNodes(absent_bytes=GIB), 0, "not touched yet: 1.000 GiB"),
        (PageNodes(unknown_bytes=GIB, reason="because"), 0, "unknown: 1.000 GiB (because)"),
        (PageNodes(unknown_bytes=GIB), 0, "unknown: 1.000 GiB"),
    ],
)
def test_where_pages_lie_is_one_line_and_what_is_unknown_is_no_share(found, node, expected):
    assert expected == found.describe(node)


def test_several_memories_add_up():
    parts = [
        PageNodes(node_bytes={0: 1, 1: 2}),
        PageNodes(node_bytes={1: 4}, absent_bytes=8),
        PageNodes(unknown_bytes=16, reason="because"),
    ]
    expected = PageNodes(node_bytes={0: 1, 1: 6}, absent_bytes=8, unknown_bytes=16, reason="because")
    assert (expected, PageNodes()) == (total_nodes(parts), total_nodes([]))


ALL_THERE, HALF_THERE = PageNodes(node_bytes={1: 4 * GIB}), PageNodes(node_bytes={0: GIB, 1: 3 * GIB})
UNKNOWN = PageNodes(unknown_bytes=GIB, reason="because")


@pytest.mark.parametrize("found", [ALL_THERE, HALF_THERE, UNKNOWN, PageNodes()])
def test_without_a_placement_any_place_will_do(found):
    assert [] == check_placement(found, placement=NO_PLACEMENT)


@pytest.mark.parametrize("placement", [ON_1, BOUND_TO_1])
def test_pages_on_their_node_need_no_word(placement):
    assert [] == check_placement(ALL_THERE, placement=placement)
    assert [] == check_placement(PageNodes(absent_bytes=GIB), placement=placement)


def test_preferred_says_how_much_lies_elsewhere():
    (notice,) = check_placement(HALF_THERE, placement=ON_1, what="cold rows")
    assert ("numa-elsewhere", False) == (notice.name, notice.strict)
    assert "cold rows: 1.000 GiB of 4.000 GiB lie elsewhere than on node 1, and are read more slowly" == notice.text


def test_bind_that_was_not_kept_is_an_error_with_the_figures():
    with pytest.raises(BankError) as caught:
        check_placement(HALF_THERE, placement=BOUND_TO_1, what="cold rows")
    expected = (
        "cold rows: HOTSPLIT_NUMA_POLICY=bind: got node 0: 1.000 GiB, node 1: 3.000 GiB (75.0 % on node 1); wanted all "
        "of it on node 1; free memory of that node, or set HOTSPLIT_NUMA_POLICY=preferred"
    )
    assert (expected, GIB) == (str(caught.value), caught.value.elsewhere_bytes)


@pytest.mark.parametrize("placement", [ON_1, BOUND_TO_1])
def test_what_is_unknown_is_said_and_is_no_error(placement):
    (notice,) = check_placement(UNKNOWN, placement=placement)
    assert ("numa-unknown", "host pages: where they lie is unknown (because)") == (notice.name, notice.text)
