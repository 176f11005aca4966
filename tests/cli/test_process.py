"""What only a process of its own can show: a missing torch, an interrupt, a closed pipe, an odd encoding."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from hotsplit.data import text_path
from hotsplit.metrics import read_snapshot
from patience import LIMIT_S, until

MAIN = "from hotsplit.cli.main import main; main()"
WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def command(*arguments, code=MAIN):
    return [sys.executable, "-c", code, *map(str, arguments)]


def environment(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}  # noqa: TID251 - a child inherits it


def run(*arguments, code=MAIN, **changes):
    return subprocess.run(
        command(*arguments, code=code),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(**changes),
        check=False,
    )


@pytest.mark.parametrize("name", ["plan", "show", "rerank"])
def test_plan_show_and_rerank_run_without_torch(name, counts, tiny_moe, tmp_path):
    arguments = {
        "plan": ("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.002, "-o", tmp_path / "plan.json", "--json"),
        "show": ("show", counts, "--json"),
        "rerank": ("rerank", counts, counts, "-o", tmp_path / "merged.json", "--json"),
    }
    done = run(*arguments[name], code=WITHOUT_TORCH + MAIN)
    assert 0 == done.returncode, done.stderr
    assert json.loads(done.stdout)["kind"] in ("plan", "histogram")


@pytest.mark.parametrize("name", ["run", "profile", "demo"])
def test_commands_that_need_torch_say_how_to_install_it(name, tmp_path):
    arguments = {
        "run": ("run", "model", "--prompt", "x"),
        "profile": ("profile", "model", "--data", "x", "-o", tmp_path / "h.json"),
        "demo": ("demo",),
    }
    done = run(*arguments[name], code=WITHOUT_TORCH + MAIN)
    assert (1, "") == (done.returncode, done.stdout)
    assert "is not installed; in hotsplit's checkout run pip install '.[transformers]'\n" in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_a_reader_that_goes_away_ends_a_command_quietly(counts):
    with subprocess.Popen(
        command("show", counts), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
        assert 0 < process.wait(timeout=LIMIT_S)
    assert b"" == error


def test_a_name_that_the_terminal_cannot_spell_is_escaped(counts, tmp_path):
    path = tmp_path / "\u4e2d.json"
    path.write_bytes(counts.read_bytes())
    done = run("show", path, PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    assert (0, "") == (done.returncode, done.stderr)
    assert "\\u4e2d.json: 4 layers" in done.stdout


def test_the_installed_program_answers(tiny_moe):
    done = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import entry_points as e; e(name='hotsplit')['hotsplit'].load()()",
         "plan", str(tiny_moe / "none")],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False,
    )  # fmt: skip
    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("hotsplit: model folder ")


def heed_signals():
    """Whoever runs the tests may ignore signals (nohup, a job in the background), and children inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(*arguments):
    """A command that runs on; whatever a test makes of it, it does not outlive the test."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=heed_signals,  # noqa: PLW1509 - no other thread of the tests runs here
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.transformers
@pytest.mark.slow
def test_an_interrupted_profile_leaves_the_users_files_as_they_were(tiny_moe, tmp_path):
    histogram, trace = tmp_path / "hist.json", tmp_path / "trace.npz"
    histogram.write_text("mine")
    endless = ("--prompt-tokens", 64, "--decode-tokens", 900, "--max-prompts", 700, "--batch-size", 1)
    arguments = ("profile", tiny_moe, "--data", text_path("c"), *endless, "-o", histogram, "--trace", trace)
    with started(*arguments) as process:
        for line in process.stderr:
            if line.startswith("hotsplit is on"):
                break
        time.sleep(0.5)  # into the traffic
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=LIMIT_S)
    assert (130, "") == (process.returncode, out)
    assert "hotsplit: interrupted; nothing was left half-written" == error.strip().splitlines()[-1]
    assert "Traceback" not in error
    assert "mine" == histogram.read_text()
    assert [histogram] == list(tmp_path.iterdir())


@pytest.mark.transformers
@pytest.mark.parametrize(("number", "times", "code"), [("SIGTERM", 1, 143), ("SIGTERM", 2, 143), ("SIGHUP", 1, 129)])
def test_a_run_that_is_told_to_end_saves_what_it_learned(tiny_moe, tmp_path, number, times, code):
    arguments = ("run", tiny_moe, "--prompt", "x", "--max-new-tokens", 100_000, "--hot-gib", 0.002, "--dyn-steps", 5)
    with started(*arguments, "--state-dir", tmp_path) as process:
        for line in process.stderr:
            if line.startswith("hotsplit is on"):
                break
        until(lambda: 10 <= max((read_snapshot(path).steps for path in tmp_path.rglob("rank0.json")), default=0))
        for _ in range(times):
            process.send_signal(getattr(signal, number))
        _, error = process.communicate(timeout=LIMIT_S)
    assert code == process.returncode
    assert "hotsplit: ended by a signal; nothing was left half-written" in error.splitlines()
    assert "Traceback" not in error
    (learned,) = (tmp_path / "learned").glob("*.json")
    assert json.loads(learned.read_text())["phases"]["decode"]["tokens"] > 0


def test_a_signal_that_somebody_ignores_stays_ignored(counts):
    code = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from hotsplit.cli import main
main.group.main = lambda **_: signal.raise_signal(signal.SIGTERM)
main.main()
assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
"""
    assert (0, "") == ((done := run(code=code)).returncode, done.stderr)


