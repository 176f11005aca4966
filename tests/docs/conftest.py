"""What commands of the documents run against: a server's metrics, and a vLLM that is found but never started."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from hotsplit.cli import vllm_process
from hotsplit.metrics import METRICS
from local_server import LocalServer

LABELS = {
    "phase": ("decode", "prefill"),
    "bank": ("hot", "cold"),
    "result": ("done", "refused", "failed"),
    "version": ("0.1.0",),
    "plan_hash": ("0" * 64,),
    "mode": ("dynamic",),
    "backend": ("cpu-twin",),
}


def exposition(readings: int) -> str:
    """A server's /metrics with every metric of one rank; counters grow with the number of readings."""
    lines = []
    for metric in METRICS.values():
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        value = 1000 * readings if metric.kind == "counter" else 0.5
        (name, *others) = metric.labels or ("",)
        for label in LABELS.get(name, ("",)):
            pairs = [f'{name}="{label}"'] if name else []
            pairs += [f'{other}="{LABELS[other][0]}"' for other in others]
            labels = ",".join([*pairs, 'rank="0"'])
            lines.append(f"{metric.name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Of a server in this process."""
    readings = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            readings.append(self.path)
            body = exposition(len(readings)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with LocalServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of every vLLM that would have been started."""
    starts: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, arguments, environ: starts.append(list(arguments)))
    here = vllm_process.Vllm(version="0.32.0", ready_timeout_s=600, has_command=True, has_plugin=True)
    monkeypatch.setattr(vllm_process, "find_vllm", lambda: here)
    return starts
