"""What should keep rows in memory: hot rows, slots for rows that were read, or the page cache?

Replays the recorded decode traffic of a trained model, one token a step. Hot rows are chosen by the counts of half of the
requests of one domain or several; the other half is played, or another domain. What is not hot is kept in slots, over all
layers, as the product does (hotsplit.bank.staging), or the longest unused given up first, as page caches do. Counted are
rows that have to be read. Three questions:

    slots    how much of the memory that experts get should be slots?
    policy   which row should a slot give up?
    choice   how large must the page cache be beside a budget, that rows are better read through it than directly, into slots
             that take half of that budget? In milliseconds: each MB costs COST.

Writes results/cold_memory.json.

    python benchmarks/bench_cold_memory.py --data ../shared/data     # five minutes
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import environment

from hotsplit.bank.staging import Staging

RESULTS = Path(__file__).parent / "results" / "cold_memory.json"
MEMORY = (0.3, 0.5, 0.75)
"""Share of all experts that memory holds, hot rows and slots together."""
SLOTS = (0.0, 0.0625, 0.25, 0.5, 0.75, 1.0)
"""Share of that memory that is slots."""
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
"""Share of all experts that a budget is worth, where page cache and slots are compared."""
CACHES = (0.05, 0.075, 0.1, 0.125, 0.15, 0.2)
"""The same of the page cache."""
COST = {"page cache": 1.3, "direct": 0.6}
"""Milliseconds per MB that is read. Source: decision 43."""
TOKENS = 1500
"""Of a stream; a tenth of them warms it up."""
COMPARED_TOKENS = 500
"""The same where page cache and slots are compared."""
NUM_EXPERTS = 64

Ids = npt.NDArray[np.uint8]
"""Of one token per row, [T, L, K]."""
Counts = npt.NDArray[np.int64]
"""Pairs, [L, E]."""


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

    def counts(self, domains: Sequence[str]) -> Counts:
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
    played = {name: (trace.stream(play), trace.counts(plan)) for name, (plan, play) in cases.items()}
    found = {
        "environment": environment(packages=["numpy"], threads=1),
        "results": [slot_shares(name, *one, memory=memory) for memory in MEMORY for name, one in played.items()],
        "choice": [row for budget in BUDGETS for row in choices(played, budget=budget)],
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def slot_shares(name: str, ids: Ids, counts: Counts, *, memory: float) -> dict[str, Any]:
    """How much is read with each share of the memory as slots, by the product's policy and by recency alone.

    Args:
        name: Of the traffic.
        ids: The stream.
        counts: That hot rows are chosen by.
        memory: Share of all experts.
    """
    found = {
        words: {
            str(share): round(missed(ids, counts=counts, memory=memory, slots=share, kept=kept), 4) for share in SLOTS
        }
        for words, kept in (("read_share_by_slots", Wanted), ("read_share_by_slots_last_used", LastUsed))
    }
    for words, rates in found.items():
        print(f"{memory:.2f} {name:30} {words:30}", " ".join(f"{rate:.3f}" for rate in rates.values()), flush=True)
    return {"traffic": name, "memory": memory, **found}


def choices(played: Mapping[str, tuple[Ids, Counts]], *, budget: float) -> Iterator[dict[str, Any]]:
    """What reading costs through page caches of several sizes, over what it costs directly.

    Args:
        played: Streams, and counts that hot rows are chosen by.
        budget: Share of all experts.
    """
    streams = {name: (ids[:COMPARED_TOKENS], counts) for name, (ids, counts) in played.items()}
    direct = {
        name: COST["direct"] * missed(ids, counts=counts, memory=budget, slots=0.5, kept=Wanted)
        for name, (ids, counts) in streams.items()
    }
    for cache in CACHES:
        memory = budget + cache
        ratios = {
            name: COST["page cache"]
            * missed(ids, counts=counts, memory=memory, slots=cache / memory, kept=LastUsed)
            / direct[name]
            for name, (ids, counts) in streams.items()
        }
        mean = statistics.geometric_mean(ratios.values())
        print(f"budget {budget:.2f} page cache {cache:.3f}: costs {mean:.2f} of direct reads", flush=True)
        rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
        yield {"budget": budget, "page_cache": cache, "cost_over_direct": round(mean, 2), "by_traffic": rounded}


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


class LastUsed:
    """Rows that are kept, the longest unused given up first.

    Args:
        number: Of rows.
        layers: L.
    """

    def __init__(self, number: int, layers: int) -> None:
        self._number = number
        self._rows: OrderedDict[int, None] = OrderedDict()

    def has(self, row: int, *, turn: int) -> bool:
        """Whether a row that is wanted is there; from now on it is."""
        there = row in self._rows
        self._rows[row] = None
        self._rows.move_to_end(row)
        if len(self._rows) > self._number:
            self._rows.popitem(last=False)
        return there


class Wanted:
    """Rows in the product's slots.

    Args:
        number: Of rows.
        layers: L.
    """

    def __init__(self, number: int, layers: int) -> None:
        self._slots = Staging(None, num_slots=number, slot_bytes=mmap.PAGESIZE, turns=layers)

    def has(self, row: int, *, turn: int) -> bool:
        """Whether a row that is wanted is there; from now on it is."""
        key = divmod(row, NUM_EXPERTS)
        if self._slots.find(key, turn=turn) is not None:
            return True
        slot = self._slots.take(key, turn=turn)
        if slot is not None:
            slot.is_reading = False
        return False


def missed(ids: Ids, *, counts: Counts, memory: float, slots: float, kept: type[LastUsed] | type[Wanted]) -> float:
    """Share of the routed pairs whose row must be read.

    Args:
        ids: The stream.
        counts: That hot rows are chosen by.
        memory: Share of all rows that it holds.
        slots: Share of that.
        kept: What they keep.
    """
    num_rows, (_, layers, top_k) = int(memory * counts.size), ids.shape
    num_slots = max(round(slots * num_rows), top_k)
    hot = set(np.argsort(-counts.ravel(), kind="stable")[: num_rows - num_slots].tolist())
    rows = kept(num_slots, layers)
    first, reads = len(ids) // 10, 0
    for token, chosen in enumerate(ids.tolist()):
        for layer, experts in enumerate(chosen):
            for row in (layer * NUM_EXPERTS + expert for expert in experts):
                if row not in hot and not rows.has(row, turn=token * layers + layer):
                    reads += token >= first
    return reads / ids[first:].size


if __name__ == "__main__":
    raise SystemExit(main())
