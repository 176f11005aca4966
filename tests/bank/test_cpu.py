"""The CPU's streams: copies on one worker thread, done when they are, failures told by the event that they belong to."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial

import pytest

from bank.interrupts import Signals, cut_off
from bank.toy_source import same, toy_source
from hotsplit.bank import cpu, workers
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.cpu import CpuSwapBackend
from hotsplit.bank.pointers import PointerRows
from hotsplit.bank.route import Router
from hotsplit.errors import BankError, SwapError
from patience import LIMIT_S, set_when

HOT = [(2, 0), (3,)]


@pytest.fixture
def made(tmp_path):
    source = toy_source(tmp_path)
    layers = place_layers(HOT, num_experts=4, dynamic=True, inclusive=True)
    rows = build_pointer_rows(source, hot=HOT, layers=layers)
    router = Router(layers, row_bytes=[layout.num_bytes for layout in source.layouts])
    backend = CpuSwapBackend(rows, router=router, files=source.files)
    yield backend, rows, layers, source, router
    backend.close()


def wait(backend, event):
    backend.wait("compute", event, "w2")


def test_a_copy_brings_the_whole_row_and_its_event_tells_the_end(made):
    backend, rows, layers, source, _ = made
    backend.copy("side", layer_id=0, source_row=layers[0].home_row[1], target_row=layers[0].spare_row)
    event = backend.record("side")
    wait(backend, event)
    assert backend.query(event)
    assert same(source.expected[0, 1], rows.tensors(0, layers[0].spare_row))
    assert sum(span.num_bytes for span in source.spans(0, 1)) == backend.copied_bytes


def test_an_event_is_not_done_before_its_copy(made, monkeypatch):
    backend, _, layers, _, _ = made
    go, fill = threading.Event(), PointerRows.fill
    monkeypatch.setattr(PointerRows, "fill", lambda *args, **kwargs: (go.wait(), fill(*args, **kwargs))[1])
    before = backend.record("side")
    backend.copy("side", layer_id=0, source_row=layers[0].home_row[1], target_row=layers[0].spare_row)
    event = backend.record("side")
    assert (True, False) == (backend.query(before), backend.query(event))
    go.set()
    wait(backend, event)
    assert backend.query(event)


def test_the_compute_stream_is_always_done(made):
    backend = made[0]
    assert backend.query(backend.record("compute"))


def test_copies_run_on_one_thread_that_is_not_the_callers(made, monkeypatch):
    backend, _, layers, _, _ = made
    seen, fill = [], PointerRows.fill

    def spy(*args, **kwargs):
        seen.append(threading.current_thread())
        return fill(*args, **kwargs)

    monkeypatch.setattr(PointerRows, "fill", spy)
    for expert in (1, 3, 1):
        backend.copy("side", layer_id=0, source_row=layers[0].home_row[expert], target_row=layers[0].spare_row)
    wait(backend, backend.record("side"))
    assert (3, 1) == (len(seen), len(set(seen)))
    assert threading.current_thread() not in seen


@pytest.mark.parametrize("failure", [BankError("disk"), OSError(5, "disk"), ValueError("disk")])
def test_a_failed_copy_is_told_by_its_own_event_and_by_no_other(made, monkeypatch, failure):
    backend, rows, layers, source, _ = made
    fill = PointerRows.fill

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(PointerRows, "fill", fill)
        raise failure

    monkeypatch.setattr(PointerRows, "fill", fail_once)
    backend.copy("side", layer_id=0, source_row=layers[0].home_row[1], target_row=layers[0].spare_row)
    bad = backend.record("side")
    with pytest.raises(Exception, match="disk"):
        wait(backend, bad)
    backend.copy("side", layer_id=1, source_row=layers[1].home_row[0], target_row=layers[1].spare_row)
    good = backend.record("side")
    wait(backend, good)
    with pytest.raises(SwapError, match="a copy into a hot row failed: got .*disk"):
        backend.query(bad)
    assert backend.query(good)
    assert same(source.expected[1, 0], rows.tensors(1, layers[1].spare_row))


def copy_of(backend, layers, expert, *, layer_id=0):
    layer = layers[layer_id]
    backend.copy("side", layer_id=layer_id, source_row=layer.home_row[expert], target_row=layer.spare_row)


def in_time(backend):
    """Wait for the last copy in a thread: a hang is what is looked for."""
    thread = threading.Thread(target=wait, args=(backend, backend.record("side")), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "a hang"


def test_an_interrupt_at_any_instruction_of_a_copy_leaves_a_thread_that_copies_the_next_one(made):
    backend, rows, layers, source, _ = made
    at, is_inside = 0, True
    while is_inside:
        is_inside = cut_off(partial(copy_of, backend, layers, 1), at=at, modules=[cpu, workers])
        copy_of(backend, layers, 3)
        in_time(backend)
        assert backend.query(backend.record("side"))
        assert same(source.expected[0, 3], rows.tensors(0, layers[0].spare_row)), "copies end in their order"
        at += 1
    assert at > 20


def test_thousands_of_signals_leave_a_thread_that_copies(made):
    backend, rows, layers, source, _ = made

    def copy_many():
        for expert in (1, 3) * 50:
            copy_of(backend, layers, expert)
            while not backend.query(backend.record("side")):
                pass

    with Signals(seed=3) as signals:
        for _ in range(2000):
            signals.during(copy_many, within_s=3e-4)
    assert signals.num_hits > 1000
    copy_of(backend, layers, 3)
    in_time(backend)
    assert same(source.expected[0, 3], rows.tensors(0, layers[0].spare_row))


def test_where_no_thread_can_be_started_the_caller_copies(made, monkeypatch):
    backend, rows, layers, source, _ = made

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    copy_of(backend, layers, 1)
    assert backend.query(backend.record("side"))
    assert same(source.expected[0, 1], rows.tensors(0, layers[0].spare_row))


def test_after_closing_there_are_no_copies_and_those_that_waited_are_told_as_failed(made, monkeypatch):
    backend, _, layers, _, _ = made
    go, began, fill = threading.Event(), threading.Event(), PointerRows.fill
    slow = lambda *args, **kwargs: (began.set(), go.wait(LIMIT_S), fill(*args, **kwargs))[2]  # noqa: E731
    monkeypatch.setattr(PointerRows, "fill", slow)
    copy_of(backend, layers, 1)
    assert began.wait(LIMIT_S)
    copy_of(backend, layers, 3)
    waiting = backend.record("side")
    set_when(go, lambda: waiting.is_done)  # it has been given up
    backend.close()
    with pytest.raises(SwapError, match="a copy into a hot row failed: got the banks are closed"):
        backend.query(waiting)
    with pytest.raises(BankError, match="the banks are closed"):
        copy_of(backend, layers, 1)


@pytest.mark.parametrize(("stream", "source_row"), [("compute", 3), ("side", 0), ("side", 2)])
def test_only_home_rows_are_copied_and_only_beside_the_steps(made, stream, source_row):
    with pytest.raises(SwapError, match="wanted a home row"):
        made[0].copy(stream, layer_id=0, source_row=source_row, target_row=2)


def test_a_publish_is_one_entry_of_the_row_map(made):
    backend, _, _, _, router = made
    before = router.row_map.tolist()
    backend.publish(0, expert=1, row=2)
    before[0][1] = 2
    assert before == router.row_map.tolist()


def test_closing_ends_the_thread_and_gives_the_files_back(tmp_path):
    source = toy_source(tmp_path)
    layers = place_layers(HOT, num_experts=4, dynamic=True, inclusive=True)
    rows = build_pointer_rows(source, hot=HOT, layers=layers)
    router = Router(layers, row_bytes=[1, 1])
    gc.collect()  # what other tests left open
    handles = len(os.listdir("/proc/self/fd"))
    backend = CpuSwapBackend(rows, router=router, files=source.files)
    backend.copy("side", layer_id=0, source_row=layers[0].home_row[1], target_row=layers[0].spare_row)
    backend.close()
    backend.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]
    assert handles == len(os.listdir("/proc/self/fd"))
