"""The loop of `hotsplit top`: `server -> reading -> board -> frame`, again and again, whatever the server does.

What can never work (a wrong address, no key, another program) ends it at the first reading. A server that is not up yet,
or goes away later, is said once and asked again: it may come back, as another process with counters from zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from hotsplit.cli.scrape import Reading, ScrapeError
from hotsplit.cli.watch_rates import IDLE_AFTER_S, Board, Figures

ONCE_EVERY_S: Final = 0.5
"""Between two readings of --once, at most: the more often, the better it is known when the numbers changed."""
_MOST_NAMED: Final = 16
"""Ranks that a note names; of more it has the number."""
ONCE_MORE_S: Final = 3 * IDLE_AFTER_S
"""What --once waits beyond its interval for ranks that neither settle nor fall idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Time, and its passing; tests have another."""

    steady: Callable[[], float] = time.monotonic
    """Seconds."""
    sleep: Callable[[float], None] = time.sleep
    """For so many seconds."""
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    """Of the day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What is known at one moment."""

    url: str
    """Of the server."""
    at: datetime
    """When it was asked."""
    error: str
    """Why it did not answer; empty if it did."""
    age_s: float
    """Since the last answer."""
    num_readings: int
    """Answers so far."""
    num_restarts: int
    """How often the server was seen to have been started again."""
    info: Mapping[int, Mapping[str, str]]
    """Labels of hotsplit_info, by rank."""
    past: Sequence[tuple[Mapping[int, Figures], Figures]]
    """Figures of the last answers, per rank and in all, the newest last; empty before the first."""
    notes: tuple[str, ...]
    """What is odd about it."""

    @property
    def ranks(self) -> Mapping[int, Figures]:
        """The newest figures by rank."""
        return dict(sorted(self.past[-1][0].items())) if self.past else {}

    @property
    def all(self) -> Figures | None:
        """The newest figures of all ranks together; None before the first answer."""
        return self.past[-1][1] if self.past else None


def frames(
    ask: Callable[[], Reading], *, url: str, every_s: float, history: int, clock: Clock = Clock()
) -> Generator[Frame, None, None]:
    """Ask for ever, at even intervals.

    Args:
        ask: Gives a reading.
        url: Of the server.
        every_s: From one question to the next; later where an answer takes longer.
        history: Answers that are kept.
        clock: Time.

    Yields:
        A frame per question.

    Raises:
        ScrapeError: The first answer shows that there will never be a right one.
    """
    board, answered_s = Board(history=history), 0.0
    while True:
        asked_s, at, failure = clock.steady(), clock.now(), ""
        try:
            reading = ask()
        except ScrapeError as error:
            if error.is_final and not board.num_readings:
                raise
            failure = str(error)
            board.miss()
        else:
            answered_s = clock.steady()
            board.add(reading, at_s=answered_s)
        yield Frame(
            url=url,
            at=at,
            error=failure,
            age_s=clock.steady() - answered_s if board.num_readings else 0.0,
            num_readings=board.num_readings,
            num_restarts=board.num_restarts,
            info={rank: course.now.info for rank, course in sorted(board.courses.items())},
            past=tuple(board.past),
            notes=_notes(board),
        )
        clock.sleep(max(0.0, every_s - (clock.steady() - asked_s)))


def one_frame(ask: Callable[[], Reading], *, url: str, least_s: float, clock: Clock = Clock()) -> Frame:
    """One frame with rates: as soon as every rank has them over long enough, or is idle.

    Args:
        ask: Gives a reading.
        url: Of the server.
        least_s: Between the two changes that a rate is of.
        clock: Time.

    Raises:
        ScrapeError: The server does not answer, once.
    """
    failed: list[ScrapeError] = []

    def ask_or_end() -> Reading:
        try:
            return ask()
        except ScrapeError as error:
            failed.append(error)
            raise

    end_s = clock.steady() + least_s + ONCE_MORE_S
    with closing(frames(ask_or_end, url=url, every_s=min(least_s, ONCE_EVERY_S), history=1, clock=clock)) as asked:
        for frame in asked:
            if failed:
                raise failed[0]
            if clock.steady() >= end_s or _is_settled(frame, least_s=least_s):
                return frame
    raise ScrapeError(url, got="no reading")


def _is_settled(frame: Frame, *, least_s: float) -> bool:
    return all(
        figures.state in ("idle", "gone") or (figures.span_s is not None and figures.span_s >= least_s)
        for figures in frame.ranks.values()
    )


def _notes(board: Board) -> tuple[str, ...]:
    """What a person should look into, most urgent first."""
    notes = []
    gone = [rank for rank, course in board.courses.items() if course.is_gone]
    if gone:
        notes.append(f"{_named(gone)}: no longer in the answer")
    missing = sorted(set(range(max(board.courses, default=-1) + 1)) - set(board.courses))
    if missing:
        notes.append(f"{_named(missing)}: never in an answer, though a later one is")
    there = {rank: course for rank, course in board.courses.items() if not course.is_gone}
    if len({course.now.info.get("plan_hash") for course in there.values()}) > 1:
        notes.append("the ranks show different plans")
    for key, meaning in (("update_failures", "failed updates"), ("swaps/failed", "failed swaps")):
        failed = [rank for rank, course in there.items() if course.now.numbers.get(key)]
        if failed:
            notes.append(f"{_named(failed)}: {meaning}; the server's log says why")
    if board.num_restarts:
        notes.append(f"restarted while watched: {board.num_restarts}x")
    return tuple(notes)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED]))
    more = len(ranks) - _MOST_NAMED
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {more} more' if more > 0 else ''}"


def frame_json(frame: Frame) -> dict[str, Any]:
    """A frame as one object with stable keys; null is unknown. Without an answer there are no ranks.

    Args:
        frame: It.
    """
    is_answered = frame.all is not None and not frame.error
    return {
        "kind": "top",
        "url": frame.url,
        "time": frame.at.isoformat(timespec="milliseconds"),
        "error": frame.error or None,
        "readings": frame.num_readings,
        "restarts": frame.num_restarts,
        "notes": list(frame.notes),
        "ranks": [
            {"rank": rank, "info": dict(frame.info.get(rank, {})), **asdict(figures)}
            for rank, figures in frame.ranks.items()
            if is_answered
        ],
        "all": asdict(frame.all) if frame.all is not None and is_answered else None,
    }
