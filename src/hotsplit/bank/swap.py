"""The swap protocol: one cold expert comes in, one hot expert goes out, and no step ever reads a wrong byte.

Stands between the rebalancer, which asks for swaps, and the memory, which a SwapBackend moves. It decides when a copy
may start and when a row map entry may change; it knows neither torch nor a device, and the tests explore this very
class on the simulated backend of sim.py.

Work is ordered on *streams*, queues that run one after the other inside and at once with each other: steps and
publishes go to `compute`, copies to `side` (write-backs to `side_out` where there are two side streams). Exclusive
placement, one swap in flight per layer:

    1  copy     cold row of IN -> spare row             side stream, waits (w1) for the spare row's free event
    2  publish  row_map[IN] = spare row                 compute, waits (w2) for copy 1
    3  copy     hot row of OUT -> IN's old cold row     side stream, waits (w3) for publish 2
    4  publish  row_map[OUT] = that cold row            compute, waits (w4) for copy 3
    5  OUT's old hot row is the new spare               its free event is recorded after publish 4

Inclusive placement: 1, 2, then OUT maps back to its home row, which always kept its bytes; nothing is written back.

A failed copy loses nothing. Copy 1: the map is as it was and the spare row is still nobody's, so the swap is dropped.
Copy 3: both experts are valid in hot rows, no row is spare, so the write-back is tried again until it succeeds.

    >>> from hotsplit.bank.rows import place
    >>> from hotsplit.bank.sim import SimBackend
    >>> layouts = [place((0,), num_experts=3, spare=True, inclusive=False)]
    >>> backend = SimBackend(layouts)
    >>> swapper = Swapper(backend, layouts=layouts)
    >>> swapper.row_map(0), swapper.spare_row(0)
    ((0, 2, 3), 1)
    >>> swapper.request(0, expert_in=2, expert_out=0)
    True
    >>> while not swapper.is_idle():
    ...     result = swapper.tick()  # between two steps
    ...     backend.drain()
    >>> result.published
    (Swap(layer_id=0, expert_in=2, expert_out=0),)
    >>> swapper.row_map(0), swapper.spare_row(0)
    ((3, 2, 1), 0)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from hotsplit.bank.rows import LayerRows
from hotsplit.errors import SwapError
from hotsplit.plan.rebalance import Swap

Stream: TypeAlias = Literal["compute", "side", "side_out"]
WaitName: TypeAlias = Literal["w1", "w2", "w3", "w4"]
PublishRule: TypeAlias = Literal["done", "enqueued"]
# Whatever a backend's record() returns, handed back to it unread; Any, because only the backend knows its type.
Event: TypeAlias = Any


class SwapBackend(Protocol):
    """The memory and the streams of one rank. Called only from the thread that launches the steps."""

    def record(self, stream: Stream) -> Event:
        """A fresh event, done once all that is enqueued on `stream` so far is done; None where it is done already."""

    def wait(self, stream: Stream, event: Event, why: WaitName) -> None:
        """Let what is enqueued on `stream` from now on start only after `event`; `why` names the wait."""

    def query(self, event: Event) -> bool:
        """Whether `event` is done, without waiting for it.

        Raises:
            SwapError: The copy recorded by `event` failed; it has ended and writes no more.
        """

    def copy(self, stream: Stream, *, layer_id: int, source_row: int, target_row: int) -> None:
        """Enqueue the copy of one row, all of its tensors.

        Raises:
            SwapError: It could not be enqueued as a whole.
        """

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Enqueue row_map[expert] = row on `compute`: one small write, by value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TickResult:
    """What one tick did."""

    published: tuple[Swap, ...] = ()
    """Swaps completed for the steps that are launched from now on."""
    failed: tuple[tuple[Swap, str], ...] = ()
    """Failed copies: the swap and the error's text. A swap whose write-back fails comes again, every time it fails."""
    copied_layers: tuple[int, ...] = ()
    """The layer_id of every row copy that was enqueued."""


