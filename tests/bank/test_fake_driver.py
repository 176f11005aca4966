"""The driver without a GPU: its memory is real, its rules are the real driver's, and it knows what was not given back."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import pytest

from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeHeld, FakeMachine
from hotsplit.errors import BankError

PAGE = 1 << 21
GPU, NODE, HOST = Location(kind="device"), Location(kind="host_numa"), Location(kind="host")


@pytest.fixture
def driver():
    return FakeDriver()


def mapped(driver, *locations, page=PAGE, access=True):
    """A reservation with one page of each location behind it."""
    address = driver.reserve(page * len(locations), alignment=page)
    for i, location in enumerate(locations):
        handle = driver.create(page, location=location)
        driver.map(address + i * page, num_bytes=page, handle=handle)
        driver.release(handle)
        if access:
            readers = [GPU] if location == GPU else [GPU, location]
            driver.set_access(address + i * page, num_bytes=page, locations=readers)
    return address


def unmapped(driver, address, *, pages=1, page=PAGE):
    for i in range(pages):
        driver.unmap(address + i * page, num_bytes=page)
    driver.free(address, num_bytes=page * pages)


def bytes_at(address, num_bytes):
    return np.frombuffer(memoryview((ctypes.c_ubyte * num_bytes).from_address(address)), dtype=np.uint8)


def permissions_at(address):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            if start <= address < end:
                return line.split()[1]
    return None


def refused(error, detail=""):
    return pytest.raises(BankError, match=f"got {error}.*{detail}")


INVALID = "CUDA_ERROR_INVALID_VALUE"


def test_two_memories_behind_one_address_range_are_read_as_one(driver):
    address = mapped(driver, GPU, NODE)
    view = bytes_at(address, 2 * PAGE)
    view[:] = np.arange(2 * PAGE, dtype=np.uint64).astype(np.uint8)
    assert [PAGE - 2 & 255, PAGE - 1 & 255, 0, 1] == view[PAGE - 2 : PAGE + 2].tolist()
    assert (GPU, NODE, None) == tuple(driver.location_at(address + at) for at in (PAGE - 1, PAGE, 2 * PAGE))


def test_memory_keeps_its_bytes_under_another_address(driver):
    handle = driver.create(PAGE, location=GPU)
    for value in (0, 9):
        address = driver.reserve(PAGE, alignment=PAGE)
        driver.map(address, num_bytes=PAGE, handle=handle)
        driver.set_access(address, num_bytes=PAGE, locations=[GPU])
        assert value == bytes_at(address, 1)[0]
        bytes_at(address, 1)[0] = 9
        unmapped(driver, address)
    driver.release(handle)
    assert driver.held == NOTHING


def test_nobody_can_touch_a_mapping_before_access_is_set(driver):
    address = mapped(driver, GPU, access=False)
    assert "---s" == permissions_at(address)
    with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "no access was set"):
        driver.copy(address, source=address + 64, num_bytes=64, stream=0)
    driver.set_access(address, num_bytes=PAGE, locations=[GPU])
    assert "rw-s" == permissions_at(address)


def test_a_new_mapping_starts_without_access(driver):
    address = mapped(driver, GPU)
    driver.unmap(address, num_bytes=PAGE)
    driver.map(address, num_bytes=PAGE, handle=driver.create(PAGE, location=GPU))
    assert "---s" == permissions_at(address)


def test_addresses_are_aligned_as_asked_for_and_no_better(driver):
    for alignment in (mmap.PAGESIZE, 1 << 16, PAGE):
        for num_bytes in (alignment, 3 * alignment):
            assert alignment == driver.reserve(num_bytes, alignment=alignment) % (2 * alignment)


def test_what_is_held_is_counted_by_kind(driver):
    address = mapped(driver, GPU, NODE, HOST)
    handle = driver.create(2 * PAGE, location=GPU)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    registered = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    driver.register(registered, num_bytes=mmap.PAGESIZE)
    expected = FakeHeld(
        reservations=1, mappings=3, handles=1, registrations=1, device_bytes=3 * PAGE, host_bytes=2 * PAGE
    )
    assert expected == driver.held
    driver.unregister(registered)
    driver.release(handle)
    unmapped(driver, address, pages=3)
    assert driver.held == NOTHING


def test_memory_goes_with_its_last_mapping_and_not_with_its_handle(driver):
    address = mapped(driver, GPU)
    assert (0, PAGE) == (driver.held.handles, driver.held.device_bytes)
    driver.unmap(address, num_bytes=PAGE)
    assert 0 == driver.held.device_bytes


def test_memory_is_limited_and_comes_back():
    driver = FakeDriver(FakeMachine(device_bytes=2 * PAGE, host_bytes=PAGE))
    handle = driver.create(2 * PAGE, location=GPU)
    with refused("CUDA_ERROR_OUT_OF_MEMORY", "0 bytes left"):
        driver.create(PAGE, location=GPU)
    driver.release(handle)
    driver.create(PAGE, location=GPU)
    driver.create(PAGE, location=HOST)
    with refused("CUDA_ERROR_OUT_OF_MEMORY", "0 bytes left"):
        driver.create(PAGE, location=NODE)


def test_each_memory_has_pages_of_its_own():
    driver = FakeDriver(FakeMachine(granularity={"device": 1 << 16}))
    assert [1 << 16, PAGE] == [driver.granularity(one) for one in (GPU, NODE)]
    driver.create(3 << 16, location=GPU)
    with refused(INVALID, "size in no whole pages"):
        driver.create(3 << 16, location=NODE)


@pytest.mark.parametrize("kind", ["host_numa", "host", "device"])
def test_memory_that_is_not_supported_is_refused_and_told_as_a_figure(kind):
    driver = FakeDriver(FakeMachine(unsupported=frozenset({kind})))
    for call in (
        lambda: driver.create(PAGE, location=Location(kind=kind)),
        lambda: driver.granularity(Location(kind=kind)),
    ):
        with refused("CUDA_ERROR_NOT_SUPPORTED"):
            call()
    name = {"host_numa": "HOST_NUMA_", "host": "HOST_", "device": ""}[kind] + "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    assert (0, 1) == (driver.attribute(name), driver.attribute("HOST_REGISTER_SUPPORTED"))


def test_figures_are_those_of_the_machine():
    driver = FakeDriver(
        FakeMachine(attributes={"HOST_NUMA_ID": 3, "HOST_REGISTER_SUPPORTED": None}, bus_id="0001:02:00.0")
    )
    assert (3, None) == (driver.attribute("HOST_NUMA_ID"), driver.attribute("HOST_REGISTER_SUPPORTED"))
    assert ("0001:02:00.0", 13000, 0) == (driver.bus_id(), driver.version(), FakeDriver().attribute("HOST_NUMA_ID"))


def broken_rules(driver):
    """Each rule of the real driver, and what breaks it."""
    address = mapped(driver, GPU, NODE, GPU)
    bare = driver.reserve(2 * PAGE, alignment=PAGE)
    handle = driver.create(PAGE, location=GPU)
    two = driver.create(2 * PAGE, location=GPU)
    gone = driver.create(PAGE, location=GPU)
    driver.release(gone)
    return [
        (lambda: driver.reserve(100, alignment=PAGE), "size in no whole pages"),
        (lambda: driver.reserve(0, alignment=PAGE), "size in no whole pages"),
        (lambda: driver.reserve(PAGE, alignment=3 * 4096), "no power of two"),
        (lambda: driver.reserve(PAGE, alignment=0), "no power of two"),
        (lambda: driver.free(bare, num_bytes=PAGE), "not what was reserved"),
        (lambda: driver.free(bare + PAGE, num_bytes=PAGE), "not what was reserved"),
        (lambda: driver.free(address, num_bytes=3 * PAGE), "something is mapped there"),
        (lambda: driver.create(PAGE + 1, location=GPU), "size in no whole pages"),
        (lambda: driver.create(0, location=GPU), "size in no whole pages"),
        (lambda: driver.create(PAGE, location=Location(kind="host_numa", index=5)), "there is no HOST_NUMA node 5"),
        (lambda: driver.create(PAGE, location=Location(kind="device", index=1)), "there is no device 1"),
        (lambda: driver.release(gone), "a handle that was released"),
        (lambda: driver.release(12345), "a handle that was released"),
        (lambda: driver.map(bare, num_bytes=PAGE, handle=gone), "a handle that was released"),
        (lambda: driver.map(bare, num_bytes=PAGE, handle=two), "not the whole allocation"),
        (lambda: driver.map(bare + 4096, num_bytes=PAGE, handle=handle), "address on no page"),
        (lambda: driver.map(bare + PAGE, num_bytes=2 * PAGE, handle=two), "addresses that are not reserved"),
        (lambda: driver.map(address, num_bytes=PAGE, handle=handle), "something is mapped there"),
        (lambda: driver.unmap(address, num_bytes=2 * PAGE), "not a whole mapping"),
        (lambda: driver.unmap(address + 4096, num_bytes=PAGE - 4096), "not a whole mapping"),
        (lambda: driver.unmap(bare, num_bytes=PAGE), "not a whole mapping"),
        (lambda: driver.set_access(bare, num_bytes=PAGE, locations=[GPU]), "not whole mappings"),
        (lambda: driver.set_access(address, num_bytes=4096, locations=[GPU]), "not whole mappings"),
        (lambda: driver.set_access(address + 4096, num_bytes=PAGE, locations=[GPU]), "not whole mappings"),
        (lambda: driver.set_access(address + PAGE, num_bytes=PAGE, locations=[NODE]), "no access for the device"),
        (lambda: driver.copy(address, source=address + PAGE - 64, num_bytes=128, stream=0), "bytes of two mappings"),
        (lambda: driver.copy(address + PAGE - 64, source=address, num_bytes=128, stream=0), "bytes of two mappings"),
        (lambda: driver.write32(address + 2, value=1, stream=0), "address of no word"),
        (lambda: driver.register(address + 1, num_bytes=4096), "no whole pages"),
        (lambda: driver.register(address, num_bytes=5), "no whole pages"),
    ]


@pytest.mark.parametrize("number", range(30))
def test_a_broken_rule_is_refused_by_name_and_changes_nothing(driver, number):
    rules = broken_rules(driver)
    assert 30 == len(rules)
    held = driver.held
    call, detail = rules[number]
    with refused(INVALID, detail):
        call()
    assert held == driver.held


@pytest.mark.parametrize("locations", [(GPU, NODE), (GPU, HOST)])
def test_a_host_location_gets_no_access_to_memory_of_another_kind(driver, locations):
    address = mapped(driver, GPU, NODE, access=False)
    with refused("CUDA_ERROR_NOT_SUPPORTED", "to other memory"):
        driver.set_access(address, num_bytes=2 * PAGE, locations=locations)
    driver.set_access(address, num_bytes=2 * PAGE, locations=[GPU])  # the device may have both at once


def test_an_allocation_lies_in_one_place_at_a_time(driver):
    bare = driver.reserve(2 * PAGE, alignment=PAGE)
    handle = driver.create(PAGE, location=GPU)
    driver.map(bare, num_bytes=PAGE, handle=handle)
    with refused(INVALID, "mapped elsewhere"):
        driver.map(bare + PAGE, num_bytes=PAGE, handle=handle)


def test_copies_and_words_need_something_mapped(driver):
    bare = driver.reserve(PAGE, alignment=PAGE)
    other = bytearray(64)
    outside = ctypes.addressof(ctypes.c_char.from_buffer(other))
    for call in (
        lambda: driver.copy(bare, source=outside, num_bytes=64, stream=0),
        lambda: driver.copy(outside, source=bare, num_bytes=64, stream=0),
        lambda: driver.write32(bare, value=1, stream=0),
    ):
        with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "nothing is mapped there"):
            call()


def test_copies_go_between_memories_and_to_memory_that_is_not_the_drivers(driver):
    address = mapped(driver, GPU, NODE)
    other = bytearray(range(64))
    outside = ctypes.addressof(ctypes.c_char.from_buffer(other))
    driver.copy(address + 64, source=outside, num_bytes=64, stream=1)
    driver.copy(address + PAGE, source=address + 64, num_bytes=64, stream=2)
    assert list(range(64)) == bytes_at(address + PAGE, 64).tolist()
    assert [1, 2] == [call.values["stream"] for call in driver.calls if call.name == "cuMemcpyAsync"]


@pytest.mark.parametrize(("value", "expected"), [(7, 7), (-1, 0xFFFFFFFF)])
def test_a_word_is_written_by_value_and_leaves_its_neighbours(driver, value, expected):
    address = mapped(driver, GPU)
    bytes_at(address, 12)[:] = 5
    driver.write32(address + 4, value=value, stream=3)
    assert [0x05050505, expected, 0x05050505] == bytes_at(address, 12).view(np.uint32).tolist()


def test_an_int64_entry_is_written_whole_by_its_first_word(driver):
    address = mapped(driver, GPU)
    entries = bytes_at(address, 16).view(np.int64)
    entries[:] = (384, 11)
    driver.write32(address, value=2**31 - 1, stream=0)
    assert [2**31 - 1, 11] == entries.tolist()


def test_host_memory_is_registered_once_and_within_the_limit():
    driver = FakeDriver(FakeMachine(lockable_bytes=2 * mmap.PAGESIZE))
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address == driver.register(address, num_bytes=2 * mmap.PAGESIZE)
    with refused("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        driver.register(address + mmap.PAGESIZE, num_bytes=mmap.PAGESIZE)
    with refused("CUDA_ERROR_OUT_OF_MEMORY", "too much locked memory"):
        driver.register(address + 2 * mmap.PAGESIZE, num_bytes=mmap.PAGESIZE)
    driver.unregister(address)
    with refused("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister(address)
    assert driver.held == NOTHING


def test_the_nth_call_fails_once_and_changes_nothing(driver):
    driver.fail(2)
    address = driver.reserve(PAGE, alignment=PAGE)
    with refused("CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(PAGE, location=GPU)
    assert FakeHeld(reservations=1) == driver.held
    driver.create(PAGE, location=GPU)
    driver.free(address, num_bytes=PAGE)


def test_a_failure_can_wait_for_a_call_of_one_name_and_bring_an_error_of_its_own(driver):
    driver.fail(2, call="cuMemCreate", error="CUDA_ERROR_NOT_PERMITTED")
    driver.create(PAGE, location=GPU)
    driver.reserve(PAGE, alignment=PAGE)
    with refused("CUDA_ERROR_NOT_PERMITTED"):
        driver.create(PAGE, location=GPU)


def test_every_call_is_logged_refused_ones_too(driver):
    with refused(INVALID):
        driver.create(5, location=NODE)
    assert [("cuCtxSetCurrent", {}), ("cuMemCreate", {"num_bytes": 5, "location": NODE})] == [
        (call.name, call.values) for call in driver.calls
    ]


def test_a_thread_without_the_context_is_refused_until_it_makes_it_current(driver):
    address, outcomes = mapped(driver, GPU), []

    def work():
        try:
            driver.write32(address, value=1, stream=0)
        except BankError as error:
            outcomes.append(error.error_name)
        driver.make_current()
        driver.write32(address, value=2, stream=0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (["CUDA_ERROR_INVALID_CONTEXT"], 2) == (outcomes, bytes_at(address, 1)[0])
