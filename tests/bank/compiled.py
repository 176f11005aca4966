"""What launches of Triton kernels become on GPUs that are not here: registers, spills, and how wide they load.

    with recorded() as launches:
        experts(...)                       tensors without memory will do: device "meta"
    compiled(launches[0], target=90)

Triton compiles for any target without a driver, and its wheel brings the assembler and the disassembler. The way from
a launch's arguments to what is compiled is Triton's own, so what is looked at here is what a GPU would run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = (90, 100, 120)
"""H100 and H200; B200; RTX 50 and RTX PRO 6000."""
SHARED_LIMITS = {90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one program may have."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch that did not happen."""

    kernel: Any
    """What triton.jit made."""
    grid: tuple[int, ...]
    """Programs."""
    arguments: tuple[Any, ...]
    """By position."""
    keywords: dict[str, Any]
    """By name, options among them."""

    @property
    def name(self):
        """Of the kernel."""
        return self.kernel.fn.__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One launch's kernel for one target."""

    registers: int
    """Per thread."""
    shared: int
    """Bytes per program."""
    instructions: Counter[str]
    """How often each stands in the code."""

    def count(self, pattern):
        """Instructions whose whole name matches."""
        return sum(count for name, count in self.instructions.items() if re.fullmatch(pattern, name))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are written down instead."""
    launches: list[Launch] = []

    def run(kernel, *arguments, grid, warmup, **keywords):
        launches.append(Launch(kernel=kernel, grid=grid, arguments=arguments, keywords=keywords))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield launches


def specialised(launch, *, target):
    """Types, constants and hints that a launch is compiled for: two that agree share one compilation.

    Returns:
        Options, types by argument, constants and hints by position.
    """
    backend = make_backend(GPUTarget("cuda", target, 32))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialisation, options = bind(*launch.arguments, **launch.keywords)
    return launch.kernel._pack_args(backend, launch.keywords, bound, specialisation, options)


def compiled(launch, *, target):
    """Compile a launch's kernel for sm_`target` and take it apart."""
    options, signature, constants, hints = specialised(launch, target=target)
    source = ASTSource(launch.kernel, signature, constants, hints)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options.__dict__)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Compiled(
        registers=max(int(found) for found in re.findall(r"\bREG:(\d+)", text)),
        shared=made.metadata.shared,
        instructions=Counter(_INSTRUCTION.findall(text)),
    )
