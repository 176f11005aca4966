"""How long does a plan take?

The whole of `make_plan` is timed, proof and bound included, at the size of the largest known models (69 layers x 384
experts: under 50 ms) and at a million cells (under 2 s); `greedy` alone beside it. Counts are skewed as published
histograms are. Writes benchmarks/results/plan_speed.json; `--check` exits with 1 where a limit is broken.

    python benchmarks/bench_plan_speed.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planner import PlanOptions, greedy, make_plan
from hotsplit.plan.sizes import ExpertSizes

RESULTS = Path(__file__).parent / "results" / "plan_speed.json"
TOP_K = 8
SMALL: dict[str, Any] = {"layers": 69, "experts": 384, "repeats": 30, "limit_s": 0.050}
LARGE: dict[str, Any] = {"layers": 1000, "experts": 1000, "repeats": 5, "limit_s": 2.0}
CASES = [{**size, "mixed_rows": mixed_rows} for size in (SMALL, LARGE) for mixed_rows in (False, True)]
"""Mixed: a third of the layers has wider rows."""


def main() -> int:
    """Time every case, print a table, write the results."""
    results = [measure(**case) for case in CASES]
    environment = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.system(),
    }
    RESULTS.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")
    for result in results:
        plan, rows = result["plan_s"], "mixed" if result["mixed_rows"] else "equal"
        print(
            f"{result['layers']:5d} x {result['experts']:4d} {rows} rows: plan {1e3 * plan['median']:7.1f} ms "
            f"({1e3 * plan['min']:.1f} to {1e3 * plan['max']:.1f}), "
            f"greedy alone {1e3 * result['greedy_s']['median']:.1f} ms, limit {1e3 * result['limit_s']:.0f} ms"
        )
    slow = any(result["plan_s"]["median"] > result["limit_s"] for result in results)
    return 1 if slow and "--check" in sys.argv else 0


def measure(*, layers: int, experts: int, mixed_rows: bool, repeats: int, limit_s: float) -> dict[str, Any]:
    """Time one size: make_plan with its proof, and greedy alone."""
    random = np.random.default_rng(0)
    counts = np.floor(1000 * random.lognormal(sigma=1.2, size=(layers, experts)))
    rows = np.where(np.arange(layers) % 3 == 0, 2_600_000 if mixed_rows else 1_000_000, 1_000_000).astype(np.int64)
    identity = ModelIdentity(model_type="bench", layers=tuple(range(layers)), num_experts=experts, top_k=TOP_K)
    sizes = ExpertSizes(
        identity=identity,
        row_bytes=rows,
        fixed_bytes=np.zeros(layers, dtype=np.int64),
        dense_bytes=0,
        headers_hash=None,
        num_decoder_layers=layers,
    )
    histogram = Histogram(identity=identity, phases={"decode": PhaseCounts(counts=counts)})
    budget = int(0.3 * sizes.expert_bytes)
    sizes_LE = np.repeat(rows[:, None], experts, axis=1)
    options = PlanOptions()
    return {
        "layers": layers,
        "experts": experts,
        "mixed_rows": mixed_rows,
        "limit_s": limit_s,
        "plan_s": seconds(lambda: make_plan(sizes, histogram=histogram, budget_bytes=budget, options=options), repeats),
        "greedy_s": seconds(lambda: greedy(counts / sizes_LE, sizes=sizes_LE, budget=budget), repeats),
    }


def seconds(work: Callable[[], object], repeats: int) -> dict[str, float | int]:
    """Warm up once, then the median and the spread of `repeats` runs."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "repeats": repeats}


def cpu_model() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
