"""When the counters are looked at, and who answers: the part of the live loop that needs no engine.

Stands between counters and swaps: `Counters -> look -> policy -> swaps`. bank/live.py drives it between the steps of an
engine, simulate.py between those of a trace; so a replay asks what a run asks, in the same order. A new policy is one
entry in `POLICIES`.

    every look     window = counters now - counters at the last look -> policy -> swaps
    every update   the same, and one line of the log     (for the fixed schedule updates are the only looks)

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError
from hotsplit.plan.adaptive import AdaptiveRebalancer
from hotsplit.plan.counters import Counters, Window, window_between
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer, Swap


class Policy(Protocol):
    """Chooses which experts change places."""

    num_shifts: int
    """Shifts of the traffic that it has acted upon."""

    @property
    def look_steps(self) -> int | None:
        """Steps between two looks; None for updates only."""

    @property
    def decay(self) -> float:
        """What a learned count keeps of its weight from one update to the next."""

    def observe(self, window: Window, *, busy: Collection[int] = ()) -> tuple[Swap, ...]:
        """Learn from the window since the last look, and propose swaps."""

    def follow(self, hot: npt.NDArray[np.bool_]) -> None:
        """Take the hot mask, [L, E], bool, from the row map itself."""

    def hot(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot, as it was told, [L, E], bool."""


def _fixed(
    *,
    hot: npt.NDArray[np.bool_],
    prior: npt.NDArray[np.float64] | None,
    top_k: int,
    options: RebalanceOptions,
    row_bytes: Sequence[int],  # noqa: ARG001 - a swap has no price here
) -> Policy:
    return Rebalancer(hot=hot, prior=prior, top_k=top_k, options=options)


POLICIES: Mapping[str, Callable[..., Policy]] = {"fixed": _fixed, "adaptive": AdaptiveRebalancer}
"""By the name that HOTSPLIT_DYN_SCHEDULE gives them."""


def make_policy(
    *,
    hot: npt.NDArray[np.bool_],
    prior: npt.NDArray[np.float64] | None,
    top_k: int,
    options: RebalanceOptions,
    row_bytes: Sequence[int],
) -> Policy:
    """The policy that the options name.

    Args:
        hot: Which experts are hot, [L, E], bool.
        prior: Counts of the histogram that the plan came from, [L, E], float64; None for none.
        top_k: Experts chosen per token.
        options: As set.
        row_bytes: Bytes of one row per layer, [L].

    Raises:
        ConfigError: There is no such schedule.
    """
    if options.schedule not in POLICIES:
        raise ConfigError("schedule", got=repr(options.schedule), wanted=" or ".join(POLICIES))
    return POLICIES[options.schedule](hot=hot, prior=prior, top_k=top_k, options=options, row_bytes=row_bytes)


class Steering:
    """Keeps the two readings that windows are measured from, and asks the policy when it is time.

    Args:
        counters: As they stand: the first windows begin here.
        dyn_steps: Steps between two updates.
        policy: Asked; None where nothing swaps.
    """

    def __init__(self, counters: Counters, *, dyn_steps: int, policy: Policy | None = None) -> None:
        self._dyn_steps = dyn_steps
        self._updated, self._looked = counters.copy(), counters.copy()
        self.policy = policy
        """Asked at every look; None where nothing swaps."""

    @property
    def look_steps(self) -> int:
        """Steps between two looks, never more than between two updates."""
        steps = self.policy.look_steps if self.policy is not None else None
        return self._dyn_steps if steps is None else min(steps, self._dyn_steps)

    def is_update_due(self, steps: int) -> bool:
        """Whether it is time for an update, after so many steps."""
        return steps - self._updated.steps >= self._dyn_steps

    def is_look_due(self, steps: int) -> bool:
        """Whether it is time for a look, after so many steps; it is whenever an update is due."""
        return self.is_update_due(steps) or steps - self._looked.steps >= self.look_steps

    def steps_to_look(self, steps: int) -> int:
        """Steps until the next look is due, after so many steps."""
        update = self._updated.steps + self._dyn_steps
        return max(min(update, self._looked.steps + self.look_steps) - steps, 0)

    def look(self, counters: Counters, *, hot: npt.NDArray[np.bool_], busy: Collection[int] = ()) -> tuple[Swap, ...]:
        """Ask the policy.

        Args:
            counters: As they stand.
            hot: Which experts are hot, as the row map has it, [L, E], bool.
            busy: layer_ids with a swap in flight.

        Returns:
            What it proposes.
        """
        window = window_between(self._looked, counters)
        self._looked = counters.copy()
        # Where there is decode, prefill does not speak.
        if self.policy is None or (window.phase == "prefill" and counters.tokens["decode"]):
            return ()
        self.policy.follow(hot)
        return self.policy.observe(window, busy=busy)

    def window(self, counters: Counters) -> Window:
        """What happened since the last update.

        Args:
            counters: As they stand.
        """
        return window_between(self._updated, counters)

    def updated(self, counters: Counters) -> None:
        """An update is done: the next window begins here.

        Args:
            counters: As they stand.
        """
        self._updated = counters.copy()
