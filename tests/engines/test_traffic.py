from __future__ import annotations

import json

import pytest

from hotsplit.engines.transformers.resolve import load_tokenizer
from hotsplit.engines.transformers.traffic import Prompt, is_encodable, read_prompts
from hotsplit.errors import TraceError

pytestmark = pytest.mark.transformers


class Words:
    """A tokenizer whose tokens are numbers written out: "5 6" -> [5, 6]. It puts a 1 first where specials are wanted."""

    chat_template = "yes"

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        return {"input_ids": [1] * add_special_tokens + [int(word) for word in text.split()]}

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        assert (True, False) == (add_generation_prompt, return_dict)
        return [int(message["content"]) for message in messages] + [9]


def read(*files, length=4, **options):
    return read_prompts(files, tokenizer=Words(), prompt_tokens=length, **options)


def numbers(first, last):
    return " ".join(map(str, range(first, last)))


@pytest.fixture
def file(tmp_path):
    """file("name.txt", content) -> path."""

    def write(name, content):
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        return tmp_path / name

    return write


def test_a_text_is_cut_into_whole_pieces_of_one_length_and_the_rest_is_dropped(file):
    prompts = read(file("prose.txt", numbers(10, 20)))
    assert [(10, 11, 12, 13), (14, 15, 16, 17)] == [prompt.token_ids for prompt in prompts]
    assert {"prose"} == {prompt.domain for prompt in prompts}


def test_a_text_shorter_than_a_prompt_is_one_short_prompt(file):
    assert [Prompt(domain="short", token_ids=(10, 11))] == read(file("short.txt", "10 11"))


def test_a_text_of_exactly_one_prompt_is_one(file):
    assert [(10, 11, 12, 13)] == [prompt.token_ids for prompt in read(file("one.txt", numbers(10, 14)))]


def test_every_line_of_a_jsonl_is_one_request_cut_to_the_longest_prompt(file):
    lines = [{"text": "5"}, {"text": numbers(10, 30)}, {"text": "7 8"}]
    prompts = read(file("asks.jsonl", "\n".join(map(json.dumps, lines))))
    assert [(1, 5), (1, 10, 11, 12), (1, 7, 8)] == [prompt.token_ids for prompt in prompts]


def test_chat_messages_go_through_the_template(file):
    line = json.dumps({"messages": [{"role": "user", "content": "6"}, {"role": "assistant", "content": "7"}]})
    assert [(6, 7, 9)] == [prompt.token_ids for prompt in read(file("chat.jsonl", line))]


def test_blank_lines_and_windows_line_ends_are_no_requests(file):
    assert 2 == len(read(file("asks.jsonl", '\n{"text": "5"}\r\n\r\n{"text": "6"}\n \n')))


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u000b".encode().decode()])
def test_a_request_is_not_cut_at_what_only_python_calls_a_line_end(file, separator):
    line = json.dumps({"text": f"5{separator}6"}, ensure_ascii=False)
    assert [(1, 5, 6)] == [prompt.token_ids for prompt in read(file("asks.jsonl", line))]


def test_files_keep_their_order_and_their_domains(file):
    prompts = read(file("b.txt", "10"), file("a.jsonl", '{"text": "11"}'))
    assert ["b", "a"] == [prompt.domain for prompt in prompts]


@pytest.mark.parametrize(
    ("most", "firsts"), [(None, [0, 4, 8, 12, 16, 20]), (6, [0, 4, 8, 12, 16, 20]), (3, [0, 8, 16]), (1, [0]), (9, [0, 4, 8, 12, 16, 20])]
)  # fmt: skip
def test_at_most_so_many_prompts_are_spread_evenly_over_each_file(file, most, firsts):
    prompts = read(file("a.txt", numbers(0, 24)), max_prompts=most)
    assert firsts == [prompt.token_ids[0] for prompt in prompts]


def test_the_most_prompts_hold_for_every_file_by_itself(file):
    prompts = read(file("a.txt", numbers(0, 24)), file("b.txt", numbers(0, 24)), max_prompts=2)
    assert ["a", "a", "b", "b"] == [prompt.domain for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", "", "no text"),
        ("a.txt", " \n", "no text"),
        ("a.jsonl", "", "no text"),
        ("a.jsonl", '{"text": "1"}\n{"text": 5}', 'line 2: got {"text": 5}; wanted "text" (a string)'),
        ("a.jsonl", '"text"', 'line 1: got "text"; wanted'),
        ("a.jsonl", "null", "line 1: got null; wanted"),
        ("a.jsonl", '{"messages": "hi"}', 'line 1: got {"messages": "hi"}; wanted'),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "line 1: got messages that the chat template refuses"),
        ("a.jsonl", '{"text": "1"}\n{', "line 2: got Expecting property name"),
        ("a.jsonl", '{"text": "\\udc00"}', "line 1: got half a surrogate pair"),
    ],
)
def test_what_is_no_traffic_is_refused_by_file_and_line(file, name, content, reason):
    path = file(name, content)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"data file {path}")
    assert reason in str(caught.value)


def test_chat_messages_need_a_template(file, monkeypatch):
    monkeypatch.setattr(Words, "chat_template", None)
    with pytest.raises(TraceError, match="line 1: got chat messages; wanted .* no chat template"):
        read(file("a.jsonl", '{"messages": []}'))


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    for path, reason in (
        (tmp_path / "gone.txt", "no such file or directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "binary.txt", "bytes that are no UTF-8 at 2"),
    ):
        with pytest.raises(TraceError, match=reason) as caught:
            read(path)
        assert path == caught.value.path


def test_half_a_surrogate_pair_is_no_text():
    assert [True, True, False, False] == [is_encodable(text) for text in ("", "\U0001f600", "a\ud83d", "\udc00")]


def test_prompts_of_the_bundled_model_decode_to_the_text_they_were_cut_from(tiny_moe, file):
    tokenizer = load_tokenizer(tiny_moe)
    text = "The quick brown fox jumps over the lazy dog, and runs on. " * 20
    prompts = read_prompts([file("fox.txt", text)], tokenizer=tokenizer, prompt_tokens=16)
    assert len(prompts) > 5
    assert {16} == {len(prompt.token_ids) for prompt in prompts}
    assert text.startswith("".join(tokenizer.decode(prompt.token_ids) for prompt in prompts))
