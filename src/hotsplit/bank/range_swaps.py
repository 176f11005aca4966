"""The swap protocol's streams over stitched ranges: steps on the caller's thread, copies on one worker thread.

The compute stream is the calling thread: what was enqueued there has run by the time the call returns, so its events
are born done. The side stream is one worker thread that copies rows both ways, in the order they were enqueued; its
events are its jobs. Placement is exclusive: the cold row of an incoming expert takes the outgoing one.
"""

from __future__ import annotations

from functools import partial

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.route import StepRouter
from hotsplit.bank.swap import Stream, WaitName
from hotsplit.bank.workers import Job, Workers
from hotsplit.errors import BankError, SwapError

_Event = Job[None] | None
"""The last job of the side stream when the event was recorded; None where everything is done already."""


class RangeSwapBackend:
    """Rows in ranges behind the swap protocol (a SwapBackend).

    Args:
        rows: The memory, with every layer registered.
        router: Owns the row maps that a publish writes to.
    """

    def __init__(self, rows: RangeRows, *, router: StepRouter) -> None:
        self._rows = rows
        self._router = router
        self._worker = Workers(1, name="hotsplit-side")
        self._last: _Event = None
        self.copied_bytes = 0
        """Bytes of finished copies, both ways; written by the worker alone."""

    def is_capturing(self) -> bool:
        """Never: a CPU captures no graphs."""
        return False

    def record(self, stream: Stream) -> _Event:
        """An event behind everything enqueued on the stream so far.

        Args:
            stream: "compute", "side", or "side_out", which is the same worker.
        """
        return None if stream == "compute" else self._last

    def wait(self, stream: Stream, event: _Event, why: WaitName) -> None:
        """Order the stream behind the event.

        Only compute ever has to: the worker runs its jobs one after the other, and what compute enqueues is done.

        Args:
            stream: Which waits.
            event: For what.
            why: The protocol's name of the wait.

        Raises:
            SwapError: The copy before it failed.
        """
        if stream == "compute" and event is not None:
            event.wait()
            self.query(event)

    def query(self, event: _Event) -> bool:
        """Whether the event is done.

        Args:
            event: From record().

        Raises:
            SwapError: The copy before it failed, or was given up by close().
        """
        if event is None or not event.is_done:
            return event is None
        if event.is_given_up:
            raise SwapError("a copy of an expert row was given up", got="a closed bank")
        failure = event.failure
        if failure is not None:
            raise SwapError("a copy of an expert row failed", got=str(failure)) from failure
        return True

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of one row, all of its tensors.

        Args:
            stream: "side" or "side_out".
            layer_id: Ordinal among MoE layers.
            source_row: Where the expert lies.
            target_row: A row that belongs to nobody.

        Raises:
            SwapError: The bank is closed, or the copy would run on the thread of the steps.
        """
        if stream == "compute":
            raise SwapError(f"layer_id {layer_id}", got="a copy on the compute stream", wanted="on the side stream")
        job = Job(partial(self._copy, layer_id, source_row, target_row))
        try:
            if not self._worker.do(job):  # no thread is to be had
                job()
        except BankError as error:
            raise SwapError(f"layer_id {layer_id}", got=f"a closed bank ({error})", wanted="an open one") from error
        self._last = job

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Write one entry of the row map.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
            row: Its row from now on.
        """
        self._router.publish(layer_id, expert=expert, row=row)

    def close(self) -> None:
        """Finish the copy under way, forget the queued ones, and let the thread go; before the rows are closed."""
        self._worker.close()

    def _copy(self, layer_id: int, source_row: int, target_row: int) -> None:
        self.copied_bytes += self._rows.copy_row(layer_id, source_row=source_row, target_row=target_row)
