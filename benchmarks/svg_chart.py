"""A small line chart as SVG, without a plotting library: axes, ticks, lines, points and a legend; light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 44, 56
_COLOURS = ("#8a8f98", "#d9822b", "#2f8f4e", "#2b6cb0", "#9b51a8", "#c0392b")
_STYLE = """\
<style>
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #d8dee4 } .axis { stroke: #57606a } .mark { stroke: #57606a; stroke-dasharray: 5 4 }
  .page { fill: #ffffff } .note { fill: #57606a; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .grid { stroke: #30363d } .axis, .mark { stroke: #8b949e } .page { fill: #0d1117 }
    .note { fill: #8b949e }
  }
</style>"""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or a cloud of points."""

    name: str
    """For the legend."""
    points: Sequence[tuple[float, float]]
    """In the axes' units."""
    is_line: bool = True
    """Whether they are joined."""
    is_large: bool = False
    """Whether its points stand out."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Axes, and what is written on them."""

    title: str
    """Above."""
    x_label: str
    """Below."""
    y_label: str
    """At the upper left, over the axis."""
    x_range: tuple[float, float]
    """Least and most."""
    y_range: tuple[float, float]
    """Least and most."""
    x_ticks: Sequence[float]
    """Written out."""
    y_ticks: Sequence[float]
    """Written out, with a line across."""
    is_x_log: bool = False
    """Whether the axis is logarithmic."""
    marks: Sequence[tuple[str, float, str]] = ()
    """Dashed lines: axis, value, words."""
    legend: tuple[float, float] | None = None
    """Its upper right corner, in the axes' units; None for that of the chart."""

    def svg(self, series: Sequence[Series]) -> str:
        """The whole picture.

        Args:
            series: Drawn in order, in colours in order.
        """
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            _STYLE,
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text class="title" x="{LEFT}" y="20">{escape(self.title)}</text>',
            *self._axes(),
            *(self._mark(*mark) for mark in self.marks),
        ]
        for i, one in enumerate(series):
            parts += self._series(one, colour=_COLOURS[i % len(_COLOURS)])
        return "\n".join([*parts, *self._legend(series), "</svg>", ""])

    def _x(self, value: float) -> float:
        low, high = self.x_range
        if self.is_x_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.x_range[0]))
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def _y(self, value: float) -> float:
        low, high = self.y_range
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def _axes(self) -> list[str]:
        left, right = self._x(self.x_range[0]), self._x(self.x_range[1])
        bottom = self._y(self.y_range[0])
        parts = []
        for tick in self.y_ticks:
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        for tick in self.x_ticks:
            x = self._x(tick)
            parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
            parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (left + right) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(self.x_label)}</text>')
        parts.append(f'<text class="note" x="{LEFT}" y="{TOP - 6}">{escape(self.y_label)}</text>')
        return parts

    def _mark(self, axis: str, value: float, words: str) -> str:
        left, right = self._x(self.x_range[0]), self._x(self.x_range[1])
        bottom, top = self._y(self.y_range[0]), self._y(self.y_range[1])
        if axis == "x":
            x = self._x(value)
            line = f'<line class="mark" x1="{x}" x2="{x}" y1="{bottom}" y2="{top}"/>'
            return line + f'<text class="note" x="{x + 5}" y="{top + 12}">{escape(words)}</text>'
        y = self._y(value)
        line = f'<line class="mark" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        return line + f'<text class="note" x="{left + 5}" y="{y - 5}">{escape(words)}</text>'

    def _series(self, series: Series, *, colour: str) -> list[str]:
        places = [(self._x(x), self._y(y)) for x, y in series.points]
        parts = []
        if series.is_line:
            line = " ".join(f"{x},{y}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if not series.is_line or len(places) < 12:
            radius = 7 if series.is_large else 4
            parts += [f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>' for x, y in places]
        return parts

    def _legend(self, series: Sequence[Series]) -> list[str]:
        at = self.legend or (self.x_range[1], self.y_range[1])
        right, top = self._x(at[0]) - 8, self._y(at[1])
        parts = []
        for i, one in enumerate(series):
            y = top + 16 + 19 * i
            parts.append(f'<text x="{right - 20}" y="{y + 4}" text-anchor="end">{escape(one.name)}</text>')
            parts.append(f'<circle cx="{right - 6}" cy="{y}" r="5" fill="{_COLOURS[i % len(_COLOURS)]}"/>')
        return parts
