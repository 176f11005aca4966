"""A server that looks like vLLM with hotsplit in it: the OpenAI API, /metrics, and a run folder that answers asks.

In a thread of a test:      with FakeServer(state_dir) as server: server.url, server.bodies, server.counts
As a process of its own:    python fake_openai.py PORT STATE_DIR MODE

What a request routes depends on its text alone, so that any order of requests counts the same.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np

from hotsplit.bank import runs
from hotsplit.data import tiny_moe_path
from hotsplit.metrics import MetricsSnapshot, write_snapshot
from local_server import LocalServer

LAYERS, EXPERTS, TOP_K = (0, 1, 2, 3), 32, 4
"""Of the bundled model."""
PREFILL_TOKENS = 5
PHASES = ("decode", "prefill")
SLOW_FROM, SLOW_S = 24, 5.0
"""Generations of a slow server take so long from there on."""


def liking(topic, *, layer, experts):
    """Experts, the best liked one first; "<" and ">" like opposite ones."""
    if topic in "<>":
        return np.arange(experts)[:: 1 if topic == "<" else -1]
    return np.random.default_rng([ord(topic), layer]).permutation(experts)


def routed(body, *, layers=LAYERS, experts=EXPERTS):
    """Pairs of one request, phase -> [L, E]: experts by the first letter of its text, which is its topic."""
    text = body.get("prompt") or body["messages"][-1]["content"]
    counts = {}
    for phase, tokens in (("decode", body["max_tokens"]), ("prefill", PREFILL_TOKENS)):
        draws = np.random.default_rng([zlib.crc32(str(text).encode()), PHASES.index(phase)])
        counted = np.zeros((len(layers), experts), dtype=np.int64)
        for layer in range(len(layers)):
            liked = liking(str(text)[0], layer=layer, experts=experts)
            weight = -2.0 * np.log1p(np.arange(experts))
            noise = draws.gumbel(size=(tokens, experts))
            chosen = liked[np.argsort(-(weight + noise), axis=1)[:, :TOP_K]]
            np.add.at(counted[layer], chosen.ravel(), 1)
        counts[phase] = counted
    return counts


class FakeServer:
    """The server.

    Args:
        state_dir: HOTSPLIT_STATE_DIR; None for a server without hotsplit.
        behave: Called with the number of a generation, from 1, and its body; returns None for an answer, a status, or
            "reset", "hang", "junk", "silence", or a dict that is sent with status 200.
        port: Where; 0 for any.
        root: What it says of its model's folder.
        layers: That it counts.
    """

    def __init__(self, state_dir, *, behave=None, port=0, root=None, layers=LAYERS):
        self.bodies, self.paths, self.headers = [], [], []
        self.behave = behave or (lambda number, body: None)
        self.root, self.layers = str(root or tiny_moe_path()), layers
        self.counts = {phase: np.zeros((len(layers), EXPERTS), dtype=np.int64) for phase in PHASES}
        self.tokens, self.steps = dict.fromkeys(PHASES, 0), 0
        self.run_dir = None if state_dir is None else Path(state_dir) / "runs" / f"20260101T000000-{os.getpid()}-0"
        self.is_answering = True
        self._lock, self._ended = threading.Lock(), threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = LocalServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        if self.run_dir is not None:
            write_snapshot(self.snapshot(), self.run_dir)
        threads = [threading.Thread(target=self._http.serve_forever, daemon=True)]
        threads += [threading.Thread(target=self._answer, daemon=True)] if self.run_dir is not None else []
        for thread in threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    def count(self, body):
        counted = routed(body, layers=self.layers)
        with self._lock:
            for phase, counts in counted.items():
                self.counts[phase] += counts
                self.tokens[phase] += int(counts[0].sum()) // TOP_K
            self.steps += 1

    def snapshot(self):
        with self._lock:
            pairs = {phase: int(self.counts[phase].sum()) for phase in PHASES}
            layers = {p: dict(zip(self.layers, self.counts[p].tolist(), strict=True)) for p in PHASES}
            zeros = dict.fromkeys(
                ("touched_hot_bytes", "touched_cold_bytes", "swaps_done", "swaps_refused", "swaps_failed",
                 "swap_bytes", "update_failures", "host_bytes"), 0)  # fmt: skip
            return MetricsSnapshot(
                rank=0, version="0", plan_hash="f" * 64, mode="static", backend="fake", tokens=dict(self.tokens),
                pairs=pairs, hit_pairs=dict.fromkeys(PHASES, 0), steps=self.steps, hot_bytes=2_000_000,
                budget_bytes=2_000_000, counts=layers, **zeros,
            )  # fmt: skip

    def _answer(self):
        answered = ""
        while not self._ended.wait(0.01):
            word = runs.asked(self.run_dir)
            if self.is_answering and word != answered:
                write_snapshot(self.snapshot(), self.run_dir)
                runs.tell(self.run_dir, rank=0, word=word)
                answered = word

    def metrics(self):
        lines = ["# HELP up Whether it is.", "up 1.0"]
        for sample in self.snapshot().to_samples() if self.run_dir is not None else ():
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            lines.append(f"{sample.name}{{{labels}}} {sample.value!r}")
        return "\n".join(lines) + "\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    """HTTP of a FakeServer."""

    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *_):
        """Nothing."""

    def reply(self, status, content, *, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (("Content-Length", len(data)), ("Content-Type", "application/json"), *headers):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.fake.headers.append(dict(self.headers))
        if self.path == "/health":
            self.reply(200, b"")
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "model", "root": self.fake.root}]})
        elif self.path == "/metrics":
            self.reply(200, self.fake.metrics().encode())
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.fake._lock:  # the number of a generation is its place among the bodies
            self.fake.bodies.append(body)
            self.fake.paths.append(self.path)
            number = len(self.fake.bodies)
        action = self.fake.behave(number, body)
        if action is None:
            self.fake.count(body)
            usage = {"prompt_tokens": PREFILL_TOKENS, "completion_tokens": body["max_tokens"]}
            self.reply(200, {"choices": [{}], "usage": usage})
        elif isinstance(action, int):
            wait = (("Retry-After", "0"),) if action in (429, 503) else ()
            self.reply(action, {"error": {"message": f"said {action}", "code": action}}, headers=wait)
        elif isinstance(action, dict):
            self.reply(200, action)
        elif action == "junk":
            self.reply(200, b"<html>")
        else:
            if action == "hang":
                self.fake._ended.wait()
            self.close_connection = True
            self.connection.close()


def say(text):
    """A line of the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(port, state_dir, mode):
    """Serve until killed.

    Args:
        port: Where.
        state_dir: HOTSPLIT_STATE_DIR.
        mode: "ok", "slow" (from some generation on, so that nobody who is to be interrupted comes to the end before),
            "die" after 30 generations, "never" become ready, "stock".
    """
    say("INFO the fake server starts")
    if mode == "never":
        say("ValueError: the reason why it cannot start")
        sys.exit(3)

    def behave(number, _body):
        if mode == "slow":
            say(f"INFO generation {number}")
            time.sleep(0.03 if number < SLOW_FROM else SLOW_S)
        if mode == "die" and number > 30:
            say("RuntimeError: the engine has died of a cause")
            os._exit(7)

    with FakeServer(None if mode == "stock" else state_dir, behave=behave, port=int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
