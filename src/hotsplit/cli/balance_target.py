"""What `hotsplit balance` plays traffic through: a server that it starts with an even placement, or one that runs.

started    settings without counts, static: no placement learns in between; its state folder is the output's own
running    on this host, with hotsplit in it: its counts are read from its state folder
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hotsplit.bank import runs
from hotsplit.cli import console
from hotsplit.cli.openai_client import OpenAIClient, Served
from hotsplit.cli.run_counts import CountedRun, find_run
from hotsplit.cli.server_process import ServerProcess, free_port, is_listened_to, is_local, running_server
from hotsplit.config import HotsplitConfig, as_written, variable_name
from hotsplit.errors import ConfigError, EngineError
from hotsplit.metrics import Sample
from hotsplit.notices import Notice

_SERVED = ("hot_gib", "vram_reserve_gib", "numa_policy")
"""Settings that an even placement is served with as they are."""
_LEFT_OUT = ("counts", "plan", "dynamic", "dyn_steps", "dyn_max_swaps", "dyn_margin", "dyn_half_life", "dyn_schedule",
             "learned", "state_dir", "objective", "strict", "bank_dir", *_SERVED)  # fmt: skip
_WAITING_EVERY_S, _ALIVE_EVERY_S = 10.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server that answers."""

    client: OpenAIClient
    """Connections to it."""
    served: Served
    """Its model."""
    run: CountedRun
    """What it counts."""
    require_alive: Callable[[], None]
    """Raises where it has gone."""


def even_config(config: HotsplitConfig, *, state_dir: Path) -> tuple[HotsplitConfig, list[Notice]]:
    """The settings of a server whose placement is even and stays so.

    Args:
        config: The user's.
        state_dir: Where it writes its snapshots.

    Returns:
        The settings, and notices on those of the user's that do not act on it.
    """
    given = {name: as_written(getattr(config, name)) for name in _SERVED if config.origin(name) != "default"}
    given |= {"dynamic": "0", "learned": "ignore", "state_dir": str(state_dir), "strict": "0"}
    given["bank_dir"] = str(config.bank_path)  # not beside the results: a folder for all cold rows is chosen with care
    notices = [
        Notice(name="no-effect", text=f"{variable_name(name)} has no effect: the placement is even", strict=False)
        for name in ("counts", "plan")
        if config.origin(name) in ("option", "environment")
    ]
    return HotsplitConfig.from_options({}, **{name: value for name, value in given.items() if value}), notices


def even_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings that would make the placement another than the even one.

    Args:
        environ: The user's.
    """
    out = {variable_name(name) for name in _LEFT_OUT}
    return {name: value for name, value in environ.items() if name not in out}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server that is to be started will listen."""

    url: str
    """For this host."""
    flags: tuple[str, ...]
    """vLLM's, with host and port in them."""
    headers: Mapping[str, str]
    """That it will ask for."""


def address_of(flags: Sequence[str], *, environ: Mapping[str, str]) -> Address:
    """Where vLLM will listen: where its flags say, else at a free port of this host alone.

    Args:
        flags: vLLM's own.
        environ: The environment, in which there may be a key.

    Raises:
        ConfigError: A port that is none, or a server that is reached otherwise than by HTTP.
    """
    for name in ("--uds", "--ssl-certfile"):
        if _value(flags, name) is not None:
            raise ConfigError(
                f"vLLM's {name}", got="a server without plain HTTP", do="leave it out for hotsplit balance"
            )
    port, host = _value(flags, "--port"), _value(flags, "--host")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError("vLLM's --port", got=repr(port), wanted="an integer from 1 to 65535")
    chosen = port or str(free_port())
    more = [*(() if host else ("--host", "127.0.0.1")), *(() if port else ("--port", chosen))]
    reached = "127.0.0.1" if host in (None, "0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    key = _value(flags, "--api-key") or environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Address(url=f"http://{reached}:{chosen}", flags=(*flags, *more), headers=headers)


def _value(flags: Sequence[str], name: str) -> str | None:
    """The value of one of vLLM's flags; None where it is not there."""
    found = None
    for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue=""):
        spelt, equals, value = flag.partition("=")
        if spelt.replace("_", "-") == name:
            found = value if equals else following
    return found


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    connect: Callable[[], OpenAIClient],
) -> Iterator[Target]:
    """Start a server, wait until it answers, and end it afterwards.

    Args:
        arguments: The program first.
        environ: The whole environment.
        folder: Of the output: its log and its state folder go there.
        timeout_s: Longest wait until it answers.
        connect: Makes the client.

    Raises:
        EngineError: Its port is taken, it ended, was not ready in time, or counts nothing.
    """
    log, state = folder / "server.log", folder / "state"
    _require_none_left(state)
    client = connect()
    _require_free(client.url)
    console.note(f"starting vLLM's server with an even placement; its log: {log}")
    with (
        contextlib.closing(client),
        running_server(arguments, environ=environ, log=log, url=client.url) as server,
    ):
        server.wait_ready(client.is_healthy, timeout_s=timeout_s, on_wait=_waiting(timeout_s))
        run = _own_run(state, server=server)
        yield Target(client=client, served=client.served(), run=run, require_alive=server.require_alive)


