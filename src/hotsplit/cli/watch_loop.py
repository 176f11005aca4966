"""Where the frames of `hotsplit top` go: a screen of their own, lines, or objects; and how watching ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hotsplit.cli import console
from hotsplit.cli.watch_view import BLOCKS, PLAIN, plain, screen
from hotsplit.cli.watching import Frame, frame_json

REPEATED_EVERY: Final = timedelta(seconds=30)
"""From one word on a failure to the next, where it stays the same."""
_TALL = 1000
"""Lines of a screen that scrolls."""


def show_once(frame: Frame, *, as_json: bool) -> None:
    """One frame, which stays where it was printed.

    Args:
        frame: It.
        as_json: As an object.
    """
    if as_json:
        console.print_json(frame_json(frame))
    elif console.out.is_terminal:
        terminal = _terminal()
        terminal.print(screen(frame, width=terminal.width, height=_TALL, bars=_bars(terminal)))
    else:
        console.out.print(plain(frame))


def show_all(frames: Iterator[Frame], *, as_json: bool) -> None:
    """Every frame as it comes, until somebody presses Ctrl-C: that is how watching ends, and no failure.

    Args:
        frames: Without an end.
        as_json: As objects, one a line.
    """
    try:
        if as_json or not console.out.is_terminal or console.out.is_dumb_terminal:
            _print_all(frames, as_json=as_json)
        else:
            _draw_all(frames)
    except KeyboardInterrupt:
        pass


def _print_all(frames: Iterator[Frame], *, as_json: bool) -> None:
    error, said_at = "", None
    for frame in frames:
        # The same failure again is no news, but for ever silent is what hangs too.
        if frame.error and (frame.error != error or said_at is None or frame.at - said_at >= REPEATED_EVERY):
            console.note(f"hotsplit: {frame.error}; asking again")
            said_at = frame.at
        error = frame.error
        if as_json:
            console.out.print(json.dumps(frame_json(frame), allow_nan=False))
        elif not frame.error:
            console.out.print(plain(frame))


def _draw_all(frames: Iterator[Frame]) -> None:
    """Draw over and over, on the terminal's other screen: what was there before is there again afterwards."""
    terminal = _terminal()
    with Live(Text("asking the server ..."), console=terminal, screen=True, auto_refresh=False) as live:
        for frame in frames:
            view = screen(frame, width=terminal.width, height=terminal.height, bars=_bars(terminal))
            live.update(view, refresh=True)


def _terminal() -> Console:
    """Of the terminal's own width, unlike the one that data is printed to."""
    return Console(highlight=False, markup=False, emoji=False)


def _bars(terminal: Console) -> str:
    return BLOCKS if terminal.encoding.lower().startswith("utf") else PLAIN
