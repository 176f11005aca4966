"""The CUDA swap backend over stitched ranges: what it asks of the driver, on which stream, and what a refusal leaves.

The ranges are a FakeDriver's, so every byte is real; streams run when the test lets them. That all orders are sound is
shown in test_cuda_swaps_explored.py.
"""

from __future__ import annotations

import gc
import weakref
from random import Random

import pytest
import torch

from hotsplit.bank.cuda_ranges import CudaRange, cuda_memory
from hotsplit.bank.cuda_swaps import CudaSwapBackend, DeviceRowMap, device_row_map
from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver
from hotsplit.bank.route import Router
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.rows import place
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.swap import SwapBackend, Swapper
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError, SwapError

NUM_EXPERTS = 6
HOT = [(4, 1), (0, 3, 5), (2,)]
COPY, WRITE = "cuMemcpyAsync", "cuMemsetD32Async"


class Bank:
    """Three layers of six experts, whose bytes say in every tensor whose they are (a RowMemory)."""

    def __init__(self, *, backend=CudaSwapBackend, max_copies=1, side_streams=1):
        self.layers = [place(hot, num_experts=NUM_EXPERTS, spare=True, inclusive=False) for hot in HOT]
        self.driver = FakeDriver()
        self.ranges = []
        self.tensors_of = [self._load(layer_id) for layer_id in range(len(HOT))]
        self.router = Router(self.layers, row_bytes=[3072 + 256 + 20] * len(HOT))
        self.maps = [self.router._maps[dtype].clone() for dtype in (torch.int64, torch.int32)]
        self.streams = SimStreams(self.driver, num_chunks=2)
        self.backend = backend(
            self,
            streams=self.streams,
            driver=self.streams,
            row_maps=[device_row_map(one) for one in self.maps],
            mirror=self.router,
            max_copies=max_copies,
        )
        self.swapper = Swapper(self.backend, layouts=self.layers, side_streams=side_streams)
        self.driver.calls.clear()

    def _load(self, layer_id):
        memory = cuda_memory(self.driver, host=Location(kind="host_numa"), tensor_at=cpu_tensor)
        first_cold = self.layers[layer_id].first_cold
        for shape, dtype in (((7, 12, 64), torch.int32), ((7, 128), torch.int16)):
            self.ranges.append(CudaRange(shape=shape, dtype=dtype, num_fast=first_cold, memory=memory))
        tensors = [*(one.tensor for one in self.ranges[-2:]), torch.empty(7, 5, dtype=torch.float32)]
        for tensor in tensors:
            tensor.fill_(-1)
            for expert, row in enumerate(self.layers[layer_id].row_map):
                tensor[row] = owner(layer_id, expert)
        return tensors

    def tensors(self, layer_id):
        sizes = [one.stride(0) * one.element_size() for one in self.tensors_of[layer_id]]
        addresses = [one.data_ptr() for one in self.tensors_of[layer_id]]
        return [RowTensor(pieces=((0, at),), row_bytes=size) for at, size in zip(addresses, sizes, strict=True)]

    def is_sound(self):
        """Whether a step that reads every expert, through either map, finds its own bytes in all tensors."""
        return all(
            bool((tensor[row_map[layer_id, :NUM_EXPERTS].long()].flatten(1) == owners(layer_id)).all())
            for row_map in self.maps
            for layer_id, tensors in enumerate(self.tensors_of)
            for tensor in tensors
        )

    def calls(self, name):
        return [call.values for call in self.driver.calls if call.name == name]

    def step(self):
        """One tick, one step, and all that was enqueued."""
        result = self.swapper.tick()
        self.streams.launch_step()
        self.streams.drain()
        return result

    def finish(self):
        """Steps until no swap is left; what their ticks did."""
        results = []
        while not self.swapper.is_idle():
            results.append(self.step())
            assert 100 > len(results), "swaps that never end"
        return results

    def close(self):
        self.backend.close()
        for one in self.ranges:
            one.close()


@pytest.fixture
def bank():
    bank = Bank()
    yield bank
    bank.close()
    assert bank.driver.held == NOTHING


def owner(layer_id, expert):
    return 100 * (layer_id + 1) + expert


