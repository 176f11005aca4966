"""A race as Markdown for README.md and as an aligned table for the terminal; both read the JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from race_entries import DRIFT_PARTS

GB, MB = 10**9, 10**6
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def _part_cell(part: str, name: str) -> Callable[[Row], str]:
    """A cell about one part of a drift race: its time, or its hits."""

    def cell(row: Row) -> str:
        found = row["parts"].get(part)
        if not found or (name == "hit" and "byte_hit_rate" not in found):
            return "-"
        if name == "hit":
            kept = f" + {found['kept_rate']:.3f}" if found.get("kept_rate") else ""
            return f"{found['byte_hit_rate']:.3f}{kept} ({found['oracle']:.3f})"
        return f"{found['wall_ms']['mean']:.0f}"

    return cell


def _kind_cell(kind: str) -> Callable[[Row], str]:
    """A cell about one kind of module."""
    return lambda row: _or_dash(row["profile_ms"], lambda spent: f"{spent.get(kind, 0):.1f}")


CACHED: Columns = {
    "engine": lambda row: row["engine"],
    "load s": lambda row: f"{row['load_s']['median']:.1f}",
    "anonymous GB": lambda row: f"{row['memory']['anonymous'] / GB:.2f}",
    "prefill ms": lambda row: _spread(row["prefill_wall_ms"], 0),
    "prefill CPU ms": lambda row: f"{row['prefill_cpu_ms']['median']:.0f}",
    "ms/token": lambda row: _spread(row["decode_wall_ms"], 1),
    "CPU ms/token": lambda row: f"{row['decode_cpu_ms']['median']:.1f}",
    "same bits as stock eager": lambda row: "yes" if row["same_bits_as_reference"] else "no",
    "top-1 as stock": lambda row: _or_dash(row["top1_agreement"], lambda share: f"{share:.1%}"),
    "logit correlation": lambda row: _or_dash(row["logit_correlation"], lambda value: f"{value:.5f}"),
}
DRIFT: Columns = {
    "engine": lambda row: row["engine"],
    "load s": lambda row: f"{row['load_s']['median']:.1f}",
    "hot GB": lambda row: _budget(row, lambda hot, slots: hot - slots),
    "slots GB": lambda row: _budget(row, lambda _, slots: slots),
    "anonymous GB": lambda row: f"{row['memory']['anonymous'] / GB:.2f}",
    "file GB": lambda row: f"{row['memory']['file'] / GB:.2f}",
    "tokens": lambda row: str(row["tokens"]),
    "tokens/s": lambda row: f"{row['tokens_per_s']:.2f}",
    "ms/token": lambda row: _spread(row["wall_ms"], 0),
    "CPU ms/token": lambda row: f"{row['cpu_ms']['mean']:.0f}",
    "read MB/token": lambda row: f"{row['read_bytes_per_token'] / MB:.0f}",
    "major faults/token": lambda row: f"{row['major_faults_per_token']:.0f}",
    "top-1": lambda row: _or_dash(row["top1_agreement"], lambda share: f"{share:.1%}"),
    "logit correlation": lambda row: _or_dash(row["logit_correlation"], lambda value: f"{value:.5f}"),
}
PARTS: Columns = {
    "engine": lambda row: row["engine"],
    **{f"{part}: ms": _part_cell(part, "wall_ms") for part in DRIFT_PARTS},
    **{f"{part}: byte hit + kept (oracle)": _part_cell(part, "hit") for part in DRIFT_PARTS},
    "swaps": lambda row: _or_dash(_swaps(row), str),
}


PROFILE: Columns = {
    "engine": lambda row: row["engine"],
    **{f"{kind} ms": _kind_cell(kind) for kind in ("experts", "linear", "routers", "norms", "other", "whole")},
}


def lines(whole: Mapping[str, Any]) -> list[str]:
    """Every race as Markdown.

    Args:
        whole: As bench_larger_than_memory.py stores it.
    """
    found = []
    for name, race in whole["races"].items():
        found += [f"**{name}.** {_where(race)}", "", _what(race), ""]
        for columns in _tables(name):
            head, *body = _cells(race, columns)
            rule = ["---", *["---:"] * (len(head) - 1)]
            found += [*("| " + " | ".join(line) + " |" for line in (head, rule, *body)), ""]
        found += [*_failures(race), *_aims(race), ""]
    return found


def text(whole: Mapping[str, Any]) -> list[str]:
    """Every race as aligned tables.

    Args:
        whole: As bench_larger_than_memory.py stores it.
    """
    found = []
    for name, race in whole["races"].items():
        found += [name, _what(race)]
        for columns in _tables(name):
            cells = _cells(race, columns)
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            found += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
            found.append("")
        found += [*_failures(race), *_aims(race)]
    return found


def _tables(name: str) -> Sequence[Columns]:
    return (CACHED, PROFILE) if name.startswith("cached") else (DRIFT, PARTS, PROFILE)


def _cells(race: Mapping[str, Any], columns: Columns) -> list[list[str]]:
    rows = [row for row in race["rows"] if "failed" not in row]
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def _failures(race: Mapping[str, Any]) -> list[str]:
    return [f"- {row['engine']}: not measured: {row['failed']}" for row in race["rows"] if "failed" in row]


def _aims(race: Mapping[str, Any]) -> list[str]:
    return [
        f"- {name.replace('_', ' ')}: {aim['value']:g}, wanted {'at most' if aim['at_most'] else 'at least'} "
        f"{aim['wanted']:g} ({aim['of']}): {'met' if aim['is_met'] else 'MISSED'}"
        for name, aim in race["aims"].items()
    ]


def _where(race: Mapping[str, Any]) -> str:
    where = race["environment"]
    commit, plus, _ = (where["commit"] or "unknown").partition("+")
    packages = where["packages"]
    rate = _or_dash(where["disk_rows_bytes_per_s"], lambda value: f"{value / GB:.1f} GB/s")
    return (
        f"{where['date'][:10]}, commit {commit[:12]}{' with changes' if plus else ''}: {where['cpu']}, "
        f"{where['cores']} cores, {where['ram_bytes'] / GB:.0f} GB RAM; torch {packages['torch']}, transformers "
        f"{packages['transformers']}, accelerate {packages['accelerate']}, llama-cpp-python "
        f"{race['llama_cpp_python'] or '-'}; {where['threads']} compute threads; direct reads of 3 MiB at {rate}. "
        f"Load average {where['load_average_at_start'][0]} at the start, {where['load_average_at_end'][0]} at the end."
    )


def _what(race: Mapping[str, Any]) -> str:
    model = race["model"]
    shares = model.get("pairs_of_the_top_quarter")
    routing = (
        f" A quarter of a layer's experts gets {shares[0]:.0%} of domain 0's pairs and {shares[1]:.0%} of domain 1's; "
        f"domain 0's favourites get {model['pairs_of_the_top_quarter_of_domain_0_in_domain_1']:.0%} in domain 1."
        if shares
        else ""
    )
    return (
        f"Model: {model['architecture']}; {model['bytes'] / GB:.2f} GB, {model['num_layers']} layers x "
        f"{model['num_experts']} experts, top {model['top_k']}.{routing}"
    )


def _budget(row: Row, show: Callable[[int, int], int]) -> str:
    """A part of what hotsplit holds; the others hold nothing of that kind."""
    hot = row.get("hot_bytes")
    return "-" if hot is None else f"{show(hot, row.get('slot_bytes') or 0) / GB:.1f}"


def _swaps(row: Row) -> int | None:
    counted = [part["swaps"] for part in row["parts"].values() if "swaps" in part]
    return sum(counted) if counted else None


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['p10']:.{digits}f} to {value['p90']:.{digits}f})"


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)
