"""How a host is asked: files under a root, tools that may be missing, and answers that may be unknown, with the reason.

Below everything that describes this machine. An answer is a Fact: a value and what told it, or no value and why. So
nothing that could not be found out ever turns into a 0, and whoever prints it can say what was in the way.

    >>> str(known(3, "a file")), str(unknown("no such tool"))
    ('3', 'unknown (no such tool)')
    >>> whole_number("16"), whole_number("-1"), whole_number("N/A"), whole_number("9" * 400)
    (16, None, None, None)
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

T = TypeVar("T")

ROOT: Final = Path("/")
"""Where /proc and /sys lie, but for tests."""
TOOL_TIMEOUT_S: Final = 30.0
"""A driver that hangs never answers."""
_END_S: Final = 1.0
"""After a signal that nobody can refuse."""
_MOST_DIGITS: Final = 18
"""Of a whole number that anybody can mean: below 2**63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact(Generic[T]):
    """One answer. As a string: the value, or that it is unknown, and why."""

    value: T | None = None
    """None is unknown, never 0."""
    source: str = ""
    """The file, tool or measurement that told it."""
    reason: str = ""
    """Why it is unknown; empty where it is known."""

    def __str__(self) -> str:
        return f"unknown ({self.reason})" if self.value is None else str(self.value)


Tool: TypeAlias = Callable[[Sequence[str]], Fact[str]]
"""Runs a tool by its command line; its output, or why there is none."""


def known(value: T, source: str) -> Fact[T]:
    """An answer.

    Args:
        value: Not None.
        source: What told it.
    """
    return Fact(value=value, source=source)


def unknown(reason: str) -> Fact[T]:
    """No answer.

    Args:
        reason: Why not.
    """
    return Fact(reason=reason)


def fact(value: T | None, *, source: str, reason: str) -> Fact[T]:
    """An answer where there is a value, else none.

    Args:
        value: None is unknown.
        source: What told it.
        reason: Why it is unknown, should it be.
    """
    return unknown(reason) if value is None else known(value, source)


def first_known(first: Fact[T], second: Fact[T]) -> Fact[T]:
    """The first answer that is one; of two that are none, the first reason.

    Args:
        first: Asked first.
        second: Stands in for it.
    """
    return second if first.value is None and second.value is not None else first


def read_text(path: Path) -> Fact[str]:
    """The text of a file of the kernel's.

    Args:
        path: The file.
    """
    try:
        return known(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except (OSError, ValueError) as error:
        return unknown(f"{path}: {(getattr(error, 'strerror', None) or str(error)).lower()}")


def read_number(path: Path) -> Fact[int]:
    """The one whole number >= 0 that a file holds.

    Args:
        path: The file.
    """
    text = read_text(path)
    if text.value is None:
        return unknown(text.reason)
    return fact(whole_number(text.value), source=str(path), reason=f"{path} says {shortened(text.value)}")


def whole_number(text: str) -> int | None:
    """A whole number >= 0 as tools and files write it; None where it is something else.

    Args:
        text: With or without blanks around it.
    """
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


def shortened(text: str, *, most: int = 40) -> str:
    """The beginning of a text, as a message may quote it.

    Args:
        text: Anything.
        most: Characters of it.
    """
    words = " ".join(text.split())
    return repr(words if len(words) <= most else f"{words[: most - 3]}...")


def run_tool(command: Sequence[str]) -> Fact[str]:
    """Run a tool (a Tool).

    Args:
        command: Its name or path, then arguments.
    """
    name = command[0]
    path = shutil.which(name)
    if path is None:
        return unknown(f"{name} is not installed")
    try:
        # The command lines are our own, and the tool is the one that the user's shell would run.
        process = subprocess.Popen(  # noqa: S603
            [path, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return unknown(f"{name}: {(error.strerror or str(error)).lower()}")
    try:
        stdout, stderr = process.communicate(timeout=TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return unknown(f"{name} gave no answer in {TOOL_TIMEOUT_S:g} s")
    finally:
        _end(process)
    output = stdout.decode("utf-8", errors="replace")
    if process.returncode:
        said = stderr.decode("utf-8", errors="replace") or output
        return unknown(f"{name} ended with {process.returncode}: {shortened(said, most=160)}")
    return known(output, " ".join(command))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a tool that did not end. Inside a driver that hangs no signal reaches it: then it is left behind."""
    if process.returncode is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
