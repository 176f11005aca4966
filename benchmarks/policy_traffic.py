"""Traffic that schedules are tried on: recorded traces, and streams drawn from published counts; and the pairs of domains.

A drawn stream has no documents and no context: every token chooses its experts independently of all others, by the
shares of the counts. It is the hardest traffic for a policy that must not move without need.

Shapes: T tokens, L MoE layers, K experts per token, E routed experts per layer.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.plan.lru import lru
from hotsplit.plan.replay import Steps, steps_of
from hotsplit.plan.trace import count_ids, load_trace

HOT = 0.25
"""Share of every layer's experts that is hot."""
STEPS = 4096
"""Steps of a drawn stream, as long as a domain of the traces."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One domain's decode tokens, one a step."""

    steps: Steps
    """In file order."""
    counts: npt.NDArray[np.float64]
    """Of all of them, [L, E]."""
    hot: npt.NDArray[np.bool_]
    """The most used quarter of every layer, [L, E]."""
    lru_moved: npt.NDArray[np.int64]
    """Rows that LRU moves, per step, [S]; in a sample of layers, scaled up to all."""


def traffic_of(steps: Steps) -> Traffic:
    """Count a stream, and replay LRU on it once."""
    counts = count_ids(steps.experts, num_experts=steps.num_experts).astype(float)
    hot = best_of(counts)
    layers = range(0, steps.num_layers, max(1, steps.num_layers // 8))
    moved = lru(steps, hot=hot, order=counts, layer_ids=layers).moved_rows
    return Traffic(steps=steps, counts=counts, hot=hot, lru_moved=moved * steps.num_layers // len(layers))


def best_of(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """The most used quarter of every layer, ties by expert, [L, E]."""
    order = np.argsort(-counts, axis=1, kind="stable")
    hot = np.zeros(counts.shape, dtype=bool)
    np.put_along_axis(hot, order, np.arange(counts.shape[1]) < int(HOT * counts.shape[1]), axis=1)
    return hot


def recorded(path: Path, *, num_experts: int) -> dict[str, Traffic]:
    """Every domain of a trace."""
    trace, _ = load_trace(path)
    return {domain: traffic_of(steps_of(trace, num_experts=num_experts, domains=[domain])) for domain in trace.domains}


def drawn(counts: npt.NDArray[np.float64], *, top_k: int, seed: int) -> Traffic:
    """A stream of independent tokens with these shares: K different experts each, by Gumbel's trick."""
    random, (num_layers, num_experts) = np.random.default_rng(seed), counts.shape
    weights = np.log(np.maximum(counts / counts.sum(axis=1, keepdims=True), 1e-9))
    ids = np.empty((STEPS, num_layers, top_k), dtype=np.uint8)
    for layer_id in range(num_layers):
        noise = random.gumbel(size=(STEPS, num_experts))
        ids[:, layer_id] = np.argsort(-(weights[layer_id] + noise), axis=1)[:, :top_k]
    return traffic_of(
        Steps(experts=ids, starts=np.arange(STEPS + 1), is_decode=np.ones(STEPS, dtype=bool), num_experts=num_experts)
    )


def published(data: Path) -> dict[str, dict[str, Traffic]]:
    """Streams drawn from the histograms of two large models."""
    qwen = json.loads((data / "histograms" / "qwen3-30b-a3b.decode.json").read_text())["layers"]
    olmoe = json.loads((data / "histograms" / "olmoe-1b-7b.domains.json").read_text())["layers"]
    domains = sorted({name.split("/")[0] for name in olmoe})
    layers = sorted({name.split("/")[1] for name in olmoe}, key=int)
    by_domain = {name: np.array([olmoe[f"{name}/{layer}"] for layer in layers], dtype=float) for name in domains}
    whole = np.array([qwen[layer] for layer in sorted(qwen, key=int)], dtype=float)
    return {
        "olmoe": {name: drawn(counts, top_k=8, seed=i) for i, (name, counts) in enumerate(by_domain.items())},
        "qwen": {"all": drawn(whole, top_k=8, seed=99)},
    }


def halves(domains: list[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs (planned from, played) in two halves: numbers are chosen on the first, and told of the second."""
    pairs = list(itertools.permutations(domains, 2))
    return pairs[::2], pairs[1::2]
