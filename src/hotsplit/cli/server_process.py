"""A server that a command starts for itself: ready when it answers, its log in a file, ended with the command.

It stands in a session of its own: Ctrl-C of a terminal reaches this command alone, which then ends the server in order.
Where the command is killed and can end nothing any more, the kernel ends the server with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hotsplit.errors import EngineError, HotsplitError

STOP_S = 60.0
"""How long it may take to end: it saves, and gives memory back."""
_LOOK_S = 0.25
_TIED = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server once it is tied to its parent (PR_SET_PDEATHSIG), unless that has gone by then."""
_TAIL_BYTES = 20_000
_TAIL_LINES = 12


class ServerProcess:
    """A running server; made by `running_server`.

    Args:
        process: The server, the first of its session.
        log: What it prints.
        url: Where it will listen.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, log: Path, url: str) -> None:
        self.process, self.log, self.url = process, log, url

    def require_alive(self) -> None:
        """Raise where it has ended.

        Raises:
            EngineError: With the end of its log.
        """
        code = self.process.poll()
        if code is not None:
            self._raise("the server has ended", how=_how(code))

    def wait_ready(self, is_ready: Callable[[], bool], *, timeout_s: float, on_wait: Callable[[float], None]) -> None:
        """Wait until it answers.

        Args:
            is_ready: Asks it.
            timeout_s: Longest wait.
            on_wait: Told the seconds waited.

        Raises:
            EngineError: It has ended, or is not ready in time; with the end of its log.
        """
        began = time.monotonic()
        while not is_ready():
            self.require_alive()
            waited = time.monotonic() - began
            if waited > timeout_s:
                self._raise("the server is not ready", how=f"no answer for {timeout_s:.0f} s")
            on_wait(waited)
            time.sleep(_LOOK_S)

    def tail(self) -> list[str]:
        """The last lines of its log that are not blank."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
            return [line for line in lines if line.strip()][-_TAIL_LINES:]
        return []

    def stop(self) -> None:
        """End it and all that it has started; twice is harmless."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also where the wait is interrupted: nothing stays behind
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _raise(self, what: str, *, how: str) -> None:
        lines = self.tail()
        end = f"; the end of its log: {' '.join(lines[-1].split())[:300]}" if lines else ""
        raise EngineError(what, got=f"{how}{end}", do=f"see {self.log}", tail=lines)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(-code).name}"
    return f"signal {-code}"


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str], *, environ: Mapping[str, str], log: Path, url: str
) -> Iterator[ServerProcess]:
    """Start a server, and end it whatever ends the block.

    Args:
        arguments: The program first.
        environ: The whole environment.
        log: Where it prints; added to.
        url: Where it will listen.

    Raises:
        HotsplitError: The log cannot be written, or no process can be started.
    """
    try:
        with log.open("ab") as output:
            tied = [sys.executable, "-I", "-c", _TIED, str(os.getpid()), *arguments]
            process = subprocess.Popen(  # noqa: S603 - our own interpreter with vLLM's entry point
                tied, stdout=output, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
            )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise HotsplitError(f"cannot start {arguments[0]}", got=reason, do=f"see that {log} can be written") from error
    server = ServerProcess(process, log=log, url=url)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_listened_to(host: str, port: int) -> bool:
    """Whether somebody listens there.

    Args:
        host: Name or address.
        port: Its number.
    """
    with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), timeout=1.0) as asked:
        # Where nobody listens, TCP may by chance connect such a socket to itself.
        return bool(asked.getsockname() != asked.getpeername())
    return False


def is_local(host: str) -> bool:
    """Whether a host's name is one of this host: an address is, if a socket can be bound to it.

    Args:
        host: Name or address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the second: a part of the name that is empty or too long
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False
