"""A trace as an engine would run it: steps in order, and what is counted of any run of them.

Stands between trace and simulation: `Trace -> Steps -> counts of a run of steps -> Counters`.

Shapes: T tokens, S steps, L MoE layers, K experts per token, E routed experts per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, TraceError
from hotsplit.notices import Notice
from hotsplit.plan.counters import PHASES, Counters, Phase
from hotsplit.plan.trace import DECODE, Trace

Kept = Literal["decode", "prefill", "all"]
KEPT: Final[tuple[Kept, ...]] = ("decode", "prefill", "all")
"""Which tokens of a trace are played."""
_MAX_IDS: Final = 4_000_000
"""Ids that are counted in one go: more would only take memory."""
MAX_STEPS: Final = 2**24
"""Steps of a replay whose number is named, all domains together, and tokens of one step."""
_MAX_BYTES: Final = 2**32
"""Bytes of ids that are laid out at most, where a trace is played over and over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Tokens in the order in which they are played, cut into steps."""

    experts: npt.NDArray[Any]
    """Expert ids, [T, L, K], any integer type; -1 is padding."""
    starts: npt.NDArray[np.int64]
    """First token of every step, and T at the end, [S + 1], int64."""
    is_decode: npt.NDArray[np.bool_]
    """Whether a step counts as decode, [S], bool."""
    num_experts: int
    """Routed experts per layer."""
    passes: int = 1
    """How often the domain that is played most often is begun: more than 1 where a trace is too short."""

    def __len__(self) -> int:
        return len(self.is_decode)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.experts.shape[2])


def steps_of(
    trace: Trace,
    *,
    num_experts: int,
    domains: Sequence[str] = (),
    kept: Kept = "decode",
    tokens_per_step: int | None = None,
    num_steps: int | None = None,
) -> Steps:
    """Lay a trace out for a replay.

    Args:
        trace: Routing decisions.
        num_experts: Routed experts per layer.
        domains: Kinds of traffic to play, one after the other, each in file order; one that comes again goes on where
            it left off, and begins anew at its end. Empty for the whole trace.
        kept: Which tokens.
        tokens_per_step: Cut into steps of so many tokens; None for the trace's own steps.
        num_steps: Play only so many, of every domain that is named; None for all.

    Returns:
        The steps; a step with any prefill token in it counts as prefill.

    Raises:
        TraceError: No such domain, nothing is left to play, or an id is beyond num_experts.
        ConfigError: A number is below 1, or above what memory holds.
    """
    for name, value, most in (
        ("tokens_per_step", tokens_per_step, MAX_STEPS),
        ("steps", num_steps, MAX_STEPS // max(len(domains), 1)),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(name, got=str(value), wanted=f"an integer from 1 to {most}")
    if trace.experts.size and int(trace.experts.max()) >= num_experts:
        got = f"expert {int(trace.experts.max())}"
        raise TraceError("the trace", got=got, wanted=f"ids below {num_experts}", do="name the plan of its model")
    parts, places = [], dict.fromkeys(domains, 0)
    for domain in domains or (None,):
        part = _laid_out(trace, num_experts=num_experts, domain=domain, kept=kept, tokens_per_step=tokens_per_step)
        if domain is not None:
            most_bytes = _MAX_BYTES // len(domains)
            part, places[domain] = _went_on(part, start=places[domain], num_steps=num_steps, most_bytes=most_bytes)
        parts.append(part)
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    return first_steps(whole, num_steps) if not domains and num_steps is not None else whole


def repeat_notice(steps: Steps) -> Notice | None:
    """Say so where a replay begins its traffic anew.

    Args:
        steps: The replay.
    """
    if steps.passes == 1:
        return None
    text = (
        f"the trace is shorter than the replay: it is played {steps.passes:,} times over, so that old traffic returns"
    )
    return Notice(name="trace-repeated", text=text, strict=False)


def first_steps(steps: Steps, num_steps: int) -> Steps:
    """The first steps of a replay.

    Args:
        steps: All of them.
        num_steps: How many; more than there are gives all.
    """
    num_steps = min(num_steps, len(steps))
    return replace(
        steps,
        experts=steps.experts[: steps.starts[num_steps]],
        starts=steps.starts[: num_steps + 1],
        is_decode=steps.is_decode[:num_steps],
    )


def count_steps(
    steps: Steps, counters: Counters, *, first: int, last: int, hot: npt.NDArray[np.bool_], row_bytes: Sequence[int]
) -> None:
    """Count a run of steps into the counters, as the router of an engine would have.

    Args:
        steps: The replay.
        counters: Changed.
        first: First step.
        last: The step behind the last one.
        hot: Which experts are hot all the while, [L, E], bool.
        row_bytes: Bytes of one row per layer, [L].
    """
    row_bytes_L1 = np.asarray(row_bytes, dtype=np.int64)[:, None]
    for start, stop in _pieces(steps, first=first, last=last):
        for phase in PHASES:
            ids_TLK, step_T = _tokens(steps, start=start, stop=stop, phase=phase)
            if not len(ids_TLK):
                continue
            counts_LE = _counts(ids_TLK, num_experts=steps.num_experts)
            touched_LE = counts_LE if len(ids_TLK) == step_T[-1] - step_T[0] + 1 else _touched(ids_TLK, step_T, steps)
            bytes_LE = touched_LE * row_bytes_L1
            hot_bytes = int(bytes_LE[hot].sum())
            counters.counts[phase] += counts_LE
            counters.tokens[phase] += int((ids_TLK[:, 0, 0] >= 0).sum()) if ids_TLK.dtype.kind == "i" else len(ids_TLK)
            counters.hits[phase] += int(counts_LE[hot].sum())
            counters.touched_hot_bytes[phase] += hot_bytes
            counters.touched_cold_bytes[phase] += int(bytes_LE.sum()) - hot_bytes
    counters.steps += last - first


def _laid_out(trace: Trace, *, num_experts: int, domain: str | None, kept: Kept, tokens_per_step: int | None) -> Steps:
    """One domain's tokens of the phases that are kept, sorted by step, ties by file order."""
    chosen_T = trace.domain_mask(domain)
    if kept != "all":
        chosen_T = chosen_T & ((trace.phase == DECODE) == (kept == "decode"))
    rows = np.flatnonzero(chosen_T)
    if not len(rows):
        raise TraceError("the trace", got="no such tokens", wanted=f"{kept} tokens{f' of {domain}' * bool(domain)}")
    if tokens_per_step is None:
        rows = rows[np.argsort(trace.step[rows], kind="stable")]
        step_T = trace.step[rows]
        starts = np.flatnonzero(np.r_[True, step_T[1:] != step_T[:-1]])
    else:
        starts = np.arange(0, len(rows), tokens_per_step)
    is_decode_S = np.logical_and.reduceat(trace.phase[rows] == DECODE, starts)
    experts_TLK = trace.experts if len(rows) == len(trace.phase) and _is_rising(rows) else trace.experts[rows]
    return Steps(
        experts=experts_TLK,
        starts=np.r_[starts, len(rows)].astype(np.int64),
        is_decode=is_decode_S,
        num_experts=num_experts,
    )


