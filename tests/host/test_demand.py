from __future__ import annotations

from pathlib import Path

import pytest

from hotsplit.errors import BankError, BudgetError
from hotsplit.host.demand import ALLOCATORS, HostDemand, free_disk_bytes, require_disk, require_host
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits

GIB = 2**30
BANKS = HostDemand(items={"bank a": int(2.25 * GIB), "bank b": int(47.7 * GIB), "bank c": int(94.6 * GIB)})


def limits_of(*available_gib):
    names = ("MemAvailable", "cgroup memory.max")
    return MemoryLimits(
        limits=tuple(
            MemoryLimit(name=name, state=LIMITED, available_bytes=int(gib * GIB), source=f"/{name}")
            for name, gib in zip(names, available_gib, strict=False)
        )
    )


UNKNOWN = MemoryLimits(limits=(MemoryLimit(name="MemAvailable"),))


def refusal(demand, **kwargs):
    with pytest.raises(BudgetError) as caught:
        require_host(demand, **kwargs)
    return caught.value


def test_powers_of_two_turn_144_gib_of_banks_into_196():
    assert 144.55 == pytest.approx(BANKS.total_bytes("exact") / GIB)
    assert 196 * GIB == BANKS.total_bytes("power-of-two")
    assert {"bank a": 4 * GIB, "bank b": 64 * GIB, "bank c": 128 * GIB} == BANKS.real_bytes("power-of-two")


def test_a_160_gib_host_refuses_rounded_banks_and_takes_exact_ones():
    require_host(BANKS, allocator="exact", limits=limits_of(160))
    error = refusal(BANKS, allocator="power-of-two", limits=limits_of(160))
    assert (196 * GIB, 160 * GIB, 36 * GIB) == (error.real_bytes, error.available_bytes, error.excess_bytes)
    assert BANKS.requested_bytes == error.requested_bytes
    for part in (
        "bank a 4.000 GiB, bank b 64.000 GiB, bank c 128.000 GiB: 196.000 GiB",
        "144.550 GiB of them requested (power-of-two allocator)",
        "160.0 GiB available, by MemAvailable (/MemAvailable): 36.000 GiB too many",
        "allocate exact sizes, without rounding: 144.550 GiB per rank fit",
    ):
        assert part in str(error)


@pytest.mark.parametrize(
    ("requested", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (2**30, 2**30), (2**30 + 1, 2**31), (2**40 - 1, 2**40)]
)
def test_powers_of_two_are_kept_and_all_else_goes_up_to_the_next(requested, taken):
    assert taken == ALLOCATORS["power-of-two"](requested)
    assert requested == ALLOCATORS["exact"](requested)


def test_what_just_fits_passes_and_one_byte_more_does_not():
    require_host(HostDemand(items={"dense weights": 3 * GIB, "KV cache": GIB}), limits=limits_of(4))
    with pytest.raises(BudgetError):
        require_host(HostDemand(items={"dense weights": 3 * GIB, "KV cache": GIB + 1}), limits=limits_of(4))


def test_the_limit_that_binds_is_named():
    error = refusal(HostDemand(items={"KV cache": 11 * GIB}), limits=limits_of(64, 10))
    assert "10.0 GiB available, by cgroup memory.max" in str(error)


def test_every_rank_asks_for_the_same_again():
    demand = HostDemand(items={"dense weights": 3 * GIB})
    require_host(demand, limits=limits_of(6), ranks=2)
    error = refusal(demand, limits=limits_of(6), ranks=3)
    assert (9 * GIB, 3 * GIB) == (error.real_bytes, error.excess_bytes)
    assert "on each of 3 ranks: 9.000 GiB" in str(error)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("available_gib", [9.001, 10, 13.337, 17.99])
def test_the_hot_budget_that_the_refusal_names_fits(allocator, ranks, available_gib):
    items = {"hot rows": 40 * GIB, "dense weights": GIB, "reserve": 2 * GIB}
    limits = limits_of(available_gib * ranks)
    text = str(refusal(HostDemand(items=items), allocator=allocator, limits=limits, ranks=ranks))
    named = float(text.rpartition("HOTSPLIT_HOT_GIB=")[2].split()[0])
    require_host(
        HostDemand(items={**items, "hot rows": int(named * GIB)}), allocator=allocator, limits=limits, ranks=ranks
    )
    more = HostDemand(items={**items, "hot rows": int((named + 0.01) * GIB) + 1})
    refusal(more, allocator=allocator, limits=limits, ranks=ranks)


@pytest.mark.parametrize(("available_gib", "more"), [(79.75, 21.25), (79.744, 21.26), (1, 100)])
def test_cold_rows_alone_shrink_by_a_larger_hot_budget_that_is_enough(available_gib, more):
    items = {"cold rows": 100 * GIB, "dense weights": GIB}
    limits = limits_of(available_gib)
    text = str(refusal(HostDemand(items=items), limits=limits))
    assert f"raise HOTSPLIT_HOT_GIB by {more:g} or more, so that fewer experts are cold" in text
    require_host(HostDemand(items={**items, "cold rows": int((100 - more) * GIB)}), limits=limits)


def test_rows_of_both_kinds_in_one_memory_are_no_cure():
    demand = HostDemand(items={"hot rows": 4 * GIB, "cold rows": 9 * GIB, "KV cache": GIB})
    text = str(refusal(demand, limits=limits_of(12)))
    assert "take 2.000 GiB less per rank of cold rows, hot rows, KV cache, or a host with more memory" in text


