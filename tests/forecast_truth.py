"""The forecast held against published measurements: what is fitted on which points, and how well the others come out.

Every number here is computed from tests/data/published_measurements.json by the product's own functions; the tests hold
the errors, and docs/forecast.md shows the rows that `python tests/forecast_truth.py` prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotsplit.plan.forecast import Model, Step, any_cold, forecast_step
from hotsplit.plan.rates import Machine
from hotsplit.plan.sweep import kv_tokens_per_gib
from hotsplit.plan.touched import effective_tokens_of, fit_exponent, touch_chances
from hotsplit.units import GIB, MIB

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_measurements.json").read_text())
MIMO, COUNTS, KT = PUBLISHED["mimo"], PUBLISHED["mimo_counts"], PUBLISHED["residency"]
ROW = MIMO["row_mib"] * MIB
CELLS = MIMO["layers"] * MIMO["experts"]
MACHINE = Machine(
    hbm_bytes_per_s=(MIMO["hbm_gb_per_s"] * 1e9,),
    link_bytes_per_s=(MIMO["link_gb_per_s"] * 1e9,),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One prediction of a point that was left out of the fit."""

    what: str
    """Which figure."""
    fitted: str
    """What was fitted, on which points."""
    predicted: float
    """By the model."""
    measured: float
    """As published."""

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1.0

    def row(self) -> str:
        """For the page."""
        numbers = f"{_short(self.predicted)} | {_short(self.measured)}"
        return f"| {self.what} | {self.fitted} | {numbers} | {100 * self.error:+.1f} % |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mimo_bytes(hit: float) -> tuple[float, float]:
    """Seconds of hot and of cold reads of one token, all layers, no parameter."""
    # Two experts' worth of shares say a hit rate: one hot that takes `hit` of the pairs, one cold with the rest.
    model = Model(
        shares=np.tile([[hit, 1.0 - hit]], (MIMO["layers"], 1)),
        hot=np.tile([[True, False]], (MIMO["layers"], 1)),
        row_bytes=np.full(MIMO["layers"], ROW * MIMO["top_k"], dtype=np.int64),
        stages=(tuple(range(MIMO["layers"])),),
        top_k=1,
    )
    seconds = forecast_step(model, machine=MACHINE, step=Step(kind="decode")).binding.seconds
    return seconds["hbm"], seconds["link"]


def hit_at(cells: int) -> float:
    """Of the best cells of the eight prompts' counts."""
    return float(COUNTS["hit_at_cells"][str(cells)])


def mimo_decode() -> list[Held]:
    """One parameter, all that is no read, fitted on one budget; the other two predicted; each budget in turn."""
    points = MIMO["decode"]
    rest = {point["hot_gib"]: 1 / point["tokens_per_s"] - sum(mimo_bytes(hit_at(point["cells"]))) for point in points}
    return [
        Held(
            what=f"{point['hot_gib']} GiB hot, tok/s",
            fitted=f"the rest of a step, on {gib} GiB",
            predicted=1 / (other + sum(mimo_bytes(hit_at(point["cells"])))),
            measured=point["tokens_per_s"],
        )
        for gib, other in rest.items()
        for point in points
        if point["hot_gib"] != gib
    ]


def mimo_drop() -> tuple[Held, float, float]:
    """The speed of 110 against 152.8 GiB: forecast and measured with the counter on both; and two lines' answers.

    The lines go through stock and 152.8 GiB, over the published coverages: linear in tok/s, and in seconds.
    """
    of = {point["hot_gib"]: point for point in MIMO["decode"]}
    measured = of[110.0]["tokens_per_s"] / MIMO["decode_152_with_counter"]
    # The whole step at 152.8 GiB is the one figure used; what is lost is cold bytes alone.
    before, after = (sum(mimo_bytes(hit_at(of[gib]["cells"]))) for gib in (152.8, 110.0))
    whole = 1 / MIMO["decode_152_with_counter"]
    held = Held(
        what="110 against 152.8 GiB, both with the counter, ratio of tok/s",
        fitted="the rest of a step, on 152.8 GiB",
        predicted=whole / (whole + after - before),
        measured=measured,
    )
    stock, top = MIMO["stock"]["tokens_per_s"], of[152.8]["tokens_per_s"]
    at = {"stock": MIMO["stock"]["hot_layers"] / MIMO["layers"], **MIMO["published_coverage"]}
    part = (at["6257"] - at["stock"]) / (at["8692"] - at["stock"])
    in_rate = (stock + part * (top - stock)) / top - 1
    in_seconds = 1 / (1 / stock + part * (1 / top - 1 / stock)) / top - 1
    return held, in_rate, in_seconds


