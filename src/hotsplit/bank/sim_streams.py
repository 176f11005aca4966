"""Simulated streams of a GPU: what is enqueued runs only when the caller says so, in any order that a device could take.

The counterpart of sim.py one floor below: sim.py simulates a whole SwapBackend, this one the device under cuda_swaps.py,
with real addresses and real bytes. A shipped test double, for explorations and for runs without a GPU.

    streams   queues that run beside each other: compute, side, side_out
    copies    go chunk by chunk, and other streams run in between
    writes    of one word are whole, as an aligned word's are
    steps     begin and end; whatever runs on other streams in between, the step may have seen
    events    are done when their stream has come to them; a wait holds its stream back until then

Bytes lie where the caller wants them. Over a FakeDriver, streams move what torch and numpy see, by its rules. Over a
SimMemory they move immutable bytes, so that the whole machine can be forked and compared, and every state be visited.

    >>> memory = SimMemory(b"abcd....", address=4096)
    >>> streams = SimStreams(memory, num_chunks=2)
    >>> streams.copy(4100, source=4096, num_bytes=4, stream=streams.handle("side"))
    >>> event = streams.record("side")
    >>> streams.wait("compute", event)
    >>> streams.enabled()
    ('side',)
    >>> streams.advance("side")
    >>> memory.content, streams.query(event)
    (b'abcdab..', False)
    >>> streams.drain()
    >>> memory.content, streams.query(event)
    (b'abcdabcd', True)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from hotsplit.bank.driver import driver_error
from hotsplit.bank.sim import STREAMS
from hotsplit.bank.streams import StreamCalls
from hotsplit.bank.swap import Stream
from hotsplit.errors import BankError

_WORD_BYTES: Final = 4


class SimMemory:
    """Bytes at addresses of their own; a write makes new ones (a StreamCalls, in which everything happens at once).

    Args:
        content: The bytes as they are at first.
        address: Of the first one.
    """

    def __init__(self, content: bytes, *, address: int) -> None:
        self.content = content
        """All bytes as they are now."""
        self.address = address
        """Of the first one."""

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Copy bytes."""
        start = self._offset(source, num_bytes=num_bytes, call="cuMemcpyAsync")
        self._write(target, self.content[start : start + num_bytes], call="cuMemcpyAsync")

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Write one word."""
        self._write(address, (value & 0xFFFFFFFF).to_bytes(_WORD_BYTES, "little"), call="cuMemsetD32Async")

    def fork(self) -> SimMemory:
        """An independent twin with the same bytes."""
        return copy.copy(self)

    def _write(self, address: int, data: bytes, *, call: str) -> None:
        start = self._offset(address, num_bytes=len(data), call=call)
        self.content = b"".join((self.content[:start], data, self.content[start + len(data) :]))

    def _offset(self, address: int, *, num_bytes: int, call: str) -> int:
        offset = address - self.address
        if not 0 <= offset <= len(self.content) - num_bytes:
            raise driver_error(call, name="CUDA_ERROR_ILLEGAL_ADDRESS", detail=f"{num_bytes} bytes at {address}")
        return offset


class _Record(NamedTuple):
    event: int


class _Wait(NamedTuple):
    event: int


class _Copy(NamedTuple):
    target: int
    source: int
    num_bytes: int
    """What is left."""
    chunk_bytes: int


class _Write(NamedTuple):
    address: int
    value: int


class _Step(NamedTuple):
    is_running: bool


_Work: TypeAlias = _Record | _Wait | _Copy | _Write | _Step


class SimStreams:
    """The streams of one device, and the calls that run on them (a Streams and a StreamCalls).

    Args:
        memory: Where a chunk of a copy or a word is moved, at once, when its turn comes.
        num_chunks: Pieces of a copy.
        failing_copies: Ordinals of the copies, counted from 0 as they are asked for, that are refused.
    """

    def __init__(self, memory: StreamCalls, *, num_chunks: int = 1, failing_copies: Collection[int] = ()) -> None:
        self._memory, self._num_chunks = memory, num_chunks
        self._failing_copies = frozenset(failing_copies)
        self._queues: dict[Stream, tuple[_Work, ...]] = dict.fromkeys(STREAMS, ())
        self._pending: frozenset[int] = frozenset()
        self._num_events = 0
        self._num_asked = 0
        self._is_capturing = False

    # What a backend calls.

    def handle(self, stream: Stream) -> int:
        """The stream's number, from 1 on."""
        return STREAMS.index(stream) + 1

    def record(self, stream: Stream) -> int:
        """A fresh event: a number."""
        self._require_no_capture("cuEventRecord")
        event, self._num_events = self._num_events, self._num_events + 1
        self._pending |= {event}
        self._enqueue(stream, _Record(event))
        return event

    def wait(self, stream: Stream, event: int) -> None:
        """Hold the stream back until the event is done."""
        self._require_no_capture("cuStreamWaitEvent")
        self._enqueue(stream, _Wait(event))

    def query(self, event: int) -> bool:
        """Whether the event is done."""
        self._require_no_capture("cuEventQuery")
        return event not in self._pending

    def is_capturing(self) -> bool:
        """Whether capture() is under way."""
        return self._is_capturing

    def synchronize(self, stream: Stream) -> None:
        """Run the stream to its end, and of the others what it waits for.

        Raises:
            BankError: It would never end.
        """
        while self._queues[stream]:
            streams = self.enabled()
            if not streams:
                raise _deadlock()
            self.advance(stream if stream in streams else streams[0])

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy, chunk by chunk.

        Raises:
            BankError: It is one of those that fail, or the stream is none.
        """
        self._require_no_capture("cuMemcpyAsync")
        name = self._name(stream, call="cuMemcpyAsync")
        ordinal, self._num_asked = self._num_asked, self._num_asked + 1
        if ordinal in self._failing_copies:
            raise driver_error("cuMemcpyAsync", name="CUDA_ERROR_OUT_OF_MEMORY", detail="a simulated failure")
        self._enqueue(name, _Copy(target, source, num_bytes, -(-num_bytes // self._num_chunks)))

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue the write of one word.

        Raises:
            BankError: The stream is none.
        """
        self._require_no_capture("cuMemsetD32Async")
        self._enqueue(self._name(stream, call="cuMemsetD32Async"), _Write(address, value))

    # What the engine does.

    def launch_step(self) -> None:
        """Enqueue one engine step on the compute stream."""
        self._enqueue("compute", _Step(is_running=False))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A graph is captured inside: any call of a backend is refused, and would have broken the capture."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    # What the caller lets happen.

    def num_steps(self) -> int:
        """Engine steps launched and not finished."""
        return sum(isinstance(work, _Step) for work in self._queues["compute"])

    def is_stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        first = self._queues["compute"][:1]
        return any(isinstance(work, _Step) and work.is_running for work in first)

    def num_copies(self) -> int:
        """Copies enqueued and not finished."""
        return sum(isinstance(work, _Copy) for queue in self._queues.values() for work in queue)

    def is_empty(self) -> bool:
        """Whether nothing is enqueued; with nothing enabled and this False, the streams are deadlocked."""
        return not any(self._queues.values())

    def enabled(self) -> tuple[Stream, ...]:
        """Streams whose next piece of work may run now."""
        return tuple(stream for stream in STREAMS if self._may_run(stream))

    def advance(self, stream: Stream) -> None:
        """Do the stream's next piece of work.

        Args:
            stream: One of enabled().

        Raises:
            BankError: It is not, or the memory refuses.
        """
        if not self._may_run(stream):
            raise BankError(f"simulated stream {stream}", got="nothing to run", wanted="one of enabled()")
        work, rest = self._queues[stream][0], self._queues[stream][1:]
        following = self._run(work, stream=self.handle(stream))
        self._queues[stream] = rest if following is None else (following, *rest)

    def drain(self, *, choose: Callable[[Sequence[Stream]], Stream] = lambda streams: streams[0]) -> None:
        """Do everything that is enqueued.

        Args:
            choose: Picks the stream that goes next, out of the enabled ones.

        Raises:
            BankError: The streams wait for each other, or the memory refuses.
        """
        while streams := self.enabled():
            self.advance(choose(streams))
        if not self.is_empty():
            raise _deadlock()

    # What an exploration needs.

    def fork(self, memory: StreamCalls) -> SimStreams:
        """An independent twin in the same state.

        Args:
            memory: The twin's, with the same bytes.
        """
        twin = copy.copy(self)
        twin._memory, twin._queues = memory, dict(self._queues)
        return twin

    def key(self) -> Hashable:
        """All that decides what can happen next, but for the bytes; the numbers of events do not matter."""
        queues = tuple(tuple(self._work_key(work) for work in self._queues[stream]) for stream in STREAMS)
        num_asked = min(self._num_asked, max(self._failing_copies, default=-1) + 1)
        return (queues, num_asked, self._is_capturing)

    def event_key(self, event: int) -> Hashable:
        """What distinguishes an event for the future: done, or where it stands in which queue."""
        if event in self._pending:
            for stream in STREAMS:
                events = [work.event for work in self._queues[stream] if isinstance(work, _Record)]
                if event in events:
                    return (stream, events.index(event))
        return "done"

    def _enqueue(self, stream: Stream, work: _Work) -> None:
        self._queues[stream] = (*self._queues[stream], work)

    def _may_run(self, stream: Stream) -> bool:
        work = next(iter(self._queues[stream]), None)
        return work is not None and not (isinstance(work, _Wait) and work.event in self._pending)

    def _run(self, work: _Work, *, stream: int) -> _Work | None:
        """Do one piece of work; returns what is left of it."""
        match work:
            case _Record(event):
                self._pending -= {event}
            case _Copy(target, source, num_bytes, chunk_bytes):
                size = min(num_bytes, chunk_bytes)
                self._memory.copy(target, source=source, num_bytes=size, stream=stream)
                if size < num_bytes:
                    return _Copy(target + size, source + size, num_bytes - size, chunk_bytes)
            case _Write(address, value):
                self._memory.write32(address, value=value, stream=stream)
            case _Step(is_running=False):
                return _Step(is_running=True)
        return None

    def _work_key(self, work: _Work) -> Hashable:
        match work:
            case _Record():
                return "record"
            case _Wait(event):
                return ("wait", self.event_key(event))
            case _:
                return (type(work).__name__, *work)

    def _name(self, handle: int, *, call: str) -> Stream:
        if not 1 <= handle <= len(STREAMS):
            raise driver_error(call, name="CUDA_ERROR_INVALID_HANDLE", detail=f"stream {handle}")
        return STREAMS[handle - 1]

    def _require_no_capture(self, call: str) -> None:
        if self._is_capturing:
            raise driver_error(call, name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", detail="a graph is captured")


def _deadlock() -> BankError:
    return BankError("simulated streams", got="a deadlock", wanted="work that ends")