def test_where_no_hot_row_would_fit_less_of_the_others_is_asked_for():
    demand = HostDemand(items={"hot rows": GIB, "dense weights": 5 * GIB, "reserve": 2 * GIB})
    text = str(refusal(demand, limits=limits_of(6)))
    assert "take 2.000 GiB less per rank of dense weights, reserve, hot rows (HOTSPLIT_VRAM_RESERVE_GIB)" in text


def test_the_demand_is_never_made_smaller():
    items = {"hot rows": 9 * GIB}
    demand = HostDemand(items=items)
    refusal(demand, limits=limits_of(4))
    assert {"hot rows": 9 * GIB} == demand.items


def test_memory_that_cannot_be_told_refuses_nothing():
    require_host(HostDemand(items={"KV cache": 10**15}), limits=UNKNOWN)


def test_without_limits_this_machine_is_asked(monkeypatch):
    monkeypatch.setattr("hotsplit.host.demand.memory_limits", lambda: limits_of(7))
    require_host(HostDemand(items={"KV cache": 7 * GIB}))
    refusal(HostDemand(items={"KV cache": 7 * GIB + 1}))


def test_a_negative_item_is_refused_by_name():
    with pytest.raises(BudgetError, match="host memory, KV cache: got -1 bytes; wanted bytes >= 0"):
        HostDemand(items={"KV cache": -1})


def test_an_unknown_allocator_is_refused_with_those_there_are():
    with pytest.raises(BudgetError, match="got 'buddy'; wanted one of exact, power-of-two"):
        BANKS.total_bytes("buddy")


def test_a_demand_for_nothing_says_so():
    assert "nothing: 0.0 MiB" == HostDemand(items={"cold rows": 0}).describe("exact")


# -- disk


def mounts(root, *lines):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text("".join(f"{line}\n" for line in lines))
    return root


@pytest.fixture
def disk_of_10_gib(monkeypatch):
    monkeypatch.setattr("hotsplit.host.demand.free_disk_bytes", lambda folder: 10 * GIB)


@pytest.mark.usefixtures("disk_of_10_gib")
def test_bank_files_that_just_fit_the_disk_pass_and_one_byte_more_does_not(tmp_path):
    assert [] == require_disk(tmp_path, needed=5 * GIB, ranks=2, root=tmp_path)
    with pytest.raises(BudgetError) as caught:
        require_disk(tmp_path, needed=5 * GIB + 1, ranks=2)
    assert (10 * GIB + 2, 10 * GIB) == (caught.value.needed_bytes, caught.value.free_bytes)
    for part in (str(tmp_path), "got 10.000 GiB free", "cold rows of 2 ranks", "set HOTSPLIT_BANK_DIR"):
        assert part in str(caught.value)


def test_a_folder_that_is_not_there_yet_is_judged_by_the_disk_it_will_lie_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("hotsplit.host.demand.free_disk_bytes", lambda folder: asked.append(folder) or GIB)
    assert [] == require_disk(tmp_path / "new" / "bank", needed=GIB, root=tmp_path)
    assert [tmp_path.resolve()] == asked
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_way_is_a_bank_error(tmp_path):
    (tmp_path / "bank").write_text("")
    with pytest.raises(BankError, match=r"bank, which is no folder; .*; set HOTSPLIT_BANK_DIR"):
        require_disk(tmp_path / "bank" / "rank0", needed=1)


def test_a_folder_that_cannot_be_written_is_a_bank_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hotsplit.host.demand.os.access", lambda path, mode: False)
    with pytest.raises(BankError, match=r"which is not writable; .*; set HOTSPLIT_BANK_DIR"):
        require_disk(tmp_path, needed=1)


@pytest.mark.usefixtures("disk_of_10_gib")
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("/dev/vda / ext4 rw 0 0", "none {} tmpfs rw 0 0"), True),
        (("none / tmpfs rw 0 0", "/dev/vda {} ext4 rw 0 0"), False),
        (("none {} tmpfs rw 0 0", "/dev/vda {} xfs rw 0 0"), False),
        (("none {}x tmpfs rw 0 0", "overlay / overlay rw 0 0"), False),
        (("rubbish",), False),
    ],
    ids=[
        "memory over disk",
        "disk over memory",
        "the last mount counts",
        "a name that only begins alike",
        "unreadable",
    ],
)
def test_a_bank_folder_in_memory_is_told(tmp_path, lines, told):
    place = tmp_path / "bank dir"
    place.mkdir()
    written = str(place.resolve()).replace(" ", r"\040")
    root = mounts(tmp_path, *(line.format(written) for line in lines))
    assert (["bank-in-memory"] if told else []) == [
        notice.name for notice in require_disk(place, needed=GIB, root=root)
    ]


@pytest.mark.usefixtures("disk_of_10_gib")
def test_without_a_list_of_mounts_no_folder_is_called_memory(tmp_path):
    assert [] == require_disk(tmp_path, needed=GIB, root=tmp_path / "nowhere")


def test_this_machine_has_room_for_an_empty_bank(tmp_path):
    assert 0 < free_disk_bytes(Path("/"))
    require_disk(tmp_path, needed=0)
