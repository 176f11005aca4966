"""The cold path: as soon as a layer's routing is known its cold rows are read, several at once, and served as they come.

    ask        what is there is there; reads of all else begin, and the call returns
    arrivals   first what is there, then each row as its read ends
    tensors    one row; waits for its read, or reads it

Exactly the pages of the rows asked for are read, and the next layer is never guessed. A row comes from one of

    staging      slots that direct reads fill, past the page cache; those wanted just now stay     (where there are any)
    page cache   the mapped file itself, without a copy

What is in neither is read into a slot, or into the page cache, as cold_choice.py has it; into the page cache also with
all slots in use (a long prompt). A row with a tensor whose parts lie apart in the file is put together in a slot.
All state belongs to the thread that runs the steps. Reading threads fill slots; how a read ended stands in Answers until
that thread has taken it in, whatever interrupts it meanwhile. Reads into the page cache are begun and awaited without them:
handing a row over costs more than it saves.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hotsplit.bank.cold_answers import Answers, Read
from hotsplit.bank.kept_rows import KeptRows
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.source import ExpertSource, Span
from hotsplit.bank.staged_row import StagedRow, file_ranges, joined, spans_of, stage
from hotsplit.bank.staging import Gathered, Key, Slot, Staging
from hotsplit.bank.workers import Workers, banks_closed
from hotsplit.errors import HotsplitError

RowTensors = Mapping[str, torch.Tensor]

READ_THREADS = 2
"""Rows that are read into slots at once. Source: benchmarks/bench_cold_path.py: one fills a virtual disk; each read is long
enough for a drive's own queue."""


@dataclass(kw_only=True, slots=True)
class ColdCounts:
    """What the cold path did since the start."""

    staged_rows: int = 0
    """Rows read into slots."""
    paged_rows: int = 0
    """Rows read into the page cache."""
    kept_rows: int = 0
    """Rows that were still in a slot."""
    present_rows: int = 0
    """Rows that were in the page cache."""


