"""How many distinct experts a step touches: the bound of independent tokens, and what traces show of it.

Stands between counts and forecast: `shares -> chances -> bytes -> seconds`. A step of B tokens that are routed
independently touches an expert with the chance 1 - (1 - p)^B. Tokens in a row of one request repeat each other's
experts, so that they touch fewer. A trace says how many fewer: B such tokens count as B^exponent independent ones. Tokens
of different requests do not repeat each other more than their histogram says (docs/forecast.md has the measurement), so
that a batch is not corrected, only the tokens in a row within each request of it.

Shapes: L MoE layers, E routed experts per layer, T tokens, K experts per token, S steps, B tokens per step.

    >>> shares_LE = np.full((1, 4), 0.25)
    >>> touch_chances(shares_LE, top_k=2, tokens=2.0).sum()           # of 4 experts, by two independent tokens
    np.float64(3.0)
    >>> halving = TouchCorrection(exponent=0.5, largest=4, source="an example")
    >>> [halving.effective_tokens(tokens) for tokens in (1, 4, 8)]    # 8 in a row count as two runs of 4
    [1.0, 2.0, 4.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, TraceError
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.trace import DECODE, Trace, count_ids

RUNS = (2, 3, 4, 6, 8)
"""Tokens in a row that a correction is fitted on."""
ENOUGH_STEPS = 20
"""Steps of one size that a trace must hold, for their mean to say something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TouchCorrection:
    """How tokens in a row of one request count, against independent ones."""

    exponent: float
    """B tokens in a row touch as many experts as B^exponent independent ones; 1 is independence."""
    largest: int
    """The longest run that this was fitted on; a longer one counts as several of these."""
    source: str
    """Where it comes from; printed with every forecast."""
    worst_error: float | None = None
    """Largest leave-one-out error over the fitted runs, as a ratio of distinct experts; None where not fitted here."""

    def __post_init__(self) -> None:
        if not 0 < self.exponent <= 1:
            raise ConfigError("a touch correction's exponent", got=repr(self.exponent), wanted="above 0, at most 1")
        if self.largest < 1:
            raise ConfigError("a touch correction's longest run", got=str(self.largest), wanted="an integer >= 1")

    def effective_tokens(self, tokens: int) -> float:
        """How many independent tokens touch as many experts as so many in a row.

        Args:
            tokens: In a row, of one request, >= 1.
        """
        run = min(tokens, self.largest)
        return float(run**self.exponent * (tokens / run))


INDEPENDENT = TouchCorrection(
    exponent=1.0, largest=1, source="no trace: tokens are taken as independent, which real ones in a row stay under"
)
"""The bound."""


def touch_chances(shares: npt.NDArray[np.float64], *, top_k: int, tokens: float) -> npt.NDArray[np.float64]:
    """The chance that a step touches an expert: 1 - (1 - p)^tokens.

    Args:
        shares: Share of the layer's routed pairs, [L, E], float64.
        top_k: Experts chosen per token; a token takes an expert at most once, so p = share x top_k.
        tokens: Independent tokens in the step, or as many as the real ones count for; >= 0, any real number.

    Returns:
        Chances, [L, E], float64 in [0, 1].
    """
    chance_LE = np.minimum(shares * top_k, 1.0)
    # 0^0 is 1 and a chance of 1 has log1p(-1) = -inf: the power says both rightly.
    missed_LE = (1.0 - chance_LE) ** tokens
    return np.asarray(1.0 - missed_LE, dtype=np.float64)


