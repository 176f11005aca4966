"""The native code that turns a lost page of a mapped file into zeros and a count, as Python sees it (native/guard.c).

A shared library beside this file, called through ctypes, which knows nothing of Python. Where it could not be built, or
does not know this machine, there is none: a lost page ends the process then, as it always did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_NAME: Final = "_guard"
_ABI: Final = 1
"""Of native/guard.c; a library that was built from other sources is not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardLibrary:
    """The native functions; native/guard.c says more."""

    add: Callable[[int, int], int]
    """Watch a mapping: its address and bytes. Its number; -1 where that cannot be."""
    drop: Callable[[int], None]
    """Forget a mapping, before it is unmapped."""
    begin: Callable[[], int]
    """Before a use: see that the handler is asked first. How many mappings have broken, in the whole process."""
    breaks: Callable[[], int]
    """After it: how many have by now."""
    state: Callable[[int], int]
    """Of a mapping: another number whenever it has broken or was mended."""
    broken_at: Callable[[int], int]
    """Byte of a mapping whose touch broke it."""
    mend: Callable[[int], int]
    """Map the file of a broken mapping again; 0, or an errno."""


def is_whole(state: int) -> bool:
    """Whether a mapping in this state is the file.

    Args:
        state: From GuardLibrary.state.
    """
    return state % 4 == 0


@cache
def load() -> GuardLibrary | None:
    """The library that was built with this hotsplit; None where there is none for this machine."""
    for path in sorted(Path(__file__).parent.glob(f"{_NAME}*.so")):
        try:
            # PyDLL: each of these takes less time than to give Python's lock away and to get it back.
            found = ctypes.PyDLL(str(path))
            if found.guard_abi() == _ABI:
                return _library(found)
        except (OSError, AttributeError):  # of another machine, or of another hotsplit
            continue
    return None


def _library(found: Any) -> GuardLibrary:
    number, count = ctypes.c_int64, ctypes.c_uint64
    return GuardLibrary(
        add=_function(found.guard_add, (ctypes.c_void_p, number), result=number),
        drop=_function(found.guard_drop, (number,)),
        begin=_function(found.guard_begin, (), result=count),
        breaks=_function(found.guard_breaks, (), result=count),
        state=_function(found.guard_state, (number,), result=count),
        broken_at=_function(found.guard_broken_at, (number,), result=count),
        mend=_function(found.guard_mend, (number,), result=number),
    )


def _function(function: Any, arguments: Sequence[Any], *, result: Any = None) -> Any:
    function.argtypes, function.restype = tuple(arguments), result
    return function
