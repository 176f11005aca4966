"""Host memory of an exact size: no rounding, every page there, locked and given back in order, refused in clear words."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeHeld, FakeMachine
from hotsplit.errors import BankError, BudgetError
from hotsplit.host import pages as module
from hotsplit.host.demand import HostDemand, require_host
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from hotsplit.host.numa import Placement
from hotsplit.host.page_nodes import PageNodes
from hotsplit.host.pages import HUGE_PAGE_BYTES, HostPages, populate

PAGE = mmap.PAGESIZE
GIB = 2**30


def fields_at(address):
    """What smaps tells of the mapping that an address lies in."""
    found = None
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            head = line.split()
            if "-" in head[0] and not head[0].endswith(":"):
                start, end = (int(one, 16) for one in head[0].split("-"))
                found = {"start": start, "end": end} if start <= address < end else None
            elif found is not None:
                found[head[0].removesuffix(":")] = head[1:]
                if head[0] == "VmFlags:":
                    return found
    return None


def virtual_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * PAGE


def is_about(num_bytes):
    """Whether so much is mapped; what is cut off at both ends of a piece would be more than Python's own comings and goings."""
    return abs(virtual_bytes() - num_bytes) < HUGE_PAGE_BYTES - PAGE


def fail(monkeypatch, *, call, number=errno.ENOMEM, at=1, advice=None):
    """Let the at-th call of one name fail; returns all calls, as they come."""
    real, made = module.checked, []

    def checked(name, *arguments):
        made.append((name, *arguments))
        hits = [one for one in made if one[0] == call and advice in (None, one[-1])]
        if name == call and advice in (None, arguments[-1]) and len(hits) == at:
            raise OSError(number, os.strerror(number), name)
        return real(name, *arguments)

    monkeypatch.setattr(module, "checked", checked)
    return made


def no_populate(monkeypatch):
    monkeypatch.setattr(module, "populate", lambda address, num_bytes, *, threads: None)


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("num_bytes", [1, PAGE, PAGE + 1, 3 * HUGE_PAGE_BYTES - PAGE - 7])
def test_memory_is_zero_writable_and_whole_pages_of_the_bytes_asked_for(num_bytes, huge_pages):
    held = HostPages(num_bytes, huge_pages=huge_pages)
    assert -(-num_bytes // PAGE) * PAGE == held.num_bytes
    assert 0 == held.address % (HUGE_PAGE_BYTES if huge_pages else PAGE)
    assert bytes(num_bytes) == ctypes.string_at(held.address, num_bytes)
    ctypes.memset(held.address, 7, held.num_bytes)
    assert b"\7" == ctypes.string_at(held.address + held.num_bytes - 1, 1)
    held.close()


@settings(max_examples=40)
@given(num_bytes=st.integers(1, 5 * HUGE_PAGE_BYTES), huge_pages=st.booleans())
def test_no_size_is_rounded_beyond_its_last_page(num_bytes, huge_pages):
    with pytest.MonkeyPatch.context() as patch:
        no_populate(patch)
        before = virtual_bytes()
        held = HostPages(num_bytes, huge_pages=huge_pages)
        mapping = fields_at(held.address)
        assert (held.address, held.address + held.num_bytes) == (mapping["start"], mapping["end"])
        assert 0 <= held.num_bytes - num_bytes < PAGE
        assert is_about(before + held.num_bytes)
        held.close()
        assert is_about(before)


def test_three_published_banks_take_their_exact_bytes_and_a_power_of_two_is_refused_before_it_is_allocated(monkeypatch):
    sizes = {"a": 2304 * 2**20, "b": 48845 * 2**20, "c": 96870 * 2**20}  # 2.25, 47.7 and 94.6 GiB
    limits = MemoryLimits(limits=(MemoryLimit(name="MemAvailable", state=LIMITED, available_bytes=160 * GIB),))
    demand = HostDemand(items=sizes)
    assert {"a": 4 * GIB, "b": 64 * GIB, "c": 128 * GIB} == demand.real_bytes("power-of-two")
    with pytest.raises(BudgetError, match="exceeds host memory: .*36.000 GiB too many; allocate exact sizes"):
        require_host(demand, allocator="power-of-two", limits=limits)
    require_host(demand, allocator="exact", limits=limits)
    no_populate(monkeypatch)
    before = virtual_bytes()
    try:
        held = [HostPages(num_bytes) for num_bytes in sizes.values()]
    except BankError as error:
        pytest.skip(f"this machine sets memory aside for every address: {error}")
    assert is_about(before + sum(demand.real_bytes("exact").values()))
    assert list(sizes.values()) == [one.num_bytes for one in held]
    for one in held:
        one.close()
    assert is_about(before)


def test_every_page_is_there_when_it_is_handed_out():
    held = HostPages(300 * PAGE, threads=3)
    resident = (ctypes.c_ubyte * 300)()
    assert 0 == ctypes.CDLL(None).mincore(ctypes.c_void_p(held.address), ctypes.c_size_t(300 * PAGE), resident)
    assert 300 == sum(one & 1 for one in resident)
    found = held.where()
    assert 300 * PAGE == sum(found.node_bytes.values()) + found.unknown_bytes
    held.close()


def test_memory_is_filled_by_several_threads_chunk_by_chunk(monkeypatch):
    chunks, together = [], threading.Barrier(3)

    def fill(address, num_bytes):
        together.wait(timeout=60)  # passes only where three threads are here at once
        chunks.append((address, num_bytes))

    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * PAGE)
    monkeypatch.setattr(module, "_populate_chunk", fill)
    populate(1 << 20, 11 * PAGE, threads=3)
    assert [(1 << 20, 4 * PAGE), ((1 << 20) + 4 * PAGE, 4 * PAGE), ((1 << 20) + 8 * PAGE, 3 * PAGE)] == sorted(chunks)


