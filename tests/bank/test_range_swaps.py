"""The swap protocol over real ranges: whole rows at every tick, write-backs included, and failures that lose nothing."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest
import torch

from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.range_swaps import RangeSwapBackend
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.route import Router
from hotsplit.bank.rows import place
from hotsplit.bank.swap import SwapBackend, Swapper
from hotsplit.errors import BankError, SwapError
from patience import LIMIT_S, finish, set_when

NUM_EXPERTS = 6
HOT = [(4, 1), (0, 3, 5), (2,)]


class Bank:
    """Three layers of six experts, whose bytes say in every tensor whose they are."""

    def __init__(self, folder, *, backend=RangeSwapBackend, side_streams=1):
        self.layers = [place(hot, num_experts=NUM_EXPERTS, spare=True, inclusive=False) for hot in HOT]
        self.file = BankFile(folder)
        self.rows = RangeRows(self.layers, memory=FileMemory(self.file))
        self.tensors = [self._load(layer_id) for layer_id in range(len(HOT))]
        row_bytes = [self.rows.row_bytes(layer_id) for layer_id in range(len(HOT))]
        self.router = Router(self.layers, row_bytes=row_bytes)
        self.backend = backend(self.rows, router=self.router)
        self.swapper = Swapper(self.backend, layouts=self.layers, side_streams=side_streams)

    def _load(self, layer_id):
        weight = self.rows.allocate(layer_id, shape=(7, 1001, 32), dtype=torch.int32)  # rows of 31.3 pages
        scale = self.rows.allocate(layer_id, shape=(7, 96), dtype=torch.int16)
        bias = torch.empty(7, 5, dtype=torch.float32)
        for tensor in (weight, scale, bias):
            tensor.fill_(-1)
            for expert, row in enumerate(self.layers[layer_id].row_map):
                tensor[row] = owner(layer_id, expert)
        self.rows.register(layer_id, [weight, scale, bias])
        return weight, scale, bias

    def wrong(self):
        """One engine step's reads: every expert through the row map, all tensors; what is not wholly its own."""
        return [
            (layer_id, expert, number)
            for layer_id, tensors in enumerate(self.tensors)
            for expert, row in enumerate(self.router.row_map[layer_id].tolist())
            for number, tensor in enumerate(tensors)
            if not bool((tensor[row] == owner(layer_id, expert)).all())
        ]

    def settle(self):
        """Wait for the copies under way, then tick."""
        finish(self.backend._worker)
        return self.swapper.tick()

    def close(self):
        self.backend.close()
        self.rows.close()
        self.file.close()


@pytest.fixture
def bank(tmp_path):
    bank = Bank(tmp_path)
    yield bank
    bank.close()


def owner(layer_id, expert):
    return 100 * (layer_id + 1) + expert


def require_sound(bank):
    """Router, swapper and bytes agree; every expert has one row of its own."""
    assert [] == bank.wrong()
    for layer_id, layer in enumerate(bank.layers):
        row_map = bank.swapper.row_map(layer_id)
        assert list(row_map) == bank.router.row_map[layer_id].tolist()
        assert NUM_EXPERTS == len(set(row_map))
        hot = {expert for expert, row in enumerate(row_map) if row < layer.first_cold}
        assert hot == set(np.flatnonzero(bank.router.hot_mask()[layer_id]))
        assert len(HOT[layer_id]) + (bank.swapper.spare_row(layer_id) is None) == len(hot)


def request_swaps(bank, *, random):
    """One random swap in every layer that is free."""
    for layer_id in sorted(set(range(len(HOT))) - bank.swapper.busy()):
        hot = bank.swapper.hot_experts(layer_id)
        cold = [expert for expert in range(NUM_EXPERTS) if expert not in hot]
        bank.swapper.request(layer_id, expert_in=random.choice(cold), expert_out=random.choice(sorted(hot)))


def test_it_is_a_backend_of_the_swap_protocol(bank):
    backend: SwapBackend = bank.backend
    names = [name for name in vars(SwapBackend) if not name.startswith("_")]
    assert 5 == len(names)
    assert all(callable(getattr(backend, name)) for name in names)


@pytest.mark.parametrize("side_streams", [1, 2])
def test_hundreds_of_swaps_keep_every_experts_bytes_whole_at_every_tick(tmp_path, side_streams):
    bank, random = Bank(tmp_path, side_streams=side_streams), Random(5)
    num_done, num_failed, num_beside = 0, 0, 0
    before = bank.router.hot_mask()
    while num_done < 400:
        request_swaps(bank, random=random)
        result = bank.swapper.tick()
        num_done, num_failed = num_done + len(result.published), num_failed + len(result.failed)
        event = bank.backend.record("side")
        num_beside += not bank.backend.query(event)
        require_sound(bank)  # a step, which reads while copies run
    while not bank.swapper.is_idle():
        num_done += len(bank.swapper.tick().published)
        require_sound(bank)
    bank.settle()
    copied = 2 * num_done * bank.rows.row_bytes(0)
    assert (0, copied) == (num_failed, bank.backend.copied_bytes), "every swap copies in and writes back"
    assert 0 < num_beside, "steps must have read while copies ran, or the test means nothing"
    assert (before != bank.router.hot_mask()).any()
    bank.close()


