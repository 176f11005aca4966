"""Snapshots are written beside the steps: the newest always in the end, and a slow disk holds nobody up."""

from __future__ import annotations

import threading
import time

import pytest

from hotsplit.engines.transformers.engine import SnapshotWriter

pytestmark = pytest.mark.transformers


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-snapshots")]


def test_putting_returns_while_the_disk_is_slow_and_the_newest_is_written_last():
    go, written = threading.Event(), []

    def write(snapshot):
        go.wait(10)
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
