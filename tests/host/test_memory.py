from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotsplit.host.memory import LIMITED, NO_LIMIT, PROBES, UNKNOWN, MemoryLimit, memory_limits, swap_bytes

GIB = 2**30
MAX, HIGH, V1 = "cgroup memory.max", "cgroup memory.high", "cgroup memory.limit_in_bytes"


def put(root: Path, **files: object) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def machine(root: Path, *, available_gib: float, cgroup: str) -> Path:
    text = f"MemTotal:  999999999 kB\nMemFree: 1 kB\nMemAvailable:   {int(available_gib * 2**20)} kB\n"
    put(root, **{"proc/meminfo": text, "proc/self/cgroup": cgroup})
    return root


def group_v2(root: Path, path: str, *, limit: object, used: int, stat: str, high: object = "max") -> None:
    base = f"sys/fs/cgroup{path}"
    put(root, **{
        f"{base}/memory.max": limit, f"{base}/memory.high": high, f"{base}/memory.current": used, f"{base}/memory.stat": stat,
    })  # fmt: skip


def group_v1(root: Path, path: str, *, limit: object, used: int, stat: str) -> None:
    base = f"sys/fs/cgroup/memory{path}"
    put(root, **{
        f"{base}/memory.limit_in_bytes": limit, f"{base}/memory.usage_in_bytes": used, f"{base}/memory.stat": stat,
    })  # fmt: skip


def limit_of(root: Path, name: str) -> MemoryLimit:
    return next(limit for limit in memory_limits(root).limits if limit.name == name)


def test_mem_available_rules_where_no_group_limits(tmp_path):
    root = machine(tmp_path, available_gib=12, cgroup="0::/user.slice")
    group_v2(root, "/user.slice", limit="max", used=5 * GIB, stat="anon 1")
    limits = memory_limits(root)
    assert 12 * GIB == limits.available_bytes
    assert "MemAvailable" == limits.binding.name
    assert NO_LIMIT == limit_of(root, MAX).state


