"""A little HTTP server for tests whose clients come all at once, or on a machine that is busy with something else."""

from __future__ import annotations

from http.server import ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """With room for clients that wait to be let in, as real servers have.

    The library's own has room for five. Linux remembers nothing of those that come when it is full (SYN cookies), and
    resets a connection whose second packet, the body of a request, comes before it is let in.
    """

    request_queue_size = 128