def _require_none_left(state: Path) -> None:
    """Refuse to start beside a server whose command was killed: it still holds its memory."""
    left = runs.live_runs(state)
    if left:
        pid = left[-1].name.split("-")[1]
        raise EngineError(
            "a server that an earlier command has started still runs",
            got=f"process {pid}, as {left[-1]} says",
            do=f"end it (kill {pid}), or remove that folder if it is none",
        )


def _require_free(url: str) -> None:
    """Refuse a port at which another server would answer in the place of ours."""
    parts = urlsplit(url)
    if is_listened_to(parts.hostname or "", parts.port or 80):
        raise EngineError(
            f"port {parts.port}",
            got="somebody who listens there already",
            wanted="a free port",
            do="leave --port out for one that is free, or use that server with --url",
        )


def _waiting(timeout_s: float) -> Callable[[float], None]:
    """Says now and then how long a start has taken."""
    told = 0.0

    def tell(waited: float) -> None:
        nonlocal told
        if waited - told >= _WAITING_EVERY_S:
            told = waited
            console.note(f"starting: {waited:.0f} s so far, of at most {timeout_s:.0f}")

    return tell


def _own_run(state: Path, *, server: ServerProcess) -> CountedRun:
    """The run of the server that was just started."""
    own = [path for path in runs.live_runs(state) if f"-{server.process.pid}-" in path.name]
    if not own or not any(own[-1].glob("rank*.json")):
        raise EngineError(
            "the server counts nothing",
            got="no snapshot of any rank: all experts fit, or hotsplit is off",
            wanted="a hot budget that leaves some experts cold",
            do=f"pass a smaller --hot-gib, or see {server.log}",
        )
    return CountedRun(own[-1], is_alive=server.require_alive)


def normalised_url(text: str) -> str:
    """A server's address as it was typed, with a scheme and without a path.

    Args:
        text: "localhost:8000", "http://127.0.0.1:8000/v1".

    Raises:
        ConfigError: It is no address.

    >>> normalised_url("localhost:8000"), normalised_url("http://[::1]:8000/v1/")
    ('http://localhost:8000', 'http://[::1]:8000')
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in ("http", "https") or not host:
        raise ConfigError("--url", got=repr(text), wanted="an address such as http://127.0.0.1:8000")
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}{'' if port is None else f':{port}'}"


@contextlib.contextmanager
def running(url: str, *, state_dir: Path, connect: Callable[[], OpenAIClient]) -> Iterator[Target]:
    """Use a server that runs on this host with hotsplit in it.

    Args:
        url: Its address.
        state_dir: Its HOTSPLIT_STATE_DIR.
        connect: Makes the client.

    Raises:
        EngineError: It is not on this host, does not answer, or has no hotsplit in it.
    """
    host = urlsplit(url).hostname or ""
    if not is_local(host):
        raise EngineError(
            f"the server at {url}",
            got="another host",
            wanted="one on this host: counts per expert are in its state folder, and not on /metrics",
            do="run hotsplit balance there",
        )
    client, asked_at = connect(), -_ALIVE_EVERY_S

    def require_alive() -> None:
        nonlocal asked_at
        if time.monotonic() - asked_at < _ALIVE_EVERY_S:
            return
        asked_at = time.monotonic()
        if not client.is_healthy():
            time.sleep(1.0)  # a server that is busy may miss one question
            if not client.is_healthy():
                raise EngineError(f"the server at {url}", got="no answer any more", do="see its log")

    with contextlib.closing(client):
        served = client.served()
        if not _samples(client):
            raise EngineError(
                f"the server at {url}",
                got="no hotsplit_ numbers on /metrics: it runs without hotsplit, or all its experts fit",
                do="start it with hotsplit serve and a hot budget, or let hotsplit balance start one",
            )
        found = find_run(state_dir, shown=lambda: _samples(client), url=url)
        run = CountedRun(found.run_dir, is_alive=require_alive)
        yield Target(client=client, served=served, run=run, require_alive=require_alive)


def _samples(client: OpenAIClient) -> list[Sample]:
    """What /metrics shows of hotsplit."""
    from prometheus_client.parser import text_string_to_metric_families

    ours = "".join(f"{line}\n" for line in client.metrics().splitlines() if "hotsplit_" in line)
    try:
        return [
            Sample(name=sample.name, labels=dict(sample.labels), value=float(sample.value))
            for family in text_string_to_metric_families(ours)
            for sample in family.samples
        ]
    except ValueError as error:
        got = f"text that is no metrics ({error})"
        raise EngineError(f"{client.url}/metrics", got=got, wanted="Prometheus's form") from error
