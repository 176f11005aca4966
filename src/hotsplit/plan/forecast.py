"""How long a step takes, between two bounds, and what binds it: bytes over measured rates.

Stands after the plan: `plan + counts + rates -> seconds`. Per layer the hot rows that a step touches are read at the rate
of fast memory, the cold ones at that of the link, or at this rank's part of the host memory that all ranks share. The
lower bound lets both overlap perfectly (the longer of the two) and counts distinct experts as the touch correction says;
the upper one reads them one after the other and counts tokens as independent. Weights outside the experts, attention,
launches and arithmetic are only in it as far as `Extra` says.

Pure: arrays and dataclasses in, dataclasses out.

Shapes: L MoE layers, E routed experts per layer, W ranks (stages x tp, stages outermost).

    >>> model = Model(shares=np.array([[0.5, 0.3, 0.1, 0.1]]), hot=np.array([[True, True, False, False]]),
    ...               row_bytes=np.array([1000]), stages=((0,),), top_k=1)
    >>> machine = Machine(hbm_bytes_per_s=(1e6,), link_bytes_per_s=(1e5,))
    >>> one = forecast_step(model, machine=machine, step=Step(kind="decode", requests=1))
    >>> round(one.seconds_low, 6), round(one.seconds_high, 6)     # 800 bytes hot, 200 cold: 0.8 ms and 2 ms
    (0.002, 0.0028)
    >>> one.token_hit, one.byte_hit, one.binding.resource
    (0.8, 0.8, 'link')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, PlanError
from hotsplit.plan.rates import Machine
from hotsplit.plan.touched import INDEPENDENT, TouchCorrection, touch_chances

BATCHES = (1, 8, 32, 128)
"""Requests that decode side by side."""
WINDOWS = (2, 4, 8)
"""Tokens that a step of speculative decoding checks: one, and the drafted ones."""
CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Prompt tokens of one prefill step."""
SATURATED = 0.99
"""A chunk that touches this part of the cold bank, or more, reads all of it: a sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A plan and the traffic that meets it, as arrays."""

    shares: npt.NDArray[np.float64]
    """Share of the layer's routed pairs, [L, E], float64; every layer sums to 1."""
    hot: npt.NDArray[np.bool_]
    """Which experts are hot, [L, E], bool."""
    row_bytes: npt.NDArray[np.int64]
    """Bytes of one expert's row on one rank, [L], int64."""
    stages: tuple[tuple[int, ...], ...]
    """layer_ids of every pipeline stage."""
    top_k: int
    """Experts chosen per token."""
    tp: int = 1
    """Ranks of every stage."""

    def __post_init__(self) -> None:
        num_layers, num_experts = self.shares.shape
        if self.hot.shape != self.shares.shape or self.row_bytes.shape != (num_layers,):
            got = f"{self.shares.shape}, {self.hot.shape}, {self.row_bytes.shape}"
            raise PlanError("shares, hot and row_bytes", got=got, wanted="[L, E], [L, E] and [L]")
        if [layer_id for stage in self.stages for layer_id in stage] != list(range(num_layers)):
            raise PlanError("stages", got=str(self.stages)[:60], wanted="every layer once, in order")
        if not 1 <= self.top_k <= num_experts or self.tp < 1:
            raise PlanError("top_k, tp", got=f"{self.top_k}, {self.tp}", wanted=f"1 to {num_experts}, and >= 1")

    @property
    def cold_bank_bytes(self) -> int:
        """All cold rows of one rank, over its stages."""
        return int(((~self.hot).sum(axis=1) * self.row_bytes).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """What a step costs beside reading experts; nothing of it is guessed."""

    dense_bytes: int = 0
    """Bytes of all other weights that a step reads in fast memory, on one rank of one stage."""
    other_s: float = 0.0
    """Seconds of everything else in a step: attention, launches, sampling."""
    cold_layer_s: float = 0.0
    """Seconds that a layer takes longer for having any cold work at all, whatever its bytes."""

    def __post_init__(self) -> None:
        for name in ("dense_bytes", "other_s", "cold_layer_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(name, got=repr(value), wanted="a finite number >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One kind of step."""

    kind: str
    """"decode", "window" (speculative decoding) or "prefill"."""
    requests: int = 1
    """Side by side."""
    tokens: int = 1
    """In a row, of every request."""

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1:
            raise ConfigError("a step", got=f"{self.requests} x {self.tokens} tokens", wanted="at least one token")

    @property
    def num_tokens(self) -> int:
        """All tokens of the step."""
        return self.requests * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """What a step waits for longest."""

    resource: str
    """"hbm" (fast memory), "link" (in-place reads), "host" (the host memory that ranks share), or "other"."""
    rank: int
    """The slowest rank there."""
    seconds: dict[str, float]
    """Seconds of every resource as if nothing else took time, of independent tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """One step, between its bounds."""

    step: Step
    """Which."""
    seconds_low: float
    """Perfect overlap, and distinct experts as corrected."""
    seconds_high: float
    """One read after the other, and independent tokens."""
    token_hit: float
    """Routed pairs that are served hot / all."""
    byte_hit: float
    """Bytes of touched hot experts / bytes of touched experts; of independent tokens."""
    distinct: float
    """Distinct experts per layer, of independent tokens."""
    hot_bytes: float
    """Distinct hot bytes that one rank of every stage reads, of independent tokens."""
    cold_bytes: float
    """Unique cold bytes, the same: a bound that tokens in a row stay under."""
    cold_bytes_corrected: float
    """Unique cold bytes with the touch correction."""
    is_sweep: bool
    """Whether the step reads all of the cold bank, all but 1 %."""
    binding: Binding
    """What it waits for longest."""

    @property
    def tokens_per_s_low(self) -> float:
        """Computed tokens per second at the upper bound of seconds."""
        return self.step.num_tokens / self.seconds_high if self.seconds_high else math.inf

    @property
    def tokens_per_s_high(self) -> float:
        """Computed tokens per second at the lower bound of seconds."""
        return self.step.num_tokens / self.seconds_low if self.seconds_low else math.inf


def forecast_step(
    model: Model,
    *,
    machine: Machine,
    step: Step,
    extra: Extra | None = None,
    correction: TouchCorrection = INDEPENDENT,
) -> StepForecast:
    """Forecast one step.

    Args:
        model: Plan and traffic.
        machine: Rates of every rank.
        step: Requests and tokens.
        extra: What else a step costs; None for nothing, and then the seconds are those of the experts alone.
        correction: How tokens in a row of one request count.

    Returns:
        The bounds and what binds.

    Raises:
        PlanError: The machine has another number of ranks than the plan.
    """
    extra = extra or Extra()
    high_LE = touch_chances(model.shares, top_k=model.top_k, tokens=step.num_tokens)
    effective = step.requests * correction.effective_tokens(step.tokens)
    low_LE = touch_chances(model.shares, top_k=model.top_k, tokens=effective)
    hot_L, cold_L = bytes_of(high_LE, model=model)
    low_hot_L, low_cold_L = bytes_of(low_LE, model=model)
    upper = read_seconds(hot_L, cold_L, model=model, machine=machine)
    lower = read_seconds(low_hot_L, low_cold_L, model=model, machine=machine)
    other_s = extra.other_s + len(model.stages) * extra.dense_bytes / min(machine.hbm_bytes_per_s)
    waits_high_L = extra.cold_layer_s * any_cold(high_LE, hot=model.hot)
    waits_low_L = extra.cold_layer_s * any_cold(low_LE, hot=model.hot)
    seconds_low = other_s + float(np.maximum(lower.hot_s, lower.cold_s + waits_low_L).sum())
    seconds_high = other_s + float((upper.hot_s + upper.cold_s + waits_high_L).sum())
    touched_bytes, bank = float(hot_L.sum() + cold_L.sum()), model.cold_bank_bytes
    return StepForecast(
        step=step,
        seconds_low=min(seconds_low, seconds_high),  # equal sums of floats may differ in their last bit
        seconds_high=seconds_high,
        token_hit=min(float(np.where(model.hot, model.shares, 0.0).sum()) / len(model.shares), 1.0),
        byte_hit=float(hot_L.sum()) / touched_bytes if touched_bytes else 0.0,
        distinct=float(high_LE.sum()) / len(high_LE),
        hot_bytes=float(hot_L.sum()),
        cold_bytes=float(cold_L.sum()),
        cold_bytes_corrected=float(low_cold_L.sum()),
        is_sweep=bank > 0 and float(cold_L.sum()) >= SATURATED * bank,
        binding=_binding(upper, model=model, other_s=other_s + float(waits_high_L.sum())),
    )


def forecast_steps(
    model: Model,
    *,
    machine: Machine,
    steps: Sequence[Step],
    extra: Extra | None = None,
    correction: TouchCorrection = INDEPENDENT,
) -> tuple[StepForecast, ...]:
    """Forecast several kinds of step; see `forecast_step`."""
    return tuple(forecast_step(model, machine=machine, step=step, extra=extra, correction=correction) for step in steps)


def bytes_of(
    chances: npt.NDArray[np.float64], *, model: Model
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Distinct bytes that a step reads on one rank of every layer's stage.

    Args:
        chances: Of every expert to be touched, [L, E], float64.
        model: Plan and traffic.

    Returns:
        Hot and cold bytes, [L] each, float64.
    """
    hot_L = np.where(model.hot, chances, 0.0).sum(axis=1) * model.row_bytes
    cold_L = np.where(model.hot, 0.0, chances).sum(axis=1) * model.row_bytes
    return hot_L, cold_L


def any_cold(chances: npt.NDArray[np.float64], *, hot: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """The chance that a step has any cold work in a layer.

    Args:
        chances: Of every expert to be touched, [L, E], float64.
        hot: Which experts are hot, [L, E], bool.

    Returns:
        Chances, [L], float64; experts are taken as chosen independently of each other.
    """
    missed_L: npt.NDArray[np.float64] = np.where(hot, 1.0, 1.0 - chances).prod(axis=1)
    return 1.0 - missed_L


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSeconds:
    """Seconds of reading, per layer, on the slowest rank of its stage."""

    hot_s: npt.NDArray[np.float64]
    """Fast memory, [L]."""
    link_s: npt.NDArray[np.float64]
    """In-place reads over the link alone, [L]."""
    host_s: npt.NDArray[np.float64]
    """All ranks' reads of the host memory that they share, [L]."""
    hot_rank: npt.NDArray[np.int64]
    """The rank that is slowest at it, per layer, [L], int64."""
    link_rank: npt.NDArray[np.int64]
    """The same of the links."""

    @property
    def cold_s(self) -> npt.NDArray[np.float64]:
        """Cold reads: the link, or the host where ranks together ask more than it gives, [L]."""
        return np.maximum(self.link_s, self.host_s)


def read_seconds(
    hot_bytes: npt.NDArray[np.float64], cold_bytes: npt.NDArray[np.float64], *, model: Model, machine: Machine
) -> ReadSeconds:
    """Turn bytes per layer into seconds. Ranks of a stage go layer by layer together, so that the slowest one counts.

    Args:
        hot_bytes: Distinct hot bytes of one rank, [L], float64: forecast, or replayed from a trace.
        cold_bytes: Unique cold bytes of one rank, [L], float64.
        model: For its stages and ranks.
        machine: Rates.

    Raises:
        PlanError: The machine has another number of ranks than the plan.
    """
    ranks = len(model.stages) * model.tp
    if len(machine.hbm_bytes_per_s) != ranks:
        raise PlanError("the machine", got=f"{len(machine.hbm_bytes_per_s)} ranks", wanted=f"{ranks}, as the plan has")
    stage_L = np.repeat(np.arange(len(model.stages)), [len(stage) for stage in model.stages])
    hbm = np.reshape(machine.hbm_bytes_per_s, (-1, model.tp))
    link = np.reshape(machine.link_bytes_per_s, (-1, model.tp))
    return ReadSeconds(
        hot_s=hot_bytes / hbm.min(axis=1)[stage_L],
        link_s=cold_bytes / link.min(axis=1)[stage_L],
        host_s=cold_bytes * model.tp / machine.host_bytes_per_s,
        hot_rank=stage_L * model.tp + hbm.argmin(axis=1)[stage_L],
        link_rank=stage_L * model.tp + link.argmin(axis=1)[stage_L],
    )


def _binding(seconds: ReadSeconds, *, model: Model, other_s: float) -> Binding:
    """The resource with most seconds, and its rank."""
    totals = {
        "hbm": float(seconds.hot_s.sum()),
        "link": float(seconds.link_s.sum()),
        "host": float(seconds.host_s.sum()),
        "other": other_s,
    }
    # The host binds only where it is slower than the link: a tie is the link's.
    order = sorted(totals, key=lambda name: -totals[name])
    resource = order[0]
    ranks_L = seconds.link_rank if resource in ("link", "host") else seconds.hot_rank
    longest_L = seconds.link_s if resource == "link" else seconds.cold_s if resource == "host" else seconds.hot_s
    per_rank = np.bincount(ranks_L, weights=longest_L, minlength=len(model.stages) * model.tp)
    return Binding(resource=resource, rank=int(per_rank.argmax()), seconds=totals)


def breakeven(window: StepForecast, *, single: StepForecast) -> tuple[float, float]:
    """How many tokens a speculative step must yield to be as fast as steps of one token.

    Args:
        window: A step that checks several tokens.
        single: A step of one token with as many requests.

    Returns:
        Tokens that must be accepted per request and step, one of them the step's own: at the lower bounds of seconds and
        at the upper ones, the smaller first.
    """
    pairs = ((window.seconds_low, single.seconds_low), (window.seconds_high, single.seconds_high))
    low, high = sorted(longer / shorter if shorter else math.inf for longer, shorter in pairs)
    return low, high
