"""How much of the memory that experts get should keep the rows that were read last, and how much the ones most wanted?

Replays the recorded decode traffic of a trained model, one token a step. Hot rows are chosen by the counts of half of the
requests of one domain or several; the other half is played, or another domain. What is not hot is kept in slots, the
longest unused given up first, over all layers. Counted are rows that have to be read. Writes results/cold_memory.json.

    python benchmarks/bench_cold_memory.py --data ../shared/data     # half a minute
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import environment

RESULTS = Path(__file__).parent / "results" / "cold_memory.json"
MEMORY = (0.3, 0.5, 0.75)
"""Share of all experts that memory holds, hot rows and slots together."""
SLOTS = (0.0, 0.0625, 0.25, 0.5, 0.75, 1.0)
"""Share of that memory that is slots."""
TOKENS = 1500
"""Of a stream; a tenth of them warms it up."""
NUM_EXPERTS = 64

Ids = npt.NDArray[np.uint8]
"""Of one token per row, [T, L, K]."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recorded trace's decode tokens."""

    ids: Ids
    """Experts."""
    domain: npt.NDArray[np.str_]
    """Of each token, [T]."""
    is_planned: npt.NDArray[np.bool_]
    """Whether its request is one of those that hot rows are chosen by, [T]."""

    def stream(self, domains: Sequence[str]) -> Ids:
        """What is played: the other requests of some domains, one domain after the other."""
        each = [self.ids[(self.domain == one) & ~self.is_planned][: TOKENS // len(domains)] for one in domains]
        return np.concatenate(each)

    def counts(self, domains: Sequence[str]) -> npt.NDArray[np.int64]:
        """Pairs of the requests that hot rows are chosen by, [L, E]."""
        ids = self.ids[np.isin(self.domain, domains) & self.is_planned]
        layers = range(ids.shape[1])
        return np.stack([np.bincount(ids[:, layer].ravel(), minlength=NUM_EXPERTS) for layer in layers])


def main() -> int:
    """Replay every case, print it, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with traces/.")
    trace = load(parser.parse_args().data / "traces" / "small-moe.npz")
    everyone = sorted(set(trace.domain.tolist()))
    cases = {
        "python, by its own counts": (["python"], ["python"]),
        "english, by its own counts": (["english"], ["english"]),
        "all in turn, by all counts": (everyone, everyone),
        "python, by counts of english": (["english"], ["python"]),
        "chinese, by counts of json": (["json"], ["chinese"]),
    }
    results: list[dict[str, Any]] = []
    for memory in MEMORY:
        for name, (planned, played) in cases.items():
            ids, counts = trace.stream(played), trace.counts(planned)
            rates = {str(share): round(missed(ids, counts=counts, memory=memory, slots=share), 4) for share in SLOTS}
            results.append({"traffic": name, "memory": memory, "read_share_by_slots": rates})
            print(f"{memory:.2f} {name:30}", " ".join(f"{rate:.3f}" for rate in rates.values()), flush=True)
    found = {"environment": environment(packages=["numpy"], threads=1), "results": results}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def load(path: Path) -> Trace:
    """Read a trace's decode tokens."""
    with np.load(path) as file:
        is_decode = file["phase"] == 1
        names, request = file["domains"].astype(str), file["request"][is_decode]
        return Trace(
            ids=file["experts"][is_decode],
            domain=names[file["domain"][is_decode]],
            is_planned=np.unique(request, return_inverse=True)[1] % 2 == 0,
        )


def missed(ids: Ids, *, counts: npt.NDArray[np.int64], memory: float, slots: float) -> float:
    """Share of the routed pairs whose row must be read.

    Args:
        ids: The stream.
        counts: That hot rows are chosen by.
        memory: Share of all rows that it holds.
        slots: Share of that.
    """
    num_rows = int(memory * counts.size)
    num_slots = max(round(slots * num_rows), ids.shape[1])
    hot = set(np.argsort(-counts.ravel(), kind="stable")[: num_rows - num_slots].tolist())
    kept: OrderedDict[int, None] = OrderedDict()
    first, reads = len(ids) // 10, 0
    for token, chosen in enumerate(ids.tolist()):
        for row in (layer * NUM_EXPERTS + expert for layer, experts in enumerate(chosen) for expert in experts):
            if row in hot:
                continue
            reads += row not in kept and token >= first
            kept[row] = None
            kept.move_to_end(row)
            if len(kept) > num_slots:
                kept.popitem(last=False)
    return reads / ids[first:].size


if __name__ == "__main__":
    raise SystemExit(main())