def mimo_stock() -> Held:
    """Whole layers hot, one call per layer, from the rest of a two-call step: the byte model alone."""
    of = {point["hot_gib"]: point for point in MIMO["decode"]}[141.8]
    other = 1 / of["tokens_per_s"] - sum(mimo_bytes(MIMO["held_out_hit_at_8064"]))
    return Held(
        what="stock, layers in order, tok/s",
        fitted="the rest of a step, on 141.8 GiB",
        predicted=1 / (other + sum(mimo_bytes(MIMO["stock"]["hot_layers"] / MIMO["layers"]))),
        measured=MIMO["stock"]["tokens_per_s"],
    )


def mimo_stock_with_calls() -> Held:
    """The same, less the second call of each layer, whose cost the published profile of 141.8 GiB has."""
    held, split = mimo_stock(), MIMO["split_ms"]
    hot_s, cold_s = mimo_bytes(MIMO["held_out_hit_at_8064"])
    layers, hot_layers = MIMO["layers"], MIMO["stock"]["hot_layers"]
    hot_call, cold_call = (split["hot"] / 1e3 - hot_s) / layers, (split["cold"] / 1e3 - cold_s) / layers
    routing_call = split["routing"] / 1e3 / (2 * layers)
    saved = (layers - hot_layers) * (hot_call + routing_call) + hot_layers * (cold_call + routing_call)
    return Held(
        what="stock, without the second call of a layer, tok/s",
        fitted="the rest of a step on 141.8 GiB, and the calls of its profile",
        predicted=1 / (1 / held.predicted - saved),
        measured=held.measured,
    )


def mimo_split() -> list[Held]:
    """The parts of the profiled step, no parameter."""
    hot_s, cold_s = mimo_bytes(MIMO["held_out_hit_at_8064"])
    dense_bytes = MIMO["checkpoint_gib"] * GIB - CELLS * MIMO["checkpoint_row_mib"] * MIB
    parts = {"hot": hot_s, "cold": cold_s, "dense": dense_bytes / MACHINE.hbm_bytes_per_s[0]}
    return [
        Held(
            what=f"{name} part of the step, ms",
            fitted="nothing",
            predicted=1e3 * seconds,
            measured=MIMO["split_ms"][name],
        )
        for name, seconds in parts.items()
    ]


def _prose_seconds(batch: int, cold_share: float, *, other: float) -> float:
    """A step of the eight prompts' distinct experts, of which this share is cold."""
    read = COUNTS["distinct"][str(batch)] * MIMO["layers"] * ROW
    hot, cold = read * (1 - cold_share), read * cold_share
    return other + hot / MACHINE.hbm_bytes_per_s[0] + cold / MACHINE.link_bytes_per_s[0]


def prose_cold_shares() -> dict[str, tuple[float, float]]:
    """By run: the rest of a step, fitted on 141.8 GiB, and the cold share of prose, fitted on one request."""
    of = {point["hot_gib"]: point for point in MIMO["decode"]}[141.8]
    other = 1 / of["tokens_per_s"] - sum(mimo_bytes(hit_at(of["cells"])))
    all_hot, all_cold = (_prose_seconds(1, share, other=other) for share in (0.0, 1.0))
    return {run: (other, (1 / rates["1"] - all_hot) / (all_cold - all_hot)) for run, rates in MIMO["batch"].items()}


