"""The swap protocol's streams on a CPU: steps run on the caller's thread, copies on one worker thread.

The compute stream is the calling thread itself: what was enqueued there has run by the time the call returns, so its
events are born done and waiting for them costs nothing. The side stream is one worker thread that brings rows into the
arena, from their slots or from the files; its events are its jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hotsplit.bank.direct import DirectReader
from hotsplit.bank.pointers import PointerRows
from hotsplit.bank.route import Router
from hotsplit.bank.swap import Stream, WaitName
from hotsplit.bank.workers import Job, Workers
from hotsplit.errors import BankError, SwapError
from hotsplit.host.threads import stay_behind

_Event = Job[None] | None
"""The last job of the side stream when the event was recorded; None on the compute stream: always done."""


class CpuSwapBackend:
    """Pointer rows behind the swap protocol (a SwapBackend).

    Args:
        rows: Arena and files.
        router: Owns the row maps that a publish writes to.
        files: The checkpoint's files, for the worker's own direct reads.
    """

    def __init__(self, rows: PointerRows, *, router: Router, files: Sequence[Path]) -> None:
        self._rows = rows
        self._router = router
        self._reader = DirectReader(files, uses_cache=True)
        self._worker = Workers(1, name="hotsplit-side", prepare=stay_behind)
        self._last: _Event = None
        self.copied_bytes = 0
        """Bytes of finished copies; written by the worker alone."""

    def record(self, stream: Stream) -> _Event:
        """An event behind everything enqueued on the stream so far.

        Args:
            stream: "compute" or "side".
        """
        return None if stream == "compute" else self._last

    def wait(self, stream: Stream, event: _Event, why: WaitName) -> None:
        """Order the stream behind the event.

        The worker runs its jobs one after the other and the compute stream is synchronous, so there is nothing to
        enqueue unless compute waits for a copy; the product queries first, and then the copy is done already.

        Args:
            stream: Which waits.
            event: For what.
            why: The protocol's name of the wait.
        """
        if stream == "compute" and event is not None:
            event.result()

    def query(self, event: _Event) -> bool:
        """Whether the event is done.

        Args:
            event: From record().

        Raises:
            SwapError: The copy before it failed.
        """
        if event is None or not event.is_done:
            return event is None
        failure = event.failure
        if failure is not None:
            raise SwapError("a copy into a hot row failed", got=str(failure)) from failure
        return True

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of a home row into a hot row.

        Args:
            stream: "side".
            layer_id: Ordinal among MoE layers.
            source_row: A home row.
            target_row: The spare row.

        Raises:
            SwapError: The source is no home row: nothing is ever written back here.
            BankError: The thread is closed.
        """
        if stream == "compute" or self._rows.is_hot(layer_id, source_row):
            raise SwapError(f"layer {layer_id}", got=f"a copy of row {source_row} on {stream}", wanted="a home row")
        expert = self._rows.expert_at(layer_id, source_row)
        job = Job(partial(self._fill, layer_id, expert, target_row))
        if not self._worker.do(job):  # no thread is to be had
            job()
        self._last = job

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Write one entry of the row map.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
            row: Its row from now on.
        """
        self._router.publish(layer_id, expert=expert, row=row)
        if self._rows.is_hot(layer_id, row):
            self._rows.let_go(layer_id, expert=expert)

    def close(self) -> None:
        """Finish the copy under way, forget the queued ones, and let the thread and the files go."""
        try:
            self._worker.close()
        finally:
            self._reader.close()

    def _fill(self, layer_id: int, expert: int, row: int) -> None:
        try:
            self.copied_bytes += self._rows.fill(layer_id, expert=expert, row=row, reader=self._reader)
        except (OSError, ValueError) as error:
            raise BankError(f"layer {layer_id}, expert {expert}", got=str(error)) from error
