"""Sample traffic: prompts out of a user's own files.

A plain text file is a domain and is cut into prompts of equal length. A .jsonl file holds one request per line, with
"text" or with chat "messages" (put through the model's chat template).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.errors import TraceError
from hotsplit.files import read_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request."""

    domain: str
    """Name of the file that it came from, without its ending."""
    token_ids: tuple[int, ...]
    """At least one."""


def read_prompts(
    files: Sequence[Path], *, tokenizer: Any, prompt_tokens: int, max_prompts: int | None = None
) -> list[Prompt]:
    """Turn files into prompts.

    Args:
        files: Text files, and .jsonl files with "text" or "messages" per line.
        tokenizer: Of the model.
        prompt_tokens: Longest prompt; a text file is cut into pieces of this length.
        max_prompts: At most so many per file, spread over it evenly; None for all.

    Raises:
        TraceError: A file is unreadable, no UTF-8, empty, or a line has neither text nor messages.
    """
    prompts: list[Prompt] = []
    for path in files:
        text = _read(path)
        lines = _requests(path, text, tokenizer=tokenizer) if path.suffix == ".jsonl" else None
        pieces = _cut(text, tokenizer, prompt_tokens) if lines is None else (ids[:prompt_tokens] for ids in lines)
        found = [Prompt(domain=path.stem, token_ids=tuple(ids)) for ids in pieces if ids]
        if not found:
            raise TraceError(f"data file {path}", got="no text", wanted="at least one prompt", path=path)
        prompts += _spread(found, max_prompts)
    return prompts


def is_encodable(text: str) -> bool:
    """Whether a text is whole characters: JSON and command lines can smuggle in what no tokenizer takes.

    Args:
        text: From outside; half a surrogate pair makes it unusable.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read(path: Path) -> str:
    data = read_bytes(path, what="data file", error=TraceError)
    try:
        # As a text file is read, with one kind of newline.
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise TraceError(
            f"data file {path}", got=f"bytes that are no UTF-8 at {error.start}", wanted="text", path=path
        ) from error


def _cut(text: str, tokenizer: Any, prompt_tokens: int) -> Iterator[list[int]]:
    """Whole pieces of one length, so that a batch needs no padding; a short file gives one short piece."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < prompt_tokens:
        yield ids
    for start in range(0, len(ids) - prompt_tokens + 1, prompt_tokens):
        yield ids[start : start + prompt_tokens]


def _requests(path: Path, text: str, *, tokenizer: Any) -> Iterator[list[int]]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside strings: at U+2028, at U+0085
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:  # not only JSONDecodeError: integers of thousands of digits
            got = f"{error}, in what begins {line.lstrip()[:40]!r}"
            raise TraceError(f"data file {path}, line {number}", got=got, wanted="JSON", line=number) from error
        yield _request_ids(request, tokenizer=tokenizer, where=f"data file {path}, line {number}")


def _request_ids(request: Any, *, tokenizer: Any, where: str) -> list[int]:
    if isinstance(request, dict) and isinstance(request.get("text"), str):
        text = request["text"]
        if not is_encodable(text):
            raise TraceError(where, got="half a surrogate pair", wanted="whole characters")
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids
    if not (isinstance(request, dict) and isinstance(request.get("messages"), list)):
        raise TraceError(where, got=json.dumps(request)[:80], wanted='"text" (a string) or "messages" (a list)')
    if not tokenizer.chat_template:
        raise TraceError(where, got="chat messages", wanted='"text", since this model has no chat template')
    try:
        return list(tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template is code from the model's folder and may raise anything
        raise TraceError(where, got=f"messages that the chat template refuses: {error}") from error


def _spread(prompts: list[Prompt], max_prompts: int | None) -> list[Prompt]:
    if max_prompts is None or len(prompts) <= max_prompts:
        return prompts
    return [prompts[i * len(prompts) // max_prompts] for i in range(max_prompts)]
