"""A result as an aligned table for the terminal and as Markdown for README.md; both read the JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from summary import GB

from hotsplit.files import write_atomic

MB = 10**6
_YES = {True: "yes", False: "no", None: "-"}
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]

LOADING: Columns = {
    "engine": lambda row: row["engine"],
    "load s": lambda row: f"{row['load_s']['median']:.1f}",
    "load CPU s": lambda row: f"{row['load_cpu_s']['median']:.1f}",
    "peak GB after load": lambda row: f"{row['memory']['peak_after_load_bytes'] / GB:.2f}",
    "anonymous GB after load": lambda row: f"{row['memory']['anonymous_after_load_bytes'] / GB:.2f}",
    "anonymous GB, most": lambda row: f"{row['memory']['anonymous_peak_bytes'] / GB:.2f}",
    "hot GB": lambda row: _or_dash(row["memory"]["hot_bytes"], lambda size: f"{size / GB:.2f}"),
    "copy on disk GB": lambda row: f"{row['scratch_bytes'] / GB:.2f}",
    "memory claims": lambda row: _or_dash(row["claims"], lambda claims: "hold" if all(claims.values()) else "FAIL"),
    "same tokens as eager": lambda row: _YES[row["same_tokens_as_reference"]],
    "same logits": lambda row: _YES[row["same_logits_as_reference"]],
}


def _speed(regime: str) -> Columns:
    return {
        "engine": lambda row: row["engine"],
        "prefill CPU ms": lambda row: f"{row[regime]['prefill_cpu_ms']['median']:.0f}",
        "prefill ms": lambda row: f"{row[regime]['prefill_wall_ms']['median']:.0f}",
        "CPU ms/token": lambda row: f"{row[regime]['decode_cpu_ms']['median']:.1f}",
        "ms/token": lambda row: f"{row[regime]['decode_wall_ms']['median']:.1f}",
        "p10 to p90": lambda row: "{p10:.1f} to {p90:.1f}".format(**row[regime]["decode_wall_ms"]),
        "read MB/token": lambda row: f"{row[regime]['read_bytes_per_token'] / MB:.1f}",
        "cold MB/token": lambda row: _or_dash(row[regime]["cold_bytes_per_token"], lambda size: f"{size / MB:.1f}"),
        **({"from disk": lambda row: _YES[row["cold"]["reads_come_from_the_disk"]]} if regime == "cold" else {}),
        "hit rate": lambda row: _or_dash(row[regime]["hit_rate"], lambda rate: f"{rate:.3f}"),
    }


SECTIONS: Sequence[tuple[str, str | None, Columns]] = (
    ("Loading and memory", None, LOADING),
    ("Warm: everything in the page cache or in memory", "warm", _speed("warm")),
    ("Cold: the files' pages dropped before every token", "cold", _speed("cold")),
)
"""Title, the regime that a row must have, columns."""


def text(result: Mapping[str, Any]) -> str:
    """All tables, aligned.

    Args:
        result: As bench_engines.py stores it.
    """
    parts = []
    for title, cells in _tables(result):
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in cells)
        ]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def markdown(result: Mapping[str, Any]) -> list[str]:
    """All tables and where they were measured, as lines.

    Args:
        result: As bench_engines.py stores it.
    """
    lines = [_where(result), "", _what(result), ""]
    for title, cells in _tables(result):
        head, *body = cells
        rule = ["---", *["---:"] * (len(head) - 1)]
        lines += [f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in (head, rule, *body)), ""]
    return lines


def write_readme(path: Path, *, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between "<!-- NAME: begin" and "<!-- NAME: end -->".

    Args:
        path: The page.
        name: Of the part.
        lines: Its new content.
    """
    old = path.read_text(encoding="utf-8").splitlines()
    first = next(place for place, line in enumerate(old) if line.startswith(f"<!-- {name}: begin"))
    last = old.index(f"<!-- {name}: end -->")
    new = [*old[: first + 1], "", *lines, *old[last:]]
    write_atomic(path, ("\n".join(new) + "\n").encode())


def _tables(result: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    tables = []
    for title, regime, columns in SECTIONS:
        rows = [row for row in result["rows"] if regime is None or row[regime]]
        tables.append((title, [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]))
    return tables


def _where(result: Mapping[str, Any]) -> str:
    where = result["environment"]
    commit, _, changes = (where["commit"] or "unknown").partition("+")
    packages = ", ".join(f"{name} {where['packages'][name]}" for name in ("torch", "transformers", "accelerate"))
    rates = [rate for rate in where["disk_rows_bytes_per_s"] if rate]
    disk = f"{min(rates) / GB:.1f} to {max(rates) / GB:.1f} GB/s" if rates else "unknown"
    return (
        f"{where['date'][:10]}, commit {commit[:12]}{' with ' * bool(changes)}{changes}: {where['cpu']}, {where['cores']} cores, "
        f"{where['ram_bytes'] / GB:.0f} GB RAM, Linux {where['kernel']}; Python {where['python']}, {packages}; "
        f"{where['threads']} compute thread. Disk, direct reads of 3 MiB one after the other: {disk}; read-ahead "
        f"{_or_dash(where['disk_read_ahead_bytes'], lambda size: f'{size // 1024} KiB')}. Load average "
        f"{where['load_average_at_start'][0]} at the start, {where['load_average_at_end'][0]} at the end."
    )


def _what(result: Mapping[str, Any]) -> str:
    model, settings = result["model"], result["settings"]
    top = model["share_of_pairs_by_share_of_experts"]["decode"]["25%"]
    return (
        f"Model: {model['architecture']}; {model['bytes'] / GB:.2f} GB, {model['num_layers']} layers x "
        f"{model['num_experts']} experts, top {model['top_k']}; 25 % of the experts get {top:.0%} of the decoded pairs. "
        f"{settings['rounds']} rounds, prefill of {settings['prompt_tokens']} tokens, per round "
        f"{settings['warm_tokens']} warm and {settings['cold_tokens']} cold tokens."
    )


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)
