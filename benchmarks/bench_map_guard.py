"""What does it cost a layer to know that no page of its cold rows was lost while they were computed?

The two calls that frame a layer (bank/map_guard.py) are timed alone: the native handler is seen to come first, breaks are
counted before and after, and every file that was read is asked for its length. Writes benchmarks/results/map_guard.json.

    python benchmarks/bench_map_guard.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment

from hotsplit.bank import guard_library
from hotsplit.bank.map_guard import MapGuard
from hotsplit.bank.mapped import MappedFiles

RESULTS = Path(__file__).parent / "results" / "map_guard.json"
CASES = ((1, 1), (200, 1), (200, 4))
"""Files of the model, and of them those that a layer's cold rows lie in."""
REPEATS, TURNS = 9, 20_000


def main() -> int:
    """Time every case, print them, write the results."""
    if guard_library.load() is None:
        raise SystemExit("the guard's native code was not built: nothing to measure")
    found = environment(packages=["torch"], threads=1)
    results = [measure(files, used) for files, used in CASES]
    RESULTS.write_text(json.dumps({"environment": found, "results": results}, indent=1) + "\n")
    for one in results:
        took = one["layer_us"]
        print(
            f"{one['used']} of {one['files']} files: {took['median']:.2f} us ({took['min']:.2f} to {took['max']:.2f})"
        )
    return 0


def measure(files: int, used: int) -> dict[str, Any]:
    """Time the frame of a layer."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(files)]
        for path in paths:
            path.write_bytes(bytes(8192))
        mapped = MappedFiles(paths)
        took_us = [1e6 * turns(mapped.guard, used=used) / TURNS for _ in range(REPEATS)]
        mapped.close()
    summary = {"median": statistics.median(took_us), "min": min(took_us), "max": max(took_us), "repeats": REPEATS}
    return {"files": files, "used": used, "layer_us": summary}


def turns(guard: MapGuard, *, used: int) -> float:
    """Seconds that TURNS layers take."""
    started = time.perf_counter()
    for _ in range(TURNS):
        guard.begin()
        for file in range(used):
            guard.use(file)
        guard.require_whole()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