def mimo_batches() -> list[Held]:
    """Prose, whose hit rate is not published: its cold share is fitted at one request, and 2, 4 and 8 are predicted."""
    return [
        Held(
            what=f"{run}: {batch} requests of prose, tok/s",
            fitted="cold share of prose on 1 request; the rest on 141.8 GiB",
            predicted=batch / _prose_seconds(batch, cold_share, other=other),
            measured=MIMO["batch"][run][str(batch)],
        )
        for run, (other, cold_share) in prose_cold_shares().items()
        for batch in (2, 4, 8)
    ]


def mimo_prefill() -> list[Held]:
    """A chunk is one sweep of the cold bank and a rest; the rest is fitted on one budget."""
    chunk, rates = MIMO["prefill"]["chunk"], MIMO["prefill"]["tokens_per_s"]
    sweep = {cells: (CELLS - int(cells)) * ROW / MACHINE.link_bytes_per_s[0] for cells in rates}
    gib = {str(point["cells"]): point["hot_gib"] for point in MIMO["decode"]}
    held = [
        Held(
            what=f"prefill at {gib[cells]} GiB, tok/s",
            fitted=f"the rest of a chunk, on {gib[fitted]} GiB",
            predicted=chunk / (sweep[cells] + chunk / rates[fitted] - sweep[fitted]),
            measured=rates[cells],
        )
        for fitted in rates
        for cells in rates
        if fitted != cells
    ]
    stock = Held(
        what="prefill of stock, the same cold bytes, tok/s",
        fitted="the rest of a chunk, on 141.8 GiB",
        predicted=rates["8064"],
        measured=MIMO["stock"]["prefill_tokens_per_s"],
    )
    return [*held, stock]


def mimo_kv() -> list[Held]:
    """Bytes of a token from one pool, and what the other budgets' pools then hold."""
    tokens = MIMO["kv"]["tokens"]
    per_gib = kv_tokens_per_gib(MIMO["kv"]["pool_gib"] * GIB / tokens["152.8"])
    return [
        Held(
            what=f"KV tokens at {gib} GiB hot",
            fitted="bytes per token, on the pool at 152.8 GiB",
            predicted=tokens["152.8"] + (152.8 - float(gib)) * per_gib,
            measured=tokens[gib],
        )
        for gib in ("141.8", "110.0")
    ]


def _uniform(name: str) -> tuple[np.ndarray, int]:
    side = PUBLISHED[name]
    return np.full((1, side["experts"]), 1.0 / side["experts"]), side["top_k"]


def windows() -> list[Held]:
    """Distinct experts of a verify window: one exponent, each window left out in turn; then the bound, for comparison."""
    side = PUBLISHED["windows"]
    tokens, seen = side["tokens"], side["distinct"]["ALL"]
    held = [
        _window_held(tokens[left], seen[left], others=[i for i in range(len(tokens)) if i != left], of="ALL")
        for left in range(len(tokens))
    ]
    shares_LE, top_k = _uniform("windows")
    bound = [
        Held(
            what=f"{many} tokens, independent: the bound",
            fitted="nothing",
            predicted=float(touch_chances(shares_LE, top_k=top_k, tokens=many).sum()),
            measured=distinct,
        )
        for many, distinct in zip(tokens, seen, strict=True)
    ]
    return held + bound


def windows_across() -> list[Held]:
    """The exponent of code predicts the windows of other workloads."""
    side = PUBLISHED["windows"]
    every = list(range(len(side["tokens"])))
    return [
        _window_held(many, distinct, others=every, of="code", workload=workload)
        for workload, seen in side["distinct"].items()
        if workload not in ("ALL", "code")
        for many, distinct in zip(side["tokens"], seen, strict=True)
    ]


def _window_held(many: int, distinct: float, *, others: Sequence[int], of: str, workload: str = "all") -> Held:
    side = PUBLISHED["windows"]
    shares_LE, top_k = _uniform("windows")
    tokens = [side["tokens"][i] for i in others]
    effective = [effective_tokens_of(side["distinct"][of][i], shares=shares_LE, top_k=top_k) for i in others]
    exponent = fit_exponent(tokens, effective)
    on = "code" if of == "code" else ", ".join(map(str, tokens)) + " tokens"
    return Held(
        what=f"{workload}: {many} tokens, distinct experts",
        fitted=f"exponent {exponent:.3f}, on {on}",
        predicted=float(touch_chances(shares_LE, top_k=top_k, tokens=many**exponent).sum()),
        measured=distinct,
    )


