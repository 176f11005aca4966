"""How fast is a model that is larger than memory, and what does hotsplit cost where it is not?

    python benchmarks/bench_larger_than_memory.py cached                   # 2.5 GB, all of it cached; ten minutes
    python benchmarks/bench_larger_than_memory.py drift                    # 29 GB, larger than memory; half an hour
    python benchmarks/bench_larger_than_memory.py drift --size medium --memory-limit 2     # 2.6 GB within 2 GB
    python benchmarks/bench_larger_than_memory.py --smoke                  # tries both in a minute; keeps nothing
    python benchmarks/bench_larger_than_memory.py --table                  # writes the tables of README.md, measures nothing

One run, the same weights, the same tokens for everyone: hotsplit, stock transformers, accelerate's disk offload and
llama.cpp (over a GGUF file made of the same checkpoint; --llama-python names a Python that has llama-cpp-python and
gguf). Every engine has a process of its own. What an engine cannot do here is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import make_large_model
import make_model
from environment import environment, load_average
from make_model import default_folder
from observe import disk_rate, read_ahead_bytes
from race_entries import (
    LLAMA,
    NONE_HOT,
    STOCK,
    Amounts,
    Entry,
    cached_entries,
    cached_script,
    drift_entries,
    drift_script,
    profile_script,
)
from race_ledger import Ledger
from race_players import weights
from race_run import Place, Turn, note, run_turns
from race_summary import cached_aims, cached_rows, drift_aims, drift_rows, top_share
from race_tables import lines, text
from tables import write_readme

from hotsplit.files import write_atomic

HERE = Path(__file__).parent
RESULT = HERE / "results" / "larger_than_memory.json"
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")
DYNAMIC: Mapping[str, Any] = {"dyn_steps": 10, "dyn_max_swaps": 8}
"""Settings of the dynamic rows: a run of minutes must learn in seconds. The adaptive schedule saves bytes for a second
shift over thousands of steps, which a run as short as this one does not have."""
ROW_BYTES = 3 << 20
"""Length of the direct reads by which the disk is described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a race runs."""

    race: str
    """cached or drift."""
    size: str
    """Of the model."""
    threads: int
    """Compute threads."""
    rounds: int
    """Times that every engine of the cached race is loaded and measured."""
    kernels: tuple[str, ...]
    """hotsplit's; the race beyond memory takes the last one."""
    limit_bytes: int | None
    """Memory that an engine may use, page cache included; None for all."""
    only: tuple[str, ...] = ()
    """Parts of the names of those who race; none for everyone. The one that others are compared with always does."""
    seed: int = 11
    """Of all tokens."""

    def chosen(self, entries: Mapping[str, Entry], *, reference: str) -> dict[str, Entry]:
        """Those who race.

        Args:
            entries: Everyone.
            reference: Who always does.
        """
        wanted = (reference, *self.only)
        return {name: entry for name, entry in entries.items() if not self.only or any(part in name for part in wanted)}

    @property
    def section(self) -> str:
        """Where the result keeps this race."""
        limit = f", {self.limit_bytes / 1e9:g} GB limit" if self.limit_bytes else ""
        return f"{self.race}, {self.size}, {self.threads} threads{limit}"


