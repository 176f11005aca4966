"""From what the workers found to the rows of a result: medians, spreads, agreement, and whether the aims were met.

Shapes: L MoE layers, E experts, T tokens, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from race_entries import AS_IT_COMES, DRIFT_PARTS, LLAMA, NONE_HOT, SETTLED, STOCK
from summary import spread

Found = Mapping[str, Any]
"""One turn's result (race_worker.measure, or "failed")."""
Rounds = Mapping[str, Sequence[Found]]
"""By entry."""
DECODE_AIM = 1.1
"""Cached: hotsplit's ms per token over llama.cpp's, at most."""
SPEED_AIM = 3.0
"""Beyond memory: tokens per second at 50 % hot, or as hotsplit comes, over the best of the others, at least."""
SPLIT_AIM = 1.5
"""Beyond memory: the same over none hot, at least."""
POINTS_AIM = 3.0
"""Points of the byte hit rate that a settled part may lose on the reachable oracle."""


def cached_rows(rounds: Rounds, *, logits: Callable[[str], Any]) -> list[dict[str, Any]]:
    """One row per entry of the cached race.

    Args:
        rounds: Results, one per round.
        logits: An entry's kept logits, [T, V].
    """
    reference = rounds[STOCK][0]
    return [_cached_row(name, found, reference=reference, logits=logits) for name, found in rounds.items()]


def drift_rows(rounds: Rounds, *, reference: str, logits: Callable[[str], Any]) -> list[dict[str, Any]]:
    """One row per entry of the race beyond memory.

    Args:
        rounds: Results, one per entry.
        reference: Entry that the others' logits are compared with.
        logits: An entry's kept logits, [T, V].
    """
    return [_drift_row(name, found[0], reference=reference, logits=logits) for name, found in rounds.items()]


def oracle(counts_LE: Sequence[Sequence[int]], hot_rows_L: Sequence[int]) -> float:
    """Hit rate of the best choice in hindsight with as many hot rows per layer.

    Args:
        counts_LE: Pairs of a part, [L, E].
        hot_rows_L: Hot rows per layer, [L].

    Returns:
        A ratio; experts being of one size and steps of one token, of bytes as well.
    """
    falling_LE = -np.sort(-np.array(counts_LE), axis=1)
    best = sum(layer_E[:rows].sum() for layer_E, rows in zip(falling_LE, hot_rows_L, strict=True))
    return float(best / falling_LE.sum())


def top_share(counts_LE: Sequence[Sequence[int]], *, share: float, by: Sequence[Sequence[int]] | None = None) -> float:
    """Share of pairs that each layer's most used experts get, mean over layers.

    Args:
        counts_LE: Pairs, [L, E].
        share: Which part of the experts.
        by: Other traffic whose most used experts are meant, [L, E]; None for this one's own.
    """
    counts = np.array(counts_LE, dtype=float)
    order = np.argsort(-np.array(counts_LE if by is None else by), axis=1)[:, : int(share * counts.shape[1])]
    top = np.take_along_axis(counts, order, axis=1)
    return round(float((top.sum(axis=1) / counts.sum(axis=1)).mean()), 3)


def cached_aims(rows: Sequence[Found]) -> dict[str, Any]:
    """Whether the cached race's aims were met.

    Args:
        rows: Of cached_rows.
    """
    by = {row["engine"]: row for row in rows if "failed" not in row}
    best = next((by[name] for name in ("hotsplit fast, all hot", "hotsplit exact, all hot") if name in by), None)
    stock = [row["prefill_wall_ms"]["median"] for name, row in by.items() if name.startswith("stock")]
    if best is None or not stock:
        return {}
    aims = {
        "prefill_over_the_fastest_stock": _aim(
            best["prefill_wall_ms"]["median"] / min(stock), wanted=1.0, at_most=True, of=best["engine"]
        )
    }
    if LLAMA in by:
        ratio = best["decode_wall_ms"]["median"] / by[LLAMA]["decode_wall_ms"]["median"]
        aims["decode_over_llama_cpp"] = _aim(ratio, wanted=DECODE_AIM, at_most=True, of=best["engine"])
    return aims


def drift_aims(rows: Sequence[Found]) -> dict[str, Any]:
    """Whether the aims beyond memory were met.

    Args:
        rows: Of drift_rows.
    """
    speed = {row["engine"]: row["tokens_per_s"] for row in rows if "failed" not in row}
    others = [rate for name, rate in speed.items() if not name.startswith("hotsplit")]
    aims: dict[str, Any] = {}
    for prefix, words in (("hotsplit, 50%", ""), (AS_IT_COMES, ", as it comes")):
        ours = {name: rate for name, rate in speed.items() if name.startswith(prefix)}
        best = max(ours, key=ours.__getitem__, default="")
        if ours and others:
            aims[f"speed_over_the_best_other{words}"] = _aim(
                ours[best] / max(others), wanted=SPEED_AIM, at_most=False, of=best
            )
        if ours and NONE_HOT in speed:
            aims[f"speed_over_none_hot{words}"] = _aim(
                ours[best] / speed[NONE_HOT], wanted=SPLIT_AIM, at_most=False, of=best
            )
    for row in rows:
        if "dynamic" in row["engine"] and "failed" not in row:
            lost = max(row["parts"][part]["points_lost"] for part in SETTLED)
            aims[f"points_lost_on_the_oracle, {row['engine']}"] = _aim(
                lost, wanted=POINTS_AIM, at_most=True, of=row["engine"]
            )
    return aims


def _aim(value: float, *, wanted: float, at_most: bool, of: str) -> dict[str, Any]:
    is_met = value <= wanted if at_most else value >= wanted
    return {"value": round(value, 3), "wanted": wanted, "at_most": at_most, "is_met": is_met, "of": of}


