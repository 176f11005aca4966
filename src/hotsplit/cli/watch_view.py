"""How `hotsplit top` looks: a screen for a terminal of any size, and one plain line for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotsplit.cli.console import printable, rate
from hotsplit.cli.watch_rates import Figures
from hotsplit.cli.watching import Frame
from hotsplit.units import GIB, MIB

BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Rising bars."""
PLAIN: Final = "_.-=+*%#"
"""The same for a terminal that has none."""

_LABEL: Final = 16
"""Columns of the names."""
_LEAST, _MOST = 10, 42
"""Columns of a rank, the blank behind it among them."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One figure of every rank."""

    label: str
    """Its name on the screen."""
    show: Callable[[Figures], str]
    """Its value as text."""
    course: Callable[[Figures], float | None] | None = None
    """What a line of bars below it shows of the last readings."""
    least: float = 0.0
    """A change that fills the bars' height, at least: smaller ones are not made to look large."""
    keep: int = 2
    """Rows with less go first where a screen is too low."""
    is_known: Callable[[Figures], bool] = lambda _: True
    """Whether there is such a thing, of all ranks together; else the row is left out."""


def screen(frame: Frame, *, width: int, height: int, bars: str = BLOCKS) -> Group:
    """A frame for a terminal.

    Args:
        frame: What is known.
        width: Columns.
        height: Lines.
        bars: Eight characters from low to high.
    """
    heading = [*_title(frame, width=width), *_status(frame)]
    if frame.all is None:
        return Group(*heading)
    fit = max(1, (width - _LABEL) // _LEAST - 1)
    shown, hidden = list(frame.ranks)[:fit], list(frame.ranks)[fit:]
    if hidden:
        heading.append(
            _line(f"{len(hidden)} more of {len(frame.ranks)} ranks need a wider terminal, or --json", "yellow")
        )
    columns: list[int | None] = [None, *shown] if len(frame.ranks) > 1 else list(shown)
    wide = min(_MOST, (width - _LABEL) // len(columns))
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    grid.add_column("", width=_LABEL - 1, no_wrap=True)
    for rank in columns:
        title = "all" if rank is None else f"rank {rank}"
        grid.add_column(title, width=wide - 1, justify="right", no_wrap=True, header_style="bold")
    taken = sum(-(-line.cell_len // width) for line in heading)
    for row in _fitting([row for row in _ROWS if row.is_known(frame.all)], lines=height - taken - 1):
        figures = [_of(frame, rank) for rank in columns]
        grid.add_row(row.label, *(row.show(one) for one in figures), style="dim" if frame.error else "")
        if row.course is not None:
            lines = [
                _bars(_past(frame, rank, row.course), width=wide - 1, least=row.least, bars=bars) for rank in columns
            ]
            grid.add_row("", *lines, style="dim" if frame.error else "cyan")
    return Group(*heading, grid)


def plain(frame: Frame) -> str:
    """A frame as one line of the update line's kind, of all ranks together.

    Args:
        frame: What is known.
    """
    figures = frame.all
    start = f"hotsplit top time={frame.at.isoformat(timespec='seconds')}"
    if figures is None:
        return f"{start} state=none"
    parts = {
        "state": figures.state,
        "ranks": str(len(frame.ranks)),
        "hit": _fixed(figures.hit_ratio, 3),
        "byte_hit": _fixed(figures.byte_hit_ratio, 3),
        **({"kept": _fixed(figures.kept_ratio, 3)} if figures.has_slots else {}),
        "window_hit": _fixed(figures.hit_ratio_window, 3),
        "oracle": _fixed(figures.oracle_ratio_window, 3),
        "gap": _fixed(figures.oracle_gap_ratio, 3),
        "drift": _fixed(figures.drift_ratio, 2),
        "cold_mib_per_step": _fixed(figures.cold_bytes_per_step, 3, unit=MIB),
        "tokens_per_s": _fixed(figures.tokens_per_s, 1),
        "swaps": _fixed(figures.swaps.done, 0),
        "refused": _fixed(figures.swaps.refused, 0),
        "failed": _fixed(figures.swaps.failed, 0),
        "update_failures": _fixed(figures.update_failures, 0),
        "hot_gib": _fixed(figures.hot_bytes, 3, unit=GIB),
        "host_gib": _fixed(figures.host_bytes, 3, unit=GIB),
        "budget_gib": _fixed(figures.budget_bytes, 3, unit=GIB),
    }
    return " ".join([start, *(f"{name}={value}" for name, value in parts.items())])


def _fixed(value: float | None, places: int, *, unit: int = 1) -> str:
    return "none" if value is None else f"{value / unit:.{places}f}"


def _title(frame: Frame, *, width: int) -> list[Text]:
    """What is watched: address and time; and what it runs."""
    clock = f"{frame.at.astimezone():%H:%M:%S}"
    name = printable(f"hotsplit top  {frame.url}")
    room = max(width - len(clock) - 1, 1)
    lines = [Text(f"{name[:room]:<{room}} {clock}", style="bold", no_wrap=True)]
    info = next((labels for labels in frame.info.values() if labels), None)
    if info:
        plan = info.get("plan_hash", "?")[:12]
        what = f"{len(frame.ranks)} rank{'s' * (len(frame.ranks) != 1)}, {info.get('mode', '?')}, {info.get('backend', '?')}"
        lines.append(_line(f"{what}, plan {plan}, hotsplit {info.get('version', '?')}"))
    return lines


def _status(frame: Frame) -> list[Text]:
    """How fresh it is, and what is odd."""
    lines = []
    if frame.error:
        lines.append(_line(f"{frame.error}; asking again", "red"))
        if frame.all is not None:
            lines.append(_line(f"what follows is {frame.age_s:.0f} s old", "red"))
    elif frame.all is not None:
        lines.append(_line(_freshness(frame, frame.all)))
    return [*lines, *(_line(note, "yellow") for note in frame.notes)]


def _freshness(frame: Frame, figures: Figures) -> str:
    if frame.num_readings == 1:
        return "waiting for a second reading"
    if figures.state == "waiting":
        return "waiting: rates need two changes, and vLLM's ranks write every five seconds"
    if figures.state == "idle":
        return "idle: nothing has changed for a while; ratios are of the last traffic"
    return f"rates over {figures.span_s or 0:.0f} s"


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _fitting(known: Sequence[_Row], *, lines: int) -> Sequence[_Row]:
    """The rows that so many lines hold: the bars go before the rows, those of less weight first."""
    rows = list(known)
    for keep in (0, 1):
        for row in [row for row in reversed(rows) if row.keep == keep]:
            if _height(rows) > lines:
                rows.remove(row)
    for i in range(len(rows) - 1, -1, -1):
        row = rows[i]
        if row.course is not None and _height(rows) > lines:
            rows[i] = _Row(label=row.label, show=row.show)
    return rows


def _height(rows: Sequence[_Row]) -> int:
    return sum(1 if row.course is None else 2 for row in rows)


def _of(frame: Frame, rank: int | None) -> Figures:
    ranks, together = frame.past[-1]
    return together if rank is None else ranks[rank]


def _past(frame: Frame, rank: int | None, course: Callable[[Figures], float | None]) -> list[float | None]:
    """A figure of the last readings; None where the rank was not there."""
    found = [together if rank is None else ranks.get(rank) for ranks, together in frame.past]
    return [None if figures is None else course(figures) for figures in found]


def _bars(values: Sequence[float | None], *, width: int, least: float, bars: str) -> str:
    """The newest values as bars, between the lowest and the highest of them; a blank for none."""
    shown = values[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    height = max(high - low, least, abs(high) / 20) or 1.0
    return "".join(
        " " if value is None else bars[min(int((value - low) / height * len(bars)), len(bars) - 1)] for value in shown
    )


def _bytes(value: float | None) -> str:
    """Three digits and a unit: "12.1 MiB"."""
    if value is None:
        return "-"
    power = 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    places = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{places}f} {_UNITS[power]}"


def _short(value: float | None) -> str:
    """A count in six characters at most: "9500", "12.3k", "4.5M"."""
    if value is None:
        return "-"
    for least, factor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / factor:.1f}{unit}"
    return f"{value:.0f}"


def _per_second(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else _short(value)


def _swaps(figures: Figures) -> str:
    swaps = figures.swaps
    return "/".join(map(_short, (swaps.done, swaps.refused, swaps.failed)))


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} pt"


_ROWS: Final = (
    _Row(label="hit rate", show=lambda f: rate(f.hit_ratio), course=lambda f: f.hit_ratio, least=0.05),
    _Row(label="byte hit rate", show=lambda f: rate(f.byte_hit_ratio)),
    _Row(label="kept in slots", show=lambda f: rate(f.kept_ratio), is_known=lambda f: f.has_slots),
    _Row(label="cold per step", show=lambda f: _bytes(f.cold_bytes_per_step), course=lambda f: f.cold_bytes_per_step),
    _Row(label="tokens/s", show=lambda f: _per_second(f.tokens_per_s), course=lambda f: f.tokens_per_s),
    _Row(label="  of decode", show=lambda f: _per_second(f.decode_tokens_per_s), keep=1),
    _Row(label="steps/s", show=lambda f: _per_second(f.steps_per_s), keep=0),
    _Row(label="window: hit", show=lambda f: rate(f.hit_ratio_window)),
    _Row(label="  byte hit", show=lambda f: rate(f.byte_hit_ratio_window), keep=1),
    _Row(label="  oracle", show=lambda f: rate(f.oracle_ratio_window)),
    _Row(label="  oracle gap", show=lambda f: _points(f.oracle_gap_ratio)),
    _Row(label="drift", show=lambda f: rate(f.drift_ratio)),
    _Row(label="swaps d/r/f", show=_swaps),
    _Row(label="  copied/s", show=lambda f: _bytes(f.swap_bytes_per_s), keep=1),
    _Row(
        label="update", show=lambda f: "-" if f.update_seconds is None else f"{1000 * f.update_seconds:.1f} ms", keep=0
    ),
    _Row(label="failed updates", show=lambda f: _short(f.update_failures)),
    _Row(label="hot", show=lambda f: _bytes(f.hot_bytes)),
    _Row(label="budget", show=lambda f: _bytes(f.budget_bytes)),
    _Row(label="host (cold)", show=lambda f: _bytes(f.host_bytes)),
)
