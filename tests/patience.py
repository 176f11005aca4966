"""How long tests wait for what must come.

A machine that is busy with something else may stand still for a while. So a limit only tells a hang from that, and what
must not have happened yet is held back by an event, never by a time that is thought to be long enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hotsplit.bank.workers import Job, Workers

LIMIT_S = 120.0
"""From which on it is a hang."""
_LOOK_S = 0.005


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds.

    Args:
        condition: Asked again and again.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "a hang"
        time.sleep(_LOOK_S)


def set_when(event: threading.Event, condition: Callable[[], object]) -> threading.Thread:
    """Set an event as soon as something holds, while the caller waits for what the event lets go on.

    Args:
        event: To set; also where the condition never holds, so that a failure is no hang.
        condition: Asked again and again.
    """

    def watch() -> None:
        try:
            until(condition)
        finally:
            event.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def finish(workers: Workers) -> None:
    """Wait for what threads have been given so far; there is one of them.

    Args:
        workers: Theirs.
    """
    job = Job(lambda: None)
    assert workers.do(job)
    job.result()