Shape = Callable[[float, float], float]
"""(share of experts on the GPU, parameter) -> excess of step time over all on the GPU, 1 for none there."""


def by_bytes(ratio: float, _fixed: float) -> float:
    """A blind choice, or whole layers: cold bytes alone."""
    return 1.0 - ratio


def with_fixed(ratio: float, fixed: float) -> float:
    """A blind choice in every layer: part of the excess comes with any cold work in a layer, however little."""
    cold_E = np.full((1, KT["top_k"]), 1.0 - ratio)
    any_work = float(any_cold(cold_E, hot=np.zeros_like(cold_E, dtype=bool))[0])
    return fixed * any_work + (1.0 - fixed) * (1.0 - ratio)


def residency(strategy: str, shape: Shape, *, grid: Sequence[float], fit_on: str | None = None) -> list[Held]:
    """Both ends of a strategy, and a parameter on all inner points but one (or on another strategy's), predict the rest."""
    ratios, inner = KT["ratio"], range(1, len(KT["ratio"]) - 1)
    held = []
    for left in inner:
        source, points = (strategy, [i for i in inner if i != left]) if fit_on is None else (fit_on, list(inner))
        best = min(grid, key=lambda value: sum((_excess(source, i) - shape(ratios[i], value)) ** 2 for i in points))
        told = (
            f"; one parameter, {best:.2f}, on {'the 8 others' if fit_on is None else fit_on}" if len(grid) > 1 else ""
        )
        none, every = (1 / KT["tokens_per_s"][strategy][end] for end in (0, -1))
        held.append(
            Held(
                what=f"{strategy}, {ratios[left]:.0%} on the GPU, tok/s",
                fitted=f"both ends{told}",
                predicted=1 / (every + (none - every) * shape(ratios[left], best)),
                measured=KT["tokens_per_s"][strategy][left],
            )
        )
    return held


def _excess(strategy: str, index: int) -> float:
    """Step time above all on the GPU, as a share of that of nothing there."""
    rates = KT["tokens_per_s"][strategy]
    return (1 / rates[index] - 1 / rates[-1]) / (1 / rates[0] - 1 / rates[-1])


GRID = [step / 100 for step in range(101)]
ONE = [0.0]


def power_law(ratio: float, exponent: float) -> float:
    """A skewed choice of unknown skew: the best part of the experts takes ratio^exponent of the traffic."""
    return 1.0 - ratio**exponent


def tables() -> dict[str, list[Held]]:
    """Every table of the page, by its heading."""
    return {
        "Budgets": mimo_decode(),
        "110 against 152.8 GiB": [mimo_drop()[0]],
        "Stock": [mimo_stock(), mimo_stock_with_calls()],
        "Parts of a step": mimo_split(),
        "Batches": mimo_batches(),
        "Prefill": mimo_prefill(),
        "KV cache": mimo_kv(),
        "Windows": windows(),
        "Residency: front-loading": residency("front-loading", by_bytes, grid=ONE),
        "Residency: random, bytes alone": residency("random", by_bytes, grid=ONE),
        "Residency: random, with a fixed part": residency("random", with_fixed, grid=GRID),
        "Residency: uniform, with random's fixed part": residency("uniform", with_fixed, grid=GRID, fit_on="random"),
        "Residency: frequency, with one skew": residency("frequency", power_law, grid=GRID),
    }


def page() -> str:
    """docs/forecast.md."""
    return (Path(__file__).parents[1] / "docs" / "forecast.md").read_text(encoding="utf-8")


def worst(held: Sequence[Held]) -> float:
    """Largest error, as a ratio."""
    return max(abs(one.error) for one in held)


def as_table(held: Sequence[Held]) -> str:
    """For the page."""
    head = ["| figure | fitted | predicted | measured | error |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(one.row() for one in held)])


if __name__ == "__main__":
    for heading, found in tables().items():
        sys.stdout.write(f"\n### {heading}\n\n{as_table(found)}\n")
