"""Sample traffic as requests of the OpenAI API: one line of a .jsonl file is one request.

    {"messages": [{"role": "user", "content": "..."}]}      chat
    {"prompt": "..."}  {"text": "..."}                      completion
    {"body": {"messages": [...]}, ...}                      a line of a batch file

What a line says of sampling goes along; how much it may generate is the smaller of its own number and the user's.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.errors import TraceError
from hotsplit.files import MAX_JSON_BYTES, read_bytes

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_PASSED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "min_tokens", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
"""Fields that change what is generated, and so what is routed; whatever else a line has stays here."""
_WANTED = '"messages" (a list), "prompt" or "text" (a string)'


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, ready to be sent but for the model's name."""

    number: int
    """From 0, in the order in which they are played."""
    where: str
    """File and line, for messages."""
    path: str
    """Of the API."""
    body: Mapping[str, Any]
    """Without `model`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """All requests of a user's files."""

    requests: tuple[Request, ...]
    """In the order in which they are played: that of the files, several files mixed evenly."""
    files: Mapping[str, str]
    """SHA-256 of every file by its name: the same name with other lines is other traffic."""


def read_sample(files: Sequence[Path], *, max_tokens: int, max_requests: int | None) -> Sample:
    """Read all requests.

    Args:
        files: .jsonl files.
        max_tokens: Most tokens that one request may generate.
        max_requests: The first so many; None for all.

    Raises:
        TraceError: A file cannot be read or has no request, a line is none, or there are fewer than two in all.
    """
    hashes: dict[str, str] = {}
    found: list[tuple[float, int, str, str, Mapping[str, Any]]] = []
    for order, path in enumerate(files):
        data = read_bytes(path, what="data file", error=TraceError, limit=MAX_JSON_BYTES)
        hashes[str(path)] = hashlib.sha256(data).hexdigest()
        lines = list(_lines(path, data))
        if not lines:
            raise TraceError(f"data file {path}", got="no request", wanted="one in every line", path=path)
        # Every file is spread over the whole, in its own order: both halves then hold some of each.
        found += [
            ((i + 0.5) / len(lines), order, where, *_request(line, where=where, max_tokens=max_tokens))
            for i, (where, line) in enumerate(lines)
        ]
    chosen = heapq.nsmallest(max_requests or len(found), found, key=lambda one: one[:2])
    if len(chosen) < 2:
        wanted = "at least 2: a plan is made from the first half and tested on the second"
        raise TraceError("the sample traffic", got=f"{len(chosen)} request", wanted=wanted, do="give more lines")
    requests = [
        Request(number=number, where=where, path=path, body=body)
        for number, (_, _, where, path, body) in enumerate(chosen)
    ]
    return Sample(requests=tuple(requests), files=hashes)


def _lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Every line that is not blank, parsed."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"bytes that are no UTF-8 at {error.start}"
        raise TraceError(f"data file {path}", got=got, wanted="text", path=path) from error
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside strings: at U+2028, at U+0085
        if not line.strip():
            continue
        where = f"data file {path}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:  # not only JSONDecodeError: integers of thousands of digits
            got = f"{error}, in what begins {line.lstrip()[:40]!r}"
            wanted = "one JSON object in every line"
            raise TraceError(where, got=got, wanted=wanted, path=path, line=number) from error


def _request(line: Any, *, where: str, max_tokens: int) -> tuple[str, Mapping[str, Any]]:
    """Path and body of one line."""
    content = line["body"] if isinstance(line, dict) and isinstance(line.get("body"), dict) else line
    if not isinstance(content, dict):
        raise TraceError(where, got=json.dumps(content)[:80], wanted=_WANTED)
    body = {name: content[name] for name in _PASSED if content.get(name) is not None}
    body["max_tokens"] = _limit(content, where=where, max_tokens=max_tokens)
    if type(body.get("min_tokens")) is int:  # else a server refuses what we have cut below it
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    if content.get("messages") is not None:
        path, body = _CHAT, {"messages": _messages(content["messages"], where=where), **body}
    else:
        path, body = _COMPLETION, {"prompt": _prompt(content, where=where), **body}
    _require_sendable(body, where=where)
    return path, body


def _require_sendable(body: Mapping[str, Any], *, where: str) -> None:
    """Refuse what Python's reader takes and no request can carry: NaN, halves of a character pair."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise TraceError(where, got="half of a surrogate pair", wanted="text that is Unicode") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(where, got=str(error), wanted="JSON as its standard has it") from error


def _limit(content: Mapping[str, Any], *, where: str, max_tokens: int) -> int:
    """How much it may generate."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = content.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise TraceError(f"{where}, {name}", got=json.dumps(value)[:40], wanted="an integer >= 1")
        return min(value, max_tokens)
    return max_tokens


def _messages(value: Any, *, where: str) -> list[Any]:
    is_list = isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)
    if not is_list or not value:
        raise TraceError(
            where, got=f"messages {json.dumps(value)[:60]}", wanted='a list of {"role": ..., "content": ...}'
        )
    return list(value)


def _prompt(content: Mapping[str, Any], *, where: str) -> Any:
    """A text, or token ids."""
    prompt = content["text"] if content.get("prompt") is None and "text" in content else content.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise TraceError(where, got=json.dumps(content)[:80], wanted=_WANTED)
    if not prompt:
        raise TraceError(where, got="an empty text", wanted="something to continue")
    return prompt
