"""NUMA nodes as /sys has them, the node of a rank's GPU, what each policy makes of it, and policies that are put back."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pytest

from host import numa_trees as trees
from hotsplit.errors import BankError
from hotsplit.host import numa
from hotsplit.host.libc import READ_WRITE, checked, system_call
from hotsplit.host.numa import (
    NO_PLACEMENT,
    Placement,
    bind_pages,
    choose_cpu_placement,
    choose_placement,
    gpu_node,
    read_nodes,
    thread_policy,
)
from hotsplit.host.page_nodes import page_nodes

GIB = 2**30
NODE_0 = Placement(policy="preferred", node=0)


def names(notices):
    return [notice.name for notice in notices]


def refuse(monkeypatch, *, call, number=errno.EPERM):
    """Let the kernel refuse a system call by name."""

    def refusing(name, *arguments):
        if name == call:
            raise OSError(number, os.strerror(number), name)
        return system_call(name, *arguments)

    monkeypatch.setattr(numa, "system_call", refusing)


def require_calls(*wanted):
    """Skip where this machine's kernel or container allows no NUMA calls."""
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    try:
        if "get_mempolicy" in wanted:
            system_call("get_mempolicy", ctypes.addressof(mode), ctypes.addressof(mask), 1025, 0, 0)
        if "set_mempolicy" in wanted:
            system_call("set_mempolicy", 0, 0, 0)
    except OSError as error:
        pytest.skip(f"this machine refuses {error.filename}: {error.strerror}")
    if 0 not in [node.number for node in read_nodes()]:
        pytest.skip("this machine tells of no NUMA node 0")


def mode_of_this_thread():
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    system_call("get_mempolicy", ctypes.addressof(mode), ctypes.addressof(mask), 1025, 0, 0)
    return mode.value, mask[0]


