"""What commands print: prose by words, rates as percentages, progress without a terminal, log lines after a text."""

from __future__ import annotations

import logging
import math

import pytest

from hotsplit.cli import console


@pytest.mark.parametrize(
    ("value", "text"), [(0.68349, "68.3 %"), (0, "0.0 %"), (1.0, "100.0 %"), (None, "-"), (math.nan, "-")]
)
def test_a_rate_is_a_percentage_with_a_blank_before_the_sign(value, text):
    assert text == console.rate(value)


@pytest.mark.parametrize("columns", ["20", "300"])
@pytest.mark.parametrize("indent", [0, 4])
def test_prose_in_a_pipe_has_at_most_78_columns_and_every_word(capsys, monkeypatch, columns, indent):
    monkeypatch.setenv("COLUMNS", columns)
    text = " ".join(f"word{i}" for i in range(60))
    console.prose(text, indent=indent)
    lines = capsys.readouterr().out.splitlines()
    assert text.split() == " ".join(lines).split()
    assert 70 < max(map(len, lines)) <= 78
    assert [line.rstrip() for line in lines] == lines
    assert {indent} == {len(line) - len(line.lstrip()) for line in lines}


def test_a_label_stands_where_the_first_line_is_indented(capsys):
    console.prose(f"{'a' * 40} {'b' * 40}", indent=6, label="plan")
    assert [f"plan  {'a' * 40}", f"      {'b' * 40}"] == capsys.readouterr().out.splitlines()


def test_prose_keeps_brackets_and_emoji_codes(capsys):
    console.prose("dyn-steps 32 [2000] [bold]x[/bold] :cat:")
    assert "dyn-steps 32 [2000] [bold]x[/bold] :cat:\n" == capsys.readouterr().out


def test_a_table_has_its_second_line_of_a_head_above_its_numbers(capsys):
    console.table("", columns=["name", "oracle\nfree"], rows=[["a", "1.0 %"]])
    assert ["", "      oracle", "name    free", "a      1.0 %"] == capsys.readouterr().out.splitlines()


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand: clock[0] = seconds."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_long_work_tells_a_pipe_how_far_it_is_every_ten_seconds_at_most(capsys, clock):
    with console.progress("playing") as tell:
        for second in range(26):
            clock[0] = float(second)
            tell(second, 25)
    assert ["playing: 40 %", "playing: 80 %"] == capsys.readouterr().err.splitlines()


def test_short_work_tells_a_pipe_nothing(capsys, clock):
    with console.progress("playing") as tell:
        clock[0] = 9.9
        tell(1, 2)
        clock[0] = 60.0
        tell(2, 2)  # done: what follows says so
    assert "" == capsys.readouterr().err


def test_log_lines_wait_for_the_end_of_a_text_but_a_warning_does_not(capsys):
    logger = logging.getLogger("hotsplit.somewhere")
    with console.logging_to_stderr():
        with console.logging_after():
            logger.info("first")
            assert "" == capsys.readouterr().err
            logger.warning("second")
            assert "first\nsecond\n" == capsys.readouterr().err
            logger.info("third")
        assert "third\n" == capsys.readouterr().err
        logger.info("fourth")
    assert "fourth\n" == capsys.readouterr().err


def test_what_a_terminal_would_obey_is_shown_instead(capsys):
    name = "a\x1b[31m\x9b\x07"
    console.table(name, columns=["name", name], rows=[[name, "1"]])
    console.prose(name)
    console.out.print(name)
    console.note(name)
    console.print_json({"name": name})
    written = capsys.readouterr()
    assert not {"\x1b", "\x9b", "\x07"} & set(written.out + written.err)
    assert 5 == written.out.count("a\\x1b[31m\\x9b\\x07")
    assert "a\\x1b[31m\\x9b\\x07\n" == written.err
