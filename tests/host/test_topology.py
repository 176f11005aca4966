from __future__ import annotations

import mmap
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host import numa_trees as trees
from host.host_trees import FakeNvml, fixture, nvml_gpu, put, put_gpu, tools
from hotsplit.host import topology
from hotsplit.host.asking import known, run_tool, unknown
from hotsplit.host.gpus import read_gpus
from hotsplit.host.numastat import read_numastat, read_table
from hotsplit.host.topology import read_topology_of, try_placement

YES = known("yes", "test")


def of(root, *bus_ids, matrix=None):
    outputs = {} if matrix is None else {"m": matrix}
    gpus = read_gpus(root=root, tool=tools(), nvml=FakeNvml(*(nvml_gpu(f"0000{bus_id}") for bus_id in bus_ids))).gpus
    return read_topology_of(gpus, root=root, tool=tools(**outputs), can_place=YES)


def test_cold_rows_of_every_gpu_go_to_its_own_node(tmp_path):
    found = of(trees.two_sockets(tmp_path), "0000:17:00.0", "0000:98:00.0")
    assert {0: 0, 1: 1} == {index: node.value for index, node in found.cold_nodes.items()}


def test_a_virtual_machine_of_one_node_has_nothing_to_choose(tmp_path):
    found = of(trees.one_node(tmp_path), "0000:00:05.0")
    assert 0 == found.cold_nodes[0].value
    assert ["numa-one-node"] == [notice.name for notice in found.notices]


def test_a_gpu_whose_node_is_minus_one_on_two_sockets_is_unknown(tmp_path):
    trees.two_sockets(tmp_path)
    trees.put_gpus(tmp_path, {"0000:05:00.0": -1})
    found = of(tmp_path, "0000:05:00.0")
    assert None is found.cold_nodes[0].value
    assert "the NUMA node of GPU 0000:05:00.0 is unknown" in found.cold_nodes[0].reason
    assert ["numa-unknown-node"] == [notice.name for notice in found.notices]


def test_a_node_without_cpus_never_gets_cold_rows(tmp_path):
    found = of(trees.grace(tmp_path), "0029:01:00.0")
    assert 1 == found.cold_nodes[0].value
    assert [False, False, False] == [node.has_cpus for node in found.nodes if node.number > 1]
    assert ["numa-nearest-node"] == [notice.name for notice in found.notices]


def test_a_kernel_without_nodes_tells_of_none(tmp_path):
    found = of(trees.no_nodes(tmp_path), "0000:00:05.0")
    assert () == found.nodes
    assert None is found.stats.value
    assert "numastat is not installed" in found.stats.reason
    assert None is try_placement(found.nodes).value


def test_the_driver_tells_of_nvlink_and_the_bus_stands_in(tmp_path):
    switch = ("pci0000:16", "0000:16:01.0", "0000:17:00.0")
    put_gpu(tmp_path, (*switch, "0000:18:00.0", "0000:19:00.0"))
    put_gpu(tmp_path, (*switch, "0000:18:01.0", "0000:1a:00.0"))
    gpus = ("0000:19:00.0", "0000:1a:00.0")
    assert "NV18" == of(tmp_path, *gpus, matrix=fixture("smi_topology.txt")).relations[0, 1].value
    on_bus = of(tmp_path, *gpus).relations[0, 1]
    assert ("PIX", "places on the PCI bus") == (on_bus.value, on_bus.source)


def test_a_relation_that_nobody_tells_is_unknown(tmp_path):
    found = of(trees.two_sockets(tmp_path), "0000:17:00.0", "0000:98:00.0").relations[0, 1]
    assert None is found.value
    assert "nvidia-smi is not installed" == found.reason


def test_misses_of_every_node_are_read_from_the_kernel(tmp_path):
    trees.two_sockets(tmp_path)
    put(tmp_path, {"sys/devices/system/node/node1/numastat": "numa_hit 7\nnuma_miss 3\nother nonsense\nnuma_foreign x"})
    assert {1: {"numa_hit": 7, "numa_miss": 3}} == read_numastat(tmp_path, tool=tools()).value


def test_the_tool_is_asked_where_the_kernels_files_are_hidden(tmp_path):
    found = read_numastat(tmp_path, tool=tools(numastat=fixture("numastat.txt")))
    assert (124, 90112233) == (found.value[0]["numa_miss"], found.value[1]["numa_miss"])
    assert 6 == len(found.value[1])


@given(st.text(max_size=200))
def test_garbage_of_numastat_is_unknown(text):
    for one in (read_table(text), read_table(f"node0 node1\nnuma_hit {text} 3\n")):
        assert (one.value is None) == bool(one.reason)


@given(st.data())
def test_a_damaged_table_of_numastat_is_never_an_error(data):
    text = fixture("numastat.txt")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    found = read_table(text[:start] + data.draw(st.text(max_size=10)) + text[end:])
    assert (found.value is None) == bool(found.reason)


def test_placing_a_page_is_tried_and_a_refusal_is_the_reason(tmp_path, monkeypatch):
    nodes = of(trees.one_node(tmp_path), "0000:00:05.0").nodes
    freed = []

    def refuse(address, num_bytes, *, placement):
        assert mmap.PAGESIZE == num_bytes
        freed.append(address)
        return [topology.Notice(name="numa-refused", text="mbind: Operation not permitted", strict=False)]

    monkeypatch.setattr(topology, "bind_pages", refuse)
    assert "unknown (mbind: Operation not permitted)" == str(try_placement(nodes))
    assert 1 == len(freed)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("no-such-tool-anywhere",), "no-such-tool-anywhere is not installed"),
        ((sys.executable, "-c", "import sys; sys.exit('went wrong')"), "ended with 1: 'went wrong'"),
    ],
)
def test_a_tool_that_is_missing_or_fails_is_a_reason(command, reason):
    found = run_tool(command)
    assert None is found.value
    assert reason in found.reason


def test_a_tool_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("hotsplit.host.asking.TOOL_TIMEOUT_S", 0.2)
    assert "gave no answer in 0.2 s" in run_tool((sys.executable, "-c", "import time; time.sleep(600)")).reason


def test_what_a_tool_prints_is_text_whatever_its_bytes():
    found = run_tool((sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'a\\xff')"))
    assert "a\ufffd" == found.value
    assert None is unknown("x").value
