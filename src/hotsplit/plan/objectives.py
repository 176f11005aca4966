"""In which order experts are wanted in fast memory: the planner's extension point.

Stands between histogram and planner: `histogram -> shares -> order scores -> greedy`. An objective turns counts into
order scores, value per byte of fast memory; the greedy then takes the highest first. A new objective is one entry in
`OBJECTIVES`.

Shapes: L MoE layers, E routed experts per layer.

The two differ where row sizes do. One expert of 4 bytes and four of 1 byte, and room for 4 bytes:

    >>> counts_LE, sizes_LE = np.array([[30.0, 10, 9, 8, 7]]), np.array([[4, 1, 1, 1, 1]])
    >>> bool(share_per_byte(counts_LE, sizes=sizes_LE, top_k=1).argmax() == 1)      # the small ones serve more tokens
    True
    >>> bool(touched_per_byte(counts_LE, sizes=sizes_LE, top_k=1).argmax() == 0)    # the big one saves more cold bytes
    True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Objective(Protocol):
    """Counts in, order scores out: value per byte, highest wanted first."""

    def __call__(
        self, counts: npt.NDArray[np.float64], *, sizes: npt.NDArray[np.int64], top_k: int
    ) -> npt.NDArray[np.float64]:
        """Score every expert.

        Args:
            counts: Routed pairs, or shares, [L, E], float64.
            sizes: Bytes of every expert's row, [L, E], int64.
            top_k: Experts chosen per token.

        Returns:
            Order scores, [L, E], float64.
        """
        ...


def shares_of(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divide every layer by its total; a layer without counts is uniform.

    Totals are exact: numpy's sum of fractions rounds by the order of the experts and the width of the machine's
    vectors, and a plan must be the same bytes whatever machine makes it.

    Args:
        counts: Routed pairs, [L, E], float64, finite and >= 0.

    Returns:
        Shares, [L, E], float64; every layer sums to 1.
    """
    totals_L = counts.sum(axis=1)
    if not (totals_L <= 2**53).all() or not (counts == np.floor(counts)).all():  # else whole numbers: exact already
        totals_L = np.array([math.fsum(row) for row in counts.tolist()])
    filled_LE = np.where(totals_L[:, None] > 0, counts, 1.0)
    shares_LE: npt.NDArray[np.float64] = filled_LE / np.where(totals_L > 0, totals_L, counts.shape[1])[:, None]
    return shares_LE


def touched(shares: npt.NDArray[np.float64], *, top_k: int, batch: int = 1) -> npt.NDArray[np.float64]:
    """The chance that a step of `batch` tokens, routed independently, touches an expert: 1 - (1 - p)^B.

    Args:
        shares: Share of the layer's routed pairs, [L, E], float64.
        top_k: Experts chosen per token; a token takes an expert at most once, so p = share x top_k.
        batch: Tokens per step, B.

    Returns:
        Chances, [L, E], float64 in [0, 1].
    """
    chance_LE = np.minimum(shares * top_k, 1.0)
    return 1.0 - (1.0 - chance_LE) ** batch


def share_per_byte(
    counts: npt.NDArray[np.float64],
    *,
    sizes: npt.NDArray[np.int64],
    top_k: int,  # noqa: ARG001 - the share of a token's experts is the same for any number of them
) -> npt.NDArray[np.float64]:
    """Most routed tokens per byte: an expert is worth its share. See `Objective`."""
    return shares_of(counts) / sizes


def touched_per_byte(
    counts: npt.NDArray[np.float64],
    *,
    sizes: npt.NDArray[np.int64],  # noqa: ARG001 - they cancel: see below
    top_k: int,
) -> npt.NDArray[np.float64]:
    """Fewest cold bytes per step. See `Objective`.

    A hot expert saves touched x size bytes of cold reads and costs size bytes of fast memory: per byte it is worth
    the chance to be touched alone. Any batch gives the same order, because the chance grows with the share.
    """
    return touched(shares_of(counts), top_k=top_k)


OBJECTIVES: Mapping[str, Objective] = {"share": share_per_byte, "time": touched_per_byte}
"""By the name that HOTSPLIT_OBJECTIVE and plan files use."""