def test_a_swap_takes_three_ticks_and_writes_the_outgoing_expert_into_the_cold_row(bank):
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    cold_row, hot_row, spare_row = bank.layers[0].row_map[2], bank.layers[0].row_map[4], bank.layers[0].spare_row
    results = [bank.swapper.tick(), bank.settle(), bank.settle()]
    assert [0, 0, 1] == [len(result.published) for result in results]
    assert (spare_row, cold_row) == (bank.swapper.row_map(0)[2], bank.swapper.row_map(0)[4])
    assert hot_row == bank.swapper.spare_row(0)
    assert all(bool((tensor[cold_row] == owner(0, 4)).all()) for tensor in bank.tensors[0])
    require_sound(bank)


def test_rows_that_were_evicted_are_swapped_as_any_other(bank):
    bank.rows.evict()
    assert bank.swapper.request(1, expert_in=2, expert_out=5)
    bank.swapper.tick()
    bank.rows.evict()
    bank.settle()
    bank.settle()
    bank.rows.evict()
    assert bank.swapper.is_idle()
    require_sound(bank)


def failing(monkeypatch, *, copies):
    """Let the copies of these ordinals end after their first tensor; returns the number of copies so far."""
    copy_row, seen = RangeRows.copy_row, []

    def torn(rows, layer_id, *, source_row, target_row):
        seen.append((source_row, target_row))
        if len(seen) - 1 in copies:
            first = rows._tensors[layer_id][0].parts[0]
            first[target_row] = first[source_row]
            raise OSError(5, "Input/output error")
        return copy_row(rows, layer_id, source_row=source_row, target_row=target_row)

    monkeypatch.setattr(RangeRows, "copy_row", torn)
    return seen


def test_a_failed_copy_of_the_incoming_expert_leaves_the_map_and_the_bytes(bank, monkeypatch):
    failing(monkeypatch, copies=[0])
    before = bank.router.row_map.tolist()
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    bank.swapper.tick()
    result = bank.settle()
    assert [(2, 4)] == [(swap.expert_in, swap.expert_out) for swap, _ in result.failed]
    assert "a copy of an expert row failed: got [Errno 5] Input/output error" == result.failed[0][1]
    assert (before, True) == (bank.router.row_map.tolist(), bank.swapper.is_idle())
    require_sound(bank)
    # The torn spare row is nobody's, and the next swap writes it anew.
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    bank.swapper.tick()
    assert [0, 1] == [len(bank.settle().published), len(bank.settle().published)]
    require_sound(bank)


def test_a_failed_write_back_is_tried_again_and_both_experts_stay_whole(bank, monkeypatch):
    seen = failing(monkeypatch, copies=[1, 2])
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    bank.swapper.tick()
    failures, published = [], []
    for _ in range(7):
        result = bank.settle()
        failures.append(len(result.failed))
        published.append(len(result.published))
        require_sound(bank)
    assert [0, 1, 0, 1, 0, 0, 0] == failures
    assert [0, 0, 0, 0, 0, 1, 0] == published
    assert 3 == sum(pair == seen[1] for pair in seen)
    assert bank.swapper.is_idle()


def test_random_failures_among_many_swaps_lose_no_byte(bank, monkeypatch):
    random = Random(9)
    failing(monkeypatch, copies=set(random.sample(range(300), 60)))
    num_done = num_failed = 0
    while num_done < 80:
        request_swaps(bank, random=random)
        result = bank.swapper.tick()
        num_done, num_failed = num_done + len(result.published), num_failed + len(result.failed)
        require_sound(bank)
    assert 10 < num_failed


class PublishesTooEarly(RangeSwapBackend):
    """Calls a copy done while it has not begun: copies stand still until `gate` opens."""

    def __init__(self, rows, *, router):
        super().__init__(rows, router=router)
        self.gate = threading.Event()

    def query(self, event):
        return True

    def wait(self, stream, event, why):
        """Forget every wait."""

    def _copy(self, layer_id, source_row, target_row):
        self.gate.wait(timeout=60)
        super()._copy(layer_id, source_row, target_row)


def test_the_steps_of_these_tests_would_see_a_row_that_is_published_before_it_is_copied(tmp_path):
    bank = Bank(tmp_path, backend=PublishesTooEarly)
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    bank.swapper.tick()
    bank.swapper.tick()
    wrong = bank.wrong()
    bank.backend.gate.set()
    assert [(0, 2, 0), (0, 2, 1), (0, 2, 2)] == wrong
    bank.close()


