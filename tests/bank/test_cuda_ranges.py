"""CUDA ranges on a driver without a GPU: bytes lie where rows say, calls come in the right order, nothing is ever lost."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.cuda_ranges import CudaRange, can_stitch, cuda_memory
from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.ranges import BankFile, StitchedRange
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError
from hotsplit.host import numa
from hotsplit.host.numa import NO_PLACEMENT, Placement

MIB = 1 << 20
GPU, NODE, HOST = Location(kind="device"), Location(kind="host_numa"), Location(kind="host")
SMALL = FakeMachine(granularity={"device": 1 << 16, "host_numa": 1 << 16, "host": 1 << 16})

# Of published models, w13 and w2 per rank: 7.0 and 3.5 MiB, 3.75 MiB, 7.91 MiB; then no multiple of a page at all.
ROWS = [7 * MIB, 7 * MIB // 2, 15 * MIB // 4, 2880 * 2 * 1440, 2 * MIB + 256, 2 * MIB - 256, 256]


def memory_of(driver, host=NODE, placement=NO_PLACEMENT):
    return cuda_memory(driver, host=host, tensor_at=cpu_tensor, placement=placement)


def made(driver, *, num_fast=2, shape=(5, 768), dtype=torch.uint8, host=NODE):
    return CudaRange(shape=shape, dtype=dtype, num_fast=num_fast, memory=memory_of(driver, host))


def locations_of(driver, address, num_bytes):
    """Where the first and the last byte lie."""
    return [driver.location_at(address), driver.location_at(address + num_bytes - 1)]


def names(driver):
    return [call.name for call in driver.calls]


@pytest.mark.parametrize("row_bytes", ROWS)
@pytest.mark.parametrize("num_fast", [0, 1, 2, 3])
def test_rows_of_any_256_bytes_lie_whole_in_their_memory_and_keep_their_bytes(row_bytes, num_fast):
    driver = FakeDriver()
    held = made(driver, shape=(3, row_bytes // 2), dtype=torch.bfloat16, num_fast=num_fast)
    for row in range(3):
        held.tensor[row].view(torch.uint8).fill_(10 + row)
    for row in range(3):
        assert [GPU if row < num_fast else NODE] * 2 == locations_of(driver, held.row_address(row), row_bytes)
        first_and_last = held.tensor[row].view(torch.uint8)[[0, -1]].tolist()
        assert [10 + row] * 2 == first_and_last
    held.close()
    assert driver.held == NOTHING


@pytest.mark.parametrize("row_bytes", ROWS)
def test_the_first_cold_row_begins_a_page_and_the_tensor_starts_aligned_inside_its_first_page(row_bytes):
    driver = FakeDriver()
    for num_fast in range(3):
        held = made(driver, shape=(3, row_bytes), num_fast=num_fast)
        base = held.edge - held.fast_bytes
        assert (0, 0, 0) == (held.edge % (2 * MIB), held.address % 256, base % (2 * MIB))
        assert (held.edge, held.address) == (held.tensor[num_fast].data_ptr(), held.tensor.data_ptr())
        assert 0 <= held.address - base < 2 * MIB
        held.close()


@settings(max_examples=150)
@given(
    rows=st.integers(1, 9),
    units=st.integers(1, 700),
    num_fast=st.integers(0, 9),
    device_page=st.integers(12, 18),
    host_page=st.integers(12, 18),
    host=st.sampled_from([NODE, HOST]),
)
def test_any_shape_on_any_pages_is_placed_by_row(rows, units, num_fast, device_page, host_page, host):
    num_fast, row_bytes = min(num_fast, rows), 256 * units
    pages = {"device": 1 << device_page, "host_numa": 1 << host_page, "host": 1 << host_page}
    driver = FakeDriver(FakeMachine(granularity=pages))
    held = made(driver, shape=(rows, units, 64), dtype=torch.float32, num_fast=num_fast, host=host)
    page = max(pages["device"], pages["host"])
    for row in range(rows):
        assert [GPU if row < num_fast else host] * 2 == locations_of(driver, held.row_address(row), row_bytes)
    whole = [-(-count * row_bytes // page) * page for count in (num_fast, rows - num_fast)]
    assert (whole[0], whole[1], rows * row_bytes) == (held.fast_bytes, held.slow_bytes, held.num_bytes)
    assert (whole[0], whole[1]) == (driver.held.device_bytes, driver.held.host_bytes)
    assert 0 == held.address % 256
    held.tensor.fill_(1.5)  # a kernel, not a copy of the driver's
    assert 1.5 * rows * units * 64 == held.tensor.sum(dtype=torch.float64).item()
    held.close()
    assert driver.held == NOTHING


@pytest.mark.parametrize(("device", "host"), [(1 << 16, 1 << 21), (1 << 21, 1 << 16), (1 << 16, 1 << 16)])
def test_a_page_is_the_larger_granularity_and_both_are_asked_for(device, host):
    driver = FakeDriver(FakeMachine(granularity={"device": device, "host_numa": host}))
    assert max(device, host) == memory_of(driver).page_bytes
    asked = [call.values["location"] for call in driver.calls if call.name == "cuMemGetAllocationGranularity"]
    assert [GPU, NODE] == asked


def test_pages_that_are_no_power_of_two_are_refused():
    driver = FakeDriver(FakeMachine(granularity={"device": 3 << 16}))
    with pytest.raises(BankError, match="pages of the driver: got .*; wanted powers of two from 256 on"):
        memory_of(driver)


def test_the_driver_is_called_in_its_order_and_gets_each_segments_readers():
    driver = FakeDriver(SMALL)
    memory = memory_of(driver)
    driver.calls.clear()
    held = CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=2, memory=memory)
    base, page = held.edge - held.fast_bytes, 1 << 16
    backed = ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"]
    assert ["cuMemAddressReserve", *backed, *backed] == names(driver)
    assert {"num_bytes": 2 * page, "alignment": page} == driver.calls[0].values
    access = [call.values for call in driver.calls if call.name == "cuMemSetAccess"]
    assert {"address": base, "num_bytes": page, "locations": (GPU,)} == access[0]
    assert {"address": held.edge, "num_bytes": page, "locations": (GPU, NODE)} == access[1]
    driver.calls.clear()
    held.close()
    assert ["cuMemUnmap", "cuMemUnmap", "cuMemAddressFree"] == names(driver)


@pytest.mark.parametrize(("num_fast", "kinds"), [(0, [NODE]), (3, [GPU])])
def test_a_wholly_cold_or_hot_tensor_takes_one_memory_alone(num_fast, kinds):
    driver = FakeDriver(SMALL)
    held = made(driver, shape=(3, 256), num_fast=num_fast)
    assert kinds == [call.values["location"] for call in driver.calls if call.name == "cuMemCreate"]
    assert (held.edge - held.fast_bytes) == held.address
    assert sorted([held.fast_bytes, held.slow_bytes]) == [0, 1 << 16]
    held.close()


@pytest.mark.parametrize("pair", [(0, 1), (0, 4), (4, 0), (3, 4), (4, 3), (2, 2)])
def test_a_row_is_copied_within_and_between_both_memories_to_the_bit(pair):
    source, target = pair
    driver = FakeDriver(SMALL)
    held = made(driver, shape=(5, 3 * 256), num_fast=2)
    filled = torch.randint(0, 256, (5, 768), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    held.tensor.copy_(filled)
    assert 768 == held.copy_row(source_row=source, target_row=target, stream=9)
    expected = filled.clone()
    expected[target] = filled[source]
    assert torch.equal(expected, held.tensor)
    assert (768, 9) == (driver.calls[-1].values["num_bytes"], driver.calls[-1].values["stream"])


def test_a_copy_over_both_memories_is_what_the_driver_refuses():
    driver = FakeDriver(SMALL)
    held = made(driver)
    other = torch.zeros(held.num_bytes, dtype=torch.uint8)
    for source, target in ((held.address, other.data_ptr()), (other.data_ptr(), held.address)):
        with pytest.raises(BankError, match="bytes of two mappings"):
            driver.copy(target, source=source, num_bytes=held.num_bytes, stream=0)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_does_not_exist_is_refused(row):
    held = made(FakeDriver(SMALL))
    for call in (
        lambda: held.row_address(row),
        lambda: held.copy_row(source_row=row, target_row=0, stream=0),
        lambda: held.copy_row(source_row=0, target_row=row, stream=0),
    ):
        with pytest.raises(BankError, match=f"row of an address range: got {row}; wanted 0..4"):
            call()


def test_a_closed_range_refuses_everything_but_another_close():
    held = made(FakeDriver(SMALL))
    held.evict()
    held.close()
    held.close()
    for call in (lambda: held.tensor, held.evict, lambda: held.row_address(0)):
        with pytest.raises(BankError, match="address range: got a closed one"):
            call()


def test_callers_can_ask_which_tensors_can_be_stitched():
    yes = [((4, 256), torch.uint8), ((4, 3, 128), torch.bfloat16), ((1, 64), torch.float32)]
    no = [
        ((4, 255), torch.uint8),
        ((4, 64), torch.uint8),
        ((4, 0), torch.uint8),
        ((4,), torch.float32),
        ((), torch.int8),
    ]
    assert [True] * 3 + [False] * 5 == [can_stitch(shape, dtype=dtype) for shape, dtype in [*yes, *no]]


def test_many_ranges_share_a_device_until_it_is_full():
    driver = FakeDriver(FakeMachine(device_bytes=6 << 16, granularity=SMALL.granularity))
    held = [made(driver, shape=(3, 1 << 16), num_fast=2) for _ in range(3)]
    for value, one in enumerate(held):
        one.tensor.fill_(value)
    with pytest.raises(BankError, match="GPU memory for expert rows"):
        made(driver, shape=(3, 1 << 16), num_fast=2)
    held[1].close()
    again = made(driver, shape=(3, 1 << 16), num_fast=2)
    again.tensor.fill_(9)
    assert [{0}, {2}, {9}] == [set(one.tensor.flatten().tolist()) for one in (held[0], held[2], again)]
    for one in (held[0], held[2], again):
        one.close()
    assert driver.held == NOTHING


def test_a_device_range_has_the_shape_of_a_range_on_a_cpu(tmp_path):
    file = BankFile(tmp_path)
    twin = StitchedRange(shape=(5, 768), dtype=torch.uint8, num_fast=2, file=file)
    held = made(FakeDriver(SMALL))
    public = {name for name in {*dir(twin), *vars(twin)} if not name.startswith("_")}
    assert set() == public - {*dir(held), *vars(held)}
    assert (twin.num_bytes, twin.tensor.shape) == (held.num_bytes, held.tensor.shape)
    held.close()
    twin.close()
    file.close()


@pytest.mark.parametrize(("host", "expected"), [(HOST, numa._MODES["preferred"]), (NODE, numa._MODES["off"])])
def test_plain_host_memory_is_allocated_under_the_placement_and_the_threads_policy_comes_back(
    monkeypatch, host, expected
):
    modes = [0]

    def system_call(name, *arguments):
        if name == "set_mempolicy":
            modes.append(arguments[0])
        else:
            ctypes.c_int.from_address(arguments[0]).value = modes[-1]
        return 0

    monkeypatch.setattr(numa, "system_call", system_call)
    driver, seen = FakeDriver(SMALL), {}
    real = driver.create
    driver.create = lambda size, *, location: (seen.update({location: modes[-1]}), real(size, location=location))[1]
    memory = memory_of(driver, host, placement=Placement(policy="preferred", node=0))
    held = CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=2, memory=memory)
    assert {GPU: 0, host: expected} == seen
    assert 0 == modes[-1]
    held.close()


def test_the_tensors_of_a_device_are_the_default():
    driver = SimpleNamespace(device=3, granularity=lambda location: 1 << 21)
    memory = cuda_memory(driver, host=NODE)
    assert (Location(kind="device", index=3), 3) == (memory.device, memory.tensor_at._device)


def test_the_waste_of_a_tensor_is_less_than_a_page_in_each_memory():
    driver = FakeDriver()
    for row_bytes in ROWS:
        held = made(driver, shape=(3, row_bytes), num_fast=2)
        hot, cold = 2 * row_bytes, row_bytes
        assert (math.ceil(hot / 2 / MIB), math.ceil(cold / 2 / MIB)) == (
            held.fast_bytes // 2 // MIB,
            held.slow_bytes // 2 // MIB,
        )
        held.close()
