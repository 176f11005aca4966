"""Machines as /sys tells of them, for tests about NUMA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB = 2**30


def put_node(
    root: Path, number: int, *, cpus: str, total_gib: float | None, free_gib: float = 1, distances: str = ""
) -> None:
    """One NUMA node; no meminfo where `total_gib` is None."""
    folder = root / f"sys/devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    if total_gib is not None:
        lines = {"MemTotal": total_gib, "MemFree": free_gib, "MemUsed": total_gib - free_gib}
        text = "".join(f"Node {number} {name}: {int(size * 2**20):>13} kB\n" for name, size in lines.items())
        (folder / "meminfo").write_text(f"{text}Node {number} HugePages_Total:     0\n")
    if distances:
        (folder / "distance").write_text(f"{distances}\n")


def put_gpus(root: Path, nodes: Mapping[str, object]) -> None:
    """GPUs by bus id, each with what its numa_node says; None leaves the file out."""
    for bus_id, node in nodes.items():
        folder = root / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        if node is not None:
            (folder / "numa_node").write_text(f"{node}\n")


def two_sockets(root: Path) -> Path:
    """Eight GPUs on two sockets, as a usual server has them."""
    put_node(root, 0, cpus="0-31,64-95", total_gib=256, free_gib=200, distances="10 21")
    put_node(root, 1, cpus="32-63,96-127", total_gib=256, free_gib=100, distances="21 10")
    put_gpus(
        root, {f"0000:{bus:02x}:00.0": int(bus >= 0x80) for bus in (0x17, 0x3D, 0x60, 0x70, 0x98, 0xBB, 0xDA, 0xEF)}
    )
    return root


def one_node(root: Path) -> Path:
    """A virtual machine: one node, and a GPU that names none."""
    put_node(root, 0, cpus="0-15", total_gib=128, distances="10")
    put_gpus(root, {"0000:00:05.0": -1})
    return root


def no_nodes(root: Path) -> Path:
    """A kernel without NUMA, or a container that hides /sys/devices."""
    put_gpus(root, {"0000:00:05.0": -1})
    return root


def grace(root: Path) -> Path:
    """Two superchips: the GPUs' own memory are nodes without CPUs, and reserved nodes without memory follow."""
    put_node(root, 0, cpus="0-71", total_gib=480, distances="10 40 80 120 80")
    put_node(root, 1, cpus="72-143", total_gib=480, distances="40 10 120 80 80")
    put_node(root, 2, cpus="", total_gib=96, distances="80 120 10 160 10")
    put_node(root, 10, cpus="", total_gib=96, distances="120 80 160 10 10")
    put_node(root, 11, cpus="", total_gib=0, distances="80 80 10 10 10")
    put_gpus(root, {"0009:01:00.0": 0, "0019:01:00.0": 1, "0029:01:00.0": 10, "0039:01:00.0": 2})
    return root


def empty_channel(root: Path) -> Path:
    """A socket whose memory slots are empty, with a GPU on it."""
    put_node(root, 0, cpus="0-15", total_gib=128, distances="10 20 30")
    put_node(root, 1, cpus="16-31", total_gib=0, distances="20 10 12")
    put_node(root, 2, cpus="32-47", total_gib=128, distances="30 12 10")
    put_gpus(root, {"0000:81:00.0": 1})
    return root