def owners(layer_id):
    return torch.tensor([[owner(layer_id, expert)] for expert in range(NUM_EXPERTS)])


def require_sound(bank):
    """Both maps, the mirror, the swapper and the bytes agree."""
    assert bank.is_sound()
    for layer_id in range(len(HOT)):
        row_map = list(bank.swapper.row_map(layer_id))
        assert [row_map] * 2 == [one[layer_id, :NUM_EXPERTS].tolist() for one in bank.maps]
        assert row_map == bank.router.row_map[layer_id].tolist()
        hot = bank.router.hot_mask()[layer_id].nonzero()[0].tolist()
        assert sorted(bank.swapper.hot_experts(layer_id)) == hot


def request_swaps(bank, *, random):
    """One random swap in every layer that is free."""
    for layer_id in sorted(set(range(len(HOT))) - bank.swapper.busy()):
        hot = bank.swapper.hot_experts(layer_id)
        cold = [expert for expert in range(NUM_EXPERTS) if expert not in hot]
        bank.swapper.request(layer_id, expert_in=random.choice(cold), expert_out=random.choice(sorted(hot)))


def request_all(bank):
    """One swap in each layer."""
    for layer_id, (expert_in, expert_out) in enumerate([(2, 4), (1, 5), (0, 2)]):
        assert bank.swapper.request(layer_id, expert_in=expert_in, expert_out=expert_out)


def test_it_is_a_backend_of_the_swap_protocol(bank):
    backend: SwapBackend = bank.backend
    names = [name for name in vars(SwapBackend) if not name.startswith("_")]
    assert 5 == len(names)
    assert all(callable(getattr(backend, name)) for name in names)


@pytest.mark.parametrize(("max_copies", "side_streams"), [(1, 1), (3, 2)])
def test_many_swaps_keep_every_experts_bytes_whole_in_every_state(max_copies, side_streams):
    bank, random = Bank(max_copies=max_copies, side_streams=side_streams), Random(7)
    num_done = num_beside = 0
    for _ in range(250):
        request_swaps(bank, random=random)
        num_done += len(bank.swapper.tick().published)
        bank.streams.launch_step()
        while not bank.streams.is_empty() and (bank.streams.num_steps() > 2 or random.random() < 0.9):
            bank.streams.advance(random.choice(bank.streams.enabled()))
            num_beside += bank.streams.is_stepping() and bank.streams.num_copies() > 0
            assert bank.is_sound()
    num_done += sum(len(result.published) for result in bank.finish())
    require_sound(bank)
    assert 40 < num_done
    assert 12 * num_done == len(bank.calls(COPY)), "three tensors in two chunks, in and back"
    assert 100 < num_beside, "steps must have read while copies ran, or the test means nothing"
    bank.close()


class PublishesTooEarly(CudaSwapBackend):
    """Calls every copy done, and waits for none."""

    def query(self, event):
        return True

    def wait(self, stream, event, why):
        """Forget every wait."""


def test_the_reads_of_these_tests_would_see_a_row_that_is_published_before_it_is_copied():
    bank = Bank(backend=PublishesTooEarly)
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    for _ in range(2):
        bank.swapper.tick()
        while "compute" in bank.streams.enabled():
            bank.streams.advance("compute")
    assert not bank.is_sound()
    bank.close()


def test_a_swap_copies_every_tensor_in_and_back_on_the_side_stream_and_by_rows(bank):
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    layer = bank.layers[0]
    cold, hot, spare = layer.row_map[2], layer.row_map[4], layer.spare_row
    bank.streams._num_chunks = 1
    bank.finish()
    expected = [
        {
            "target": tensor[target].data_ptr(),
            "source": tensor[source].data_ptr(),
            "num_bytes": tensor[0].nbytes,
            "stream": 2,
        }
        for source, target in ((cold, spare), (hot, cold))
        for tensor in bank.tensors_of[0]
    ]
    assert (expected, 2) == (bank.calls(COPY), bank.streams.handle("side"))
    require_sound(bank)