@pytest.fixture
def memory():
    address = checked("mmap", 0, 64 * mmap.PAGESIZE, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield address
    checked("munmap", address, 64 * mmap.PAGESIZE)


def test_nodes_are_read_with_their_cpus_memory_and_distances(tmp_path):
    nodes = read_nodes(trees.two_sockets(tmp_path))
    assert [0, 1] == [node.number for node in nodes]
    assert [(256 * GIB, 200 * GIB), (256 * GIB, 100 * GIB)] == [(node.total_bytes, node.free_bytes) for node in nodes]
    assert [(10, 21), (21, 10)] == [node.distances for node in nodes]
    assert [True, True] == [node.can_host for node in nodes]


def test_nodes_come_in_the_order_of_their_numbers(tmp_path):
    assert [0, 1, 2, 10, 11] == [node.number for node in read_nodes(trees.grace(tmp_path))]


def test_nodes_without_cpus_or_memory_host_nothing(tmp_path):
    nodes = read_nodes(trees.grace(tmp_path))
    assert [True, True, False, False, False] == [node.can_host for node in nodes]
    assert [True, True, False, False, False] == [node.has_cpus for node in nodes]


def test_memory_that_cannot_be_read_is_unknown_and_not_zero(tmp_path):
    trees.put_node(tmp_path, 0, cpus="0-3", total_gib=None)
    (node,) = read_nodes(tmp_path)
    assert (None, None, (), True) == (node.total_bytes, node.free_bytes, node.distances, node.can_host)


def test_a_machine_that_tells_of_no_nodes_has_none(tmp_path):
    assert () == read_nodes(trees.no_nodes(tmp_path)) == read_nodes(tmp_path / "nowhere")


def test_the_nodes_of_this_machine_are_those_of_its_kernel():
    expected = {int(name[4:]) for name in os.listdir("/sys/devices/system/node") if name[4:].isdigit()}
    assert expected == {node.number for node in read_nodes()}


@pytest.mark.parametrize(
    ("bus_id", "expected"),
    [
        ("0000:17:00.0", 0),
        ("0000:EF:00.0", 1),
        ("00000000:BB:00.0", 1),  # as nvidia-smi writes it
        ("0000:bb:00.0\n", 1),
        ("0000:aa:00.0", None),
        ("0001:17:00.0", None),
        ("17:00.0", None),
        ("", None),
        ("gpu", None),
    ],
)
def test_a_gpu_is_found_as_sysfs_and_nvidia_smi_write_it(tmp_path, bus_id, expected):
    assert expected == gpu_node(bus_id, root=trees.two_sockets(tmp_path))


def test_a_bus_domain_of_five_digits_is_not_cut(tmp_path):
    trees.put_gpus(tmp_path, {"10000:01:00.0": 1, "0000:01:00.0": 0})
    assert (1, 0) == tuple(gpu_node(bus, root=tmp_path) for bus in ("10000:01:00.0", "00000000:01:00.0"))


@pytest.mark.parametrize("text", [-1, None, "", "x"])
def test_a_gpu_that_names_no_node_is_unknown(tmp_path, text):
    trees.put_gpus(tmp_path, {"0000:01:00.0": text})
    assert gpu_node("0000:01:00.0", root=tmp_path) is None


def test_every_rank_gets_the_node_of_its_own_gpu(tmp_path):
    root = trees.two_sockets(tmp_path)
    for policy in ("preferred", "bind"):
        found = [choose_placement(policy, bus_id=f"0000:{bus}:00.0", root=root) for bus in ("17", "3d", "98", "ef")]
        assert [(Placement(policy=policy, node=node), []) for node in (0, 0, 1, 1)] == found


def test_off_asks_for_nothing_on_any_machine(tmp_path):
    for tree in (trees.two_sockets, trees.one_node, trees.no_nodes):
        assert (NO_PLACEMENT, []) == choose_placement("off", bus_id="0000:17:00.0", root=tree(tmp_path / tree.__name__))


def test_on_one_node_both_policies_hold_and_one_notice_says_that_there_is_no_choice(tmp_path):
    for policy in ("preferred", "bind"):
        placement, notices = choose_placement(policy, bus_id="0000:00:05.0", root=trees.one_node(tmp_path / policy))
        assert (Placement(policy=policy, node=0), ["numa-one-node"]) == (placement, names(notices))
        assert [False] == [notice.strict for notice in notices]


def test_without_numa_preferred_degrades_with_one_notice_and_bind_is_an_error(tmp_path):
    root = trees.no_nodes(tmp_path)
    placement, notices = choose_placement("preferred", bus_id="0000:00:05.0", root=root)
    assert (NO_PLACEMENT, ["numa-none"]) == (placement, names(notices))
    with pytest.raises(
        BankError, match="HOTSPLIT_NUMA_POLICY=bind: got this kernel tells of no NUMA nodes; wanted a node"
    ):
        choose_placement("bind", bus_id="0000:00:05.0", root=root)


@pytest.mark.parametrize("driver_node", [None, -1])
def test_a_gpu_without_a_node_degrades_under_preferred_and_is_an_error_under_bind(tmp_path, driver_node):
    root = trees.two_sockets(tmp_path)
    trees.put_gpus(root, {"0000:01:00.0": -1})
    placement, notices = choose_placement("preferred", bus_id="0000:01:00.0", driver_node=driver_node, root=root)
    assert (NO_PLACEMENT, ["numa-unknown-node"]) == (placement, names(notices))
    with pytest.raises(
        BankError, match="node of GPU 0000:01:00.0 is unknown; .*set HOTSPLIT_NUMA_POLICY=preferred or off"
    ):
        choose_placement("bind", bus_id="0000:01:00.0", driver_node=driver_node, root=root)


def test_the_driver_is_believed_only_where_sysfs_does_not_know(tmp_path):
    root = trees.two_sockets(tmp_path)
    trees.put_gpus(root, {"0000:01:00.0": -1})
    chosen = [
        choose_placement("bind", bus_id=f"0000:{bus}:00.0", driver_node=1, root=root)[0].node for bus in ("01", "17")
    ]
    assert [1, 0] == chosen


def test_a_node_that_is_not_online_is_unknown(tmp_path):
    root = trees.two_sockets(tmp_path)
    trees.put_gpus(root, {"0000:01:00.0": 7})
    assert ["numa-unknown-node"] == names(choose_placement("preferred", bus_id="0000:01:00.0", root=root)[1])
    with pytest.raises(BankError, match="got GPU 0000:01:00.0 names node 7; wanted a node to bind to"):
        choose_placement("bind", bus_id="0000:01:00.0", root=root)


@pytest.mark.parametrize(
    ("tree", "bus_id", "node", "expected"),
    [
        (trees.grace, "0009:01:00.0", 0, []),
        (trees.grace, "0019:01:00.0", 1, []),
        (trees.grace, "0029:01:00.0", 1, ["numa-nearest-node"]),
        (trees.grace, "0039:01:00.0", 0, ["numa-nearest-node"]),
        (trees.empty_channel, "0000:81:00.0", 2, ["numa-nearest-node"]),
    ],
)
def test_a_node_without_cpus_or_memory_gives_way_to_the_nearest_that_has_both(tmp_path, tree, bus_id, node, expected):
    placement, notices = choose_placement("bind", bus_id=bus_id, root=tree(tmp_path))
    assert (Placement(policy="bind", node=node), expected) == (placement, names(notices))


def test_without_distances_the_lowest_number_is_nearest(tmp_path):
    for number, cpus in enumerate(("0-3", "4-7", "")):
        trees.put_node(tmp_path, number, cpus=cpus, total_gib=8)
    trees.put_gpus(tmp_path, {"0000:01:00.0": 2, "0000:02:00.0": 1})
    chosen = [choose_placement("bind", bus_id=f"0000:{bus}:00.0", root=tmp_path)[0].node for bus in ("01", "02")]
    assert [0, 1] == chosen


def test_the_only_node_that_can_host_is_chosen_without_asking_for_the_gpus(tmp_path):
    trees.put_node(tmp_path, 0, cpus="0-71", total_gib=480)
    trees.put_node(tmp_path, 1, cpus="", total_gib=96)
    assert (Placement(policy="bind", node=0), []) == choose_placement("bind", bus_id="0009:01:00.0", root=tmp_path)


@pytest.mark.parametrize("policy", ["", "interleave", "Preferred"])
def test_an_unknown_policy_is_refused_with_the_known_ones(tmp_path, policy):
    with pytest.raises(BankError, match="NUMA policy: got '.*'; wanted off, preferred, bind"):
        choose_placement(policy, bus_id="0000:17:00.0", root=trees.two_sockets(tmp_path))


@pytest.mark.parametrize(("policy", "node"), [("off", 0), ("bind", None), ("preferred", None), ("interleave", 0)])
def test_a_placement_has_a_node_if_and_only_if_it_places(policy, node):
    with pytest.raises(BankError, match="wanted preferred or bind with a node, or off without one"):
        Placement(policy=policy, node=node)


def test_pages_of_a_bound_mapping_lie_on_its_node(memory):
    require_calls("set_mempolicy")
    assert [] == bind_pages(memory, 64 * mmap.PAGESIZE, placement=Placement(policy="bind", node=0))
    ctypes.memset(memory, 1, 64 * mmap.PAGESIZE)
    found = page_nodes(memory, 64 * mmap.PAGESIZE)
    if found.unknown_bytes:
        pytest.skip(f"this machine does not tell where pages lie: {found.reason}")
    assert {0: 64 * mmap.PAGESIZE} == found.node_bytes


def test_a_node_that_is_not_there_is_an_error_under_bind_and_a_notice_under_preferred(memory):
    require_calls("set_mempolicy")
    absent = max(node.number for node in read_nodes()) + 7
    with pytest.raises(BankError, match=f"HOTSPLIT_NUMA_POLICY=bind, node {absent}: got mbind: Invalid argument"):
        bind_pages(memory, mmap.PAGESIZE, placement=Placement(policy="bind", node=absent))
    notices = bind_pages(memory, mmap.PAGESIZE, placement=Placement(policy="preferred", node=absent))
    assert ["numa-refused"] == names(notices)
    assert f"memory cannot be placed on NUMA node {absent} (mbind: Invalid argument)" == notices[0].text


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_refuses_gets_the_hint_that_helps(memory, monkeypatch, number):
    refuse(monkeypatch, call="mbind", number=number)
    assert "start it with --cap-add SYS_NICE" in bind_pages(memory, 4096, placement=NODE_0)[0].text
    with pytest.raises(BankError, match="set HOTSPLIT_NUMA_POLICY=preferred or off; in a container, .* SYS_NICE"):
        bind_pages(memory, 4096, placement=Placement(policy="bind", node=0))


def test_without_a_placement_no_call_is_made(memory, monkeypatch):
    monkeypatch.setattr(numa, "system_call", None)
    assert [] == bind_pages(memory, 4096, placement=NO_PLACEMENT)
    with thread_policy(NO_PLACEMENT) as notices:
        assert [] == notices


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_threads_policy_holds_inside_and_is_put_back_after(before):
    require_calls("get_mempolicy", "set_mempolicy")
    mask = (ctypes.c_uint64 * 16)(1)
    system_call("set_mempolicy", before, *((ctypes.addressof(mask), 1025) if before else (0, 0)))
    try:
        with thread_policy(Placement(policy="bind", node=0)) as notices:
            assert ([], (2, 1)) == (notices, mode_of_this_thread())
        assert (before, 1 if before else 0) == mode_of_this_thread()
        with pytest.raises(KeyboardInterrupt), thread_policy(NODE_0):
            raise KeyboardInterrupt
        assert (before, 1 if before else 0) == mode_of_this_thread()
    finally:
        system_call("set_mempolicy", 0, 0, 0)


def test_a_policy_that_cannot_be_asked_for_is_put_back_to_the_default(monkeypatch):
    require_calls("get_mempolicy", "set_mempolicy")
    refuse(monkeypatch, call="get_mempolicy")
    with thread_policy(NODE_0):
        assert (1, 1) == mode_of_this_thread()
    assert (0, 0) == mode_of_this_thread()


def test_a_thread_policy_that_is_refused_is_an_error_under_bind_and_a_notice_under_preferred(monkeypatch):
    refuse(monkeypatch, call="set_mempolicy")
    with thread_policy(NODE_0) as notices:
        assert ["numa-refused"] == names(notices)
    with (
        pytest.raises(BankError, match="got set_mempolicy: Operation not permitted"),
        thread_policy(Placement(policy="bind", node=0)),
    ):
        pass


@pytest.mark.parametrize(("node", "word", "bit"), [(0, 0, 0), (63, 0, 63), (64, 1, 0), (1023, 15, 63)])
def test_a_set_of_nodes_has_the_bit_of_its_node(node, word, bit):
    mask = numa._mask(node)
    assert {word: 1 << bit} == {i: value for i, value in enumerate(mask) if value}


@pytest.mark.parametrize("node", [-1, 1024])
def test_a_node_number_that_no_kernel_has_is_refused(node):
    with pytest.raises(BankError, match=f"NUMA node: got {node}; wanted 0..1023"):
        bind_pages(4096, 4096, placement=Placement(policy="preferred", node=node))


@pytest.mark.parametrize(
    ("cpus", "node", "said"),
    [
        (range(32), 0, []),
        (range(32, 40), 1, []),
        ([0, 1, 32, 33, 34], 1, ["numa-many-nodes"]),
        (range(128), 0, ["numa-many-nodes"]),
    ],
)
@pytest.mark.parametrize("policy", ["preferred", "bind"])
def test_hot_rows_of_a_cpu_go_to_the_node_of_most_of_its_cpus(tmp_path, policy, cpus, node, said):
    placement, notices = choose_cpu_placement(policy, cpus=cpus, root=trees.two_sockets(tmp_path))
    assert Placement(policy=policy, node=node) == placement
    assert said == names(notices)
    if said:
        assert f"nodes 0, 1; its hot rows go to node {node}: run it under numactl" in notices[0].text


def test_hot_rows_never_go_to_nodes_without_cpus_or_without_memory(tmp_path):
    placement, _ = choose_cpu_placement("bind", cpus=range(72, 80), root=trees.grace(tmp_path / "grace"))
    assert 1 == placement.node
    placement, _ = choose_cpu_placement("bind", cpus=[0, *range(16, 32)], root=trees.empty_channel(tmp_path / "empty"))
    assert 0 == placement.node


@pytest.mark.parametrize("policy", ["preferred", "bind"])
def test_one_node_leaves_hot_rows_nothing_to_choose_from(tmp_path, policy):
    placement, notices = choose_cpu_placement(policy, cpus=[0], root=trees.one_node(tmp_path))
    assert (NO_PLACEMENT, ["numa-one-node"]) == (placement, names(notices))


def test_no_nodes_for_hot_rows_is_a_notice_and_an_error_for_bind(tmp_path):
    root = trees.no_nodes(tmp_path)
    assert (NO_PLACEMENT, ["numa-none"]) == (
        choose_cpu_placement("preferred", cpus=[0], root=root)[0],
        names(choose_cpu_placement("preferred", cpus=[0], root=root)[1]),
    )
    with pytest.raises(BankError, match="HOTSPLIT_NUMA_POLICY=bind: got this kernel tells of no NUMA nodes"):
        choose_cpu_placement("bind", cpus=[0], root=root)


def test_cpus_that_no_node_names_are_not_guessed(tmp_path):
    placement, notices = choose_cpu_placement("preferred", cpus=[900], root=trees.two_sockets(tmp_path))
    assert (NO_PLACEMENT, ["numa-none"]) == (placement, names(notices))


def test_off_asks_for_nothing_on_a_cpu(tmp_path):
    assert (NO_PLACEMENT, []) == choose_cpu_placement("off", root=trees.two_sockets(tmp_path))


def test_this_machine_places_hot_rows_or_says_why_not():
    placement, notices = choose_cpu_placement("preferred")
    assert placement.node is not None or notices
