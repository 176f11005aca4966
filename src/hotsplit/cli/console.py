"""What commands print, and how they end.

Results go to stdout (a table, a text, or with --json one object), notes and progress to stderr. Errors are one line
and the exit code of their class.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hotsplit.notices import Notice

_WIDTH = 1000
"""Wider than any table: a terminal wraps what is too long for it, and nothing is cut off."""

# What is printed is data (file names, texts, domains): no markup and no :emoji: codes are read out of it.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=_WIDTH)
"""Results."""
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
"""Notes, warnings, progress."""


def print_json(value: object) -> None:
    """One object on stdout, keys in a stable order.

    Args:
        value: Anything that JSON can hold.
    """
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def say(notices: Iterable[Notice]) -> None:
    """Notices, each once and one a line, on stderr.

    Args:
        notices: In order.
    """
    for text in dict.fromkeys(str(notice) for notice in notices):
        note(text)


def note(text: str) -> None:
    """A line on stderr, plain text.

    Args:
        text: Printed as it is.
    """
    err.print(text)


def table(title: str, *, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain aligned table on stdout: text left, numbers right.

    Args:
        title: On a line of its own above it; empty for none but the line.
        columns: Headings; the first column is text.
        rows: Cells as text.
    """
    out.print(title, style="bold")
    grid = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right", header_style="dim", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    out.print(grid)


def rate(value: float | None) -> str:
    """A ratio in [0, 1] with three places.

    Args:
        value: None prints as a dash.
    """
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, on stderr, gone when done.

    Args:
        description: What takes so long. Where stderr is no terminal nothing is shown.

    Yields:
        A function that is told done and total.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


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
