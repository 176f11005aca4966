"""Which schedule adapts best for the bytes that it moves?

Replays recorded traffic of one domain against a plan that was made for another, with hotsplit's own policies, and
compares what they lose to the choice in hindsight with what they move, in parts of what LRU moves. The adaptive
schedule's numbers were chosen on one half of the domain pairs of small-moe; the other half, the trace of another model
and streams drawn from published counts tell how it does. Writes benchmarks/results/policy.json.

    python benchmarks/bench_policy.py --data ../shared/data          # five minutes
    python benchmarks/policy_figures.py                              # docs/policy-*.svg from the results
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment
from policy_traffic import Traffic, best_of, halves, published, recorded

from hotsplit.plan.adaptive import AdaptiveOptions, AdaptiveRebalancer
from hotsplit.plan.lru import lru, sample_layers
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer
from hotsplit.plan.replay import Steps, first_steps
from hotsplit.plan.simulate import Replayed, ReplayOptions, oracle, replay
from hotsplit.plan.steering import Policy
from hotsplit.plan.trace import count_ids

RESULTS = Path(__file__).parent / "results" / "policy.json"
WINDOW = 50
FROM, TO = 200, 600
"""The window after a shift that is judged."""
LEAD = 3500
"""Steps of the old traffic before a shift in mid-run."""
FIXED = [(n, half_life) for n in (10, 20, 100, 500, 2000) for half_life in (3.0, 10.0)] + [(20, 13.5), (100, 6.6)]
"""Updates and half-lives of the fixed schedule, in steps and updates; the last two are those of the independent replay."""
BURSTS = (0.25, 0.5, 1.0, 1.5, 2.2, 3.0, 4.5, 7.0)
"""Sizes of a settling, for the curve: the other accounts grow with it."""
UNBOUNDED = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pay-backs asked for where bytes are not bounded, for the rest of the curve."""

Maker = Callable[[Any, Any, int, int], Policy]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with traces/ and histograms/.")
    data = parser.parse_args().data
    small = recorded(data / "traces" / "small-moe.npz", num_experts=64)
    tiny = recorded(data / "traces" / "tiny-moe.npz", num_experts=32)
    sets = {"small": small, "tiny": tiny, **published(data)}
    chosen_on, held_out = halves(list(small))
    results = {
        "environment": environment(packages=("numpy",), threads=1),
        "adaptive": dataclasses.asdict(AdaptiveOptions()),
        "reproduced": [reproduced(small, *pair) for pair in (("english", "python"), ("json", "chinese"))],
        "goal": goal(sets, chosen_on=chosen_on, held_out=held_out),
        "mid_run": mid_run(sets, chosen_on=chosen_on, held_out=held_out),
        "stationary": {name: stationary(found) for name, found in sets.items()},
        "unseen_requests": {name: unseen(found) for name, found in (("small", small), ("tiny", tiny))},
        "alternating": [alternating(small, every=every, pairs=held_out) for every in (250, 500, 1000)],
        "curve_fixed": [curve_fixed(small, held_out, dyn_steps=n, half_life=h) for n, h in FIXED],
        "curve_adaptive": [curve_adaptive(small, held_out, burst=burst) for burst in BURSTS],
        "curve_unbounded": [curve_unbounded(small, held_out, payback=payback) for payback in UNBOUNDED],
        "sensitivity": sensitivity(small, chosen_on),
        "over_time": over_time(small, held_out),
        "speed": speed(),
    }
    RESULTS.write_text(json.dumps(results, indent=1, default=float) + "\n")
    for name in ("reproduced", "goal", "mid_run", "stationary", "unseen_requests", "alternating", "speed"):
        print(name, json.dumps(results[name], indent=1, default=float))
    return 0


def adaptive(**numbers: Any) -> Maker:
    """Makes the adaptive schedule for a plan."""
    options = AdaptiveOptions(**numbers)

    def make(hot: Any, prior: Any, top_k: int, layers: int) -> Policy:
        return AdaptiveRebalancer(
            hot=hot, prior=prior, top_k=top_k, options=RebalanceOptions(), row_bytes=(1,) * layers, adaptive=options
        )

    return make


def fixed(half_life: float, *, margin: float = 1.25) -> Maker:
    """Makes the fixed schedule for a plan."""
    options = RebalanceOptions(half_life=half_life, margin=margin)
    return lambda hot, prior, top_k, _layers: Rebalancer(hot=hot, prior=prior, top_k=top_k, options=options)


