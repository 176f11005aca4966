"""The guard's signal handler among others: whichever comes first, each gets what is its own, and a stranger's fault kills."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bank.apart import apart
from hotsplit.bank import guard_library
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.source import Span
from hotsplit.errors import BankError

PAGE = mmap.PAGESIZE
SPAN = Span(file=0, offset=0, num_bytes=4 * PAGE, row_offset=0)
SA_NODEFER, SA_RESETHAND = 0x40000000, 0x80000000 - (1 << 32)

pytestmark = pytest.mark.skipif(guard_library.load() is None, reason="no native code here")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another library with a handler of its own."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    library = tmp_path_factory.mktemp("other") / "other.so"
    source = Path(__file__).with_name("other_handler.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.PyDLL(str(library))


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / name for name in ("ours.bin", "theirs.bin", "nobodys.bin", "later.bin")]
    for path in paths:
        path.write_bytes(b"\1" * 4 * PAGE)
    return paths


def mapped(path):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def address(memory):
    import numpy as np

    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


def survives(files, path):
    """Lose a page of ours, and read it."""
    path.write_bytes(b"\1" * 4 * PAGE)
    files.guard.begin()
    files.make_present([SPAN])
    os.truncate(path, 0)
    found = int(files.content(SPAN)[PAGE])
    with pytest.raises(BankError, match="nothing at byte"):
        files.guard.require_whole()
    return found


def touch_a_strangers(path):
    """Lose a page that nobody watches."""
    memory = mapped(path)
    os.truncate(path, 0)
    return memory[PAGE]


def test_nothing_is_installed_before_files_are_mapped_nor_after_they_are_gone(paths):
    """In a process that has mapped nothing else: what other tests hold is mapped in this one, and in its forks."""
    code = """
import ctypes, gc, pathlib, signal, sys
from hotsplit.bank.mapped import MappedFiles

def handler_now():
    buffer = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).sigaction(signal.SIGBUS, None, buffer)
    return buffer.raw[:8]

