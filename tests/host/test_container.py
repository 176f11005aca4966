from __future__ import annotations

import pytest

from host.host_trees import DOCKER_CAPABILITIES, put, put_host
from hotsplit.host.container import read_container
from hotsplit.host.cpu import cpu_summary, read_cpu
from hotsplit.host.huge_pages import read_huge_pages
from hotsplit.host.mounts import mount_in, mount_of


@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        ({}, ()),
        ({".dockerenv": ""}, ("docker",)),
        ({"run/.containerenv": ""}, ("podman",)),
        ({"proc/self/cgroup": "0::/kubepods/pod1/abc"}, ("kubernetes",)),
        ({"proc/self/cgroup": "4:memory:/docker/abc"}, ("docker",)),
        ({"proc/1/cgroup": "0::/machine.slice/libpod-abc.scope"}, ("podman",)),
        ({".dockerenv": "", "var/run/secrets/kubernetes.io/x": ""}, ("docker", "kubernetes")),
    ],
)
def test_a_container_is_known_by_its_signs(tmp_path, files, kinds):
    root = put_host(tmp_path)
    put(root, files)
    assert kinds == read_container(root).kinds


def test_a_container_of_docker_has_neither_privilege(tmp_path):
    found = read_container(put_host(tmp_path, capabilities=DOCKER_CAPABILITIES))
    assert {"IPC_LOCK": False, "SYS_NICE": False} == found.capabilities.value


def test_privileges_that_cannot_be_read_are_unknown_and_lift_nothing(tmp_path):
    found = read_container(tmp_path)
    assert None is found.capabilities.value
    assert "no such file" in found.capabilities.reason
    assert not found.has_ipc_lock


def test_the_processor_is_told_with_the_instructions_that_matter(tmp_path):
    cpu = read_cpu(put_host(tmp_path))
    assert "Intel(R) Xeon(R) 8480+" == cpu.model.value
    assert all(cpu.flags.value.values())
    assert (8, 4) == (cpu.online.value, cpu.usable.value)


def test_an_arm_processor_has_no_name_and_says_so(tmp_path):
    root = put_host(tmp_path)
    put(
        root,
        {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f"},
    )
    cpu = read_cpu(root)
    assert "unknown (the kernel names no model, only CPU implementer 0x41, CPU part 0xd4f)" == str(cpu.model)
    assert "asimd bf16 sve; not asimddp i8mm sve2 svebf16" == cpu_summary(cpu).value


@pytest.mark.parametrize("text", ["", "garbage", "flags:", "model name", "\0\0"])
def test_a_processor_that_tells_nothing_is_unknown(tmp_path, text):
    put(tmp_path, {"proc/cpuinfo": text})
    cpu = read_cpu(tmp_path)
    for answer in (cpu.model, cpu.flags, cpu.online, cpu.usable):
        assert None is answer.value
        assert answer.reason


def test_pools_of_every_size_are_told_and_idle_ones_added_up(tmp_path):
    root = put_host(tmp_path)
    put(root, {
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": 512,
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": 256,
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": 2,
        "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": 1,
    })  # fmt: skip
    huge = read_huge_pages(root)
    assert "madvise" == huge.mode.value
    assert [2**21, 2**30] == [pool.page_bytes for pool in huge.pools]
    assert 2**29 + 2**30 == huge.idle_bytes
    put(root, {"sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": 256})  # a data base's, not yet touched
    assert 2**30 == read_huge_pages(root).idle_bytes


def test_a_pool_that_cannot_be_read_is_unknown(tmp_path):
    put(tmp_path, {"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "many"})
    huge = read_huge_pages(tmp_path)
    assert None is huge.mode.value
    assert "says 'many'" in huge.pools[0].total.reason
    assert None is huge.idle_bytes


def test_the_mount_that_lies_over_the_others_counts(tmp_path):
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        "2 1 0:30 / /data rw shared:1 - nfs4 server:/export rw",
        "3 1 0:31 / /data rw - tmpfs none rw",
        "4 1 0:32 / /data/a\\040b rw - xfs /dev/sdb rw",
        "broken line",
        "5 1 0:33 / /data",
    ]
    text = "\n".join(lines)
    put(tmp_path, {"proc/self/mountinfo": text})
    assert "/dev/sdb (xfs, at /data/a b)" == str(mount_in(text, tmp_path.__class__("/data/a b/models")))
    assert mount_in(text, tmp_path.__class__("/data/x")).is_memory
    assert "/dev/sda1" == mount_of(tmp_path, root=tmp_path).value.device
    assert None is mount_of(tmp_path, root=tmp_path / "gone").value
