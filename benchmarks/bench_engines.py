"""What does a hot/cold split cost and save on a CPU, with the transformers engine?

    python benchmarks/bench_engines.py                     # about ten minutes; writes results/engines.json
    python benchmarks/bench_engines.py --table             # writes the tables of README.md from that file
    python benchmarks/bench_engines.py --size tiny         # tries the benchmark itself; keeps nothing

One run, one checkpoint (make_model.py): stock transformers, accelerate's disk offload, and hotsplit with several shares
of the experts hot. Every engine has a process of its own in every round, and rounds are interleaved, so that a
neighbour who comes or goes meets all of them. Hot experts are chosen by counts of other prompts than those measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engine_worker import Amounts
from environment import environment, load_average
from make_model import SIZES, ModelShape, default_folder, files, make_model
from observe import disk_rate, drop_pages, read_ahead_bytes
from summary import GB, summarise
from tables import markdown, write_readme
from tables import text as text_table

from hotsplit.files import write_atomic
from hotsplit.plan.dialects import load_histogram

HERE = Path(__file__).parent
RESULT = HERE / "results" / "engines.json"
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")
DYN_STEPS = 16
"""Steps between updates in the dynamic row: a run is too short for the default of 2000 to happen once."""

ENGINES: Mapping[str, dict[str, Any]] = {
    "stock eager": {"kind": "stock", "options": {}},
    "stock grouped_mm": {"kind": "stock", "options": {"experts_implementation": "grouped_mm"}},
    "accelerate disk offload, 1 GiB": {"kind": "accelerate", "options": {}},
    "hotsplit, 0 % hot": {"kind": "hotsplit", "options": {"fast_share": 0.0}},
    "hotsplit, 30 % hot": {"kind": "hotsplit", "options": {"fast_share": 0.3}},
    "hotsplit, 30 % hot, no counts": {"kind": "hotsplit", "options": {"fast_share": 0.3, "counts": None}},
    "hotsplit, 60 % hot": {"kind": "hotsplit", "options": {"fast_share": 0.6}},
    "hotsplit, 100 % hot": {"kind": "hotsplit", "options": {"fast_share": 1.0}},
    "hotsplit, 30 % hot, dynamic": {
        "kind": "hotsplit",
        "options": {"fast_share": 0.3, "dynamic": True, "dyn_steps": DYN_STEPS},
    },
}
"""Rows of the result: how each is loaded (loaders.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a run measures."""

    rounds: int = 3
    """Times that every engine is loaded and measured."""
    threads: int = 1
    """Compute threads."""
    prompt_tokens: int = 512
    """Of the prefill."""
    profile_prompts: int = 32
    """Prompts that the hot experts are chosen by."""
    profile_decode: int = 40
    """Decoded tokens of each of them."""
    seed: int = 11
    """Of all traffic."""


def bench(folder: Path, *, shape: ModelShape, settings: Settings, amounts: Amounts) -> dict[str, Any]:
    """The whole run.

    Args:
        folder: The checkpoint.
        shape: Of its model.
        settings: Rounds, threads, traffic.
        amounts: Tokens per regime.

    Returns:
        The result, as it is stored.
    """
    started = time.perf_counter()
    facts = environment(packages=PACKAGES, threads=settings.threads)
    with tempfile.TemporaryDirectory(prefix="hotsplit-bench-", dir=folder.parent) as scratch:
        counts = Path(scratch) / "counts.json"
        traffic = _prepare(folder, scratch=Path(scratch), counts=counts, settings=settings, amounts=amounts)
        rounds, rates = _rounds(folder, scratch=Path(scratch), counts=counts, traffic=traffic, settings=settings)
        return {
            "question": __doc__.splitlines()[0] if __doc__ else "",
            "environment": facts
            | {
                "load_average_at_end": load_average(),
                "run_s": round(time.perf_counter() - started, 1),
                "disk_rows_bytes_per_s": rates,
                "disk_read_ahead_bytes": read_ahead_bytes(files(folder)[0]),
            },
            "settings": asdict(settings) | asdict(amounts) | {"dyn_steps_of_the_dynamic_row": DYN_STEPS},
            "model": _model_facts(folder, shape=shape, counts=counts, traffic=traffic),
            "rows": summarise(rounds, reference="stock eager"),
        }


def _prepare(folder: Path, *, scratch: Path, counts: Path, settings: Settings, amounts: Amounts) -> dict[str, Any]:
    """Profile other prompts, and sample what every engine will compute."""
    _note("profile: counts on other prompts, and the traffic to measure on")
    longest = amounts.skipped_tokens + max(amounts.warm_tokens, amounts.cold_tokens)
    job = {
        "kind": "prepare",
        "folder": str(folder),
        "counts": str(counts),
        "continuation_tokens": longest,
        "amounts": asdict(amounts),
        **{name: asdict(settings)[name] for name in ("prompt_tokens", "profile_prompts", "profile_decode", "seed")},
    }
    return _work(job, scratch=scratch, threads=settings.threads) | {"amounts": asdict(amounts)}


def _rounds(
    folder: Path, *, scratch: Path, counts: Path, traffic: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, list[dict[str, Any]]], list[float | None]]:
    """Every engine once per round, one after the other; and the disk's rate at each round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    rates = []
    for number in range(1, settings.rounds + 1):
        rates.append(disk_rate(files(folder)[0], row_bytes=3 << 20))
        for name, engine in ENGINES.items():
            drop_pages(files(folder))  # every engine loads from the disk
            job = {
                "kind": engine["kind"],
                "folder": str(folder),
                "options": {"counts": str(counts), **engine["options"]},
                "traffic": traffic["traffic"],
                "amounts": traffic["amounts"],
            }
            start = time.perf_counter()
            found[name].append(_work(job, scratch=scratch, threads=settings.threads) | {"load_average": load_average()})
            _note(f"round {number} of {settings.rounds}: {name}, {time.perf_counter() - start:.0f} s")
    return found, rates


def _work(job: Mapping[str, Any], *, scratch: Path, threads: int) -> dict[str, Any]:
    """Do a job in a process of its own and hand back what it found."""
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        ask, answer = Path(own) / "job.json", Path(own) / "result.json"
        place = Path(own) / "scratch"
        place.mkdir()
        ask.write_text(json.dumps({**job, "threads": threads, "scratch": str(place)}), encoding="utf-8")
        command = [sys.executable, str(HERE / "engine_worker.py"), str(ask), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"{job['kind']} {job.get('options', '')} failed:\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def _model_facts(folder: Path, *, shape: ModelShape, counts: Path, traffic: Mapping[str, Any]) -> dict[str, Any]:
    """What was computed, and how skewed its routing was."""
    histogram, _ = load_histogram(str(counts))
    return {
        "bytes": sum(path.stat().st_size for path in files(folder)),
        "architecture": "qwen3_moe, bf16, random weights, gate rows of log-normal length",
        **asdict(shape),
        "profile_tokens": traffic["profile_tokens"],
        "share_of_pairs_by_share_of_experts": {
            phase: {
                f"{share:.0%}": round(_top_share(counted.counts, share=share), 3)
                for share in (0.1, 0.25, 0.3, 0.5, 0.6)
            }
            for phase, counted in histogram.phases.items()
        },
    }


def _top_share(counts_LE: Any, *, share: float) -> float:
    """Share of pairs that each layer's most used experts get, mean over layers."""
    falling_LE = -np.sort(-counts_LE, axis=1)
    top = int(share * counts_LE.shape[1])
    return float((falling_LE[:, :top].sum(axis=1) / falling_LE.sum(axis=1)).mean())


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(result: Mapping[str, Any]) -> None:
    model = result["model"]
    print(f"{model['architecture']}: {model['bytes'] / GB:.2f} GB; {result['environment']['threads']} thread")
    print(f"share of pairs by share of experts: {model['share_of_pairs_by_share_of_experts']}\n")
    print(text_table(result))


def main(arguments: Sequence[str]) -> int:
    """Run, or write the tables of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model-dir", type=Path, help="folder of the model (default: under the temporary folder)")
    parser.add_argument("--rounds", type=int, default=3, help="times that every engine is measured")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--output", type=Path, help=f"result (default: {RESULT.name} for the full size, else none)")
    parser.add_argument("--table", action="store_true", help="write README.md's tables from the result, run nothing")
    options = parser.parse_args(arguments)
    output = options.output or (RESULT if options.size == "full" else None)
    if options.table:
        result = json.loads((output or RESULT).read_text(encoding="utf-8"))
        write_readme(HERE / "README.md", name="engines", lines=markdown(result))
        _show(result)
        return 0
    shape = SIZES[options.size]
    folder = make_model(shape, options.model_dir or default_folder(options.size))
    settings = Settings(rounds=options.rounds, threads=options.threads)
    result = bench(folder, shape=shape, settings=settings, amounts=Amounts())
    if output:
        write_atomic(output, json.dumps(result, indent=1).encode() + b"\n")
    _show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