paths = [pathlib.Path(path) for path in sys.argv[1:]]
before = handler_now()
files = MappedFiles(paths[:2])
during = handler_now()
again = MappedFiles(paths[2:3])
files.close()
del files
gc.collect()
half = handler_now()
again.close()
del again
gc.collect()
assert (True, True, True) == (before != during, during == half, before == handler_now())
"""
    subprocess.run([sys.executable, "-c", code, *paths], check=True)


def test_importing_and_loading_the_library_installs_nothing():
    code = (
        "import ctypes, signal, hotsplit\n"
        "from hotsplit.bank import guard_library, mapped\n"
        "guard_library.load()\n"
        "buffer = ctypes.create_string_buffer(256)\n"
        "ctypes.CDLL(None).sigaction(signal.SIGBUS, None, buffer)\n"
        "assert not any(buffer.raw[:8]), buffer.raw"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("turn", range(2))
def test_a_fault_that_is_nobodys_ends_the_process_as_ever(paths, turn):
    def story():
        files = MappedFiles(paths[:1])
        files.guard.begin()
        if turn:
            assert 0 == survives(files, paths[0])
        touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)


def test_an_address_that_was_ours_is_nobodys_once_the_files_are_gone(paths):
    def story():
        files = MappedFiles(paths[:1])
        other = MappedFiles(paths[1:2])  # so that the handler stays
        was = files._maps[0].address
        files.close()
        del files
        gc.collect()
        memory = mapped(paths[2])
        if was != address(memory):
            return "elsewhere"
        other.guard.begin()
        os.truncate(paths[2], 0)
        return memory[PAGE]

    found = apart(story)
    if found == "elsewhere":
        pytest.skip("the kernel has put it elsewhere")
    assert -signal.SIGBUS == found


@pytest.mark.parametrize("enable", ["before", "after", "twice", "off again"])
def test_faulthandler_tells_of_strangers_faults_and_not_of_ours(paths, tmp_path, enable):
    told = tmp_path / "told"

    def story():
        with open(told, "wb") as file:
            if enable in ("before", "twice"):
                faulthandler.enable(file)
            files = MappedFiles(paths[:1])
            if enable != "before":
                faulthandler.enable(file)
            if enable == "off again":
                files.guard.begin()
                faulthandler.disable()
            for _ in range(2):
                assert 0 == survives(files, paths[0])
            assert b"" == told.read_bytes()
            touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)
    if enable != "off again":
        found = told.read_text(encoding="utf-8")
        assert 1 == found.count("Fatal Python error: Bus error"), found
        assert "touch_a_strangers" in found


@pytest.mark.parametrize("flags", [0, SA_NODEFER])
@pytest.mark.parametrize("install", ["before", "after"])
def test_another_librarys_handler_gets_its_own_and_hands_on_what_is_not(paths, other, install, flags):
    def story():
        if install == "before":
            other.other_install(flags, 1)
        files = MappedFiles(paths[:1])
        if install == "after":
            faulthandler.enable()
            other.other_install(flags, 1)
        theirs = mapped(paths[1])
        other.other_keep(ctypes.c_void_p(address(theirs)), ctypes.c_long(len(theirs)))
        files.guard.begin()
        os.truncate(paths[1], 0)
        assert (0, 1) == (theirs[PAGE], other.other_asked())
        for _ in range(2):
            assert 0 == survives(files, paths[0])
        assert 1 == other.other_asked()
        files.close()
        del files
        gc.collect()
        again = MappedFiles(paths[3:])
        assert 0 == survives(again, paths[3])
        touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)


def test_a_handler_that_was_put_over_ours_is_asked_for_strangers_faults_also_when_ours_has_gone(paths, other):
    def story():
        files = MappedFiles(paths[:1])
        other.other_install(0, 0)
        files.guard.begin()
        assert 0 == survives(files, paths[0])
        files.close()
        del files
        gc.collect()
        touch_a_strangers(paths[2])

    assert 42 == apart(story)


def test_a_handler_that_is_installed_within_a_turn_still_has_ours_behind_it(paths, other):
    def story():
        files = MappedFiles(paths[:1])
        files.guard.begin()
        other.other_install(0, 1)
        files.make_present([SPAN])
        os.truncate(paths[0], 0)
        assert 0 == int(files.content(SPAN)[PAGE])
        with pytest.raises(BankError, match="nothing at byte"):
            files.guard.require_whole()
        return other.other_asked()

    assert 1 == apart(story)


def test_a_handler_for_once_is_asked_once(paths, other):
    def story():
        other.other_install(SA_RESETHAND, 1)
        files = MappedFiles(paths[:1])
        files.guard.begin()
        theirs = mapped(paths[1])
        other.other_keep(ctypes.c_void_p(address(theirs)), ctypes.c_long(len(theirs)))
        os.truncate(paths[1], 0)
        assert (0, 1) == (theirs[PAGE], other.other_asked())
        touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_signal_that_somebody_sends_does_what_it_did(paths, is_ignored):
    def story():
        if is_ignored:
            signal.signal(signal.SIGBUS, signal.SIG_IGN)
        files = MappedFiles(paths[:1])
        files.guard.begin()
        os.kill(os.getpid(), signal.SIGBUS)
        return survives(files, paths[0])

    assert (0 if is_ignored else -signal.SIGBUS) == apart(story)


def test_a_fault_where_the_signal_is_ignored_ends_the_process_all_the_same(paths):
    def story():
        signal.signal(signal.SIGBUS, signal.SIG_IGN)
        files = MappedFiles(paths[:1])
        files.guard.begin()
        touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)


def test_handlers_that_come_and_go_for_ever_leave_ours_where_it_can_be(paths, other):
    def story():
        files = MappedFiles(paths[:1])
        for number in range(50):
            other.other_install(0, 1)
            signal.signal(signal.SIGBUS, signal.SIG_DFL if number % 2 else signal.SIG_IGN)
            files.guard.begin()
            assert 0 == survives(files, paths[0])
        touch_a_strangers(paths[2])

    assert -signal.SIGBUS == apart(story)
