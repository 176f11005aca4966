"""A client of an OpenAI server: few calls, each with a time limit, every failure a kind that can be counted.

httpx does the talking. It comes with vLLM, and is imported when a client is made.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotsplit.cli.sample_requests import Request
from hotsplit.errors import EngineError

if TYPE_CHECKING:
    import httpx

TRIES = 3
"""Of one request, in all."""
_WAITS_S = (0.5, 2.0)
"""Before the second and the third."""
_LONGEST_WAIT_S = 30.0
"""However much a server asks for."""
_AGAIN = frozenset({408, 409, 425, 429})
"""Refusals that may be none a moment later; so may every 5xx."""
_QUESTION_S = 10.0
"""Limit of what is no generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model that a server has."""

    name: str
    """As requests name it."""
    root: str
    """Folder or hub id, as vLLM tells it; the name where it tells none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of one request."""

    failure: str | None = None
    """Its kind, "HTTP 400" or "timed out" for one; None for an answer."""
    detail: str = ""
    """What the server said of a failure."""
    tries: int = 1
    """How often it was sent."""
    prompt_tokens: int = 0
    """As the server counted."""
    completion_tokens: int = 0
    """The same of what it generated."""


class Failure(Exception):  # noqa: N818 - no error of ours: it is counted, and at most once raised as one
    """A call that failed.

    Args:
        kind: What to count it under.
        detail: What the server said.
        is_final: Whether asking again cannot help.
        wait_s: How long the server asks to be left alone, in seconds; None where it does not.
    """

    def __init__(self, kind: str, *, detail: str = "", is_final: bool = False, wait_s: float | None = None) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail, self.is_final, self.wait_s = kind, detail, is_final, wait_s


class OpenAIClient:
    """Connections to one server; usable from many threads.

    Args:
        url: Scheme, host and port.
        timeout_s: Longest generation, in seconds.
        connections: At the same time.
        headers: Sent with every request.

    Raises:
        EngineError: httpx is not installed.
    """

    def __init__(
        self, url: str, *, timeout_s: float, connections: int, headers: Mapping[str, str] | None = None
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            cure = "pip install httpx, or vLLM, which brings it"
            raise EngineError("httpx is not installed", wanted="it, to talk to a server", do=cure) from error
        self._httpx = httpx
        self.url = url
        limits = httpx.Limits(max_connections=connections + 2)
        timeout = httpx.Timeout(timeout_s, connect=_QUESTION_S, pool=None)
        # No proxy of the environment stands between this host and itself.
        self._client = httpx.Client(base_url=url, timeout=timeout, limits=limits, headers=headers, trust_env=False)

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def is_healthy(self) -> bool:
        """Whether the server answers, and says that its engine lives."""
        try:
            return bool(self._client.get("/health", timeout=_QUESTION_S).status_code == 200)
        except (self._httpx.HTTPError, OSError):
            return False

    def served(self) -> Served:
        """The model that it serves.

        Raises:
            EngineError: It does not answer, or not as an OpenAI server does.
        """
        what = f"the server at {self.url}"
        try:
            content = self._json(self._call("GET", "/v1/models", timeout=_QUESTION_S))
            models = content["data"]
            first = next(model for model in models if not model.get("parent"))
            return Served(name=str(first["id"]), root=str(first.get("root") or first["id"]))
        except Failure as failure:
            do = "pass --header 'Authorization: Bearer KEY'" if failure.kind in ("HTTP 401", "HTTP 403") else None
            raise EngineError(what, got=str(failure), wanted="an OpenAI server", do=do) from failure
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise EngineError(what, got="no model in /v1/models", wanted="an OpenAI server") from error

    def metrics(self) -> str:
        """The text of /metrics.

        Raises:
            EngineError: There is none.
        """
        try:
            return self._call("GET", "/metrics", timeout=_QUESTION_S).text
        except Failure as failure:
            raise EngineError(f"{self.url}/metrics", got=str(failure), wanted="vLLM's metrics") from failure

    def ask(self, request: Request, *, model: str, enough: threading.Event) -> Answer:
        """Send a request, and again where that may help.

        Args:
            request: What to send.
            model: The model's name.
            enough: Set when nobody waits any more.
        """
        for number in range(1, TRIES + 1):
            try:
                used = self._usage(self._call("POST", request.path, json={"model": model, **request.body}))
            except Failure as failure:
                wait_s = failure.wait_s if failure.wait_s is not None else _WAITS_S[min(number, len(_WAITS_S)) - 1]
                if failure.is_final or number == TRIES or enough.wait(min(wait_s, _LONGEST_WAIT_S)):
                    return Answer(failure=failure.kind, detail=failure.detail, tries=number)
            else:
                return Answer(
                    tries=number,
                    prompt_tokens=_count(used.get("prompt_tokens")),
                    completion_tokens=_count(used.get("completion_tokens")),
                )
        raise EngineError("a request", got="no try at all")

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One call.

        Raises:
            Failure: It failed, whatever the way.
        """
        httpx = self._httpx
        try:
            response = self._client.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise Failure("timed out") from error
        except httpx.ConnectError as error:
            raise Failure("no connection", detail=str(error)) from error
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # a RuntimeError: closed by another thread
            raise Failure("connection broken", detail=str(error) or type(error).__name__) from error
        if response.is_success:
            return response
        status = response.status_code
        raise Failure(
            f"HTTP {status}",
            detail=_said(response.text),
            is_final=status < 500 and status not in _AGAIN,
            wait_s=_seconds(response.headers.get("retry-after")),
        )

    def _usage(self, response: httpx.Response) -> dict[str, Any]:
        """How many tokens an answer took. A proxy may say with status 200 that there is none."""
        content = self._json(response)
        if not isinstance(content.get("choices"), list) or content.get("error"):
            raise Failure("no completion", detail=_said(response.text))
        used = content.get("usage")
        return used if isinstance(used, dict) else {}

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except (ValueError, RecursionError) as error:
            raise Failure("no JSON", detail=response.text[:80]) from error
        if not isinstance(content, dict):
            raise Failure("no JSON object", detail=response.text[:80])
        return content


def _said(text: str) -> str:
    """What a server says of an error, without its wrapping."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:200]
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message") if isinstance(error, dict) else None
    return " ".join(str(message or text).split())[:200]


def _seconds(text: str | None) -> float | None:
    """A Retry-After of seconds; a date is not heeded."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
