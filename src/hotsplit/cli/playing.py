"""Plays requests from many clients at once, and hands what became of each to the thread that waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hotsplit.cli.openai_client import Answer
from hotsplit.cli.sample_requests import Request

LOOK_EVERY_S = 0.5
"""Seconds between two looks at what else is to be done while answers are waited for."""
_JOIN_S = 2.0
"""How long the end of clients is waited for; one that still waits for an answer goes with the process."""

Ask = Callable[[Request, threading.Event], Answer]
"""Sends one request; gives up waiting once the event is set."""


class Player:
    """Clients that each take the next request when they are done with one.

    Args:
        ask: Sends one request, from any thread.
        clients: At the same time.
        on_answer: Told every answer, in the thread that plays.
        on_look: Called about twice a second there; what it raises ends the play.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        clients: int,
        on_answer: Callable[[Request, Answer], None],
        on_look: Callable[[], None],
    ) -> None:
        self._ask, self._clients, self._on_answer, self._on_look = ask, clients, on_answer, on_look

    def play(self, requests: Iterable[Request]) -> None:
        """Play all of them, and return when each has its answer.

        Args:
            requests: In the order in which they begin.
        """
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        number = 0
        for request in requests:
            waiting.put(request)
            number += 1
        answered: queue.SimpleQueue[tuple[Request, Answer | Exception]] = queue.SimpleQueue()
        with self._running(waiting, answered, clients=min(self._clients, number)):
            while number:
                try:
                    request, answer = answered.get(timeout=LOOK_EVERY_S)
                except queue.Empty:
                    self._on_look()
                    continue
                if isinstance(answer, Exception):
                    raise answer
                number -= 1
                self._on_answer(request, answer)
                self._on_look()

    @contextmanager
    def _running(
        self,
        waiting: queue.SimpleQueue[Request],
        answered: queue.SimpleQueue[tuple[Request, Answer | Exception]],
        *,
        clients: int,
    ) -> Iterator[None]:
        """The clients, told to end whatever ends the wait."""
        enough = threading.Event()

        def run() -> None:
            while not enough.is_set():
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    answered.put((request, self._ask(request, enough)))
                except Exception as error:  # noqa: BLE001 - whatever it is, the thread that waits raises it
                    answered.put((request, error))
                    return

        # Daemons: one that waits for an answer of minutes must not keep an interrupted command.
        threads = [threading.Thread(target=run, daemon=True, name=f"client-{i}") for i in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            enough.set()
            for thread in threads:
                thread.join(_JOIN_S / len(threads))
