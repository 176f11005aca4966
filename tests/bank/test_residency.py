"""Residency: what the kernel says about where bytes lie, told apart by range even where it merges mappings."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank import residency
from hotsplit.bank.ranges import BankFile, StitchedRange
from hotsplit.bank.residency import Residency, read_residency
from hotsplit.errors import BankError

PAGE = mmap.PAGESIZE

NOTHING = Residency(
    hot_anonymous_bytes=0,
    hot_other_bytes=0,
    cold_file_bytes=0,
    cold_anonymous_bytes=0,
    hot_resident_bytes=0,
    cold_resident_bytes=0,
    huge_bytes=0,
    is_exact=True,
)


@pytest.fixture
def file(tmp_path):
    file = BankFile(tmp_path)
    yield file
    file.close()


def stitched(first_page, *, hot, cold):
    """What residency reads of a range: its first page, and its pages of either kind."""
    edge = (first_page + hot) * PAGE
    return SimpleNamespace(edge=edge, fast_bytes=hot * PAGE, slow_bytes=cold * PAGE)


def entry(first_page, num_pages, *, kind="anonymous", resident=0, huge=0):
    """One entry of smaps, as the kernel writes it."""
    head = {
        "anonymous": "rw-p 00000000 00:00 0 ",
        "heap": "rw-p 00000000 00:00 0                          [heap]",
        "shared memory": "rw-s 00000000 00:01 1033                       /dev/zero (deleted)",
        "file": "rw-s 00001000 fe:00 1048577                     /some folder/#1048577 (deleted)",
        "private file": "rw-p 00001000 fe:00 1048577                    /some/file",
        "nothing": "---p 00000000 00:00 0 ",
    }[kind]
    kib = PAGE // 1024
    return (
        f"{first_page * PAGE:08x}-{(first_page + num_pages) * PAGE:08x} {head}\n"
        f"Size:               {num_pages * kib} kB\n"
        "KernelPageSize:        4 kB\n"
        f"Rss:                {resident * kib} kB\n"
        "Pss_Anon:              1 kB\n"
        f"AnonHugePages:      {huge * kib} kB\n"
        "VmFlags: rd wr mr mw me ac hg \n"
    )


def read(tmp_path, ranges, *entries):
    smaps = tmp_path / "proc/self/smaps"
    smaps.parent.mkdir(parents=True, exist_ok=True)
    smaps.write_text("".join(entries), "utf-8")
    return read_residency(ranges, root=tmp_path)


def in_pages(found):
    """All figures in pages."""
    names = [name for name in Residency.__slots__ if name.endswith("_bytes")]
    return replace(found, **{name: getattr(found, name) / PAGE for name in names})


def test_a_stitched_range_is_told_apart_into_memory_and_file(tmp_path):
    found = read(
        tmp_path,
        [stitched(100, hot=4, cold=6)],
        entry(90, 5, kind="heap", resident=5),
        entry(100, 4, resident=3, huge=2),
        entry(104, 6, kind="file", resident=5),
        entry(120, 9, kind="file", resident=9),
    )
    expected = replace(
        NOTHING, hot_anonymous_bytes=4, cold_file_bytes=6, hot_resident_bytes=3, cold_resident_bytes=5, huge_bytes=2
    )
    assert expected == in_pages(found)
    assert 0 == found.misplaced_bytes


def test_ranges_that_the_kernel_has_made_one_mapping_count_once_each_and_exactly(tmp_path):
    ranges = [stitched(100, hot=4, cold=2), stitched(106, hot=3, cold=0), stitched(109, hot=5, cold=1)]
    found = read(
        tmp_path,
        ranges[::-1],
        entry(100, 4, resident=4),
        entry(104, 2, kind="file", resident=1),
        entry(106, 8, resident=7, huge=4),
        entry(114, 1, kind="file", resident=1),
    )
    expected = replace(
        NOTHING, hot_anonymous_bytes=12, cold_file_bytes=3, hot_resident_bytes=11, cold_resident_bytes=2, huge_bytes=4
    )
    assert expected == in_pages(found)


@pytest.mark.parametrize(("resident", "ours"), [(0, 0), (10, 5), (20, 10)])
def test_a_mapping_with_others_memory_in_it_is_shared_out_and_said_to_be(tmp_path, resident, ours):
    found = read(tmp_path, [stitched(105, hot=10, cold=0)], entry(100, 20, resident=resident, huge=resident))
    expected = replace(NOTHING, hot_anonymous_bytes=10, hot_resident_bytes=ours, huge_bytes=ours, is_exact=False)
    assert expected == in_pages(found)


@pytest.mark.parametrize("kind", ["file", "private file", "shared memory"])
def test_hot_rows_that_are_no_anonymous_memory_are_misplaced(tmp_path, kind):
    found = read(tmp_path, [stitched(100, hot=4, cold=0)], entry(100, 1), entry(101, 3, kind=kind))
    assert replace(NOTHING, hot_anonymous_bytes=1, hot_other_bytes=3) == in_pages(found)
    assert 3 * PAGE == found.misplaced_bytes


@pytest.mark.parametrize("kind", ["anonymous", "heap", "private file"])
def test_cold_rows_that_are_no_file_pages_are_misplaced(tmp_path, kind):
    ranges = [stitched(100, hot=0, cold=4)]
    found = read(tmp_path, ranges, entry(100, 1, kind="file"), entry(101, 3, kind=kind))
    assert replace(NOTHING, cold_file_bytes=1, cold_anonymous_bytes=3) == in_pages(found)
    assert 3 * PAGE == found.misplaced_bytes


def test_rows_that_nothing_is_mapped_behind_are_an_error(tmp_path):
    ranges = [stitched(100, hot=0, cold=4)]
    with pytest.raises(BankError, match=f"got {3 * PAGE} bytes mapped; wanted {4 * PAGE}, all of them open"):
        read(tmp_path, ranges, entry(90, 3), entry(101, 8, kind="file"))


def test_no_ranges_are_nothing_at_all(tmp_path):
    assert NOTHING == read(tmp_path, [], entry(100, 20, resident=9))


@pytest.mark.parametrize("text", ["", "no entry\n"])
def test_a_form_that_is_not_known_is_an_error(tmp_path, text):
    with pytest.raises(BankError, match="cannot read .*smaps: got no mapping"):
        read(tmp_path, [], text)


def test_a_system_without_smaps_is_an_error(tmp_path):
    with pytest.raises(BankError, match="cannot read .*smaps: got No such file"):
        read_residency([], root=tmp_path)


@given(st.data())
def test_overlaps_equal_a_count_page_by_page(data):
    sizes = st.lists(st.integers(0, 4), max_size=8)
    starts, first = [], 0
    for gap, size in zip(data.draw(sizes), data.draw(sizes), strict=False):
        starts.append((first + gap, size))
        first += gap + size
    pages = {page for start, size in starts for page in range(start, start + size)}
    start = data.draw(st.integers(0, 40))
    end = start + data.draw(st.integers(1, 40))
    mapping = residency._Mapping(start=start, end=end, is_anonymous=True, is_shared_file=False)
    cover = residency._Cover(data.draw(st.permutations(starts)))
    assert len(pages & set(range(start, end))) == cover.overlap(mapping)
    assert len(pages) == cover.num_bytes


def test_real_ranges_lie_where_they_belong(file):
    shapes = [((8, 7680), 3), ((5, 64), 5), ((6, 12352), 0), ((40, 1 << 16), 17), ((4, 4096), 4)]
    held = [StitchedRange(shape=shape, dtype=torch.uint8, num_fast=hot, file=file) for shape, hot in shapes]
    for one in held:
        one.tensor.fill_(1)
    found = read_residency(held)
    assert (0, 0) == (found.hot_other_bytes, found.cold_anonymous_bytes)
    assert sum(one.fast_bytes for one in held) == found.hot_anonymous_bytes
    assert sum(one.slow_bytes for one in held) == found.cold_file_bytes == file.num_bytes
    assert found.cold_file_bytes == found.cold_resident_bytes, "file parts are counted, and all were written to"
    for one in held:
        one.close()


def test_eviction_frees_the_ram_of_cold_rows_and_of_no_hot_ones(file):
    held = StitchedRange(shape=(16, 1 << 20), dtype=torch.uint8, num_fast=4, file=file)
    held.tensor.fill_(1)
    assert (4 << 20, 12 << 20) == resident(held)
    held.evict()
    hot, cold = resident(held)
    # Pages that another processor still has in a batch of its own escape an eviction; they are few.
    assert (4 << 20, True) == (hot, cold <= 1 << 20)
    assert 1 == int(held.tensor[7, 99])
    assert 0 < resident(held)[1] <= 12 << 20
    held.close()


def resident(held):
    found = read_residency([held])
    assert found.is_exact
    return found.hot_resident_bytes, found.cold_resident_bytes


def test_rows_that_were_never_touched_take_no_ram(file):
    held = StitchedRange(shape=(16, 1 << 20), dtype=torch.uint8, num_fast=4, file=file)
    assert (0, 0) == resident(held)
    held.close()


def test_huge_pages_are_seen_where_they_were_asked_for(file):
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel has no huge pages")
    held = StitchedRange(shape=(16, 2 << 20), dtype=torch.uint8, num_fast=12, file=file)
    held.tensor.fill_(1)
    assert 2 << 20 <= read_residency([held]).huge_bytes <= 24 << 20
    held.close()


def test_a_range_that_is_remapped_behind_our_back_is_found_out(file):
    held = StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=2, file=file)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    map_fixed = 0x10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed
    assert held.edge == libc.mmap(held.edge, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert (4096, 4096) == (read_residency([held]).cold_anonymous_bytes, read_residency([held]).misplaced_bytes)
    held.close()


def test_a_closed_range_is_an_error(file):
    # Larger than anything that could be mapped in its place meanwhile.
    held = StitchedRange(shape=(64, 1 << 20), dtype=torch.uint8, num_fast=1, file=file)
    held.close()
    with pytest.raises(BankError, match="all of them open"):
        read_residency([held])
