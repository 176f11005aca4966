"""The routed experts of one layer: their bits wherever they lie, and their time against what has to be read.

A step cannot end before its hot bytes came out of GPU memory and its cold ones over the link, and both can be under way
at once, so the bound of a layer's time is the longer of the two. Calls are measured inside of a captured graph, as an
engine replays them, each with tokens and experts of its own.

Shapes: S draws, T tokens, K top-k, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.device import median_s
from hotsplit.bank.checks.findings import Fact, Figure, Finding, Goal, Proof
from hotsplit.bank.checks.rig import Experts, Rig, Traffic, draw_traffic, random_experts
from hotsplit.bank.kernels import reference
from hotsplit.bank.kernels.reference import FP8, ExpertRows
from hotsplit.bank.rows import LayerRows, place

GOAL: Final = Goal(most=1.15)
"""Of a layer's time, against its bound."""
TOLERANCE: Final = 8e-3
"""Of the largest output: two roundings to bfloat16."""
_HOT_PARTS: Final = {"all hot": 1.0, "half hot": 0.5, "all cold": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """One placement of the layer."""

    layer: LayerRows
    rows: ExpertRows
    row_map: torch.Tensor
    """Row of every expert, [E], int64."""


def check_layers(bench: Bench) -> Iterator[Finding]:
    """Compute layers of bfloat16 and of float8 weights in three placements.

    Args:
        bench: Has the location of cold rows and the rates "hbm" and "h2d".
    """
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
        bench.require_time(20)
        experts = random_experts(bench, bench.sizes.layer, dtype=dtype, seed=1)
        yield Fact(name=f"{name}: bytes of an expert", value=experts.row_bytes)
        with ExitStack() as stack:
            placements = {part: _place(stack, bench, experts, hot_part=_HOT_PARTS[part]) for part in _HOT_PARTS}
            for num_tokens in bench.sizes.tokens:
                yield from _tokens(bench, experts, placements=placements, num_tokens=num_tokens, what=name)
        bench.device.release()


def _place(stack: ExitStack, bench: Bench, experts: Experts, *, hot_part: float) -> _Placed:
    """A random part of the experts hot; closed with the stack."""
    num_experts = bench.sizes.layer.num_experts
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(2)).tolist()
    layer = place(order[: round(hot_part * num_experts)], num_experts=num_experts, spare=True, inclusive=False)
    rig = stack.enter_context(opened(bench, Rig(bench, [experts], layers=[layer])))
    row_map_E = torch.tensor(layer.row_map, device=bench.device.type)
    return _Placed(layer=layer, rows=rig.expert_rows(0), row_map=row_map_E)


def _tokens(
    bench: Bench, experts: Experts, *, placements: dict[str, _Placed], num_tokens: int, what: str
) -> Iterator[Finding]:
    """All placements for one number of tokens."""
    name = f"{what}, T = {num_tokens}"
    traffic = draw_traffic(bench, bench.sizes.layer, num_tokens=num_tokens, draws=bench.sizes.draws, seed=3)
    wanted_STD = _outputs(bench, experts.as_rows(), traffic=traffic, row_map_E=None)
    yield _close_to_twin(experts, traffic=traffic, found_TD=wanted_STD[0], name=name)
    for part, placed in placements.items():
        found_STD = _outputs(bench, placed.rows, traffic=traffic, row_map_E=placed.row_map)
        is_equal = torch.equal(found_STD.view(torch.int16), wanted_STD.view(torch.int16))
        yield Proof(name=f"{name}, {part}: equal to the unpermuted layer, bit by bit", holds=is_equal)
        yield _duration(bench, placed, traffic=traffic, row_bytes=experts.row_bytes, name=f"{name}, {part}")


def _outputs(bench: Bench, rows: ExpertRows, *, traffic: Traffic, row_map_E: torch.Tensor | None) -> torch.Tensor:
    """What the kernel makes of every draw, [S, T, D]."""
    outputs = [
        _one(bench, rows, traffic=traffic, draw=draw, row_map_E=row_map_E) for draw in range(len(traffic.topk_ids))
    ]
    return torch.stack(outputs)


def _one(
    bench: Bench, rows: ExpertRows, *, traffic: Traffic, draw: int, row_map_E: torch.Tensor | None
) -> torch.Tensor:
    ids_TK = traffic.topk_ids[draw]
    return bench.device.kernels.experts(
        traffic.hidden_states[draw],
        row_ids=ids_TK if row_map_E is None else row_map_E[ids_TK],
        topk_weights=traffic.topk_weights[draw],
        rows=rows,
    )


def _close_to_twin(experts: Experts, *, traffic: Traffic, found_TD: torch.Tensor, name: str) -> Proof:
    """The first draw against the torch twin, which computes in float32."""
    twin_TD = reference.experts(
        traffic.hidden_states[0],
        row_ids=traffic.topk_ids[0],
        topk_weights=traffic.topk_weights[0],
        rows=experts.as_rows(),
    ).float()
    error = float((found_TD.float() - twin_TD).abs().max() / twin_TD.abs().max())
    detail = f"error {error:.1e} of the largest output, at most {TOLERANCE:g}"
    return Proof(name=f"{name}: close to the torch twin", holds=error <= TOLERANCE, detail=detail)


def _duration(bench: Bench, placed: _Placed, *, traffic: Traffic, row_bytes: int, name: str) -> Figure:
    """Seconds of one call, from a graph of all draws; row ids are ready before, since the route op has its own figure."""
    draws = range(len(traffic.topk_ids))
    row_ids_STK = placed.row_map[traffic.topk_ids]

    def work() -> None:
        for draw in draws:
            bench.device.kernels.experts(
                traffic.hidden_states[draw],
                row_ids=row_ids_STK[draw],
                topk_weights=traffic.topk_weights[draw],
                rows=placed.rows,
            )

    graph = bench.device.capture(work)
    value = median_s(bench.device, graph.replay, repeats=bench.sizes.repeats) / len(draws)
    touched = [set(rows) for rows in row_ids_STK.flatten(1).tolist()]
    cold = [sum(row >= placed.layer.first_cold for row in rows) for rows in touched]
    bounds = [
        _bound_s(bench, hot_bytes=(len(rows) - num_cold) * row_bytes, cold_bytes=num_cold * row_bytes)
        for rows, num_cold in zip(touched, cold, strict=True)
    ]
    known = [bound for bound in bounds if bound is not None]
    return Figure(
        name=name,
        value=value,
        unit="s",
        bound=sum(known) / len(known) if len(known) == len(bounds) else None,
        bound_is=f"{sum(map(len, touched)) / len(draws):.1f} experts touched, {sum(cold) / len(draws):.1f} of them cold",
        goal=GOAL,
    )


def _bound_s(bench: Bench, *, hot_bytes: int, cold_bytes: int) -> float | None:
    hbm, link = bench.rates.get("hbm"), bench.rates.get("h2d")
    return max(hot_bytes / hbm, cold_bytes / link) if hbm and link else None
