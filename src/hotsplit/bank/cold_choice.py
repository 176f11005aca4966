"""How cold rows are to be read: chosen once, before the plan, since slots come out of the hot budget.

    page cache   its pages cost no budget, and it keeps rows that were read beside all of the budget's hot rows
    direct       past it: half the processor time per row, and a faster read; but what keeps rows is of the budget

The page cache takes what memory is left. Where that is a fair part of the model, it saves more reads than it makes dearer.
Else direct reads serve sooner, and half of the budget is slots, which keep the rows that were read: hot rows are what
traffic wants on the whole, slots what it wants just now.

    >>> needs = SlotNeeds(slot_bytes=9 << 20, lie_apart=False)
    >>> sizes = {"expert_bytes": 28 << 30, "cold_bytes": 20 << 30, "room_bytes": 8 << 30}
    >>> choose_cold(**sizes, cache_bytes=15 << 30, needs=needs, top_k=8).slots
    0
    >>> choose_cold(**sizes, cache_bytes=2 << 30, needs=needs, top_k=8).slots
    455
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hotsplit.bank.direct import BLOCK
from hotsplit.bank.source import ExpertSource, align
from hotsplit.bank.staged_row import stage
from hotsplit.units import gib

KEEPS_RATIO: Final = 1 / 6
"""Of all expert bytes that the page cache must have room for. With less it saves too few reads for what each costs by it, 1.3
ms per MB, cached pages thrown out for it included, and directly 0.4 to 0.8. Source: decision 43."""
FITS_RATIO: Final = 1 / 3
"""Of the cold bytes that suffices too, where a large budget leaves few of them. Source: the same."""
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
    *, expert_bytes: int, cold_bytes: int, cache_bytes: int | None, room_bytes: int, needs: SlotNeeds, top_k: int
) -> ColdChoice:
    """Choose.

    Args:
        expert_bytes: Of all rows.
        cold_bytes: Of all cold rows.
        cache_bytes: Memory that is left for the page cache; None where nobody knows.
        room_bytes: Of the hot budget, what is not spoken for.
        needs: Of the model's rows.
        top_k: Experts per token.
    """
    fits = cache_bytes is None or cache_bytes >= min(KEEPS_RATIO * expert_bytes, FITS_RATIO * cold_bytes)
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