def _is_rising(rows: npt.NDArray[np.int64]) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _went_on(part: Steps, *, start: int, num_steps: int | None, most_bytes: int) -> tuple[Steps, int]:
    """So many steps from a place on, round and round; and the place after them, not taken round."""
    stop = start + (len(part) if num_steps is None else num_steps)
    passes = -(-stop // len(part))
    if num_steps is None:
        return replace(part, passes=passes), stop
    order = np.arange(start, stop) % len(part)
    lengths_S = np.diff(part.starts)
    starts = np.r_[0, np.cumsum(lengths_S[order])]
    token_bytes = part.experts.dtype.itemsize * part.num_layers * part.top_k
    if num_steps > len(part) and int(starts[-1]) * token_bytes > most_bytes:
        most = int(np.searchsorted(starts * token_bytes, most_bytes, side="right")) - 1
        raise ConfigError("steps", got=str(num_steps), wanted=f"at most {most} of this trace, or memory is short")
    tokens = np.arange(starts[-1]) + np.repeat(part.starts[order] - starts[:-1], lengths_S[order])
    played = replace(
        part,
        experts=part.experts[tokens],
        starts=starts,
        is_decode=part.is_decode[order],
        passes=passes,
    )
    return played, stop


def _joined(parts: Sequence[Steps]) -> Steps:
    offsets = np.cumsum([0, *(len(part.experts) for part in parts)])
    starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
    return replace(
        parts[0],
        experts=np.concatenate([part.experts for part in parts]),
        starts=np.r_[np.concatenate(starts), offsets[-1]],
        is_decode=np.concatenate([part.is_decode for part in parts]),
        passes=max(part.passes for part in parts),
    )


def _pieces(steps: Steps, *, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs of steps of at most so many ids, one step at least."""
    per_token = steps.num_layers * steps.top_k
    while first < last:
        most = steps.starts[first] + max(_MAX_IDS // per_token, 1)
        stop = int(np.searchsorted(steps.starts[first : last + 1], most, side="right")) - 1 + first
        stop = min(max(stop, first + 1), last)
        yield first, stop
        first = stop


def _tokens(steps: Steps, *, start: int, stop: int, phase: Phase) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Ids of the tokens of one phase, [T, L, K], and the step of each, [T]."""
    is_mine_S = steps.is_decode[start:stop] == (phase == "decode")
    ids_TLK = steps.experts[steps.starts[start] : steps.starts[stop]]
    if not is_mine_S.any():
        return ids_TLK[:0], np.zeros(0, np.int64)
    step_T = np.repeat(np.arange(stop - start), np.diff(steps.starts[start : stop + 1]))
    if is_mine_S.all():
        return ids_TLK, step_T
    is_mine_T = is_mine_S[step_T]
    # Numbered anew, so that one token per step is seen as that also where the other phase lies between.
    return ids_TLK[is_mine_T], (np.cumsum(is_mine_S) - 1)[step_T[is_mine_T]]


def _counts(ids_TLK: npt.NDArray[Any], *, num_experts: int) -> npt.NDArray[np.int64]:
    """Routed pairs, [L, E]; padding, id -1, falls into a column of its own."""
    num_layers, columns = ids_TLK.shape[1], num_experts + 1
    cells_TLK = ids_TLK + (np.arange(num_layers, dtype=np.int64) * columns + 1)[:, None]
    counts = np.bincount(cells_TLK.reshape(-1), minlength=num_layers * columns)
    return counts.reshape(num_layers, columns)[:, 1:]


def _touched(ids_TLK: npt.NDArray[Any], step_T: npt.NDArray[np.int64], steps: Steps) -> npt.NDArray[np.int64]:
    """Steps in which every expert was touched, [L, E]."""
    columns, num_steps = steps.num_experts + 1, int(step_T[-1]) + 1
    touched_LE = np.empty((ids_TLK.shape[1], steps.num_experts), np.int64)
    for layer_id in range(len(touched_LE)):
        seen_SE = np.zeros((num_steps, columns), dtype=bool)
        seen_SE[step_T[:, None], ids_TLK[:, layer_id].astype(np.int64) + 1] = True
        touched_LE[layer_id] = seen_SE.sum(axis=0)[1:]
    return touched_LE
