"""Writes the results in the READMEs of all languages from benchmarks/results/*.json.

With --check, exits 1 when they are out of date. The words are in readme_results.toml.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "engines.json"
WORDS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BEGIN, END = "<!-- results: begin", "<!-- results: end -->"
RACE = ROOT / "benchmarks" / "results" / "larger_than_memory.json"
RACE_BEGIN, RACE_END = "<!-- race: begin", "<!-- race: end -->"
GB, MB = 10**9, 10**6
_CACHED = {
    "fast_ms": "hotsplit fast, all hot",
    "exact_ms": "hotsplit exact, all hot",
    "stock_ms": "stock grouped_mm",
    "llama_ms": "llama.cpp",
}
_DRIFT = {
    "whole": "hotsplit, as it comes, static",
    "dynamic": "hotsplit, as it comes, dynamic",
    "half": "hotsplit, 50% hot, static",
    "none": "hotsplit, none hot",
    "llama": "llama.cpp",
    "accelerate": "accelerate disk offload",
}


def section(result: Mapping[str, Any], *, words: Mapping[str, Any]) -> str:
    """What stands between the marks.

    Args:
        result: As benchmarks/bench_engines.py stores it.
        words: Of a language, from readme_results.toml.
    """
    head = f"| {' | '.join(words['head'])} |\n|---{'|---:' * (len(words['head']) - 2)}|---|\n"
    rows = "".join(f"| {' | '.join(_cells(row, words=words))} |\n" for row in result["rows"])
    return f"\n{_where(result, words=words)}\n{head}{rows}\n{words['notes'].format(**words).lstrip()}"


def race_section(result: Mapping[str, Any], *, words: Mapping[str, Any]) -> str:
    """What stands between the marks of the race: two models, and the speed of everyone who ran.

    Args:
        result: As benchmarks/bench_larger_than_memory.py stores it.
        words: Of a language, from readme_results.toml.
    """
    cached, drift = (_race(result, kind=kind) for kind in ("cached", "drift, large"))
    text: str = words["race"].format(
        small_gb=f"{cached['model']['bytes'] / GB:.1f}",
        large_gb=f"{drift['model']['bytes'] / GB:.1f}",
        ram=f"{drift['environment']['ram_bytes'] / GB:.0f}",
        **{name: f"{_row(cached, engine)['decode_wall_ms']['median']:.0f}" for name, engine in _CACHED.items()},
        **{name: f"{_row(drift, engine)['wall_ms']['median']:.0f}" for name, engine in _DRIFT.items()},
        benchmarks=words["benchmarks"],
        fast=words["fast"],
    )
    return f"{text.strip()}\n"


def _race(result: Mapping[str, Any], *, kind: str) -> Mapping[str, Any]:
    """The first race of a kind."""
    found: Mapping[str, Any] = next(race for name, race in result["races"].items() if name.startswith(kind))
    return found


def _row(race: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in race["rows"] if row["engine"] == engine)
    return found


def _where(result: Mapping[str, Any], *, words: Mapping[str, Any]) -> str:
    model, where = result["model"], result["environment"]
    packages = where["packages"]
    rates = [rate / GB for rate in where["disk_rows_bytes_per_s"] if rate]
    disk = words["disk"].format(slowest=f"{min(rates):.2f}", fastest=f"{max(rates):.2f}") if rates else words["no_disk"]
    commit, plus, _ = (where["commit"] or "unknown").partition("+")
    text: str = words["where"].format(
        gb=f"{model['bytes'] / GB:.2f}",
        architecture=model["architecture"].split(",")[0],
        layers=model["num_layers"],
        experts=model["num_experts"],
        top_k=model["top_k"],
        cpu=where["cpu"],
        threads=where["threads"],
        ram=f"{where['ram_bytes'] / GB:.0f}",
        disk=disk,
        date=where["date"][:10],
        commit=f"{commit[:12]}{words['changed'] if plus else ''}",
        **{name: packages[name] for name in ("torch", "transformers", "accelerate")},
    )
    return text.lstrip()


def _cells(row: Mapping[str, Any], *, words: Mapping[str, Any]) -> list[str]:
    warm, cold = row["warm"], row["cold"]
    return [
        row["engine"],
        f"{row['load_s']['median']:.1f}",
        f"{row['memory']['anonymous_peak_bytes'] / GB:.2f}",
        f"{warm['decode_cpu_ms']['median']:.0f}",
        "-" if cold is None else f"{cold['decode_wall_ms']['median']:.0f}",
        "-" if cold is None else f"{cold['read_bytes_per_token'] / MB:.0f}",
        words["yes"] if row["same_logits_as_reference"] else words["no"],
    ]


def split(readme: str, *, begin: str = BEGIN, end_mark: str = END) -> tuple[str, str, str]:
    """The page before, between and after the marks, which belong to the outer two.

    Args:
        readme: The page.
        begin: How the first mark begins.
        end_mark: The second one.
    """
    start = readme.index("\n", readme.index(begin)) + 1
    end = readme.index(end_mark)
    return readme[:start], readme[start:end], readme[end:]


def page(readme: str, *, words: Mapping[str, Any]) -> str:
    """A page with its results.

    Args:
        readme: The page as it is.
        words: Of its language.
    """
    before, _, after = split(readme)
    new = before + section(json.loads(RESULT.read_text(encoding="utf-8")), words=words) + after
    before, _, after = split(new, begin=RACE_BEGIN, end_mark=RACE_END)
    return before + race_section(json.loads(RACE.read_text(encoding="utf-8")), words=words) + after


def main(arguments: list[str]) -> int:
    """Write, or check."""
    code = 0
    for words in WORDS.values():
        file = ROOT / words["page"]
        old = file.read_text(encoding="utf-8")
        new = page(old, words=words)
        if old == new:
            continue
        if "--check" in arguments:
            print(f"{words['page']}: the results are not those of benchmarks/results: run `make docs`", file=sys.stderr)
            code = 1
        else:
            file.write_text(new, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
