"""The native code of the fast kernel, as Python sees it: a shared library beside this file, called through ctypes.

It is no extension module of one Python: it knows nothing of Python at all, so that one build serves every version and
a compiler is all that a build needs. Where there was none the library is missing, and load() says so.

Shapes: T tokens, N pairs (token, expert), D model dim.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_NAME: Final = "_experts"
_ABI: Final = 2
"""Of native/experts.h; a library that was built from other sources is not used."""
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of native/experts.h."""
KINDS: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn")
"""The same for the kinds of numbers, by the names that torch gives them."""
EXPERT_FIELDS: Final = ("up", "up_scale", "up_bias", "down", "down_scale", "down_bias")
"""The addresses of one expert, in its order; behind them come first pair and number of pairs."""


class Matrix(ctypes.Structure):
    """One projection as it is stored."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "outputs",
            "inputs",
            "kind",
            "is_transposed",
            "bias_kind",
            "scale_kind",
            "scale_outputs",
            "scale_inputs",
        )
    )


class Form(ctypes.Structure):
    """The experts of one layer."""

    _fields_ = (
        ("up", Matrix),
        ("down", Matrix),
        ("token_kind", ctypes.c_int64),
        ("path", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("has_gate", ctypes.c_int64),
        ("is_interleaved", ctypes.c_int64),
        ("has_limit", ctypes.c_int64),
        ("limit", ctypes.c_double),
        ("slope", ctypes.c_double),
        ("shift", ctypes.c_double),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The native functions, by what they do; native/experts.c has their arguments."""

    tokens: Callable[..., None]
    """Hidden states as the first projection reads them."""
    compute: Callable[..., None]
    """Some experts' outputs."""
    sum: Callable[..., None]
    """All outputs, weighted and added."""
    linear: Callable[..., None]
    """One projection alone."""
    input_bytes: Callable[..., int]
    """Of one row of a projection's inputs."""
    paths: tuple[str, ...]
    """What this processor can take, worst first."""


@cache
def load() -> Library | None:
    """The library that was built with this hotsplit; None where there is none for this machine."""
    for path in sorted(Path(__file__).parent.glob(f"{_NAME}*.so")):
        try:
            found = ctypes.CDLL(str(path))
            if found.experts_abi() == _ABI:
                return _library(found)
        except (OSError, AttributeError):  # of another machine, or of another hotsplit
            continue
    return None


def parallel_function() -> int:
    """Address of the GOMP_parallel that torch's own OpenMP has; 0 where torch runs on something else.

    0 also in a process that was forked from one that has computed: threads do not follow, and libgomp would wait for them.
    """
    process, address = _parallel()
    return address if process == os.getpid() else 0


@cache
def _parallel() -> tuple[int, int]:
    """The process that asked first, and the address."""
    import torch  # noqa: F401 - brings its OpenMP into the process

    try:
        address = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        address = 0
    return os.getpid(), address


def _library(found: Any) -> Library:
    pointer, number, form = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(Form)
    found.experts_path.restype = ctypes.c_char_p
    found.experts_path.argtypes = (number,)
    return Library(
        tokens=_function(found.experts_tokens, (form, pointer, number, pointer)),
        compute=_function(
            found.experts_compute,
            (form, pointer, number, pointer, pointer, pointer, pointer, number, pointer),
        ),
        sum=_function(found.experts_sum, (form, number, pointer, pointer, pointer, number, pointer)),
        linear=_function(
            found.experts_linear,
            (form, pointer, pointer, pointer, number, pointer, number, pointer),
        ),
        input_bytes=_function(found.experts_input_bytes, (form, number), result=number),
        paths=tuple(_paths(found)),
    )


def _function(function: Any, arguments: Sequence[Any], *, result: Any = None) -> Any:
    function.argtypes, function.restype = tuple(arguments), result
    return function


def _paths(found: Any) -> list[str]:
    names: list[str] = []
    while (name := found.experts_path(len(names))) is not None:
        names.append(name.decode())
    return names
