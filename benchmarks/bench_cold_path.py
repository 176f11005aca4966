"""How should cold experts be read while the model runs, and do swaps stall a step?

    python benchmarks/bench_cold_path.py            # makes the model if it is not there; writes results/cold_path.json
    python benchmarks/bench_cold_path.py --table    # prints the tables of results/cold_path.json, measures nothing

One model, one budget, one thread, the same tokens for all. Each way of reading runs in a process of its own, rounds are
interleaved. What differs between regimes is how much of the cold rows the page cache can hold; a memory control group
caps it (race_cgroup.py), so root is needed for the regimes "half" and "a tenth".
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environment import environment, load_average
from make_model import SIZES, make_model
from race_cgroup import memory_limit

from hotsplit.bank.cold_choice import RECENT_SHARE

_HERE = Path(__file__).parent
_RESULT = _HERE / "results" / "cold_path.json"
_QUESTION = "How should cold rows be read while the model runs, and do swaps stall a step?"
_NO_LIMIT = 1 << 40
_STATIC: Mapping[str, Any] = {"dynamic": False}
_SWAPPING: Mapping[str, Any] = {"dyn_steps": 4, "dyn_margin": 1.0, "dyn_half_life": 2, "dyn_max_swaps": 2}
"""So restless that swaps are always under way."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "page cache": {"slot_share": 0.0, "threads": 2},
    "direct": {"slot_share": RECENT_SHARE, "threads": 2},
    "direct, few slots": {"slot_share": 1 / 16, "threads": 2},
    "direct, 4 threads": {"slot_share": RECENT_SHARE, "threads": 4},
    "advice, then a touch": {"slot_share": 0.0, "threads": 2},
    "reading threads, page cache": {"slot_share": 0.0, "threads": 2},
    "reading threads, populate alone": {"slot_share": 0.0, "threads": 2},
}
"""By name: how cold rows are read. Slots come out of the hot budget, of which they take so much."""

REGIMES: Mapping[str, float | None] = {"all": None, "half": 0.5, "a quarter": 0.25, "a tenth": 0.1, "nothing": 0.0}
"""By name: share of the cold bytes that the page cache may hold; "nothing" drops them before every token."""


