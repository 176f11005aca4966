"""An OpenAI server of vLLM as a user starts it, its clients, and what it shows.

with serve(folder, settings={...}, place=tmp_path) as server:
    server.complete("some text", max_tokens=8)
    server.metrics()["hotsplit_steps_total"]
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engines.vllm.vllm_jobs import environment_of, snapshots, update_lines
from hotsplit.metrics import MetricsSnapshot, UpdateLine

READY_S, STOP_S, ANSWER_S = 240, 60, 120

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server."""

    url: str
    """Where it listens."""
    client: httpx.Client
    """Connections to it."""
    place: Path
    """The run's own folder."""
    state: Path
    """HOTSPLIT_STATE_DIR."""
    process: subprocess.Popen[bytes]
    """The API server; workers are its children."""

    def complete(self, prompt: str | Sequence[int], *, max_tokens: int, **more: Any) -> dict[str, Any]:
        """One request of /v1/completions, greedy.

        Args:
            prompt: Text or token ids.
            max_tokens: Generated.
            **more: Other fields of the request.
        """
        content = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
        reply = self.client.post("/v1/completions", json=content)
        assert 200 == reply.status_code, f"{reply.status_code}: {reply.text[:500]}"
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    def complete_all(
        self, requests: Sequence[tuple[str, int]], *, clients: int = 32, until: Callable[[], bool] | None = None
    ) -> int:
        """Many requests from clients that all run at once; each takes the next one when it is done.

        Args:
            requests: Prompts and how much to generate for each.
            clients: At the same time.
            until: Skips what is left once it says True; asked four times a second.

        Returns:
            Requests that were answered.
        """
        enough, ended = threading.Event(), threading.Event()

        def ask(request: tuple[str, int]) -> int:
            if enough.is_set():
                return 0
            self.complete(request[0], max_tokens=request[1])
            return 1

        def look() -> None:
            while not ended.wait(0.25):
                if until is not None and until():
                    enough.set()

        looker = threading.Thread(target=look)
        looker.start()
        try:
            with ThreadPoolExecutor(clients) as pool:
                return sum(pool.map(ask, requests))
        finally:
            ended.set()
            looker.join()

    def metrics(self) -> dict[str, dict[Labels, float]]:
        """What /metrics shows of hotsplit: name -> labels, sorted -> value."""
        # A connection of its own: which of several API servers answers is decided when it connects.
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).text
        found: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("hotsplit_"):
                    series = found.setdefault(sample.name, {})
                    labels = tuple(sorted(sample.labels.items()))
                    assert labels not in series, f"{sample.name}{dict(labels)} is there twice"
                    series[labels] = sample.value
        return found

    def probe(self, command: str) -> list[dict[str, Any]]:
        """Tell the probe something.

        Args:
            command: As in vllm_probe.

        Returns:
            The answer of every rank.
        """
        content = {"method": "hotsplit_probe", "args": [command]}
        reply = self.client.post("/collective_rpc", json=content)
        assert 200 == reply.status_code, reply.text
        answers: list[dict[str, Any]] = reply.json()["results"]
        return answers

    @property
    def log(self) -> str:
        """All that was printed so far."""
        return (self.place / "log.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def updates(self) -> list[UpdateLine]:
        """The update lines so far."""
        return update_lines(self.log)

    @property
    def snapshots(self) -> list[MetricsSnapshot]:
        """The newest snapshot of every rank."""
        return snapshots(self.state)

    def settled_snapshots(self, *, steps: int, timeout_s: float = ANSWER_S) -> list[MetricsSnapshot]:
        """The snapshots once the ranks have written down all that they ran.

        Args:
            steps: Engine steps that must be in them.
            timeout_s: Longest wait.
        """
        wait_for(lambda: all(one.steps == steps for one in self.snapshots), what="the snapshots", timeout_s=timeout_s)
        return self.snapshots

    def children(self) -> list[int]:
        """Process ids below the API server."""
        return _descendants(self.process.pid)

    def kill_all(self) -> None:
        """As the kernel does when memory is short: no process gets to save anything."""
        for pid in [self.process.pid, *self.children()]:
            _signal(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serve(
    model: Path,
    *,
    settings: Mapping[str, str],
    place: Path,
    flags: Sequence[str] = (),
    probe: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    through_hotsplit: bool = False,
) -> Iterator[Server]:
    """Start `vllm serve`, wait until it answers, and end it afterwards as a service manager does.

    Args:
        model: The checkpoint's folder.
        settings: HOTSPLIT_ variables.
        place: Folder for its files.
        flags: More flags of vLLM.
        probe: Variables of the probe; None leaves it out.
        environment: More variables.
        through_hotsplit: Start it by `hotsplit serve`.
    """
    place.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    command = [str(Path(sys.executable).parent / ("hotsplit" if through_hotsplit else "vllm")), "serve", str(model)]
    command += ["--"] if through_hotsplit else []
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--served-model-name", "model"]
    command += ["--max-model-len", "512", "--max-num-seqs", "64", *flags]
    # The probe is reached through the server's own remote calls, which only development mode offers.
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
    variables = environment_of(settings, probe=probe, cache=None, place=place) | more
    with (place / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True, cwd=place
        )
    state = Path(variables.get("HOTSPLIT_STATE_DIR", place))
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=ANSWER_S, limits=httpx.Limits(max_connections=64)) as client:
        server = Server(url=url, client=client, place=place, state=state, process=process)
        try:
            wait_for(lambda: _is_ready(server), what="the server", timeout_s=READY_S)
            yield server
        finally:
            _stop(server)


def wait_for(condition: Callable[[], bool], *, what: str, timeout_s: float) -> None:
    """Ask until something holds.

    Args:
        condition: Asked four times a second.
        what: For the error.
        timeout_s: Longest wait.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not there after {timeout_s} s"
        time.sleep(0.25)


def _is_ready(server: Server) -> bool:
    assert server.process.poll() is None, f"the server ended; the end of its log:\n{server.log[-6000:]}"
    try:
        return server.client.get("/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _stop(server: Server) -> None:
    """Ask it to end, and see that nothing stays behind."""
    children = server.children()
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    end = time.monotonic() + STOP_S
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.25)
    for pid in left:
        _signal(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _descendants(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(found for child in children for found in _descendants(child))]


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