def test_a_publish_writes_one_word_of_each_map_on_the_compute_stream_and_tells_the_mirror(bank):
    before = [one.clone() for one in bank.maps]
    bank.backend.publish(1, expert=2, row=3)
    assert 3 == bank.router.row_map[1, 2]
    assert all(torch.equal(*pair) for pair in zip(before, bank.maps, strict=True)), "the device has not come to it"
    bank.streams.drain()
    compute = bank.streams.handle("compute")
    addresses = [one[1, 2:].data_ptr() for one in bank.maps]
    assert [{"address": one, "value": 3, "stream": compute} for one in addresses] == bank.calls(WRITE)
    for one in before:
        one[1, 2] = 3
    assert all(torch.equal(*pair) for pair in zip(before, bank.maps, strict=True))


def test_a_publish_waits_for_the_steps_before_it_and_not_for_the_host(bank):
    bank.streams.launch_step()
    bank.backend.publish(1, expert=2, row=3)
    bank.streams.advance("compute")
    before = bank.maps[0][1, 2].item()
    bank.streams.drain()
    assert (bank.layers[1].row_map[2], 3) == (before, bank.maps[0][1, 2].item())


# Turns.


def test_copies_of_many_layers_take_turns_one_row_for_each_step(bank):
    request_all(bank)
    rows_per_step, num_published = [], 0
    for _ in range(7):
        num_before = len(bank.calls(COPY))
        num_published += len(bank.step().published)
        rows_per_step.append((len(bank.calls(COPY)) - num_before) / 6)
    assert ([1, 1, 1, 1, 1, 1, 0], 3, True) == (rows_per_step, num_published, bank.swapper.is_idle())
    require_sound(bank)


def test_a_write_back_is_not_handed_over_while_another_copy_is_on_its_way(bank):
    for layer_id in (0, 1):
        bank.backend.copy("side", layer_id=layer_id, source_row=0, target_row=6)
    first, second = (len(bank.tensors(layer_id)) for layer_id in (0, 1))
    events = [bank.backend.record("side")]
    seen = [bank.streams.num_copies()]
    for _ in range(2 * first):
        assert not bank.backend.query(events[0])
        seen.append(bank.streams.num_copies())
        bank.streams.advance("side")
    assert {1, 2, 3} == set(seen), "the copy under way is the only one, to its end"
    bank.streams.drain()
    assert not bank.backend.query(events[0])
    assert second == bank.streams.num_copies()
    bank.streams.drain()
    assert bank.backend.query(events[0])


def test_the_event_of_a_copy_in_the_queue_is_not_done_and_a_wait_hands_it_over(bank):
    events = []
    for layer_id in range(3):
        bank.backend.copy("side", layer_id=layer_id, source_row=5, target_row=6)
        events.append(bank.backend.record("side"))
    assert [False, False, False] == [bank.backend.query(event) for event in events]
    assert 3 == bank.streams.num_copies()
    bank.backend.wait("compute", events[1], "w2")
    assert (6, 1) == (bank.streams.num_copies(), len(bank.backend._waiting))
    bank.streams.launch_step()
    assert ("side",) == bank.streams.enabled()
    bank.streams.drain()
    assert [True, True, False] == [bank.backend.query(event) for event in events]


def test_a_copy_does_not_overtake_those_in_the_queue(bank):
    events = []
    for layer_id in range(3):
        if layer_id == 2:
            bank.streams.drain()  # there is room now, and one is waiting for it
        bank.backend.copy("side", layer_id=layer_id, source_row=5, target_row=6)
        events.append(bank.backend.record("side"))
    bank.backend.query(events[2])
    bank.streams.drain()
    assert [True, True, False] == [bank.backend.query(event) for event in events]


def test_a_wait_is_enqueued_even_where_a_query_has_said_done(bank):
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=6)
    event = bank.backend.record("side")
    bank.streams.drain()
    assert bank.backend.query(event)
    bank.backend.wait("compute", event, "w2")
    assert ("compute",) == bank.streams.enabled()


@pytest.mark.parametrize("max_copies", [1, 2, 3])
def test_as_many_rows_are_on_their_way_as_may_be(max_copies):
    bank = Bank(max_copies=max_copies)
    request_all(bank)
    bank.swapper.tick()
    assert 3 * max_copies == bank.streams.num_copies()
    bank.close()


