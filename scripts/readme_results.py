"""Writes the results in README.md from benchmarks/results/engines.json; with --check, exits 1 when they are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "engines.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin", "<!-- results: end -->"
GB, MB = 10**9, 10**6

_TABLE_HEAD = """\
| engine | load s | memory GB | warm ms/token | cold ms/token | cold read MB/token | same bits |
|---|---:|---:|---:|---:|---:|---|
"""
_NOTES = """
*Memory*: the most that the kernel could not take back; pages of mapped files come and go beside it. *Warm*: all files lie
in the page cache. *Cold*: their pages are dropped before every token, so cold experts come from the disk; stock keeps
everything in memory. Times are medians of CPU time where warm, of wall time where cold. *Same bits*: all logits equal
those of stock `eager`. The weights are random and the skew of the routing is planted: what this says of speed and memory
holds, what it says of hit rates does not. All figures and how they are taken: [benchmarks](benchmarks/README.md).
"""


def section(result: Mapping[str, Any]) -> str:
    """What stands between the marks.

    Args:
        result: As benchmarks/bench_engines.py stores it.
    """
    rows = "".join(f"| {' | '.join(_cells(row))} |\n" for row in result["rows"])
    return f"\n{_where(result)}\n\n{_TABLE_HEAD}{rows}{_NOTES}"


def _where(result: Mapping[str, Any]) -> str:
    model, where = result["model"], result["environment"]
    packages = where["packages"]
    rates = [rate / GB for rate in where["disk_rows_bytes_per_s"] if rate]
    disk = f"direct reads of single rows at {min(rates):.2f} to {max(rates):.2f} GB/s" if rates else "disk rate unknown"
    commit, plus, _ = (where["commit"] or "unknown").partition("+")
    return (
        f"{model['bytes'] / GB:.2f} GB of {model['architecture'].split(',')[0]} in bf16, {model['num_layers']} layers x "
        f"{model['num_experts']} experts, top-{model['top_k']}, batch 1.\n"
        f"{where['cpu']}, {where['threads']} compute thread, {where['ram_bytes'] / GB:.0f} GB RAM, {disk};\n"
        f"torch {packages['torch']}, transformers {packages['transformers']}, accelerate {packages['accelerate']}; "
        f"{where['date'][:10]}, commit {commit[:12]}{', with changes' if plus else ''}."
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    warm, cold = row["warm"], row["cold"]
    return [
        row["engine"],
        f"{row['load_s']['median']:.1f}",
        f"{row['memory']['anonymous_peak_bytes'] / GB:.2f}",
        f"{warm['decode_cpu_ms']['median']:.0f}",
        "-" if cold is None else f"{cold['decode_wall_ms']['median']:.0f}",
        "-" if cold is None else f"{cold['read_bytes_per_token'] / MB:.0f}",
        "yes" if row["same_logits_as_reference"] else "no",
    ]


def split(readme: str) -> tuple[str, str, str]:
    """The page before, between and after the marks, which belong to the outer two.

    Args:
        readme: The page.
    """
    start = readme.index("\n", readme.index(BEGIN)) + 1
    end = readme.index(END)
    return readme[:start], readme[start:end], readme[end:]


def main(arguments: list[str]) -> int:
    """Write, or check."""
    before, old, after = split(README.read_text(encoding="utf-8"))
    new = section(json.loads(RESULT.read_text(encoding="utf-8")))
    if old == new:
        return 0
    if "--check" in arguments:
        print("README.md: the results are not those of benchmarks/results: run `make docs`", file=sys.stderr)
        return 1
    README.write_text(before + new + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
