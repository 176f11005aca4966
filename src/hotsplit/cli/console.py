"""What commands print, and how they end.

Results go to stdout (a table, a text, or with --json one object), notes and progress to stderr. Errors are one line
and the exit code of their class. Prose is wrapped at words; data never is.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hotsplit.notices import Notice

PROSE_WIDTH = 78
"""Columns of prose where no terminal says how many it has."""
PROGRESS_EVERY_S = 10.0
"""Seconds between two progress lines where no terminal shows a bar."""

_WIDTH = 1000
"""Wider than any table: a terminal wraps what is too long for it, and nothing is cut off."""
_MANY_LINES = 100_000
"""Log lines that wait for the end of a text; more than any run of one command has."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""What a terminal would obey, as escapes that it shows; tab and newline stay."""


def printable(text: str) -> str:
    """Text from files without what a terminal would obey.

    Args:
        text: Anything.
    """
    return text.translate(_CONTROLS)


class _Plain(Console):
    """A console that shows control characters instead of sending them."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


# What is printed is data (file names, texts, domains): no markup and no :emoji: codes are read out of it.
out = _Plain(highlight=False, soft_wrap=True, markup=False, emoji=False, width=_WIDTH)
"""Results."""
err = _Plain(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
"""Notes, warnings, progress."""


def print_json(value: object) -> None:
    """One object on stdout, keys in a stable order.

    Args:
        value: Anything that JSON can hold.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # JSON itself leaves these as they are, and a terminal may obey them.
    click.echo(text.translate({code: f"\\u{code:04x}" for code in range(127, 160)}))


def prose(text: str, *, indent: int = 0, label: str = "", style: str = "") -> None:
    """Sentences on stdout, wrapped at words: to the terminal, or to PROSE_WIDTH where there is none.

    Args:
        text: Plain text.
        indent: Blanks before every line.
        label: Instead of those before the first.
        style: As rich takes it.
    """
    width = shutil.get_terminal_size().columns if out.is_terminal else PROSE_WIDTH
    for i, line in enumerate(Text(printable(text)).wrap(out, max(width - indent, 1))):
        out.print(f"{'' if i else label:{indent}}{line.plain}".rstrip(), style=style)


def say(notices: Iterable[Notice]) -> None:
    """Notices, each once and one a line, on stderr.

    Args:
        notices: In order.
    """
    for text in dict.fromkeys(str(notice) for notice in notices):
        note(text)


def note(text: str) -> None:
    """A line on stderr, plain text; a terminal wraps it at words.

    Args:
        text: Printed as it is.
    """
    err.print(text, soft_wrap=not err.is_terminal)


def table(title: str, *, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain aligned table on stdout: text left, numbers right.

    Args:
        title: On a line of its own above it; empty for none but the line.
        columns: Headings, a newline in one for a second line; the first column is text.
        rows: Cells as text.
    """
    out.print(title, style="bold")
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        grid.add_column(
            printable(column),
            justify="left" if i == 0 else "right",
            header_style="dim",
            no_wrap=True,
            vertical="bottom",
        )
    for row in rows:
        grid.add_row(*map(printable, row))
    out.print(grid)


def rate(value: float | None) -> str:
    """A ratio in [0, 1] as a percentage with one place: "68.3 %".

    Args:
        value: None prints as a dash.
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, on stderr, gone when done; a line now and then where that is no terminal.

    Args:
        description: What takes so long.

    Yields:
        A function that is told done and total.
    """
    if not err.is_terminal:
        yield _progress_lines(description)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def _progress_lines(description: str) -> Callable[[int, int], None]:
    """Tells of work that goes on, at most once in PROGRESS_EVERY_S: short work says nothing."""
    told_at = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= PROGRESS_EVERY_S and done < total:
            told_at = now
            note(f"{description}: {100 * done // total} %")

    return tell


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Within a command, hotsplit's own log lines are shown; the library itself never sets handlers."""
    logger = logging.getLogger("hotsplit")
    handler: logging.Handler = (
        RichHandler(console=err, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None)
        if sys.stderr.isatty()
        else logging.StreamHandler()
    )
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def logging_after() -> Iterator[None]:
    """While a text is written to the terminal, log lines wait for its end, lest they stand in the middle of it.

    A warning does not wait, and takes with it those before.
    """
    logger = logging.getLogger("hotsplit")
    shown = logger.handlers[:]
    waiting = [MemoryHandler(_MANY_LINES, flushLevel=logging.WARNING, target=handler) for handler in shown]
    logger.handlers[:] = waiting
    try:
        yield
    finally:
        logger.handlers[:] = shown
        for handler in waiting:
            handler.close()
