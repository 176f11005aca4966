"""Where cold rows lie on this machine: tried, measured and decided once at start, with the reason.

Stands between the driver and the ranges. Data sheets say which host memory can lie behind a GPU's addresses; this
allocates some, writes to it, reads it back, asks the kernel where the pages are, and times the device's reads against
plain pinned memory. What fails, or reads too slowly, gives way to the next:

    host_numa   one address range, host memory of the rank's NUMA node
    host        one address range, host memory of no node in particular: the first choice where nothing is to be placed
                (HOTSPLIT_NUMA_POLICY=off), and none under "bind", which it cannot keep
    two_banks   pinned memory in a tensor of its own, and two kernel calls: for kernels that take an expert map

    >>> from hotsplit.bank.fake_driver import FakeDriver, FakeMachine
    >>> from hotsplit.bank.tensor_at import cpu_tensor
    >>> driver = FakeDriver(FakeMachine(unsupported=frozenset({"host_numa"})))
    >>> probe = Probe(read_rate=lambda tensor: 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor)
    >>> found = choose_backing(driver, probe=probe, placement=Placement(policy="preferred", node=0))
    >>> found.backing, found.page_bytes, found.ratio
    ('host', 2097152, 1.0)
    >>> print(found.reason)
    host_numa was turned down: HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from hotsplit.bank.cuda_ranges import CudaRange, cuda_memory
from hotsplit.bank.driver import Driver, Location
from hotsplit.bank.tensor_at import DeviceTensors, TensorAt
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.host.page_nodes import PageNodes, check_placement, page_nodes
from hotsplit.host.pages import HostPages
from hotsplit.notices import Notice
from hotsplit.units import MIB, gib

Backing: TypeAlias = Literal["host_numa", "host", "two_banks"]
ReadRate: TypeAlias = Callable[[torch.Tensor], float]

LEAST_RATIO: Final = 0.7
"""Stitched host memory that is read at less than this part of pinned memory's rate is turned down."""
TRIAL_BYTES: Final = 512 * MIB
"""Cold bytes of a trial: far more than any GPU caches."""
_COLD_ROWS: Final = 8

_NEEDED: Final = {
    "host_numa": ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    "host": ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    "two_banks": ("HOST_REGISTER_SUPPORTED",),
}
"""By backing: figures of the device that must not be 0. One that is unknown decides nothing: the trial does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How to try memory out."""

    read_rate: ReadRate
    """Tells the bytes per second at which the device reads a uint8 tensor; all its work is done when it returns."""
    tensor_at: TensorAt | None = None
    """Makes the tensors; None for tensors of the driver's device."""
    trial_bytes: int = TRIAL_BYTES
    """Cold bytes of a trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What became of one backing."""

    backing: Backing
    """Which."""
    location: Location | None = None
    """Host memory of its stitched ranges; None for two banks."""
    page_bytes: int | None = None
    """Pages of its stitched ranges; None for two banks, or where it did not come to that."""
    read_bytes_per_s: float | None = None
    """Rate at which the device read it; None where it did not come to that."""
    pages: PageNodes | None = None
    """NUMA nodes of its host pages; None where it did not come to that."""
    notices: tuple[Notice, ...] = ()
    """What must be said where it is chosen."""
    refusal: str = ""
    """Why it was turned down; empty where it was not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackingChoice:
    """Where cold rows lie, and why there. As a string: one line for the log."""

    chosen: Attempt
    """What cold rows lie in."""
    pinned: Attempt
    """Plain pinned memory, which the others were measured against."""
    refused: tuple[Attempt, ...] = ()
    """What was turned down before, in order."""

    @property
    def backing(self) -> Backing:
        """What was chosen."""
        return self.chosen.backing

    @property
    def location(self) -> Location | None:
        """Host memory of the stitched ranges; None for two banks."""
        return self.chosen.location

    @property
    def page_bytes(self) -> int | None:
        """Pages of the stitched ranges, in bytes; None for two banks."""
        return self.chosen.page_bytes

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What must be said about the choice."""
        return self.chosen.notices

    @property
    def ratio(self) -> float | None:
        """Rate of the chosen memory / rate of pinned memory; None where no pinned memory could be had."""
        return _ratio(self.chosen, pinned=self.pinned)

    @property
    def reason(self) -> str:
        """What was turned down, and why; empty where the first choice was taken."""
        return "; ".join(f"{one.backing} was turned down: {one.refusal}" for one in self.refused)

    def __str__(self) -> str:
        rate = f"read at {(self.chosen.read_bytes_per_s or 0) / 1e9:.1f} GB/s"
        because = f"; {self.reason}" if self.reason else ""
        if self.location is None:
            return f"cold rows in pinned memory of their own, two kernel calls a layer, {rate}{because}"
        compared = f"no pinned memory to compare with ({self.pinned.refusal})"
        if self.ratio is not None:
            compared = f"{self.ratio:.2f} of the rate of pinned memory"
        pages = f"pages of {gib(self.page_bytes or 0)}"
        return f"cold rows at {self.location} in one range with the hot ones, {pages}, {rate}, {compared}{because}"