def test_what_became_of_a_copy_is_kept_for_as_long_as_somebody_may_ask(bank):
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    event = bank.backend.record("side")
    alive = weakref.ref(event)
    bank.streams.drain()
    bank.backend.copy("side", layer_id=0, source_row=5, target_row=2)
    gc.collect()
    assert bank.backend.query(event)
    del event
    gc.collect()
    assert (None, 1) == (alive(), len(bank.backend._outcomes))


# Refusals.


def refuse(bank, *, copies):
    """Let the driver refuse the copies of these ordinals."""
    bank.streams._failing_copies = frozenset(copies)


@pytest.mark.parametrize("ordinal", range(3))
def test_an_incoming_copy_that_the_driver_refuses_drops_the_swap_and_leaves_the_map(bank, ordinal):
    refuse(bank, copies=[ordinal])
    before = [one.clone() for one in bank.maps]
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    result = bank.step()
    assert [(2, 4)] == [(swap.expert_in, swap.expert_out) for swap, _ in result.failed]
    expected = "layer_id 0, copy of row 4 to row 2: got cuMemcpyAsync: got CUDA_ERROR_OUT_OF_MEMORY"
    assert result.failed[0][1].startswith(expected)
    assert bank.swapper.is_idle()
    assert all(torch.equal(*pair) for pair in zip(before, bank.maps, strict=True))
    require_sound(bank)
    # The spare row is torn and nobody's; the next swap writes it anew.
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    assert [0, 0, 1] == [len(bank.step().published) for _ in range(3)]
    require_sound(bank)


@pytest.mark.parametrize("ordinal", range(3, 6))
def test_a_write_back_that_the_driver_refuses_is_tried_again_and_both_experts_stay_whole(bank, ordinal):
    refuse(bank, copies=[ordinal, ordinal + 3])
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    failures, published = [], []
    for _ in range(6):
        result = bank.step()
        failures.append(len(result.failed))
        published.append(len(result.published))
        assert bank.is_sound()
    assert (2, 1, True) == (sum(failures), sum(published), bank.swapper.is_idle())
    require_sound(bank)


def test_a_copy_in_the_queue_that_is_refused_fails_for_its_own_swap_alone(bank):
    refuse(bank, copies=[4])
    request_all(bank)
    results = bank.finish()
    failed = [swap.layer_id for result in results for swap, _ in result.failed]
    published = [swap.layer_id for result in results for swap in result.published]
    assert ([1], [0, 2]) == (failed, sorted(published))
    require_sound(bank)


def test_random_refusals_among_many_swaps_lose_no_byte(bank):
    random, num_done, num_failed = Random(3), 0, 0
    refuse(bank, copies=random.sample(range(800), 100))
    for _ in range(300):
        request_swaps(bank, random=random)
        result = bank.step()
        num_done, num_failed = num_done + len(result.published), num_failed + len(result.failed)
        assert bank.is_sound()
    assert (True, True) == (num_done > 60, num_failed > 20)


class RefusesWrites:
    """A driver of which the n-th write fails."""

    def __init__(self, streams, *, at):
        self.streams, self.left = streams, at

    def copy(self, *args, **kwargs):
        self.streams.copy(*args, **kwargs)

    def write32(self, address, *, value, stream):
        self.left -= 1
        if self.left == 0:
            raise BankError(WRITE, got="a refusal")
        self.streams.write32(address, value=value, stream=stream)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_publish_that_is_refused_ends_the_tick_and_the_next_one_completes_it(bank, at):
    bank.backend._driver = RefusesWrites(bank.streams, at=at)
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    num_refused, published = 0, 0
    for _ in range(6):
        try:
            published += len(bank.step().published)
        except BankError:
            num_refused += 1
        bank.streams.drain()
        assert bank.is_sound(), "the maps may differ, but both name whole rows"
    assert (1, 1) == (num_refused, published)
    require_sound(bank)


# Captures.


