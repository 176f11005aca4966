"""Copies of rows on the side stream while cold rows are read: who starves whom.

What swaps do to the reads of a running step, at its worst: the product has one row on its way at a time (cuda_swaps.py),
here the side stream is never idle. Each rate stands beside its own without the other stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.device import Device, Work
from hotsplit.bank.checks.findings import Figure, Finding, Proof
from hotsplit.bank.checks.reads import SECONDS_PER_GIB, Rows, fill_rows, reading, reads_right
from hotsplit.bank.cuda_ranges import CudaRange
from hotsplit.bank.swap import Stream
from hotsplit.units import GIB

_Way: TypeAlias = Literal["in", "out"]
"""From cold rows to hot ones, or back."""

_BESIDE: Final = 4
"""How many times as long the other stream works: for all of the time that is measured, and some more."""


def check_copies_beside_reads(bench: Bench) -> Iterator[Finding]:
    """Copy rows both ways on the side stream while cold rows are read.

    Args:
        bench: Has the location of cold rows and the rates "h2d" and "d2h".
    """
    footprint, row_bytes = bench.sizes.footprints[0], bench.sizes.read_row_bytes
    bench.require_time(5 + SECONDS_PER_GIB * footprint / GIB)
    num_cold = footprint // row_bytes
    num_hot = max(1, num_cold // 2)
    shape = (num_hot + num_cold, row_bytes)
    made = CudaRange(shape=shape, dtype=torch.uint8, num_fast=num_hot, memory=bench.memory())
    with opened(bench, made):
        moves = _Moves(device=bench.device, made=made, num_hot=num_hot)
        rows_RW = made.tensor.view(torch.int32)
        yield from _moved_bytes(bench, moves, rows_RW)
        cold = Rows(tensor=rows_RW, first=num_hot, number=num_cold)
        yield from _rates(bench, moves, cold=cold)
        yield reads_right(bench, cold, name="cold rows are whole after copies beside reads")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moves:
    """Hot row i and cold row i are copied to each other."""

    device: Device
    made: CudaRange
    num_hot: int

    def enqueue(self, way: _Way, *, num_copies: int) -> None:
        """Enqueue copies on the side stream, pair by pair, and again from the first pair on."""
        stream = self.device.streams.handle("side")
        for nth in range(num_copies):
            hot, cold = (self.made.row_address(start + nth % self.num_hot) for start in (0, self.num_hot))
            target, source = (hot, cold) if way == "in" else (cold, hot)
            self.device.calls.copy(target, source=source, num_bytes=self.row_bytes, stream=stream)

    @property
    def row_bytes(self) -> int:
        return self.made.row_address(1) - self.made.row_address(0)


def _moved_bytes(bench: Bench, moves: _Moves, rows_RW: torch.Tensor) -> Iterator[Proof]:
    """Copies alone: every row is where it was copied to. Leaves hot row i equal to cold row i."""
    num_hot = moves.num_hot
    hot_RW, cold_RW = rows_RW[:num_hot], rows_RW[num_hot:]
    fill_rows(hot_RW, first=1 << 20)
    fill_rows(cold_RW, first=1 << 21)
    bench.device.synchronise()
    moves.enqueue("out", num_copies=num_hot)
    bench.device.synchronise()
    is_there = torch.equal(hot_RW, cold_RW[:num_hot])
    yield Proof(name="rows are copied out to cold rows", holds=is_there and int(cold_RW[0, 0]) == 1 << 20)
    fill_rows(cold_RW)
    bench.device.synchronise()
    moves.enqueue("in", num_copies=num_hot)
    bench.device.synchronise()
    is_there = torch.equal(hot_RW, cold_RW[:num_hot])
    yield Proof(name="rows are copied in to hot rows", holds=is_there and int(hot_RW[-1, 0]) == num_hot - 1)


def _rates(bench: Bench, moves: _Moves, *, cold: Rows) -> Iterator[Figure]:
    """Reads and copies, each alone and beside the other. Copies write the bytes that are there already."""
    device, num_copies = bench.device, moves.num_hot
    reads, read_bytes = reading(bench, cold), cold.part.nbytes
    reads()
    read_s = _duration_s(device, reads, on="compute")
    read_alone, copied_bytes = read_bytes / read_s, num_copies * moves.row_bytes
    yield _figure("cold reads alone", rate=read_alone, bound=bench.rates.get("h2d"), bound_is="the copy engine")
    ways: tuple[tuple[_Way, str], ...] = (("in", "h2d"), ("out", "d2h"))
    for way, rate in ways:
        copies = partial(moves.enqueue, way, num_copies=num_copies)
        copy_s = _duration_s(device, copies, on="side")
        alone = copied_bytes / copy_s
        yield _figure(f"copies {way} alone", rate=alone, bound=bench.rates.get(rate), bound_is="the copy engine")

        long_copies = partial(moves.enqueue, way, num_copies=math.ceil(_BESIDE * num_copies * read_s / copy_s))
        beside = read_bytes / _duration_s(device, reads, on="compute", background=long_copies)
        yield _figure(f"cold reads beside copies {way}", rate=beside, bound=read_alone, bound_is="reads alone")

        long_reads = partial(_repeat, reads, times=math.ceil(_BESIDE * copy_s / read_s))
        beside = copied_bytes / _duration_s(device, copies, on="side", background=long_reads)
        yield _figure(f"copies {way} beside cold reads", rate=beside, bound=alone, bound_is="copies alone")


def _figure(name: str, *, rate: float, bound: float | None, bound_is: str) -> Figure:
    return Figure(name=name, value=rate, unit="bytes/s", bound=bound, bound_is=bound_is)


def _duration_s(device: Device, work: Work, *, on: Stream, background: Work | None = None) -> float:
    """Seconds that work takes on its stream, while the other one does what was enqueued there before."""
    device.synchronise()
    if background is not None:
        background()
    start = device.stamp(on)
    work()
    end = device.stamp(on)
    device.synchronise()
    return device.elapsed_s(start, end)


def _repeat(work: Work, *, times: int) -> None:
    for _ in range(times):
        work()