_NOTHING = TickResult()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    """A swap that has left the queue, and the rows it moves between."""

    swap: Swap
    cold_row: int
    """IN's row before the swap."""
    spare_row: int
    """IN's row after it."""
    hot_row: int
    """OUT's row before it, the spare row after it."""
    out_row: int
    """OUT's row after it: IN's old cold row, or OUT's home row."""
    is_in: bool = False
    """Whether IN is published: the copy is the write-back then."""
    published: Event | None = None
    """Recorded after that."""
    is_copying: bool = False
    """Whether its copy is enqueued; a write-back that failed is not, until the next tick."""
    copied: Event | None = None
    """Recorded after that copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """All that is known of one layer; replaced, never changed, so that fork() and snapshot() are cheap and exact."""

    rows: LayerRows
    row_map: tuple[int, ...]
    """As the steps launched from now on will see it."""
    spare_row: int | None
    free: Event | None = None
    """Recorded after the publish that made the spare row nobody's."""
    queue: tuple[Swap, ...] = ()
    flight: _Flight | None = None

    def is_hot(self, expert: int) -> bool:
        return self.row_map[expert] < self.rows.first_cold

    def take_off(self, swap: Swap, *, spare_row: int) -> _Flight:
        """The flight of the next swap, planned from the map as it is now."""
        cold_row = self.row_map[swap.expert_in]
        home = self.rows.home_row
        return _Flight(
            swap=swap,
            cold_row=cold_row,
            spare_row=spare_row,
            hot_row=self.row_map[swap.expert_out],
            out_row=cold_row if home is None else home[swap.expert_out],
        )


@dataclass(kw_only=True, slots=True)
class _Report:
    """Collects one tick's result."""

    published: list[Swap] = field(default_factory=list)
    failed: list[tuple[Swap, str]] = field(default_factory=list)
    copied_layers: list[int] = field(default_factory=list)

    def result(self) -> TickResult:
        published, failed, copied_layers = tuple(self.published), tuple(self.failed), tuple(self.copied_layers)
        return TickResult(published=published, failed=failed, copied_layers=copied_layers)


