"""CUDA ranges when a call fails, when a layout cannot be kept, and when calls are made wrongly: refused, and nothing lost."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from hotsplit.bank import cuda_ranges
from hotsplit.bank.cuda_ranges import CudaMemory, CudaRange, cuda_memory
from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT

MIB = 1 << 20
GPU, NODE, HOST = Location(kind="device"), Location(kind="host_numa"), Location(kind="host")
SMALL = FakeMachine(granularity={"device": 1 << 16, "host_numa": 1 << 16, "host": 1 << 16})


def memory_of(driver, host=NODE, placement=NO_PLACEMENT):
    return cuda_memory(driver, host=host, tensor_at=cpu_tensor, placement=placement)


def made(driver, *, num_fast=2, shape=(5, 768), dtype=torch.uint8, host=NODE):
    return CudaRange(shape=shape, dtype=dtype, num_fast=num_fast, memory=memory_of(driver, host))


def names(driver):
    return [call.name for call in driver.calls]


@pytest.mark.parametrize("num_fast", [0, 2, 5])
def test_a_failure_of_any_call_leaks_nothing(num_fast):
    num_calls = 9 if num_fast == 2 else 5
    for at in range(1, num_calls + 1):
        driver = FakeDriver(SMALL)
        memory = memory_of(driver)
        driver.fail(at)
        with pytest.raises(BankError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=num_fast, memory=memory)
        assert driver.held == NOTHING, f"call {at}: {names(driver)}"
    driver = FakeDriver(SMALL)
    memory = memory_of(driver)
    driver.fail(num_calls + 1)
    held = CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=num_fast, memory=memory)
    with pytest.raises(BankError, match="cannot be given back: got cuMemUnmap"):
        held.close()
    held.close()
    assert driver.held == NOTHING


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_close_that_fails_gives_the_rest_back_and_the_next_one_finishes(at):
    driver = FakeDriver(SMALL)
    held = made(driver)
    driver.fail(at)
    with pytest.raises(BankError, match="address range cannot be given back: got .*OUT_OF_MEMORY"):
        held.close()
    assert (1, 0 if at == 3 else 1) == (driver.held.reservations, driver.held.mappings)
    assert ("cuMemAddressFree" in names(driver)) == (at == 3)
    held.close()
    held.close()
    assert driver.held == NOTHING


@pytest.mark.parametrize("first", range(1, 10))
def test_a_failure_and_a_failing_clean_up_are_both_told(first):
    driver = FakeDriver(SMALL)
    memory = memory_of(driver)
    driver.fail(first)
    real, broken = FakeDriver.unmap, []

    def unmap(address, *, num_bytes):
        if not broken:
            broken.append(address)
            raise BankError("cuMemUnmap", got="broken")
        real(driver, address, num_bytes=num_bytes)

    driver.unmap = unmap
    with pytest.raises(BankError) as caught:
        CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=2, memory=memory)
    assert "OUT_OF_MEMORY" in str(caught.value)
    told = ["and then: address range cannot be given back: got cuMemUnmap: got broken"] if broken else []
    assert told == getattr(caught.value, "__notes__", [])


def test_an_interrupt_after_mapping_leaks_nothing():
    driver = FakeDriver(SMALL)

    def interrupted(address, *, num_bytes):
        assert 2 == driver.held.mappings
        raise KeyboardInterrupt

    memory = cuda_memory(driver, host=NODE, tensor_at=interrupted)
    with pytest.raises(KeyboardInterrupt):
        CudaRange(shape=(5, 768), dtype=torch.uint8, num_fast=2, memory=memory)
    assert driver.held == NOTHING


def wrong_order(steps):
    """A _Segment.back that makes the same calls in another order, or leaves some out."""

    def back(self, driver, *, location, readers):
        calls = {
            "create": lambda: setattr(self, "handle", driver.create(self.num_bytes, location=location)),
            "map": lambda: driver.map(self.address, num_bytes=self.num_bytes, handle=self.handle),
            "release": lambda: driver.release(self.handle),
            "access": lambda: driver.set_access(self.address, num_bytes=self.num_bytes, locations=readers),
        }
        for step in steps:
            calls[step]()

    return back


@pytest.mark.parametrize("steps", [
    ["create", "release", "map", "access"], ["create", "access", "map", "release"], ["access", "create", "map", "release"],
    ["map", "create", "release", "access"],
])  # fmt: skip
def test_calls_in_another_order_are_refused(monkeypatch, steps):
    monkeypatch.setattr(cuda_ranges._Segment, "back", wrong_order(steps))
    with pytest.raises(BankError, match="CUDA_ERROR_INVALID_VALUE"):
        made(FakeDriver(SMALL))


def test_a_handle_that_is_not_released_is_found(monkeypatch):
    monkeypatch.setattr(cuda_ranges._Segment, "back", wrong_order(["create", "map", "access"]))
    driver = FakeDriver(SMALL)
    made(driver)
    assert 2 == driver.held.handles


def test_access_that_is_not_set_is_found(monkeypatch):
    monkeypatch.setattr(cuda_ranges._Segment, "back", wrong_order(["create", "map", "release"]))
    held = made(FakeDriver(SMALL))
    with pytest.raises(BankError, match="no access was set"):
        held.copy_row(source_row=0, target_row=4, stream=0)


@pytest.mark.parametrize(
    ("assumed", "shape", "message"),
    [(1 << 16, (5, 768), "size in no whole pages"), (1 << 17, (4, 1 << 17), "address on no page of its memory")],
)
def test_a_page_that_is_assumed_and_not_asked_for_is_found(assumed, shape, message):
    driver = FakeDriver(FakeMachine(granularity={"device": 1 << 16, "host_numa": 1 << 18}))
    assert 1 << 18 == memory_of(driver).page_bytes
    memory = CudaMemory(driver=driver, host=NODE, page_bytes=assumed, tensor_at=cpu_tensor)
    with pytest.raises(BankError, match=message):
        CudaRange(shape=shape, dtype=torch.uint8, num_fast=2, memory=memory)
    assert driver.held == NOTHING


def test_addresses_that_go_before_what_is_mapped_there_are_refused(monkeypatch):
    held = made(FakeDriver(SMALL))
    monkeypatch.setattr(cuda_ranges._Segment, "give_back", lambda self, driver: [])
    monkeypatch.setattr(cuda_ranges._Segment, "is_held", False)
    with pytest.raises(BankError, match="something is mapped there"):
        held.close()


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            FakeMachine(device_bytes=0),
            "GPU memory for expert rows: .*wanted 14.0 MiB at device 0; lower HOTSPLIT_HOT_GIB",
        ),
        (FakeMachine(host_bytes=0), "host memory for .*wanted 22.0 MiB at HOST_NUMA node 0; raise HOTSPLIT_HOT_GIB"),
        (FakeMachine(nodes=(3,)), "there is no HOST_NUMA node 0.*--cap-add SYS_NICE"),
    ],
)
def test_memory_that_does_not_suffice_is_one_clear_error(machine, message):
    driver = FakeDriver(machine)
    with pytest.raises(BankError, match=message):
        made(driver, shape=(5, 7 * MIB), num_fast=2)
    assert driver.held == NOTHING


def test_a_full_device_is_asked_again_when_others_have_given_back_what_they_cache():
    driver, given = FakeDriver(), []
    driver.fail(1, call="cuMemCreate")
    memory = dataclasses.replace(memory_of(driver), give_back=lambda: given.append("back"))
    with contextlib.closing(CudaRange(shape=(5, 7 * MIB), dtype=torch.uint8, num_fast=2, memory=memory)):
        assert ["back"] == given
    assert driver.held == NOTHING


@pytest.mark.parametrize("ordinal", [2, 3])
def test_a_full_host_and_a_device_that_stays_full_are_errors(ordinal):
    driver, given = FakeDriver(FakeMachine(device_bytes=0 if ordinal == 2 else 1 << 30)), []
    if ordinal == 3:
        driver.fail(2, call="cuMemCreate")
    memory = dataclasses.replace(memory_of(driver), give_back=lambda: given.append("back"))
    with pytest.raises(BankError, match="host memory" if ordinal == 3 else "GPU memory"):
        CudaRange(shape=(5, 7 * MIB), dtype=torch.uint8, num_fast=2, memory=memory)
    assert (["back"] if ordinal == 2 else []) == given
    assert driver.held == NOTHING


def test_addresses_that_do_not_suffice_are_one_clear_error():
    driver = FakeDriver()
    memory = memory_of(driver)
    driver.fail(1)
    with pytest.raises(BankError, match="addresses for expert rows: .*wanted 36.0 MiB; look at ulimit -v"):
        CudaRange(shape=(5, 7 * MIB), dtype=torch.uint8, num_fast=2, memory=memory)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_fast", "message"),
    [
        ((4, 128), torch.uint8, 2, "got rows of 128 bytes; wanted rows, each a multiple of 256 bytes"),
        ((4, 64), torch.bfloat16, 0, "multiple of 256"),
        ((4, 0), torch.uint8, 2, "rows of 0 bytes"),
        ((0, 256), torch.uint8, 0, "wanted rows"),
        ((), torch.uint8, 0, "wanted rows"),
        ((4, 256), torch.uint8, 5, "got 5 rows in fast memory; wanted 0..4"),
        ((4, 256), torch.uint8, -1, "got -1 rows in fast memory; wanted 0..4"),
    ],
)
def test_a_layout_that_cannot_be_kept_is_refused_before_any_call(shape, dtype, num_fast, message):
    driver = FakeDriver()
    memory = memory_of(driver)
    driver.calls.clear()
    with pytest.raises(BankError, match=message):
        CudaRange(shape=shape, dtype=dtype, num_fast=num_fast, memory=memory)
    assert [] == driver.calls