def test_the_threads_are_those_of_the_processors_and_sixteen_at_most(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "populate", lambda address, num_bytes, *, threads: asked.append(threads))
    for processors in (3, 200):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, count=processors: set(range(count)))
        HostPages(PAGE).close()
    HostPages(PAGE, threads=5).close()
    assert [3, 16, 5] == asked


def test_an_older_kernel_is_filled_by_stores(monkeypatch):
    made = fail(monkeypatch, call="madvise", number=errno.EINVAL, advice=module.MADV_POPULATE_WRITE)
    held = HostPages(40 * PAGE, huge_pages=False)
    assert module.MADV_POPULATE_WRITE in [one[-1] for one in made]
    assert int(fields_at(held.address)["Rss"][0]) * 1024 >= 40 * PAGE
    held.close()


def test_huge_pages_are_asked_for_where_they_are_wanted_alone(monkeypatch):
    made = fail(monkeypatch, call="none")
    for huge_pages in (True, False):
        HostPages(PAGE, huge_pages=huge_pages).close()
    assert 1 == [one[-1] for one in made].count(mmap.MADV_HUGEPAGE)


def test_a_kernel_without_huge_pages_is_said_and_small_ones_are_used(monkeypatch):
    fail(monkeypatch, call="madvise", number=errno.EINVAL, advice=mmap.MADV_HUGEPAGE)
    held = HostPages(PAGE)
    expected = "no huge pages for host memory (Invalid argument); using small ones instead"
    assert [("no-huge-pages", expected)] == [(notice.name, notice.text) for notice in held.notices]
    held.close()


def test_children_do_not_inherit_the_pages():
    held = HostPages(64 * PAGE)
    assert "dc" in fields_at(held.address)["VmFlags"]
    held.close()


def test_a_placement_is_asked_for_before_the_first_touch(monkeypatch):
    order = []
    monkeypatch.setattr(
        module, "bind_pages", lambda address, num_bytes, *, placement: order.append(placement) or ["word"]
    )
    monkeypatch.setattr(module, "populate", lambda address, num_bytes, *, threads: order.append("populate"))
    placement = Placement(policy="preferred", node=0)
    held = HostPages(PAGE, placement=placement)
    assert ([placement, "populate"], ["word"], placement) == (order, held.notices, held.placement)
    held.close()


def test_pages_lie_where_they_were_placed():
    try:
        held = HostPages(64 * PAGE, placement=Placement(policy="bind", node=0))
    except BankError as error:
        pytest.skip(f"this machine places no pages: {error}")
    found = held.where(step_bytes=PAGE)
    held.close()
    if found.unknown_bytes:
        pytest.skip(f"this machine does not tell where pages lie: {found.reason}")
    assert PageNodes(node_bytes={0: 64 * PAGE}) == found


