"""Rows in two banks move within and between the parts, and swaps keep every expert whole in every state."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bank.two_bank_rows import HOT, LAYERS, NUM_EXPERTS, load, memory_of, numbers, owner
from hotsplit.bank.cuda_swaps import CudaSwapBackend, device_row_map
from hotsplit.bank.fake_driver import NOTHING, FakeDriver
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.route import Router
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.rows import place
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.swap import Swapper
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.bank.two_banks import TwoBankMemory, bank_row_ids
from hotsplit.errors import BankError


@pytest.fixture
def driver():
    made = FakeDriver()
    yield made
    assert made.held == NOTHING


@pytest.fixture
def rows(driver):
    made = RangeRows(LAYERS, memory=memory_of(driver))
    yield made
    made.close()


def test_a_row_is_found_in_its_part():
    tensor = RowTensor(pieces=((0, 4096), (3, 1 << 20)), row_bytes=256)
    assert [4096, 4352, 4608, 1 << 20, (1 << 20) + 256] == [tensor.address_of(row) for row in range(5)]
    cold = RowTensor(pieces=((0, 1 << 20),), row_bytes=16)
    assert (1 << 20) + 32 == cold.address_of(2)


def test_rows_tell_where_they_lie(rows):
    tensors = load(rows, 0)
    for parts, where in zip(tensors, rows.tensors(0), strict=True):
        found = [row.data_ptr() for part in (parts if isinstance(parts, tuple) else (parts,)) for row in part]
        assert found == [where.address_of(row) for row in range(7)]
    assert 3072 + 256 + 20 == rows.row_bytes(0)


@pytest.mark.parametrize(("source", "target"), [(0, 6), (6, 0), (1, 2), (3, 5), (2, 3)])
def test_a_row_is_copied_within_and_between_the_parts(rows, source, target):
    tensors = load(rows, 0)
    assert rows.row_bytes(0) == rows.copy_row(0, source_row=source, target_row=target)
    expected = [source if row == target else row for row in range(7)]
    assert [expected] * 3 == [numbers(one) for one in tensors]


@pytest.mark.parametrize(("a", "b"), [(0, 6), (1, 2), (5, 3), (2, 2), (2, 3)])
def test_two_rows_change_places_within_and_between_the_parts(rows, a, b):
    tensors = load(rows, 1)
    rows.exchange(1, a, b)
    expected = list(range(7))
    expected[a], expected[b] = b, a
    assert [expected] * 3 == [numbers(one) for one in tensors]


@given(order=st.permutations(range(7)), num_named=st.integers(0, 7), first_cold=st.integers(0, 7))
def test_rows_come_to_lie_where_they_shall_whichever_part_they_are_in(order, num_named, first_cold):
    driver = FakeDriver()
    layer = place(range(first_cold), num_experts=7, spare=False, inclusive=False)
    rows = RangeRows([layer], memory=memory_of(driver))
    tensors = load(rows, 0)
    named = order[:num_named]
    rows.permute(0, rows=named, free_row=None)
    for one in tensors:
        found = numbers(one)
        assert list(range(num_named)) == [found[row] for row in named]
    rows.close()
    assert driver.held == NOTHING


def test_moving_rows_waits_for_the_engines_work_before_and_for_the_copies_after(driver):
    events = []
    memory = TwoBankMemory(driver, tensor_at=cpu_tensor, synchronise=lambda: events.append("wait"))
    rows = RangeRows(LAYERS, memory=memory)
    load(rows, 0)
    copy = driver.copy
    driver.copy = lambda *args, **kwargs: (events.append("copy"), copy(*args, **kwargs))
    rows.copy_row(0, source_row=0, target_row=6)
    assert ["wait", "copy", "wait"] * 3 == events
    rows.close()


def test_bytes_taken_are_counted_by_memory(rows):
    load(rows, 0)
    first_cold = LAYERS[0].first_cold
    assert first_cold * (3072 + 256) + 7 * 20 == rows.hot_bytes
    assert 3 * 4096 + 4096 == rows.host_bytes


def test_both_parts_are_owned_and_released_together(rows, driver):
    hot, cold = rows.allocate_parts(0, shape=(7, 128), dtype=torch.int16)
    other = rows.allocate_parts(1, shape=(7, 128), dtype=torch.int16)
    assert [True, True, False] == [rows.owns(one) for one in (hot, cold, cold[1:])]
    rows.release(0, cold)
    assert [False, False, True, True] == [rows.owns(one) for one in (hot, cold, *other)]
    assert (1, 1) == (len(rows.ranges), driver.held.registrations)


def test_a_part_that_has_no_rows_is_nobodys(driver):
    layers = [place(range(4), num_experts=4, spare=True, inclusive=False)] * 2
    rows = RangeRows(layers, memory=memory_of(driver))
    for layer_id in (0, 1):
        hot, cold = rows.allocate_parts(layer_id, shape=(4, 256), dtype=torch.uint8)
        assert (True, False, 0) == (rows.owns(hot), rows.owns(cold), cold.numel())
        rows.register(layer_id, [(hot, cold)])
    assert 4 * 2 * 256 == rows.hot_bytes
    rows.close()


@pytest.mark.parametrize(
    "parts",
    [
        (torch.empty(3, 64), torch.empty(3, 64)),
        (torch.empty(4, 64), torch.empty(3, 64)),
        (torch.empty(3, 64), torch.empty(4, 32)),
        (torch.empty(3, 64), torch.empty(8, 64)[::2]),
        (torch.empty(3, 64), torch.empty(2, 64), torch.empty(2, 64)),
    ],
    ids=["too few", "another edge", "other rows", "rows apart", "three parts"],
)
def test_parts_that_are_not_the_layers_hot_and_cold_rows_are_refused(rows, parts):
    with pytest.raises(BankError, match="layer_id 0: got a tensor"):
        rows.register(0, [parts])


def test_parts_that_share_bytes_are_refused(rows):
    memory = torch.empty(7, 64)
    with pytest.raises(BankError, match="wanted tensors that share no bytes"):
        rows.register(0, [(memory[:3], memory[2:6])])
    rows.register(0, [(memory[:3], memory[3:]), (memory[:3], memory[3:])])
    assert 256 == rows.row_bytes(0)


# Swaps.


class Bank:
    """Three layers in two banks behind the real swap backend; every row tells its expert."""

    def __init__(self):
        self.driver = FakeDriver()
        self.rows = RangeRows(LAYERS, memory=memory_of(self.driver))
        self.tensors = [load(self.rows, layer_id) for layer_id in range(len(LAYERS))]
        for layer_id, tensors in enumerate(self.tensors):
            for parts in tensors:
                self._name_experts(layer_id, parts)
        self.router = Router(LAYERS, row_bytes=[3072 + 256 + 20] * len(HOT))
        self.maps = [self.router._maps[dtype].clone() for dtype in (torch.int64, torch.int32)]
        self.streams = SimStreams(self.driver, num_chunks=2)
        self.backend = CudaSwapBackend(
            self.rows,
            streams=self.streams,
            driver=self.streams,
            row_maps=[device_row_map(one) for one in self.maps],
            mirror=self.router,
        )
        self.swapper = Swapper(self.backend, layouts=LAYERS)

    def _name_experts(self, layer_id, parts):
        rows = [row for part in (parts if isinstance(parts, tuple) else (parts,)) for row in part]
        for row in rows:
            row.fill_(-1)
        for expert, row in enumerate(LAYERS[layer_id].row_map):
            rows[row].fill_(owner(layer_id, expert))

    def read(self, layer_id):
        """What a step would find of every expert, through each map and by the ids of each part."""
        for row_map in self.maps:
            row_ids = row_map[layer_id, :NUM_EXPERTS]
            hot_ids, cold_ids = bank_row_ids(row_ids, first_cold=LAYERS[layer_id].first_cold)
            for parts in self.tensors[layer_id][:2]:
                hot, cold = (part.flatten(1).float() for part in parts)
                found = hot[hot_ids.long()] * (hot_ids >= 0)[:, None] + cold[cold_ids.long()] * (cold_ids >= 0)[:, None]
                yield found
            yield self.tensors[layer_id][2][row_ids.long()]

    def is_sound(self):
        owners = [torch.tensor([[owner(layer_id, e)] for e in range(NUM_EXPERTS)]) for layer_id in range(len(LAYERS))]
        return all(bool((found == owners[i]).all()) for i in range(len(LAYERS)) for found in self.read(i))


def test_many_swaps_between_two_banks_keep_every_expert_whole_in_every_state():
    bank, random = Bank(), Random(7)
    num_done = num_beside = 0
    for _ in range(120):
        for layer_id in sorted(set(range(len(HOT))) - bank.swapper.busy()):
            hot = bank.swapper.hot_experts(layer_id)
            cold = [expert for expert in range(NUM_EXPERTS) if expert not in hot]
            bank.swapper.request(layer_id, expert_in=random.choice(cold), expert_out=random.choice(sorted(hot)))
        num_done += len(bank.swapper.tick().published)
        bank.streams.launch_step()
        while not bank.streams.is_empty() and (bank.streams.num_steps() > 2 or random.random() < 0.9):
            bank.streams.advance(random.choice(bank.streams.enabled()))
            num_beside += bank.streams.is_stepping() and bank.streams.num_copies() > 0
            assert bank.is_sound()
    assert num_done > 20
    assert num_beside > 40, "steps must have read while copies ran, or the test means nothing"
    bank.backend.close()
    bank.rows.close()
    assert bank.driver.held == NOTHING