def test_page_cache_of_a_v2_group_is_not_charged(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/job")
    cache = int(68.9 * GIB)
    used = 69 * GIB + GIB // 2
    group_v2(
        root, "/job", limit=70 * GIB, used=used, stat=f"anon 5\nfile {cache}\nactive_file {cache}\ninactive_file 0\n"
    )
    limits = memory_limits(root)
    assert 70 * GIB - (used - cache) == limits.available_bytes
    assert MAX == limits.binding.name


def test_page_cache_of_a_v1_group_is_not_charged(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="11:cpu,cpuacct:/x\n4:memory:/job\n0::/")
    cache = int(68.9 * GIB)
    stat = f"cache 7\nactive_file 3\ninactive_file 4\ntotal_active_file {cache - 10}\ntotal_inactive_file 10\n"
    group_v1(root, "/job", limit=70 * GIB, used=69 * GIB, stat=stat)
    limits = memory_limits(root)
    assert 70 * GIB - (69 * GIB - cache) == limits.available_bytes
    assert V1 == limits.binding.name


def test_anonymous_locked_and_shared_pages_are_charged(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/job")
    stat = f"anon {3 * GIB}\nfile {4 * GIB}\nshmem {GIB}\nunevictable {GIB}\nactive_file {GIB}\ninactive_file {GIB}\n"
    group_v2(root, "/job", limit=10 * GIB, used=7 * GIB, stat=stat)
    assert 10 * GIB - 5 * GIB == memory_limits(root).available_bytes


def test_reclaimable_slab_is_not_charged(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/job")
    stat = f"active_file 0\ninactive_file 0\nslab_reclaimable {GIB}\nslab_unreclaimable {GIB}\n"
    group_v2(root, "/job", limit=10 * GIB, used=4 * GIB, stat=stat)
    assert 7 * GIB == memory_limits(root).available_bytes


def test_charge_is_summed_from_memory_stat_where_usage_is_missing(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/job")
    put(root, **{
        "sys/fs/cgroup/job/memory.max": 10 * GIB,
        "sys/fs/cgroup/job/memory.stat": f"anon {2 * GIB}\nshmem {GIB}\nunevictable {GIB}\nfile {6 * GIB}",
    })  # fmt: skip
    assert 6 * GIB == memory_limits(root).available_bytes


def test_a_group_above_binds_when_it_is_tighter(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/pod/container/scope")
    group_v2(root, "/pod/container/scope", limit="max", used=GIB, stat="active_file 0\ninactive_file 0")
    group_v2(root, "/pod/container", limit=50 * GIB, used=GIB, stat="active_file 0\ninactive_file 0")
    group_v2(root, "/pod", limit=20 * GIB, used=8 * GIB, stat="active_file 0\ninactive_file 0")
    limits = memory_limits(root)
    assert 12 * GIB == limits.available_bytes
    assert str(root / "sys/fs/cgroup/pod/memory.max") == limits.binding.source


def test_the_group_of_the_mount_is_read_when_the_path_is_the_hosts(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/kubepods/pod1/abc")
    group_v2(root, "", limit=8 * GIB, used=2 * GIB, stat="active_file 0\ninactive_file 0")
    assert 6 * GIB == memory_limits(root).available_bytes


def test_a_path_that_leads_out_of_the_namespace_reads_the_mount_only(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/../other")
    group_v2(root, "/other", limit=1, used=0, stat="")
    group_v2(root, "", limit=8 * GIB, used=2 * GIB, stat="active_file 0\ninactive_file 0")
    assert 6 * GIB == memory_limits(root).available_bytes


def test_memory_high_is_a_limit(tmp_path):
    root = machine(tmp_path, available_gib=100, cgroup="0::/job")
    group_v2(root, "/job", limit=30 * GIB, high=20 * GIB, used=GIB, stat="active_file 0\ninactive_file 0")
    limits = memory_limits(root)
    assert (19 * GIB, HIGH) == (limits.available_bytes, limits.binding.name)


def test_the_huge_v1_number_is_no_limit(tmp_path):
    root = machine(tmp_path, available_gib=9, cgroup="4:memory:/job")
    group_v1(root, "/job", limit=9223372036854771712, used=GIB, stat="total_active_file 0")
    assert NO_LIMIT == limit_of(root, V1).state
    assert 9 * GIB == memory_limits(root).available_bytes


@pytest.mark.parametrize(("own", "above", "binding_gib"), [(70, 40, 40), (9223372036854771712, 40, 40), (30, 40, 30)])
def test_a_v1_group_above_that_is_not_mounted_binds_where_it_is_tighter(tmp_path, own, above, binding_gib):
    root = machine(tmp_path, available_gib=100, cgroup="4:memory:/docker/abc")
    limit = own * GIB if own < 100 else own
    stat = f"hierarchical_memory_limit {above * GIB}\ntotal_active_file 0\ntotal_inactive_file 0"
    group_v1(root, "", limit=limit, used=10 * GIB, stat=stat)
    found = limit_of(root, V1)
    assert (LIMITED, (binding_gib - 10) * GIB) == (found.state, found.available_bytes)
    assert ("memory.stat" if binding_gib == above else "memory.limit_in_bytes") == Path(found.source).name


def test_a_v1_group_under_no_limit_anywhere_has_none(tmp_path):
    root = machine(tmp_path, available_gib=9, cgroup="4:memory:/")
    group_v1(
        root, "", limit=2**63 - 4096, used=GIB, stat=f"hierarchical_memory_limit {2**63 - 4096}\ntotal_active_file 0"
    )
    assert NO_LIMIT == limit_of(root, V1).state


def test_the_hybrid_mount_of_v2_is_read(tmp_path):
    root = machine(tmp_path, available_gib=9, cgroup="0::/job")
    put(root, **{
        "sys/fs/cgroup/unified/job/memory.max": 4 * GIB,
        "sys/fs/cgroup/unified/job/memory.current": GIB,
        "sys/fs/cgroup/memory.max": 1,
    })  # fmt: skip
    assert 3 * GIB == memory_limits(root).available_bytes


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    root = machine(tmp_path, available_gib=9, cgroup="0::/job")
    group_v2(root, "/job", limit=GIB, used=2 * GIB, stat="active_file 0\ninactive_file 0")
    assert 0 == memory_limits(root).available_bytes


def test_what_is_absent_is_unknown_and_never_zero(tmp_path):
    limits = memory_limits(tmp_path)
    assert limits.available_bytes is None
    assert limits.binding is None
    assert [(name, UNKNOWN, None) for name in PROBES] == [
        (limit.name, limit.state, limit.available_bytes) for limit in limits.limits
    ]
    assert "available memory unknown" == str(limits)


@pytest.mark.parametrize("text", ["", "rubbish", "-1", "12 GiB"])
def test_an_unreadable_limit_is_unknown(tmp_path, text):
    root = machine(tmp_path, available_gib=3, cgroup="0::/job")
    group_v2(root, "/job", limit=text, used=GIB, stat="active_file 0\ninactive_file 0")
    assert UNKNOWN == limit_of(root, MAX).state
    assert 3 * GIB == memory_limits(root).available_bytes


def test_a_limit_without_any_charge_is_unknown(tmp_path):
    root = machine(tmp_path, available_gib=3, cgroup="0::/job")
    put(root, **{"sys/fs/cgroup/job/memory.max": GIB})
    assert UNKNOWN == limit_of(root, MAX).state


def test_meminfo_of_old_kernels_without_mem_available_is_unknown(tmp_path):
    put(tmp_path, **{"proc/meminfo": "MemTotal: 100 kB\nMemFree: 50 kB"})
    assert UNKNOWN == limit_of(tmp_path, "MemAvailable").state


def test_the_text_names_gib_limit_and_file(tmp_path):
    root = machine(tmp_path, available_gib=12, cgroup="0::/x")
    assert f"12.0 GiB available, by MemAvailable ({root / 'proc/meminfo'})" == str(memory_limits(root))


def test_this_machine_has_available_memory_below_its_total():
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc here")
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    limits = memory_limits()
    assert LIMITED == limits.binding.state
    assert 0 < limits.available_bytes < total


def test_swap_space_is_read_and_unknown_where_it_cannot_be(tmp_path):
    assert swap_bytes(tmp_path) is None
    put(tmp_path, **{"proc/meminfo": "MemTotal: 100 kB\nSwapTotal:       2048 kB\nSwapFree: 1 kB"})
    assert 2048 * 1024 == swap_bytes(tmp_path)
    put(tmp_path, **{"proc/meminfo": "SwapTotal:             0 kB"})
    assert 0 == swap_bytes(tmp_path)
