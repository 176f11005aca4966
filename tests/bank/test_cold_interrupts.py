"""The cold path under Ctrl-C, without threads, closed halfway: never a hang, never another row's bytes, nothing lost."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from bank.interrupts import Signals, cut_off
from bank.toy_source import same, toy_source
from hotsplit.bank import cold_answers, cold_reads, staging, workers
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.cold_choice import slot_needs
from hotsplit.bank.cold_reads import ColdRows
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.staging import Staging
from hotsplit.bank.workers import Workers
from hotsplit.errors import BankError
from patience import LIMIT_S, until

E, SLOTS = 6, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return toy_source(tmp_path_factory.mktemp("toy"), num_experts=E)


@pytest.fixture
def direct(source, monkeypatch):
    """Rows that are read into slots; nothing is ever found in the page cache."""
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)
    rows = build(source)
    yield rows
    rows.close()


def build(source):
    options = RowsOptions(slots=SLOTS, slot_bytes=slot_needs(source).slot_bytes, is_direct=True)
    hot = ((),) * len(source.files)
    layers = place_layers(hot, num_experts=E, dynamic=False, inclusive=True)
    return build_pointer_rows(source, hot=hot, layers=layers, options=options)


def read(rows, source, wanted, *, layer_id=0):
    """One turn; in a thread with a deadline, since what these tests look for is a hang."""
    found = []

    def turn():
        rows.ask(layer_id, wanted)
        for row in rows.arrivals(layer_id, wanted):
            assert same(source.expected[layer_id, row], rows.tensors(layer_id, row))
            found.append(row)

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "a hang"
    assert sorted(wanted) == sorted(found)


def take(rows, wanted):
    rows.ask(0, wanted)
    return list(rows.arrivals(0, wanted))


def interrupt_once(monkeypatch, owner, name, *, before=True):
    """The first call is cut off by Ctrl-C, before or after it has done its work."""
    real = getattr(owner, name)

    def cut_off(*arguments, **named):
        monkeypatch.setattr(owner, name, real)
        if not before:
            real(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, cut_off)


@pytest.mark.parametrize(
    "place",
    [(ColdRows, "_hear"), (ColdRows, "_submit"), (Workers, "do"), (Staging, "take"), (Staging, "drop")],
    ids=lambda place: f"{place[0].__name__}.{place[1]}",
)
@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_anywhere_leaves_rows_that_can_be_read(direct, source, monkeypatch, place, before):
    read(direct, source, [0, 1, 2])
    interrupt_once(monkeypatch, *place, before=before)
    with pytest.raises(KeyboardInterrupt):
        take(direct, [3, 4, 5])
    for wanted in ([3, 4, 5], [0, 3], [5, 1, 2], [2, 4]):
        read(direct, source, wanted)
        read(direct, source, wanted, layer_id=1)


def test_interrupts_take_no_slot_away_for_good(direct, source, monkeypatch):
    for _ in range(2 * SLOTS):
        interrupt_once(monkeypatch, Workers, "do")
        with pytest.raises(KeyboardInterrupt):
            direct.ask(0, [0, 1])
    read(direct, source, [0, 1])  # what was asked for is read in the end
    before = direct.cold_counts.staged_rows
    read(direct, source, [3, 4, 5])
    assert SLOTS == direct.cold_counts.staged_rows - before


def test_an_interrupt_at_any_instruction_leaves_rows_that_can_be_read(direct, source):
    """Exhaustive in what asks for two rows and takes them; every second time another one hits the next turn."""
    at, is_inside = 0, True
    while is_inside:
        wanted = [at % E, (at + 1 + at % 2) % E]
        is_inside = cut_off(partial(take, direct, wanted), at=at, modules=[cold_answers, cold_reads, staging, workers])
        if at % 2:
            cut_off(
                partial(take, direct, wanted), at=97 * at % 400, modules=[cold_answers, cold_reads, staging, workers]
            )
        read(direct, source, wanted)
        read(direct, source, [(at + 3) % E, (at + 4) % E, at % E])
        at += 1
    assert at > 200


def test_more_than_a_thousand_signals_leave_rows_that_can_be_read(direct, source):
    with Signals(seed=2) as signals:
        for turn in range(50_000):
            if signals.num_hits > 1300:  # of how many tries depends on how fast this machine is
                break
            wanted = [turn % E, (turn + 1 + turn % 3) % E]
            signals.during(partial(take, direct, wanted), within_s=4e-4)
            if turn % 5 == 0:
                read(direct, source, wanted, layer_id=turn % 2)
    assert signals.num_hits > 1300
    read(direct, source, [0, 1, 2])


def test_a_read_that_an_interrupt_kept_from_the_threads_gets_there_with_the_next_turn(direct, monkeypatch):
    interrupt_once(monkeypatch, Workers, "do")
    with pytest.raises(KeyboardInterrupt):
        direct.ask(0, [0])
    until(lambda: direct.ask(0, []) or not direct._cold._reading)  # and keeps its slot so long


def test_a_read_that_threads_were_given_twice_is_done_once(direct, source, monkeypatch):
    done, do, one_read = [], Workers.do, Staging.read
    monkeypatch.setattr(Workers, "do", lambda self, job: do(self, job) and do(self, job))
    monkeypatch.setattr(Staging, "read", lambda *arguments: (done.append(1), one_read(*arguments))[1])
    read(direct, source, [0, 1, 2])
    direct._cold._workers.close(forget=False)
    assert 3 == len(done)


def test_a_slot_that_an_interrupt_has_lost_is_found_again(direct, source):
    staging = direct._cold._staging
    read(direct, source, [0, 1])
    staging._free.pop()  # as after an interrupt inside of take() or drop()
    staging._slots.popitem()
    before = direct.cold_counts.staged_rows
    read(direct, source, [3, 4, 5])
    assert SLOTS == direct.cold_counts.staged_rows - before


def test_a_signal_ends_the_wait_for_a_row_and_the_row_can_be_had_later(direct, source, monkeypatch):
    go, real = threading.Event(), Staging.read
    monkeypatch.setattr(Staging, "read", lambda *arguments: (go.wait(LIMIT_S), real(*arguments))[1])
    direct.ask(0, [1, 2])
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def wait():
        timer.start()  # not before: it may come before the wait has begun
        list(direct.arrivals(0, [1, 2]))

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()
    go.set()
    read(direct, source, [2, 1, 3])


def test_where_no_thread_can_be_started_the_rows_are_read_all_the_same(direct, source, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        direct.ask(0, [0, 1])
        assert {0, 1} == set(direct.arrivals(0, [0, 1]))
        assert all(same(source.expected[0, row], direct.tensors(0, row)) for row in (0, 1))
    # No thread reads them once more now that there are some: their slots have other rows.
    read(direct, source, [3, 4, 5])
    read(direct, source, [0, 2], layer_id=1)


@pytest.mark.parametrize("error", [MemoryError("no"), ValueError("bad"), SystemExit(3)])
def test_whatever_a_read_fails_with_is_a_bank_error_with_its_cause(direct, source, monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "read", fail)
        direct.ask(0, [1])
        with pytest.raises(BankError, match=f"layer 0, expert 1: got {type(error).__name__}") as caught:
            list(direct.arrivals(0, [1]))
    assert error is caught.value.__cause__
    read(direct, source, [1, 2])


def test_answers_that_nobody_waited_for_leave_nothing_behind(direct, source):
    for turn in range(200):
        direct.ask(0, [turn % E])
        direct.tensors(0, turn % E)
    assert direct._cold._answers._bell.qsize() <= SLOTS


def test_a_close_that_is_interrupted_lets_everything_go_and_can_be_repeated(source, monkeypatch):
    num_files = len(os.listdir("/proc/self/fd"))
    rows = build(source)
    read(rows, source, [0, 1])
    interrupt_once(monkeypatch, Workers, "close")
    with pytest.raises(KeyboardInterrupt):
        rows.close()
    rows.close()
    assert [] == [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-cold")]
    assert num_files == len(os.listdir("/proc/self/fd"))


def test_slots_are_part_of_what_is_taken_of_the_budget(source):
    rows = build(source)
    assert SLOTS * slot_needs(source).slot_bytes == rows.slot_bytes == rows.hot_bytes
    rows.close()


def test_many_models_in_threads_of_one_process_keep_their_rows_apart(tmp_path):
    failures = []

    def run(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        mine = toy_source(folder, num_experts=E, seed=number)
        rows = build(mine)
        try:
            for turn in range(20):
                wanted = [(turn + number) % E, (turn + number + 2) % E]
                rows.ask(turn % 2, wanted)
                arrived = rows.arrivals(turn % 2, wanted)
                wrong = [row for row in arrived if not same(mine.expected[turn % 2, row], rows.tensors(turn % 2, row))]
                failures.extend((number, turn, row) for row in wrong)
        finally:
            rows.close()

    models = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for one in models:
        one.start()
    for one in models:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in models), "a hang"
    assert [] == failures


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
def test_files_on_a_tmpfs_are_read_whether_or_not_it_has_direct_reads(monkeypatch, caplog):
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)
    folder = Path("/dev/shm") / f"hotsplit-test-{os.getpid()}"
    folder.mkdir()
    try:
        mine = toy_source(folder, num_experts=E)
        rows = build(mine)
        for wanted in ([0, 1, 2], [5], list(range(E))):
            read(rows, mine, wanted)
        rows.close()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    # Newer kernels read from tmpfs with O_DIRECT too.
    assert all("no direct reads" in message for message in caplog.messages)
