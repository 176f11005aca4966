"""How far a load has come: a line at least every ten seconds, and a clean stop when host memory runs out.

Held by whoever loads: `with LoadWatch(...) as watch`, then `advance(bytes)` and `layer_done()` as the work goes on. A
thread of its own writes the line, also while the loader is stuck in one long read; the loader itself raises when host
memory falls under the floor, so that it unwinds like any other error and whoever opened something closes it.

    loading weights: 12 of 69 layers, 33.1 of 190.2 GiB (17 %), 0.42 GiB/s, about 6 min 14 s left, 101.3 GiB of host
    memory free                                                                                       (all on one line)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Final, Self

from hotsplit.errors import BudgetError
from hotsplit.host.memory import memory_limits
from hotsplit.units import GIB, gib

logger = logging.getLogger(__name__)

HOST_FLOOR_BYTES: Final = 512 * 2**20
"""Host memory that must stay available while loading: less, and the kernel begins to kill."""
CHECK_EVERY_S: Final = 1.0
"""Seconds between two looks at host memory by the loader."""


def available_host_bytes() -> int | None:
    """What this process may still take of host memory, in bytes; None is unknown."""
    return memory_limits().available_bytes


@dataclass(eq=False, slots=True)
class LoadWatch:
    """Watches one load, from entering the context to leaving it. Any thread may report.

    Raises:
        BudgetError: From advance() and layer_done(): host memory fell under the floor.
    """

    what: str
    """What is being done ("loading weights"), the beginning of every line."""
    _: KW_ONLY
    total_bytes: int
    """Bytes that will be reported; more or fewer do no harm."""
    num_layers: int
    """Layers that will be reported."""
    floor_bytes: int = HOST_FLOOR_BYTES
    """Host memory that must stay available."""
    available: Callable[[], int | None] = available_host_bytes
    """Tells how much there is, in bytes; None where nobody knows, and then nothing stops."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since some moment."""
    every_s: float = 10.0
    """Seconds between two lines."""
    log: logging.Logger = logger
    """Where the lines go."""

    done_bytes: int = field(default=0, init=False)
    """Bytes reported so far."""
    done_layers: int = field(default=0, init=False)
    """Layers reported so far."""
    _begun_at: float = field(default=0.0, init=False)
    _checked_at: float = field(default=-math.inf, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _left: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self._begun_at = self.clock()
        self._thread = threading.Thread(target=self._watch, name="hotsplit-load-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self.log.info("%s: done in %s, %s", self.what, _duration(self.clock() - self._begun_at), self._state())

    def advance(self, num_bytes: int) -> None:
        """Report bytes that have been read.

        Args:
            num_bytes: Since the last report.

        Raises:
            BudgetError: Host memory fell under the floor.
        """
        self._report(num_bytes=num_bytes)

    def layer_done(self) -> None:
        """Report a finished layer.

        Raises:
            BudgetError: Host memory fell under the floor.
        """
        self._report(num_layers=1)

    def line(self) -> str:
        """How far it is now."""
        seconds = self.clock() - self._begun_at
        return f"{self.what}: {self._state()}, {self._pace(seconds)}, {_free(self.available())}"

    def _report(self, *, num_bytes: int = 0, num_layers: int = 0) -> None:
        with self._lock:
            self.done_bytes += num_bytes
            self.done_layers += num_layers
            now = self.clock()
            is_due = now - self._checked_at >= CHECK_EVERY_S
            if is_due:
                self._checked_at = now
        if is_due:
            self._require_floor()

    def _require_floor(self) -> None:
        free = self.available()
        if free is None or free >= self.floor_bytes:
            return
        raise BudgetError(
            f"{self.what} stopped at {self._state()}",
            got=f"{gib(free)} of host memory left",
            wanted=f"at least {gib(self.floor_bytes)}",
            do="stop what else takes memory on this host, or ask for less of it: a smaller KV cache, or another "
            "HOTSPLIT_HOT_GIB",
            available_bytes=free,
            floor_bytes=self.floor_bytes,
            done_bytes=self.done_bytes,
        )

    def _watch(self) -> None:
        while not self._left.wait(self.every_s):
            self.log.info("%s", self.line())

    def _state(self) -> str:
        ratio = min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0
        volume = f"{self.done_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB ({math.floor(ratio * 100)} %)"
        return f"{self.done_layers} of {self.num_layers} layers, {volume}"

    def _pace(self, seconds: float) -> str:
        if not self.done_bytes or seconds <= 0:
            return "time left unknown"
        rate = self.done_bytes / seconds
        left = max(self.total_bytes - self.done_bytes, 0) / rate
        return f"{rate / GIB:.2f} GiB/s, about {_duration(left)} left"


def _free(num_bytes: int | None) -> str:
    return "host memory unknown" if num_bytes is None else f"{num_bytes / GIB:.1f} GiB of host memory free"


def _duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
