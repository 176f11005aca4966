"""Where pages really lie: the kernel's word on every page, by NUMA node, and held against where they should lie.

Asked after host memory has been filled, since a placement (numa.py) is a wish: "preferred" spills in silence where a
node is full. What the kernel does not tell, and what a container keeps it from telling, is unknown, never 0.

    >>> found = PageNodes(node_bytes={0: 3 * 2**30, 1: 2**30})
    >>> found.share(0), found.describe(0)
    (0.75, 'node 0: 3.000 GiB, node 1: 1.000 GiB (75.0 % on node 0)')
    >>> check_placement(found, placement=Placement(policy="preferred", node=0))[0].text
    'host pages: 1.000 GiB of 4.000 GiB lie elsewhere than on node 0, and are read more slowly'
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hotsplit.errors import BankError
from hotsplit.host.libc import system_call
from hotsplit.host.numa import Placement, container_hint
from hotsplit.notices import Notice
from hotsplit.units import gib

_PAGES_PER_CALL: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PageNodes:
    """Where the pages of some memory lie, as the kernel tells it."""

    node_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes by node."""
    absent_bytes: int = 0
    """Bytes that were never touched and lie nowhere."""
    unknown_bytes: int = 0
    """Bytes that the kernel does not tell of."""
    reason: str = ""
    """Why it does not."""

    def share(self, node: int) -> float | None:
        """Bytes on a node / bytes of which the node is known, a ratio; None where it is known of none.

        Args:
            node: Which.
        """
        known = sum(self.node_bytes.values())
        return self.node_bytes.get(node, 0) / known if known else None

    def describe(self, node: int | None = None) -> str:
        """One line, by node as numastat tells it.

        Args:
            node: Where the pages should lie; None where nothing was asked for.
        """
        parts = [f"node {number}: {gib(num_bytes)}" for number, num_bytes in sorted(self.node_bytes.items())]
        parts += [f"not touched yet: {gib(self.absent_bytes)}"] if self.absent_bytes else []
        parts += [f"unknown: {gib(self.unknown_bytes)}{self.reason and f' ({self.reason})'}"] * bool(self.unknown_bytes)
        share = None if node is None else self.share(node)
        return (", ".join(parts) or "nothing") + ("" if share is None else f" ({100 * share:.1f} % on node {node})")


def page_nodes(address: int, num_bytes: int, *, step_bytes: int = mmap.PAGESIZE) -> PageNodes:
    """Ask the kernel where pages lie.

    Args:
        address: On a page.
        num_bytes: Of the memory.
        step_bytes: Ask for one page in so many bytes; what is told of it counts for all of them.

    Returns:
        The nodes; all unknown, with the reason, where the kernel refuses.
    """
    node_bytes: dict[int, int] = {}
    absent = unknown = 0
    for start in range(0, num_bytes, step_bytes * _PAGES_PER_CALL):
        offsets = np.arange(start, min(num_bytes, start + step_bytes * _PAGES_PER_CALL), step_bytes, dtype=np.int64)
        try:
            status = _query((address + offsets).astype(np.uint64))
        except OSError as error:
            reason = f"move_pages: {error.strerror}{container_hint(error)}"
            return PageNodes(unknown_bytes=num_bytes, reason=reason)
        sizes = np.minimum(step_bytes, num_bytes - offsets)
        for value in np.unique(status).tolist():
            found = int(sizes[status == value].sum())
            if value >= 0:
                node_bytes[value] = node_bytes.get(value, 0) + found
            elif value == -errno.ENOENT:
                absent += found
            else:
                unknown += found
    reason = "move_pages tells nothing of these pages" if unknown else ""
    return PageNodes(node_bytes=node_bytes, absent_bytes=absent, unknown_bytes=unknown, reason=reason)


def total_nodes(found: Iterable[PageNodes]) -> PageNodes:
    """Several memories taken as one.

    Args:
        found: Of each.
    """
    parts = tuple(found)
    numbers = sorted({number for one in parts for number in one.node_bytes})
    return PageNodes(
        node_bytes={number: sum(one.node_bytes.get(number, 0) for one in parts) for number in numbers},
        absent_bytes=sum(one.absent_bytes for one in parts),
        unknown_bytes=sum(one.unknown_bytes for one in parts),
        reason=next((one.reason for one in parts if one.reason), ""),
    )


def check_placement(found: PageNodes, *, placement: Placement, what: str = "host pages") -> list[Notice]:
    """Hold where pages lie against where they should.

    Args:
        found: Where they lie.
        placement: Where they should.
        what: Whose pages, for the message.

    Returns:
        A notice where some lie elsewhere, or where it is not known of any.

    Raises:
        BankError: Some lie elsewhere, and the placement is "bind".
    """
    if placement.node is None:
        return []
    known = sum(found.node_bytes.values())
    elsewhere = known - found.node_bytes.get(placement.node, 0)
    if elsewhere and placement.policy == "bind":
        raise BankError(
            f"{what}: HOTSPLIT_NUMA_POLICY=bind",
            got=found.describe(placement.node),
            wanted=f"all of it on node {placement.node}",
            do="free memory of that node, or set HOTSPLIT_NUMA_POLICY=preferred",
            elsewhere_bytes=elsewhere,
        )
    if elsewhere:
        where = f"{gib(elsewhere)} of {gib(known)} lie elsewhere than on node {placement.node}"
        return [Notice(name="numa-elsewhere", text=f"{what}: {where}, and are read more slowly", strict=False)]
    if found.unknown_bytes and not known:
        text = f"{what}: where they lie is unknown ({found.reason})"
        return [Notice(name="numa-unknown", text=text, strict=False)]
    return []


def _query(addresses: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Node of the page at each address, or the negative errno of why it has none."""
    status = np.full(addresses.size, -errno.EIO, dtype=np.int32)
    system_call("move_pages", 0, addresses.size, addresses.ctypes.data, 0, status.ctypes.data, 0)
    return status
