"""Which experts should change places now: the live policy.

Stands at the end of the flow and closes the loop: `counters -> rebalance -> swaps -> publish -> hot mask`. Live counts
fade with a half-life, the histogram that the plan came from is a prior that fades alike, and the strongest cold expert
of a layer asks for the place of the weakest hot one if it is wanted clearly more. Pure numpy: no clock, no randomness.

Shapes: L MoE layers, E routed experts per layer.

    >>> options = RebalanceOptions(max_swaps=1)
    >>> rebalancer = Rebalancer(hot=np.array([[True, False, False]]), prior=None, top_k=1, options=options)
    >>> (swap,) = rebalancer.update(np.array([[10.0, 12.0, 30.0]]), tokens=52)
    >>> swap
    Swap(layer_id=0, expert_in=2, expert_out=0)
    >>> rebalancer.published(swap)
    >>> rebalancer.update(np.array([[10.0, 12.0, 30.0]]), tokens=52)
    ()
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, PlanError
from hotsplit.notices import Notice
from hotsplit.plan.counters import Window
from hotsplit.plan.objectives import shares_of

MAX_PRIOR_TOKENS = 50_000
"""What the starting histogram may weigh at most, in tokens per layer: beyond this a new traffic waits too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceOptions:
    """How quickly to learn and how readily to swap."""

    half_life: float = 10.0
    """Updates after which a count weighs half; finite, > 0."""
    margin: float = 1.25
    """Swap only if the cold expert's score is above margin x the hot one's; finite, >= 1."""
    max_swaps: int = 2
    """Swaps per layer and update at most; >= 1."""
    schedule: str = "fixed"
    """A name of `steering.POLICIES`: who chooses the swaps, and when."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.half_life) and self.half_life > 0):
            raise ConfigError("half_life", got=repr(self.half_life), wanted="a finite number of updates > 0")
        if not (math.isfinite(self.margin) and self.margin >= 1):
            raise ConfigError("margin", got=repr(self.margin), wanted="a finite number >= 1")
        if type(self.max_swaps) is not int or self.max_swaps < 1:
            raise ConfigError("max_swaps", got=repr(self.max_swaps), wanted="an integer >= 1")

    @property
    def decay(self) -> float:
        """What a count keeps of its weight from one update to the next."""
        return math.exp2(-1.0 / self.half_life)


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One cold expert comes in, one hot expert of the same layer goes out."""

    layer_id: int
    """Ordinal among the MoE layers, 0..L-1."""
    expert_in: int
    """Cold now, wanted hot."""
    expert_out: int
    """Hot now, gives its place."""


def thrash_notice(options: RebalanceOptions) -> Notice | None:
    """Say so when the settings let traffic that alternates between two workloads swap at every update.

    Two experts of equal use, one in the odd windows and one in the even ones: whichever was used last scores
    1 + d^2 + d^4 + ... and the other d times that, where d = 2^(-1/half_life) is the decay. The ratio never exceeds
    1/d, so nothing swaps while 1/d <= margin, that is while half_life >= 1 / log2(margin): 3.1 updates for 1.25.
    (Phases of n updates reach d^-n; with the defaults it takes four updates of the same traffic to earn a swap.)

    Args:
        options: As set.

    Returns:
        The notice, or None where such traffic comes to rest, or where another schedule chooses.
    """
    if options.schedule != "fixed" or 1.0 / options.decay <= options.margin:
        return None  # the adaptive schedule has a bound on bytes instead
    cure = f"margin >= {1.0 / options.decay:.3g}"
    if options.margin > 1:
        cure = f"half_life >= {1.0 / math.log2(options.margin):.3g} or {cure}"
    text = (
        f"half_life={options.half_life:g} with margin={options.margin:g} forgets so quickly that traffic which "
        f"alternates between two workloads swaps at every update; {cure} prevents it"
    )
    return Notice(name="may-thrash", text=text, strict=False)


