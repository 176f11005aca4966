"""Stitched ranges: bytes lie where rows say, nothing has a name, a full disk is an error, and everything is given back."""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank import ranges
from hotsplit.bank.ranges import BankFile, StitchedRange, can_stitch, free_bytes
from hotsplit.errors import BankError

PAGE = mmap.PAGESIZE

# Rows of 64-byte multiples that are no page multiples, of one page, of several, and the smallest.
SHAPES = [
    ((9, 7680), torch.uint8),
    ((5, 193, 32), torch.bfloat16),
    ((6, 1024), torch.float32),
    ((130, 64), torch.uint8),
]

RECORD = """
    import os, sys, time
    from pathlib import Path
    import torch
    from hotsplit.bank.ranges import BankFile, StitchedRange
    from hotsplit.errors import BankError
"""


@pytest.fixture
def file(tmp_path):
    file = BankFile(tmp_path)
    yield file
    file.close()


def disk_bytes(file):
    return os.fstat(file.handle).st_blocks * 512


def mappings():
    """(start, end, permissions, inode) of everything that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, permissions, _, _, inode = line.split()[:5]
            start, end = (int(one, 16) for one in addresses.split("-"))
            yield start, end, permissions, int(inode)


def kind_at(address):
    """Permissions and inode of the mapping that an address lies in."""
    return next(((permissions, inode) for start, end, permissions, inode in mappings() if start <= address < end), None)


def run_child(code, *arguments, prefix=()):
    command = [*prefix, sys.executable, "-c", textwrap.dedent(RECORD) + textwrap.dedent(code), *map(str, arguments)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(child):
    out, err = child.communicate(timeout=120)
    return child.returncode, out.strip(), err


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("huge_pages", [True, False])
def test_every_row_lies_in_its_memory_and_keeps_its_bytes(file, shape, dtype, huge_pages):
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    inode = os.fstat(file.handle).st_ino
    for num_fast in {0, 1, shape[0] // 2, shape[0] - 1, shape[0]}:
        held = StitchedRange(shape=shape, dtype=dtype, num_fast=num_fast, file=file, huge_pages=huge_pages)
        expected = torch.arange(shape[0] * row_bytes, dtype=torch.int64).to(torch.uint8).view(dtype).view(shape)
        held.tensor.copy_(expected)
        assert torch.equal(expected.view(torch.uint8), held.tensor.view(torch.uint8))
        for row in range(shape[0]):
            first = held.tensor[row].data_ptr()
            wanted = ("rw-p", 0) if row < num_fast else ("rw-s", inode)
            assert [wanted, wanted] == [kind_at(first), kind_at(first + row_bytes - 1)]
        held.close()
        assert (0, 0) == (file.num_bytes, disk_bytes(file))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_the_first_cold_row_falls_on_a_page_edge_and_the_tensor_starts_aligned(file, shape, dtype):
    for num_fast in range(shape[0]):
        held = StitchedRange(shape=shape, dtype=dtype, num_fast=num_fast, file=file)
        assert (0, 0) == (held.edge % PAGE, held.address % 64)
        assert (held.edge, held.address) == (held.tensor[num_fast].data_ptr(), held.tensor.data_ptr())
        assert 0 <= held.address - (held.edge - held.fast_bytes) < PAGE
        held.close()


def test_bytes_of_both_memories_are_whole_pages_and_those_of_the_tensor_are_exact(file):
    held = StitchedRange(shape=(5, 7680), dtype=torch.uint8, num_fast=2, file=file)
    assert (5 * 7680, 4 * PAGE, 6 * PAGE) == (held.num_bytes, held.fast_bytes, held.slow_bytes)
    assert held.slow_bytes == file.num_bytes
    held.close()


def test_a_wholly_hot_tensor_takes_no_file_and_a_wholly_cold_one_no_memory(file):
    hot = StitchedRange(shape=(3, 64), dtype=torch.uint8, num_fast=3, file=file)
    assert (PAGE, 0, 0) == (hot.fast_bytes, hot.slow_bytes, file.num_bytes)
    assert 0 == hot.tensor.data_ptr() % PAGE
    cold = StitchedRange(shape=(3, 64), dtype=torch.uint8, num_fast=0, file=file)
    assert (0, PAGE, PAGE) == (cold.fast_bytes, cold.slow_bytes, file.num_bytes)
    hot.close()
    cold.close()


@pytest.mark.parametrize("num_fast", [0, 1])
def test_one_row_is_enough(file, num_fast):
    held = StitchedRange(shape=(1, 32), dtype=torch.float16, num_fast=num_fast, file=file)
    held.tensor.fill_(3)
    assert [[3.0] * 32] == held.tensor.tolist()
    held.close()


@pytest.mark.parametrize(
    ("shape", "dtype", "num_fast", "message"),
    [
        ((4, 65), torch.uint8, 2, "got rows of 65 bytes; wanted rows, each a multiple of 64 bytes"),
        ((4, 16), torch.bfloat16, 0, "multiple of 64"),
        ((4, 0), torch.uint8, 2, "rows of 0 bytes"),
        ((0, 64), torch.uint8, 0, "wanted rows"),
        ((), torch.uint8, 0, "wanted rows"),
        ((4, 64), torch.uint8, 5, "got 5 rows in fast memory; wanted 0..4"),
        ((4, 64), torch.uint8, -1, "got -1 rows in fast memory; wanted 0..4"),
    ],
)
def test_a_layout_that_cannot_be_kept_is_refused(file, shape, dtype, num_fast, message):
    with pytest.raises(BankError, match=message):
        StitchedRange(shape=shape, dtype=dtype, num_fast=num_fast, file=file)
    assert 0 == file.num_bytes


def test_callers_can_ask_which_tensors_can_be_stitched():
    yes = [((4, 64), torch.uint8), ((4, 3, 32), torch.bfloat16), ((1, 16), torch.float32)]
    no = [
        ((4, 65), torch.uint8),
        ((4, 16), torch.bfloat16),
        ((4, 0), torch.uint8),
        ((4,), torch.float32),
        ((), torch.int8),
    ]
    assert [True] * 3 + [False] * 5 == [can_stitch(shape, dtype=dtype) for shape, dtype in [*yes, *no]]


def test_the_file_has_no_name(tmp_path):
    file = BankFile(tmp_path / "deep" / "bank")
    held = StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=1, file=file)
    held.tensor.fill_(1)
    assert [] == list((tmp_path / "deep" / "bank").iterdir())
    assert (0, 0o600) == (os.fstat(file.handle).st_nlink, os.fstat(file.handle).st_mode & 0o777)
    held.close()
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_a_file_system_without_nameless_files_gets_one_that_loses_its_name_at_once(tmp_path, monkeypatch, number):
    real_open, seen = os.open, []

    def without_tmpfile(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        seen.append(path)
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_tmpfile)
    file = BankFile(tmp_path)
    monkeypatch.undo()
    assert 1 == len(seen)
    assert ([], 0) == (list(tmp_path.iterdir()), os.fstat(file.handle).st_nlink)
    held = StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=1, file=file)
    held.tensor.fill_(5)
    assert 5 == int(held.tensor[3, 4095])
    held.close()
    file.close()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BankError, match="bank file in .*taken.*: got .*; set HOTSPLIT_BANK_DIR to a folder"):
        BankFile(tmp_path / "taken" / "bank")


def test_closing_gives_the_blocks_back_to_the_disk(file):
    first = StitchedRange(shape=(8, 1 << 16), dtype=torch.uint8, num_fast=2, file=file)
    second = StitchedRange(shape=(8, 1 << 16), dtype=torch.uint8, num_fast=4, file=file)
    assert (10 << 16, True) == (file.num_bytes, 10 << 16 <= disk_bytes(file))
    first.close()
    assert (4 << 16, True) == (file.num_bytes, disk_bytes(file) < 6 << 16)
    second.close()
    assert (0, 0) == (file.num_bytes, disk_bytes(file))


def test_closing_one_range_leaves_the_bytes_of_its_neighbours(file):
    held = [StitchedRange(shape=(4, 7680), dtype=torch.uint8, num_fast=2, file=file) for _ in range(3)]
    for value, one in enumerate(held):
        one.tensor.fill_(value + 1)
    held[1].close()
    again = StitchedRange(shape=(4, 7680), dtype=torch.uint8, num_fast=2, file=file)
    again.tensor.fill_(9)
    assert [{1}, {3}] == [set(one.tensor.flatten().tolist()) for one in (held[0], held[2])]
    for one in (held[0], held[2], again):
        one.close()


def test_closing_is_idempotent_and_leaves_nothing_mapped(file):
    inode = os.fstat(file.handle).st_ino
    held = StitchedRange(shape=(4, 7680), dtype=torch.uint8, num_fast=2, file=file)
    held.close()
    held.close()
    assert inode not in [found for *_, found in mappings()]
    with pytest.raises(BankError, match="closed"):
        held.tensor  # noqa: B018 - it is the access that is refused
    with pytest.raises(BankError, match="closed"):
        held.evict()


def test_a_file_may_close_before_its_ranges(tmp_path):
    file = BankFile(tmp_path)
    held = StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=1, file=file)
    held.tensor.fill_(6)
    file.close()
    file.close()
    assert 6 == int(held.tensor[3, 0])
    held.close()
    assert 0 == file.num_bytes
    with pytest.raises(BankError, match="a closed file"):
        file.take(1)


@given(st.data())
def test_pieces_of_the_file_never_overlap_and_their_sum_is_what_is_taken(data):
    with tempfile.TemporaryDirectory() as folder:
        file = BankFile(ranges.Path(folder))
        taken = {}
        for _ in range(data.draw(st.integers(1, 12))):
            if taken and data.draw(st.booleans()):
                offset = data.draw(st.sampled_from(sorted(taken)))
                file.give_back(offset, taken.pop(offset))
            else:
                num_bytes = data.draw(st.integers(1, 5 * PAGE))
                taken[file.take(num_bytes)] = num_bytes
            pages = [(offset + i * PAGE) for offset, size in taken.items() for i in range(-(-size // PAGE))]
            assert len(pages) == len(set(pages))
            assert len(pages) * PAGE == file.num_bytes
            assert not [page for page in pages if page % PAGE]
        for offset, num_bytes in taken.items():
            file.give_back(offset, num_bytes)
        assert (0, 0) == (file.num_bytes, disk_bytes(file))
        file.close()


def test_space_that_was_given_back_is_used_again(file):
    offsets = [file.take(2 * PAGE) for _ in range(4)]
    file.give_back(offsets[1], 2 * PAGE)
    file.give_back(offsets[2], 2 * PAGE)
    assert (offsets[1], offsets[1] + 3 * PAGE) == (file.take(3 * PAGE), file.take(PAGE))


@pytest.mark.parametrize(("offset", "num_bytes"), [(PAGE, PAGE), (0, PAGE), (0, 3 * PAGE)])
def test_what_was_not_taken_cannot_be_given_back(file, offset, num_bytes):
    file.take(2 * PAGE)
    with pytest.raises(BankError, match="wanted a piece in use"):
        file.give_back(offset, num_bytes)


def test_a_disk_that_cannot_punch_holes_is_said_once_and_the_space_is_used_again(file, monkeypatch, caplog):
    checked = ranges._checked

    def no_holes(name, *arguments):
        if name == "fallocate":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return checked(name, *arguments)

    monkeypatch.setattr(ranges, "_checked", no_holes)
    with caplog.at_level(logging.WARNING, logger="hotsplit"):
        for _ in range(2):
            offset = file.take(PAGE)
            file.give_back(offset, PAGE)
    assert 1 == len(caplog.records)
    assert "cannot give space back before the end (Operation not supported)" in caplog.text
    assert (0, 0) == (offset, file.num_bytes)


def test_a_kernel_without_huge_pages_is_said_once_and_small_ones_are_used(file, monkeypatch, caplog):
    checked, asked = ranges._checked, []

    def no_huge_pages(name, *arguments):
        if name == "madvise":
            asked.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        return checked(name, *arguments)

    monkeypatch.setattr(ranges, "_checked", no_huge_pages)
    ranges._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hotsplit"):
        for num_fast, huge_pages in [(1, True), (1, True), (0, True), (1, False)]:
            held = StitchedRange(
                shape=(2, 4096), dtype=torch.uint8, num_fast=num_fast, file=file, huge_pages=huge_pages
            )
            held.tensor.fill_(1)
            held.close()
    assert (2, 1) == (len(asked), len(caplog.records))
    assert "no huge pages for hot rows (Invalid argument); using small ones instead" in caplog.text


def test_huge_pages_are_asked_for_in_memory_rows_alone(file, monkeypatch):
    checked, asked = ranges._checked, []
    monkeypatch.setattr(ranges, "_checked", lambda name, *args: (asked.append((name, args)), checked(name, *args))[1])
    held = StitchedRange(shape=(4, 7680), dtype=torch.uint8, num_fast=2, file=file)
    advised = [arguments for name, arguments in asked if name == "madvise"]
    assert [(held.edge - held.fast_bytes, held.fast_bytes, mmap.MADV_HUGEPAGE)] == advised
    held.close()


@pytest.mark.parametrize("num_fast", [0, 2, 5])
def test_rows_that_were_evicted_are_read_back_to_the_bit(file, num_fast):
    held = StitchedRange(shape=(5, 1 << 18), dtype=torch.int32, num_fast=num_fast, file=file)
    expected = torch.randint(-(2**31), 2**31 - 1, (5, 1 << 18), generator=torch.Generator().manual_seed(1)).to(
        torch.int32
    )
    held.tensor.copy_(expected)
    held.evict()
    # Pages that another processor still has in a batch of its own escape an eviction; they are few.
    assert num_fast == 5 or cached_pages(held) <= 64
    assert torch.equal(expected, held.tensor)
    held.close()


def cached_pages(held):
    """Pages of the cold rows that are in RAM, file cache included."""
    pages = (ctypes.c_ubyte * (held.slow_bytes // PAGE))()
    status = ctypes.CDLL(None).mincore(ctypes.c_void_p(held.edge), ctypes.c_size_t(held.slow_bytes), pages)
    assert 0 == status
    return sum(page & 1 for page in pages)


def test_an_eviction_that_fails_is_one_clear_error(file, monkeypatch):
    held = StitchedRange(shape=(2, 4096), dtype=torch.uint8, num_fast=1, file=file)
    failing_call(monkeypatch, name="msync", at=0, number=errno.EIO)
    with pytest.raises(BankError, match="cannot be evicted: got Input/output error"):
        held.evict()
    monkeypatch.undo()
    held.close()


def failing_call(monkeypatch, *, name, at, number):
    """Let the at-th call of one name fail; returns what is asked of the kernel, as it comes."""
    checked, asked = ranges._checked, []

    def fail(called, *arguments):
        asked.append(called)
        if called == name and asked.count(name) == at + 1:
            raise OSError(number, os.strerror(number))
        return checked(called, *arguments)

    monkeypatch.setattr(ranges, "_checked", fail)
    return asked


@pytest.mark.parametrize(("num_fast", "num_calls"), [(2, 3), (4, 2), (0, 2)])
def test_a_failure_half_way_leaks_neither_addresses_nor_space(file, monkeypatch, num_fast, num_calls):
    size, inode = 64 << 20, os.fstat(file.handle).st_ino
    for at in range(num_calls + 1):
        with monkeypatch.context() as patch:
            asked = failing_call(patch, name="mmap", at=at, number=errno.ENOMEM)
            before = virtual_bytes()
            if at == num_calls:
                StitchedRange(shape=(4, size), dtype=torch.uint8, num_fast=num_fast, file=file).close()
            else:
                with pytest.raises(BankError, match="memory for expert rows: got Cannot allocate memory; wanted"):
                    StitchedRange(shape=(4, size), dtype=torch.uint8, num_fast=num_fast, file=file)
            assert min(at + 1, num_calls) == asked.count("mmap")
        assert (0, 0) == (file.num_bytes, disk_bytes(file))
        assert inode not in [found for *_, found in mappings()]
        assert abs(virtual_bytes() - before) < size


def virtual_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * PAGE


def test_a_failure_after_mapping_leaks_neither_addresses_nor_space(file, monkeypatch):
    inode = os.fstat(file.handle).st_ino

    def fail(address, *, num_bytes):
        assert inode in [found for *_, found in mappings()]
        raise KeyboardInterrupt

    monkeypatch.setattr(ranges, "_tensor_at", fail)
    with pytest.raises(KeyboardInterrupt):
        StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=2, file=file)
    assert (0, 0) == (file.num_bytes, disk_bytes(file))
    assert inode not in [found for *_, found in mappings()]


def test_memory_that_no_machine_has_is_one_clear_error(file):
    with pytest.raises(BankError, match="memory for expert rows: got .*; wanted .* hot and .*; lower HOTSPLIT_HOT_GIB"):
        StitchedRange(shape=(4, 1 << 60), dtype=torch.uint8, num_fast=4, file=file)


def test_a_range_that_cannot_be_unmapped_keeps_its_piece_of_the_file_until_it_can(file, monkeypatch):
    held = StitchedRange(shape=(4, 4096), dtype=torch.uint8, num_fast=2, file=file)
    with monkeypatch.context() as patch:
        failing_call(patch, name="munmap", at=0, number=errno.ENOMEM)
        with pytest.raises(BankError, match="cannot be unmapped: got Cannot allocate memory"):
            held.close()
        assert 2 * PAGE == file.num_bytes
    held.close()
    assert 0 == file.num_bytes


def test_a_disk_without_room_tells_what_is_free_and_what_is_wanted(file, monkeypatch):
    def no_room(handle, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = file.take(2 << 20)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    answer_statvfs(monkeypatch, free=1 << 20)
    with pytest.raises(BankError) as caught:
        file.take(3 << 20)
    monkeypatch.undo()
    assert 1 << 20 == caught.value.free_bytes
    assert 3 << 20 == caught.value.wanted_bytes
    message = str(caught.value)
    assert f"bank file in {file.folder}: got " in message
    assert (
        "free (No space left on device); wanted 3.0 MiB more than the 2.0 MiB it has; set HOTSPLIT_BANK_DIR" in message
    )
    assert message.endswith("to a folder on a disk with that much room, or raise HOTSPLIT_HOT_GIB")
    file.give_back(held, 2 << 20)


def test_another_failure_of_the_disk_does_not_speak_of_room(file, monkeypatch):
    def broken(handle, offset, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(BankError, match="Input/output error.*on another disk$"):
        file.take(PAGE)
    assert 0 == file.num_bytes


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(tmp_path):
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        file = BankFile(Path(sys.argv[1]))
        kept = StitchedRange(shape=(4, 1 << 17), dtype=torch.uint8, num_fast=1, file=file)
        kept.tensor.fill_(3)
        try:
            StitchedRange(shape=(4, 1 << 18), dtype=torch.uint8, num_fast=1, file=file)
        except BankError as error:
            print(error)
        print(file.num_bytes, os.fstat(file.handle).st_blocks * 512, set(kept.tensor.flatten().tolist()))
    """
    status, out, err = finish(run_child(code, tmp_path))
    assert (0, "") == (status, err)
    message, state = out.splitlines()
    assert "free (File too large); wanted 0.8 MiB more than the 0.4 MiB it has; raise the limit" in message
    assert f"{3 << 17} {3 << 17} {{3}}" == state


