"""The simulated backend: streams, events and rows that run in any order the caller chooses.

A shipped test double for everything that stands on a SwapBackend. Nothing runs by itself: the caller picks the stream
whose next piece of work is done (a copy goes part by part, other streams may run in between), so a test can try every
interleaving that a device could. Bytes know their owner: each part of a row holds the id of the expert whose it is.

    rows     layer 0   row 0: (0, 0)   row 1: (-1, -1)   row 2: (1, 1)      one number per part, -1 = nobody's bytes
    parts    tensor by tensor (weights, scales), each in chunks
    compute  publish, record, step, step          an engine step reads every expert through the map, begin to end
    side     wait, copy part 0, copy part 1, record

After every piece of work the backend checks itself, and raises SimViolation when
- a map entry names a row that does not exist, or that another expert's entry names too;
- a map entry names bytes that are not wholly that expert's, in all tensors (torn, stale; lost if no row has them whole);
- an entry changed while a step ran;
- a copy writes to a row that an entry names, or to slow memory that keeps all experts (inclusive placement).

    >>> from hotsplit.bank.rows import place
    >>> backend = SimBackend([place((0,), num_experts=2, spare=True, inclusive=False)])
    >>> backend.copy("side", layer_id=0, source_row=2, target_row=1)
    >>> backend.publish(0, expert=1, row=1)  # without waiting for the copy
    >>> backend.advance("side")
    >>> backend.enabled()
    ('compute', 'side')
    >>> backend.advance("compute")
    Traceback (most recent call last):
    hotsplit.bank.sim.SimViolation: layer_id 0, expert 1: got row 1 with bytes of experts (1, -1); wanted its own bytes
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from hotsplit.bank.rows import LayerRows
from hotsplit.bank.swap import Stream, WaitName
from hotsplit.errors import BankError, SwapError

NOBODY = -1
"""Owner of bytes that belong to no expert."""

STREAMS: tuple[Stream, ...] = ("compute", "side", "side_out")

_T = TypeVar("_T")
_RowMaps: TypeAlias = tuple[tuple[int, ...], ...]


class SimViolation(BankError):  # noqa: N818 - it is the finding of an exploration, not an error of its caller
    """The swap protocol let a step read, or could have let it read, a wrong byte."""


class _Record(NamedTuple):
    event: int


class _Wait(NamedTuple):
    event: int


class _Copy(NamedTuple):
    layer_id: int
    source_row: int
    target_row: int
    part: int
    fails_at: int | None


class _Publish(NamedTuple):
    layer_id: int
    expert: int
    row: int


class _Step(NamedTuple):
    row_maps: _RowMaps | None
    """What the step reads through; None before it begins."""


_Work: TypeAlias = _Record | _Wait | _Copy | _Publish | _Step


class SimBackend:
    """One rank's memory and streams, simulated; a SwapBackend.

    Args:
        layouts: Rows per layer, L of them, either placement.
        num_tensors: Tensors per row (weights and scales: 2).
        num_chunks: Pieces in which each of them is copied.
        failing_copies: Ordinals of the copies, counted from 0 as they are enqueued, that fail halfway.
    """

    def __init__(
        self,
        layouts: Sequence[LayerRows],
        *,
        num_tensors: int = 2,
        num_chunks: int = 1,
        failing_copies: Collection[int] = (),
    ) -> None:
        self._layouts = tuple(layouts)
        self._num_parts = num_tensors * num_chunks
        self._failing_copies = frozenset(failing_copies)
        self._memory = tuple(_initial_rows(rows, num_parts=self._num_parts) for rows in layouts)
        self._row_maps: _RowMaps = tuple(rows.row_map for rows in layouts)
        self._queues: dict[Stream, tuple[_Work, ...]] = dict.fromkeys(STREAMS, ())
        self._pending: frozenset[int] = frozenset()
        self._failed: frozenset[int] = frozenset()
        self._poisoned: frozenset[Stream] = frozenset()
        self._num_events = 0
        self._num_copies = 0
        self.check()

    def record(self, stream: Stream) -> int:
        """A fresh event: a number."""
        event, self._num_events = self._num_events, self._num_events + 1
        self._pending |= {event}
        self._enqueue(stream, _Record(event))
        return event

    def wait(self, stream: Stream, event: int, why: WaitName) -> None:
        """Hold `stream` back until `event` is done."""
        self._enqueue(stream, _Wait(event))

    def query(self, event: int) -> bool:
        """Whether `event` is done.

        Raises:
            SwapError: The copy before it failed.
        """
        if event in self._failed:
            raise SwapError("row copy", got="a simulated failure", event=event)
        return event not in self._pending

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of one row, part by part."""
        fails_at = self._num_parts // 2 if self._num_copies in self._failing_copies else None
        self._num_copies += 1
        self._enqueue(stream, _Copy(layer_id, source_row, target_row, 0, fails_at))

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Enqueue one write to the row map."""
        self._enqueue("compute", _Publish(layer_id, expert, row))

    def launch_step(self) -> None:
        """Enqueue one engine step, which reads every expert of every layer."""
        self._enqueue("compute", _Step(None))

    def num_steps(self) -> int:
        """Engine steps launched and not finished."""
        return sum(isinstance(work, _Step) for work in self._queues["compute"])

    def enabled(self) -> tuple[Stream, ...]:
        """Streams whose next piece of work may run now."""
        return tuple(stream for stream in STREAMS if self._may_run(stream))

    def is_copying(self, stream: Stream) -> bool:
        """Whether the stream's next piece of work is part of a copy."""
        return isinstance(next(iter(self._queues[stream]), None), _Copy)

    def is_empty(self) -> bool:
        """Whether nothing is enqueued; with nothing enabled and this False, the streams are deadlocked."""
        return not any(self._queues.values())

    def advance(self, stream: Stream, *, fail: bool = False) -> None:
        """Do the stream's next piece of work.

        Args:
            stream: One of enabled().
            fail: End the copy that stands there with a failure, its remaining parts unwritten.

        Raises:
            SimViolation: The state after it, or the work itself, breaks a rule of the protocol.
            BankError: The stream is not enabled, or `fail` is asked of something that is no copy.
        """
        if not self._may_run(stream) or (fail and not self.is_copying(stream)):
            raise BankError(f"simulated stream {stream}", got="nothing to run or to fail", wanted="one of enabled()")
        work, rest = self._queues[stream][0], self._queues[stream][1:]
        following = self._run(work, stream=stream, fail=fail)
        self._queues[stream] = rest if following is None else (following, *rest)
        self.check()

    def drain(self, *, choose: Callable[[Sequence[Stream]], Stream] = lambda streams: streams[0]) -> None:
        """Do everything that is enqueued.

        Args:
            choose: Picks the stream that goes next, out of the enabled ones.

        Raises:
            SimViolation: As advance().
            BankError: The streams wait for each other.
        """
        while streams := self.enabled():
            self.advance(choose(streams))
        if not self.is_empty():
            raise BankError("simulated streams", got="a deadlock", wanted="work that ends")

    def row_map(self, layer_id: int) -> tuple[int, ...]:
        """The row map as a step that begins now would see it, [E]."""
        return self._row_maps[layer_id]

    def owners(self, layer_id: int, *, row: int) -> tuple[int, ...]:
        """Whose bytes each part of a row holds, tensor by tensor."""
        return self._memory[layer_id][row]

    def fork(self) -> SimBackend:
        """An independent twin in the same state."""
        twin = copy.copy(self)
        twin._queues = dict(self._queues)
        return twin

    def key(self) -> Hashable:
        """All that decides what can happen next; twins with equal keys behave alike, whatever their events' numbers."""
        queues = tuple(tuple(self._work_key(work) for work in self._queues[stream]) for stream in STREAMS)
        return (self._memory, self._row_maps, queues, self._poisoned)

    def event_key(self, event: int) -> Hashable:
        """What distinguishes an event for the future: done, failed, or where it stands in which queue."""
        if event in self._pending:
            for stream in STREAMS:
                events = [work.event for work in self._queues[stream] if isinstance(work, _Record)]
                if event in events:
                    return (stream, events.index(event))
        return "failed" if event in self._failed else "done"

    def check(self) -> None:
        """Check every rule that holds in every state.

        Raises:
            SimViolation: One does not; the message names layer, expert, row and owners.
        """
        running = next(iter(self._queues["compute"]), None)
        if isinstance(running, _Step) and running.row_maps not in (None, self._row_maps):
            raise SimViolation(
                "row map", got="an entry that changed while a step ran", wanted="publishes between steps"
            )
        for layer_id in range(len(self._layouts)):
            self._check_layer(layer_id)

    def _enqueue(self, stream: Stream, work: _Work) -> None:
        self._queues[stream] = (*self._queues[stream], work)

    def _may_run(self, stream: Stream) -> bool:
        work = next(iter(self._queues[stream]), None)
        return work is not None and not (isinstance(work, _Wait) and work.event in self._pending)

    def _run(self, work: _Work, *, stream: Stream, fail: bool) -> _Work | None:
        """Do one piece of work; returns what is left of it."""
        match work:
            case _Record(event):
                self._pending -= {event}
                self._failed |= {event} if stream in self._poisoned else frozenset()
                self._poisoned -= {stream}
            case _Publish(layer_id, expert, row):
                row_map = self._row_maps[layer_id]
                self._row_maps = _put(self._row_maps, layer_id, _put(row_map, expert, row))
            case _Copy():
                return self._run_copy(work, stream=stream, fail=fail or work.fails_at == work.part)
            case _Step(None):
                return _Step(self._row_maps)
        return None

    def _run_copy(self, work: _Copy, *, stream: Stream, fail: bool) -> _Copy | None:
        if fail:
            self._poisoned |= {stream}
            return None
        self._check_target(work)
        rows, part = self._memory[work.layer_id], work.part
        target = _put(rows[work.target_row], part, rows[work.source_row][part])
        self._memory = _put(self._memory, work.layer_id, _put(rows, work.target_row, target))
        return work._replace(part=part + 1) if part + 1 < self._num_parts else None

    def _check_target(self, work: _Copy) -> None:
        layer_id, row = work.layer_id, work.target_row
        if row in self._row_maps[layer_id]:
            raise _violation(layer_id, expert=self._row_maps[layer_id].index(row), got=f"its row {row} written to")
        if row in (self._layouts[layer_id].home_row or ()):
            raise SimViolation(f"layer_id {layer_id}, row {row}", got="a write", wanted="slow memory left as it is")

    def _check_layer(self, layer_id: int) -> None:
        row_map, rows = self._row_maps[layer_id], self._memory[layer_id]
        for expert, row in enumerate(row_map):
            if not 0 <= row < len(rows):
                raise _violation(layer_id, expert=expert, got=f"row {row}", wanted=f"one of {len(rows)} rows")
            if row_map.index(row) != expert:
                raise _violation(layer_id, expert=expert, got=f"row {row}, which expert {row_map.index(row)} has too")
            whole = (expert,) * self._num_parts
            if rows[row] != whole:
                lost = "" if whole in rows else ", lost everywhere"
                raise _violation(layer_id, expert=expert, got=f"row {row} with bytes of experts {rows[row]}{lost}")

    def _work_key(self, work: _Work) -> Hashable:
        match work:
            case _Record():
                return "record"
            case _Wait(event):
                return ("wait", self.event_key(event))
            case _:
                return (type(work).__name__, *work)


def _initial_rows(rows: LayerRows, *, num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Contents per row: its expert's in rows that are mapped and in home rows, nobody's elsewhere."""
    owner = {row: expert for expert, row in enumerate(rows.home_row or ())}
    owner |= {row: expert for expert, row in enumerate(rows.row_map)}
    return tuple((owner.get(row, NOBODY),) * num_parts for row in range(rows.num_rows))


def _put(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _violation(layer_id: int, *, expert: int, got: str, wanted: str = "its own bytes") -> SimViolation:
    what = f"layer_id {layer_id}, expert {expert}"
    return SimViolation(what, got=got, wanted=wanted, layer_id=layer_id, expert=expert)