class Swapper:
    """The swaps of all layers of one rank, driven by the thread that launches the steps.

    Call tick() between any two steps. An update (the rebalancer's) takes busy() first, then requests its swaps, all
    before the next tick: requests between two ticks belong to one update, and several of them may queue in one layer.

    Args:
        backend: Memory and streams.
        layouts: Rows per layer as the banks were built, L of them.
        publish: "done", the product's rule, publishes what a query says is done. "enqueued" leans on the waits alone
            and never queries, so a failed copy would go unseen: explorations prove with it that each wait is needed.
        side_streams: 1, or 2 to write back on a stream of its own.
    """

    def __init__(
        self,
        backend: SwapBackend,
        *,
        layouts: Sequence[LayerRows],
        publish: PublishRule = "done",
        side_streams: Literal[1, 2] = 1,
    ) -> None:
        self._backend = backend
        self._publish_rule = publish
        self._out_stream: Stream = "side" if side_streams == 1 else "side_out"
        self._layers = [_Layer(rows=rows, row_map=rows.row_map, spare_row=rows.spare_row) for rows in layouts]
        self._active: set[int] = set()
        self._closed: frozenset[int] = frozenset()
        self._num_freezes = 0

    def request(self, layer_id: int, *, expert_in: int, expert_out: int) -> bool:
        """Queue one swap for the next ticks.

        Args:
            layer_id: Ordinal among MoE layers.
            expert_in: A cold expert.
            expert_out: A hot expert, of the same layer.

        Returns:
            False when the layer is busy with a swap of an earlier update: the swap is refused and nothing changed.

        Raises:
            SwapError: No such layer or expert, a layer without spare row, IN is hot or OUT is not, or one of the two
                is already part of a swap of this update.
        """
        if not 0 <= layer_id < len(self._layers):
            wanted = f"0..{len(self._layers) - 1}"
            raise SwapError("layer_id of a swap", got=str(layer_id), wanted=wanted, layer_id=layer_id)
        layer, swap = self._layers[layer_id], Swap(layer_id=layer_id, expert_in=expert_in, expert_out=expert_out)
        _require_experts(layer, swap=swap)
        if layer_id in self._closed:
            return False
        _require_legal(layer, swap=swap)
        self._layers[layer_id] = replace(layer, queue=(*layer.queue, swap))
        self._active.add(layer_id)
        return True

    def busy(self) -> frozenset[int]:
        """The layer_ids with a swap queued or in flight."""
        return frozenset(self._active)

    def is_idle(self) -> bool:
        """Whether no swap is queued or in flight."""
        return not self._active

    def row_map(self, layer_id: int) -> tuple[int, ...]:
        """The layer's row map, [E], as the steps launched from now on will see it."""
        return self._layers[layer_id].row_map

    def spare_row(self, layer_id: int) -> int | None:
        """The hot row that belongs to nobody; None in a static layer, and while a write-back is under way."""
        return self._layers[layer_id].spare_row

    def hot_experts(self, layer_id: int) -> frozenset[int]:
        """Experts mapped to hot rows: H of them, H + 1 while a write-back is under way."""
        layer = self._layers[layer_id]
        return frozenset(expert for expert in range(len(layer.row_map)) if layer.is_hot(expert))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing is enqueued, published or queried inside (graph capture); ticks do nothing. May be nested."""
        self._num_freezes += 1
        try:
            yield
        finally:
            self._num_freezes -= 1

    def fork(self, backend: SwapBackend) -> Swapper:
        """A twin in the same state on another backend, which must stand where this one's stands."""
        twin = copy.copy(self)
        twin._backend = backend
        twin._layers, twin._active = list(self._layers), set(self._active)
        return twin

    def snapshot(self, *, event_key: Callable[[Event], Hashable]) -> Hashable:
        """All that decides what this swapper does next; equal snapshots behave alike.

        Args:
            event_key: What distinguishes one event of the backend from another.
        """
        layers = tuple(_layer_key(layer, event_key=event_key) for layer in self._layers)
        return (layers, self._closed, self._num_freezes)

    def tick(self) -> TickResult:
        """Take every layer with a swap one step further: publish what is copied, enqueue the next copies.

        Never waits on the host; without swaps it costs next to nothing. An error of the backend other than a copy's
        SwapError is fatal: what was enqueued before it is not taken back.

        Returns:
            What became visible, what failed and what was enqueued, in the order of layer_ids.
        """
        if not self._active:
            self._closed = frozenset()
            return _NOTHING
        report = _Report()
        if not self._num_freezes:
            for layer_id in sorted(self._active):
                self._layers[layer_id] = self._tick_layer(self._layers[layer_id], report=report)
            self._active = {layer_id for layer_id in self._active if _is_busy(self._layers[layer_id])}
        self._closed = frozenset(self._active)
        return report.result()

    def _tick_layer(self, layer: _Layer, *, report: _Report) -> _Layer:
        if layer.flight is not None:
            layer = self._advance(layer, layer.flight, report=report)
        if layer.flight is None and layer.queue and layer.spare_row is not None:
            flight = layer.take_off(layer.queue[0], spare_row=layer.spare_row)
            layer = self._enqueue_copy(replace(layer, queue=layer.queue[1:]), flight, report=report)
        return layer

    def _advance(self, layer: _Layer, flight: _Flight, *, report: _Report) -> _Layer:
        """Publish what is copied, or enqueue again the write-back that failed."""
        if not flight.is_copying:
            return self._enqueue_copy(layer, flight, report=report)
        try:
            if self._publish_rule == "done" and flight.copied is not None and not self._backend.query(flight.copied):
                return layer
        except SwapError as error:
            return _after_failure(layer, flight, error=error, report=report)
        if not flight.is_in:
            return self._publish_in(layer, flight, report=report)
        self._wait("compute", flight.copied, "w4")
        return self._publish_out(layer, flight, report=report)

    def _enqueue_copy(self, layer: _Layer, flight: _Flight, *, report: _Report) -> _Layer:
        """Step 1, or step 3 after publish 2, with the event that tells its end."""
        stream: Stream = self._out_stream if flight.is_in else "side"
        if flight.is_in:
            source_row, target_row = flight.hot_row, flight.cold_row
            self._wait(stream, flight.published, "w3")
        else:
            source_row, target_row = flight.cold_row, flight.spare_row
            self._wait(stream, layer.free, "w1")
        try:
            self._backend.copy(stream, layer_id=flight.swap.layer_id, source_row=source_row, target_row=target_row)
        except SwapError as error:
            return _after_failure(layer, flight, error=error, report=report)
        report.copied_layers.append(flight.swap.layer_id)
        return replace(layer, flight=replace(flight, is_copying=True, copied=self._backend.record(stream)))

    def _publish_in(self, layer: _Layer, flight: _Flight, *, report: _Report) -> _Layer:
        """Step 2; then step 3 or, in inclusive placement, OUT's way home."""
        swap = flight.swap
        self._wait("compute", flight.copied, "w2")
        self._backend.publish(swap.layer_id, expert=swap.expert_in, row=flight.spare_row)
        row_map = _mapped(layer.row_map, expert=swap.expert_in, row=flight.spare_row)
        layer = replace(layer, row_map=row_map, spare_row=None)
        if layer.rows.home_row is not None:
            return self._publish_out(layer, flight, report=report)
        flight = replace(flight, is_in=True, published=self._backend.record("compute"))
        return self._enqueue_copy(layer, flight, report=report)

    def _publish_out(self, layer: _Layer, flight: _Flight, *, report: _Report) -> _Layer:
        """Step 4, then step 5."""
        swap = flight.swap
        self._backend.publish(swap.layer_id, expert=swap.expert_out, row=flight.out_row)
        report.published.append(swap)
        row_map = _mapped(layer.row_map, expert=swap.expert_out, row=flight.out_row)
        free = self._backend.record("compute")
        return replace(layer, row_map=row_map, spare_row=flight.hot_row, free=free, flight=None)

    def _wait(self, stream: Stream, event: Event | None, why: WaitName) -> None:
        if event is not None:
            self._backend.wait(stream, event, why)


