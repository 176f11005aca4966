"""Calls of the C library and of the kernel: a failure is an OSError that names the call."""

from __future__ import annotations

import errno
import mmap
import platform

import pytest

from hotsplit.host.libc import READ_WRITE, checked, system_call


def test_memory_is_mapped_and_given_back():
    address = checked("mmap", 0, 2 * mmap.PAGESIZE, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert 0 == address % mmap.PAGESIZE
    assert 0 == checked("mprotect", address, mmap.PAGESIZE, mmap.PROT_READ)
    assert 0 == checked("munmap", address, 2 * mmap.PAGESIZE)


@pytest.mark.parametrize("arguments", [("munmap", 1, 4096), ("madvise", 1, 4096, 0), ("mprotect", 1, 4096, 0)])
def test_a_failure_is_an_error_with_its_number_and_the_calls_name(arguments):
    with pytest.raises(OSError, match=r"\[Errno 22\] Invalid argument: '" + arguments[0]) as caught:
        checked(*arguments)
    assert errno.EINVAL == caught.value.errno


def test_a_system_call_that_fails_is_an_error_with_its_name():
    with pytest.raises(OSError, match="'set_mempolicy'") as caught:
        system_call("set_mempolicy", 12345, 0, 0)
    assert caught.value.errno in (errno.EINVAL, errno.EPERM, errno.ENOSYS)


def test_another_kind_of_processor_has_no_numbers_that_could_be_guessed(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="not known on vax: 'mbind'") as caught:
        system_call("mbind", 0, 0, 0, 0, 0, 0)
    assert errno.ENOSYS == caught.value.errno