def test_an_event_is_not_done_before_its_copy_and_waiting_for_it_is(bank, monkeypatch):
    go, copy_row = threading.Event(), RangeRows.copy_row
    monkeypatch.setattr(RangeRows, "copy_row", lambda *args, **kwargs: (go.wait(LIMIT_S), copy_row(*args, **kwargs))[1])
    before = bank.backend.record("side")
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    event = bank.backend.record("side")
    assert (True, False) == (bank.backend.query(before), bank.backend.query(event))
    bank.backend.wait("side", event, "w1")
    bank.backend.wait("side_out", event, "w3")
    assert not bank.backend.query(event), "the worker keeps its own order, so nobody had to wait"
    go.set()
    bank.backend.wait("compute", event, "w2")
    assert bank.backend.query(event)


def test_the_compute_stream_is_always_done(bank, monkeypatch):
    go, copy_row = threading.Event(), RangeRows.copy_row
    monkeypatch.setattr(RangeRows, "copy_row", lambda *args, **kwargs: (go.wait(LIMIT_S), copy_row(*args, **kwargs))[1])
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    assert bank.backend.query(bank.backend.record("compute"))
    go.set()


def test_copies_of_both_side_streams_run_in_order_on_one_thread_that_is_not_the_callers(bank, monkeypatch):
    seen, copy_row = [], RangeRows.copy_row

    def spy(rows, layer_id, *, source_row, target_row):
        seen.append((threading.current_thread(), source_row, target_row))
        return copy_row(rows, layer_id, source_row=source_row, target_row=target_row)

    monkeypatch.setattr(RangeRows, "copy_row", spy)
    for stream, target_row in (("side", 2), ("side_out", 6), ("side", 2)):
        bank.backend.copy(stream, layer_id=0, source_row=5, target_row=target_row)
    bank.backend.wait("compute", bank.backend.record("side"), "w2")
    assert [(5, 2), (5, 6), (5, 2)] == [(source, target) for _, source, target in seen]
    threads = {thread for thread, _, _ in seen}
    assert (1, False) == (len(threads), threading.current_thread() in threads)


def test_a_failed_copy_is_told_by_its_own_event_and_by_no_other(bank, monkeypatch):
    failing(monkeypatch, copies=[0])
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    bad = bank.backend.record("side")
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    good = bank.backend.record("side")
    bank.backend.wait("compute", good, "w2")
    assert bank.backend.query(good)
    for tell in (lambda: bank.backend.query(bad), lambda: bank.backend.wait("compute", bad, "w2")):
        with pytest.raises(SwapError, match="a copy of an expert row failed: got .*Input/output error"):
            tell()
    assert bank.rows.row_bytes(0) == bank.backend.copied_bytes


def test_a_copy_between_rows_that_do_not_exist_fails_and_writes_nothing(bank):
    bank.backend.copy("side", layer_id=0, source_row=7, target_row=0)
    with pytest.raises(SwapError, match="got row 7; wanted 0..6"):
        bank.backend.wait("compute", bank.backend.record("side"), "w2")
    require_sound(bank)


def test_no_copy_runs_on_the_thread_of_the_steps(bank):
    with pytest.raises(SwapError, match="got a copy on the compute stream; wanted on the side stream"):
        bank.backend.copy("compute", layer_id=0, source_row=5, target_row=2)


def test_a_publish_is_one_entry_of_the_row_map(bank):
    expected = bank.router.row_map.tolist()
    bank.backend.publish(1, expert=2, row=3)
    expected[1][2] = 3
    assert expected == bank.router.row_map.tolist()


def test_closing_finishes_the_copy_under_way_and_gives_the_queued_ones_up(bank, monkeypatch):
    begun, go, copy_row = threading.Event(), threading.Event(), RangeRows.copy_row

    def slow(*args, **kwargs):
        begun.set()
        go.wait(LIMIT_S)
        return copy_row(*args, **kwargs)

    monkeypatch.setattr(RangeRows, "copy_row", slow)
    events = []
    for _ in range(2):
        bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
        events.append(bank.backend.record("side"))
    assert begun.wait(LIMIT_S)
    set_when(go, lambda: events[1].is_done)  # it has been given up
    bank.backend.close()
    bank.backend.close()
    assert bank.backend.query(events[0])
    with pytest.raises(SwapError, match="given up: got a closed bank"):
        bank.backend.query(events[1])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]


def test_a_swap_that_is_asked_for_after_closing_fails_and_changes_nothing(bank):
    bank.backend.close()
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    result = bank.swapper.tick()
    assert "a closed bank" in result.failed[0][1]
    require_sound(bank)


def test_a_copy_after_the_memory_is_gone_is_an_error_and_no_crash(bank):
    bank.rows.close()
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    with pytest.raises(BankError, match="the banks are closed"):
        bank.backend.wait("compute", bank.backend.record("side"), "w2")
