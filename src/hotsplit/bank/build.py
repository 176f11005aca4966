"""Fill the banks by plan: every hot row gets its expert's bytes, once, straight into place.

`plan -> build -> rows`. On pointer rows the cold bank needs no filling (the files are the bank), so the peak above
the final size is one read buffer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from hotsplit.bank.direct import DirectReader
from hotsplit.bank.pointers import PointerRows, RowsOptions
from hotsplit.bank.rows import LayerRows, place
from hotsplit.bank.source import ExpertSource
from hotsplit.units import gib

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
"""Seconds between two log lines of a long load: silence looks like a hang, and watchdogs kill what hangs."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def place_layers(
    hot: Sequence[Sequence[int]], *, num_experts: int, dynamic: bool, inclusive: bool
) -> tuple[LayerRows, ...]:
    """Number the rows of all layers.

    Args:
        hot: Hot expert ids per layer, most wanted first.
        num_experts: E.
        dynamic: Whether layers may swap and so get a spare row.
        inclusive: Whether slow memory keeps every expert.
    """
    return tuple(place(experts, num_experts=num_experts, spare=dynamic, inclusive=inclusive) for experts in hot)


def build_pointer_rows(
    source: ExpertSource,
    *,
    hot: Sequence[Sequence[int]],
    layers: Sequence[LayerRows],
    options: RowsOptions | None = None,
    on_progress: Progress | None = None,
) -> PointerRows:
    """Make pointer rows and read the hot ones.

    Args:
        source: Where the experts lie.
        hot: Hot expert ids per layer, in row order.
        layers: Their rows, as place_layers gave them.
        options: How to use this machine.
        on_progress: Told after every row.

    Raises:
        BankError: Memory or a file failed; everything taken is given back.
    """
    total = sum(source.layouts[i].num_bytes * len(experts) for i, experts in enumerate(hot))
    rows = PointerRows(source, layers=layers, options=options)
    done, heartbeat = 0, Heartbeat("reading hot experts")
    try:
        with contextlib.closing(DirectReader(source.files, uses_cache=True)) as reader:
            for layer_id, experts in enumerate(hot):
                for row, expert in enumerate(experts):
                    rows.fill(layer_id, expert=expert, row=row, reader=reader)
                    done += source.layouts[layer_id].num_bytes
                    heartbeat(done, total)
                    if on_progress:
                        on_progress(done, total)
        rows.settle()
    except BaseException:
        rows.close()
        raise
    return rows


class Heartbeat:
    """Logs progress and the time left, at most once in HEARTBEAT_S.

    Args:
        what: Is being done, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is, if it is time to.

        Args:
            done: Bytes done.
            total: Bytes in all.
        """
        now = time.monotonic()
        if now - self._said < HEARTBEAT_S:
            return
        self._said = now
        left = (now - self._started) / done * (total - done)
        logger.info("%s: %s of %s, about %.0f s left", self._what, gib(done), gib(total), left)