def race(settings: Settings, *, root: Path, python: str, amounts: Amounts) -> dict[str, Any]:
    """One race, from the model to the rows.

    Args:
        settings: Which.
        root: Folder of models, copies and the partial result.
        python: With llama_cpp and gguf.
        amounts: How many tokens.

    Returns:
        A section of the result.
    """
    started = time.perf_counter()
    facts = environment(packages=PACKAGES, threads=settings.threads)
    folder, shape = _model(settings, root=root)
    where = Place(
        folder=folder, scratch=root, python=python, threads=settings.threads, limit_bytes=settings.limit_bytes
    )
    same = asdict(settings) | asdict(amounts) | {"commit": facts["commit"], "dynamic": dict(DYNAMIC)}
    ledger = Ledger(root / f"{settings.section.replace(', ', '-').replace(' ', '-')}.partial", settings=same)
    if ledger.note:
        note(ledger.note)
    rate = disk_rate(weights(folder)[0], row_bytes=ROW_BYTES)
    body = _cached if settings.race == "cached" else _drift
    result = body(settings, where=where, shape=shape, amounts=amounts, ledger=ledger)
    ledger.close()
    return {
        "environment": facts
        | {
            "load_average_at_end": load_average(),
            "run_s": round(time.perf_counter() - started, 1),
            "disk_rows_bytes_per_s": rate,
            "disk_read_ahead_bytes": read_ahead_bytes(weights(folder)[0]),
        },
        "settings": asdict(settings) | asdict(amounts) | {"dynamic": dict(DYNAMIC)},
        "model": {"bytes": sum(path.stat().st_size for path in weights(folder)), **asdict(shape)} | result.pop("model"),
        **result,
    }


def _model(settings: Settings, *, root: Path) -> tuple[Path, Any]:
    """The checkpoint and its shape; written where it is not there yet."""
    if settings.race == "cached":
        shape = make_model.SIZES[settings.size]
        return make_model.make_model(shape, root / f"qwen3-moe-{settings.size}"), shape
    large = make_large_model.SIZES[settings.size]
    return make_large_model.make_large_model(large, root / f"glm4-moe-{settings.size}"), large


def _cached(settings: Settings, *, where: Place, shape: Any, amounts: Amounts, ledger: Ledger) -> dict[str, Any]:
    """Rounds are interleaved, so that a neighbour on the machine meets everyone."""
    entries = settings.chosen(cached_entries(settings.kernels), reference=STOCK)
    script = cached_script(shape.vocabulary, amounts=amounts, seed=settings.seed)
    turns = [
        Turn(key=f"{number} {name}", entry=entry, script=script, is_warm=True)
        for number in range(1, settings.rounds + 1)
        for name, entry in entries.items()
    ]
    run_turns(turns, place=where, ledger=ledger)
    rounds = {
        name: [ledger.get(f"{number} {name}") or {} for number in range(1, settings.rounds + 1)] for name in entries
    }
    rows = cached_rows(rounds, logits=lambda name: ledger.logits(f"1 {name}"))
    return {
        "model": {"architecture": "qwen3_moe, bf16, random weights, gate rows of log-normal length"},
        "rows": rows,
        "aims": cached_aims(rows),
        "llama_cpp_python": _llama_version(rounds),
    }


def _drift(settings: Settings, *, where: Place, shape: Any, amounts: Amounts, ledger: Ledger) -> dict[str, Any]:
    """First the counts, on other tokens of domain 0; then everyone once."""
    counts = ledger.logits_file("counts").with_suffix(".json")
    profile = Entry(engine="hotsplit", options={"fast_share": 0.0, "dynamic": False})
    everyone = drift_entries(settings.kernels[-1], counts=str(counts), dynamic=DYNAMIC)
    entries = settings.chosen(everyone, reference=NONE_HOT)
    turns = [
        Turn(
            key="profile",
            entry=profile,
            script=profile_script(shape, amounts=amounts, seed=settings.seed + 1000),
            is_warm=False,
            save_counts=str(counts),
        ),
        *(
            Turn(
                key=name,
                entry=entry,
                script=drift_script(shape, amounts=amounts, seed=settings.seed, max_s=entry.max_s),
                is_warm=False,
            )
            for name, entry in entries.items()
        ),
    ]
    run_turns(turns, place=where, ledger=ledger)
    rounds = {name: [ledger.get(name) or {}] for name in entries}
    rows = drift_rows(rounds, reference=NONE_HOT, logits=ledger.logits)
    return {
        "model": {
            "architecture": "glm4_moe, bf16, random weights, two domains planted in embeddings and routers",
            **_routing(rounds[NONE_HOT][0]),
        },
        "rows": rows,
        "aims": drift_aims(rows),
        "llama_cpp_python": _llama_version(rounds),
    }