def choose_backing(driver: Driver, *, probe: Probe, placement: Placement = NO_PLACEMENT) -> BackingChoice:
    """Try what host memory the device can read, and choose.

    Args:
        driver: Of the rank's device, its context current in this thread.
        probe: How to try.
        placement: Where cold rows belong.

    Returns:
        The choice. Nothing of the trials is held any more.

    Raises:
        BankError: The device can read no host memory, or none where "bind" wants it; says what was tried.
    """
    pinned = _attempted("two_banks", partial(_try_pinned, driver, probe=probe, placement=placement))
    refused: list[Attempt] = []
    for location in _locations(driver, placement=placement):
        trial = partial(_try_stitched, driver, location=location, probe=probe, placement=placement)
        attempt = _held_against(pinned, attempt=_attempted(_backing(location), trial))
        if not attempt.refusal:
            return BackingChoice(chosen=attempt, pinned=pinned, refused=tuple(refused))
        refused.append(attempt)
    if pinned.refusal:
        tried = "; ".join(f"{one.backing}: {one.refusal}" for one in (*refused, pinned))
        do = "set HOTSPLIT_NUMA_POLICY=preferred or off" if placement.policy == "bind" else None
        wanted = "host memory that the GPU reads in place"
        raise BankError("cold rows", got=tried, wanted=f"{wanted} ({placement})", do=do)
    return BackingChoice(chosen=pinned, pinned=pinned, refused=tuple(refused))


def summing_rate(tensor: torch.Tensor, *, repeats: int = 3) -> float:
    """The rate at which the tensor's device reads it: the kernel that sums it up does nothing else.

    Args:
        tensor: [num_bytes], uint8, a multiple of 4 bytes; far larger than the device's caches.
        repeats: Measured runs, after one to warm up; the median counts.

    Returns:
        Bytes per second.
    """
    words = tensor.view(torch.int32)
    words.sum().item()
    durations_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        words.sum().item()  # waits for the device
        durations_s.append(time.perf_counter() - start)
    return tensor.numel() / statistics.median(durations_s)


def _attempted(backing: Backing, trial: Callable[[], Attempt]) -> Attempt:
    """What came of a trial; an error of ours, or of torch's calls on such memory, is a reason to turn it down."""
    try:
        return trial()
    except (BankError, RuntimeError) as error:
        return Attempt(backing=backing, refusal=str(error).partition("\n")[0])


