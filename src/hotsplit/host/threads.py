"""Threads that work beside the steps must not push them off a processor.

A thread that wakes, since its read has ended, may preempt the one that computes: with as many busy threads as processors
a step then waits for a whole time slice, some milliseconds. A batch thread gets as much time and never preempts.
"""

from __future__ import annotations

import contextlib
import os


def stay_behind() -> None:
    """Make the calling thread a batch one; where the system forbids that it stays as it is."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
