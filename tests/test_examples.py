"""The examples run as they stand, on the bundled model, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, folder):
    """Run an example in a process of its own; its cache would be in `folder`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}  # noqa: TID251
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_example_is_tested_here():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [] == [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in tested]


def test_an_example_says_how_it_is_called():
    for path in EXAMPLES.glob("*.py"):
        assert f"    .venv/bin/python examples/{path.name}\n" in path.read_text(encoding="utf-8")


def test_generate_gives_the_stock_models_text(tmp_path):
    done = run("generate.py", folder=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert "identical to the stock model: yes" in done.stdout
    text = done.stdout.partition("\n\n")[0]
    assert text.startswith("class Node:")
    assert len(set(text.split())) > 8  # words, not one sign over and over
    assert "Loading weights" not in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_generate_says_when_everything_fits(tmp_path):
    done = run("generate.py", "--hot-gib", "1", folder=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert "this is the stock model" in done.stdout


def test_the_hot_experts_follow_the_traffic(tmp_path):
    done = run("follow_the_traffic.py", folder=tmp_path)
    assert 0 == done.returncode, done.stderr
    percent = [float(line.split()[3]) for line in done.stdout.splitlines() if "swaps so far" in line]
    before, right_after, end = percent[2], percent[3], percent[-1]
    assert right_after < before - 10
    assert right_after + 20 < end
    assert [] == list(tmp_path.iterdir())