def runs_of(trace: Trace, *, length: int) -> npt.NDArray[np.int64]:
    """Cut the decode tokens of every request into runs of one length that do not overlap.

    Args:
        trace: With requests; its tokens in order.
        length: Tokens in a run.

    Returns:
        Token numbers of the trace, [S, length], int64; what is left of a request is left out.

    Raises:
        TraceError: The trace does not say its requests.
    """
    groups = [tokens[: len(tokens) // length * length].reshape(-1, length) for tokens in _decode_by_request(trace)]
    return np.concatenate(groups) if groups else np.zeros((0, length), dtype=np.int64)


def batches_of(trace: Trace, *, size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Let requests run side by side, drawn at random: each step has one token of every one of `size` requests.

    Args:
        trace: With requests; its tokens in order.
        size: Requests side by side.
        seed: Of the draw.

    Returns:
        Token numbers of the trace, [S, size], int64.

    Raises:
        TraceError: The trace does not say its requests.
    """
    requests = _decode_by_request(trace)
    order = np.random.default_rng(seed).permutation(len(requests))
    steps = []
    for start in range(0, len(order) - size + 1, size):
        together = [requests[number] for number in order[start : start + size]]
        steps.append(np.stack([tokens[: min(map(len, together))] for tokens in together], axis=1))
    return np.concatenate(steps) if steps else np.zeros((0, size), dtype=np.int64)


def distinct_rows(
    trace: Trace, *, steps: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Replay steps and count the distinct experts that each one touches.

    Args:
        trace: Routing decisions; its experts are known.
        steps: Token numbers of every step, [S, B], int64.
        counted: Which experts count, [L, E], bool: all, or the cold ones.

    Returns:
        Mean number of distinct counted experts of a step, per layer, [L], float64.
    """
    num_layers, num_experts = counted.shape
    if not len(steps):
        raise TraceError("the trace", got="no step of that size", wanted=f"runs of {steps.shape[1]} decode tokens")
    mean_L = np.zeros(num_layers)
    for layer_id in range(num_layers):
        ids_SN = trace.experts[steps, layer_id].reshape(len(steps), -1).astype(np.int64)
        touched_SE = np.zeros((len(steps), num_experts), dtype=bool)
        rows_SN = np.broadcast_to(np.arange(len(steps))[:, None], ids_SN.shape)
        real_SN = ids_SN >= 0
        touched_SE[rows_SN[real_SN], ids_SN[real_SN]] = True
        mean_L[layer_id] = touched_SE[:, counted[layer_id]].sum() / len(steps)
    return mean_L


def effective_tokens_of(distinct: float, *, shares: npt.NDArray[np.float64], top_k: int) -> float:
    """How many independent tokens touch so many distinct experts, by bisection.

    Args:
        distinct: Distinct experts per step and layer, the mean over layers.
        shares: Share of the layer's routed pairs, [L, E], float64.
        top_k: Experts chosen per token.

    Returns:
        Tokens >= 0; infinite where more are touched than ever could be.
    """

    def touched(tokens: float) -> float:
        return float(touch_chances(shares, top_k=top_k, tokens=tokens).sum()) / len(shares)

    low, high = 0.0, 1.0
    while touched(high) < distinct:
        low, high = high, 2 * high
        if high > 2**40:
            return float("inf")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if touched(middle) < distinct else (low, middle)
    return high


def fit_exponent(tokens: Sequence[int], effective: Sequence[float]) -> float:
    """Fit one exponent: effective = tokens^exponent, least squares of logarithms through (1, 1), kept to (0, 1].

    Args:
        tokens: In a row, each >= 2.
        effective: Independent tokens that touch as many experts.

    Raises:
        TraceError: No points, or one that cannot be.
    """
    logs = np.log(np.asarray(tokens, dtype=np.float64))
    values = np.asarray(effective, dtype=np.float64)
    if not len(values) or len(values) != len(logs) or not (np.isfinite(values) & (values > 0)).all() or logs.min() <= 0:
        raise TraceError("distinct experts", got=str(list(effective))[:60], wanted="a finite number for every run >= 2")
    slope = float((logs * np.log(values)).sum() / (logs * logs).sum())
    return min(max(slope, 1e-3), 1.0)


def fit_correction(trace: Trace, *, runs: Sequence[int] = RUNS, name: str = "a trace") -> TouchCorrection:
    """Fit the correction on a trace's own decode tokens, with the error at each run when it is left out.

    Args:
        trace: With requests and decode tokens.
        runs: Tokens in a row to fit on, each >= 2.
        name: Of the trace, for the source.

    Returns:
        The correction and its source: trace, runs, exponent, and largest leave-one-out error.

    Raises:
        TraceError: No requests, no number of experts, or too few decode tokens in a row.
    """
    num_experts = trace.identity.num_experts
    if num_experts is None:
        raise TraceError("the trace", got="no num_experts", wanted="the number of routed experts per layer")
    steps_of_run = {run: runs_of(trace, length=run) for run in runs}
    short = [run for run, steps in steps_of_run.items() if len(steps) < ENOUGH_STEPS]
    if short or len(runs) < 2:
        got = f"{len(steps_of_run[short[0]])} runs of {short[0]} decode tokens" if short else f"{len(runs)} lengths"
        raise TraceError("the trace", got=got, wanted=f"two lengths or more, {ENOUGH_STEPS} runs of each")
    decode_TLK = trace.experts[trace.phase == DECODE]
    shares_LE = shares_of(count_ids(decode_TLK, num_experts=num_experts).astype(np.float64))
    top_k, all_LE = int(trace.experts.shape[2]), np.ones(shares_LE.shape, dtype=bool)
    seen = [float(distinct_rows(trace, steps=steps, counted=all_LE).mean()) for steps in steps_of_run.values()]
    effective = [effective_tokens_of(distinct, shares=shares_LE, top_k=top_k) for distinct in seen]
    errors = []
    for left_out, run in enumerate(runs):
        others = [index for index in range(len(runs)) if index != left_out]
        exponent = fit_exponent([runs[index] for index in others], [effective[index] for index in others])
        predicted = touch_chances(shares_LE, top_k=top_k, tokens=run**exponent).sum() / len(shares_LE)
        errors.append(abs(predicted / seen[left_out] - 1.0))
    exponent, worst = fit_exponent(runs, effective), float(max(errors))
    source = (
        f"fitted on {name}: {len(decode_TLK)} decode tokens, runs of {', '.join(map(str, runs))}; B tokens in a row count "
        f"as B^{exponent:.3f}; largest leave-one-out error {100 * worst:.1f} % of distinct experts"
    )
    return TouchCorrection(exponent=exponent, largest=max(runs), source=source, worst_error=worst)


def _decode_by_request(trace: Trace) -> list[npt.NDArray[np.int64]]:
    """Token numbers of every request's decode, in order."""
    if trace.request is None:
        raise TraceError("the trace", got="no requests", wanted="the array `request`, to tell tokens in a row")
    decode = np.flatnonzero(trace.phase == DECODE)
    numbers = trace.request[decode]
    order = np.argsort(numbers, kind="stable")
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    return [tokens for tokens in np.split(decode[order], edges) if len(tokens)]
