"""Small plans, counts, runs and pages for the tests of the report."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from hotsplit.metrics import MetricsSnapshot, UpdateLine, write_snapshot
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import Stage, plan_hash
from hotsplit.plan.planner import PlanOptions, plan_fraction
from hotsplit.plan.rates import GpuRates, HostRates, Rates
from hotsplit.report.content import Inputs, build_report
from hotsplit.report.page import render

HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\"><!--'\"&\u2028\u202e{{7*7}}${x}\udce9"
"""A name that tries to be markup, an attribute, a script, a template, a turned direction and half a character."""
RATES = Rates(
    gpus=(GpuRates(hbm_bytes_per_s=1e12, in_place_bytes_per_s=2e10),), host=HostRates(memory_bytes_per_s=1e11)
)


def skewed(*, num_layers=6, num_experts=16, top_k=2, tokens=1000, seed=0, name="toy", first_layer=3):
    """Counts that fall off steeply; the favourites of every layer are the seed's, whatever the number of tokens."""
    favourites, draws = np.random.default_rng(seed), np.random.default_rng([seed, tokens])
    shares_E = 1 / np.arange(1, num_experts + 1) ** 1.2
    counts_LE = [
        draws.multinomial(tokens * top_k, favourites.permutation(shares_E / shares_E.sum())) for _ in range(num_layers)
    ]
    layers = tuple(range(first_layer, first_layer + num_layers))
    return Histogram(
        identity=ModelIdentity(model_type="toy", layers=layers, num_experts=num_experts, top_k=top_k),
        phases={"decode": PhaseCounts(counts=np.array(counts_LE, dtype=np.float64), tokens=tokens)},
        name=name,
    )


def plan_of(histogram, *, fraction=0.25):
    """A plan by fraction, in rows of one byte."""
    return plan_fraction(histogram, fraction=fraction, options=PlanOptions())[0]


def weighed(plan, *, row_bytes=2**20, tp=1, pp=1, spare=0):
    """The same plan as if made for a model, in stages of equal numbers of layers."""
    identity = replace(plan.identity, headers_hash="ab" * 32, tp=tp, pp=pp)
    parts = np.array_split(np.arange(len(plan.layers)), pp)
    stages = []
    for part in parts:
        used = sum(len(plan.hot[n]) for n in part) * row_bytes
        layers = tuple(plan.layers[n] for n in part)
        stages.append(Stage(layers=layers, budget_bytes=used + spare, used_bytes=used, fixed_bytes=0))
    return replace(plan, identity=identity, row_bytes=(row_bytes,) * len(plan.layers), stages=tuple(stages))


def report_of(*plans, histogram, test=None, rates=None, run=None, names=()):
    """A report on plans, and its notices."""
    named = list(zip(names or [f"plan{n}.json" for n in range(len(plans))], plans, strict=True))
    inputs = Inputs(
        name="counts.json", histogram=histogram, test_name=None if test is None else "test.json", test=test, rates=rates
    )
    return build_report(named, inputs=inputs, run=run)


def data_of(page):
    """The data that a page carries."""
    text = page.decode("ascii")
    start = text.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def page_of(*plans, **inputs):
    """The bytes of a page."""
    return render(report_of(*plans, **inputs)[0])


def line_of(update, *, rank=0, **more):
    """An update line."""
    values = {
        "update": update, "step": 100 * update, "tokens": 100 * update, "hit": 0.5, "byte_hit": 0.4, "oracle": 0.7, "drift": 0.1,
        "swaps": 3, "refused": 0, "failed": 0, "moved_mib": 12.0, "cost_ms": 1.5, "rank": rank,
    }  # fmt: skip
    return UpdateLine(**(values | more))


def snapshot_of(plan, *, counts, rank=0, layers=None, phase="decode"):
    """A rank's snapshot that has routed these counts [L, E] in these layers."""
    kept = {
        layer: counts[n].astype(int).tolist()
        for n, layer in enumerate(plan.layers)
        if layers is None or layer in layers
    }
    pairs = sum(map(sum, kept.values()))
    return MetricsSnapshot(
        rank=rank, version="0", plan_hash=plan_hash(plan), mode="dynamic", backend="cpu-pointers", tokens={phase: pairs},
        pairs={phase: pairs}, hit_pairs={phase: pairs // 2}, touched_hot_bytes=300, touched_cold_bytes=100, steps=1200,
        swaps_done=5, swaps_refused=1, swaps_failed=0, swap_bytes=2**20, update_failures=0, hot_bytes=2**20, host_bytes=2**21,
        budget_bytes=2**20, counts={phase: kept},
    )  # fmt: skip


def run_folder(path, *snapshots):
    """A run's folder."""
    for snapshot in snapshots:
        write_snapshot(snapshot, path)
    return path