def _routing(found: Mapping[str, Any]) -> dict[str, Any]:
    """How skewed the routing was, and how much of it a change of domain moves, from the counters of a run."""
    if "failed" in found:
        return {}
    counts = {part["name"]: part["counted"]["counts"] for part in found["parts"]}
    first, second = counts["domain 0"], counts["domain 1"]
    return {
        "pairs_of_the_top_quarter": [top_share(first, share=0.25), top_share(second, share=0.25)],
        "pairs_of_the_top_quarter_of_domain_0_in_domain_1": top_share(second, share=0.25, by=first),
    }


def _llama_version(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    found: Mapping[str, Any] = next(iter(rounds.get(LLAMA, ())), {})
    version: str | None = found.get("facts", {}).get("llama_cpp_python")
    return version


def _store(output: Path, *, section: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Put one race among those that the file has."""
    whole: dict[str, Any] = {"question": (__doc__ or "").splitlines()[0], "races": {}}
    if output.exists():
        whole = json.loads(output.read_text(encoding="utf-8"))
    whole["races"] = dict(sorted((whole["races"] | {section: result}).items()))
    write_atomic(output, json.dumps(whole, indent=1).encode() + b"\n")
    return whole


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("race", nargs="?", choices=("cached", "drift"), help="which race (default: both)")
    parser.add_argument(
        "--size", choices=("full", *make_large_model.SIZES), help="of the model (default: the race's own)"
    )
    parser.add_argument("--root", type=Path, help="folder of models and copies (default: under the temporary folder)")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="memory of every engine, page cache included")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads")
    parser.add_argument("--rounds", type=int, default=3, help="times that every engine of the cached race is measured")
    parser.add_argument("--kernels", nargs="+", default=["exact", "fast"], help="hotsplit's; drift takes the last one")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="race only those whose names have it in them"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, few tokens; keeps nothing")
    parser.add_argument(
        "--output", type=Path, help=f"result (default: results/{RESULT.name}; none with --smoke or --only)"
    )
    parser.add_argument("--table", action="store_true", help="write README.md's tables from the result, run nothing")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace, *, race: str) -> Settings:
    sizes = {"cached": "full", "drift": "large"}
    return Settings(
        race=race,
        size="tiny" if options.smoke else options.size or sizes[race],
        threads=options.threads,
        rounds=1 if options.smoke else options.rounds,
        kernels=tuple(options.kernels),
        only=tuple(options.only),
        limit_bytes=None if options.memory_limit is None else int(options.memory_limit * 1e9),
    )


def main(arguments: Sequence[str]) -> int:
    """Run, or write the tables of a run."""
    options = _options(arguments)
    output = options.output or (None if options.smoke or options.only else RESULT)
    if options.table:
        whole = json.loads((output or RESULT).read_text(encoding="utf-8"))
        write_readme(HERE / "README.md", name="larger than memory", lines=lines(whole))
        return 0
    root = options.root or default_folder("").parent / "race"
    root.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its workers, groups and copies go as at Ctrl-C
    amounts = (
        Amounts(prompt=16, skipped=1, decoded=4, warm_up=4, part=6, settled=6, profile=32)
        if options.smoke
        else Amounts()
    )
    try:
        for name in [options.race] if options.race else ["cached", "drift"]:
            settings = _settings(options, race=name)
            result = race(settings, root=root, python=options.llama_python, amounts=amounts)
            if output:
                _store(output, section=settings.section, result=result)
            print("\n".join(text({"races": {settings.section: result}})))
    except KeyboardInterrupt:
        note(f"interrupted: what is finished stays in {root}/*.partial, and the same command goes on from there")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
