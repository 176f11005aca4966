r"""The processor: its model, the instructions that kernels look for, and how many CPUs this process may use.

>>> cpuinfo = "processor\t: 0\nmodel name\t: Toy 9000\nflags\t\t: fpu avx2 avx512f\n"
>>> read_model(cpuinfo), [name for name, has in (read_flags(cpuinfo) or {}).items() if has]
('Toy 9000', ['avx2', 'avx512f'])
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, fact, known, read_text, unknown

_X86: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
_ARM: Final = ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuFacts:
    """One host's processors."""

    model: Fact[str]
    """Its name."""
    flags: Fact[Mapping[str, bool]]
    """By instruction set, whether it is there: those of the kind of processor that it is."""
    online: Fact[int]
    """CPUs that the kernel runs on."""
    usable: Fact[int]
    """CPUs that this process may run on: a container or `taskset` may leave it fewer."""


def read_cpu(root: Path = ROOT) -> CpuFacts:
    """Describe the processor.

    Args:
        root: Where /proc and /sys lie; another one only in tests.
    """
    cpuinfo = read_text(root / "proc/cpuinfo")
    text, source = cpuinfo.value or "", cpuinfo.source
    online = read_text(root / "sys/devices/system/cpu/online")
    numbers = cpu_numbers(online.value or "")
    status = read_text(root / "proc/self/status")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status.value or "", re.MULTILINE)
    usable = cpu_numbers(allowed[1]) if allowed else ()
    return CpuFacts(
        model=fact(read_model(text), source=source, reason=cpuinfo.reason or _unnamed(text)),
        flags=fact(read_flags(text), source=source, reason=cpuinfo.reason or f"{source} names no flags"),
        online=fact(len(numbers) or None, source=online.source, reason=online.reason or f"{online.source} has no list"),
        usable=fact(
            # An affinity may name CPUs that are not there.
            len(set(usable) & set(numbers) if numbers else usable) or None,
            source=status.source,
            reason=status.reason or f"{status.source} does not say",
        ),
    )


def usable_cpus() -> tuple[int, ...]:
    """The CPUs that this process may run on, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def read_model(cpuinfo: str) -> str | None:
    """The processor's name; None where the kernel has none, as on Arm.

    Args:
        cpuinfo: Text of /proc/cpuinfo.
    """
    found = re.search(r"^model name\s*:\s*(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    return found[1] if found else None


def read_flags(cpuinfo: str) -> dict[str, bool] | None:
    """Which of the instruction sets that matter here are there; None where the kernel tells none at all.

    Args:
        cpuinfo: Text of /proc/cpuinfo.
    """
    found = re.search(r"^(flags|Features)[ \t]*:[ \t]*(\S.*)$", cpuinfo, re.MULTILINE)
    if found is None:
        return None
    names = set(found[2].split())
    return {name: name in names for name in (_X86 if found[1] == "flags" else _ARM)}


def cpu_numbers(text: str) -> tuple[int, ...]:
    """CPUs by a list of the kernel's, "0-3,8"; none where it is no such list.

    Args:
        text: The list.

    >>> cpu_numbers("0-3,8"), cpu_numbers(""), cpu_numbers("garbage"), cpu_numbers("5-2")
    ((0, 1, 2, 3, 8), (), (), ())
    """
    numbers: list[int] = []
    for part in text.strip().split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if found is None:
            return ()
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(numbers)


def _unnamed(cpuinfo: str) -> str:
    """Why there is no name: Arm's kernel tells numbers instead."""
    numbers = {
        name: found[1]
        for name in ("CPU implementer", "CPU part")
        if (found := re.search(rf"^{name}\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE))
    }
    told = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"the kernel names no model{told and f', only {told}'}"


def cpu_summary(cpu: CpuFacts) -> Fact[str]:
    """Which instruction sets are there and which are not, in words.

    Args:
        cpu: The processor.
    """
    if cpu.flags.value is None:
        return unknown(cpu.flags.reason)
    there = [name for name, has in cpu.flags.value.items() if has]
    absent = [name for name, has in cpu.flags.value.items() if not has]
    text = " ".join(there) or "none that is looked for"
    return known(f"{text}; not {' '.join(absent)}" if absent else text, cpu.flags.source)
