"""Swaps on their way: when, between asking and serving, a swap becomes visible.

Stands in a replay where the swap protocol stands in a run: `swaps -> Transit -> hot mask`. A tick comes between two steps.
One swap of a layer is under way at a time, the others of its update queue behind it, and a layer that is busy with an
earlier update refuses. Copies are taken to be done by the next tick; a run whose copies take longer is later by as much.

    placement     asked at tick    copied from      comes in at     goes out at     next of the layer leaves at
    instant       t                -                t               t               t
    inclusive     t                t + 1            t + 2           t + 2           t + 2
    exclusive     t                t + 1            t + 2           t + 3           t + 3

    >>> transit = Transit(placement="inclusive")
    >>> transit.request(Swap(layer_id=0, expert_in=2, expert_out=0))
    True
    >>> transit.tick(), transit.tick()
    ((), (Move(swap=Swap(layer_id=0, expert_in=2, expert_out=0), comes_in=True, goes_out=True),))
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from hotsplit.errors import ConfigError
from hotsplit.plan.rebalance import Swap

Placement = Literal["instant", "inclusive", "exclusive"]
PLACEMENTS: Final[tuple[Placement, ...]] = ("inclusive", "exclusive", "instant")
"""inclusive: the transformers engine, whose checkpoint keeps every expert. exclusive: vLLM, where what goes out is
written back first. instant: no engine; what an update chooses serves the very next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What became visible of one swap."""

    swap: Swap
    """Which."""
    comes_in: bool
    """Its cold expert is hot from now on."""
    goes_out: bool
    """Its hot expert is cold from now on, and the swap is done."""


class Transit:
    """The swaps of all layers of one rank between asking and serving.

    Args:
        placement: A name of PLACEMENTS.

    Raises:
        ConfigError: There is no such placement.
    """

    def __init__(self, *, placement: Placement = "inclusive") -> None:
        if placement not in PLACEMENTS:
            raise ConfigError("placement", got=repr(placement), wanted=" or ".join(PLACEMENTS))
        self._placement = placement
        self._queues: dict[int, deque[Swap]] = {}
        self._flights: dict[int, Swap] = {}
        self._came_in: set[int] = set()
        self._closed: frozenset[int] = frozenset()

    def request(self, swap: Swap) -> bool:
        """Queue one swap for the next ticks.

        Args:
            swap: Requests between two ticks belong to one update.

        Returns:
            False where the layer is busy with a swap of an earlier update.
        """
        if swap.layer_id in self._closed:
            return False
        self._queues.setdefault(swap.layer_id, deque()).append(swap)
        return True

    def busy(self) -> frozenset[int]:
        """The layer_ids with a swap queued or under way."""
        return frozenset(self._queues) | frozenset(self._flights)

    def is_idle(self) -> bool:
        """Whether no swap is queued or under way."""
        return not self._queues and not self._flights

    def tick(self) -> tuple[Move, ...]:
        """Take every layer one tick further.

        Returns:
            What became visible, in the order of layer_ids.
        """
        moves = [move for layer_id in sorted(self.busy()) for move in self._tick_layer(layer_id)]
        self._closed = self.busy()
        return tuple(moves)

    def settle(self) -> tuple[Move, ...]:
        """What is visible at once: everything asked for where the placement is instant, nothing elsewhere."""
        if self._placement != "instant":
            return ()
        swaps = [swap for layer_id in sorted(self._queues) for swap in self._queues[layer_id]]
        self._queues.clear()
        return tuple(Move(swap=swap, comes_in=True, goes_out=True) for swap in swaps)

    def _tick_layer(self, layer_id: int) -> list[Move]:
        moves = [self._advance(layer_id)] if layer_id in self._flights else []
        queue = self._queues.get(layer_id)
        if queue and layer_id not in self._flights:
            self._flights[layer_id] = queue.popleft()
        if queue is not None and not queue:
            del self._queues[layer_id]
        return moves

    def _advance(self, layer_id: int) -> Move:
        """The copy is done: IN serves; OUT goes at once if nothing is written back, else when that is done too."""
        swap = self._flights[layer_id]
        if self._placement == "exclusive" and layer_id not in self._came_in:
            self._came_in.add(layer_id)
            return Move(swap=swap, comes_in=True, goes_out=False)
        comes_in = layer_id not in self._came_in
        self._came_in.discard(layer_id)
        del self._flights[layer_id]
        return Move(swap=swap, comes_in=comes_in, goes_out=True)
