"""The banks of a GPU, put together over a fake driver and simulated streams: what an engine would hold and drive."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hotsplit.bank.cuda_ranges import cuda_memory
from hotsplit.bank.cuda_row_memory import CudaRowMemory
from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver
from hotsplit.bank.kernels import reference
from hotsplit.bank.range_banks import RangeBankOptions, RangeBanks
from hotsplit.bank.range_devices import CudaDevice, HostDevice
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.rows import place
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError
from hotsplit.plan.rebalance import RebalanceOptions

NUM_EXPERTS, TOP_K, ROW = 6, 2, 256
LAYERS = [place(hot, num_experts=NUM_EXPERTS, spare=True, inclusive=False) for hot in ((0, 1, 2), (5, 4, 3))]


class PlainMemory:
    """Bytes of this process, where a device's would be."""

    def copy(self, target, *, source, num_bytes, stream):
        ctypes.memmove(target, source, num_bytes)

    def write32(self, address, *, value, stream):
        ctypes.c_uint32.from_address(address).value = value


class Machine:
    """Rows that name their expert, and banks over them."""

    def __init__(self, *, dyn_steps=2, dynamic=True):
        self.driver = FakeDriver()
        memory = cuda_memory(self.driver, host=Location(kind="host_numa"), tensor_at=cpu_tensor)
        self.waits = 0
        self.memory = CudaRowMemory(memory, device_type="cpu", synchronise=self.wait)
        self.rows = RangeRows(LAYERS, memory=self.memory)
        self.weights = []
        for layer_id, layer in enumerate(LAYERS):
            weight = self.rows.allocate(layer_id, shape=(layer.num_rows, ROW), dtype=torch.uint8)
            for expert, row in enumerate(layer.row_map):
                weight[row] = 10 * layer_id + expert
            self.rows.register(layer_id, [weight])
            self.weights.append(weight)
        self.streams = SimStreams(PlainMemory(), num_chunks=2)
        device = CudaDevice(device=torch.device("cpu"), streams=self.streams, driver=self.streams, kernels=reference)
        options = RangeBankOptions(
            top_k=TOP_K, dynamic=dynamic, dyn_steps=dyn_steps, rebalance=RebalanceOptions(half_life=1.0, margin=1.0)
        )
        self.banks = RangeBanks(self.rows, layers=LAYERS, prior=None, options=options, device=device)

    def wait(self):
        self.waits += 1

    def step(self, ids):
        """One step of one token; the experts whose bytes each layer would have read."""
        self.banks.tick()
        self.run_streams()
        with self.banks.step("decode"):
            rows = [self.banks.route(layer_id, ids, is_padding=None) for layer_id in range(len(LAYERS))]
        return [self.weights[layer_id][rows[layer_id][0].tolist(), :].tolist() for layer_id in range(len(LAYERS))]

    def run_streams(self):
        """What a device does between two steps: all that was enqueued."""
        self.streams.drain()

    def close(self):
        self.banks.close()


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.close()
    assert made.driver.held == NOTHING


def test_a_step_reads_the_expert_that_was_asked_for_while_experts_change_places(machine):
    generator = np.random.default_rng(3)
    for number in range(120):
        low = 3 if number // 30 % 2 else 0  # what is asked for moves from three experts to the other three and back
        ids = torch.from_numpy(generator.choice(3, size=(1, TOP_K), replace=False) + low)
        for layer_id, read in enumerate(machine.step(ids)):
            assert [[10 * layer_id + expert] * ROW for expert in ids[0].tolist()] == read
    assert machine.banks.live.swaps.done > 6
    assert 0 == machine.banks.live.swaps.failed
    maps = machine.banks.router.device_maps.values()
    assert all(torch.equal(machine.banks.router.row_map, one.long()) for one in maps), "host and device agree"


def test_what_it_counts_is_what_was_asked_for(machine):
    for _ in range(9):
        machine.step(torch.tensor([[0, 3]]))
    machine.banks.router.settle()
    counters = machine.banks.router.counters
    assert (9, 9) == (counters.steps, counters.tokens["decode"])
    assert [[9, 0, 0, 9, 0, 0]] * 2 == counters.counts["decode"].tolist()


def test_nothing_is_enqueued_or_asked_while_a_graph_is_captured():
    machine = Machine(dyn_steps=1)
    machine.step(torch.tensor([[3, 4]]))
    machine.banks.tick()  # asks for swaps
    machine.banks.tick()  # begins one
    machine.run_streams()
    before = machine.banks.router.row_map.clone()
    with machine.streams.capture():
        machine.banks.tick()
    assert torch.equal(before, machine.banks.router.row_map)
    machine.banks.tick()
    assert not torch.equal(before, machine.banks.router.row_map), "there was something to publish"
    machine.run_streams()
    machine.close()


@pytest.mark.parametrize("dynamic", [True, False])
def test_static_experts_ask_nothing_during_a_capture_either(dynamic, monkeypatch):
    machine = Machine(dynamic=dynamic)
    asked = []
    monkeypatch.setattr(machine.banks.router, "flush", lambda: asked.append("flush"))
    with machine.streams.capture():
        machine.banks.tick()
    assert [] == asked
    machine.banks.tick()
    assert ["flush"] == asked
    machine.close()


def test_rows_move_by_copies_of_the_driver_that_are_waited_for(machine):
    before = [weight.clone() for weight in machine.weights]
    machine.driver.calls.clear()
    machine.rows.exchange(0, 0, 6)
    assert 3 == [call.name for call in machine.driver.calls].count("cuMemcpyAsync")
    assert machine.waits >= 2, "before, for the engine's stream, and after"
    assert torch.equal(before[0][[6, 0]], machine.weights[0][[0, 6]])
    assert torch.equal(before[1], machine.weights[1])


def test_rows_that_no_page_edge_can_divide_are_refused(machine):
    with pytest.raises(BankError, match="each a multiple of 256 bytes"):
        machine.rows.allocate(0, shape=(LAYERS[0].num_rows, ROW + 64), dtype=torch.uint8)


def test_where_cold_rows_lie_is_looked_up_and_said(machine, caplog):
    caplog.set_level("INFO", logger="hotsplit.bank.cuda_row_memory")
    machine.memory.require_placed(machine.rows.ranges)
    assert any("cold rows: " in record.getMessage() for record in caplog.records)


def test_a_router_of_another_device_is_refused(machine):
    router = HostDevice().router(LAYERS, row_bytes=[ROW, ROW], dyn_steps=2, copies_ids=False)
    device = CudaDevice(device=torch.device("cpu"), streams=machine.streams, driver=machine.streams, kernels=reference)
    with pytest.raises(BankError, match="got Router; wanted DeviceRouter"):
        device.swaps(machine.rows, router=router)
