"""Which cold rows a step found in slots: noted where they are asked for, read where the step is counted.

    router       the step's first layer is routed: forget()
    cold path    each row that is asked for: note()
    router       the step has run: at(), of which those count that a token touched

Only the first request of a step counts: a row that the step has read itself, and asks for once more, was not kept.

    >>> kept = KeptRows()
    >>> for key, is_kept in (((0, 7), True), ((1, 2), False), ((1, 2), True)):
    ...     kept.note(key, is_kept=is_kept)
    >>> kept.at()
    ([0], [7])
"""

from __future__ import annotations

from hotsplit.bank.staging import Key


class KeptRows:
    """The cold rows that the step under way has asked for. Mutable; of the thread that runs the steps."""

    def __init__(self) -> None:
        self._first: dict[Key, bool] = {}

    def forget(self) -> None:
        """A step begins."""
        self._first.clear()

    def note(self, key: Key, *, is_kept: bool) -> None:
        """A row is asked for.

        Args:
            key: Of the row.
            is_kept: Whether it lies in a slot now.
        """
        self._first.setdefault(key, is_kept)

    def at(self) -> tuple[list[int], list[int]]:
        """Layers and experts of the rows that lay in a slot when the step first asked for them, pair by pair."""
        notes = list(self._first.items())  # at once: another thread may look at the counters while a step notes rows
        found = [key for key, is_kept in notes if is_kept]
        return [layer_id for layer_id, _ in found], [expert for _, expert in found]
