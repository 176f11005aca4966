r"""How often memory was taken from another node than was asked for, per NUMA node since the host started.

Many misses on the node of a GPU tell that it was full when it counted: cold rows of other programs lie elsewhere. The
kernel's own files are asked first and the tool `numastat` where /sys is hidden; both have the same six figures.

    >>> read_table("             node0    node1\nnuma_hit    100    7\nnuma_miss   0   3\n").value[1]["numa_miss"]
    3

Source: names as the Linux kernel documents them (admin-guide/numastat).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from hotsplit.host.asking import ROOT, Fact, Tool, fact, read_text, run_tool, shortened, unknown, whole_number
from hotsplit.host.numa import read_nodes

Stats: TypeAlias = Mapping[int, Mapping[str, int]]
"""By node and name: pages."""

_NAMES: Final = ("numa_hit", "numa_miss", "numa_foreign", "interleave_hit", "local_node", "other_node")


def read_numastat(root: Path = ROOT, *, tool: Tool = run_tool) -> Fact[Stats]:
    """Ask the kernel, then the tool.

    Args:
        root: Where /sys lies; another one only in tests.
        tool: Runs numastat.
    """
    folder = root / "sys/devices/system/node"
    found = {node.number: _figures(folder / f"node{node.number}/numastat") for node in read_nodes(root)}
    told = {number: figures for number, figures in found.items() if figures}
    if told:
        return fact(told, source=str(folder), reason="")
    output = tool(("numastat",))
    if output.value is None:
        return unknown(f"{folder} has no numastat, and {output.reason}")
    return read_table(output.value)


def read_table(text: str) -> Fact[Stats]:
    """What `numastat` printed.

    Args:
        text: Its output: a line of nodes, then a line per figure.
    """
    lines = [line.split() for line in text.splitlines()]
    nodes: list[int] = []
    stats: dict[int, dict[str, int]] = {}
    for cells in lines:
        numbers = [re.fullmatch(r"node([0-9]{1,4})", cell) for cell in cells]
        if cells and all(numbers):
            nodes = [int(found[1]) for found in numbers if found]
        elif nodes and len(cells) == 1 + len(nodes) and cells[0] in _NAMES:
            values = [whole_number(cell) for cell in cells[1:]]
            for node, value in zip(nodes, values, strict=True):
                if value is not None:
                    stats.setdefault(node, {})[cells[0]] = value
    return fact(stats or None, source="numastat", reason=f"numastat gave no table: {shortened(text)}")


def _figures(path: Path) -> dict[str, int]:
    """The six figures of one node, as far as they are told."""
    pairs = [line.split() for line in (read_text(path).value or "").splitlines()]
    values = {pair[0]: whole_number(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in _NAMES}
    return {name: value for name, value in values.items() if value is not None}
