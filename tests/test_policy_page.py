"""The tables and pictures of docs/policy.md are those of the results, and the picture is one that a browser can draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "policy.json").read_text(encoding="utf-8"))


def figures(*arguments, root=ROOT):
    command = [sys.executable, root / "benchmarks" / "policy_figures.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_and_its_pictures_are_what_the_results_say():
    done = figures("--check")
    assert (0, "") == (done.returncode, done.stderr)


def test_a_page_that_says_something_else_is_found(tmp_path):
    for name in ("policy_figures.py", "svg_chart.py", "results/policy.json"):
        target = tmp_path / "benchmarks" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / "benchmarks" / name).read_bytes())
    (tmp_path / "docs").mkdir()
    for name in ("policy.md", "policy-curve.svg", "policy-time.svg"):
        (tmp_path / "docs" / name).write_bytes((ROOT / "docs" / name).read_bytes())
    assert 0 == figures("--check", root=tmp_path).returncode
    page = tmp_path / "docs" / "policy.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| 0.361 |", "| 0.631 |"), encoding="utf-8")
    done = figures("--check", root=tmp_path)
    assert (1, True) == (done.returncode, "policy.md: not what policy.json says" in done.stderr)


@pytest.mark.parametrize("name", ["policy-curve.svg", "policy-time.svg"])
def test_a_picture_is_well_formed_has_a_title_and_keeps_inside_its_frame(name):
    picture = ET.parse(ROOT / "docs" / name).getroot()
    space = "{http://www.w3.org/2000/svg}"
    width, height = map(float, picture.get("viewBox").split()[2:])
    assert picture.find(f"{space}title").text
    for circle in picture.iter(f"{space}circle"):
        assert 0 <= float(circle.get("cx")) <= width
        assert 0 <= float(circle.get("cy")) <= height
    for line in picture.iter(f"{space}polyline"):
        places = [tuple(map(float, place.split(","))) for place in line.get("points").split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_the_results_are_of_the_numbers_that_are_shipped():
    from dataclasses import asdict

    from hotsplit.plan.adaptive import AdaptiveOptions

    assert asdict(AdaptiveOptions()) == RESULTS["adaptive"]


def test_what_the_page_says_to_be_met_is_met():
    for name in ("small, held out; instant", "tiny; instant", "olmoe, drawn; instant"):
        assert RESULTS["goal"][name]["lost"] < 0.02
        assert RESULTS["goal"][name]["moved_of_lru"] < 0.01
    for name in ("tiny", "olmoe", "qwen"):
        assert RESULTS["stationary"][name]["gain_prior"] >= -0.002
    for found in RESULTS["unseen_requests"].values():
        assert found["gain_prior"] >= -0.002
    for found in RESULTS["alternating"]:
        assert found["moved_of_lru"] < 0.01
        assert found["gain"] > 0
