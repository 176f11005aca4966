"""Lines of sample traffic: what they become, and how one that is none is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.cli.sample_requests import read_sample
from hotsplit.errors import TraceError

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def read(tmp_path):
    """read(line, line, ..., max_tokens=...) -> Sample."""

    def run(*lines, max_tokens=64, max_requests=None):
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return read_sample([path], max_tokens=max_tokens, max_requests=max_requests)

    return run


@pytest.mark.parametrize(
    ("line", "path", "body"),
    [
        ({"text": "a"}, "/v1/completions", {"prompt": "a", "max_tokens": 64}),
        ({"prompt": "a", "max_tokens": 9}, "/v1/completions", {"prompt": "a", "max_tokens": 9}),
        ({"prompt": [1, 2], "max_tokens": 900}, "/v1/completions", {"prompt": [1, 2], "max_tokens": 64}),
        ({"messages": CHAT, "temperature": 0}, "/v1/chat/completions",
         {"messages": CHAT, "temperature": 0, "max_tokens": 64}),
        ({"text": "a", "min_tokens": 300, "max_tokens": 900}, "/v1/completions",
         {"prompt": "a", "min_tokens": 64, "max_tokens": 64}),
        ({"messages": None, "prompt": None, "text": "a"}, "/v1/completions", {"prompt": "a", "max_tokens": 64}),
        ({"custom_id": "1", "body": {"messages": CHAT, "model": "other", "max_completion_tokens": 7, "stream": True}},
         "/v1/chat/completions", {"messages": CHAT, "max_tokens": 7}),
    ],
    ids=["text", "prompt", "token ids", "chat", "at least", "empty columns", "batch line"],
)  # fmt: skip
def test_a_line_becomes_a_request(read, line, path, body):
    request = read(line, line).requests[0]
    assert (path, body) == (request.path, dict(request.body))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: got Expecting"),
        ('"text"', 'line 2: got "text"'),
        ("[1]", "line 2"),
        ({"txt": "a"}, 'line 2: got {"txt": "a"}'),
        ({"text": 5}, "line 2"),
        ({"text": ""}, "line 2: got an empty text"),
        ({"prompt": [1, "a"]}, "line 2"),
        ({"messages": []}, "line 2: got messages []"),
        ({"messages": "hi"}, "line 2"),
        ({"messages": [{"content": "no role"}]}, "line 2"),
        ({"text": "a", "max_tokens": 0}, "line 2, max_tokens: got 0"),
        ({"text": "a", "max_tokens": True}, "line 2, max_tokens: got true"),
        ("9" * 5000, "line 2"),
        ("[" * 100_000, "line 2"),
        ('{"text": "a\\ud800"}', "line 2: got half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "line 2: got half of a surrogate pair"),
        ('{"text": "a", "temperature": NaN}', "line 2: got Out of range float"),
        ('{"text": "a", "chat_template_kwargs": {"x": [-Infinity]}}', "line 2: got Out of range float"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named_by_its_number(read, line, said):
    with pytest.raises(TraceError, match="t.jsonl") as caught:
        read({"text": "a"}, line, {"text": "b"})
    assert said in str(caught.value)


@pytest.mark.parametrize("lines", [(), ("", "  "), ({"text": "only one"},)], ids=["empty", "blank", "one"])
def test_too_little_traffic_is_refused(read, lines):
    with pytest.raises(TraceError, match=r"wanted (one in every line|at least 2)"):
        read(*lines)


def test_what_is_no_text_and_what_is_not_there_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe{}")
    for name in ("x.jsonl", "gone.jsonl"):
        with pytest.raises(TraceError, match=name):
            read_sample([tmp_path / name], max_tokens=1, max_requests=None)


def test_the_first_so_many_are_taken(read):
    lines = [{"text": str(i)} for i in range(9)]
    sample = read(*lines, max_requests=4)
    assert ["0", "1", "2", "3"] == [request.body["prompt"] for request in sample.requests]
    assert [0, 1, 2, 3] == [request.number for request in sample.requests]


@given(numbers=st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_files_are_mixed_in_their_own_order_and_evenly(tmp_path_factory, numbers):
    folder = tmp_path_factory.mktemp("mixed")
    paths = []
    for order, number in enumerate(numbers):
        paths.append(folder / f"{order}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": f"{order} {i}"}) + "\n" for i in range(number)))
    texts = [request.body["prompt"] for request in read_sample(paths, max_tokens=1, max_requests=None).requests]
    for order, number in enumerate(numbers):
        mine = [text for text in texts if text.startswith(f"{order} ")]
        assert [f"{order} {i}" for i in range(number)] == mine
        half = sum(text.startswith(f"{order} ") for text in texts[: (len(texts) + 1) // 2])
        assert abs(half - number / 2) <= 1 + len(numbers) / 2
