"""Reads into slots and how they ended: between the threads that read and the thread that runs the steps.

    stepping thread   Read, handed over ->  reading thread: reads, and tells  ->  Answers, until it was taken in

An interrupt may reach the stepping thread at any instruction. So no answer is lost with a ring that it swallowed, and a
read that was handed over twice, since nobody knew whether the first time had gone through, is done once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from queue import SimpleQueue

from hotsplit.bank.staging import Key, Slot
from hotsplit.bank.workers import banks_closed
from hotsplit.errors import BankError, HotsplitError


class Answers:
    """How reads ended, told by reading threads and held until the stepping thread has taken it in. Mutable."""

    def __init__(self) -> None:
        self._ended: dict[Key, HotsplitError | None] = {}
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_closed = False

    def tell(self, key: Key, failure: HotsplitError | None) -> None:
        """A read has ended; in a reading thread.

        Args:
            key: Of the row.
            failure: What it failed with; None for nothing.
        """
        self._ended[key] = failure
        self._bell.put(None)

    def wait(self) -> None:
        """Until there is an answer. An interrupt may swallow a ring and never an answer, which is looked for first."""
        while not self._ended:
            if self._is_closed:
                self._bell.put(None)  # for whoever else waits
                raise banks_closed()
            self._bell.get()

    def all(self) -> list[tuple[Key, HotsplitError | None]]:
        """Every answer that was not taken in yet."""
        while self._bell.qsize():  # each ring comes after its answer, so that none is lost
            self._bell.get()
        return [(key, self._ended[key]) for key in list(self._ended)]

    def forget(self, key: Key) -> None:
        """An answer was taken in.

        Args:
            key: Of the row.
        """
        self._ended.pop(key, None)

    def close(self) -> None:
        """Nothing more is waited for."""
        self._is_closed = True
        self._ended.clear()
        self._bell.put(None)


class Read:
    """One read into a slot, done by the thread that comes first where it was handed over twice.

    Args:
        key: Of the row.
        read: Does it.
        slot: Where to.
        answers: Told how it ended.
    """

    __slots__ = ("_answers", "_num_comers", "_read", "is_handed_over", "key", "slot")

    def __init__(self, key: Key, read: Callable[[], None], *, slot: Slot, answers: Answers) -> None:
        self.key, self._read, self.slot, self._answers = key, read, slot, answers
        self._num_comers = itertools.count()
        self.is_handed_over = False
        """Whether that is sure."""

    def __call__(self) -> None:
        """Read, and tell how it ended, whatever happens; in a reading thread."""
        if next(self._num_comers) == 0:
            self._answers.tell(self.key, self.outcome())

    def outcome(self) -> HotsplitError | None:
        """Read; what that failed with."""
        try:
            self._read()
        except HotsplitError as error:
            return error
        except KeyboardInterrupt:
            raise  # of the thread that computes, where it reads by itself
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for the row
            failure = BankError(f"layer {self.key[0]}, expert {self.key[1]}", got=f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        return None
