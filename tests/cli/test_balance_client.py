"""Every way in which one request can fail: what it is counted under, and whether it is sent again."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest

from cli.fake_openai import PREFILL_TOKENS, FakeServer
from hotsplit.cli import openai_client
from hotsplit.cli.openai_client import OpenAIClient
from hotsplit.cli.sample_requests import Request
from hotsplit.errors import EngineError
from patience import LIMIT_S

REQUEST = Request(number=0, where="line 1", path="/v1/completions", body={"prompt": "a", "max_tokens": 3})


@pytest.fixture
def ask(monkeypatch):
    """ask(behave) -> the answer of one request to a server that behaves so."""
    monkeypatch.setattr(openai_client, "_WAITS_S", (0.0, 0.0))
    clients, servers = [], []

    def run(behave, *, timeout_s=LIMIT_S):
        servers.append(FakeServer(None, behave=behave))
        clients.append(OpenAIClient(servers[-1].url, timeout_s=timeout_s, connections=1))
        return clients[-1].ask(REQUEST, model="model", enough=threading.Event())

    run.clients = clients
    yield run
    for one in (*clients, *servers):
        one.close()


def test_an_answer_says_how_many_tokens_it_took(ask):
    answer = ask(lambda number, body: None)
    assert (None, 1, PREFILL_TOKENS, 3) == (
        answer.failure,
        answer.tries,
        answer.prompt_tokens,
        answer.completion_tokens,
    )


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_refusal_is_not_sent_again(ask, status):
    answer = ask(lambda number, body: status)
    assert (f"HTTP {status}", f"said {status}", 1) == (answer.failure, answer.detail, answer.tries)


@pytest.mark.parametrize("action", [429, 500, 503, "reset", "junk"])
def test_what_may_pass_is_sent_again_and_is_then_an_answer(ask, action):
    answer = ask(lambda number, body: action if number == 1 else None)
    assert (None, 2) == (answer.failure, answer.tries)


def test_what_has_taken_too_long_is_sent_again(ask):
    """The first try ends by the limit, which is lifted meanwhile: the answer comes when a busy machine lets it."""

    def behave(number, body):
        if number > 1:
            return None
        ask.clients[-1]._client.timeout = LIMIT_S
        return "hang"

    answer = ask(behave, timeout_s=0.3)
    assert (None, 2) == (answer.failure, answer.tries)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (429, "HTTP 429"),
        (500, "HTTP 500"),
        ("reset", "connection broken"),
        ("hang", "timed out"),
        ("junk", "no JSON"),
        ({"error": {"message": "the engine is dead"}}, "no completion"),
        ({"choices": [{}], "error": {"message": "cut off"}}, "no completion"),
        ({"object": "error", "message": "too long"}, "no completion"),
    ],
)
def test_what_does_not_pass_is_given_up_after_three_tries(ask, action, kind):
    answer = ask(lambda number, body: action, **({"timeout_s": 0.3} if action == "hang" else {}))
    assert (kind, 3) == (answer.failure, answer.tries)


def test_what_a_server_says_of_an_error_with_status_200_is_kept(ask):
    assert "the engine is dead" == ask(lambda number, body: {"error": {"message": "the engine is dead"}}).detail


@pytest.mark.parametrize("usage", [None, [], "many", {"prompt_tokens": "x"}])
def test_an_answer_whose_usage_is_none_is_an_answer(ask, usage):
    answer = ask(lambda number, body: {"choices": [{}], "usage": usage})
    assert (None, 0) == (answer.failure, answer.prompt_tokens)


def test_a_server_that_is_not_there_is_no_connection():
    server = FakeServer(None)
    server.close()
    with contextlib.closing(OpenAIClient(server.url, timeout_s=LIMIT_S, connections=1)) as client:
        answer = client.ask(REQUEST, model="model", enough=_set())
        assert ("no connection", 1) == (answer.failure, answer.tries)
        assert not client.is_healthy()
        with pytest.raises(EngineError, match="no connection"):
            client.served()


def test_nobody_waits_for_the_next_try_once_it_is_enough():
    with (
        FakeServer(None, behave=lambda number, body: 500) as server,
        contextlib.closing(OpenAIClient(server.url, timeout_s=LIMIT_S, connections=1)) as client,
    ):
        assert 1 == client.ask(REQUEST, model="model", enough=_set()).tries


def test_headers_go_with_every_call():
    key = {"Authorization": "Bearer x"}
    with (
        FakeServer(None) as server,
        contextlib.closing(OpenAIClient(server.url, timeout_s=LIMIT_S, connections=1, headers=key)) as client,
    ):
        client.served()
        client.is_healthy()
        assert ["Bearer x", "Bearer x"] == [headers.get("Authorization") for headers in server.headers]


def test_a_missing_httpx_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(EngineError, match="httpx is not installed.*pip install httpx"):
        OpenAIClient("http://127.0.0.1:1", timeout_s=LIMIT_S, connections=1)


def _set():
    event = threading.Event()
    event.set()
    return event
