"""The benchmark of the cold path: all of it once, tiny, by the command that a stranger would type; and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_cold_path
import pytest

ROOT = Path(__file__).parents[2]
WAYS = [*bench_cold_path.WAYS]
SWAPPING = ["page cache", "direct"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Its result and what it printed. Nearly all are hot, so that the slots of "direct" fit so small a budget."""
    folder = tmp_path_factory.mktemp("cold")
    output = folder / "result.json"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "bench_cold_path.py",
        "--size",
        "tiny",
        "--model-dir",
        folder / "m",
    ]
    command += ["--rounds", "1", "--tokens", "12", "--warm", "3", "--hot", "0.99", "--regimes", "all", "nothing"]
    command += ["--out", output, "--ways", *WAYS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text(encoding="utf-8")), done, folder


def rows_of(result):
    return {(row["page_cache_holds"], row["way"]): row for row in result["rows"]}


@pytest.mark.transformers
def test_every_way_is_measured_in_every_regime_swapping_and_not(smoke):
    result, _, folder = smoke
    labels = [*WAYS, *(f"{way}, swapping" for way in SWAPPING)]
    assert {(regime, way) for regime in ("all", "nothing") for way in labels} == set(rows_of(result))
    assert not list(folder.glob("*.partial"))
    for row in result["rows"]:
        assert 0 < row["wall_ms"]["p10"] <= row["wall_ms"]["median"] <= row["wall_ms"]["max"]
        assert 0 < row["hit_ratio"] <= 1
        assert (row["swaps"] == 0) == ("swapping" not in row["way"])


@pytest.mark.transformers
def test_rows_come_from_where_the_way_says(smoke):
    rows = rows_of(smoke[0])
    assert 0 == rows["all", "page cache"]["rows"]["staged_rows"] == rows["all", "page cache"]["rows"]["kept_rows"]
    assert 0 == rows["nothing", "page cache"]["rows"]["staged_rows"]
    direct = rows["nothing", "direct"]["rows"]
    assert direct["staged_rows"] + direct["kept_rows"] + direct["present_rows"] > 0
    assert 0 == direct["paged_rows"], "there are slots for all"


@pytest.mark.transformers
def test_the_table_has_a_line_for_each(smoke):
    result, done, _ = smoke
    lines = bench_cold_path.table(result)
    assert "\n".join(lines) == done.stdout.removesuffix("\n")
    heads = ("| way", "| ---")
    assert len(result["rows"]) == sum(line.startswith("| ") and not line.startswith(heads) for line in lines)


def test_the_stored_result_has_the_columns_that_the_table_takes():
    stored = json.loads((ROOT / "benchmarks" / "results" / "cold_path.json").read_text(encoding="utf-8"))
    assert bench_cold_path.table(stored)
