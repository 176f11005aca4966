"""What the pages say of the guard's cost is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "map_guard.json").read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize("page", ["cold-path.md", "decisions/0037-a-lost-page-reads-as-zeros-and-is-told.md"])
def test_the_pages_say_what_was_measured(page):
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    costs = {one["used"]: one["layer_us"]["median"] for one in RESULTS if one["files"] == 200}
    assert f"{costs[1]:.1f} microseconds" in text
    assert f"{costs[4]:.1f} " in text
