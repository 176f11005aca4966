"""The C library's memory calls, where Python's own cannot do it: map at an address, advise, and plain system calls.

Below everything that lays out memory by address. Every failure is an OSError with the call's name as its file name, to
be turned into an error of ours by whoever knows what the memory was for.

    >>> address = checked("mmap", 0, mmap.PAGESIZE, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    >>> checked("munmap", address, mmap.PAGESIZE)
    0
    >>> checked("munmap", 1, mmap.PAGESIZE)
    Traceback (most recent call last):
    OSError: [Errno 22] Invalid argument: 'munmap'
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Mapping
from typing import Final

READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
# Of the kernel's headers; Python's mmap module does not know them in every version from 3.11 on.
PROT_NONE: Final = 0
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23

_CALLS: Final[Mapping[str, Mapping[str, int]]] = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
"""Numbers of system calls by kind of processor, as the kernel's headers have them."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_ssize_t
_LIBC.syscall.restype = ctypes.c_long
_LIBC.syscall.argtypes = (ctypes.c_long,) * 7
_ARGUMENTS: Final = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "mprotect": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "mincore": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "mlock": (ctypes.c_void_p, ctypes.c_size_t),
}


def checked(name: str, *arguments: int) -> int:
    """Call a function of the C library; other threads of Python run meanwhile.

    Args:
        name: "mmap", "munmap", "mprotect", "madvise", "mincore" or "mlock".
        *arguments: As C declares them, pointers as addresses.

    Raises:
        OSError: It failed; each of these tells that by -1 and errno.
    """
    function = getattr(_LIBC, name)
    function.argtypes = _ARGUMENTS[name]
    return _result(name, function(*arguments))


def system_call(name: str, *arguments: int) -> int:
    """Make a system call that the C library has no function for; other threads of Python run meanwhile.

    Args:
        name: "mbind", "set_mempolicy", "get_mempolicy" or "move_pages".
        *arguments: Six at most, pointers as addresses.

    Raises:
        OSError: It failed, or its number is not known for this kind of processor.
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"not known on {platform.machine()}", name)
    return _result(name, _LIBC.syscall(numbers[name], *arguments, *(0,) * (6 - len(arguments))))


def _result(name: str, result: int) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result