def _cached_row(name: str, found: Sequence[Found], *, reference: Found, logits: Callable[[str], Any]) -> dict[str, Any]:
    failed = next((one["failed"] for one in found if "failed" in one), None)
    if failed:
        return {"engine": name, "failed": failed}
    prefill = [cost for one in found for cost in _part(one, "prefill")["costs"]]
    decode = [cost for one in found for cost in _part(one, "decode")["costs"]]
    return {
        "engine": name,
        **_loading(found),
        "prefill_wall_ms": _spread(prefill, "wall_ms"),
        "prefill_cpu_ms": _spread(prefill, "cpu_ms"),
        "decode_wall_ms": _spread(decode, "wall_ms"),
        "decode_cpu_ms": _spread(decode, "cpu_ms"),
        "decode_wall_ms_of_rounds": [_spread(_part(one, "decode")["costs"], "wall_ms")["median"] for one in found],
        "tokens": len(decode),
        "read_bytes_per_token": round(_mean(decode, "read_bytes")),
        "major_faults_per_token": round(_mean(decode, "major_faults"), 1),
        "cached_share_at_start": [one["cached_share_at_start"] for one in found],
        "same_bits_as_reference": all(one["digest"] == reference.get("digest") for one in found),
        **agreement(logits(name), logits(STOCK)),
    }


def _drift_row(name: str, found: Found, *, reference: str, logits: Callable[[str], Any]) -> dict[str, Any]:
    if "failed" in found:
        return {"engine": name, "failed": found["failed"]}
    parts = {part["name"]: part for part in found["parts"] if part["name"] in DRIFT_PARTS}
    costs = [cost for part in parts.values() for cost in part["costs"]]
    return {
        "engine": name,
        **_loading([found]),
        "hot_bytes": found["facts"].get("hot_bytes"),
        "slot_bytes": found["facts"].get("slot_bytes"),
        "copied_bytes": found["facts"].get("copied_bytes"),
        "notices": found["facts"].get("notices"),
        "tokens": len(costs),
        # Parts weigh alike, however many tokens of each an engine had time for.
        "tokens_per_s": round(1e3 / float(np.mean([_mean(part["costs"], "wall_ms") for part in parts.values()])), 3),
        "wall_ms": _spread(costs, "wall_ms"),
        "cpu_ms": _spread(costs, "cpu_ms"),
        "read_bytes_per_token": round(float(np.mean([_mean(part["costs"], "read_bytes") for part in parts.values()]))),
        "major_faults_per_token": round(_mean(costs, "major_faults"), 1),
        "cached_share_at_end": found["cached_share_at_end"],
        "parts": {part: _drift_part(parts[part], found["facts"]) for part in parts},
        **agreement(logits(name), logits(reference)),
    }


def _drift_part(part: Found, facts: Found) -> dict[str, Any]:
    costs, counted = part["costs"], part["counted"]
    facts_of_part = {
        "tokens": len(costs),
        "wall_ms": _spread(costs, "wall_ms"),
        "read_bytes_per_token": round(_mean(costs, "read_bytes")),
    }
    touched = counted.get("touched_hot_bytes", 0) + counted.get("touched_cold_bytes", 0)
    if not touched:
        return facts_of_part
    hit, best = counted["touched_hot_bytes"] / touched, oracle(counted["counts"], facts["hot_rows"])
    return facts_of_part | {
        "touched_bytes_per_token": round(touched / len(costs)),
        "cold_bytes_per_token": round(counted["touched_cold_bytes"] / len(costs)),
        "byte_hit_rate": round(hit, 4),
        "kept_rate": round(counted["kept_bytes"] / touched, 4),
        "oracle": round(best, 4),
        "points_lost": round(100 * (best - hit), 2),
        "swaps": counted["swaps"],
        "swap_bytes": counted["swap_bytes"],
        "shifts": counted["shifts"],
    }


def agreement(logits_TV: Any, reference_TV: Any) -> dict[str, Any]:
    """How far two engines compute the same thing: top-1 agreement and correlation of all logits.

    Args:
        logits_TV: Of the one, [T, V]; of an engine that was cut short, fewer.
        reference_TV: Of the other, [T, V].
    """
    if logits_TV is None or reference_TV is None:
        return {"top1_agreement": None, "logit_correlation": None, "compared_tokens": 0}
    number = min(len(logits_TV), len(reference_TV))
    ours, theirs = logits_TV[:number], reference_TV[:number]
    return {
        "top1_agreement": round(float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()), 4),
        "logit_correlation": round(float(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]), 6),
        "same_bits": bool(np.array_equal(ours, theirs)),
        "compared_tokens": number,
    }


def _loading(found: Sequence[Found]) -> dict[str, Any]:
    return {
        "load_s": spread([one["load"]["wall_ms"] / 1e3 for one in found]),
        "load_read_bytes": found[-1]["load"]["read_bytes"],
        "memory_after_load": _most([one["memory_after_load"] for one in found]),
        "memory": _most([one["memory"] for one in found]),
        "profile_ms": _profile(found),
        "load_averages": [one["load_average"] for one in found],
    }


def _profile(found: Sequence[Found]) -> dict[str, float] | None:
    """Median over rounds; None where there is no such profile."""
    profiles = [one["profile_ms"] for one in found if one["profile_ms"]]
    return (
        {kind: round(float(np.median([one[kind] for one in profiles])), 3) for kind in profiles[0]}
        if profiles
        else None
    )


def _most(memories: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(memory[name] for memory in memories) for name in memories[0]}


def _part(found: Found, name: str) -> Found:
    return next(part for part in found["parts"] if part["name"] == name)


def _mean(costs: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.mean([cost[name] for cost in costs]))


def _spread(costs: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    return spread([cost[name] for cost in costs])
