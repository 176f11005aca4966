from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


@pytest.fixture(scope="module")
def demo():
    """The object of one demo, run as a user runs it, and what it left on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "from hotsplit.cli.main import main; main()", "demo", "--json"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251 - a child inherits it
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_the_demo_takes_less_than_three_minutes(demo):
    assert 0 < demo["seconds"] < 180


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
