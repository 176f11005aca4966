"""Ctrl-C at a given instruction, or at many moments that nobody chose."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys

from patience import LIMIT_S


def cut_off(call, *, at, modules, by=None):
    """Run a call whose `at`-th instruction in some modules, from 0 on, is not reached.

    A real interrupt is raised between fewer instructions than these: before calls, jumps back and the like.

    Args:
        call: What to run.
        at: Number of the instruction before which it ends.
        modules: Modules whose instructions count.
        by: Called there instead; the call goes on then.

    Returns:
        Whether it had as many instructions.
    """
    files, left = {module.__file__ for module in modules}, at

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                if by is None:
                    raise KeyboardInterrupt
                by()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return left < 0


class Signals:
    """Real ones, each a moment after the call began.

    Inside of a garbage collection an interrupt is printed and lost, so that there is none meanwhile.
    """

    def __init__(self, *, seed):
        self._dice, self._is_armed, self._is_inside = random.Random(seed), False, False
        self.num_hits = 0

    def __enter__(self):
        gc.disable()
        self._timer = signal.setitimer(signal.ITIMER_REAL, 0)  # of a test's time limit
        self._before = signal.signal(signal.SIGALRM, self._interrupt)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        gc.enable()
        gc.collect()

    def _interrupt(self, *_):
        if self._is_inside and not self._is_armed:
            raise AssertionError("a hang")
        if self._is_inside:
            self._is_armed = False
            raise KeyboardInterrupt

    def during(self, call, *, within_s):
        """Run a call that a signal ends within so many seconds, if it does not end before."""
        try:
            self._is_armed = self._is_inside = True
            signal.setitimer(signal.ITIMER_REAL, self._dice.uniform(2e-6, within_s), LIMIT_S)
            call()
            self._is_inside = False
        except KeyboardInterrupt:
            self._is_inside = False
            self.num_hits += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