def _after_failure(layer: _Layer, flight: _Flight, *, error: SwapError, report: _Report) -> _Layer:
    """Before publish 2 the swap is dropped; after it the write-back is to be enqueued again."""
    report.failed.append((flight.swap, str(error)))
    return replace(layer, flight=replace(flight, is_copying=False, copied=None) if flight.is_in else None)


def _is_busy(layer: _Layer) -> bool:
    return layer.flight is not None or bool(layer.queue)


def _mapped(row_map: tuple[int, ...], *, expert: int, row: int) -> tuple[int, ...]:
    return (*row_map[:expert], row, *row_map[expert + 1 :])


def _require_experts(layer: _Layer, *, swap: Swap) -> None:
    for expert in (swap.expert_in, swap.expert_out):
        if not 0 <= expert < len(layer.row_map):
            raise _illegal(swap, got=f"expert {expert}", wanted=f"experts 0..{len(layer.row_map) - 1}")


def _require_legal(layer: _Layer, *, swap: Swap) -> None:
    if layer.spare_row is None:
        raise _illegal(swap, got="a layer without spare row", wanted="a layer that may swap")
    moving = {expert for queued in layer.queue for expert in (queued.expert_in, queued.expert_out)}
    if moving & {swap.expert_in, swap.expert_out}:
        raise _illegal(swap, got="an expert twice in one update", wanted="every expert at most once")
    if layer.is_hot(swap.expert_in):
        raise _illegal(swap, got=f"expert {swap.expert_in}, which is hot already", wanted="a cold expert to come in")
    if not layer.is_hot(swap.expert_out):
        raise _illegal(swap, got=f"expert {swap.expert_out}, which is not hot", wanted="a hot expert to go out")


def _illegal(swap: Swap, *, got: str, wanted: str) -> SwapError:
    what = f"swap in layer_id {swap.layer_id}, expert {swap.expert_in} for {swap.expert_out}"
    return SwapError(what, got=got, wanted=wanted, swap=swap)


def _layer_key(layer: _Layer, *, event_key: Callable[[Event], Hashable]) -> Hashable:
    """What tells two states of a layer apart; the other rows of a flight follow from these."""

    def key(event: Event | None) -> Hashable:
        return None if event is None else event_key(event)

    flight = layer.flight
    in_flight = flight and (flight.swap, flight.cold_row, flight.hot_row, flight.is_in, flight.is_copying)
    events = flight and (key(flight.published), key(flight.copied))
    return (layer.row_map, layer.spare_row, key(layer.free), layer.queue, in_flight, events)