def play(
    steps: Steps,
    *,
    plan: Traffic,
    make: Maker | None,
    has_prior: bool = False,
    dyn_steps: int = 2000,
    placement: Any = "inclusive",
) -> Replayed:
    """One replay, in windows; rows weigh one byte."""
    policy = make(plan.hot, plan.counts if has_prior else None, steps.top_k, steps.num_layers) if make else None
    options = ReplayOptions(
        row_bytes=(1,) * steps.num_layers, dyn_steps=dyn_steps, placement=placement, window_steps=WINDOW
    )
    return replay(steps, hot=plan.hot, policy=policy, options=options)


def lost(result: Replayed, played: Traffic, *, start: int = 0) -> float:
    """Hit rate of the judged window below its own reachable oracle's."""
    window = count_ids(played.steps.experts[FROM:TO], num_experts=played.steps.num_experts).astype(float)
    best = window[best_of(window)].sum() / window.sum()
    parts = result.parts[(start + FROM) // WINDOW : (start + TO) // WINDOW]
    return float(best - np.mean([part.hit_rate for part in parts]))


def summary(found: Sequence[tuple[Replayed, Traffic]], *, start: int = 0) -> dict[str, float]:
    """Means over pairs: points lost in the judged window, and bytes moved after the shift in parts of LRU's."""
    after = [result.parts[start // WINDOW :] for result, _ in found]
    moved = [sum(part.moved_bytes for part in parts) for parts in after]
    early = [sum(part.moved_bytes for part in parts[: TO // WINDOW]) for parts in after]
    return {
        "pairs": len(found),
        "lost": float(np.mean([lost(*pair, start=start) for pair in found])),
        "worst": float(np.max([lost(*pair, start=start) for pair in found])),
        "moved_of_lru": sum(moved) / sum(int(played.lru_moved.sum()) for _, played in found),
        "moved_of_lru_to_600": sum(early) / sum(int(played.lru_moved[:TO].sum()) for _, played in found),
        "moved_rows": float(np.mean(moved)),
        "hit": float(np.mean([np.mean([part.hit_rate for part in parts]) for parts in after])),
        "shifts": float(np.mean([len(result.shifts) for result, _ in found])),
    }


def pairs_of(
    found: dict[str, Traffic], pairs: Sequence[tuple[str, str]], *, make: Maker | None, **options: Any
) -> list[tuple[Replayed, Traffic]]:
    """A replay for every pair of domains."""
    return [(play(found[b].steps, plan=found[a], make=make, **options), found[b]) for a, b in pairs]


def reproduced(found: dict[str, Traffic], planned: str, played: str) -> dict[str, Any]:
    """The six rates of the independent replay."""
    plan, steps = found[planned], found[played].steps
    result = {
        "planned": planned,
        "played": played,
        "static": play(steps, plan=plan, make=None).hit_rate,
        "oracle": oracle(steps, hot=plan.hot).hit_rate,
    }
    recent = lru(steps, hot=plan.hot, order=plan.counts, layer_ids=range(steps.num_layers))
    result |= {"lru": recent.hits.sum() / recent.pairs.sum(), "lru_moved": int(recent.moved_rows.sum())}
    for dyn_steps, decay in ((2000, 1.0), (100, 0.9), (20, 0.95)):
        half_life = 1e12 if decay == 1 else -1 / math.log2(decay)
        run = play(steps, plan=plan, make=fixed(half_life), dyn_steps=dyn_steps, placement="instant")
        result[f"every_{dyn_steps}"], result[f"every_{dyn_steps}_swaps"] = run.hit_rate, run.done
    run = play(steps, plan=plan, make=adaptive(), placement="instant")
    return result | {"adaptive": run.hit_rate, "adaptive_swaps": run.done}


def goal(
    sets: dict[str, dict[str, Traffic]], *, chosen_on: list[tuple[str, str]], held_out: list[tuple[str, str]]
) -> dict[str, Any]:
    """A start on other traffic than the plan's, with and without its counts as a prior, and with a swap's own time."""
    tiny, olmoe = (list(itertools.permutations(sets[name], 2)) for name in ("tiny", "olmoe"))
    cases = {
        "small, chosen on": (sets["small"], chosen_on),
        "small, held out": (sets["small"], held_out),
        "tiny": (sets["tiny"], tiny),
        "olmoe, drawn": (sets["olmoe"], olmoe),
    }
    return {
        f"{name}; {placement}{'; prior' * has_prior}": summary(
            pairs_of(found, pairs, make=adaptive(), has_prior=has_prior, placement=placement)
        )
        for name, (found, pairs) in cases.items()
        for placement in ("instant", "inclusive", "exclusive")
        for has_prior in (False, True)
        if placement != "exclusive" or name == "small, held out"
    }


def mid_run(
    sets: dict[str, dict[str, Traffic]], *, chosen_on: list[tuple[str, str]], held_out: list[tuple[str, str]]
) -> dict[str, Any]:
    """A shift after 3500 steps of the traffic that the plan was made for."""
    cases = {
        "small, chosen on": (sets["small"], chosen_on),
        "small, held out": (sets["small"], held_out),
        "tiny": (sets["tiny"], list(itertools.permutations(sets["tiny"], 2))),
    }
    makers = {
        "adaptive": (adaptive(), 2000),
        "fixed, every 20": (fixed(13.5), 20),
        "fixed, default": (fixed(10.0), 2000),
    }
    return {
        f"{name}; {kind}{'; prior' * has_prior}": summary(
            [
                (
                    play(
                        joined(first_steps(found[a].steps, LEAD), found[b].steps),
                        plan=found[a],
                        make=make,
                        has_prior=has_prior,
                        dyn_steps=dyn_steps,
                    ),
                    found[b],
                )
                for a, b in pairs
            ],
            start=LEAD,
        )
        for name, (found, pairs) in cases.items()
        for kind, (make, dyn_steps) in makers.items()
        for has_prior in (False, True)
        if kind == "adaptive" or has_prior
    }


def joined(*parts: Steps) -> Steps:
    """Traffic after traffic, one token a step."""
    ids = np.concatenate([part.experts for part in parts])
    return dataclasses.replace(
        parts[0], experts=ids, starts=np.arange(len(ids) + 1), is_decode=np.ones(len(ids), dtype=bool)
    )


def stationary(found: dict[str, Traffic]) -> dict[str, float]:
    """Traffic of the plan's own counts: what the schedule gains or loses beside the static plan, which has seen it all."""
    rows = {}
    for has_prior in (True, False):
        runs = [(play(own.steps, plan=own, make=adaptive(), has_prior=has_prior), own) for own in found.values()]
        gains = [run.hit_rate - own.counts[own.hot].sum() / own.counts.sum() for run, own in runs]
        name = "prior" if has_prior else "no_prior"
        rows |= {
            f"gain_{name}": float(np.mean(gains)),
            f"worst_{name}": float(np.min(gains)),
            f"moved_of_lru_{name}": sum(run.moved_bytes for run, _ in runs)
            / sum(int(own.lru_moved.sum()) for _, own in runs),
            f"shifts_{name}": float(np.mean([len(run.shifts) for run, _ in runs])),
        }
    return rows


def unseen(found: dict[str, Traffic]) -> dict[str, float]:
    """The same with a plan of the domain's first half, on its second: as a static plan meets traffic."""
    gains, moved, by_lru = [], 0, 0
    for own in found.values():
        half = len(own.steps) // 2
        counts = count_ids(own.steps.experts[:half], num_experts=own.steps.num_experts).astype(float)
        plan = dataclasses.replace(own, counts=counts, hot=best_of(counts))
        later = joined(dataclasses.replace(own.steps, experts=own.steps.experts[half:]))
        run = play(later, plan=plan, make=adaptive(), has_prior=True)
        gains.append(run.hit_rate - play(later, plan=plan, make=None).hit_rate)
        moved, by_lru = moved + run.moved_bytes, by_lru + int(own.lru_moved[half:].sum())
    return {
        "gain_prior": float(np.mean(gains)),
        "worst_prior": float(np.min(gains)),
        "moved_of_lru_prior": moved / by_lru,
    }


def alternating(found: dict[str, Traffic], *, every: int, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Two kinds of traffic in turn: bytes moved in parts of LRU's, and the gain beside the static plan."""
    moved, by_lru, gains = 0, 0, []
    for a, b in pairs:
        edges = range(0, 4000, every)
        turns = [dataclasses.replace(found[(a, b)[i % 2]].steps) for i in range(len(edges))]
        ids = [turn.experts[edge : edge + every] for turn, edge in zip(turns, edges, strict=True)]
        steps = joined(*[dataclasses.replace(found[a].steps, experts=part) for part in ids])
        run = play(steps, plan=found[a], make=adaptive(), has_prior=True)
        gains.append(run.hit_rate - play(steps, plan=found[a], make=None).hit_rate)
        moved += run.moved_bytes
        by_lru += int(lru(steps, hot=found[a].hot, order=found[a].counts, layer_ids=range(8)).moved_rows.sum())
    return {
        "every": every,
        "moved_of_lru": moved / by_lru,
        "gain": float(np.mean(gains)),
        "worst": float(np.min(gains)),
    }


def curve_fixed(
    found: dict[str, Traffic], pairs: Sequence[tuple[str, str]], *, dyn_steps: int, half_life: float
) -> dict[str, Any]:
    """A point of the fixed schedule."""
    runs = pairs_of(found, pairs, make=fixed(half_life), dyn_steps=dyn_steps)
    return {"dyn_steps": dyn_steps, "half_life": half_life, **summary(runs)}


def curve_adaptive(found: dict[str, Traffic], pairs: Sequence[tuple[str, str]], *, burst: float) -> dict[str, Any]:
    """A point of the adaptive schedule with smaller and larger accounts."""
    part = burst / AdaptiveOptions().burst
    numbers = {"burst": burst, "drift_share": AdaptiveOptions().drift_share * part}
    return {**numbers, **summary(pairs_of(found, pairs, make=adaptive(**numbers)))}


def curve_unbounded(found: dict[str, Traffic], pairs: Sequence[tuple[str, str]], *, payback: float) -> dict[str, Any]:
    """A point of the same memories without accounts and without a test for chance: what more bytes would buy."""
    numbers = {"drift_share": 1.0, "burst": 1000.0, "noise": 0.0, "payback": payback, "long_weight": 0.1}
    return {"payback": payback, **summary(pairs_of(found, pairs, make=adaptive(**numbers)))}


def sensitivity(found: dict[str, Traffic], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """What happens with each number two thirds and one and a half times as large."""
    rows = [{"number": "as shipped", "value": None, **summary(pairs_of(found, pairs, make=adaptive()))}]
    for name, value in dataclasses.asdict(AdaptiveOptions()).items():
        for factor in (2 / 3, 3 / 2):
            changed = max(1, round(value * factor)) if isinstance(value, int) else value * factor
            rows.append(
                {"number": name, "value": changed, **summary(pairs_of(found, pairs, make=adaptive(**{name: changed})))}
            )
    return rows


def over_time(found: dict[str, Traffic], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Mean hit rate window by window after a start on other traffic."""
    kinds: dict[str, tuple[Maker | None, int]] = {
        "static": (None, 2000),
        "fixed, every 2000": (fixed(10.0), 2000),
        "fixed, every 100": (fixed(6.6), 100),
        "fixed, every 20": (fixed(13.5), 20),
        "adaptive": (adaptive(), 2000),
    }
    curves = {}
    for name, (make, dyn_steps) in kinds.items():
        runs = pairs_of(found, pairs, make=make, dyn_steps=dyn_steps)
        curves[name] = np.mean([[part.hit_rate for part in run.parts] for run, _ in runs], axis=0).tolist()
    recent = []
    for a, b in pairs:
        steps = found[b].steps
        result = lru(steps, hot=found[a].hot, order=found[a].counts, layer_ids=range(steps.num_layers))
        edges = range(0, len(steps), WINDOW)
        recent.append(np.add.reduceat(result.hits, edges) / np.add.reduceat(result.pairs, edges))
    curves["LRU"] = np.mean(recent, axis=0).tolist()
    return {"window": WINDOW, "curves": curves}


def speed() -> dict[str, Any]:
    """A million tokens of 48 layers, top-8 of 128: static, fixed and adaptive, and LRU in a sample of layers."""
    random = np.random.default_rng(0)
    part = np.argsort(-(np.log(1.0 / np.arange(1, 129)) + random.gumbel(size=(20_000, 48, 128))), axis=2)[:, :, :8]
    ids = np.tile(part.astype(np.uint8), (50, 1, 1))
    steps = Steps(experts=ids, starts=np.arange(len(ids) + 1), is_decode=np.ones(len(ids), dtype=bool), num_experts=128)
    counts = count_ids(part, num_experts=128).astype(float)
    hot = best_of(counts[:, ::-1])
    seconds = {}
    for name, make in (("static", None), ("fixed", fixed(10.0)), ("adaptive", adaptive())):
        policy = make(hot, None, 8, 48) if make else None
        started = time.perf_counter()
        replay(steps, hot=hot, policy=policy, options=ReplayOptions(row_bytes=(1,) * 48))
        seconds[name] = time.perf_counter() - started
    layers = sample_layers(steps)
    started = time.perf_counter()
    lru(steps, hot=hot, order=counts, layer_ids=layers)
    seconds["lru"] = time.perf_counter() - started
    return {"tokens": len(ids), "layers": 48, "top_k": 8, "experts": 128, "seconds": seconds, "lru_layers": len(layers)}


if __name__ == "__main__":
    sys.exit(main())
