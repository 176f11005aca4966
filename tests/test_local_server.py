"""A server of the tests has room for its clients however late it comes to them: a reset would be a failure it never made."""

from __future__ import annotations

import ast
import contextlib
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from local_server import LocalServer

CLIENTS = 64
TESTS = Path(__file__).parent


def test_all_clients_of_a_test_find_room_while_the_server_lets_nobody_in():
    with LocalServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server, contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(server.server_address, timeout=60))


def test_no_test_has_a_server_with_less_room():
    bare = {"HTTPServer", "ThreadingHTTPServer", "TCPServer", "ThreadingTCPServer"}
    found = []
    for path in TESTS.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
        found += [(path.name, name) for name in names & bare]
    assert [] == found
