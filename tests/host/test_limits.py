from __future__ import annotations

import pytest

from host.host_trees import (
    ALL_CAPABILITIES,
    DOCKER_CAPABILITIES,
    GIB,
    put,
    put_group_v1,
    put_group_v2,
    put_host,
)
from hotsplit.host.container import read_container
from hotsplit.host.limits import MEMLOCK, WSL, budget_notices, read_budget, read_total, size_text
from hotsplit.host.memory import PROBES

WSL_KERNEL = "5.15.153.1-microsoft-standard-WSL2"
CACHE = int(68.9 * GIB)


def budget_of(root):
    return read_budget(read_container(root), root=root)


def limit(budget, name):
    return next(one for one in budget.limits if one.name == name)


def test_available_memory_binds_where_nothing_else_limits(tmp_path):
    budget = budget_of(put_host(tmp_path, available_gib=400))
    assert 400 * GIB == budget.num_bytes
    assert "MemAvailable" == budget.binding.name
    assert "no limit" == limit(budget, MEMLOCK).state
    assert "no limit" == limit(budget, WSL).state


def test_page_cache_of_a_group_is_not_charged_against_the_budget_in_v2(tmp_path):
    root = put_host(tmp_path)
    put_group_v2(root, limit=70 * GIB, used=70 * GIB - 5, stat=f"anon 7\nactive_file {CACHE}\ninactive_file 0")
    budget = budget_of(root)
    assert CACHE + 5 == budget.num_bytes
    assert "cgroup memory.max" == budget.binding.name
    assert "MemoryMax=infinity" in budget.binding.do


def test_page_cache_of_a_group_is_not_charged_against_the_budget_in_v1(tmp_path):
    root = put_host(tmp_path)
    put_group_v1(root, limit=70 * GIB, used=69 * GIB, stat=f"total_active_file {CACHE}\ntotal_inactive_file 0")
    budget = budget_of(root)
    assert GIB + CACHE == budget.num_bytes
    assert "cgroup memory.limit_in_bytes" == budget.binding.name


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096)])
def test_a_group_without_limit_is_told_as_such_and_never_as_zero(tmp_path, text):
    root = put_host(tmp_path)
    put_group_v2(root, limit=text, used=5, stat="active_file 0\ninactive_file 0")
    found = limit(budget_of(root), "cgroup memory.max")
    assert ("no limit", None) == (found.state, found.room.value)
    assert "sets none" in found.room.reason


def test_64_kib_of_locked_memory_bind_and_the_command_that_lifts_them_is_named(tmp_path):
    budget = budget_of(put_host(tmp_path, memlock="65536", hard="unlimited"))
    assert 65536 == budget.num_bytes
    assert (MEMLOCK, "ulimit -l unlimited") == (budget.binding.name, budget.binding.do)
    assert 400 * GIB == budget.binding_unlocked.room.value
    assert "64 KiB" == size_text(budget.num_bytes)


def test_a_hard_limit_on_locked_memory_takes_root(tmp_path):
    assert "limits.conf" in budget_of(put_host(tmp_path, memlock="65536")).binding.do


def test_what_is_locked_already_is_taken_off(tmp_path):
    root = put_host(tmp_path, memlock=str(10 * 2**20))
    put(root, {"proc/self/status": "VmLck:\t 4096 kB\nCapEff:\t0000000000000000"})
    assert 6 * 2**20 == budget_of(root).num_bytes


def test_in_a_docker_container_the_whole_command_is_named(tmp_path):
    root = put_host(tmp_path, memlock="8388608", capabilities=DOCKER_CAPABILITIES)
    put(root, {".dockerenv": ""})
    budget = budget_of(root)
    assert 8388608 == budget.num_bytes
    assert "docker run --ulimit memlock=-1 --cap-add IPC_LOCK --cap-add SYS_NICE" == budget.binding.do


def test_ipc_lock_lifts_the_limit(tmp_path):
    budget = budget_of(put_host(tmp_path, memlock="65536", capabilities=ALL_CAPABILITIES))
    assert "MemAvailable" == budget.binding.name
    assert "CAP_IPC_LOCK lifts it: ulimit -l is 64 KiB" == limit(budget, MEMLOCK).room.reason


def test_ipc_lock_of_a_rootless_container_lifts_nothing(tmp_path):
    root = put_host(tmp_path, memlock="65536", capabilities=ALL_CAPABILITIES)
    put(root, {"proc/self/uid_map": "0 1000 1\n1 100000 65536", "run/.containerenv": ""})
    budget = budget_of(root)
    assert (65536, MEMLOCK) == (budget.num_bytes, budget.binding.name)
    assert budget.binding.do.startswith("podman run --ulimit memlock=-1")


def test_wsl_locks_half_of_its_memory(tmp_path):
    budget = budget_of(put_host(tmp_path, total_gib=32, available_gib=30, kernel=WSL_KERNEL))
    assert (16 * GIB, WSL) == (budget.num_bytes, budget.binding.name)
    assert ".wslconfig" in budget.binding.do
    assert 30 * GIB == budget.binding_unlocked.room.value


def test_the_cap_of_wsl_does_not_bind_where_less_is_free(tmp_path):
    budget = budget_of(put_host(tmp_path, total_gib=32, available_gib=10, kernel=WSL_KERNEL))
    assert "MemAvailable" == budget.binding.name


@pytest.mark.parametrize(
    ("files", "cure"),
    [
        ({"run/secrets/kubernetes.io/token": "x"}, "resources.limits.memory"),
        ({".dockerenv": ""}, "docker run --memory SIZE"),
        ({"run/.containerenv": ""}, "podman run --memory SIZE"),
    ],
)
def test_the_cure_of_a_groups_limit_is_that_of_the_container_engine(tmp_path, files, cure):
    root = put_host(tmp_path)
    put_group_v2(root, limit=GIB, used=0, stat="active_file 0\ninactive_file 0")
    put(root, files)
    assert cure in budget_of(root).binding.do


def test_on_a_host_that_tells_nothing_the_budget_is_unknown_and_every_limit_has_a_reason(tmp_path):
    budget = budget_of(tmp_path)
    assert None is budget.num_bytes
    assert {"unknown"} == {one.state for one in budget.limits}
    assert all(one.room.reason for one in budget.limits)
    assert {*PROBES, MEMLOCK, WSL} == {one.name for one in budget.limits}
    total = read_total(tmp_path)
    assert None is total.value
    assert ["host-budget-unknown", "host-memory-unknown"] == [one.name for one in budget_notices(budget, total=total)]


def test_a_limit_on_locked_memory_that_binds_is_said_aloud(tmp_path):
    root = put_host(tmp_path, memlock="65536")
    (notice,) = budget_notices(budget_of(root), total=read_total(root))
    assert "pinning-limited" == notice.name
    assert "64 KiB" in notice.text
    assert "400.000 GiB" in notice.text


def test_wsl_1_has_no_gpu_and_so_no_cap_that_a_file_raises(tmp_path):
    budget = budget_of(put_host(tmp_path, total_gib=32, available_gib=30, kernel="4.4.0-19041-Microsoft"))
    assert "MemAvailable" == budget.binding.name
    assert "unknown" == limit(budget, WSL).state
    assert "wsl --set-version" in limit(budget, WSL).room.reason
