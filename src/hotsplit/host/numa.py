"""Which NUMA node a rank's host memory belongs on, and how pages get there.

Asked once per rank before its cold rows are allocated. A GPU reads host memory of its own socket faster, so cold rows
belong on the node that its PCI slot hangs on:

    choose_placement   policy + the GPU's bus id + /sys  ->  policy and node, or "off" with a notice
    bind_pages         one mapping follows the placement, before its first touch
    thread_policy      whatever this thread, or a driver on its behalf, allocates meanwhile follows it

These are system calls and files: no libnuma, no tool. What cannot be read is unknown, never 0, and a container may
refuse the calls; page_nodes.py has the proof of where pages lie. A node without CPUs (memory of a Grace GPU, CXL) or
without memory never gets cold rows: the nearest node with both does. The policy of the whole process stays as it is.

    >>> str(Placement(policy="bind", node=1)), str(Placement())
    ('bind on NUMA node 1', 'no NUMA placement')

Source: constants as the Linux kernel's headers have them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hotsplit.errors import BankError
from hotsplit.host.libc import system_call
from hotsplit.notices import Notice

NumaPolicy: TypeAlias = Literal["preferred", "bind", "off"]

_ROOT: Final = Path("/")
_MODES: Final[Mapping[NumaPolicy, int]] = {"off": 0, "preferred": 1, "bind": 2}
_LEFT_ALONE: Final = "cold rows lie where the kernel puts them"
_HOT_LEFT_ALONE: Final = "hot rows lie where the kernel puts them"
_MASK_WORDS: Final = 16
_MASK_BITS: Final = 64 * _MASK_WORDS + 1  # the kernel counts one less


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """One NUMA node that is online."""

    number: int
    """As the kernel counts."""
    has_cpus: bool
    """False for memory that hangs on no processor."""
    total_bytes: int | None
    """Its memory; None where it cannot be read."""
    free_bytes: int | None
    """Of it, unused, page cache not counted; None where it cannot be read."""
    distances: tuple[int, ...]
    """To every node that is online, in their order, 10 to itself; empty where it cannot be read."""

    @property
    def can_host(self) -> bool:
        """Whether cold rows may lie there."""
        return self.has_cpus and self.total_bytes != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where pages shall lie.

    Raises:
        BankError: No such policy, or "off" with a node, or another one without.
    """

    policy: NumaPolicy = "off"
    """"preferred" takes other nodes where this one is full, "bind" never does, "off" asks for nothing."""
    node: int | None = None
    """Which; None if and only if it is "off"."""

    def __post_init__(self) -> None:
        if self.policy not in _MODES or (self.policy == "off") != (self.node is None):
            wanted = "preferred or bind with a node, or off without one"
            raise BankError("NUMA placement", got=f"{self.policy} and node {self.node}", wanted=wanted)

    def __str__(self) -> str:
        return "no NUMA placement" if self.node is None else f"{self.policy} on NUMA node {self.node}"


NO_PLACEMENT: Final = Placement()
"""Pages lie where the kernel puts them."""


