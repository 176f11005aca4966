from __future__ import annotations

import pytest

from host.host_trees import put, put_gpu
from hotsplit.host.links import link_bytes_per_s, path_to_root, read_link, relation, slowest_above

GPU = "0000:17:00.0"


@pytest.mark.parametrize(
    ("speed", "width", "found"),
    [
        ("32.0 GT/s PCIe", 16, (5, 16)),
        ("16.0 GT/s PCIe", 8, (4, 8)),
        ("2.5 GT/s PCIe", 1, (1, 1)),
        ("8 GT/s", 4, (3, 4)),
        ("Unknown", 0, (None, None)),
        ("Unknown", 63, (None, None)),
        ("", "", (None, None)),
        ("7.0 GT/s PCIe", -1, (None, None)),
        ("1e999 GT/s", "16x", (None, None)),
    ],
)
def test_a_link_is_read_or_unknown_with_what_was_there(tmp_path, speed, width, found):
    put_gpu(tmp_path, ("pci0000:16", "0000:16:01.0", GPU), link=(speed, width))
    link = read_link(GPU, root=tmp_path)
    assert found == (link.generation.value, link.width.value)
    for answer in (link.generation, link.width):
        assert bool(answer.reason) == (answer.value is None)


def test_a_device_that_is_not_there_has_an_unknown_link(tmp_path):
    link = read_link(GPU, root=tmp_path)
    assert None is link.generation.value
    assert "no such file" in link.generation.reason
    assert None is link.bytes_per_s
    assert None is link.most_bytes_per_s
    assert not link.is_narrowed


@pytest.mark.parametrize(("generation", "gbps"), [(1, 4.0), (3, 15.754), (4, 31.508), (5, 63.015), (6, 121.0)])
def test_what_sixteen_lanes_carry(generation, gbps):
    assert gbps == pytest.approx(link_bytes_per_s(generation, 16) / 1e9, abs=1e-3)


def test_fewer_lanes_than_there_are_is_no_idle_link(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", GPU), link=("2.5 GT/s PCIe", 8))
    link = read_link(GPU, root=tmp_path)
    assert link.is_narrowed
    assert link_bytes_per_s(5, 8) == link.most_bytes_per_s


def test_the_way_to_the_processor_is_every_bridge(tmp_path):
    way = ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0", "0000:19:00.0")
    put_gpu(tmp_path, way)
    assert way[:-1] == path_to_root(way[-1], root=tmp_path).value


def test_a_device_without_a_place_has_an_unknown_way(tmp_path):
    found = path_to_root(GPU, root=tmp_path)
    assert None is found.value
    assert GPU in found.reason


def test_the_slowest_bridge_counts_by_its_lanes_and_not_by_idling(tmp_path):
    way = ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0")
    put_gpu(tmp_path, way, bridges={"0000:16:01.0": ("32.0 GT/s PCIe", 4), "0000:17:00.0": ("16.0 GT/s PCIe", 16)})
    bridge, link = slowest_above(way[:-1], root=tmp_path)
    assert "0000:16:01.0" == bridge
    assert link_bytes_per_s(5, 4) == link.most_bytes_per_s
    put(tmp_path, {"sys/bus/pci/devices/0000:16:01.0/current_link_speed": "2.5 GT/s PCIe"})
    assert bridge == slowest_above(way[:-1], root=tmp_path)[0]


def test_bridges_that_tell_nothing_slow_nobody(tmp_path):
    assert None is slowest_above(("pci0000:16", "0000:16:01.0"), root=tmp_path)


ROOT_A = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
OTHER_PORT = ("pci0000:00", "0000:00:02.0", "0000:05:00.0", "0000:06:00.0")


@pytest.mark.parametrize(
    ("one", "other", "nodes", "word"),
    [
        ((*ROOT_A, "0000:02:00.0"), (*ROOT_A, "0000:02:01.0"), (0, 0), "PIX"),
        ((*ROOT_A, "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"), (*ROOT_A, "0000:02:01.0"), (0, 0), "PXB"),
        ((*ROOT_A, "0000:02:00.0"), OTHER_PORT, (0, 0), "PHB"),
        (ROOT_A, ("pci0000:80", "0000:80:01.0"), (1, 1), "NODE"),
        (ROOT_A, ("pci0000:80", "0000:80:01.0"), (0, 1), "SYS"),
        (ROOT_A, ("pci0000:80", "0000:80:01.0"), (None, 1), None),
        ((), ROOT_A, (0, 0), None),
    ],
)
def test_how_two_devices_reach_each_other(one, other, nodes, word):
    assert word == relation(one, other, nodes=nodes)
    assert word == relation(other, one, nodes=nodes[::-1])