def test_a_frozen_swapper_enqueues_nothing_while_a_graph_is_captured_and_goes_on_afterwards(bank):
    request_all(bank)
    bank.step()
    before = bank.streams.key()
    with bank.swapper.frozen(), bank.streams.capture():
        assert bank.backend.is_capturing()
        for _ in range(3):
            assert bank.swapper.tick().published == ()
    assert (before, False) == (bank.streams.key(), bank.backend.is_capturing())
    bank.finish()
    require_sound(bank)


def test_a_tick_in_a_capture_that_nobody_froze_is_an_error_and_reaches_no_stream(bank):
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    with bank.streams.capture(), pytest.raises(BankError, match="graph capture: got a tick; .*; freeze the Swapper"):
        bank.swapper.tick()
    assert (True, []) == (bank.streams.is_empty(), bank.driver.calls)
    bank.finish()
    require_sound(bank)


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.record("compute"),
        lambda backend: backend.record("side"),
        lambda backend: backend.wait("side", 0, "w1"),
        lambda backend: backend.query(0),
        lambda backend: backend.copy("side", layer_id=0, source_row=5, target_row=2),
        lambda backend: backend.publish(0, expert=2, row=2),
    ],
)
def test_every_call_minds_a_capture(bank, call):
    with bank.streams.capture(), pytest.raises(BankError, match="swaps during a graph capture"):
        call(bank.backend)
    assert bank.router.row_map[0].tolist() == list(bank.layers[0].row_map)


# The rest.


def test_events_of_the_compute_stream_are_fresh_ones_and_a_side_stream_without_copies_has_none(bank):
    events = [bank.backend.record("compute"), bank.backend.record("compute")]
    assert (2, None, None) == (len(set(events)), bank.backend.record("side"), bank.backend.record("side_out"))
    assert bank.backend.query(None)
    bank.backend.wait("compute", None, "w2")
    bank.streams.drain()
    assert [True, True] == [bank.backend.query(event) for event in events]


def test_no_copy_runs_on_the_stream_of_the_steps(bank):
    with pytest.raises(SwapError, match="got a copy on the compute stream; wanted on the side stream"):
        bank.backend.copy("compute", layer_id=0, source_row=5, target_row=2)


def test_closing_waits_for_the_copies_under_way_and_gives_the_queued_ones_up(bank):
    events = []
    bank.streams.launch_step()
    for layer_id in range(2):
        bank.backend.copy("side", layer_id=layer_id, source_row=5, target_row=6)
        events.append(bank.backend.record("side"))
    bank.backend.close()
    bank.backend.close()
    assert (0, 1) == (bank.streams.num_copies(), bank.streams.num_steps())
    assert bank.backend.query(events[0])
    with pytest.raises(SwapError, match="given up: got a closed bank"):
        bank.backend.query(events[1])


def test_closing_waits_for_what_was_enqueued_of_a_copy_that_the_driver_refused(bank):
    refuse(bank, copies=[2])
    with pytest.raises(SwapError, match="copy of row 5 to row 2"):
        bank.backend.copy("side_out", layer_id=0, source_row=5, target_row=2)
    assert 2 == bank.streams.num_copies()
    bank.backend.close()
    assert 0 == bank.streams.num_copies()


def test_a_swap_that_is_asked_for_after_closing_fails_and_changes_nothing(bank):
    bank.backend.close()
    assert bank.swapper.request(0, expert_in=2, expert_out=4)
    result = bank.step()
    assert "a closed bank" in result.failed[0][1]
    require_sound(bank)


def test_a_row_map_says_where_its_entries_lie():
    maps = torch.zeros(3, 8, dtype=torch.int64)
    found = device_row_map(maps[:, 1:7])
    assert DeviceRowMap(address=maps.data_ptr() + 8, layer_bytes=64, entry_bytes=8) == found
    assert maps[2, 5:].data_ptr() == found.entry_address(2, expert=4)


@pytest.mark.parametrize(
    "row_map",
    [
        torch.zeros(3, 8, dtype=torch.int16),
        torch.zeros(3, 8),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(8, 3, dtype=torch.int32).T,
    ],
)
def test_a_row_map_that_no_kernel_could_read_is_refused(row_map):
    with pytest.raises(BankError, match=r"wanted int32 or int64 \[L, E\], contiguous in each layer"):
        device_row_map(row_map)
