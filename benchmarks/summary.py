"""From what the workers found, round by round, to the rows of a result: medians, spreads, equality, memory claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

GB = 10**9
"""Bytes."""
ALLOWANCE_BYTES = 600_000_000
"""What a process may take beside hot and dense bytes: Python, torch, transformers, buffers."""

Found = Mapping[str, Any]
"""One worker's result (engine_worker.measure)."""


def summarise(rounds: Mapping[str, Sequence[Found]], *, reference: str) -> list[dict[str, Any]]:
    """One row per engine.

    Args:
        rounds: Results per engine, one per round.
        reference: The engine whose tokens and logits the others are compared with.
    """
    return [_row(name, found=found, reference=rounds[reference][0]) for name, found in rounds.items()]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, mean.

    Args:
        values: Samples.
    """
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {
        "median": round(float(middle), 3),
        "p10": round(float(low), 3),
        "p90": round(float(high), 3),
        "mean": round(float(np.mean(values)), 3),
    }


def _row(name: str, *, found: Sequence[Found], reference: Found) -> dict[str, Any]:
    memory = {
        "after_imports_bytes": max(one["memory"]["after_imports"]["resident"] for one in found),
        "peak_after_load_bytes": max(one["memory"]["after_load"]["peak"] for one in found),
        "anonymous_after_load_bytes": max(one["memory"]["after_load"]["anonymous"] for one in found),
        "anonymous_peak_bytes": max(one["memory"]["anonymous_peak"] for one in found),
        "hot_bytes": found[0]["memory"].get("hot_bytes"),
        "dense_bytes": found[0]["memory"].get("dense_bytes"),
    }
    return {
        "engine": name,
        "load_s": spread([one["load"]["wall_s"] for one in found]),
        "load_cpu_s": spread([one["load"]["cpu_s"] for one in found]),
        "load_read_bytes": found[-1]["load"]["read_bytes"],
        "scratch_bytes": found[-1]["scratch_bytes"],
        "memory": memory,
        "claims": _claims(memory),
        "warm": _regime([one["warm"] for one in found]),
        "cold": _cold([one["cold"] for one in found]) if found[0]["cold"] else None,
        "same_tokens_as_reference": all(one["answer"] == reference["answer"] for one in found),
        "same_logits_as_reference": all(one["logits_digest"] == reference["logits_digest"] for one in found),
        "updates": found[-1]["updates"],
        "load_averages": [one["load_average"][0] for one in found],
    }


def _claims(memory: Mapping[str, int | None]) -> dict[str, bool] | None:
    """What hotsplit promises about memory; None for other engines."""
    hot, dense = memory["hot_bytes"], memory["dense_bytes"]
    if hot is None or dense is None:
        return None
    peak, anonymous = memory["peak_after_load_bytes"] or 0, memory["anonymous_peak_bytes"] or 0
    return {
        "peak_after_load_is_under_hot_and_0.6_GB": peak < hot + ALLOWANCE_BYTES,
        "anonymous_peak_is_under_hot_and_dense_and_0.6_GB": anonymous < hot + dense + ALLOWANCE_BYTES,
    }


def _regime(found: Sequence[Found]) -> dict[str, Any]:
    tokens = [token for one in found for token in one["tokens"]]
    counted = {name: sum(one["counted"][name] for one in found) for name in found[0]["counted"]}
    read = [token["read_bytes"] for token in tokens]
    cold_bytes = counted["cold_bytes"] / len(tokens) if counted else None
    return {
        "prefill_wall_ms": spread([one["prefill"]["wall_ms"] for one in found]),
        "prefill_cpu_ms": spread([one["prefill"]["cpu_ms"] for one in found]),
        "prefill_read_bytes": int(np.median([one["prefill"]["read_bytes"] for one in found])),
        "decode_wall_ms": spread([token["wall_ms"] for token in tokens]),
        "decode_cpu_ms": spread([token["cpu_ms"] for token in tokens]),
        "decode_wall_ms_of_rounds": [_median(one, "wall_ms") for one in found],
        "decode_cpu_ms_of_rounds": [_median(one, "cpu_ms") for one in found],
        "tokens": len(tokens),
        "read_bytes_per_token": round(float(np.mean(read))),
        "cold_bytes_per_token": None if cold_bytes is None else round(cold_bytes),
        "hit_rate": round(counted["hit_pairs"] / counted["pairs"], 4) if counted else None,
        "swaps": counted.get("swaps"),
        "cached_share": found[0]["cached_share"],
    }


def _cold(found: Sequence[Found]) -> dict[str, Any]:
    """A cold regime, and whether it was one: does what the engine lacks really come from the disk, every time?"""
    regime = _regime(found)
    cold_bytes, read = regime["cold_bytes_per_token"], regime["read_bytes_per_token"]
    # Without counters of its own an engine must read something; with them at least what they say, page by page.
    is_dropped = None if cold_bytes == 0 else read > 0 if cold_bytes is None else read >= 0.95 * cold_bytes
    return regime | {"reads_come_from_the_disk": is_dropped}


def _median(one: Found, name: str) -> float:
    return round(float(np.median([token[name] for token in one["tokens"]])), 3)