def bench(folder: Path, *, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure everything.

    Args:
        folder: Of the model.
        options: Of the command line.

    Yields:
        What has been found so far, after every process.
    """
    started = time.monotonic()
    facts = environment(packages=("torch", "transformers", "numpy", "hotsplit"), threads=1)
    dice = random.Random(options.seed)
    shape = SIZES[options.size]
    expert_bytes = shape.num_layers * shape.num_experts * 3 * shape.hidden_dim * shape.expert_dim * 2
    hot_bytes = int(expert_bytes * options.hot)
    shares = {name: REGIMES[name] for name in options.regimes}
    regimes = {name: share and int(share * (expert_bytes - hot_bytes)) for name, share in shares.items()}
    jobs = [(way, _SWAPPING) for way in ("page cache", "direct") if options.swaps]
    jobs += [(way, {}) for way in options.ways]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def result() -> dict[str, Any]:
        return {
            "question": _QUESTION,
            "environment": facts
            | {"load_average_at_end": load_average(), "run_s": round(time.monotonic() - started, 1)},
            "settings": {"hot_share": options.hot, "tokens": options.tokens, "warm": options.warm, "seed": options.seed}
            | {"rounds": options.rounds, "kernel": options.kernel},
            "model": {"size": options.size, "expert_bytes": expert_bytes, "hot_bytes": hot_bytes},
            "rows": [_row(regime, way, rounds) for (regime, way), rounds in found.items()],
        }

    with tempfile.TemporaryDirectory() as scratch:
        base = {"folder": str(folder), "scratch": scratch, "kernel": options.kernel}
        counts = Path(scratch) / "counts.json"
        tokens = [dice.randrange(shape.vocabulary) for _ in range(options.tokens + options.warm)]
        sample = [dice.randrange(shape.vocabulary) for _ in range(200)]
        first = {"hot_gib": 0.0, "counts": None, "tokens": sample, "histogram": str(counts), "settings": _STATIC}
        _run(base | _way("page cache") | first | {"regimes": {"all": None}, "warm": 0}, scratch=Path(scratch))
        base |= {"hot_gib": hot_bytes / 2**30, "counts": str(counts), "tokens": tokens, "warm": options.warm}
        for number in range(options.rounds):
            for at, (way, settings) in enumerate(jobs):
                label = f"{way}, swapping" if settings else way
                _note(f"round {number + 1} of {options.rounds}, {at + 1} of {len(jobs)}: {label}", started)
                job = base | _way(way) | {"regimes": regimes, "settings": settings or _STATIC}
                for regime, one in _run(job, scratch=Path(scratch)).items():
                    found.setdefault((regime, label), []).append(one)
                yield result()


def _way(name: str) -> dict[str, Any]:
    return {"way": name, **WAYS[name]}


def _run(job: Mapping[str, Any], *, scratch: Path) -> dict[str, Any]:
    asked, answer = scratch / "job.json", scratch / "found.json"
    is_limited = any(job["regimes"].values())
    with memory_limit(_NO_LIMIT if is_limited else None) as group:
        asked.write_text(json.dumps({**job, "group": group and str(group)}))
        command = [sys.executable, str(_HERE / "cold_worker.py"), str(asked), str(answer)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _row(regime: str, way: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; the worst of maxima."""

    def over(*path: str) -> float:
        values = []
        for one in rounds:
            value: Any = one
            for name in path:
                value = value[name]
            values.append(value)
        return max(values) if path[-1] == "max" else statistics.median(values)

    spread = {name: {part: over(name, part) for part in rounds[0][name]} for name in ("wall_ms", "cpu_ms", "tick_ms")}
    read, unique = over("read_bytes_per_token"), over("unique_cold_bytes_per_token")
    return {
        "page_cache_holds": regime,
        "way": way,
        **spread,
        "read_bytes_per_token": read,
        "unique_cold_bytes_per_token": unique,
        "read_per_unique": round(read / unique, 4) if unique else None,
        "hit_ratio": round(over("hit_ratio"), 4),
        "swaps": over("swaps"),
        "anonymous_bytes": over("anonymous_bytes"),
        "rows": {name: over("rows", name) for name in rounds[0]["rows"]},
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines.

    Args:
        result: As stored.
    """
    lines = []
    for regime in dict.fromkeys(row["page_cache_holds"] for row in result["rows"]):
        lines += [f"The page cache holds {regime} of the cold rows", ""]
        lines += ["| way | ms per token | p90 | max | CPU ms | MB read | read / unique cold | hit rate | tick max ms |"]
        lines += ["| --- | " + "---: | " * 8]
        for row in result["rows"]:
            if row["page_cache_holds"] == regime:
                wall, cpu, tick = row["wall_ms"], row["cpu_ms"], row["tick_ms"]
                lines.append(
                    f"| {row['way']} | {wall['median']:.0f} | {wall['p90']:.0f} | {wall['max']:.0f} "
                    f"| {cpu['median']:.0f} | {row['read_bytes_per_token'] / 1e6:.0f} | {row['read_per_unique'] or 0:.3f} "
                    f"| {row['hit_ratio']:.3f} | {tick['max']:.2f} |"
                )
        lines.append("")
    return lines


def _note(line: str, started: float) -> None:
    print(f"[{time.monotonic() - started:6.0f} s] {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "hotsplit-bench-full")
    parser.add_argument("--hot", type=float, default=0.25, help="share of the experts' bytes in the budget")
    parser.add_argument("--kernel", default="exact")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--warm", type=int, default=30)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--regimes", nargs="+", choices=list(REGIMES), default=list(REGIMES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--no-swaps", dest="swaps", action="store_false")
    parser.add_argument("--out", type=Path, default=_RESULT)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if not options.table:
        if not (options.model_dir / "config.json").exists():
            make_model(SIZES[options.size], options.model_dir)
        partial = options.out.with_suffix(".partial")  # what an interrupt leaves
        for result in bench(options.model_dir, options=options):
            partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(options.out)
    print("\n".join(table(json.loads(options.out.read_text()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
