"""Rows in slots: every block is read once, every byte of the row is found, and what lies together is not copied."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.direct import BLOCK
from hotsplit.bank.source import RowLayout, RowTensor, Span, align
from hotsplit.bank.staged_row import file_ranges, joined, stage


@st.composite
def rows(draw):
    """A row of some tensors, each in some spans, that lie anywhere in two files without overlap."""
    at, ends, parts, spans = 0, [draw(st.integers(0, 9000)) for _ in range(2)], [], []
    pieces = []
    for number in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 3000).map(lambda n: 2 * n), min_size=1, max_size=3))
        at = align(at)
        parts.append(RowTensor(name=str(number), offset=at, dtype=torch.int16, shape=(sum(lengths) // 2,)))
        for length in lengths:
            pieces.append((at, length))
            at += length
    for row_offset, length in draw(st.permutations(pieces)):
        file = draw(st.integers(0, 1))
        ends[file] += draw(st.sampled_from([0, 0, 1, 2, 64, 5000]))
        spans.append(Span(file=file, offset=ends[file], num_bytes=length, row_offset=row_offset))
        ends[file] += length
    return RowLayout(tensors=tuple(parts)), sorted(spans, key=lambda span: span.row_offset), ends


@given(rows())
def test_a_slot_holds_the_row_after_its_reads_and_copies(row):
    layout, spans, ends = row
    files = [random.Random(file).randbytes(end) for file, end in enumerate(ends)]
    staged = stage(layout, spans)
    assert 0 == staged.num_bytes % BLOCK
    slot = bytearray(staged.num_bytes)
    seen = set()
    for run in staged.runs:
        assert 0 == run.offset % BLOCK == run.at % BLOCK == run.num_bytes % BLOCK
        blocks = {(run.file, block) for block in range(run.offset // BLOCK, (run.offset + run.num_bytes) // BLOCK)}
        assert not blocks & seen, "no block is read twice"
        seen |= blocks
        got = files[run.file][run.offset : run.offset + run.num_bytes]
        assert len(got) >= run.needed
        slot[run.at : run.at + len(got)] = got
    needed = {
        (span.file, block)
        for span in spans
        for block in range(span.offset // BLOCK, (span.offset + span.num_bytes - 1) // BLOCK + 1)
    }
    # Where two spans lie in neighbouring blocks they are one read; never more than that.
    assert needed == seen
    for source, target, num_bytes in staged.gathers:
        slot[target : target + num_bytes] = slot[source : source + num_bytes]
    for part, place in staged.places:
        expected = b"".join(
            files[span.file][span.offset : span.offset + span.num_bytes]
            for span in spans
            if part.offset <= span.row_offset < part.offset + part.num_bytes
        )
        assert expected == bytes(slot[place : place + part.num_bytes])
        assert 0 == place % part.dtype.itemsize


@given(rows())
def test_pieces_of_a_row_cover_it_once(row):
    _, spans, _ = row
    total = sum(span.num_bytes for span in spans)
    for pieces in (joined(spans), file_ranges(spans)):
        assert total == sum(piece.num_bytes for piece in pieces)
        assert len(pieces) <= len(spans)


def test_a_row_in_one_piece_is_one_read_and_no_copy():
    parts = (
        RowTensor(name="a", offset=0, dtype=torch.uint8, shape=(100,)),
        RowTensor(name="b", offset=128, dtype=torch.uint8, shape=(50,)),
    )
    spans = [
        Span(file=0, offset=5050, num_bytes=100, row_offset=0),
        Span(file=0, offset=5000, num_bytes=50, row_offset=128),
    ]
    staged = stage(RowLayout(tensors=parts), spans)
    assert ((), 1) == (staged.gathers, len(staged.runs))
    assert (4096, 4096, 1054) == (staged.runs[0].offset, staged.runs[0].num_bytes, staged.runs[0].needed)
    assert [(parts[0], 954), (parts[1], 904)] == list(staged.places)
