"""A little server whose /metrics is whatever a test says, and texts that hotsplit's real exposition would give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from hotsplit.metrics import METRICS, MetricsSnapshot
from local_server import LocalServer


def snapshot(rank: int = 0, *, steps: int = 100, **changes: Any) -> MetricsSnapshot:
    """A rank that has run so many steps: 2 decoded tokens each of 8 pairs, 6 of them hot; 1 MiB hot, 3 MiB cold."""
    numbers: dict[str, Any] = {
        "rank": rank,
        "version": "0.1.0",
        "plan_hash": "ab12" * 16,
        "mode": "dynamic",
        "backend": "cpu-twin",
        "tokens": {"decode": 2 * steps, "prefill": 10},
        "pairs": {"decode": 16 * steps, "prefill": 80},
        "hit_pairs": {"decode": 12 * steps, "prefill": 40},
        "touched_hot_bytes": 2**20 * steps,
        "touched_cold_bytes": 3 * 2**20 * steps,
        "steps": steps,
        "swaps_done": 7,
        "swaps_refused": 2,
        "swaps_failed": 0,
        "swap_bytes": 1000 * steps,
        "update_failures": 0,
        "hot_bytes": 2**30,
        "host_bytes": 3 * 2**30,
        "budget_bytes": 2**30,
        "hit_ratio_window": 0.8,
        "byte_hit_ratio_window": 0.7,
        "oracle_ratio_window": 0.9,
        "drift_ratio": 0.1,
        "update_seconds": 0.002,
    }
    return MetricsSnapshot(**(numbers | changes))


def text_of(*snapshots: MetricsSnapshot) -> str:
    """Prometheus text, written out by hand, with other libraries' names around it."""
    lines = ["# HELP python_info Python.", "# TYPE python_info gauge", 'python_info{version="3.11"} 1.0']
    for name, metric in METRICS.items():
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}"]
        for one in snapshots:
            for sample in one.to_samples():
                if sample.name == name:
                    labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                    lines.append(f"{name}{{{labels}}} {sample.value!r}")
    return "\n".join([*lines, "vllm:running 2.0", ""])


@dataclass
class Answers:
    """What the server does, and what it was asked."""

    url: str = ""
    """Its address, without path."""
    status: int = 200
    """Of the next answers."""
    body: bytes = b""
    """Sent whole."""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain"})
    """Sent with it."""
    instead: Callable[[Any], None] | None = None
    """Writes to the connection by itself, headers too."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """Headers of every request, by lower-case name, and its path as "path"."""


@contextmanager
def serving(answers: Answers) -> Iterator[Answers]:
    """Serve until the end of the block.

    Args:
        answers: May be changed meanwhile; its url is set here.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append({"path": self.path} | {key.lower(): value for key, value in self.headers.items()})
            if answers.instead is not None:
                answers.instead(self.wfile)
                self.close_connection = True
                return
            self.send_response(answers.status)
            for name, value in ({"Content-Length": str(len(answers.body))} | answers.headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answers.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the library
            """Say nothing."""

    server = LocalServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # their sockets are closed when the block ends
    # A client that hangs up in the middle of an endless answer is what a test wants.
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    answers.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield answers
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