def test_a_full_disk_is_an_error_and_no_signal_and_keeps_what_was_there(tmp_path):
    namespace = ("unshare", "--mount", "--map-root-user")
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && shift && exec "$@"'
    prefix = (*namespace, "sh", "-c", mount, "sh", str(tmp_path))
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a small disk")
    code = """
        file = BankFile(Path(sys.argv[1]))
        kept = StitchedRange(shape=(4, 1 << 17), dtype=torch.uint8, num_fast=1, file=file)
        kept.tensor.fill_(3)
        try:
            StitchedRange(shape=(4, 1 << 18), dtype=torch.uint8, num_fast=1, file=file)
        except BankError as error:
            print(error)
        print(file.num_bytes, os.fstat(file.handle).st_blocks * 512, set(kept.tensor.flatten().tolist()))
    """
    status, out, err = finish(run_child(code, tmp_path, prefix=prefix))
    assert (0, "") == (status, err)
    message, state = out.splitlines()
    assert "got 0.6 MiB free (No space left on device); wanted 0.8 MiB more than the 0.4 MiB it has" in message
    assert f"{3 << 17} {3 << 17} {{3}}" == state


def test_a_kill_leaves_nothing_behind(tmp_path):
    code = """
        file = BankFile(Path(sys.argv[1]))
        held = StitchedRange(shape=(8, 1 << 17), dtype=torch.uint8, num_fast=1, file=file)
        held.tensor.fill_(3)
        print("ready", flush=True)
        time.sleep(600)
    """
    child = run_child(code, tmp_path)
    try:
        assert "ready" == child.stdout.readline().strip()
        assert [] == list(tmp_path.iterdir())
    finally:
        os.kill(child.pid, signal.SIGKILL)
    assert -signal.SIGKILL == finish(child)[0]
    assert [] == list(tmp_path.iterdir())


def answer_statvfs(monkeypatch, *, free):
    """Say that a disk has so much room, whatever others write to it meanwhile; returns the folders asked for."""
    asked, room = [], free // PAGE
    found = SimpleNamespace(f_bavail=room, f_frsize=PAGE, f_bfree=2 * room, f_bsize=2 * PAGE)
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or found)
    return asked


def test_free_bytes_are_those_of_the_disk_also_of_a_folder_to_come(tmp_path, monkeypatch):
    asked = answer_statvfs(monkeypatch, free=3 << 20)
    for folder in (tmp_path, tmp_path / "not" / "yet"):
        assert 3 << 20 == free_bytes(folder)
    assert [tmp_path, tmp_path] == asked


def test_a_disk_that_cannot_be_seen_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "statvfs", refuse)
    with pytest.raises(BankError, match="cannot see .*: got Permission denied"):
        free_bytes(tmp_path)
