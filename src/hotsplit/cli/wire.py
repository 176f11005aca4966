"""Connections of urllib's that another thread can end: the library's timeout is for each byte, so drops go on for ever."""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.request
from typing import Any


class KeptLines(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections for urllib, and keeps them. Mutable."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[http.client.HTTPConnection] = []

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Ask without TLS.

        Args:
            req: What.
        """
        return self.do_open(self._kept(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Ask with TLS.

        Args:
            req: What.
        """
        return self.do_open(self._kept(http.client.HTTPSConnection), req)

    def hang_up(self) -> None:
        """End every connection whose answer has not begun: whoever reads it sees its end."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                if line.sock is not None:
                    line.sock.shutdown(socket.SHUT_RDWR)

    def _kept(self, kind: type[http.client.HTTPConnection]) -> Any:
        def opened(host: str, **options: Any) -> http.client.HTTPConnection:
            self._lines.append(kind(host, **options))
            return self._lines[-1]

        return opened
