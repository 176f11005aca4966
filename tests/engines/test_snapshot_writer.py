"""Snapshots are written beside the steps: the newest always in the end, and a slow disk holds nobody up."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from bank.interrupts import Signals, cut_off
from hotsplit.bank import workers
from hotsplit.engines.transformers import engine
from hotsplit.engines.transformers.engine import SnapshotWriter
from patience import LIMIT_S, until

pytestmark = pytest.mark.transformers


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-snapshots")]


def test_putting_returns_while_the_disk_is_slow_and_the_newest_is_written_last():
    go, written = threading.Event(), []

    def write(snapshot):
        go.wait(LIMIT_S)
        written.append(snapshot)

    writer = SnapshotWriter(write)
    for number in range(50):
        writer.put(number)
    assert [] == written
    go.set()
    writer.close()
    writer.close()
    assert 49 == written[-1]
    assert len(written) <= 3, "those that were overtaken are not written"
    assert [] == threads()


@pytest.mark.parametrize("pause", [0, 0.0005])
def test_whatever_the_timing_the_last_one_is_written_in_the_end(pause):
    written = []
    for _ in range(20):
        writer = SnapshotWriter(written.append)
        for number in range(20):
            writer.put(number)
            time.sleep(pause)
        writer.finish()
        assert 19 == written[-1]
        writer.close()


def test_an_error_that_nobody_expects_comes_out_at_the_end_and_the_thread_goes():
    def write(_):
        raise MemoryError("no")

    writer = SnapshotWriter(write)
    writer.put(1)
    with pytest.raises(MemoryError):
        writer.close()
    assert [] == threads()


def in_time(call):
    """A hang is what is looked for."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "a hang"


def test_an_interrupt_at_any_instruction_loses_no_newest_snapshot_and_no_thread():
    at, is_inside = 0, True
    while is_inside:
        written = []
        writer = SnapshotWriter(written.append)
        writer.put(0)
        is_inside = cut_off(partial(writer.put, 1), at=at, modules=[engine, workers])
        cut_off(partial(writer.put, 2), at=7 * at % 60, modules=[engine, workers])
        in_time(partial(writer.put, 3))
        cut_off(writer.finish, at=at, modules=[engine, workers])
        in_time(writer.close)
        assert 3 == written[-1]
        assert sorted(written) == written, "an older one is never written over a newer"
        assert [] == threads()
        at += 1
    assert at > 20


def test_after_an_interrupt_snapshots_are_written_without_waiting_for_the_end():
    at, is_inside = 0, True
    while is_inside:
        written = []
        writer = SnapshotWriter(written.append)
        is_inside = cut_off(partial(writer.put, 1), at=at, modules=[engine, workers])
        writer.put(2)
        until(lambda written=written: 2 in written)
        writer.close()
        at += 1


def test_signals_while_snapshots_are_put_leave_the_newest_to_be_written():
    with Signals(seed=4) as signals:
        for _ in range(2000):
            if signals.num_hits > 1000:  # of how many tries depends on how fast this machine is
                break
            written = []
            writer = SnapshotWriter(written.append)

            def put(writer=writer):
                for number in range(1000):
                    writer.put(number)

            for _ in range(20):
                signals.during(put, within_s=3e-4)
            writer.put(1000)
            in_time(writer.close)
            assert 1000 == written[-1]
    assert signals.num_hits > 1000
    assert [] == threads()


def test_where_no_thread_can_be_started_whoever_puts_a_snapshot_writes_it(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    written = []
    writer = SnapshotWriter(written.append)
    for number in range(3):
        writer.put(number)
        assert list(range(number + 1)) == written
    assert writer.submit(lambda: True).result()
    writer.close()
    assert [0, 1, 2] == written
