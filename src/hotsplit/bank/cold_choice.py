"""How cold rows are to be read: chosen once, before the plan, since slots come out of the hot budget.

    page cache   its pages cost no budget, and what is read twice is read from memory: best where most cold rows fit
    direct       past it: half the processor time per row, and a faster read; best where most of them do not

The page cache takes what memory is left. Where that is under FITS_RATIO of the cold bytes, most rows come from the disk
anyway, and direct reads serve them sooner. Then half of the budget is slots, which keep the rows that were read last: hot
rows are what traffic wants on the whole, slots what it wants just now.

    >>> needs = SlotNeeds(slot_bytes=9 << 20, lie_apart=False)
    >>> choose_cold(cold_bytes=20 << 30, cache_bytes=15 << 30, room_bytes=8 << 30, needs=needs, top_k=8).slots
    0
    >>> choose_cold(cold_bytes=20 << 30, cache_bytes=2 << 30, room_bytes=8 << 30, needs=needs, top_k=8).slots
    455
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hotsplit.bank.direct import BLOCK
from hotsplit.bank.source import ExpertSource, align
from hotsplit.bank.staged_row import stage
from hotsplit.units import gib

FITS_RATIO: Final = 0.3
"""Of the cold bytes that the page cache must be able to hold: there traffic that never repeats reads 0.7 of its cold bytes,
at 1.3 ms per MB, cached pages thrown out for them included; and directly all of them, at 0.8 ms. NOTE: that was measured with
32 slots, which kept nothing; decision 41 says what it leaves open. Source: benchmarks/results/cold_path.json."""
RECENT_SHARE: Final = 1 / 2
"""Of the budget that slots for direct reads take. Source: decision 41."""
_TOKENS: Final = 4
"""Tokens of one step whose rows of a layer have slots to be put together in."""
_LARGEST_SHARE: Final = 1 / 16
"""Of the budget that those may take: they are none to keep rows in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotNeeds:
    """What the rows of a model ask of slots."""

    slot_bytes: int
    """Of the largest row, whole blocks."""
    lie_apart: bool
    """Whether parts of a tensor do in the files, so that a row has to be put together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdChoice:
    """How cold rows are read."""

    is_direct: bool
    """Past the page cache, into slots."""
    slots: int
    """How many; 0 for none."""
    slot_bytes: int
    """Of one."""
    text: str
    """How and why, one line for the log."""

    @property
    def num_bytes(self) -> int:
        """Of all slots, out of the budget."""
        return self.slots * self.slot_bytes


def choose_cold(
    *, cold_bytes: int, cache_bytes: int | None, room_bytes: int, needs: SlotNeeds, top_k: int
) -> ColdChoice:
    """Choose.

    Args:
        cold_bytes: Of all cold rows.
        cache_bytes: Memory that is left for the page cache; None where nobody knows.
        room_bytes: Of the hot budget, what is not spoken for.
        needs: Of the model's rows.
        top_k: Experts per token.
    """
    fits = cache_bytes is None or cache_bytes >= FITS_RATIO * cold_bytes
    slots = int(room_bytes * (_LARGEST_SHARE if fits else RECENT_SHARE)) // needs.slot_bytes
    slots = min(_TOKENS * top_k, slots) if fits else slots
    slots = slots if slots >= top_k else 0
    room = "whose size nobody knows" if cache_bytes is None else f"which has room for {gib(max(cache_bytes, 0))}"
    text = f"{gib(cold_bytes)} of cold rows are read through the page cache, {room}"
    if not fits and slots:
        text = f"{gib(cold_bytes)} of cold rows are read directly, past the page cache, {room}"
    elif not needs.lie_apart:
        slots = 0
    if slots:
        text += f"; {slots} slots for them take {gib(slots * needs.slot_bytes)} of the budget"
    return ColdChoice(is_direct=bool(slots) and not fits, slots=slots, slot_bytes=needs.slot_bytes, text=text)


def slot_needs(source: ExpertSource) -> SlotNeeds:
    """What the rows of a model ask of slots.

    Args:
        source: Where the experts lie.
    """
    rows = [
        (layout.num_bytes, stage(layout, source.spans(layer_id, expert)))
        for layer_id, layout in enumerate(source.layouts)
        for expert in range(source.num_experts)
    ]
    largest = max(max(num_bytes, row.num_bytes) for num_bytes, row in rows)
    return SlotNeeds(slot_bytes=align(largest, to=BLOCK), lie_apart=any(row.gathers for _, row in rows))
