from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from hotsplit.errors import BudgetError
from hotsplit.host.progress import HOST_FLOOR_BYTES, LoadWatch, available_host_bytes
from patience import LIMIT_S, until

GIB = 2**30
NUM_LAYERS = 69
LOG = "hotsplit.host.progress"


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger=LOG)
    return lambda: [record.getMessage() for record in caplog.records]


def watch_of(*, clock=time.monotonic, available=lambda: 100 * GIB, **kwargs):
    kwargs = {"total_bytes": NUM_LAYERS * GIB, "num_layers": NUM_LAYERS, **kwargs}
    return LoadWatch("loading weights", clock=clock, available=available, **kwargs)


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "hotsplit-load-watch"]


class Loader:
    """Loads a layer every `seconds` of the clock, while the watch's thread waits: stands in for what it waits on."""

    def __init__(self, clock, *, seconds):
        self.clock, self.seconds, self.watch = clock, seconds, None
        self.left, self.next_at = NUM_LAYERS, clock.now + seconds

    def wait(self, timeout):
        until = self.clock.now + timeout
        while self.left and self.next_at <= until:
            self.clock.now, self.next_at, self.left = self.next_at, self.next_at + self.seconds, self.left - 1
            self.watch.advance(GIB)
            self.watch.layer_done()
        self.clock.now = until
        return not self.left


@pytest.mark.parametrize("seconds", [0.4, 3.7, 10, 47], ids=lambda seconds: f"{seconds} s per layer")
def test_a_loader_of_69_layers_is_never_silent_for_more_than_ten_seconds(clock, seconds):
    said_at = [clock.now]
    log = SimpleNamespace(info=lambda *message: said_at.append(clock.now))
    watch = watch_of(clock=clock, log=log)
    loader = watch._left = Loader(clock, seconds=seconds)
    loader.watch = watch
    watch._begun_at = clock.now
    watch._watch()
    assert NUM_LAYERS == watch.done_layers
    assert 10 >= max(after - before for before, after in pairwise(said_at))
    assert 10 >= clock.now - said_at[-1]
    assert NUM_LAYERS * seconds / 10 + 1 >= len(said_at) - 1


def test_the_line_has_layers_bytes_percent_rate_time_left_and_free_memory(clock):
    with watch_of(clock=clock) as watch:
        clock.now += 20
        watch.advance(10 * GIB)
        watch.layer_done()
        watch.layer_done()
        expected = (
            "loading weights: 2 of 69 layers, 10.0 of 69.0 GiB (14 %), 0.50 GiB/s, about 1 min 58 s left, "
            "100.0 GiB of host memory free"
        )
        assert expected == watch.line()


@pytest.mark.parametrize(
    ("seconds", "left"), [(0.25, "17 s"), (1, "1 min 8 s"), (2, "2 min 16 s"), (100, "1 h 53 min")]
)
def test_time_left_is_in_the_unit_that_a_person_reads(clock, seconds, left):
    with watch_of(clock=clock) as watch:
        clock.now += seconds
        watch.advance(GIB)
        assert f"about {left} left" in watch.line()


def test_before_the_first_byte_the_time_left_is_unknown(clock):
    with watch_of(clock=clock) as watch:
        clock.now += 5
        assert "(0 %), time left unknown" in watch.line()


@pytest.mark.parametrize(("total_gib", "done_gib"), [(4, 5), (0, 0), (0, 1)])
def test_more_bytes_than_announced_are_all_of_them(clock, total_gib, done_gib):
    with watch_of(clock=clock, total_bytes=total_gib * GIB) as watch:
        clock.now += 1
        watch.advance(done_gib * GIB)
        assert "(100 %)" in watch.line()


def test_a_loader_that_is_stuck_in_one_read_is_reported_all_the_same(lines):
    with watch_of(every_s=0.02):
        until(lambda: len(lines()) >= 3)
    assert all("0 of 69 layers" in line for line in lines()[:3])


def test_leaving_stops_the_thread_at_once():
    begun = time.monotonic()
    with watch_of(every_s=3600):
        assert 1 == len(watchers())
    assert [] == watchers()
    assert LIMIT_S > time.monotonic() - begun


def test_an_error_stops_the_thread_and_is_not_called_done(lines):
    with pytest.raises(OSError, match="disk"), watch_of(every_s=3600):
        raise OSError("disk")
    assert [] == watchers()
    assert [] == lines()


def test_the_last_line_says_how_long_it_took(clock, lines):
    with watch_of(clock=clock, every_s=1e9, num_layers=1, total_bytes=3 * GIB) as watch:
        watch.advance(3 * GIB)
        watch.layer_done()
        clock.now += 130
    assert ["loading weights: done in 2 min 10 s, 1 of 1 layers, 3.0 of 3.0 GiB (100 %)"] == lines()


def test_under_the_floor_the_load_stops_with_one_clear_error(clock):
    free = [100 * GIB, 2 * GIB, 2 * GIB - 1]
    with watch_of(clock=clock, floor_bytes=2 * GIB, available=lambda: free.pop(0)) as watch:
        for _ in range(2):
            clock.now += 1
            watch.advance(GIB)
        clock.now += 1
        with pytest.raises(BudgetError) as caught:
            watch.advance(GIB)
    expected = "loading weights stopped at 0 of 69 layers, 3.0 of 69.0 GiB (4 %): got 2.000 GiB of host memory left; "
    assert str(caught.value).startswith(expected + "wanted at least 2.000 GiB; stop what else")
    assert (2 * GIB - 1, 3 * GIB) == (caught.value.available_bytes, caught.value.done_bytes)


def test_the_error_of_the_floor_leaves_no_thread_behind():
    with pytest.raises(BudgetError), watch_of(available=lambda: HOST_FLOOR_BYTES - 1) as watch:
        watch.layer_done()
    assert [] == watchers()


def test_host_memory_is_looked_at_once_a_second_and_not_at_every_report(clock):
    looks = []
    with watch_of(clock=clock, every_s=1e9, available=lambda: looks.append(clock.now) or GIB) as watch:
        for _ in range(100):
            watch.advance(1)
            clock.now += 0.125
    assert 13 == len(looks)


def test_unknown_host_memory_stops_nothing(clock):
    with watch_of(clock=clock, available=lambda: None) as watch:
        clock.now += 2
        watch.advance(GIB)
        assert watch.line().endswith("host memory unknown")


def test_reports_of_many_threads_add_up():
    with watch_of() as watch:
        threads = [threading.Thread(target=lambda: [watch.advance(3) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 6000 == watch.done_bytes


def test_this_machine_tells_its_available_memory():
    found = available_host_bytes()
    assert found is None or found > HOST_FLOOR_BYTES
