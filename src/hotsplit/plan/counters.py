"""What is counted while a model runs, and windows: differences of two readings.

Stands between routing and policy: `routed ids -> Counters -> Window -> policy`. A live run and a replay of a trace fill
the same counters, so that both ask the same policy the same question.

Shapes: L MoE layers, E experts.

    >>> before = Counters.zeros((1, 2))
    >>> after = Counters(
    ...     counts={"decode": np.array([[3, 1]]), "prefill": np.zeros((1, 2), np.int64)},
    ...     tokens={"decode": 4, "prefill": 0}, hits={"decode": 3, "prefill": 0},
    ...     touched_hot_bytes={"decode": 30, "prefill": 0}, touched_cold_bytes={"decode": 10, "prefill": 0}, steps=4)
    >>> window = window_between(before, after)
    >>> window.tokens, window.hit_ratio, window.byte_hit_ratio, window.cold_bytes
    (4, 0.75, 0.75, 10)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")


@dataclass(kw_only=True, slots=True)
class Counters:
    """All that is counted; every number only grows."""

    counts: dict[Phase, npt.NDArray[np.int64]]
    """Routed pairs per phase, [L, E], int64."""
    tokens: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Routed tokens per phase, padding left out."""
    hits: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Pairs per phase whose expert was hot when they were routed."""
    touched_hot_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Row bytes of the distinct hot experts touched, summed over steps."""
    touched_cold_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Row bytes of the distinct cold experts touched, summed over steps: what crossed the slow link, but for the next."""
    kept_bytes: dict[Phase, int] | None = None
    """Of touched_cold_bytes, those of rows that still lay in a slot; None where there are no slots."""
    steps: int = 0
    """Steps with at least one routed layer."""

    @classmethod
    def zeros(cls, shape: tuple[int, int], *, has_slots: bool = False) -> Counters:
        """Nothing counted yet.

        Args:
            shape: Layers and experts.
            has_slots: Whether cold rows may stay in slots.
        """
        counts: dict[Phase, npt.NDArray[np.int64]] = {phase: np.zeros(shape, np.int64) for phase in PHASES}
        return cls(counts=counts, kept_bytes=dict.fromkeys(PHASES, 0) if has_slots else None)

    def copy(self) -> Counters:
        """A reading, to take differences from."""
        return Counters(
            counts={phase: counts.copy() for phase, counts in self.counts.items()},
            tokens=dict(self.tokens),
            hits=dict(self.hits),
            touched_hot_bytes=dict(self.touched_hot_bytes),
            touched_cold_bytes=dict(self.touched_cold_bytes),
            kept_bytes=None if self.kept_bytes is None else dict(self.kept_bytes),
            steps=self.steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What happened between two readings, in the phase that counts."""

    phase: Phase
    """Decode; prefill only where there was no decode."""
    counts: npt.NDArray[np.int64]
    """Routed pairs, [L, E], int64."""
    tokens: int
    """Routed tokens."""
    steps: int
    """Engine steps, of both phases."""
    cold_bytes: int
    """Row bytes of the distinct cold experts touched, summed over steps."""
    hit_ratio: float | None
    """Hits / pairs; None for an empty window."""
    byte_hit_ratio: float | None
    """Touched hot bytes / touched bytes; None for an empty window."""
    kept_ratio: float | None = None
    """Touched cold bytes that lay in a slot / touched bytes; None for an empty window, and where there are no slots."""


def window_between(before: Counters, after: Counters) -> Window:
    """The difference of two readings, in decode, or in prefill where there was no decode.

    Args:
        before: The earlier reading.
        after: The later one.
    """
    tokens = {phase: after.tokens[phase] - before.tokens[phase] for phase in PHASES}
    phase: Phase = "decode" if tokens["decode"] or not tokens["prefill"] else "prefill"
    counts_LE = after.counts[phase] - before.counts[phase]
    pairs = int(counts_LE.sum())
    hot_bytes = after.touched_hot_bytes[phase] - before.touched_hot_bytes[phase]
    cold_bytes = after.touched_cold_bytes[phase] - before.touched_cold_bytes[phase]
    touched, kept = hot_bytes + cold_bytes, None
    if before.kept_bytes is not None and after.kept_bytes is not None:
        kept = after.kept_bytes[phase] - before.kept_bytes[phase]
    return Window(
        phase=phase,
        counts=counts_LE,
        tokens=tokens[phase],
        steps=after.steps - before.steps,
        cold_bytes=cold_bytes,
        hit_ratio=(after.hits[phase] - before.hits[phase]) / pairs if pairs else None,
        byte_hit_ratio=hot_bytes / touched if touched else None,
        kept_ratio=kept / touched if touched and kept is not None else None,
    )
