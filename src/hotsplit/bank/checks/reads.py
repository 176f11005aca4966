"""Cold rows read in place: at which rate, by kind of host memory and by how much of it, against the link.

A kernel that only reads (read_triton.py) takes rows in random order. Every row has a content of its own, so the sums
tell as well that each was read whole, from where it lies. The bound is the copy engine's rate in the same run: a read in
place crosses the same link, and cannot be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.device import Work, median_s
from hotsplit.bank.checks.findings import Figure, Finding, Goal, NotMeasured, Proof, not_measured
from hotsplit.bank.cuda_ranges import CudaRange, cuda_memory
from hotsplit.bank.driver import Location, LocationKind
from hotsplit.errors import BankError
from hotsplit.host.memory import memory_limits
from hotsplit.host.numa import thread_policy
from hotsplit.host.pages import HostPages
from hotsplit.units import GIB, gib

LINK_GOAL: Final = Goal(least=0.9)
"""Of reads of cold rows, against the copy engine."""
HOT_GOAL: Final = Goal(least=0.99)
"""Of reads of hot rows, against a tensor of torch's own."""
_SUMS: Final = 1 << 32
"""How many different sums there are."""
SECONDS_PER_GIB: Final = 1.5
"""To allocate, fill and read host memory of any kind, at worst."""
_STITCHED: Final[Mapping[LocationKind, str]] = {
    "host_numa": "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "host": "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
}
"""The figure of the device that tells whether it is supported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows to read, within the tensor that they belong to: a kernel gets its address, as it does in the product."""

    tensor: torch.Tensor
    """[R, W], int32, one row behind the other."""
    first: int = 0
    """The first row that is read."""
    number: int
    """How many are."""

    @property
    def part(self) -> torch.Tensor:
        """These rows alone, [number, W]."""
        return self.tensor[self.first : self.first + self.number]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of host memory."""

    name: str
    """What it is."""
    rows: Callable[[Bench, int], AbstractContextManager[Rows]]
    """Makes that many cold rows; they are gone afterwards."""
    figure: str
    """What tells that the device supports it."""


def check_hot_reads(bench: Bench) -> Iterator[Finding]:
    """Read hot rows of a stitched range, and as many of an ordinary tensor.

    Args:
        bench: Has the location of cold rows.
    """
    bench.require_time(5)
    num_hot, row_bytes = bench.sizes.read_hot_rows, bench.sizes.read_row_bytes
    memory = bench.memory()
    shape = (num_hot + 1, row_bytes)
    plain_RW = bench.tensor(num_hot, row_bytes // 4, dtype=torch.int32)
    with opened(bench, CudaRange(shape=shape, dtype=torch.uint8, num_fast=num_hot, memory=memory)) as made:
        plain = Rows(tensor=plain_RW, number=num_hot)
        hot = Rows(tensor=made.tensor.view(torch.int32), number=num_hot)
        fill_rows(plain.part)
        fill_rows(hot.part)
        yield reads_right(bench, hot, name="hot rows are read whole")
        before, value, after = (read_rate(bench, rows) for rows in (plain, hot, plain))
        yield Figure(
            name=f"hot rows of a range, {gib(num_hot * row_bytes)}",
            value=value,
            unit="bytes/s",
            bound=(before + after) / 2,
            bound_is="an ordinary tensor, before and after",
            goal=HOT_GOAL,
        )


def check_cold_reads(bench: Bench) -> Iterator[Finding]:
    """Read cold rows of every kind of host memory and every footprint.

    Args:
        bench: Has the location of cold rows and the rate "h2d".
    """
    kinds = _kinds(bench)
    for kind in kinds:
        try:
            yield from _kind_reads(bench, kind, is_chosen=kind is kinds[0])
        except NotMeasured as reason:
            yield not_measured(f"cold rows, {kind.name}", unit="bytes/s", reason=str(reason))
        bench.device.release()


def fill_rows(rows: torch.Tensor, *, first: int = 0) -> None:
    """Give every row a content of its own, by a kernel: word w of row r becomes w + r.

    Args:
        rows: [R, W], int32.
        first: r of the first row.
    """
    words_W = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
    for row in range(len(rows)):
        torch.add(words_W, first + row, out=rows[row])


def reads_right(bench: Bench, rows: Rows, *, name: str) -> Proof:
    """Whether the reading kernel sees what fill_rows() wrote.

    Args:
        bench: Whose kernel reads.
        rows: As they were filled.
        name: Of the proof.
    """
    order_N = _order(bench, rows)
    sums_N = bench.device.kernels.sum_rows(rows.tensor, order=order_N).long().sum(1)
    num_words = rows.tensor.shape[1]
    wanted_N = num_words * (num_words - 1) // 2 + (order_N - rows.first) * num_words
    num_wrong = int(((sums_N - wanted_N) % _SUMS != 0).sum())
    return Proof(name=name, holds=num_wrong == 0, detail=f"{num_wrong} of {rows.number} rows differ")


def reading(bench: Bench, rows: Rows) -> Work:
    """Work that reads every row once, in random order.

    Args:
        bench: Whose kernel reads.
        rows: Which.
    """
    order_N = _order(bench, rows)

    def work() -> None:
        bench.device.kernels.sum_rows(rows.tensor, order=order_N)

    return work


def read_rate(bench: Bench, rows: Rows) -> float:
    """Bytes per second at which rows are read.

    Args:
        bench: Whose kernel reads.
        rows: Which.
    """
    return rows.part.nbytes / median_s(bench.device, reading(bench, rows), repeats=bench.sizes.repeats)


def _order(bench: Bench, rows: Rows) -> torch.Tensor:
    device = bench.device.type
    return rows.first + torch.randperm(rows.number, device=device, generator=bench.generator())


def _kinds(bench: Bench) -> list[Kind]:
    """All kinds of host memory, the one that was chosen first."""
    stitched = [Location(kind="host_numa", index=bench.placement.node or 0), Location(kind="host")]
    stitched.sort(key=lambda location: location != bench.location)
    return [
        *(
            Kind(name=f"one range, {where}", rows=partial(_stitched, location=where), figure=_STITCHED[where.kind])
            for where in stitched
        ),
        Kind(name="cudaHostAlloc", rows=_pinned, figure="HOST_REGISTER_SUPPORTED"),
        Kind(name="huge pages, registered", rows=_registered, figure="HOST_REGISTER_SUPPORTED"),
    ]


def _kind_reads(bench: Bench, kind: Kind, *, is_chosen: bool) -> Iterator[Finding]:
    """One kind, by footprint: one allocation of the largest that fits, of which more and more is read."""
    supported = bench.device.driver.attribute(kind.figure)
    if supported == 0:
        raise NotMeasured(f"{kind.figure} is 0")
    footprints, row_bytes = bench.sizes.footprints, bench.sizes.read_row_bytes
    room = _room_bytes(bench)
    fitting = [size for size in footprints if size <= room]
    for size in footprints[len(fitting) :]:
        reason = f"no more than {gib(max(0, room))} of host memory to take"
        yield not_measured(f"cold rows, {kind.name}, {gib(size)}", unit="bytes/s", reason=reason)
    if not fitting:
        return
    bench.require_time(5 + SECONDS_PER_GIB * fitting[-1] / GIB)
    with ExitStack() as stack:
        rows = _enter(stack, kind, bench=bench, num_rows=fitting[-1] // row_bytes, is_known=supported is not None)
        fill_rows(rows.part)
        yield reads_right(bench, rows, name=f"cold rows, {kind.name}: all are read whole")
        for size in fitting:
            yield Figure(
                name=f"cold rows, {kind.name}, {gib(size)}",
                value=read_rate(bench, replace(rows, number=size // row_bytes)),
                unit="bytes/s",
                bound=bench.rates.get("h2d"),
                bound_is="the copy engine",
                goal=LINK_GOAL if is_chosen else None,
            )


def _room_bytes(bench: Bench) -> int:
    """Host memory that may be taken; all of it where the kernel tells no limit."""
    available = memory_limits().available_bytes
    return bench.sizes.footprints[-1] if available is None else available - bench.sizes.spare_host_bytes


def _enter(stack: ExitStack, kind: Kind, *, bench: Bench, num_rows: int, is_known: bool) -> Rows:
    """Make rows of a kind. A refusal is an error where the device claims to have it, else the answer."""
    try:
        return stack.enter_context(kind.rows(bench, num_rows))
    except BankError as error:
        if is_known:
            raise
        raise NotMeasured(str(error)) from error


@contextmanager
def _stitched(bench: Bench, num_rows: int, *, location: Location) -> Iterator[Rows]:
    """Cold rows behind one hot row."""
    device, row_bytes = bench.device, bench.sizes.read_row_bytes
    memory = cuda_memory(device.driver, host=location, tensor_at=device.tensor_at, placement=bench.placement)
    made = CudaRange(shape=(1 + num_rows, row_bytes), dtype=torch.uint8, num_fast=1, memory=memory)
    with opened(bench, made):
        yield Rows(tensor=made.tensor.view(torch.int32), first=1, number=num_rows)


@contextmanager
def _pinned(bench: Bench, num_rows: int) -> Iterator[Rows]:
    row_bytes = bench.sizes.read_row_bytes
    with thread_policy(bench.placement), bench.device.pinned(num_rows * row_bytes) as held:
        yield Rows(tensor=held.view(torch.int32).view(num_rows, -1), number=num_rows)


@contextmanager
def _registered(bench: Bench, num_rows: int) -> Iterator[Rows]:
    device, num_bytes = bench.device, num_rows * bench.sizes.read_row_bytes
    with opened(bench, HostPages(num_bytes, placement=bench.placement)) as pages:
        held = device.tensor_at(pages.register(device.driver), num_bytes=num_bytes)
        yield Rows(tensor=held.view(torch.int32).view(num_rows, -1), number=num_rows)
