"""The least recently used experts go: the policy that caches have, replayed for comparison.

Beside simulate.py. Every expert that a step touches is hot after it, and the ones whose last use is longest ago make
room. It adapts in one step and pays for that: every miss is a row moved, and an engine that reads cold rows in place
would have read it once anyhow.

A hit is a pair whose expert was hot when the step began. Within a step experts are touched in file order, a token's in
falling router weight, so the weakest choice of a token counts as used last.

    >>> ids = np.array([[[0]], [[1]], [[1]], [[0]]])
    >>> steps = Steps(experts=ids, starts=np.arange(5), is_decode=np.ones(4, bool), num_experts=2)
    >>> result = lru(steps, hot=np.array([[True, False]]), order=np.array([[1.0, 0.0]]), layer_ids=(0,))
    >>> result.hits.tolist(), result.moved_rows.tolist()
    ([1, 0, 1, 0], [0, 1, 0, 1])
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.plan.replay import Steps
from hotsplit.plan.simulate import Part, Replayed, edges

MAX_PAIRS = 16_000_000
"""Routed pairs that are replayed at most, about half a minute of Python: more layers are sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LruResult:
    """What the least recently used policy did in some layers."""

    hits: npt.NDArray[np.int64]
    """Routed pairs served hot, per step, summed over these layers, [S], int64."""
    pairs: npt.NDArray[np.int64]
    """Routed pairs, the same, [S], int64."""
    moved_rows: npt.NDArray[np.int64]
    """Rows copied into fast memory, the same: one for every distinct cold expert touched, [S], int64."""
    touched_rows: npt.NDArray[np.int64]
    """Distinct experts touched, the same, [S], int64."""
    layer_ids: tuple[int, ...]
    """Which layers."""


def sample_layers(steps: Steps, *, max_pairs: int = MAX_PAIRS) -> tuple[int, ...]:
    """As many layers as can be replayed in reasonable time, spread evenly; all where they can.

    Args:
        steps: The traffic.
        max_pairs: Routed pairs at most; one layer is always taken.
    """
    pairs = len(steps.experts) * steps.top_k
    number = max(1, min(steps.num_layers, max_pairs // max(pairs, 1)))
    return tuple(int(layer_id) for layer_id in np.linspace(0, steps.num_layers - 1, number).round())


def lru(
    steps: Steps, *, hot: npt.NDArray[np.bool_], order: npt.NDArray[np.float64], layer_ids: Sequence[int]
) -> LruResult:
    """Replay the least recently used policy in some layers.

    Args:
        steps: The traffic.
        hot: Which experts are hot at the start, [L, E], bool.
        order: The lowest of these goes first while no use is known, [L, E], float64: the plan's counts.
        layer_ids: Layers to replay.
    """
    totals_4S = np.zeros((4, len(steps)), dtype=np.int64)
    for layer_id in layer_ids:
        start = [expert for expert in np.argsort(order[layer_id], kind="stable").tolist() if hot[layer_id, expert]]
        totals_4S += _one_layer(steps, layer_id=layer_id, start=start)
    hits, pairs, moved, touched = totals_4S
    return LruResult(hits=hits, pairs=pairs, moved_rows=moved, touched_rows=touched, layer_ids=tuple(layer_ids))


def as_replayed(result: LruResult, *, steps: Steps, row_bytes: float, window_steps: int) -> Replayed:
    """The result in the form that other policies have; bytes are of the replayed layers alone.

    Args:
        result: From lru().
        steps: The traffic.
        row_bytes: Bytes of one row of these layers, on average.
        window_steps: Steps of one window.
    """
    stops = edges(len(steps), window_steps=window_steps)
    parts = tuple(
        _part(result, steps=steps, row_bytes=row_bytes, first=first, last=last)
        for first, last in itertools.pairwise([0, *stops])
    )
    whole = _part(result, steps=steps, row_bytes=row_bytes, first=0, last=len(steps))
    touched, moved = int(result.touched_rows.sum()), int(result.moved_rows.sum())
    return Replayed(
        parts=parts,
        hit_rate=whole.hit_rate,
        byte_hit_rate=whole.byte_hit_rate,
        cold_bytes_per_step=whole.cold_bytes_per_step,
        hot_bytes_per_step=(touched - moved) * row_bytes / max(len(steps), 1),
        moved_bytes=whole.moved_bytes,
        steps=whole.steps,
        tokens=whole.tokens,
        hits=int(result.hits.sum()),
        pairs=int(result.pairs.sum()),
        done=moved,
    )


def _part(result: LruResult, *, steps: Steps, row_bytes: float, first: int, last: int) -> Part:
    hits, pairs, moved, touched = (
        int(values_S[first:last].sum())
        for values_S in (result.hits, result.pairs, result.moved_rows, result.touched_rows)
    )
    return Part(
        first_step=first,
        steps=last - first,
        tokens=int(steps.starts[last] - steps.starts[first]),
        hit_rate=hits / pairs if pairs else 0.0,
        byte_hit_rate=1.0 - moved / touched if touched else None,
        oracle=None,
        cold_bytes_per_step=moved * row_bytes / max(last - first, 1),
        moved_bytes=round(moved * row_bytes),
    )


def _one_layer(steps: Steps, *, layer_id: int, start: Sequence[int]) -> npt.NDArray[np.int64]:
    """Hits, pairs, moved rows and touched rows per step, [4, S]."""
    held: OrderedDict[int, None] = OrderedDict.fromkeys(start)
    room, columns = len(start), []
    starts = steps.starts.tolist()
    ids_TK = steps.experts[:, layer_id].tolist()
    for step in range(len(steps)):
        ids = [expert for token in ids_TK[starts[step] : starts[step + 1]] for expert in token if expert >= 0]
        hits = sum(expert in held for expert in ids)
        touched = dict.fromkeys(ids)
        moved = sum(expert not in held for expert in touched)
        for expert in ids:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > room:
            held.popitem(last=False)
        columns.append((hits, len(ids), moved, len(touched)))
    return np.array(columns, dtype=np.int64).reshape(-1, 4).T