def _try_stitched(driver: Driver, *, location: Location, probe: Probe, placement: Placement) -> Attempt:
    _require_figures(driver, backing=_backing(location))
    memory = cuda_memory(driver, host=location, tensor_at=probe.tensor_at, placement=placement)
    row_bytes = -(-probe.trial_bytes // (_COLD_ROWS * memory.page_bytes)) * memory.page_bytes
    shape = (1 + _COLD_ROWS, row_bytes)
    with closing(CudaRange(shape=shape, dtype=torch.uint8, num_fast=1, memory=memory)) as held:
        _require_bytes(held.tensor)
        _require_copies(held)
        pages = page_nodes(held.edge, held.slow_bytes, step_bytes=memory.page_bytes)
        notices = check_placement(pages, placement=placement, what=f"{location} memory")
        return Attempt(
            backing=_backing(location),
            location=location,
            page_bytes=memory.page_bytes,
            read_bytes_per_s=_rate(probe, held.tensor[1:].view(-1)),
            pages=pages,
            notices=tuple(notices),
        )


def _try_pinned(driver: Driver, *, probe: Probe, placement: Placement) -> Attempt:
    _require_figures(driver, backing="two_banks")
    with closing(HostPages(probe.trial_bytes, placement=placement)) as held:
        tensor_at = probe.tensor_at or DeviceTensors(driver.device)
        tensor = tensor_at(held.register(driver), num_bytes=held.num_bytes)
        pages = held.where()
        notices = [*held.notices, *check_placement(pages, placement=placement, what="pinned memory")]
        return Attempt(backing="two_banks", read_bytes_per_s=_rate(probe, tensor), pages=pages, notices=tuple(notices))


def _held_against(pinned: Attempt, *, attempt: Attempt) -> Attempt:
    """Turn stitched memory down that is read too slowly."""
    ratio = _ratio(attempt, pinned=pinned)
    if ratio is None or ratio >= LEAST_RATIO or attempt.read_bytes_per_s is None:
        return attempt
    rate = f"{attempt.read_bytes_per_s / 1e9:.1f} GB/s, {ratio:.2f} of the rate of pinned memory"
    return replace(attempt, refusal=f"read at {rate}; wanted {LEAST_RATIO} or more")


def _locations(driver: Driver, *, placement: Placement) -> Iterable[Location]:
    """Host memory to try, in order."""
    node = placement.node
    if node is None:
        node = max(driver.attribute("HOST_NUMA_ID") or 0, 0)  # -1 where there is no NUMA: node 0 is all memory then
    on_node, anywhere = Location(kind="host_numa", index=node), Location(kind="host")
    by_policy = {"preferred": (on_node, anywhere), "bind": (on_node,), "off": (anywhere, on_node)}
    return by_policy[placement.policy]


def _backing(location: Location) -> Backing:
    return "host" if location.kind == "host" else "host_numa"


def _require_figures(driver: Driver, *, backing: Backing) -> None:
    missing = [name for name in _NEEDED[backing] if driver.attribute(name) == 0]
    if missing:
        raise BankError(f"{' and '.join(missing)} is 0")


def _require_bytes(tensor: torch.Tensor) -> None:
    """Write to every row, of both memories, and read it back."""
    wanted = list(range(1, tensor.shape[0] + 1))
    for row, value in enumerate(wanted):
        tensor[row].fill_(value)
    for column in (0, -1):
        found = tensor[:, column].tolist()
        if found != wanted:
            raise BankError("trial rows", got=str(found), wanted=f"{wanted}, as they were written")


def _require_copies(held: CudaRange) -> None:
    """Copy as engines do: a loader from host memory, post-processing from row to row, swaps by the driver."""
    hot, cold = held.tensor[0], held.tensor[-1]
    for value, row in ((101, hot), (102, cold)):
        plain = torch.full(row.shape, value, dtype=row.dtype, device="cpu")
        row.copy_(plain)
        there = torch.empty_like(row)
        there.copy_(row)
        row.fill_(0)
        row.copy_(there)
        if not torch.equal(row.cpu(), plain):
            raise BankError("trial rows", got="other bytes after torch's copies", wanted="the bytes that were copied")
    for value, source, target in ((101, 0, held.tensor.shape[0] - 1), (103, held.tensor.shape[0] - 1, 0)):
        held.tensor[source].fill_(value)
        _wait(held.tensor)
        held.copy_row(source_row=source, target_row=target, stream=0)
        _wait(held.tensor)
        if held.tensor[target, [0, -1]].tolist() != [value, value]:
            raise BankError("trial rows", got="other bytes after the driver's copy", wanted="the bytes of the row")


def _wait(tensor: torch.Tensor) -> None:
    """For all that is enqueued on the tensor's device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _rate(probe: Probe, tensor: torch.Tensor) -> float:
    rate = probe.read_rate(tensor)
    if not (math.isfinite(rate) and rate > 0):
        raise BankError("measured read rate", got=f"{rate} bytes per second", wanted="a finite one > 0")
    return rate


def _ratio(attempt: Attempt, *, pinned: Attempt) -> float | None:
    if attempt.read_bytes_per_s is None or pinned.read_bytes_per_s is None:
        return None
    return attempt.read_bytes_per_s / pinned.read_bytes_per_s
