"""Streams and events as the swaps need them: which stream is which, and what has come to its end.

Below cuda_swaps.py, beside driver.py, whose calls run on these streams:

    compute    the stream that is current in the calling thread: where the engine launches steps and replays graphs
    side       a stream of its own for the copies of rows; side_out is the same one

TorchStreams are the streams of a GPU, by way of torch, so that both speak of the same ones. sim_streams.py has streams
that run in any order, for machines without a GPU.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

import torch

from hotsplit.bank.swap import Stream

StreamEvent: TypeAlias = Any
"""What record() returned, handed back unread; Any, because only its maker knows its type."""

_LEGACY_STREAM: Final = 1
"""CU_STREAM_LEGACY: torch's default stream by a name that nobody's settings change."""


class Streams(Protocol):
    """The streams of one rank. Called only from the thread that launches the steps."""

    def handle(self, stream: Stream) -> int:
        """What the driver knows the stream by."""

    def record(self, stream: Stream) -> StreamEvent:
        """A fresh event, done once all that is enqueued on the stream so far is done."""

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Let what is enqueued on the stream from now on start only after the event; the caller goes on at once."""

    def query(self, event: StreamEvent) -> bool:
        """Whether the event is done, without waiting for it."""

    def is_capturing(self) -> bool:
        """Whether what this thread enqueues is being captured in a graph instead of run."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until all that is enqueued on the stream is done: the one call that waits, for the end of a run."""


class StreamCalls(Protocol):
    """The calls of a Driver that run on a stream, which driver.py describes."""

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy by address."""

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue the write of one aligned 32-bit word, its value taken now."""


class TorchStreams:
    """Streams of a GPU (a Streams, which says what each method does). Made only where there is one.

    An engine may change its current stream, as vLLM does once and a user of a model may at any time. Where it has, the
    new stream is ordered behind the one before, so that all steps and publishes stay in one order.

    NOTE: it sees the current stream only when it is called. Steps that run beside others, on a stream where none of
    these calls is made, must be joined by whoever launches them.

    An error of the device's earlier work comes out of any call as torch raises it; it is no failure of a swap.

    Args:
        device: Ordinal among the visible devices.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device=device)
        self._compute: torch.cuda.Stream | None = None
        self._kept: list[torch.cuda.Event] = []  # events that are not done stay, whoever forgets them

    def handle(self, stream: Stream) -> int:
        """What the driver knows the stream by, torch's default stream included.

        Not 0 for that one: cuda.bindings takes 0 for another stream where CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM
        is set, and nothing written there would be in any order with the steps.

        Args:
            stream: Which.
        """
        return int(self._stream(stream).cuda_stream) or _LEGACY_STREAM

    def record(self, stream: Stream) -> StreamEvent:
        """A fresh event.

        Args:
            stream: Where.
        """
        self._kept = [event for event in self._kept if not event.query()]
        event = self._stream(stream).record_event()
        self._kept.append(event)
        return event

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Order the stream behind the event.

        Args:
            stream: Which waits.
            event: From record().
        """
        self._stream(stream).wait_event(event)

    def query(self, event: StreamEvent) -> bool:
        """Whether the event is done.

        Args:
            event: From record().
        """
        return bool(event.query())

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def synchronize(self, stream: Stream) -> None:
        """Wait for the end of the stream.

        Args:
            stream: Which.
        """
        self._stream(stream).synchronize()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream != "compute":
            return self._side
        current = torch.cuda.current_stream(self._device)
        if self._compute is not None and self._compute != current:
            current.wait_stream(self._compute)
        self._compute = current
        return current
