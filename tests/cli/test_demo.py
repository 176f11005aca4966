from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hotsplit.data import tiny_moe_path
from hotsplit.metrics import UpdateLine

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


def run(*options):
    """A demo as a user runs it, its output in a pipe."""
    done = subprocess.run(
        [sys.executable, "-c", "from hotsplit.cli.main import main; main()", "demo", *options],
        capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251 - a child inherits it
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return done


@pytest.fixture(scope="module")
def demo():
    """The object of one demo, and how long it has computed as "cpu_s"."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(run("--json").stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found | {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


@pytest.fixture(scope="module")
def printed():
    """The text of one demo."""
    return run().stdout


def test_what_is_printed_fits_78_columns(printed):
    assert [] == [line for line in printed.splitlines() if len(line) > 78 or line != line.rstrip()]


def test_per_cent_has_a_blank_before_it_everywhere(printed):
    assert 40 < printed.count(" %")
    assert [] == re.findall(r"\S%", printed)


def test_every_update_is_a_row_and_the_last_is_shown_as_its_log_line_too(printed):
    part = printed.partition("4  run, dynamic")[2].partition("Summary")[0]
    rows = [line.split() for line in part.splitlines() if re.match(r"(python|english) +\d+ ", line)]
    assert [("python", str(i)) for i in range(1, 5)] + [("english", str(i)) for i in range(5, 17)] == [
        tuple(row[:2]) for row in rows
    ]
    line = UpdateLine.parse(" ".join(part.split()))
    assert 16 == line.update
    assert [f"{100 * line.hit:.1f}", "%", f"{100 * line.byte_hit:.1f}"] == rows[-1][2:5]


def test_it_says_what_it_measures(printed):
    text = " ".join(printed.split())
    assert "prompts of 64 tokens, 48 decoded for each, batch 16." in text
    assert "Planned anew, from python traffic alone." in text
    assert "31 decode steps at batch 16: 496 decoded tokens." in text
    assert "byte hit rate is the lower one because a batch touches most experts" in text
    assert "recovered (mean of the last three updates; " in text


def test_its_last_line_is_a_command_that_runs(printed, tmp_path):
    from hotsplit.cli.main import group

    words = shlex.split("".join(line.rstrip("\\") for line in printed.splitlines()[-3:]))
    assert ["hotsplit", "run"] == words[:2]
    assert str(Path(words[2])) in str(tiny_moe_path())
    group.main([*words[1:], "--max-new-tokens", "4", "--state-dir", str(tmp_path)], standalone_mode=False)


def test_the_demo_takes_less_than_three_minutes_of_one_core(demo):
    """By the clock it would be of this machine and of what else it does."""
    assert 0 < demo["cpu_s"] < 180
    assert demo["seconds"] > 0


def test_both_phases_are_profiled_and_skewed(demo):
    assert ["decode", "prefill"] == list(demo["profile"])
    for phase in demo["profile"].values():
        assert phase["tokens"] > 1000
        assert 0.4 < phase["top_30"] < 1


def test_the_plan_beats_a_blind_choice_on_traffic_it_has_not_seen(demo):
    plan = demo["plan"]
    assert plan["null"] + 0.1 < plan["held_out"] <= plan["oracle_reachable"] <= plan["oracle_free"]
    assert plan["null"] <= 0.3
    assert plan["layer_order"] < plan["held_out"]


def test_the_static_run_is_identical_to_stock(demo):
    assert demo["static"]["identical"] is True
    assert 0 < demo["static"]["hit_rate"] < 1


def test_the_hit_rate_recovers_after_the_traffic_has_moved(demo):
    dynamic = demo["dynamic"]
    assert dynamic["right_after"] + 0.1 < dynamic["recovered"]
    assert dynamic["right_after"] + 0.1 < dynamic["before"]
    assert dynamic["recovered"] <= dynamic["oracle_reachable"] + 0.02
    assert dynamic["swaps"] > 0
