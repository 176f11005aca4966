"""What a policy would have done with recorded traffic: hits, bytes read cold, bytes moved, over time.

Stands beside the engines: `Steps + hot mask + policy -> Replayed`. The policy is the one that a run asks (steering.py),
at the same steps and with the same windows, and swaps become visible as the swap protocol makes them (transit.py); only
the banks are left out. Two policies that no run has are replayed for comparison: the least recently used, and the
choice in hindsight.

Shapes: S steps, L MoE layers, E routed experts per layer, K experts per token.

    >>> ids = np.array([[[0]], [[1]], [[1]], [[1]]])
    >>> steps = Steps(experts=ids, starts=np.arange(5), is_decode=np.ones(4, bool), num_experts=2)
    >>> replayed = replay(steps, hot=np.array([[True, False]]), policy=None, options=ReplayOptions(row_bytes=(100,)))
    >>> replayed.hit_rate, replayed.cold_bytes_per_step, oracle(steps, hot=np.array([[True, False]])).hit_rate
    (0.25, 75.0, 0.75)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError
from hotsplit.plan.counters import PHASES, Counters
from hotsplit.plan.evaluate import oracle_reachable
from hotsplit.plan.rebalance import Swap
from hotsplit.plan.replay import Steps, count_steps
from hotsplit.plan.steering import Policy, Steering
from hotsplit.plan.transit import Move, Placement, Transit

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How a replay runs."""

    row_bytes: tuple[int, ...]
    """Bytes of one row per layer, [L]."""
    dyn_steps: int = 2000
    """Steps between updates; >= 1."""
    placement: Placement = "inclusive"
    """When swaps become visible: a name of transit.PLACEMENTS."""
    window_steps: int | None = None
    """Steps of one window of the result; None for one window."""
    on_progress: Progress | None = None
    """Told steps done and in all."""

    def __post_init__(self) -> None:
        for name, value in (("dyn_steps", self.dyn_steps), ("window", self.window_steps)):
            if value is not None and value < 1:
                raise ConfigError(name, got=repr(value), wanted="an integer >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What happened in one window of a replay."""

    first_step: int
    """Its first step."""
    steps: int
    """How many."""
    tokens: int
    """Tokens of both phases."""
    hit_rate: float
    """Routed pairs served hot / all, of both phases."""
    byte_hit_rate: float | None
    """Touched hot bytes / touched bytes, summed over steps; None where that is not known."""
    oracle: float | None
    """Hit rate of the window's best experts in hindsight, as many per layer as are hot; None where nobody asked."""
    cold_bytes_per_step: float | None
    """Bytes of distinct cold experts that a step touches, on average; None where that is not known."""
    moved_bytes: int
    """Row bytes that swaps copied into fast memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A swap, and when it was asked for."""

    step: int
    """Steps that had run."""
    swap: Swap
    """Which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A replay's result."""

    parts: tuple[Part, ...]
    """Windows in order; the whole is in the other fields."""
    hit_rate: float
    """Routed pairs served hot / all."""
    byte_hit_rate: float | None
    """Touched hot bytes / touched bytes."""
    cold_bytes_per_step: float | None
    """Unique cold bytes of a step, on average."""
    hot_bytes_per_step: float | None = None
    """The same of hot experts."""
    moved_bytes: int
    """Row bytes that swaps copied into fast memory."""
    steps: int
    """Steps played."""
    tokens: int
    """Tokens played."""
    hits: int
    """Routed pairs served hot."""
    pairs: int
    """All routed pairs."""
    asked: tuple[Chosen, ...] = ()
    """Swaps that were taken, in order."""
    done: int = 0
    """Swaps that were completed."""
    refused: int = 0
    """Swaps that found their layer busy."""
    updates: int = 0
    """Updates."""
    shifts: tuple[int, ...] = ()
    """Steps at which the policy saw the traffic shift."""
    hot: npt.NDArray[np.bool_] | None = None
    """Which experts are hot at the end, [L, E], bool."""


@dataclass(kw_only=True, slots=True)
class _Tape:
    """What a replay writes down on its way."""

    asked: list[Chosen] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    done: int = 0
    refused: int = 0
    updates: int = 0
    moved_bytes: int = 0


def replay(steps: Steps, *, hot: npt.NDArray[np.bool_], policy: Policy | None, options: ReplayOptions) -> Replayed:
    """Play steps against a policy, as a run would.

    Args:
        steps: The traffic.
        hot: Which experts are hot at the start, [L, E], bool.
        policy: Chooses swaps; None for a static plan.
        options: How.

    Returns:
        Hits, bytes and swaps, in all and per window.

    Raises:
        ConfigError: The hot mask or the row bytes are of another shape than the traffic.
    """
    player, readings = _played(steps, hot=hot, policy=policy, options=options)
    return player.result(readings)


def oracle(steps: Steps, *, hot: npt.NDArray[np.bool_], window_steps: int | None = None) -> Replayed:
    """The best experts in hindsight, as many per layer as are hot: of the whole replay, and of each window for itself.

    Args:
        steps: The traffic.
        hot: Which experts are hot at the start, [L, E], bool; only how many per layer matters.
        window_steps: Steps of one window; None for one window.

    Returns:
        Hit rates; each window's is that of its own best experts, so their mean is more than the whole's.
    """
    options = ReplayOptions(row_bytes=(1,) * steps.num_layers, window_steps=window_steps)
    player, readings = _played(steps, hot=hot, policy=None, options=options)
    static = player.result(readings)
    best = _oracle(readings[-1][0], before=readings[0][0], hot=hot) or 0.0
    parts = tuple(
        replace(part, hit_rate=part.oracle or 0.0, byte_hit_rate=None, cold_bytes_per_step=None)
        for part in static.parts
    )
    return replace(
        static,
        parts=parts,
        hit_rate=best,
        hits=round(best * static.pairs),
        byte_hit_rate=None,
        cold_bytes_per_step=None,
        hot_bytes_per_step=None,
    )


def _played(
    steps: Steps, *, hot: npt.NDArray[np.bool_], policy: Policy | None, options: ReplayOptions
) -> tuple[_Player, list[tuple[Counters, int]]]:
    """A replay that has run, and the readings at the edges of its windows."""
    _require_shapes(steps, hot=hot, row_bytes=options.row_bytes)
    player = _Player(steps, hot=hot, policy=policy, options=options)
    readings = [player.reading()]
    for edge in edges(len(steps), window_steps=options.window_steps):
        player.play_to(edge)
        readings.append(player.reading())
    return player, readings


class _Player:
    """One replay under way."""

    def __init__(
        self, steps: Steps, *, hot: npt.NDArray[np.bool_], policy: Policy | None, options: ReplayOptions
    ) -> None:
        self._steps, self._options = steps, options
        self._hot_LE = np.array(hot, dtype=bool)
        self._counters = Counters.zeros(self._hot_LE.shape)
        self._steering = Steering(self._counters, dyn_steps=options.dyn_steps, policy=policy)
        self._transit = Transit(placement=options.placement)
        self._tape = _Tape()

    def reading(self) -> tuple[Counters, int]:
        """Counters and moved bytes as they stand."""
        return self._counters.copy(), self._tape.moved_bytes

    def play_to(self, edge: int) -> None:
        """Play until so many steps have run: a tick before every step, or before every run of steps without an event."""
        while self._counters.steps < edge:
            first = self._counters.steps
            last = min(first + self._tick(), edge)
            count_steps(
                self._steps,
                self._counters,
                first=first,
                last=last,
                hot=self._hot_LE,
                row_bytes=self._options.row_bytes,
            )
            if self._options.on_progress is not None:
                self._options.on_progress(last, len(self._steps))

    def _tick(self) -> int:
        """What comes between two steps of a run; and the steps until a tick can do anything again."""
        if self._steering.policy is None:
            return len(self._steps)
        self._apply(self._transit.tick())
        steps = self._counters.steps
        if self._steering.is_look_due(steps):
            is_update = self._steering.is_update_due(steps)
            self._look(self._steering.policy)
            if is_update:
                self._tape.updates += 1
                self._steering.updated(self._counters)
        return max(self._steering.steps_to_look(steps), 1) if self._transit.is_idle() else 1

    def _look(self, policy: Policy) -> None:
        busy, tape, steps = self._transit.busy(), self._tape, self._counters.steps
        shifts = policy.num_shifts
        for swap in self._steering.look(self._counters, hot=self._hot_LE, busy=busy):
            if swap.layer_id not in busy and self._transit.request(swap):
                tape.asked.append(Chosen(step=steps, swap=swap))
            else:
                tape.refused += 1
        if policy.num_shifts > shifts:
            tape.shifts.append(steps)
        self._apply(self._transit.settle())

    def _apply(self, moves: Sequence[Move]) -> None:
        for move in moves:
            swap = move.swap
            if move.comes_in:
                self._hot_LE[swap.layer_id, swap.expert_in] = True
            if move.goes_out:
                self._hot_LE[swap.layer_id, swap.expert_out] = False
                self._tape.done += 1
                self._tape.moved_bytes += self._options.row_bytes[swap.layer_id]

    def result(self, readings: Sequence[tuple[Counters, int]]) -> Replayed:
        """All that was written down."""
        tape, counters = self._tape, self._counters
        whole = self._part(readings[0], readings[-1])
        return Replayed(
            parts=tuple(self._part(*pair) for pair in itertools.pairwise(readings)),
            hit_rate=whole.hit_rate,
            byte_hit_rate=whole.byte_hit_rate,
            cold_bytes_per_step=whole.cold_bytes_per_step,
            hot_bytes_per_step=sum(counters.touched_hot_bytes.values()) / max(counters.steps, 1),
            moved_bytes=tape.moved_bytes,
            steps=counters.steps,
            tokens=whole.tokens,
            hits=sum(counters.hits.values()),
            pairs=sum(int(counters.counts[phase].sum()) for phase in PHASES),
            asked=tuple(tape.asked),
            done=tape.done,
            refused=tape.refused,
            updates=tape.updates,
            shifts=tuple(tape.shifts),
            hot=self._hot_LE.copy(),
        )

    def _part(self, before: tuple[Counters, int], after: tuple[Counters, int]) -> Part:
        old, new = before[0], after[0]
        pairs = sum(int(new.counts[phase].sum() - old.counts[phase].sum()) for phase in PHASES)
        hits, hot, cold, tokens = (
            sum(getattr(new, name)[phase] - getattr(old, name)[phase] for phase in PHASES)
            for name in ("hits", "touched_hot_bytes", "touched_cold_bytes", "tokens")
        )
        steps = new.steps - old.steps
        return Part(
            first_step=old.steps,
            steps=steps,
            tokens=tokens,
            hit_rate=hits / pairs if pairs else 0.0,
            byte_hit_rate=hot / (hot + cold) if hot + cold else None,
            oracle=_oracle(new, before=old, hot=self._hot_LE),
            cold_bytes_per_step=cold / steps if steps else None,
            moved_bytes=after[1] - before[1],
        )


def _oracle(after: Counters, *, before: Counters, hot: npt.NDArray[np.bool_]) -> float | None:
    """Hit rate of the best experts for what was counted between two readings; None for nothing."""
    counts_LE = sum((after.counts[phase] - before.counts[phase] for phase in PHASES), np.zeros(hot.shape, np.int64))
    if not counts_LE.any():
        return None
    return oracle_reachable(hot.sum(axis=1), counts=counts_LE.astype(np.float64))


def edges(num_steps: int, *, window_steps: int | None) -> list[int]:
    """Where windows end.

    Args:
        num_steps: Of the replay.
        window_steps: Of one window; None for one window.
    """
    if window_steps is None:
        return [num_steps]
    return [*range(window_steps, num_steps, window_steps), num_steps]


def _require_shapes(steps: Steps, *, hot: npt.NDArray[np.bool_], row_bytes: Sequence[int]) -> None:
    wanted = (steps.num_layers, steps.num_experts)
    if hot.shape != wanted or len(row_bytes) != wanted[0]:
        raise ConfigError("the hot mask and row bytes", got=f"{hot.shape}, {len(row_bytes)}", wanted=f"{wanted}")