def read_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes of this machine, in their order; none where the kernel tells of none.

    Args:
        root: Where /sys lies; another one only in tests.
    """
    folder = root / "sys/devices/system/node"
    numbers = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*") if path.name[4:].isdigit())
    return tuple(_read_node(folder / f"node{number}", number=number) for number in numbers)


def gpu_node(bus_id: str, *, root: Path = _ROOT) -> int | None:
    """The node that a GPU hangs on; None where the kernel does not know or has no such device.

    Args:
        bus_id: As /sys or nvidia-smi writes it, "0000:17:00.0" or "00000000:17:00.0".
        root: Where /sys lies; another one only in tests.
    """
    domain, _, slot = bus_id.strip().lower().partition(":")
    with contextlib.suppress(ValueError):
        text = _read(root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{slot}/numa_node")
        number = int(text or "-1")
        return number if number >= 0 else None
    return None


def choose_placement(
    policy: str, *, bus_id: str, driver_node: int | None = None, root: Path = _ROOT
) -> tuple[Placement, list[Notice]]:
    """Where the cold rows of one rank belong.

    Args:
        policy: HOTSPLIT_NUMA_POLICY.
        bus_id: Of the rank's GPU.
        driver_node: Its node by the driver, for where /sys does not know; None or negative where it knows none either.
        root: Where /sys lies; another one only in tests.

    Returns:
        The placement, and what must be said about it.

    Raises:
        BankError: No such policy, or "bind" where no node can be named.
    """
    wanted = _require_policy(policy)
    nodes = read_nodes(root)
    hosts = [node for node in nodes if node.can_host]
    if wanted == "off":
        return NO_PLACEMENT, []
    if not hosts:
        found = "this kernel tells of no NUMA nodes"
        _refuse_bind(wanted, found=found)
        return NO_PLACEMENT, [Notice(name="numa-none", text=f"{found}; {_LEFT_ALONE}", strict=False)]
    if len(hosts) == 1:
        text = f"one NUMA node, so HOTSPLIT_NUMA_POLICY={wanted} has nothing to choose from"
        notices = [Notice(name="numa-one-node", text=text, strict=False)] if len(nodes) == 1 else []
        return Placement(policy=wanted, node=hosts[0].number), notices
    near = gpu_node(bus_id, root=root)
    near = driver_node if near is None and driver_node is not None and driver_node >= 0 else near
    if near not in [node.number for node in nodes]:
        found = f"the NUMA node of GPU {bus_id} is unknown" if near is None else f"GPU {bus_id} names node {near}"
        _refuse_bind(wanted, found=found)
        return NO_PLACEMENT, [Notice(name="numa-unknown-node", text=f"{found}; {_LEFT_ALONE}", strict=False)]
    node = _nearest(hosts, near=near, nodes=nodes)
    text = f"node {near} of GPU {bus_id} has no CPUs or no memory of its own; its cold rows go to node {node}"
    notices = [Notice(name="numa-nearest-node", text=text, strict=False)] if node != near else []
    return Placement(policy=wanted, node=node), notices


def choose_cpu_placement(
    policy: str, *, cpus: Iterable[int] | None = None, root: Path = _ROOT
) -> tuple[Placement, list[Notice]]:
    """Where the hot rows of a rank that computes on CPUs belong: on the node of most of its CPUs.

    Args:
        policy: HOTSPLIT_NUMA_POLICY.
        cpus: That this process may use; None to ask the kernel.
        root: Where /sys lies; another one only in tests.

    Returns:
        The placement, and what must be said about it.

    Raises:
        BankError: No such policy, or "bind" where no node can be named.
    """
    wanted = _require_policy(policy)
    if wanted == "off":
        return NO_PLACEMENT, []
    nodes = read_nodes(root)
    hosts = [node for node in nodes if node.can_host]
    mine = set(os.sched_getaffinity(0) if cpus is None else cpus)
    shares = {node.number: len(mine & _cpus(node.number, root=root)) for node in hosts}
    near = [number for number, share in shares.items() if share]
    if not near:
        found = "this kernel tells of no NUMA node of these CPUs" if hosts else "this kernel tells of no NUMA nodes"
        _refuse_bind(wanted, found=found)
        return NO_PLACEMENT, [Notice(name="numa-none", text=f"{found}; {_HOT_LEFT_ALONE}", strict=False)]
    best = max(near, key=lambda number: (shares[number], -number))
    notices = []
    if len(nodes) == 1:
        text = f"one NUMA node, so HOTSPLIT_NUMA_POLICY={wanted} has nothing to choose from"
        return NO_PLACEMENT, [Notice(name="numa-one-node", text=text, strict=False)]
    if len(near) > 1:
        numbers = ", ".join(map(str, near))
        text = f"this process may run on NUMA nodes {numbers}; its hot rows go to node {best}"
        do = f"run it under numactl --cpunodebind={best} to compute there"
        notices = [Notice(name="numa-many-nodes", text=f"{text}: {do}", strict=False)]
    return Placement(policy=wanted, node=best), notices


def bind_pages(address: int, num_bytes: int, *, placement: Placement) -> list[Notice]:
    """Let the pages of one mapping follow a placement, before any of them is touched.

    Args:
        address: On a page.
        num_bytes: Of it.
        placement: Where.

    Returns:
        A notice where the kernel refuses and the placement is "preferred".

    Raises:
        BankError: It refuses, and the placement is "bind".
    """
    if placement.node is None:
        return []
    mask = _mask(placement.node)
    try:
        system_call("mbind", address, num_bytes, _MODES[placement.policy], ctypes.addressof(mask), _MASK_BITS, 0)
    except OSError as error:
        return _refusal(error, placement=placement)
    return []


@contextlib.contextmanager
def thread_policy(placement: Placement) -> Iterator[list[Notice]]:
    """What this thread touches first inside of the block follows a placement; so does a driver's own memory.

    The policy before is put back afterwards; where the kernel does not tell it, the default.

    Args:
        placement: Where.

    Yields:
        A notice where the kernel refuses and the placement is "preferred".

    Raises:
        BankError: It refuses, and the placement is "bind".
    """
    if placement.node is None:
        yield []
        return
    before = _thread_policy()
    try:
        _set_thread_policy(_MODES[placement.policy], _mask(placement.node))
    except OSError as error:
        yield _refusal(error, placement=placement)
        return
    try:
        yield []
    finally:
        _set_thread_policy(*before)


def container_hint(error: OSError) -> str:
    """What helps where a container, and not the kernel, refuses a call about NUMA; empty where it is no such refusal.

    Args:
        error: Of the call.
    """
    refused = error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS)
    return "; in a container, start it with --cap-add SYS_NICE" if refused else ""


def _require_policy(policy: str) -> NumaPolicy:
    for known in _MODES:
        if policy == known:
            return known
    raise BankError("NUMA policy", got=repr(policy), wanted=", ".join(_MODES))


def _refuse_bind(policy: NumaPolicy, *, found: str) -> None:
    if policy == "bind":
        do = "set HOTSPLIT_NUMA_POLICY=preferred or off"
        raise BankError("HOTSPLIT_NUMA_POLICY=bind", got=found, wanted="a node to bind to", do=do)


def _nearest(hosts: list[NumaNode], *, near: int, nodes: tuple[NumaNode, ...]) -> int:
    """The host node with the least distance to a node, itself before others, then by number."""
    order = [node.number for node in nodes]
    distances = nodes[order.index(near)].distances
    known = dict(zip(order, distances, strict=True)) if len(distances) == len(order) else {}
    return min((node.number != near, known.get(node.number, 255), node.number) for node in hosts)[2]


def _cpus(node: int, *, root: Path) -> set[int]:
    """The CPUs of a node, from a list as the kernel writes it: "0-31,64"."""
    found: set[int] = set()
    for piece in (_read(root / f"sys/devices/system/node/node{node}/cpulist") or "").strip().split(","):
        first, _, last = piece.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read_node(folder: Path, *, number: int) -> NumaNode:
    fields = re.findall(r"^Node \d+ (\w+): +(\d+) kB$", _read(folder / "meminfo") or "", re.MULTILINE)
    figures = {name: int(kilobytes) * 1024 for name, kilobytes in fields}
    return NumaNode(
        number=number,
        has_cpus=bool((_read(folder / "cpulist") or "").strip()),
        total_bytes=figures.get("MemTotal"),
        free_bytes=figures.get("MemFree"),
        distances=tuple(int(one) for one in (_read(folder / "distance") or "").split() if one.isdigit()),
    )


def _refusal(error: OSError, *, placement: Placement) -> list[Notice]:
    hint = container_hint(error)
    if placement.policy == "bind":
        raise BankError(
            f"HOTSPLIT_NUMA_POLICY=bind, node {placement.node}",
            got=f"{error.filename}: {error.strerror}",
            do=f"set HOTSPLIT_NUMA_POLICY=preferred or off{hint}",
        ) from error
    text = f"memory cannot be placed on NUMA node {placement.node} ({error.filename}: {error.strerror}{hint})"
    return [Notice(name="numa-refused", text=text, strict=False)]


def _mask(node: int) -> ctypes.Array[ctypes.c_uint64]:
    """A set of nodes with one in it."""
    if not 0 <= node < 64 * _MASK_WORDS:
        raise BankError("NUMA node", got=str(node), wanted=f"0..{64 * _MASK_WORDS - 1}")
    mask = (ctypes.c_uint64 * _MASK_WORDS)()
    mask[node // 64] = 1 << (node % 64)
    return mask


def _thread_policy() -> tuple[int, ctypes.Array[ctypes.c_uint64] | None]:
    """Mode and nodes of this thread's policy; the default where the kernel does not tell."""
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * _MASK_WORDS)()
    try:
        system_call("get_mempolicy", ctypes.addressof(mode), ctypes.addressof(mask), _MASK_BITS, 0, 0)
    except OSError:
        return _MODES["off"], None
    return mode.value, mask if any(mask) else None


def _set_thread_policy(mode: int, mask: ctypes.Array[ctypes.c_uint64] | None) -> None:
    address, bits = (0, 0) if mask is None else (ctypes.addressof(mask), _MASK_BITS)
    system_call("set_mempolicy", mode, address, bits)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