@pytest.mark.parametrize(
    ("call", "advice"), [("mmap", None), ("madvise", mmap.MADV_DONTFORK), ("madvise", module.MADV_POPULATE_WRITE)]
)
def test_memory_that_cannot_be_had_is_one_clear_error_and_leaves_no_addresses(monkeypatch, call, advice):
    before = virtual_bytes()
    fail(monkeypatch, call=call, advice=advice)
    with pytest.raises(BankError) as caught:
        HostPages(1 << 30, huge_pages=False, threads=1)
    assert (f"host memory for cold rows: got {call}: Cannot allocate memory; wanted 1.000 GiB; raise HOTSPLIT_HOT_GIB, so "
            "that fewer experts are cold, or take a host with more memory") == str(caught.value)  # fmt: skip
    assert virtual_bytes() - before < 1 << 29  # threads leave stacks behind


def test_a_placement_that_is_refused_leaves_no_addresses(monkeypatch):
    def refuse(address, num_bytes, *, placement):
        raise BankError("no such node")

    monkeypatch.setattr(module, "bind_pages", refuse)
    before = virtual_bytes()
    with pytest.raises(BankError, match="no such node"):
        HostPages(1 << 30)
    assert is_about(before)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_bytes_are_refused(num_bytes):
    with pytest.raises(BankError, match=f"host memory: got {num_bytes} bytes; wanted 1 or more"):
        HostPages(num_bytes)


def test_registered_memory_has_an_address_on_the_device_and_is_unlocked_before_it_goes(monkeypatch):
    made = fail(monkeypatch, call="none")
    driver = FakeDriver()
    real = driver.unregister
    driver.unregister = lambda address: (made.append(("unregister", address)), real(address))[1]
    held = HostPages(5 * PAGE)
    assert held.device_address is None
    address = held.register(driver)
    assert (address, FakeHeld(registrations=1)) == (held.device_address, driver.held)
    with pytest.raises(BankError, match="got a piece that is registered"):
        held.register(driver)
    start = held.address
    held.close()
    held.close()
    assert [("unregister", start), ("munmap", start, 5 * PAGE)] == made[-2:]
    assert driver.held == NOTHING
    with pytest.raises(BankError, match="host memory: got a closed piece"):
        held.address  # noqa: B018 - it is the access that is refused


def test_memory_that_was_never_registered_is_not_unregistered():
    driver = FakeDriver(FakeMachine(lockable_bytes=0))
    held = HostPages(PAGE)
    with pytest.raises(BankError, match="cannot be locked"):
        held.register(driver)
    held.close()
    assert "cuMemHostUnregister" not in [call.name for call in driver.calls]


def test_a_limit_on_locked_memory_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_MEMLOCK: (64 * 1024, 64 * 1024)}[kind])
    held = HostPages(1 << 20)
    with pytest.raises(BankError) as caught:
        held.register(FakeDriver(FakeMachine(lockable_bytes=0)))
    held.close()
    expected = (
        "host memory cannot be locked for the GPU: got cuMemHostRegister: got CUDA_ERROR_OUT_OF_MEMORY (too much locked "
        "memory), and a limit of 64.0 KiB on locked memory; wanted 1.0 MiB; raise the limit on locked memory: ulimit -l "
        "unlimited, for Docker --ulimit memlock=-1"
    )
    assert (expected, 64 * 1024) == (str(caught.value), caught.value.limit_bytes)


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 40])
def test_a_refusal_to_lock_blames_no_limit_that_is_wide_enough(monkeypatch, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    held = HostPages(1 << 20)
    with pytest.raises(BankError, match="wanted 1.0 MiB; free host memory; WSL locks no more than half") as caught:
        held.register(FakeDriver(FakeMachine(lockable_bytes=0)))
    held.close()
    assert caught.value.limit_bytes is None


def test_memory_that_a_driver_will_not_unlock_stays_until_it_does():
    driver = FakeDriver()
    held = HostPages(PAGE)
    held.register(driver)
    driver.fail(1)
    with pytest.raises(BankError, match="cuMemHostUnregister"):
        held.close()
    ctypes.memset(held.address, 1, PAGE)  # still ours
    held.close()
    assert driver.held == NOTHING


def test_memory_that_the_kernel_will_not_take_back_stays_until_it_does(monkeypatch):
    held = HostPages(PAGE, huge_pages=False)
    with monkeypatch.context() as patch:
        fail(patch, call="munmap")
        with pytest.raises(BankError, match="cannot be given back: got Cannot allocate memory"):
            held.close()
    ctypes.memset(held.address, 1, PAGE)
    held.close()
