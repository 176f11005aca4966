"""Threads that work beside the steps, and that Ctrl-C cannot leave in a state in which a later step hangs.

An interrupt is raised in the main thread between any two of its instructions. A pool of Python's own takes locks there that
are written in Python: cut off inside of one it keeps it for good, and whoever comes next waits for ever. Here that thread
only calls what an interrupt cannot divide (SimpleQueue, bare locks, the start of a bare thread), and each step may be left
out, or done twice:

    do       for each seat without a thread: start one, note that        started twice, the second finds the seat taken
             put the job                                                 put twice, the second finds the job claimed
    close    note that, forget what waits, put the end, wait             from the beginning again

Jobs begin in the order in which they were put. A thread that meets the end puts it again for the next one, so that one
end is enough for as many as there are.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from hotsplit.errors import BankError

Result = TypeVar("Result")
_Jobs = SimpleQueue[Callable[[], object] | None]

_LOOK_S = 0.02
"""How late an end is seen whose ring was lost to an interrupt or to another who waits, in seconds."""


class Workers:
    """Long-lived threads that do jobs; started with the first one, and anew in a forked process.

    Args:
        number: Of threads.
        name: What theirs begin with.
        prepare: Called by each at its start.
    """

    def __init__(self, number: int, *, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._number, self._name, self._prepare = number, name, prepare
        self._is_closed = False
        self._begin()

    def do(self, job: Callable[[], object]) -> bool:
        """Have a job done; returns at once. After an interrupt it may be done or not.

        Args:
            job: Tells by itself how it ended, and raises nothing.

        Returns:
            False where there is no thread and none can be started: then the job is the caller's.

        Raises:
            BankError: They are closed.
        """
        if self._pid != os.getpid():  # threads do not follow into a forked process
            self._begin()
        self._require_open()
        if not self._are_all_started and not self._start():
            return False
        self._jobs.put(job)
        if self._is_closed:  # meanwhile, by another thread, which may have looked for jobs before this one came
            self._forget()
        return True

    def close(self, *, forget: bool = True) -> None:
        """Finish the jobs under way and let the threads go; twice is harmless.

        Args:
            forget: Whether jobs that wait are given up; else they are done first.
        """
        self._is_closed = True
        if self._pid != os.getpid():
            return
        if forget:
            self._forget()
        self._jobs.put(None)
        for seat in self._seats:
            seat.leave()

    def _require_open(self) -> None:
        if self._is_closed:
            raise banks_closed()

    def _begin(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._seats = [_Seat() for _ in range(self._number)]
        self._are_all_started = False
        # Of whoever is never closed no thread stays behind; with the process a daemon ends by itself.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._pid = os.getpid()

    def _start(self) -> bool:
        """Start what threads are missing; whether there is any."""
        try:
            for number, seat in enumerate(self._seats):
                if not seat.has_thread:
                    name = f"{self._name}_{number}"
                    _thread.start_new_thread(_sit_down, (seat, self._jobs, name, self._prepare))
                    seat.has_thread = True
                    while not (
                        seat.begun.is_told or seat.claim.is_void()
                    ):  # a close() by another thread takes the seat
                        seat.begun.look()
            self._are_all_started = True
        except RuntimeError:  # no more are to be had: those that there are do
            self._are_all_started = False
        return any(seat.has_thread for seat in self._seats)

    def _forget(self) -> None:
        """Give up the jobs that wait; the end may be among them, so that it is put again."""
        try:
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, Job):
                    job.give_up()
        except Empty:
            self._jobs.put(None)


class _Told:
    """Told once, by a thread that no interrupt reaches; seen by any number of threads."""

    def __init__(self) -> None:
        self.is_told = False
        self._ring = _thread.allocate_lock()
        self._ring.acquire()

    def tell(self) -> None:
        self.is_told = True
        self._ring.release()

    def wait(self) -> None:
        while not self.is_told:
            self.look()

    def look(self) -> None:
        """Wait for a moment, or until it is told."""
        self._ring.acquire(timeout=_LOOK_S)


class _Claim:
    """Who is to do something: whoever asks first. Asked again by the same one it answers the same."""

    def __init__(self) -> None:
        self._askers: list[object] = []

    def is_given(self, asker: object) -> bool:
        self._askers.append(asker)
        return self._askers[0] is asker

    def is_void(self) -> bool:
        """Whether nobody ever will, since it was given to None."""
        return bool(self._askers) and self._askers[0] is None


class _Seat:
    """What one thread at most ever takes."""

    def __init__(self) -> None:
        self.has_thread = False
        """Whether one was started for it; where an interrupt kept that from being noted another one is."""
        self.thread: threading.Thread | None = None
        self.begun, self.end = _Told(), _Told()
        self.claim = _Claim()

    def leave(self) -> None:
        """Wait for the end of its thread; one that comes later finds the seat taken, and goes."""
        if self.claim.is_given(None) or self.thread is threading.current_thread():
            return
        self.end.wait()
        if self.thread is not None:
            self.thread.join(1.0)  # it has only its last steps to do


def _sit_down(seat: _Seat, jobs: _Jobs, name: str, prepare: Callable[[], None] | None) -> None:
    """In a bare thread: start one that has a name, which takes locks of Python's that no interrupt may divide."""
    if not seat.claim.is_given(object()):
        return
    seat.thread = threading.Thread(target=_serve, args=(seat, jobs, prepare), name=name, daemon=True)
    try:
        seat.thread.start()
    except (RuntimeError, MemoryError):  # no second one is to be had
        seat.thread = None
        _serve(seat, jobs, prepare)


def _serve(seat: _Seat, jobs: _Jobs, prepare: Callable[[], None] | None) -> None:
    seat.begun.tell()
    try:
        if prepare is not None:
            prepare()
        while (job := jobs.get()) is not None:
            job()
            del job  # it may hold whoever owns this thread
        jobs.put(None)
    finally:
        seat.end.tell()


class Job(Generic[Result]):
    """A job that is done once at most, and keeps how it ended.

    Args:
        work: Does it.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._claim, self._end = _Claim(), _Told()
        self._result: list[Result] = []
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """What it has failed with."""
        return banks_closed() if self.is_given_up else self._failure

    @property
    def is_given_up(self) -> bool:
        """Whether nobody will ever do it."""
        return self._claim.is_void()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not, or was given up."""
        return self._end.is_told or self.is_given_up

    def wait(self) -> None:
        """Until it is done; another thread may give it up meanwhile."""
        while not self.is_done:
            self._end.look()

    def __call__(self) -> None:
        """Do it, unless it is done or given up."""
        if not self._claim.is_given(object()):
            return
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._failure = error
            if isinstance(error, KeyboardInterrupt):  # whoever does it on the main thread hears of that at once
                raise
        finally:
            self._end.tell()

    def give_up(self) -> bool:
        """Let nobody begin it any more; whether that came early enough."""
        return self._claim.is_given(None)

    def result(self) -> Result:
        """What came of it; waits for its end.

        Raises:
            BankError: It was given up.
            BaseException: It has failed with that.
        """
        self.wait()
        failure = self.failure
        if failure is not None:
            raise failure
        return self._result[0]


def banks_closed() -> BankError:
    """What whoever comes too late is told."""
    return BankError("the banks are closed", do="load the model again")
