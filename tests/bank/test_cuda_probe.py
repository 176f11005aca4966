"""The choice of host memory: tried, compared with pinned memory, explained in one line; nothing of a trial stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hotsplit.bank import cuda_probe
from hotsplit.bank.cuda_probe import Probe, choose_backing, summing_rate
from hotsplit.bank.cuda_ranges import CudaRange
from hotsplit.bank.driver import Location
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.host.page_nodes import PageNodes

PAGES = {"device": 1 << 16, "host_numa": 1 << 16, "host": 1 << 16}
ON_NODE, BOUND = Placement(policy="preferred", node=0), Placement(policy="bind", node=0)
HOST_NUMA, HOST = "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"


@pytest.fixture(autouse=True)
def all_on_node_0(monkeypatch):
    """Where pages lie, as a kernel would tell that may be asked; a container's may not."""

    def told(address, num_bytes, **kwargs):
        return PageNodes(node_bytes={0: num_bytes})

    monkeypatch.setattr(cuda_probe, "page_nodes", told)
    monkeypatch.setattr("hotsplit.host.pages.page_nodes", told)
    monkeypatch.setattr("hotsplit.host.pages.bind_pages", lambda *args, **kwargs: [])


def probe_of(driver, *, pinned=50e9, host_numa=50e9, host=50e9, tensor_at=cpu_tensor):
    """A probe that reads each kind of memory at a rate of its own."""
    rates = {"host_numa": host_numa, "host": host}

    def read_rate(tensor):
        location = driver.location_at(tensor.data_ptr())
        return rates[location.kind] if location else pinned

    return Probe(read_rate=read_rate, trial_bytes=1 << 19, tensor_at=tensor_at)


def chosen(*, machine=None, placement=ON_NODE, **rates):
    driver = FakeDriver(machine or FakeMachine(granularity=PAGES))
    found = choose_backing(driver, probe=probe_of(driver, **rates), placement=placement)
    assert driver.held == NOTHING
    return found


def without(*kinds, **more):
    return FakeMachine(granularity=PAGES, unsupported=frozenset(kinds), **more)


def test_host_memory_of_the_node_is_the_first_choice():
    found = chosen(
        machine=FakeMachine(granularity=PAGES, nodes=(0, 1)), placement=Placement(policy="preferred", node=1)
    )
    assert ("host_numa", Location(kind="host_numa", index=1), 1 << 16) == (
        found.backing,
        found.location,
        found.page_bytes,
    )
    assert (1.0, (), "") == (found.ratio, found.refused, found.reason)


def test_plain_host_memory_is_the_second_and_two_banks_the_last():
    assert "host" == chosen(machine=without("host_numa")).backing
    found = chosen(machine=without("host_numa", "host"))
    assert ("two_banks", None, None) == (found.backing, found.location, found.page_bytes)
    assert ["host_numa", "host"] == [one.backing for one in found.refused]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"host_numa": 35e9}, "host_numa"),
        ({"host_numa": 34.9e9}, "host"),
        ({"host_numa": 1.5e9, "host": 35e9}, "host"),
        ({"host_numa": 1.5e9, "host": 34.9e9}, "two_banks"),
        ({"host_numa": 90e9}, "host_numa"),
    ],
)
def test_memory_that_is_read_at_less_than_0_7_of_pinned_memory_is_turned_down(rates, expected):
    assert expected == chosen(pinned=50e9, **rates).backing


def test_the_choice_is_one_line_that_says_what_and_why():
    found = chosen(pinned=276e9, host_numa=1.5e9, host=270e9)
    expected = (
        "cold rows at HOST in one range with the hot ones, pages of 64.0 KiB, read at 270.0 GB/s, 0.98 of the rate of "
        "pinned memory; host_numa was turned down: read at 1.5 GB/s, 0.01 of the rate of pinned memory; wanted 0.7 or more"
    )
    assert expected == str(found)


def test_two_banks_say_so_in_the_line():
    line = str(chosen(machine=without("host_numa", "host")))
    assert line.startswith(
        "cold rows in pinned memory of their own, two kernel calls a layer, read at 50.0 GB/s; host_numa"
    )
    assert f"turned down: {HOST_NUMA} is 0; host was turned down: {HOST} is 0" in line
    assert "\n" not in line


