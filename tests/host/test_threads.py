"""A thread beside the steps is a batch one, and no other thread becomes one."""

from __future__ import annotations

import os
import threading

from hotsplit.host import threads


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_calling_thread_becomes_a_batch_one():
    assert os.SCHED_BATCH == in_a_thread(lambda: (threads.stay_behind(), os.sched_getscheduler(0))[1])
    assert os.SCHED_OTHER == os.sched_getscheduler(0) == in_a_thread(lambda: os.sched_getscheduler(0))


def test_where_it_is_forbidden_the_thread_goes_on(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_a_thread(lambda: threads.stay_behind() is None)
