"""Threads beside the steps: each job once, in order, whatever interrupts whoever asks for it; and none left at the end."""

from __future__ import annotations

import _thread
import gc
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from bank.interrupts import Signals, cut_off
from hotsplit.bank import workers as module
from hotsplit.bank.workers import Job, Workers
from hotsplit.errors import BankError
from patience import LIMIT_S, set_when, until

NAME = "hotsplit-toy"


@pytest.fixture
def one():
    made = Workers(1, name=NAME)
    yield made
    made.close()
    assert [] == threads()


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def in_time(call):
    """Run a call in a thread: what these tests look for is a hang."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "a hang"


def refuse(*_, **__):
    raise RuntimeError("can't start new thread")


def test_threads_start_with_the_first_job_and_have_the_name_and_are_prepared():
    prepared, seen = [], []
    made = Workers(2, name=NAME, prepare=lambda: prepared.append(threading.current_thread()))
    assert [] == threads()
    job = Job(lambda: seen.append(threading.current_thread()))
    assert made.do(job)
    job.result()
    until(lambda: len(prepared) == 2)
    assert set(prepared) == set(threads())
    assert seen[0] in prepared
    made.close()
    assert [] == threads()


def test_one_thread_does_jobs_in_their_order(one):
    done = []
    jobs = [Job(partial(done.append, number)) for number in range(100)]
    assert [True] * 100 == [one.do(job) for job in jobs]
    jobs[-1].result()
    assert list(range(100)) == done


def test_a_result_is_waited_for_and_an_error_comes_out_there(one):
    go = threading.Event()
    slow = Job(lambda: (go.wait(LIMIT_S), 7)[1])
    one.do(slow)
    assert not slow.is_done
    threading.Timer(0.05, go.set).start()
    assert 7 == slow.result()
    bad = Job(lambda: 1 // 0)
    one.do(bad)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert bad.is_done
    assert isinstance(bad.failure, ZeroDivisionError)


def test_a_job_is_done_once_however_often_it_is_handed_over(one):
    done = []
    job = Job(lambda: done.append(1))
    for _ in range(3):
        one.do(job)
    last = Job(lambda: None)
    one.do(last)
    last.result()
    assert [1] == done
    assert not job.give_up()


def test_a_job_that_was_given_up_is_never_done(one):
    done = []
    job = Job(lambda: done.append(1))
    assert job.give_up()
    assert job.give_up()
    job()
    assert ([], True) == (done, job.is_done)
    with pytest.raises(BankError, match="the banks are closed"):
        job.result()


def test_an_interrupt_of_whoever_does_a_job_by_himself_is_his():
    def interrupted():
        raise KeyboardInterrupt

    job = Job(interrupted)
    with pytest.raises(KeyboardInterrupt):
        job()
    assert job.is_done


@pytest.mark.parametrize("forget", [True, False])
def test_closing_finishes_what_is_under_way_and_gives_the_rest_up_or_not(forget):
    go, began, done = threading.Event(), threading.Event(), []
    made = Workers(1, name=NAME)
    first = Job(lambda: (began.set(), go.wait(LIMIT_S), done.append(1)))
    second = Job(lambda: done.append(2))
    made.do(first)
    made.do(second)
    assert began.wait(LIMIT_S)
    set_when(go, lambda: second.is_done or not forget)  # not before it has been given up
    made.close(forget=forget)
    made.close()
    assert [] == threads()
    assert ([1] if forget else [1, 2]) == done
    assert second.is_done
    with pytest.raises(BankError, match="the banks are closed: load the model again"):
        made.do(first)


def test_where_no_thread_can_be_started_the_caller_is_told_and_later_one_is(one, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        assert not one.do(Job(lambda: None))
    job = Job(lambda: 3)
    assert one.do(job)
    assert 3 == job.result()


def test_where_one_thread_is_to_be_had_and_no_second_one_that_one_serves(monkeypatch):
    made = Workers(2, name=NAME)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        jobs = [Job(partial(int, number)) for number in range(9)]
        assert [True] * 9 == [made.do(job) for job in jobs]
        assert list(range(9)) == [job.result() for job in jobs]
    made.close()


def test_a_forked_process_has_threads_of_its_own(one):
    job = Job(lambda: 1)
    one.do(job)
    job.result()
    child = os.fork()
    if child == 0:
        mine = Job(os.getpid)
        is_well = one.do(mine) and mine.result() == os.getpid()
        one.close()
        os._exit(0 if is_well and not threads() else 1)
    assert 0 == os.waitpid(child, 0)[1]
    again = Job(lambda: 2)
    one.do(again)
    assert 2 == again.result()


def test_whoever_is_dropped_unclosed_leaves_no_thread():
    made = Workers(3, name=NAME)
    job = Job(lambda: None)
    made.do(job)
    job.result()
    del made
    gc.collect()
    until(lambda: not threads())


def test_a_thread_that_closes_its_own_workers_does_not_wait_for_itself():
    made = Workers(1, name=NAME)
    job = Job(made.close)
    made.do(job)
    in_time(job.result)
    until(lambda: not threads())


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_at_any_instruction_and_another_one_at_the_next_try_lose_nothing(number):
    """Exhaustive: asking for a job twice, each time cut off at each instruction, then for another; then closing, alike."""
    at, is_inside = 0, True
    while is_inside:
        for again in (0, 7, 19, 31):
            made, done = Workers(number, name=NAME), []
            job = Job(lambda done=done: done.append(1))
            is_inside = cut_off(partial(made.do, job), at=at, modules=[module])
            cut_off(partial(made.do, job), at=again, modules=[module])
            in_time(partial(made.do, job))
            in_time(job.result)
            last = Job(lambda done=done: done.append(2))
            made.do(last)
            in_time(last.result)
            assert [1, 2] == done
            assert len(threads()) <= number
            in_time(made.close)
            assert [] == threads()
        at += 1
    assert at > 20


@pytest.mark.parametrize("forget", [True, False])
def test_an_interrupt_at_any_instruction_of_a_close_leaves_one_that_can_be_repeated(forget):
    at, is_inside = 0, True
    while is_inside:
        for again in (0, 9, 23, 41):
            made = Workers(2, name=NAME)
            made.do(Job(lambda: None))
            is_inside = cut_off(partial(made.close, forget=forget), at=at, modules=[module])
            cut_off(made.close, at=again, modules=[module])
            in_time(made.close)
            assert [] == threads()
        at += 1
    assert at > 20


def test_a_job_that_comes_while_another_thread_closes_is_done_or_given_up_and_never_waits_for_ever():
    at, is_inside, ends = 0, True, set()
    while is_inside:
        made = Workers(1, name=NAME)
        first, job = Job(lambda: 1), Job(lambda: 2)
        made.do(first)

        def ask(made=made, job=job):
            try:
                made.do(job)
            except BankError:
                job.give_up()

        is_inside = cut_off(ask, at=at, modules=[module], by=partial(in_time, made.close))
        in_time(lambda job=job: job.failure or job.result())
        ends.add(type(job.failure))
        made.close()
        assert [] == threads()
        at += 1
    assert {BankError, type(None)} == ends


def test_thousands_of_signals_lose_no_job_and_leave_no_thread_waiting():
    with Signals(seed=1) as signals:
        for _ in range(150):
            made, jobs = Workers(2, name=NAME), []

            def ask(made=made, jobs=jobs):
                for _ in range(500):
                    jobs.append(Job(lambda: None))
                    made.do(jobs[-1])

            for _ in range(20):
                signals.during(ask, within_s=2e-4)
            for job in jobs:  # those that were cut off are asked for again, the others are done already
                made.do(job)
            in_time(lambda jobs=jobs: [job.result() for job in jobs])
            signals.during(made.close, within_s=2e-4)
            in_time(made.close)
            assert [] == threads()
    assert signals.num_hits > 2000


def test_a_close_that_comes_while_the_first_thread_is_started_is_told_and_hangs_nobody(monkeypatch):
    crew, start = Workers(2, name="test-crew"), _thread.start_new_thread

    def late(work, arguments):
        closing = threading.Thread(target=crew.close)
        if work is module._sit_down:
            closing.start()
            closing.join()
        return start(work, arguments)

    monkeypatch.setattr(module, "_thread", SimpleNamespace(start_new_thread=late, allocate_lock=_thread.allocate_lock))
    job = Job(lambda: 1)
    crew.do(job)
    with pytest.raises(BankError, match="the banks are closed"):
        job.result()


def test_who_waits_for_a_job_hears_that_another_thread_gives_it_up():
    crew, go = Workers(1, name="test-crew"), threading.Event()
    jobs = [Job(lambda: go.wait(LIMIT_S)), Job(lambda: 1)]
    for job in jobs:
        crew.do(job)
    waiting = threading.Thread(target=jobs[1].wait)
    waiting.start()
    closing = threading.Thread(target=crew.close)
    closing.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    go.set()
    closing.join(LIMIT_S)
    assert jobs[1].is_given_up
