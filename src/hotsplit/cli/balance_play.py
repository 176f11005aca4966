"""Plays a sample through a server in two halves, keeps the journal up to date, and shows how far it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hotsplit.cli import console
from hotsplit.cli.balance_target import Target
from hotsplit.cli.journal import Journal
from hotsplit.cli.openai_client import Answer
from hotsplit.cli.playing import Player
from hotsplit.cli.run_counts import RunCounts, join_ranks, require_model
from hotsplit.cli.sample_requests import Request, Sample
from hotsplit.errors import EngineError, HotsplitError
from hotsplit.plan.sizes import ExpertSizes

CHECKPOINT_EVERY_S = 30.0
"""Seconds between two times that the journal is brought up to date: what a kill may cost."""
MOST_FAILURES = 20
"""Requests in a row that may fail: then it is not the requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What this command has played, and what went wrong with it."""

    num_requests: int
    """In the sample."""
    num_done: int
    """Answered, by this command and those before it."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Requests that failed for good this time, by kind."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """What the server said of the first of each kind."""
    num_again: int = 0
    """Requests that were sent more than once."""


class Playing:
    """Plays what the journal lacks, half by half, and keeps the journal up to date.

    Args:
        journal: Of the output folder.
        sample: All requests.
        target: The server.
        clients: At the same time.
        sizes: Of the model, which the server's counts must fit.
    """

    def __init__(self, journal: Journal, *, sample: Sample, target: Target, clients: int, sizes: ExpertSizes) -> None:
        self._journal, self._sample, self._target = journal, sample, target
        self._clients, self._sizes = clients, sizes
        self._answered: dict[int, Answer] = {}
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._in_a_row = self._num_again = 0
        self._saved_at = time.monotonic()
        self._meter = Meter(len(sample.requests), done=len(journal.done))

    def play(self) -> Played:
        """Play, and bring the journal up to date, whatever ends it.

        Raises:
            EngineError: The server has gone, serves another model, or too many requests in a row fail.
        """
        journal, snapshots = self._journal, self._target.run.snapshots()
        journal.budget_bytes = max(snapshot.budget_bytes for snapshot in snapshots)
        begun = join_ranks(snapshots)
        require_model(begun, sizes=self._sizes, model=self._target.served.root)
        if not journal.parts:
            journal.parts = [RunCounts.zeros(begun.layers, num_experts=begun.shape[1])] * 2
        with self._meter.shown():
            for number in range(2):
                missing = [one for one in half_of(self._sample, number) if one.number not in journal.done]
                if missing:
                    self._play_half(number, missing)
        return Played(
            num_requests=len(self._sample.requests),
            num_done=len(journal.done),
            failures=dict(self._failures),
            examples=dict(self._examples),
            num_again=self._num_again,
        )

    def _play_half(self, number: int, requests: list[Request]) -> None:
        begun, kept = self._target.run.counts(), self._journal.parts[number]

        def checkpoint() -> None:
            answered = dict(self._answered)
            self._journal.parts[number] = kept.plus(self._target.run.counts().since(begun))
            for answer in answered.values():
                self._journal.prompt_tokens += answer.prompt_tokens
                self._journal.completion_tokens += answer.completion_tokens
            self._journal.done |= set(answered)
            self._answered = {n: one for n, one in self._answered.items() if n not in answered}
            self._journal.save()
            self._saved_at = time.monotonic()

        def look() -> None:
            self._target.require_alive()
            self._meter.tell()
            if time.monotonic() - self._saved_at >= CHECKPOINT_EVERY_S:
                checkpoint()

        served = self._target.served.name
        player = Player(
            lambda request, enough: self._target.client.ask(request, model=served, enough=enough),
            clients=self._clients,
            on_answer=self._on_answer,
            on_look=look,
        )
        try:
            player.play(requests)
        except BaseException:
            # What was answered is kept, if the server can still say what it counted.
            with suppress(HotsplitError, OSError):
                checkpoint()
            raise
        checkpoint()

    def _on_answer(self, request: Request, answer: Answer) -> None:
        self._num_again += answer.tries > 1
        self._meter.add(answer)
        if answer.failure is None:
            self._in_a_row = 0
            self._answered[request.number] = answer
            return
        self._failures[answer.failure] += 1
        self._examples.setdefault(answer.failure, f"{request.where}: {answer.detail or answer.failure}")
        self._in_a_row += 1
        if self._in_a_row >= MOST_FAILURES:
            self._target.require_alive()
            got = f"{answer.failure}{f' ({answer.detail})' if answer.detail else ''}"
            do = "see that the server takes such requests, then start again: what was answered is kept"
            raise EngineError(f"{self._in_a_row} requests in a row failed", got=got, do=do, kind=answer.failure)


def half_of(sample: Sample, number: int) -> tuple[Request, ...]:
    """The requests of one half.

    Args:
        sample: All of them.
        number: 0 or 1.
    """
    middle = (len(sample.requests) + 1) // 2
    return sample.requests[middle:] if number else sample.requests[:middle]


class Meter:
    """Progress: a bar with the time left on a terminal, else a line now and then.

    Args:
        total: Requests.
        done: Of them, before this command.
    """

    def __init__(self, total: int, *, done: int) -> None:
        self._total, self._before, self._done = total, done, done
        self._num_failed = self._num_tokens = 0
        self._began = self._told_at = time.monotonic()
        self._bar: Callable[[int, int], None] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While something is played."""
        self._began = self._told_at = time.monotonic()
        if not console.err.is_terminal:
            yield
            return
        with console.progress(f"playing {self._total} requests") as self._bar:
            yield

    def add(self, answer: Answer) -> None:
        """Count an answer.

        Args:
            answer: Or a failure.
        """
        self._done += 1
        self._num_failed += answer.failure is not None
        self._num_tokens += answer.prompt_tokens + answer.completion_tokens

    def tell(self) -> None:
        """Show it, if it is time."""
        if self._bar is not None:
            self._bar(self._done, self._total)
        elif time.monotonic() - self._told_at >= console.PROGRESS_EVERY_S:
            self._told_at = time.monotonic()
            console.note(self.line())

    def line(self) -> str:
        """How far it is, how fast, and how long it will take."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        played = self._done - self._before
        left = f"about {_clock((self._total - self._done) * seconds / played)} left" if played else "no answer yet"
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        speed = f"{self._num_tokens / seconds:.0f} tokens/s"
        return f"playing: {self._done} of {self._total} requests{failed}, {speed}, {left}"


def _clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes.

    >>> _clock(75), _clock(7260)
    ('1:15 min', '2:01 h')
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if minutes >= 60 else f"{minutes}:{rest:02d} min"
