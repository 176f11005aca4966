"""Slots for cold rows that were read directly: where they arrive, and where those that traffic wants just now stay.

A slot is asked for by the thread that runs the steps and filled by a reading thread. A row stays until its slot is
needed for another one, the least wanted first: the one whose uses, each worth half after HALF_LIFE steps, sum up to least.
Uses count from before a row had a slot, so that one that comes again and again outlasts one that came last.
What was handed out is *held*: it keeps its slot until the next turn.

    free -> reading (by one thread) -> there -> held, then not -> taken by another row
                    |-> failed: free again
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.direct import DirectFiles, address_of
from hotsplit.bank.source import RowLayout, RowTensor
from hotsplit.bank.staged_row import StagedRow
from hotsplit.errors import BankError
from hotsplit.host.pages import populate

Key = tuple[int, int]
"""Layer and expert."""

HALF_LIFE: Final = 30
"""Steps after which a use is worth half: tokens, where a step decodes one. Source: benchmarks/bench_cold_memory.py."""


@dataclass(kw_only=True, slots=True)
class Slot:
    """One row's place; changed by the stepping thread alone, but for `tensors`, which a finished read sets."""

    number: int
    """Among all slots."""
    start: int
    """First byte in the memory of all slots."""
    key: Key = (-1, -1)
    """Of the row that took it last."""
    turn: int = -1
    """Last turn in which the row was handed out or asked for."""
    is_reading: bool = False
    """Whether a thread writes to it."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """Of the row, once it is there."""


class Staging:
    """All slots.

    Args:
        files: To read from; None where rows are only copied.
        num_slots: Rows that have room.
        slot_bytes: Room of one, whole blocks.
        turns: That a step takes: one per layer.

    Raises:
        BankError: Memory does not suffice.
    """

    def __init__(self, files: DirectFiles | None, *, num_slots: int, slot_bytes: int, turns: int = 1) -> None:
        self._files, self._slot_bytes = files, slot_bytes
        self._memory = _memory(num_slots * slot_bytes)
        self._content = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._all = [Slot(number=i, start=i * slot_bytes) for i in range(num_slots)]
        self._free = list(reversed(self._all))
        self._slots: dict[Key, Slot] = {}
        self._half_life = HALF_LIFE * turns
        self._wants: dict[Key, float] = {}  # of every row that was ever asked for
        self._wants_S = np.zeros(num_slots)  # of the rows in slots
        self.num_bytes = num_slots * slot_bytes
        """Of all slots."""

    def find(self, key: Key, *, turn: int) -> Slot | None:
        """The slot of a row, held from now on; None where it has none.

        Args:
            key: Of the row.
            turn: This one.
        """
        slot = self._slots.get(key)
        if slot is not None and slot.turn != turn:
            slot.turn = turn
            self._count(key, slot, turn=turn)
        return slot

    def take(self, key: Key, *, turn: int) -> Slot | None:
        """A slot for a row that has none; None where all are held or being read.

        Args:
            key: Of the row.
            turn: This one.
        """
        if not self._free and len(self._slots) < len(self._all):
            used = {slot.start for slot in self._slots.values()}  # an interrupt has left a slot between the two
            self._free = [slot for slot in self._all if slot.start not in used]
        if not self._free and not self._make_room(turn=turn):
            return None
        try:
            slot = self._free.pop()
        except IndexError:  # closed meanwhile, by another thread
            return None
        slot.key, slot.turn, slot.is_reading, slot.tensors = key, turn, True, None
        self._slots[key] = slot
        self._count(key, slot, turn=turn)
        return slot

    def drop(self, key: Key) -> None:
        """Free the slot of a row that nobody reads or writes; twice is harmless.

        Args:
            key: Of the row.
        """
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        slot.tensors, slot.is_reading = None, False
        self._free.append(slot)

    def give_up(self, key: Key) -> None:
        """Free the slot of a row that will not be wanted here soon, unless it is being read.

        Args:
            key: Of the row.
        """
        slot = self._slots.get(key)
        if slot is not None and not slot.is_reading:
            self.drop(key)

    def copy_out(self, key: Key, *, layout: RowLayout, address: int) -> bool:
        """Copy a row elsewhere, where it lies as in the arena; for other threads than the one that runs the steps.

        That one may take the slot for another row meanwhile: then its tensors are others, and the copy counts for nothing.

        Args:
            key: Of the row.
            layout: Of the row.
            address: To write to; room for a row.

        Returns:
            Whether all of it is there now.
        """
        slot = self._slots.get(key)
        tensors = None if slot is None else slot.tensors
        if slot is None or slot.is_reading or tensors is None:  # whether what was read is whole is not known yet
            return False
        for part in layout.tensors:
            ctypes.memmove(address + part.offset, tensors[part.name].data_ptr(), part.num_bytes)
        return self._slots.get(key) is slot and slot.tensors is tensors

    def drop_unfinished(self, *, keep: Container[Key] = ()) -> None:
        """Free what no thread will ever finish: in a forked process, or after an interrupt.

        Args:
            keep: Rows that a thread does finish.
        """
        for key in [key for key, slot in self._slots.items() if slot.is_reading and key not in keep]:
            self.drop(key)

    def read(self, slot: Slot, row: StagedRow) -> None:
        """Read a row into its slot; by the one thread that was told to.

        Args:
            slot: Taken for it.
            row: What to read, and where it lies then.

        Raises:
            BankError: A read failed, or a file is shorter than it was.
        """
        if self._files is None:
            raise BankError("slots for cold rows", got="a direct read", wanted="files to read from")
        with memoryview(self._memory) as memory:
            for run in row.runs:
                start = slot.start + run.at
                target = memory[start : start + run.num_bytes]
                self._files.read_blocks(target, file=run.file, offset=run.offset, needed=run.needed)
            # In here, where the memory cannot go while a close() that was interrupted lets go of it.
            start = address_of(memory) + slot.start
            for source, target_at, num_bytes in row.gathers:
                ctypes.memmove(start + target_at, start + source, num_bytes)
        slot.tensors = self._tensors(slot, row.places)

    def copy(self, slot: Slot, pieces: Iterable[tuple[int, int, int]], *, layout: RowLayout) -> None:
        """Copy a row into its slot, where it lies as in the arena; by the one thread that was told to.

        Args:
            slot: Taken for it.
            pieces: Address, place in the row, bytes. All of it is there.
            layout: Of the row.
        """
        with memoryview(self._memory) as memory:
            start = address_of(memory) + slot.start
            for address, row_offset, num_bytes in pieces:
                ctypes.memmove(start + row_offset, address, num_bytes)
        slot.tensors = self._tensors(slot, [(part, part.offset) for part in layout.tensors])

    def _make_room(self, *, turn: int) -> bool:
        """With all slots taken, free that of the row that is wanted least; False if each is held or being read."""
        slots = self._all
        if not slots:  # closed meanwhile, by another thread
            return False
        for number in _by_wants(self._wants_S):
            slot = slots[number]
            if slot.turn != turn and not slot.is_reading:
                self.drop(slot.key)
                return True
        return False

    def _count(self, key: Key, slot: Slot, *, turn: int) -> None:
        """One more use of a row; kept is the logarithm of the sum, as if it began to grow now, so that all can be compared."""
        now = turn / self._half_life
        wants = now + math.log2(1 + 2.0 ** (self._wants.get(key, -math.inf) - now))
        self._wants[key] = self._wants_S[slot.number] = wants

    def _tensors(self, slot: Slot, places: Iterable[tuple[RowTensor, int]]) -> Mapping[str, torch.Tensor]:
        content = self._content[slot.start : slot.start + self._slot_bytes]
        return {part.name: content[at : at + part.num_bytes].view(part.dtype).view(part.shape) for part, at in places}

    def close(self) -> None:
        """Let go of memory and files; views that a caller still holds keep the memory until they go."""
        self._all = []
        self._slots.clear()
        self._free.clear()
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._content = torch.empty(0, dtype=torch.uint8)
        if self._files is not None:
            self._files.close()


def _by_wants(wants_S: npt.NDArray[np.float64]) -> Iterator[int]:
    """Numbers of slots, the least wanted first; that of the first one is enough but where it is held or being read."""
    yield int(wants_S.argmin())
    yield from wants_S.argsort().tolist()


def _memory(num_bytes: int) -> mmap.mmap:
    size = max(num_bytes, mmap.PAGESIZE)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        populate(address_of(memoryview(memory)), size, threads=1)  # what does not fit fails here and not at a step
        return memory
    except (OSError, OverflowError) as error:
        raise BankError("slots for cold rows", got=str(error), wanted=f"{size} bytes") from error


class Gathered(dict[str, torch.Tensor]):
    """Tensors of a row that was put together without a slot: copies, good for one turn."""

    __slots__ = ("__weakref__",)
