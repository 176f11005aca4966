"""A GPU opened in one call, over stand-ins: what is chosen, what is said, and what an engine holds then."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hotsplit.bank import cuda_open, kernels
from hotsplit.bank.cuda_open import STITCHED, TWO_BANKS, GpuParts, gpu_parts, open_cuda, warm_up
from hotsplit.bank.cuda_probe import Probe, summing_rate
from hotsplit.bank.cuda_row_memory import CudaRowMemory
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.kernels import reference
from hotsplit.bank.rows import place
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.bank.two_banks import TwoBankMemory
from hotsplit.errors import BankError

LAYERS = [place((0, 1), num_experts=4, spare=True, inclusive=False)] * 2


def parts_of(machine=None, *, rates=(), **more):
    """Stand-ins for a GPU; its reads go at these rates, and at 50 GB/s from then on."""
    driver, rates = FakeDriver(machine), list(rates)
    streams = SimStreams(driver)
    probe = Probe(read_rate=lambda tensor: rates.pop(0) if rates else 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor)
    given = {
        "device": torch.device("cpu"), "driver": driver, "streams": streams, "calls": streams, "kernels": reference,
        "probe": probe, "synchronise": streams.drain,
    }  # fmt: skip
    return GpuParts(**given | more)


def test_both_memories_at_one_address_are_the_first_choice():
    parts = parts_of()
    kit = open_cuda(numa_policy="preferred", parts=parts)
    assert (STITCHED, 1, "cpu") == (kit.name, kit.memory.num_banks, kit.memory.device_type)
    assert isinstance(kit.memory, CudaRowMemory)
    assert (parts.streams, parts.streams, reference) == (kit.device.streams, kit.device.driver, kit.device.kernels)
    assert NOTHING == parts.driver.held, "what was tried out is given back"


@pytest.mark.parametrize(
    ("machine", "rates", "why"),
    [
        (FakeMachine(unsupported=frozenset({"host_numa", "host"})), (), "host_numa was turned down: HOST_NUMA_VIRTUAL"),
        (None, (276e9, 1.5e9, 1.5e9), "host_numa was turned down: read at 1.5 GB/s, 0.01 of the rate of pinned memory"),
    ],
    ids=["not supported", "too slow"],
)
def test_a_gpu_that_cannot_or_reads_too_slowly_gets_two_banks_and_the_reason_is_told(machine, rates, why):
    kit = open_cuda(numa_policy="preferred", parts=parts_of(machine, rates=rates))
    assert (TWO_BANKS, 2) == (kit.name, kit.memory.num_banks)
    assert isinstance(kit.memory, TwoBankMemory)
    assert "two kernel calls a layer" in kit.description
    assert why in kit.description


def test_the_description_has_the_choice_the_rate_and_the_numa_placement():
    kit = open_cuda(numa_policy="preferred", parts=parts_of(rates=(50e9, 48e9)))
    assert "cold rows at HOST_NUMA node 0 in one range with the hot ones" in kit.description
    assert "read at 48.0 GB/s, 0.96 of the rate of pinned memory" in kit.description
    assert kit.description.endswith(("; preferred on NUMA node 0", "; no NUMA placement"))


def test_rows_of_a_kit_are_made_and_given_back():
    parts = parts_of()
    kit = open_cuda(numa_policy="off", parts=parts)
    held = kit.memory.make((4, 512), dtype=torch.uint8, num_fast=2)
    assert 2 == parts.driver.held.mappings
    kit.synchronise()
    held.close()
    assert NOTHING == parts.driver.held


def test_a_kit_makes_the_context_current_in_the_thread_that_asks():
    parts = parts_of()
    kit = open_cuda(numa_policy="off", parts=parts)
    parts.driver.calls.clear()
    kit.make_current()
    assert ["cuCtxSetCurrent"] == [call.name for call in parts.driver.calls]


def test_a_gpu_without_memory_of_its_own_is_refused():
    with pytest.raises(BankError, match="this GPU: got one that is integrated.*there is nothing to split"):
        open_cuda(numa_policy="off", parts=parts_of(is_integrated=True))


def test_a_gpu_that_reads_no_host_memory_is_refused_with_all_that_was_tried():
    machine = FakeMachine(unsupported=frozenset({"host_numa", "host"}), lockable_bytes=0)
    with pytest.raises(BankError, match="cold rows: got host_numa: .*; host: .*; two_banks: "):
        open_cuda(numa_policy="preferred", parts=parts_of(machine))


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(BankError, match="NUMA policy: got 'near'"):
        open_cuda(numa_policy="near", parts=parts_of())


def test_warming_up_runs_every_kind_of_launch_and_counts_nothing():
    ran = []
    watched = SimpleNamespace(
        route_and_count=lambda ids, **given: (
            ran.append((ids.dtype, tuple(ids.shape), given["is_padding"] is not None))
            or reference.route_and_count(ids, **given)
        ),
        begin_step=lambda step, **given: ran.append("step") or reference.begin_step(step, **given),
    )
    kit = open_cuda(numa_policy="off", parts=parts_of(kernels=watched))
    router = kit.device.router(LAYERS, row_bytes=[256] * 2, dyn_steps=10, copies_ids=False)
    warm_up(router, top_k=3, device=torch.device("cpu"))
    router.settle()
    assert {(dtype, (1, 3), masked) for dtype in (torch.int32, torch.int64) for masked in (False, True)} | {
        "step"
    } == set(ran)
    assert not any(counts.any() for counts in router.counters.counts.values())


def test_a_real_gpus_parts_are_of_the_current_device_and_its_driver(monkeypatch):
    route_triton, asked = ModuleType("route_triton"), []
    monkeypatch.setitem(sys.modules, "hotsplit.bank.kernels.route_triton", route_triton)
    monkeypatch.setattr(kernels, "route_triton", route_triton, raising=False)
    replaced = {
        "current_device": lambda: 3,
        "synchronize": lambda number: asked.append(("synchronize", number)),
        "get_device_properties": lambda number: SimpleNamespace(is_integrated=0),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)  # raises where torch has no such name
    driver = FakeDriver()
    monkeypatch.setattr(cuda_open, "load_driver", lambda number: asked.append(("load", number)) or driver)
    monkeypatch.setattr(cuda_open, "TorchStreams", lambda number: ("streams", number))
    parts = gpu_parts()
    assert [("synchronize", 3), ("load", 3)] == asked, "torch makes the context first"
    assert (torch.device("cuda", 3), ("streams", 3), False) == (parts.device, parts.streams, parts.is_integrated)
    assert (driver, driver, route_triton, summing_rate) == (
        parts.driver, parts.calls, parts.kernels, parts.probe.read_rate,
    )  # fmt: skip
    parts.synchronise()
    assert ("synchronize", 3) == asked[-1]
    assert torch.device("cuda", 5) == gpu_parts(5).device
