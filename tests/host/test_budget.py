from __future__ import annotations

from dataclasses import replace

import pytest

from hotsplit.errors import BudgetError
from hotsplit.host.budget import (
    GpuMemory,
    ModuleBytes,
    default_hot_bytes,
    default_hot_bytes_gpu,
    kept_by_device_map,
    require_gpu_memory,
    require_memory,
)
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from plan_builders import sizes_of

GIB = 2**30
SIZES = replace(sizes_of([GIB, GIB], num_experts=8), dense_bytes=3 * GIB)


def limits_of(*available_gib):
    names = ("MemAvailable", "cgroup memory.max")
    return MemoryLimits(
        limits=tuple(
            MemoryLimit(name=name, state=LIMITED, available_bytes=int(gib * GIB), source=f"/{name}")
            for name, gib in zip(names, available_gib, strict=False)
        )
    )


UNKNOWN = MemoryLimits(limits=(MemoryLimit(name="MemAvailable"),))


def test_the_default_is_what_is_available_less_reserve_and_dense_weights():
    assert 11 * GIB == default_hot_bytes(SIZES, reserve_bytes=2 * GIB, limits=limits_of(16))


def test_the_tightest_limit_rules_the_default():
    assert 5 * GIB == default_hot_bytes(SIZES, reserve_bytes=2 * GIB, limits=limits_of(64, 10))


@pytest.mark.parametrize("available_gib", [5, 4.5, 0])
def test_the_default_is_zero_where_nothing_is_left(available_gib):
    assert 0 == default_hot_bytes(SIZES, reserve_bytes=2 * GIB, limits=limits_of(available_gib))


def test_memory_that_cannot_be_told_is_no_default_budget():
    with pytest.raises(BudgetError, match="no way to tell how much memory is available; set HOTSPLIT_HOT_GIB"):
        default_hot_bytes(SIZES, reserve_bytes=0, limits=UNKNOWN)


def test_without_limits_this_machine_is_asked(monkeypatch):
    monkeypatch.setattr("hotsplit.host.budget.memory_limits", lambda: limits_of(7))
    assert 4 * GIB == default_hot_bytes(SIZES, reserve_bytes=0)
    require_memory(4 * GIB, sizes=SIZES, reserve_bytes=0)
    with pytest.raises(BudgetError):
        require_memory(4 * GIB + 1, sizes=SIZES, reserve_bytes=0)


def test_what_just_fits_beside_dense_weights_and_reserve_passes():
    require_memory(5 * GIB, sizes=SIZES, reserve_bytes=2 * GIB, limits=limits_of(10))


def test_the_default_budget_is_what_just_fits():
    budget = default_hot_bytes(SIZES, reserve_bytes=2 * GIB, limits=limits_of(16))
    require_memory(budget, sizes=SIZES, reserve_bytes=2 * GIB, limits=limits_of(16))
    with pytest.raises(BudgetError):
        require_memory(budget + 1, sizes=SIZES, reserve_bytes=2 * GIB, limits=limits_of(16))


def test_one_byte_too_many_is_refused_with_the_room_there_is_and_its_limit():
    with pytest.raises(BudgetError) as caught:
        require_memory(5 * GIB + 1, sizes=SIZES, reserve_bytes=2 * GIB, limits=limits_of(64, 10))
    text = str(caught.value)
    assert 5 * GIB == caught.value.room_bytes
    assert "got 5.000 GiB of hot rows beside 3.000 GiB of dense weights and a reserve of 2.000 GiB" in text
    assert "10.0 GiB available, by cgroup memory.max (/cgroup memory.max)" in text
    assert "set HOTSPLIT_HOT_GIB=5 or less, or lower HOTSPLIT_VRAM_RESERVE_GIB" in text


@pytest.mark.parametrize("available_gib", [8.001, 8.005, 8.007, 8.5])
def test_the_budget_that_the_refusal_names_fits(available_gib):
    limits = limits_of(available_gib)
    with pytest.raises(BudgetError) as caught:
        require_memory(6 * GIB, sizes=SIZES, reserve_bytes=0, limits=limits)
    named = float(str(caught.value).rpartition("HOTSPLIT_HOT_GIB=")[2].split()[0])
    require_memory(int(named * GIB), sizes=SIZES, reserve_bytes=0, limits=limits)


def test_memory_that_cannot_be_told_refuses_nothing():
    require_memory(1000 * GIB, sizes=SIZES, reserve_bytes=GIB, limits=UNKNOWN)


# A GPU.


def module(dense_gib, expert_gib, *, name="layer"):
    return ModuleBytes(name=name, dense_bytes=int(dense_gib * GIB), expert_bytes=int(expert_gib * GIB))


def gpu(free_gib, *, reserve_gib=0.0, dense_gib=0.0):
    return GpuMemory(
        free_bytes=int(free_gib * GIB),
        total_bytes=80 * GIB,
        reserve_bytes=int(reserve_gib * GIB),
        dense_bytes=int(dense_gib * GIB),
        name="cuda:0",
    )


LAYERS = [module(1, 4)] * 10


@pytest.mark.parametrize(
    ("free_gib", "kept"),
    [(0, 0), (11, 0), (12, 1), (22, 2), (34, 5), (55, 8), (56, 10), (1000, 10)],
)
def test_a_device_map_keeps_whole_modules_and_room_for_the_largest_that_follows(free_gib, kept):
    assert kept == len(kept_by_device_map(LAYERS, free_bytes=free_gib * GIB))


def test_the_default_on_a_gpu_is_as_many_bytes_with_all_dense_weights_among_them():
    default = default_hot_bytes_gpu(LAYERS, memory=gpu(34, dense_gib=10))
    assert 15 * GIB == default.num_bytes
    assert "25.000 GiB" in default.text
    assert "5 of 10 modules" in default.text


def test_the_default_on_a_gpu_leaves_the_reserve():
    default = default_hot_bytes_gpu(LAYERS, memory=gpu(34, dense_gib=10, reserve_gib=12))
    assert 12 * GIB == default.num_bytes
    assert "a reserve of 12.000 GiB" in default.text


@pytest.mark.parametrize("free_gib", [0, 5, 20])
def test_the_default_on_a_gpu_is_zero_where_dense_weights_fill_it(free_gib):
    assert 0 == default_hot_bytes_gpu(LAYERS, memory=gpu(free_gib, dense_gib=10)).num_bytes


def test_the_default_on_a_gpu_is_never_more_than_the_experts():
    assert 40 * GIB == default_hot_bytes_gpu(LAYERS, memory=gpu(1000, dense_gib=10)).num_bytes


def test_what_just_fits_on_a_gpu_passes_and_one_byte_more_is_refused():
    require_gpu_memory(5 * GIB, memory=gpu(10, dense_gib=3, reserve_gib=2))
    with pytest.raises(BudgetError, match=r"10.000 GiB of 80.000 GiB free on cuda:0.*HOTSPLIT_HOT_GIB=5") as caught:
        require_gpu_memory(5 * GIB + 1, memory=gpu(10, dense_gib=3, reserve_gib=2))
    assert 5 * GIB == caught.value.room_bytes
