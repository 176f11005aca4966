"""Draws docs/policy-curve.svg and docs/policy-time.svg, and writes the tables of docs/policy.md, from the results.

python benchmarks/policy_figures.py            # writes
python benchmarks/policy_figures.py --check    # exits 1 where a page is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from svg_chart import Chart, Series

RESULTS = Path(__file__).parent / "results" / "policy.json"
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- policy {}: begin (benchmarks/policy_figures.py writes this part) -->", "<!-- policy {}: end -->"


def main(arguments: list[str]) -> int:
    """Write or check; the exit status."""
    results = json.loads(RESULTS.read_text())
    pages = {
        DOCS / "policy-curve.svg": curve(results),
        DOCS / "policy-time.svg": over_time(results),
        DOCS / "policy.md": with_tables((DOCS / "policy.md").read_text(encoding="utf-8"), results),
    }
    if arguments == ["--check"]:
        stale = [path.name for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
        if stale:
            print(
                f"{', '.join(stale)}: not what {RESULTS.name} says: run benchmarks/policy_figures.py", file=sys.stderr
            )
        return 1 if stale else 0
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


def curve(results: dict[str, Any]) -> str:
    """What is lost against what is moved, held-out pairs."""

    def points(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
        return sorted((100 * row["moved_of_lru"], 100 * row["lost"]) for row in rows)

    fixed = [row for row in results["curve_fixed"] if row["moved_of_lru"] > 0]
    shipped = next(row for row in results["curve_adaptive"] if row["burst"] == results["adaptive"]["burst"])
    chart = Chart(
        title="Points of hit rate lost 200 to 600 steps after a start on other traffic",
        x_label="bytes moved in 4096 steps, % of what LRU moves (logarithmic)",
        y_label="points below the window's oracle",
        x_range=(0.05, 20),
        y_range=(0, 40),
        is_x_log=True,
        x_ticks=(0.1, 0.3, 1, 3, 10),
        y_ticks=(0, 10, 20, 30, 40),
        marks=(("x", 1.0, "1 %"), ("y", 2.0, "2 points")),
    )
    return chart.svg(
        [
            Series(name="fixed: every 10, 20, 100, 500, 2000 steps", points=points(fixed), is_line=False),
            Series(name="adaptive, smaller and larger accounts", points=points(results["curve_adaptive"])),
            Series(name="the same memories, bytes not bounded", points=points(results["curve_unbounded"])),
            Series(name="adaptive as shipped", points=points([shipped]), is_line=False, is_large=True),
        ]
    )


def over_time(results: dict[str, Any]) -> str:
    """Hit rate over time, held-out pairs."""
    window, curves = results["over_time"]["window"], results["over_time"]["curves"]
    shown = 2400 // window
    chart = Chart(
        title="Hit rate after a start on other traffic, mean over held-out pairs",
        x_label="steps since the start",
        y_label="hit rate, %",
        x_range=(0, 2400),
        y_range=(30, 80),
        x_ticks=(0, 400, 800, 1200, 1600, 2000, 2400),
        y_ticks=(30, 40, 50, 60, 70, 80),
        legend=(1500, 59),
    )
    names = ("static", "fixed, every 2000", "fixed, every 100", "fixed, every 20", "LRU", "adaptive")
    return chart.svg(
        [
            Series(name=name, points=[((i + 0.5) * window, 100 * y) for i, y in enumerate(curves[name][:shown])])
            for name in names
        ]
    )


def with_tables(page: str, results: dict[str, Any]) -> str:
    """The page with its tables written anew."""
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n\n{table(results)}\n\n{end}{tail}"
    return page


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        " | ".join(columns),
        " | ".join(["---", *["---:"] * (len(columns) - 1)]),
        *(" | ".join(row) for row in rows),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def _points(value: float) -> str:
    return f"{100 * value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _reproduced(results: dict[str, Any]) -> str:
    columns = [
        "plan -> traffic",
        "static",
        "oracle",
        "LRU",
        "every 2000",
        "every 100",
        "every 20",
        "its swaps",
        "adaptive",
    ]
    rows = [
        [
            f"{row['planned']} -> {row['played']}",
            *(f"{row[name]:.3f}" for name in ("static", "oracle", "lru", "every_2000", "every_100", "every_20")),
            f"{row['every_20_swaps']:,} of LRU's {row['lru_moved']:,}",
            f"{row['adaptive']:.3f} ({row['adaptive_swaps']} swaps)",
        ]
        for row in results["reproduced"]
    ]
    return _table(columns, rows)


_SUMMARY = ["traffic", "points lost", "worst pair", "moved, of LRU's", "of LRU's, steps 0 to 600", "shifts seen"]


def _summary_rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name.replace("; ", ", "),
            _points(row["lost"]),
            _points(row["worst"]),
            _percent(row["moved_of_lru"]),
            _percent(row["moved_of_lru_to_600"]),
            f"{row['shifts']:.2f}",
        ]
        for name, row in found.items()
    ]


def _stationary(results: dict[str, Any]) -> str:
    rows = []
    for name, row in results["stationary"].items():
        for kind, label in (("prior", "counts as prior"), ("no_prior", "no prior")):
            rows.append(
                [
                    f"{name}, {label}",
                    f"{100 * row[f'gain_{kind}']:+.2f}",
                    f"{100 * row[f'worst_{kind}']:+.2f}",
                    _percent(row[f"moved_of_lru_{kind}"]),
                ]
            )
    for name, row in results["unseen_requests"].items():
        gain, worst = 100 * row["gain_prior"], 100 * row["worst_prior"]
        rows.append([f"{name}, plan of the first half, played the second", f"{gain:+.2f}", f"{worst:+.2f}",
                     _percent(row["moved_of_lru_prior"])])  # fmt: skip
    return _table(["traffic", "points beside static", "worst domain", "moved, of LRU's"], rows)


def _alternating(results: dict[str, Any]) -> str:
    rows = [
        [f"{row['every']:,}", f"{100 * row['gain']:+.1f}", f"{100 * row['worst']:+.1f}", _percent(row["moved_of_lru"])]
        for row in results["alternating"]
    ]
    return _table(["steps between changes", "points beside static", "worst pair", "moved, of LRU's"], rows)


def _sensitivity(results: dict[str, Any]) -> str:
    shipped, rows = results["adaptive"], []
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in results["sensitivity"][1:]:
        by_name.setdefault(row["number"], []).append(row)
    first = results["sensitivity"][0]
    for name, (less, more) in by_name.items():
        cells = [f"`{name}`", f"{shipped[name]:g}"]
        cells += [f"{_points(row['lost'])} for {_percent(row['moved_of_lru'])}" for row in (less, more)]
        rows.append(cells)
    caption = f"As shipped: {_points(first['lost'])} points for {_percent(first['moved_of_lru'])}.\n\n"
    return caption + _table(["number", "as shipped", "two thirds of it", "one and a half times"], rows)


def _speed(results: dict[str, Any]) -> str:
    found, environment = results["speed"], results["environment"]
    rows = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    where = f"{environment['cpu']}, one thread, load {environment['load_average_at_start'][0]}"
    text = (
        f"{found['tokens']:,} tokens x {found['layers']} layers x top-{found['top_k']} of {found['experts']}, on "
        f"{where}; LRU in {found['lru_layers']} of the layers.\n\n"
    )
    return text + _table(["replay", "seconds"], rows)


def _link(results: dict[str, Any]) -> str:
    """What the shipped schedule costs a link, from its bound: bytes moved per byte read cold."""
    shipped = results["adaptive"]
    share = shipped["drift_share"] + shipped["settle_share"]
    rows = []
    for name, row_mib, experts, layers, top_k, link in (
        ("MiMo-V2.6-Pro, 384 x 69, top-8, C2C", 18.0, 384, 69, 8, 290.0),
        ("Qwen3-30B-A3B in bf16, 128 x 48, top-8, PCIe 4", 9.0, 128, 48, 8, 25.0),
    ):
        hot_bytes = 0.25 * experts * layers * row_mib * 2**20
        cold = 0.35 * layers * top_k * row_mib * 2**20
        settle = shipped["burst"] * hot_bytes
        step_s = cold / (link * 1e9)
        rows.append(
            [
                name,
                f"{cold / 2**30:.2f} GiB",
                f"{share * cold / 2**20:.1f} MiB",
                f"{settle / 2**30:.0f} GiB",
                f"{settle / (link * 1e9):.1f} s",
                f"{100 * settle / (shipped['settle_steps'] * step_s * link * 1e9):.0f} %",
            ]
        )
    columns = [
        "model, 25 % hot, 35 % of pairs cold, one token a step",
        "read cold, per step",
        "moved, per step at most",
        "one settling, at most",
        "of the link",
        "of what is read cold meanwhile",
    ]
    return _table(columns, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "reproduced": _reproduced,
    "goal": lambda results: _table(_SUMMARY, _summary_rows(results["goal"])),
    "mid-run": lambda results: _table(_SUMMARY, _summary_rows(results["mid_run"])),
    "stationary": _stationary,
    "alternating": _alternating,
    "sensitivity": _sensitivity,
    "link": _link,
    "speed": _speed,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
