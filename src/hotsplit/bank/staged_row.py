"""How a cold row lies in memory where it has been read directly: blocks as the disk has them, and views into them.

    file      ...| block | block | block |...        the runs of blocks that hold the row's spans
                     [down |gate |up |
    slot      | block | block | block | gathered |   the same blocks, then what lies apart in the file and must not here
                     ^ down     ^ gate_up: in place, since gate and up follow one another

Pure arithmetic; the reads are cold_reads.py's.

    >>> import torch
    >>> from hotsplit.bank.source import RowTensor
    >>> part = RowTensor(name="w", offset=0, dtype=torch.uint8, shape=(5000,))
    >>> staged = stage(RowLayout(tensors=(part,)), [Span(file=0, offset=4000, num_bytes=5000, row_offset=0)])
    >>> staged.runs[0].offset, staged.runs[0].num_bytes, staged.runs[0].needed, staged.num_bytes
    (0, 12288, 9000, 12288)
    >>> staged.places
    ((RowTensor(name='w', offset=0, dtype=torch.uint8, shape=(5000,)), 4000),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotsplit.bank.direct import BLOCK
from hotsplit.bank.source import ROW_ALIGN, RowLayout, RowTensor, Span, align


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring blocks of a file, read at once."""

    file: int
    """Index into ExpertSource.files."""
    offset: int
    """First byte in the file, on a block's edge."""
    num_bytes: int
    """Whole blocks."""
    needed: int
    """Of them up to the last byte that belongs to the row: the file may end there."""
    at: int
    """First byte in the slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedRow:
    """One expert's row in a slot."""

    runs: tuple[Run, ...]
    """To read."""
    gathers: tuple[tuple[int, int, int], ...]
    """To copy inside of the slot then: from, to, bytes."""
    places: tuple[tuple[RowTensor, int], ...]
    """Where each tensor lies in the slot then."""
    num_bytes: int
    """Of the slot, whole blocks."""


def stage(layout: RowLayout, spans: Sequence[Span]) -> StagedRow:
    """Lay one row out.

    Args:
        layout: Of the row.
        spans: Its bytes in the files.
    """
    runs = _runs(spans)
    free = runs[-1].at + runs[-1].num_bytes
    gathers: list[tuple[int, int, int]] = []
    places = []
    for part in layout.tensors:
        mine = [(_place(span, runs), span.num_bytes) for span in spans_of(part, spans)]
        place = mine[0][0]
        if not _is_one(mine) or place % part.dtype.itemsize:
            # As the arena has it: some matrix products round differently with the address of the weight.
            place = align(free) + part.offset % ROW_ALIGN
            free = place
            for start, num_bytes in mine:
                gathers.append((start, free, num_bytes))
                free += num_bytes
        places.append((part, place))
    return StagedRow(runs=tuple(runs), gathers=tuple(gathers), places=tuple(places), num_bytes=align(free, to=BLOCK))


def spans_of(part: RowTensor, spans: Sequence[Span]) -> list[Span]:
    """The bytes of one tensor, in row order.

    Args:
        part: Of the row.
        spans: Of the row.
    """
    end = part.offset + part.num_bytes
    return sorted((span for span in spans if part.offset <= span.row_offset < end), key=lambda span: span.row_offset)


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans that touch in the file and in the row become one.

    Args:
        spans: Of one row.
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.row_offset):
        last = found[-1] if found else None
        if last and _follows(last, span):
            found[-1] = Span(
                file=last.file,
                offset=last.offset,
                num_bytes=last.num_bytes + span.num_bytes,
                row_offset=last.row_offset,
            )
        else:
            found.append(span)
    return found


def file_ranges(spans: Sequence[Span]) -> list[Span]:
    """What a row needs of the files, in as few pieces as there are; their row_offset says nothing.

    Args:
        spans: Of one row.
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.file, span.offset)):
        last = found[-1] if found else None
        if last and last.file == span.file and last.offset + last.num_bytes == span.offset:
            num_bytes = last.num_bytes + span.num_bytes
            found[-1] = Span(file=last.file, offset=last.offset, num_bytes=num_bytes, row_offset=0)
        else:
            found.append(Span(file=span.file, offset=span.offset, num_bytes=span.num_bytes, row_offset=0))
    return found


def _runs(spans: Sequence[Span]) -> list[Run]:
    """The blocks of all spans, each read once."""
    pieces: list[list[int]] = []  # file, first byte, end
    for span in sorted(spans, key=lambda span: (span.file, span.offset)):
        start, end = span.offset // BLOCK * BLOCK, span.offset + span.num_bytes
        if pieces and pieces[-1][0] == span.file and start <= align(pieces[-1][2], to=BLOCK):
            pieces[-1][2] = max(pieces[-1][2], end)
        else:
            pieces.append([span.file, start, end])
    runs, at = [], 0
    for file, start, end in pieces:
        num_bytes = align(end - start, to=BLOCK)
        runs.append(Run(file=file, offset=start, num_bytes=num_bytes, needed=end - start, at=at))
        at += num_bytes
    return runs


def _place(span: Span, runs: Sequence[Run]) -> int:
    """Where a span's first byte lies in the slot."""
    run = next(run for run in runs if run.file == span.file and 0 <= span.offset - run.offset < run.num_bytes)
    return run.at + span.offset - run.offset


def _is_one(pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether pieces of a slot follow one another."""
    return all(start + size == following for (start, size), (following, _) in pairwise(pieces))


def _follows(first: Span, second: Span) -> bool:
    return (
        first.file == second.file
        and first.offset + first.num_bytes == second.offset
        and first.row_offset + first.num_bytes == second.row_offset
    )
