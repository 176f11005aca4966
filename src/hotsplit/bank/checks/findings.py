"""What a check finds: figures beside their bounds, proofs that hold or do not, facts about the machine.

>>> figure = Figure(name="reads", value=45e9, unit="bytes/s", bound=50e9, bound_is="copies", goal=Goal(least=0.9))
>>> figure.ratio, figure.meets_goal, show(figure.value, unit="bytes/s"), str(figure.goal)
(0.9, True, '45.0 GB/s', '>= 0.9')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hotsplit.errors import BankError

Unit: TypeAlias = Literal["bytes/s", "s", "steps/s", "ratio", "nodes"]


class NotMeasured(BankError):  # noqa: N818 - it is an answer, and no error of anybody's
    """A check, or what is left of it, cannot be done on this machine or in this time; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What a figure's ratio to its bound shall be; one of both is given."""

    least: float | None = None
    """The smallest ratio."""
    most: float | None = None
    """The largest ratio."""

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio reaches the goal.

        Args:
            ratio: Figure / bound.
        """
        return ratio >= (self.least or 0) and ratio <= (math.inf if self.most is None else self.most)

    def __str__(self) -> str:
        return f"<= {self.most:g}" if self.least is None else f">= {self.least:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number beside what physics, or the copy engine in the same run, allows."""

    name: str
    """What was measured."""
    value: float | None
    """In its unit; None where it was not measured."""
    unit: Unit
    """Of value and bound."""
    bound: float | None = None
    """What is possible, or what is wanted at most; None where it is not known."""
    bound_is: str = ""
    """Where the bound comes from."""
    goal: Goal | None = None
    """What the ratio of both shall be; None where nothing was promised."""
    reason: str = ""
    """Why there is no value."""

    @property
    def ratio(self) -> float | None:
        """Value / bound; None where one of them is not known."""
        return self.value / self.bound if self.value is not None and self.bound else None

    @property
    def meets_goal(self) -> bool | None:
        """None where there is no goal, or nothing to hold against it."""
        return None if self.goal is None or self.ratio is None else self.goal.is_met(self.ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A claim about bytes and bits, which a dry run proves as well; one that does not hold fails the whole run."""

    name: str
    """What is claimed."""
    holds: bool
    """Whether it was so."""
    detail: str = ""
    """Counts behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """What the machine says of itself, or which way was chosen on it."""

    name: str
    """What it is about."""
    value: Any
    """Plain JSON."""


Finding: TypeAlias = Figure | Proof | Fact


def not_measured(name: str, *, unit: Unit, reason: str) -> Figure:
    """A figure that could not be had.

    Args:
        name: What would have been measured.
        unit: Of it.
        reason: Why not.
    """
    return Figure(name=name, value=None, unit=unit, reason=reason)


def show(value: float | None, *, unit: Unit) -> str:
    """A value as a person reads it.

    Args:
        value: In base units; None for none.
        unit: Of it.
    """
    if value is None:
        return "-"
    if unit == "bytes/s":
        return f"{value / 1e9:.1f} GB/s"
    if unit == "s":
        return f"{value * 1e6:.2f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms"
    return f"{value:.4g}" if unit in ("ratio", "nodes") else f"{value:.1f} {unit}"