def test_a_command_in_another_thread_leaves_signals_alone(counts):
    code = f"""
import sys, threading
from hotsplit.cli.main import main
sys.argv = ["hotsplit", "show", {str(counts)!r}]
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    done = run(code=code)
    assert (0, "") == (done.returncode, done.stderr)
    assert "4 layers x 32 experts" in done.stdout


@pytest.mark.transformers
def test_a_run_prints_nothing_but_its_object_on_stdout_and_no_progress_into_a_pipe(tiny_moe, tmp_path):
    arguments = ("run", tiny_moe, "--prompt", "x", "--max-new-tokens", 2, "--hot-gib", 0.002, "--json")
    done = run(*arguments, "--state-dir", tmp_path)
    assert 0 == done.returncode
    assert 2 == json.loads(done.stdout)["new_tokens"]
    assert any(line.startswith("hotsplit is on") for line in done.stderr.splitlines())
    assert "it/s" not in done.stderr


def on_a_terminal(*arguments, columns=80):
    """What a command shows on a terminal, where both streams go, with plain newlines."""
    import pty

    master, slave = pty.openpty()
    with subprocess.Popen(
        command(*arguments), stdout=slave, stderr=slave, env=environment(COLUMNS=str(columns), TERM="dumb")
    ) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # how Linux says that the other side is gone
                break
            if not part:
                break
            text += part
        assert 0 == process.wait(timeout=LIMIT_S), text
    os.close(master)
    return text.decode().replace("\r\n", "\n")


def test_a_narrow_terminal_cuts_nothing(counts):
    text = on_a_terminal("plan", "--counts", counts, "--hot-fraction", 0.3, columns=40)
    assert "in-sample, decode" in text
    assert re.search(r"% \(\d\)\n", text)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize("columns", [40, 60])
def test_a_terminal_wraps_prose_at_words(counts, columns):
    text = on_a_terminal("plan", "--counts", counts, "--hot-fraction", 0.3, columns=columns)
    lines = text.partition("\n\n")[0].splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert "38 of 128 experts are hot" in " ".join(lines)


@pytest.mark.transformers
def test_a_terminal_shows_the_text_of_a_run_once_whole_and_before_the_log_lines(tiny_moe, tmp_path):
    arguments = ("run", tiny_moe, "--prompt", "import os", "--max-new-tokens", 40, "--temperature", 0.8)
    options = (*arguments, "--hot-gib", 0.002, "--dyn-steps", 10, "--learned", "ignore", "--state-dir", tmp_path)
    text = json.loads(run(*options, "--json").stdout)["text"]
    shown = on_a_terminal(*options)
    assert 1 == shown.count(f"{text}\n")
    before, after = shown.split(f"{text}\n")
    assert "hotsplit is on" in before
    assert "hotsplit update=" not in before
    assert 3 <= after.count("hotsplit update=") <= 4
    assert "40 tokens in" in after
