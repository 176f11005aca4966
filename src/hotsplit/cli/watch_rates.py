"""From readings of /metrics to what is shown: `readings -> courses, one per rank -> figures, per rank and in all`.

The ranks of a vLLM server write their numbers every five seconds, so most readings repeat the one before, and a naive
difference of two is zero, or a multiple of the truth. Only *changes* count here: a rate is what two changes differ by,
over the time between them. When the first state was written nobody has seen, so it gives ratios and no rates.

    readings (s)   0    2    4    6    8    10   12
    steps          40   40   90   90   140  140  140
    change         ?         *         *                rate = (140 - 90) / (8 - 4), known from the second on
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hotsplit.cli.scrape import Numbers, RankNumbers, Reading
from hotsplit.metrics import METRICS

SPAN_S: Final = 20.0
"""Rates are over at least so many seconds, once there are so many: a change is seen up to an interval after it happened,
which at two seconds is a tenth of it."""
IDLE_AFTER_S: Final = 12.0
"""Without a change: two of the periods at which vLLM's ranks write, and something."""

_COUNTERS: Final = tuple(
    name.removeprefix("hotsplit_").removesuffix("_total")
    for name, metric in METRICS.items()
    if metric.kind == "counter"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Swaps:
    """Swaps since the server started."""

    done: int | None
    """Published."""
    refused: int | None
    """Their layer was busy."""
    failed: int | None
    """Their copy failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is shown of one rank, or of all; None is unknown."""

    hit_ratio: float | None
    """Of routed pairs between two changes: of decode, and of prefill where there was no decode."""
    byte_hit_ratio: float | None
    """Touched bytes that were hot, of all touched, between two changes; both phases."""
    kept_ratio: float | None
    """Touched bytes that lay in slots for cold rows, likewise; 0 where there are none."""
    hit_ratio_window: float | None
    """Of the last update's window, as the server shows it, and so the next four; of all: the mean of the ranks."""
    byte_hit_ratio_window: float | None
    """The same of bytes."""
    kept_ratio_window: float | None
    """The same of bytes that lay in slots; None also where there are no slots."""
    oracle_ratio_window: float | None
    """What the best experts for that window would have had."""
    oracle_gap_ratio: float | None
    """What the window lacks to that."""
    drift_ratio: float | None
    """Distance of the live shares from the plan's."""
    cold_bytes_per_step: float | None
    """Bytes of distinct cold experts per step; of all: the sum of the ranks."""
    tokens_per_s: float | None
    """Decode and prefill; of all: the most of any rank, since every rank sees every token."""
    decode_tokens_per_s: float | None
    """Of these, decode."""
    prefill_tokens_per_s: float | None
    """Of these, prefill."""
    steps_per_s: float | None
    """Engine steps; of all: the most of any rank."""
    swaps: Swaps
    """Since the server started; of all: the sum."""
    swap_bytes_per_s: float | None
    """What swaps copy; of all: the sum."""
    update_failures: int | None
    """Since the server started; of all: the sum."""
    update_seconds: float | None
    """What the last update cost; of all: the most of any rank."""
    hot_bytes: int | None
    """In fast memory; of all: the sum, as the next two."""
    host_bytes: int | None
    """Cold rows in slow memory."""
    budget_bytes: int | None
    """What fast memory may hold."""
    span_s: float | None
    """Seconds between the two changes; None while no rates are known."""
    state: str
    """"live", "idle" (no change for a while), "waiting" (no rates yet) or "gone" (no longer in the answer)."""

    @property
    def has_slots(self) -> bool:
        """Whether cold rows are known to stay in slots."""
        return self.kept_ratio_window is not None or bool(self.kept_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """A rank's numbers, and when they were first seen."""

    seen_s: float
    """Seconds of a steady clock."""
    is_timed: bool
    """Whether the change happened about then: the reading before was a good one, and had other numbers."""
    numbers: Numbers
    """All of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """What a rank did between two changes, or none if it did nothing yet."""

    seconds: float | None
    """Between them; None where one of them is not timed; 0.0 of an idle rank, which has rates of zero."""
    grown: Numbers
    """What every counter gained; empty without two states."""
    now: Numbers
    """All numbers at the last reading."""


@dataclass(slots=True)
class Course:
    """How one rank's numbers went. Mutable."""

    states: deque[_State] = field(default_factory=deque)
    """Changes, oldest first, as many as rates need; only the first may be untimed."""
    now: RankNumbers = field(default_factory=lambda: RankNumbers(numbers={}, info={}))
    """The last reading's."""
    is_gone: bool = False
    """Whether the last reading had it no more."""
    read_s: float = 0.0
    """When the last reading was."""

    def add(self, ranks: RankNumbers, *, at_s: float, is_timed: bool) -> bool:
        """Take in a reading.

        Args:
            ranks: The rank's numbers.
            at_s: When they were read.
            is_timed: Whether a change since the last state was a change since the last reading.

        Returns:
            Whether the counters have fallen: the server was started again.
        """
        is_timed = is_timed and bool(self.states) and not self.is_gone
        was_idle = self.is_idle(self.read_s)
        self.now, self.is_gone, self.read_s = ranks, False, at_s
        counters = _counters(ranks.numbers)
        last = self.states[-1].numbers if self.states else None
        if counters == last:
            return False
        has_fallen = last is not None and any(counters.get(key, 0.0) < value for key, value in last.items())
        is_timed = is_timed and not has_fallen
        if not is_timed:
            self.states.clear()
        elif was_idle:
            # When the work began again nobody knows; a rate from before the rest would be too low.
            self.states = deque([replace(self.states[-1], is_timed=False)])
        self.states.append(_State(seen_s=at_s, is_timed=is_timed, numbers=counters))
        while len(self.states) > 2 and at_s - self.states[1].seen_s >= SPAN_S:
            self.states.popleft()
        return has_fallen

    def restart(self) -> None:
        """Forget the states: what comes next is another server's."""
        self.states.clear()

    def is_idle(self, at_s: float) -> bool:
        """Whether nothing has changed for a while.

        Args:
            at_s: Now.
        """
        return bool(self.states) and at_s - self.states[-1].seen_s >= IDLE_AFTER_S

    def span(self, at_s: float) -> _Span:
        """What it did of late.

        Args:
            at_s: Now.
        """
        seconds: float | None = None
        grown: Numbers = {}
        if len(self.states) > 1:
            timed, last = [state for state in self.states if state.is_timed], self.states[-1]
            first = timed[0] if len(timed) > 1 else self.states[0]
            grown = {key: value - first.numbers.get(key, 0.0) for key, value in last.numbers.items()}
            seconds = last.seen_s - first.seen_s if first.is_timed else None
        return _Span(seconds=0.0 if self.is_idle(at_s) else seconds, grown=grown, now=self.now.numbers)


def _counters(numbers: Numbers) -> Numbers:
    return {key: value for key, value in numbers.items() if key.split("/")[0] in _COUNTERS}


def figures_of(course: Course, *, at_s: float) -> Figures:
    """One rank's figures.

    Args:
        course: Its course.
        at_s: Now.
    """
    span = course.span(at_s)
    if course.is_gone:
        return _figures([span], state="gone")
    return _figures([span], state=_state_of([span], is_idle=course.is_idle(at_s)))


def figures_of_all(courses: Mapping[int, Course], *, at_s: float) -> Figures:
    """All ranks' figures as one; those of a rank that is gone are left out.

    Args:
        courses: By rank.
        at_s: Now.
    """
    there = [course for course in courses.values() if not course.is_gone]
    spans = [course.span(at_s) for course in there]
    return _figures(spans, state=_state_of(spans, is_idle=all(course.is_idle(at_s) for course in there)))


def _state_of(spans: Sequence[_Span], *, is_idle: bool) -> str:
    if not spans:
        return "gone"
    if is_idle:
        return "idle"
    return "waiting" if any(span.seconds is None for span in spans) else "live"


def _figures(spans: Sequence[_Span], *, state: str) -> Figures:
    tokens = ("tokens/decode", "tokens/prefill")
    hit, oracle = _mean(spans, "hit_ratio_window"), _mean(spans, "oracle_ratio_window")
    seconds = [span.seconds for span in spans if span.seconds]
    cold = [_ratio(span.grown.get("touched_bytes/cold"), span.grown.get("steps")) for span in spans]
    return Figures(
        hit_ratio=_hit_ratio(spans),
        byte_hit_ratio=_share_of_touched(spans, "touched_bytes/hot"),
        kept_ratio=_share_of_touched(spans, "kept_bytes"),
        hit_ratio_window=hit,
        byte_hit_ratio_window=_mean(spans, "byte_hit_ratio_window"),
        kept_ratio_window=_mean(spans, "kept_ratio_window"),
        oracle_ratio_window=oracle,
        oracle_gap_ratio=None if hit is None or oracle is None else oracle - hit,
        drift_ratio=_mean(spans, "drift_ratio"),
        cold_bytes_per_step=_sum_of(cold),
        tokens_per_s=_most([_rate(span, tokens) for span in spans]),
        decode_tokens_per_s=_most([_rate(span, tokens[:1]) for span in spans]),
        prefill_tokens_per_s=_most([_rate(span, tokens[1:]) for span in spans]),
        steps_per_s=_most([_rate(span, ("steps",)) for span in spans]),
        swaps=Swaps(
            done=_count(spans, "swaps/done"),
            refused=_count(spans, "swaps/refused"),
            failed=_count(spans, "swaps/failed"),
        ),
        swap_bytes_per_s=_sum_of([_rate(span, ("swap_bytes",)) for span in spans]),
        update_failures=_count(spans, "update_failures"),
        update_seconds=_most([span.now.get("update_seconds") for span in spans]),
        hot_bytes=_count(spans, "hot_bytes"),
        host_bytes=_count(spans, "host_bytes"),
        budget_bytes=_count(spans, "budget_bytes"),
        span_s=max(seconds, default=None),
        state=state,
    )


def _hit_ratio(spans: Sequence[_Span]) -> float | None:
    """Of decode, or of prefill where no decode was routed."""
    for phase in ("decode", "prefill"):
        routed = _sum_of([span.grown.get(f"routed_pairs/{phase}") for span in spans if span.grown])
        if routed:
            return _ratio(_sum_of([span.grown.get(f"hit_pairs/{phase}") for span in spans if span.grown]), routed)
    return None


def _share_of_touched(spans: Sequence[_Span], name: str) -> float | None:
    part, hot, cold = (
        _sum_of([span.grown.get(each) for span in spans if span.grown])
        for each in (name, "touched_bytes/hot", "touched_bytes/cold")
    )
    return None if hot is None or cold is None else _ratio(part, hot + cold)


def _rate(span: _Span, names: Sequence[str]) -> float | None:
    """Growth per second; of an idle rank zero, if it has these counters."""
    if span.seconds is None or any(name not in span.now for name in names):
        return None
    return sum(span.grown.get(name, 0.0) for name in names) / span.seconds if span.seconds else 0.0


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _sum(spans: Sequence[_Span], name: str) -> float | None:
    return _sum_of([span.now.get(name) for span in spans])


def _count(spans: Sequence[_Span], name: str) -> int | None:
    total = _sum(spans, name)
    return None if total is None else int(total)


def _sum_of(values: Sequence[float | None]) -> float | None:
    """None where there is none, or where one is not known: a sum of some is no sum."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(spans: Sequence[_Span], name: str) -> float | None:
    total = _sum(spans, name)
    return None if total is None else total / len(spans)


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


class Board:
    """All that was read so far. Mutable.

    Args:
        history: Readings whose figures are kept.
    """

    def __init__(self, *, history: int) -> None:
        self.courses: dict[int, Course] = {}
        self.past: deque[tuple[Mapping[int, Figures], Figures]] = deque(maxlen=history)
        """Figures of the last readings, per rank and in all."""
        self.num_readings, self.num_restarts = 0, 0
        self._started_s: float | None = None
        self._is_broken = True

    def add(self, reading: Reading, *, at_s: float) -> None:
        """Take in an answer.

        Args:
            reading: It.
            at_s: When it came, in seconds of a steady clock.
        """
        is_another = None not in (self._started_s, reading.started_s) and self._started_s != reading.started_s
        self._started_s = reading.started_s
        if is_another:
            for course in self.courses.values():
                course.restart()
        has_fallen = False
        for rank, course in self.courses.items():
            course.is_gone |= rank not in reading.ranks
        for rank, numbers in reading.ranks.items():
            course = self.courses.setdefault(rank, Course())
            has_fallen |= course.add(numbers, at_s=at_s, is_timed=not self._is_broken)
        self.num_restarts += is_another or has_fallen
        self.num_readings += 1
        self._is_broken = False
        self.past.append(
            (
                {rank: figures_of(course, at_s=at_s) for rank, course in self.courses.items()},
                figures_of_all(self.courses, at_s=at_s),
            )
        )

    def miss(self) -> None:
        """An answer did not come: when the next change happened will not be known."""
        self._is_broken = True
