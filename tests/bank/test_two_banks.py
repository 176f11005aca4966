"""Two banks: two tensors of the right rows in the right memory, ids for each, and nothing leaked."""

from __future__ import annotations

import dataclasses
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bank.two_bank_rows import LAYERS, SHAPES, fill, load, memory_of, numbers
from hotsplit.bank.cuda_row_memory import CudaRowMemory
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.bank.two_banks import TwoBankMemory, bank_row_ids
from hotsplit.errors import BankError
from hotsplit.host.numa import Placement


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


# Ranges.


@pytest.mark.parametrize("num_fast", [0, 1, 3, 7])
def test_rows_lie_in_two_tensors_of_the_shape_asked_for(driver, num_fast):
    held = memory_of(driver).make((7, 12, 64), dtype=torch.int32, num_fast=num_fast)
    assert [(num_fast, 12, 64), (7 - num_fast, 12, 64)] == [tuple(part.shape) for part in held.parts]
    assert {torch.int32} == {part.dtype for part in held.parts}
    cold_bytes = (7 - num_fast) * 3072
    assert (num_fast * 3072, -(-cold_bytes // 4096) * 4096) == (held.fast_bytes, held.slow_bytes)
    assert int(num_fast < 7) == driver.held.registrations
    assert held.address == held.parts[num_fast == 0].data_ptr()
    fill(0, [held.parts])
    assert list(range(7)) == numbers(held.parts)
    held.close()


def test_cold_rows_lie_in_locked_pages_of_exactly_their_size_and_are_seen_where_the_device_sees_them(driver):
    held = memory_of(driver).make((9, 300, 1024), dtype=torch.float32, num_fast=2)
    (call,) = [call for call in driver.calls if call.name == "cuMemHostRegister"]
    assert (held.parts[1].data_ptr(), held.slow_bytes) == (call.values["address"], call.values["num_bytes"])
    assert 0 <= held.slow_bytes - 7 * 1_228_800 < 4096, "whole pages, and no power of two"
    held.close()
    assert "cuMemHostUnregister" == driver.calls[-1].name


def test_the_tensor_of_cold_rows_is_made_at_the_devices_address():
    shift, asked = 1 << 50, []

    class Elsewhere(FakeDriver):
        def register(self, address, *, num_bytes):
            return super().register(address, num_bytes=num_bytes) + shift

    def tensor_at(address, *, num_bytes):
        asked.append((address, num_bytes))
        return cpu_tensor(address % shift, num_bytes=num_bytes)

    driver = Elsewhere()
    held = TwoBankMemory(driver, tensor_at=tensor_at, synchronise=lambda: None).make(
        (4, 256), dtype=torch.uint8, num_fast=1
    )
    assert (held.pages.address + shift, 768) == asked[-1]
    held.close()
    assert driver.held == NOTHING


def test_there_is_no_whole_tensor(rows):
    with pytest.raises(BankError, match="layer_id 0, one tensor of all rows: got a memory of two banks"):
        rows.allocate(0, shape=(7, 128), dtype=torch.int16)
    assert ((), 0) == (rows.ranges, rows.host_bytes)
    rows.allocate_parts(0, shape=(7, 128), dtype=torch.int16)
    with pytest.raises(BankError, match="as one tensor: got a memory of two banks; wanted its parts"):
        rows.ranges[0].tensor  # noqa: B018 - to look is what is refused


def test_a_stitched_range_has_one_part(tmp_path):
    file = BankFile(tmp_path)
    rows = RangeRows(LAYERS, memory=FileMemory(file))
    (whole,) = rows.allocate_parts(0, shape=(7, 128), dtype=torch.int16)
    assert ((7, 128), True) == (tuple(whole.shape), rows.owns(whole))
    assert whole.data_ptr() == rows.ranges[0].tensor.data_ptr() == rows.ranges[0].parts[0].data_ptr()
    rows.close()
    file.close()


def test_memories_say_how_many_banks_they_have():
    assert (1, 1, 2) == (FileMemory.num_banks, CudaRowMemory.num_banks, TwoBankMemory.num_banks)


@pytest.mark.parametrize("shape", [(7, 100), (0, 256), (7, 0)])
def test_rows_that_would_not_fit_a_stitched_range_are_refused_here_too(driver, shape):
    with pytest.raises(BankError, match="multiple of 256 bytes"):
        memory_of(driver).make(shape, dtype=torch.uint8, num_fast=0)


def test_a_closed_range_is_an_error_and_closing_twice_is_harmless(driver):
    held = memory_of(driver).make((4, 256), dtype=torch.uint8, num_fast=1)
    held.evict()
    for _ in range(2):
        held.close()
    for look in (lambda: held.parts, lambda: held.address, held.evict):
        with pytest.raises(BankError, match="address range: got a closed one"):
            look()


def test_an_engine_in_inference_mode_gets_rows_that_may_be_written_to_later(driver):
    with torch.inference_mode():
        held = memory_of(driver).make((4, 256), dtype=torch.uint8, num_fast=2)
    assert not held.parts[0].is_inference()
    held.parts[0].fill_(1)
    held.close()


# Failures.


def num_calls(play):
    driver = FakeDriver()
    driver.calls.clear()
    play(driver)
    return len(driver.calls)


def build(driver):
    """All that building banks and moving rows asks of a driver."""
    rows = RangeRows(LAYERS, memory=memory_of(driver))
    try:
        for layer_id in range(len(LAYERS)):
            load(rows, layer_id)
        rows.exchange(1, 0, 6)
        rows.permute(0, rows=(3, 0, 1), free_row=None)
        rows.copy_row(2, source_row=6, target_row=0)
    finally:
        rows.close()


def test_nothing_is_leaked_whichever_call_of_the_driver_fails():
    total = num_calls(build)
    num_closing = len(LAYERS) * len(SHAPES)
    assert 30 < total
    for at in range(1, total + 1):
        driver = FakeDriver()
        driver.fail(at)
        with pytest.raises(BankError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            build(driver)
        # Pages that the driver does not let go of are still its own; it is asked for all others.
        assert (at, int(at > total - num_closing)) == (at, driver.held.registrations)
        assert NOTHING == dataclasses.replace(driver.held, registrations=0)


@pytest.mark.parametrize("at", range(1, 4))
def test_pages_that_cannot_be_unlocked_are_kept_and_given_back_by_another_close(at):
    driver = FakeDriver()
    memory = memory_of(driver)
    held = [memory.make((7, 256), dtype=torch.uint8, num_fast=2) for _ in range(3)]
    driver.fail(at, call="cuMemHostUnregister")
    failed = []
    for one in held:
        try:
            one.close()
        except BankError:
            failed.append(one)
    assert (1, 1) == (len(failed), driver.held.registrations)
    failed[0].close()
    assert driver.held == NOTHING


def test_pages_that_are_locked_but_seen_by_no_tensor_are_given_back():
    driver, made = FakeDriver(), []

    def tensor_at(address, *, num_bytes):
        if made:
            raise BankError("tensor over memory", got="no memory left")
        made.append(address)  # the first one asks for the device alone
        return cpu_tensor(address, num_bytes=num_bytes)

    memory = TwoBankMemory(driver, tensor_at=tensor_at, synchronise=lambda: None)
    with pytest.raises(BankError, match="no memory left"):
        memory.make((7, 256), dtype=torch.uint8, num_fast=2)
    assert (NOTHING, "cuMemHostUnregister") == (driver.held, driver.calls[-1].name)


def test_a_range_that_fails_twice_tells_both_reasons():
    driver = FakeDriver()

    def tensor_at(address, *, num_bytes):
        if num_bytes > 1:
            driver.fail(1)
            raise BankError("tensor over memory", got="no memory left")
        return cpu_tensor(address, num_bytes=num_bytes)

    memory = TwoBankMemory(driver, tensor_at=tensor_at, synchronise=lambda: None)
    with pytest.raises(BankError, match="no memory left") as caught:
        memory.make((7, 256), dtype=torch.uint8, num_fast=2)
    assert ["and then: cuMemHostUnregister: got CUDA_ERROR_OUT_OF_MEMORY"] == caught.value.__notes__


def test_gpu_memory_that_does_not_suffice_names_the_setting_and_keeps_nothing(driver):
    with pytest.raises(BankError, match="GPU memory for expert rows: got .*; wanted .* GiB; lower HOTSPLIT_HOT_GIB"):
        memory_of(driver).make((2, 1 << 55), dtype=torch.uint8, num_fast=1)


def test_host_memory_that_may_not_be_locked_is_an_error_that_says_so():
    driver = FakeDriver(FakeMachine(lockable_bytes=1 << 20))
    with pytest.raises(BankError, match="host memory cannot be locked for the GPU: .*too much locked memory"):
        memory_of(driver).make((4, 1 << 20), dtype=torch.uint8, num_fast=1)
    assert driver.held == NOTHING


def num_mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_closed_and_failed_ranges_leave_no_mapping_of_this_process_behind():
    driver = FakeDriver()
    memory = memory_of(driver)
    memory.make((7, 1 << 16), dtype=torch.uint8, num_fast=2).close()
    before = num_mappings()
    for _ in range(20):
        memory.make((7, 1 << 16), dtype=torch.uint8, num_fast=2).close()
        driver.fail(1)
        with pytest.raises(BankError):
            memory.make((7, 1 << 16), dtype=torch.uint8, num_fast=2)
    assert num_mappings() <= before + 5


# Placement.


def test_where_cold_rows_lie_is_looked_up_and_said(rows, caplog):
    load(rows, 0)
    caplog.set_level("INFO", logger="hotsplit.bank.cuda_row_memory")
    rows.memory.require_placed(rows.ranges)
    assert any(record.getMessage().startswith("cold rows: ") for record in caplog.records)


def test_a_bank_without_cold_rows_has_nothing_to_look_up(driver, caplog):
    caplog.set_level("INFO", logger="hotsplit.bank.cuda_row_memory")
    held = memory_of(driver).make((7, 256), dtype=torch.uint8, num_fast=7)
    memory_of(driver).require_placed([held])
    assert [] == caplog.records
    held.close()


def test_pages_are_asked_for_where_the_placement_says(driver, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "hotsplit.host.pages.bind_pages",
        lambda address, num_bytes, *, placement: asked.append((num_bytes, placement)) or [],
    )
    placement = Placement(policy="bind", node=0)
    held = memory_of(driver, placement=placement).make((7, 4096), dtype=torch.uint8, num_fast=2)
    assert [(5 * 4096, placement)] == asked
    held.close()


def test_a_kernel_without_huge_pages_is_told_of_once(driver, monkeypatch, caplog):
    from hotsplit.notices import Notice

    told = [Notice(name="no-huge-pages", text="no huge pages for host memory", strict=False)]
    monkeypatch.setattr("hotsplit.host.pages._advise_huge_pages", lambda address, *, num_bytes: told)
    memory = memory_of(driver)
    held = [memory.make((7, 256), dtype=torch.uint8, num_fast=2) for _ in range(3)]
    assert 1 == sum("no huge pages" in record.getMessage() for record in caplog.records)
    for one in held:
        one.close()


# Ids.


@given(
    ids=arrays.arrays("int64", arrays.array_shapes(max_dims=2, min_side=0, max_side=40), elements=st.integers(-1, 40)),
    first_cold=st.integers(0, 41),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_each_row_is_in_exactly_one_part_and_a_sentinel_in_neither(ids, first_cold, dtype):
    row_ids = torch.from_numpy(ids).to(dtype)
    before = row_ids.clone()
    hot_ids, cold_ids = bank_row_ids(row_ids, first_cold=first_cold)
    assert ({dtype}, {row_ids.shape}) == ({hot_ids.dtype, cold_ids.dtype}, {hot_ids.shape, cold_ids.shape})
    assert torch.equal(before, row_ids)
    in_hot, in_cold = hot_ids >= 0, cold_ids >= 0
    assert torch.equal(row_ids >= 0, in_hot ^ in_cold)
    assert not bool((in_hot & in_cold).any())
    assert torch.equal(row_ids[in_hot], hot_ids[in_hot])
    assert torch.equal(row_ids[in_cold], cold_ids[in_cold] + first_cold)
    assert bool((hot_ids[~in_hot] == -1).all())
    assert bool((cold_ids[~in_cold] == -1).all())
    assert bool((hot_ids < first_cold).all())


def test_two_gathers_and_their_sum_are_the_gather_of_the_whole_for_every_split():
    weights = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for order in permutations(range(5), 2):
        row_ids = torch.tensor(order)
        for first_cold in range(6):
            hot_ids, cold_ids = bank_row_ids(row_ids, first_cold=first_cold)
            parts = [(weights[:first_cold], hot_ids), (weights[first_cold:], cold_ids)]
            total = sum((part[ids] * (ids >= 0)[:, None] for part, ids in parts if len(part)), torch.zeros(2, 8))
            assert torch.equal(weights[row_ids], total)
