"""NUMA nodes, the GPUs on them, how GPUs reach each other, and where each GPU's cold rows belong.

Gathers what numa.py, numastat.py, gpus.py and smi.py know into one picture. A node's memory is told as the kernel has it
and, beside it, clamped to the host budget: a container's limit counts for all nodes together, and a node never has more.

    >>> clamped(256 * 2**30, budget_bytes=70 * 2**30) // 2**30, clamped(None, budget_bytes=1)
    (70, None)
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.errors import BankError
from hotsplit.host.asking import ROOT, Fact, Tool, first_known, known, run_tool, unknown
from hotsplit.host.gpu_facts import GpuFacts
from hotsplit.host.libc import READ_WRITE, checked
from hotsplit.host.links import relation
from hotsplit.host.numa import NumaNode, Placement, bind_pages, choose_placement, read_nodes
from hotsplit.host.numastat import Stats, read_numastat
from hotsplit.host.smi import Matrix, read_topology
from hotsplit.notices import Notice

_BUS: Final = "places on the PCI bus"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Who is near to whom."""

    nodes: tuple[NumaNode, ...]
    """NUMA nodes; none where the kernel tells of none."""
    stats: Fact[Stats]
    """Pages that came from another node than was asked for."""
    relations: Mapping[tuple[int, int], Fact[str]]
    """How GPUs reach each other, by two of their numbers, the lower one first."""
    cold_nodes: Mapping[int, Fact[int]]
    """By GPU: the node that its cold rows would lie on."""
    can_place: Fact[str]
    """Whether the kernel lets this process place memory: "yes", or unknown with the refusal."""
    notices: tuple[Notice, ...] = ()
    """What must be said about it."""


def read_topology_of(
    gpus: Sequence[GpuFacts], *, root: Path = ROOT, tool: Tool = run_tool, can_place: Fact[str] | None = None
) -> Topology:
    """Put the picture together.

    Args:
        gpus: Of this host.
        root: Where /sys lies; another one only in tests.
        tool: Runs nvidia-smi and numastat.
        can_place: Whether memory can be placed; None to try it.
    """
    nodes = read_nodes(root)
    # A tool that did not answer for a GPU may hang: it is not waited for a second time.
    others = sum(gpu.is_told for gpu in gpus) > 1
    matrix: Fact[Matrix] = read_topology(tool) if others else unknown("the driver tells of no other GPU")
    cold: dict[int, Fact[int]] = {}
    notices: list[Notice] = []
    for gpu in gpus:
        placement, said = choose_placement("preferred", bus_id=gpu.bus_id, driver_node=gpu.numa_node.value, root=root)
        notices += said
        reason = said[0].text if said else "no node can be named"
        cold[gpu.index] = unknown(reason) if placement.node is None else known(placement.node, f"GPU {gpu.bus_id}")
    return Topology(
        nodes=nodes,
        stats=read_numastat(root, tool=tool),
        relations={
            (one.index, other.index): _relation(one, other, matrix=matrix)
            for one in gpus
            for other in gpus
            if one.index < other.index
        },
        cold_nodes=cold,
        can_place=can_place or try_placement(nodes),
        notices=tuple(notices),
    )


def clamped(num_bytes: int | None, *, budget_bytes: int | None) -> int | None:
    """A node's memory, or the host budget where that is less.

    Args:
        num_bytes: Of the node; None is unknown and stays so.
        budget_bytes: None is unknown and clamps nothing.
    """
    known_ones = [value for value in (num_bytes, budget_bytes) if value is not None]
    return None if num_bytes is None else min(known_ones)


def try_placement(nodes: Sequence[NumaNode]) -> Fact[str]:
    """Place one page on a node, and give it back: a container may refuse it whatever its capabilities say.

    Args:
        nodes: Of this host.
    """
    hosts = [node.number for node in nodes if node.can_host]
    if not hosts:
        return unknown("the kernel tells of no NUMA nodes")
    try:
        address = checked("mmap", 0, mmap.PAGESIZE, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    except OSError as error:
        return unknown(f"mmap: {error.strerror}")
    try:
        said = bind_pages(address, mmap.PAGESIZE, placement=Placement(policy="preferred", node=hosts[0]))
    except BankError as error:  # a node beyond what a policy can name
        return unknown(str(error))
    finally:
        checked("munmap", address, mmap.PAGESIZE)
    return unknown(said[0].text) if said else known("yes", "mbind of one page")


def _relation(one: GpuFacts, other: GpuFacts, *, matrix: Fact[Matrix]) -> Fact[str]:
    """By the driver, which knows NVLink; else by their places on the bus."""
    told = (matrix.value or {}).get((one.index, other.index))
    by_driver: Fact[str] = unknown(matrix.reason or "nvidia-smi topo -m does not tell it")
    if told is not None:
        by_driver = known(told, matrix.source)
    on_bus = relation(one.path, other.path, nodes=(one.numa_node.value, other.numa_node.value))
    return first_known(by_driver, unknown("") if on_bus is None else known(on_bus, _BUS))