class Rebalancer:
    """Live scores and the hot mask they are held against.

    Args:
        hot: Which experts are hot, [L, E], bool.
        prior: Counts or shares of the histogram that the plan came from, [L, E], float64; None for none.
        top_k: Experts chosen per token.
        options: How quickly to learn and how readily to swap.
    """

    def __init__(
        self,
        *,
        hot: npt.NDArray[np.bool_],
        prior: npt.NDArray[np.float64] | None,
        top_k: int,
        options: RebalanceOptions,
    ) -> None:
        self._hot_LE = np.array(hot, dtype=bool)
        self._live_LE = np.zeros(self._hot_LE.shape)
        self._prior_shares_LE = np.zeros(self._hot_LE.shape) if prior is None else shares_of(prior)
        self._prior_tokens: float | None = None
        self._top_k = top_k
        self._options = options

    look_steps: int | None = None
    """It looks at updates only."""
    num_shifts = 0
    """It detects none."""

    def observe(self, window: Window, *, busy: Collection[int] = ()) -> tuple[Swap, ...]:
        """What a live run and a replay ask at every look (a steering.Policy).

        Args:
            window: Since the last look.
            busy: Not looked at: a swap that finds its layer busy is proposed all the same, refused and counted.
        """
        return self.update(window.counts, tokens=window.tokens)

    def update(
        self, window_counts: npt.NDArray[np.float64] | npt.NDArray[np.int64], *, tokens: int, busy: Collection[int] = ()
    ) -> tuple[Swap, ...]:
        """Learn from one window of traffic and propose swaps.

        Args:
            window_counts: Routed pairs of the window, [L, E].
            tokens: Tokens of the window; a window without any teaches and forgets nothing.
            busy: layer_ids with a swap in flight: they get no proposal (the caller counts the refusals).

        Returns:
            Swaps, at most `max_swaps` per layer, those that gain most first, ties by (layer, expert).
        """
        if tokens > 0:
            self._learn(np.asarray(window_counts, dtype=np.float64), tokens=tokens)
        return propose(self.scores(), hot=self._hot_LE, options=self._options, busy=busy)

    def published(self, swap: Swap) -> None:
        """Follow what really became visible: the hot mask changes here and nowhere else.

        Raises:
            PlanError: The expert that comes in is hot already, or the one that goes out is not.
        """
        row_E = self._hot_LE[swap.layer_id]
        if row_E[swap.expert_in] or not row_E[swap.expert_out]:
            raise PlanError("published swap", got=str(swap), wanted="a cold expert in and a hot one out", swap=swap)
        row_E[swap.expert_in], row_E[swap.expert_out] = True, False

    @property
    def decay(self) -> float:
        """What a count keeps of its weight from one update to the next."""
        return self._options.decay

    def follow(self, hot: npt.NDArray[np.bool_]) -> None:
        """Take the hot mask from the row map itself.

        Args:
            hot: Which experts are hot now, [L, E], bool.
        """
        self._hot_LE = np.array(hot, dtype=bool)

    def hot(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot, a copy, [L, E], bool."""
        return self._hot_LE.copy()

    def scores(self) -> npt.NDArray[np.float64]:
        """Live counts and what is left of the prior, in routed pairs, [L, E], float64."""
        prior_pairs = (self._prior_tokens or 0.0) * self._top_k
        return self._live_LE + self._prior_shares_LE * prior_pairs

    def live_counts(self) -> npt.NDArray[np.float64]:
        """The decayed live counts without the prior, in routed pairs, a copy, [L, E], float64."""
        return self._live_LE.copy()

    def _learn(self, window_LE: npt.NDArray[np.float64], *, tokens: int) -> None:
        """Fade what is known and add the window; the first window also says what the prior is worth."""
        if self._prior_tokens is None:
            self._prior_tokens = min(float(MAX_PRIOR_TOKENS), self._options.half_life * tokens)
        else:
            self._prior_tokens *= self._options.decay
        self._live_LE *= self._options.decay
        self._live_LE += window_LE


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The strongest cold experts of every layer beside its weakest hot ones, M pairs per layer."""

    experts_in: npt.NDArray[np.int64]
    """Cold experts, strongest first, [L, M], int64."""
    experts_out: npt.NDArray[np.int64]
    """Hot experts, weakest first, [L, M], int64."""
    scores_in: npt.NDArray[np.float64]
    """Of the cold ones, [L, M], float64."""
    scores_out: npt.NDArray[np.float64]
    """Of the hot ones, [L, M], float64."""
    is_real: npt.NDArray[np.bool_]
    """Whether there are two such experts, and their layer is free, [L, M], bool."""

    def chosen(self, wanted: npt.NDArray[np.bool_]) -> tuple[Swap, ...]:
        """Swaps of the pairs that are wanted, those that gain most first, ties by (layer, pair).

        Args:
            wanted: Which pairs, [L, M], bool.
        """
        layers, pairs = np.nonzero(wanted & self.is_real)
        order = np.argsort(-(self.scores_in - self.scores_out)[layers, pairs], kind="stable")
        return tuple(
            Swap(layer_id=int(n), expert_in=int(self.experts_in[n, pair]), expert_out=int(self.experts_out[n, pair]))
            for n, pair in zip(layers[order], pairs[order], strict=True)
        )


def pair_up(
    scores: npt.NDArray[np.float64], *, hot: npt.NDArray[np.bool_], max_swaps: int, busy: Collection[int] = ()
) -> Pairs:
    """Put the strongest cold experts of every layer beside its weakest hot ones, ties by expert.

    Args:
        scores: What experts are wanted, [L, E], float64.
        hot: Which of them are hot, [L, E], bool.
        max_swaps: Pairs per layer.
        busy: layer_ids whose pairs are not real.
    """
    strongest = np.argsort(np.where(hot, np.inf, -scores), axis=1, kind="stable")[:, :max_swaps]
    weakest = np.argsort(np.where(hot, scores, np.inf), axis=1, kind="stable")[:, :max_swaps]
    in_LM, out_LM = (np.take_along_axis(scores, picked, axis=1) for picked in (strongest, weakest))
    real_LM = ~np.take_along_axis(hot, strongest, axis=1) & np.take_along_axis(hot, weakest, axis=1)
    real_LM[list(busy)] = False
    return Pairs(experts_in=strongest, experts_out=weakest, scores_in=in_LM, scores_out=out_LM, is_real=real_LM)


def propose(
    scores: npt.NDArray[np.float64],
    *,
    hot: npt.NDArray[np.bool_],
    options: RebalanceOptions,
    busy: Collection[int] = (),
) -> tuple[Swap, ...]:
    """Pair the strongest cold experts of every layer with its weakest hot ones, where in > margin x out.

    Args:
        scores: What experts are wanted, [L, E], float64.
        hot: Which of them are hot, [L, E], bool.
        options: Margin and swaps per layer.
        busy: layer_ids that get no proposal.

    Returns:
        Swaps, those that gain most first, ties by (layer, expert).
    """
    pairs = pair_up(scores, hot=hot, max_swaps=options.max_swaps, busy=busy)
    return pairs.chosen(pairs.scores_in > options.margin * pairs.scores_out)