def test_a_figure_that_is_zero_spares_the_trial_and_one_that_is_unknown_does_not():
    for figure, expected in ((0, "host"), (None, "host_numa")):
        driver = FakeDriver(FakeMachine(granularity=PAGES, attributes={HOST_NUMA: figure}))
        assert expected == choose_backing(driver, probe=probe_of(driver), placement=ON_NODE).backing
        tried = {call.values["location"].kind for call in driver.calls if call.name == "cuMemCreate"}
        assert {"device", expected} == tried


def test_a_device_without_address_ranges_of_its_own_gets_two_banks():
    found = chosen(machine=FakeMachine(granularity=PAGES, attributes={"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}))
    assert "two_banks" == found.backing
    assert "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0" in found.reason


def test_support_on_paper_is_not_enough():
    paper = {HOST_NUMA: 1, HOST: 1}
    found = chosen(machine=without("host_numa", attributes=paper))
    assert "host" == found.backing
    assert "CUDA_ERROR_NOT_SUPPORTED" in found.reason


def test_an_error_of_torch_on_such_memory_turns_it_down_and_is_told():
    def broken(address, *, num_bytes):
        tensor = cpu_tensor(address, num_bytes=num_bytes)
        found = driver.location_at(address + num_bytes - 1)
        if found is not None and found.kind == "host_numa":
            raise RuntimeError("CUDA error: invalid argument\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        return tensor

    driver = FakeDriver(FakeMachine(granularity=PAGES))
    found = choose_backing(driver, probe=probe_of(driver, tensor_at=broken), placement=ON_NODE)
    assert ("host", "host_numa was turned down: CUDA error: invalid argument") == (found.backing, found.reason)
    assert driver.held == NOTHING


def test_copies_that_do_not_arrive_turn_memory_down(monkeypatch):
    monkeypatch.setattr(CudaRange, "copy_row", lambda *_, **__: None)
    found = chosen()
    assert "two_banks" == found.backing
    assert "got other bytes after the driver's copy" in found.reason


def test_bind_takes_no_memory_that_names_no_node():
    found = chosen(machine=without("host_numa"), placement=BOUND)
    assert ("two_banks", ["host_numa"]) == (found.backing, [one.backing for one in found.refused])
    assert "host_numa" == chosen(placement=BOUND).backing


def test_without_a_placement_memory_of_no_node_comes_first():
    assert "host" == chosen(placement=NO_PLACEMENT).backing
    found = chosen(machine=without("host", attributes={"HOST_NUMA_ID": 3}, nodes=(3,)), placement=NO_PLACEMENT)
    assert Location(kind="host_numa", index=3) == found.location


@pytest.mark.parametrize("figure", [-1, None])
def test_a_driver_that_knows_no_node_means_node_0(figure):
    found = chosen(machine=without("host", attributes={"HOST_NUMA_ID": figure}), placement=NO_PLACEMENT)
    assert Location(kind="host_numa", index=0) == found.location


def test_bind_turns_memory_down_that_lies_elsewhere(monkeypatch):
    monkeypatch.setattr(
        cuda_probe, "page_nodes", lambda address, size, **_: PageNodes(node_bytes={0: size // 2, 1: size // 2})
    )
    found = chosen(placement=BOUND)
    assert "two_banks" == found.backing
    assert "HOST_NUMA node 0 memory: HOTSPLIT_NUMA_POLICY=bind: got node 0: 0.2 MiB, node 1: 0.2 MiB" in found.reason


def test_preferred_takes_it_and_says_how_much_lies_elsewhere(monkeypatch):
    monkeypatch.setattr(
        cuda_probe, "page_nodes", lambda address, size, **_: PageNodes(node_bytes={0: size // 2, 1: size // 2})
    )
    found = chosen(placement=ON_NODE)
    assert ("host_numa", ["numa-elsewhere"]) == (found.backing, [one.name for one in found.notices])
    assert 0.5 == found.chosen.pages.share(0)


def test_bind_that_no_memory_keeps_is_an_error(monkeypatch):
    for place in ("hotsplit.bank.cuda_probe.page_nodes", "hotsplit.host.pages.page_nodes"):
        monkeypatch.setattr(place, lambda address, size, **_: PageNodes(node_bytes={1: size}))
    driver = FakeDriver(FakeMachine(granularity=PAGES))
    with pytest.raises(
        BankError, match="cold rows: got host_numa: .* two_banks: .*set HOTSPLIT_NUMA_POLICY=preferred or off"
    ):
        choose_backing(driver, probe=probe_of(driver), placement=BOUND)
    assert driver.held == NOTHING


def test_without_pinned_memory_a_stitched_range_is_taken_uncompared_and_the_line_says_so():
    found = chosen(machine=FakeMachine(granularity=PAGES, lockable_bytes=0))
    assert ("host_numa", None) == (found.backing, found.ratio)
    assert "no pinned memory to compare with (host memory cannot be locked for the GPU" in str(found)


def test_a_device_that_reads_no_host_memory_at_all_is_an_error_that_tells_what_was_tried():
    driver = FakeDriver(without("host_numa", "host", attributes={"HOST_REGISTER_SUPPORTED": 0}))
    with pytest.raises(BankError) as caught:
        choose_backing(driver, probe=probe_of(driver), placement=ON_NODE)
    for part in (f"host_numa: {HOST_NUMA} is 0", f"host: {HOST} is 0", "two_banks: HOST_REGISTER_SUPPORTED is 0"):
        assert part in str(caught.value)


def test_rows_that_do_not_come_back_as_they_were_written_turn_memory_down():
    class Forgetful(torch.Tensor):
        def fill_(self, value):
            return self

    def forgetful(address, *, num_bytes):
        return cpu_tensor(address, num_bytes=num_bytes).as_subclass(Forgetful)

    found = chosen(tensor_at=forgetful)
    assert "two_banks" == found.backing
    assert "trial rows: got [0, 0, 0, 0, 0, 0, 0, 0, 0]; wanted [1, 2, 3" in found.reason


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate_turns_memory_down(rate):
    found = chosen(host_numa=rate)
    assert "host" == found.backing
    assert "measured read rate" in found.reason


@pytest.mark.parametrize("placement", [NO_PLACEMENT, BOUND])
def test_a_failure_of_any_call_that_takes_something_leaves_nothing_behind(placement):
    backings = set()
    for at in range(1, 100):
        driver = FakeDriver(FakeMachine(granularity=PAGES))
        probe = probe_of(driver)
        driver.fail(at)
        try:
            found = choose_backing(driver, probe=probe, placement=placement)
        except BankError:
            found = None  # not even the first figures could be asked for
        failed = driver.calls[at] if at < len(driver.calls) else None
        if failed is None:
            break
        if found:
            backings.add(found.backing)
        if failed.name not in ("cuMemUnmap", "cuMemAddressFree", "cuMemHostUnregister"):
            assert driver.held == NOTHING, failed
    assert 20 <= at < 100
    assert ({"host", "host_numa"} if placement is NO_PLACEMENT else {"host_numa", "two_banks"}) == backings


def test_a_trial_is_as_large_as_asked_for_and_one_hot_row_more():
    driver = FakeDriver(FakeMachine(granularity=PAGES))
    choose_backing(driver, probe=probe_of(driver), placement=ON_NODE)
    sizes = {
        call.values["location"].kind: call.values["num_bytes"] for call in driver.calls if call.name == "cuMemCreate"
    }
    assert {"device": 1 << 16, "host_numa": 1 << 19} == sizes
    assert [1 << 19] == [call.values["num_bytes"] for call in driver.calls if call.name == "cuMemHostRegister"]


def test_what_is_read_for_the_rate_are_the_cold_rows_alone():
    driver, read = FakeDriver(FakeMachine(granularity=PAGES)), []

    def read_rate(tensor):
        ends = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1)
        read.append(
            (tensor.nbytes, tensor.dtype, [location and location.kind for location in map(driver.location_at, ends)])
        )
        return 1e9

    choose_backing(
        driver, probe=Probe(read_rate=read_rate, trial_bytes=1 << 19, tensor_at=cpu_tensor), placement=ON_NODE
    )
    expected = [(1 << 19, torch.uint8, [None, None]), (1 << 19, torch.uint8, ["host_numa", "host_numa"])]
    assert expected == read


def test_the_rate_is_bytes_over_the_median_time_of_the_runs_after_the_first(monkeypatch):
    order, ticks = [], iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    sums = SimpleNamespace(item=lambda: order.append("read"))
    tensor = SimpleNamespace(view=lambda dtype: SimpleNamespace(sum=lambda: sums), numel=lambda: 4096)
    monkeypatch.setattr(cuda_probe.time, "perf_counter", lambda: order.append("tick") or next(ticks))
    assert 4096 / 2.0 == summing_rate(tensor, repeats=3)
    assert ["read", *["tick", "read", "tick"] * 3] == order


def test_a_rate_on_this_machine_is_a_finite_number():
    assert 1e6 < summing_rate(torch.zeros(1 << 20, dtype=torch.uint8)) < 1e15
