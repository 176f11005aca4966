"""The native code of the fast kernel, as Python sees it: a shared library beside this file, called through ctypes.

It is no extension module of one Python: it knows nothing of Python at all, so that one build serves every version and
a compiler is all that a build needs. Where there was none the library is missing, and load() says so.

Shapes: T tokens, K top-k, D model dim.
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
_ABI: Final = 3
"""Of native/experts.h; a library that was built from other sources is not used."""
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of native/experts.h."""
KINDS: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn")
"""The same for the kinds of numbers, by the names that torch gives them."""
EXPERT_FIELDS: Final = ("up", "up_scale", "up_bias", "down", "down_scale", "down_bias")
"""The addresses of one expert, in its order."""


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


class LayerCall(ctypes.Structure):
    """One layer's call."""

    _fields_ = (
        ("form", ctypes.POINTER(Form)),
        ("ids", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("weight_kind", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("first_cold", ctypes.c_int64),
        ("addresses", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int64),
        ("num_hot", ctypes.c_int64),
        ("num_cold", ctypes.c_int64),
        ("num_unknown", ctypes.c_int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The native functions, by what they do; native/experts.c has their arguments."""

    tokens: Callable[..., None]
    """Hidden states as the first projection reads them."""
    scratch: Callable[..., int]
    """Bytes of memory that a layer's call needs."""
    begin: Callable[..., None]
    """Sorts a layer's pairs."""
    hot: Callable[..., None]
    """Outputs of all hot rows."""
    cold: Callable[..., None]
    """Outputs of one cold row."""
    end: Callable[..., None]
    """All outputs, weighted and added."""
    linear: Callable[..., None]
    """One projection alone."""
    input_bytes: Callable[..., int]
    """Of one row of a projection's inputs."""
    attention: Callable[..., int]
    """Attention of a few query tokens; 1 where it had no memory, else 0. Its arguments are in native/attention.c."""
    norm: Callable[..., None]
    """RMSNorms of rows; native/norms.c."""
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
    pointer, number, form, layer = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(Form), ctypes.POINTER(LayerCall)
    found.experts_path.restype = ctypes.c_char_p
    found.experts_path.argtypes = (number,)
    return Library(
        tokens=_function(found.experts_tokens, (form, pointer, number, pointer)),
        scratch=_function(found.experts_scratch, (form, number, number, number), result=number),
        begin=_function(found.experts_begin, (layer,)),
        hot=_function(found.experts_hot, (layer,)),
        cold=_function(found.experts_cold, (layer, number, pointer)),
        end=_function(found.experts_end, (layer,)),
        linear=_function(
            found.experts_linear,
            (form, pointer, pointer, pointer, number, pointer, number, pointer),
        ),
        input_bytes=_function(found.experts_input_bytes, (form, number), result=number),
        # The call itself is a struct of fast_attention.py, which is handed over by its address.
        attention=_function(found.attention_compute, (*[pointer] * 6, number, pointer), result=number),
        norm=_function(found.experts_norm, (pointer, pointer, pointer, number, pointer, number, pointer)),
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