class ColdRows:
    """The cold rows of all layers.

    Args:
        source: Where the experts lie.
        files: Its files, mapped.
        staging: Slots; None for none.
        is_direct: Whether rows are read into them, past the page cache; else they take only what lies apart.
        threads: Rows that are read at once.
    """

    def __init__(
        self,
        source: ExpertSource,
        *,
        files: MappedFiles,
        staging: Staging | None = None,
        is_direct: bool = False,
        threads: int = READ_THREADS,
    ) -> None:
        self._source, self._files, self._staging, self._threads = source, files, staging, threads
        self._is_direct = is_direct
        self._ranges: dict[Key, list[Span]] = {}
        self._layouts: dict[Key, StagedRow] = {}
        self._views: dict[Key, RowTensors] = {}
        self._gathered: list[weakref.ref[Gathered]] = []  # this turn's
        self._turn = 0
        self._present: set[Key] = set()  # in the page cache, this turn
        self._reading: dict[Key, Read] = {}
        self._failed: dict[Key, HotsplitError] = {}
        self._is_closed = False
        self.counts = ColdCounts()
        """What it did."""
        self.kept = None if staging is None else KeptRows()
        """Which rows of a step lay in slots; None where there are none."""
        self._start()

    def ask(self, layer_id: int, experts: Iterable[int]) -> None:
        """Begin the next turn: start reading, return at once. What was handed out before may go now.

        Args:
            layer_id: Ordinal among MoE layers.
            experts: Cold ones that will be wanted.
        """
        self._require_usable()
        self._files.guard.begin()
        self._turn += 1
        self._collect()
        if self._reading:
            self._hand_over(self._reading.values())
        self._present.clear()
        self._failed.clear()
        self._forget_gathered()
        try:
            keys = [(layer_id, expert) for expert in experts]
            for key in keys:
                self._slot(key)  # held from now on, so that none gives its slot up to another of these
            for key in keys:
                self._begin(key)
        except BaseException:
            if self._staging:
                self._staging.drop_unfinished(keep=self._reading)  # a slot that was taken for a read never begun
            raise

    def arrivals(self, layer_id: int, experts: Iterable[int]) -> Iterator[int]:
        """The experts, each once, as they come.

        Args:
            layer_id: Ordinal among MoE layers.
            experts: Of those that were asked for.

        Raises:
            BankError: One cannot be read.
        """
        waiting = [(layer_id, expert) for expert in dict.fromkeys(experts)]
        while waiting:
            there = [key for key in waiting if self._is_there(key)]
            waiting = [key for key in waiting if key not in there] if there else waiting
            for _, expert in there:
                yield expert
            if waiting and not there:
                self._await_one(waiting)

    def tensors(self, layer_id: int, expert: int) -> RowTensors:
        """The tensors of one expert by name, in place until the next turn.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Which.

        Raises:
            BankError: It cannot be read.
        """
        self._require_usable()
        key = (layer_id, expert)
        while not self._is_there(key):
            if key in self._reading:
                self._wait()
            else:
                self._await_page_cache(key)
        slot = self._slot(key)
        return self._mapped(key) if slot is None or slot.tensors is None else slot.tensors

    def drop_pages(self) -> None:
        """Let go of every mapped page of the files, so that the page cache may give them up."""
        self._present.clear()
        self._files.drop()

    def close(self) -> None:
        """Finish the reads under way, forget the others, let threads, memory and files go; twice is harmless."""
        self._is_closed = True
        try:
            self._workers.close()
        finally:
            self._answers.close()
            self._views.clear()
            if self._staging:
                self._staging.close()
            self._files.close()

    def _start(self) -> None:
        self._workers = Workers(self._threads, name="hotsplit-cold")
        self._answers = Answers()
        self._pid = os.getpid()

    def _require_usable(self) -> None:
        if self._is_closed:
            raise banks_closed()
        if self._pid != os.getpid():  # threads do not follow into a forked process
            self._reading.clear()
            if self._staging:
                self._staging.drop_unfinished()
            self._start()

    def _begin(self, key: Key) -> None:
        is_known = key in self._reading or key in self._present
        is_kept = not is_known and self._slot(key) is not None
        if self.kept is not None:
            self.kept.note(key, is_kept=is_kept)
        self.counts.kept_rows += is_kept
        if is_known or is_kept:
            return
        ranges = self._ranges_of(key)
        is_present = self._files.is_present(ranges)
        is_direct = self._is_direct and not is_present
        self.counts.present_rows += is_present
        if (is_direct or self._layout_of(key).gathers) and self._into_slot(key, is_direct=is_direct):
            self.counts.staged_rows += not is_present
        elif is_present:
            self._present.add(key)
        else:
            self.counts.paged_rows += 1
            self._files.read_ahead(ranges)  # and this thread waits for it when the row is wanted

    def _into_slot(self, key: Key, *, is_direct: bool) -> bool:
        """Have a row read or put together in a slot; False where none is to be had."""
        if (staging := self._staging) is None or (slot := staging.take(key, turn=self._turn)) is None:
            return False
        if is_direct:
            self._submit(key, partial(staging.read, slot, self._layout_of(key)), slot=slot)
        else:
            self._submit(key, partial(self._put_together, staging, slot, key), slot=slot)
        return True

    def _put_together(self, staging: Staging, slot: Slot, key: Key) -> None:
        """Copy a row from the page cache into a slot; in a reading thread."""
        ranges = self._ranges_of(key)
        reading = self._files.guard.reading(ranges)
        if not self._files.is_present(ranges):
            self._files.make_present(ranges)
        spans = self._source.spans(*key)
        pieces = [(self._files.content(span).data_ptr(), span.row_offset, span.num_bytes) for span in spans]
        staging.copy(slot, pieces, layout=self._source.layouts[key[0]])
        reading.require_whole()

    def _submit(self, key: Key, read: Callable[[], None], *, slot: Slot) -> None:
        self._reading[key] = job = Read(key, read, slot=slot, answers=self._answers)
        self._hand_over([job])

    def _hand_over(self, reads: Iterable[Read]) -> None:
        """Give reads to the threads; once more where an interrupt has left open whether they have it."""
        for job in reads:
            if job.is_handed_over:
                continue
            if not self._workers.do(job):  # no thread is to be had
                self._answers.tell(job.key, job.outcome())
            job.is_handed_over = True

    def _is_there(self, key: Key) -> bool:
        """Whether a row can be handed out now.

        Raises:
            BankError: Its read has failed.
        """
        failure = self._failed.pop(key, None)
        if failure is not None:
            raise failure
        if key in self._present:
            return True
        slot = self._slot(key)
        return slot is not None and slot.tensors is not None and key not in self._reading

    def _slot(self, key: Key) -> Slot | None:
        return None if self._staging is None else self._staging.find(key, turn=self._turn)

    def _await_one(self, waiting: Sequence[Key]) -> None:
        """Wait for one row or more: in the page cache if any is read into it, since that needs this thread."""
        paged = next((key for key in waiting if key not in self._reading), None)
        if paged is None:
            self._wait()
        else:
            self._await_page_cache(paged)
            self._collect()

    def _await_page_cache(self, key: Key) -> None:
        """Wait for a row that read_ahead() has begun, or that nobody has asked for."""
        self._files.await_present(self._ranges_of(key))
        if self._is_closed:  # by another thread
            raise banks_closed()
        self._present.add(key)

    def _wait(self) -> None:
        """Hear of one read or more that have ended."""
        self._hand_over(self._reading.values())
        self._answers.wait()
        self._collect()

    def _collect(self) -> None:
        """Hear of all reads that have ended, without waiting."""
        for key, failure in self._answers.all():
            self._hear(key, failure)
            self._answers.forget(key)

    def _hear(self, key: Key, failure: HotsplitError | None) -> None:
        """Take in how a read ended; done once more after an interrupt it changes nothing."""
        job = self._reading.get(key)
        if job is None:
            return
        if failure is not None:
            self._failed[key] = failure
            if self._staging:
                self._staging.drop(key)
        job.slot.is_reading = False
        del self._reading[key]

    def _ranges_of(self, key: Key) -> list[Span]:
        if key not in self._ranges:
            self._ranges[key] = file_ranges(self._source.spans(*key))
        return self._ranges[key]

    def _layout_of(self, key: Key) -> StagedRow:
        if key not in self._layouts:
            self._layouts[key] = stage(self._source.layouts[key[0]], self._source.spans(*key))
        return self._layouts[key]

    def _mapped(self, key: Key) -> RowTensors:
        """Views of the file; a tensor whose parts lie apart, or at an odd byte, is gathered for this once."""
        if key in self._views:
            return self._views[key]
        spans, is_gathered, tensors = self._source.spans(*key), False, {}
        for part in self._source.layouts[key[0]].tensors:
            mine = spans_of(part, spans)
            runs = joined(mine)
            if len(runs) == 1 and runs[0].offset % part.dtype.itemsize == 0:
                raw = self._files.content(runs[0])
            else:
                raw, is_gathered = torch.cat([self._files.content(span) for span in mine]), True
            tensors[part.name] = raw.view(part.dtype).view(part.shape)
        if not is_gathered:
            self._views[key] = tensors
            return tensors
        gathered = Gathered(tensors)
        self._gathered.append(weakref.ref(gathered))
        return gathered

    def _forget_gathered(self) -> None:
        """Whoever remembers a row's tensors must not keep copies of half the model alive."""
        for one in self._gathered:
            if (tensors := one()) is not None:
                tensors.clear()
        self._gathered.clear()
