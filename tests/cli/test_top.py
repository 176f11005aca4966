"""`hotsplit top` as somebody at a terminal has it: the screen at any size, lines in a pipe, JSON, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from cli.metrics_server import Answers, serving, snapshot, text_of
from hotsplit.cli import watch_view
from hotsplit.cli.scrape import parse
from hotsplit.cli.top import command
from hotsplit.cli.watch_loop import show_all
from hotsplit.cli.watch_rates import Board
from hotsplit.cli.watch_view import BLOCKS, PLAIN, plain, screen
from hotsplit.cli.watching import Frame, frame_json
from patience import LIMIT_S

HOTSPLIT = Path(sys.executable).parent / "hotsplit"
URL = "http://host:8000/metrics"


def frame_of(*answers, error="", notes=(), restarts=0):
    """A frame after answers five seconds apart, each a list of snapshots."""
    board = Board(history=60)
    for i, snapshots in enumerate(answers):
        board.add(parse(text_of(*snapshots), url=URL), at_s=5.0 * i)
    return Frame(
        url=URL,
        at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        error=error,
        age_s=7.0,
        num_readings=len(answers),
        num_restarts=restarts,
        info={rank: course.now.info for rank, course in board.courses.items()},
        past=tuple(board.past),
        notes=tuple(notes),
    )


def ranks(number, *, steps=100):
    return [snapshot(rank, steps=steps) for rank in range(number)]


def busy(number=1, *, answers=6):
    return frame_of(*(ranks(number, steps=100 + 50 * i) for i in range(answers)))


def drawn(frame, *, width=80, height=24, bars=BLOCKS, colour=False):
    """Lines of the screen as a terminal of this size would have them."""
    console = Console(width=width, height=height, force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as capture:
        console.print(screen(frame, width=width, height=height, bars=bars))
    return capture.get().splitlines()


def row(lines, label):
    (line,) = [line for line in lines if line.startswith(f"{label} ") and line.strip(" ")[-1] not in BLOCKS]
    return line.removeprefix(label).split("  ")[-1].strip()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("height", [24, 50])
@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_a_screen_fits_its_terminal(width, height, number):
    lines = drawn(busy(number), width=width, height=height)
    assert len(lines) <= height
    assert [] == [line for line in lines if len(line) > width]


def test_a_screen_of_one_rank_says_everything_once():
    lines = drawn(busy(), height=50)
    assert lines[0].startswith(f"hotsplit top  {URL}")
    assert lines[1].startswith(f"1 rank, dynamic, cpu-twin, plan {'ab12' * 3}, hotsplit 0.1.0")
    assert "rates over 20 s" == lines[2].strip()
    assert "all" not in lines[3]
    shown = {
        "hit rate": "75.0 %",
        "byte hit rate": "25.0 %",
        "cold per step": "3.00 MiB",
        "tokens/s": "20.0",
        "steps/s": "10.0",
        "window: hit": "80.0 %",
        "  oracle  ": "90.0 %",
        "  oracle gap": "10.0 pt",
        "drift": "10.0 %",
        "swaps d/r/f": "7/2/0",
        "update": "2.0 ms",
        "failed updates": "0",
        "hot": "1.00 GiB",
        "budget": "1.00 GiB",
        "host (cold)": "3.00 GiB",
    }
    assert shown == {label: row(lines, label) for label in shown}


def test_several_ranks_stand_side_by_side_behind_all_of_them():
    lines = drawn(busy(4))
    assert ["all", *["rank", "0", "rank", "1", "rank", "2", "rank", "3"]] == lines[3].split()
    (hot,) = [line for line in lines if line.startswith("hot ")]
    assert ["hot", "4.00", "GiB", *["1.00", "GiB"] * 4] == hot.split()


def test_ranks_that_do_not_fit_are_counted_and_in_the_json():
    frame = busy(8)
    lines = drawn(frame)
    assert any("3 more of 8 ranks need a wider terminal" in line for line in lines)
    assert 8 == len(frame_json(frame)["ranks"])
    assert not any("wider" in line for line in drawn(frame, width=200))


def test_a_low_screen_keeps_what_matters_most():
    lines = drawn(busy(), height=18)
    text = "\n".join(lines)
    assert all(label in text for label in ("hit rate", "cold per step", "tokens/s", "failed updates", "host (cold)"))
    assert "steps/s" not in text


def test_the_first_screen_waits_for_a_second_reading_and_shows_no_zero_for_what_is_unknown():
    lines = drawn(frame_of(ranks(1)))
    assert "waiting for a second reading" == lines[2].strip()
    assert ("-", "-", "-") == tuple(row(lines, label) for label in ("hit rate", "cold per step", "tokens/s"))
    assert "rates need two changes" in drawn(frame_of(ranks(1), ranks(1, steps=150)))[2]


def test_a_server_that_is_away_is_said_above_its_last_numbers():
    frame = replace(busy(), error=f"{URL}: got connection refused")
    text = "\n".join(drawn(frame))
    assert f"{URL}: got connection refused; asking again" in text
    assert "what follows is 7 s old" in text
    assert "75.0 %" in text
    never = drawn(frame_of(error=f"{URL}: got connection refused"))
    assert [2, True] == [len(never), "connection refused; asking again" in never[1]]


def test_bars_rise_with_the_figure_and_leave_a_gap_where_there_was_none():
    lines = drawn(busy(), height=50, bars=PLAIN)
    bars = lines[lines.index(next(line for line in lines if line.startswith("hit rate"))) + 1]
    assert "____" == bars.strip()[:4]
    hits = [60, 60, 200, 600, 1200]
    frame = frame_of(
        *([snapshot(steps=100 + i, hit_pairs={"decode": h, "prefill": 0})] for i, h in enumerate(hits)),
    )
    lines = drawn(frame, height=50)
    bars = lines[lines.index(next(line for line in lines if line.startswith("hit rate"))) + 1].strip()
    assert list(bars) == sorted(bars)
    assert BLOCKS[-1] == bars[-1]


def test_notes_are_on_the_screen_and_no_control_character_is():
    text = "\n".join(drawn(frame_of(ranks(1), notes=["rank 2: gone", "a\x1b[2Jb"])))
    assert "rank 2: gone" in text
    assert "\x1b" not in text


def test_a_line_has_all_ranks_as_one_in_the_update_lines_manner():
    assert (
        "hotsplit top time=2026-01-02T03:04:05+00:00 state=live ranks=4 hit=0.750 byte_hit=0.250 window_hit=0.800 "
        "oracle=0.900 gap=0.100 drift=0.10 cold_mib_per_step=12.000 tokens_per_s=20.0 swaps=28 refused=8 failed=0 "
        "update_failures=0 hot_gib=4.000 host_gib=12.000 budget_gib=4.000"
    ) == plain(busy(4))
    assert "hit=none" in plain(frame_of(ranks(1)))


def test_what_slots_kept_is_shown_where_there_are_slots_and_nowhere_else():
    assert not any("kept" in line for line in drawn(busy(), height=50))
    assert "kept" not in plain(busy())
    kept = {"kept_ratio_window": 0.0}  # the last window kept nothing
    frame = frame_of(*([snapshot(steps=steps, kept_bytes=2**20 * steps, **kept)] for steps in (100, 150, 200)))
    lines = drawn(frame, height=50)
    assert "25.0 %" == row(lines, "kept in slots")
    assert lines.index(next(line for line in lines if "kept in slots" in line)) == 1 + lines.index(
        next(line for line in lines if line.startswith("byte hit rate"))
    )
    assert " byte_hit=0.250 kept=0.250 window_hit=0.800 " in plain(frame)
    quiet = frame_of(*([snapshot(steps=steps, **kept)] for steps in (100, 150)))
    assert "0.0 %" == row(drawn(quiet, height=50), "kept in slots")


FIGURES = {
    "hit_ratio", "byte_hit_ratio", "kept_ratio", "hit_ratio_window", "byte_hit_ratio_window", "kept_ratio_window",
    "oracle_ratio_window",
    "oracle_gap_ratio", "drift_ratio", "cold_bytes_per_step", "tokens_per_s", "decode_tokens_per_s",
    "prefill_tokens_per_s", "steps_per_s", "swaps", "swap_bytes_per_s", "update_failures", "update_seconds",
    "hot_bytes", "host_bytes", "budget_bytes", "span_s", "state",
}  # fmt: skip


@pytest.mark.parametrize("frame", [busy(2), frame_of(ranks(2))], ids=["busy", "first"])
def test_json_has_the_same_keys_whatever_is_known(frame):
    found = json.loads(json.dumps(frame_json(frame), allow_nan=False))
    assert ["kind", "url", "time", "error", "readings", "restarts", "notes", "ranks", "all"] == list(found)
    assert ("top", URL, None) == (found["kind"], found["url"], found["error"])
    assert [0, 1] == [rank["rank"] for rank in found["ranks"]]
    assert FIGURES == set(found["all"]) == set(found["ranks"][0]) - {"rank", "info"}
    assert {"done": 14, "refused": 4, "failed": 0} == found["all"]["swaps"]
    assert {"version", "plan_hash", "mode", "backend"} == set(found["ranks"][0]["info"])


def test_the_page_explains_every_row_every_key_and_no_option_that_there_is_not():
    page = (Path(__file__).parents[2] / "docs" / "top.md").read_text(encoding="utf-8")
    code = set(re.findall(r"`([^`\n]+)`", page))
    assert set() == FIGURES - code
    assert set() == {row.label.strip() for row in watch_view._ROWS} - code
    options = {name for parameter in command.params for name in parameter.opts}
    assert set() == set(re.findall(r"--[a-z]+", page)) - options - {"--help"}


@pytest.fixture
def server():
    """A server whose numbers grow by ten steps with every reading."""

    def grow(wire):
        steps = 100 + 10 * len(answers.asked)
        body = text_of(*ranks(2, steps=steps)).encode()
        wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    answers = Answers(instead=grow)
    with serving(answers):
        yield answers


def test_once_prints_one_line_and_as_json_one_object(cli, server):
    done = cli("top", server.url, "--timeout", LIMIT_S, "--once", "--interval", 0.2)
    assert (0, "") == (done.code, done.err)
    assert done.out.startswith("hotsplit top time=")
    assert 1 == done.out.count("\n")
    assert " state=live ranks=2 hit=0.750 " in done.out
    found = json.loads(cli("top", f"{server.url}/v1", "--timeout", LIMIT_S, "--once", "--json", "--interval", 0.2).out)
    assert (f"{server.url}/metrics", "live", 2) == (found["url"], found["all"]["state"], len(found["ranks"]))
    assert found["all"]["span_s"] >= 0.2
    assert found["all"]["tokens_per_s"] == pytest.approx(2 * found["all"]["steps_per_s"])


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("file:///etc/passwd",), 2, "scheme 'file'"),
        (("host:port",), 2, "wanted an address"),
        (("host", "--header", "nonsense"), 2, "wanted 'Name: value'"),
    ],
)
def test_a_wrong_call_is_one_line(cli, arguments, code, reason):
    assert reason in cli("top", *arguments).refusal(code)


@pytest.mark.parametrize(
    "option", [("--interval", "0"), ("--interval", "nan"), ("--history", "0"), ("--timeout", "-1")]
)
def test_an_impossible_number_is_a_usage_error(cli, option):
    done = cli("top", "host", *option)
    assert (2, "") == (done.code, done.out)
    assert option[0] in done.err


def test_a_server_without_hotsplit_a_key_that_is_missing_and_nobody_at_all_end_once(cli, server):
    patient = ("--timeout", LIMIT_S)
    with serving(Answers(body=b"vllm:running 1\n")) as other:
        assert (
            "no hotsplit_ metrics among 1 names; was the server started with"
            in cli("top", other.url, *patient).refusal()
        )
        other.status = 401
        assert "--header" in cli("top", other.url, "--once", *patient).refusal()
    # Now nobody listens there.
    assert "connection refused" in cli("top", other.url, "--once", *patient).refusal()


def started(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPLIT_")}  # noqa: TID251
    environment |= {"TERM": options.pop("term", "xterm")}
    return subprocess.Popen([HOTSPLIT, "top", "--timeout", str(LIMIT_S), *arguments], env=environment, **options)


def test_in_a_pipe_every_reading_is_a_line_and_ctrl_c_ends_it_with_success(server):
    process = started(server.url, "--interval", "0.1", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=LIMIT_S)
    assert (0, "") == (process.returncode, err)
    assert ["waiting", "waiting", "live", "live"] == [line.split("state=")[1].split()[0] for line in lines]
    assert "\x1b" not in "".join(lines) + rest


def test_an_outage_in_a_pipe_is_said_once_and_the_lines_go_on(server):
    process = started(
        server.url, "--interval", "0.1", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert json.loads(process.stdout.readline())["error"] is None
    grow, server.instead, server.status = server.instead, None, 503
    while json.loads(process.stdout.readline())["error"] is None:
        pass
    assert "503" in json.loads(process.stdout.readline())["error"]
    server.instead = grow
    while json.loads(process.stdout.readline())["error"] is not None:
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert 0 == process.returncode
    assert 1 == err.count("503 Service Unavailable")
    assert err.endswith("; asking again\n")


def test_a_long_outage_in_a_pipe_is_said_again_every_half_minute(capsys):
    away = replace(frame_of(ranks(1)), error=f"{URL}: got connection refused")
    moments = [0, 10, 29, 30, 31, 59, 61, 90, 91, 92]
    show_all((replace(away, at=away.at + timedelta(seconds=at)) for at in moments), as_json=False)
    said = capsys.readouterr()
    assert ("", 4) == (said.out, said.err.count("connection refused; asking again"))  # at 0, 30, 61 and 91


def seen_on_a_terminal(master, *, until, timeout_s=LIMIT_S):
    """What a process writes to its terminal until something is in it, or until it ends."""
    text, end = "", time.monotonic() + timeout_s
    while time.monotonic() < end and until not in text:
        if select.select([master], [], [], 0.1)[0]:
            try:
                text += os.read(master, 65536).decode(errors="replace")
            except OSError:  # nobody has the other end any more
                break
    return text


def test_on_a_terminal_it_has_a_screen_of_its_own_and_gives_it_back(server):
    master, slave = pty.openpty()
    process = started(server.url, "--interval", "0.1", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        text = seen_on_a_terminal(master, until="rates over")
        assert "rates over" in text
        process.send_signal(signal.SIGINT)
        text += seen_on_a_terminal(master, until="never")
        assert 0 == process.wait(LIMIT_S)
    finally:
        os.close(master)
    enter, leave, hide, show = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"
    assert 0 <= text.index(enter) < text.index("rates over") < text.index(leave)
    assert text.rindex(hide) < text.rindex(show)
    assert "Traceback" not in text


def test_a_terminal_that_cannot_move_its_cursor_has_lines(server):
    master, slave = pty.openpty()
    process = started(server.url, "--interval", "0.1", stdin=slave, stdout=slave, stderr=slave, term="dumb")
    os.close(slave)
    try:
        text = seen_on_a_terminal(master, until="state=live")
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(LIMIT_S)
    finally:
        os.close(master)
    assert "state=live" in text
    assert "\x1b" not in text
