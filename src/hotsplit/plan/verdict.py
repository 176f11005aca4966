"""What the scores of a plan mean, in words: it holds, it holds in part, it was made for other traffic, or it is chance.

The end of `plan + test histogram -> evaluation -> verdict`. What is judged is how much of what these hot rows could
serve beyond a blind choice the plan does serve, on traffic that it was not made from:

    captured = (held-out - null) / (reachable oracle - null)

    blind choice 0.25, plan 0.34, best choice in hindsight 0.68: captured 0.09 / 0.43 = 0.21, made for other traffic

A hit rate alone says little: 34 % is poor where 68 % can be had, and all there is where traffic is nearly uniform.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotsplit.notices import Notice
from hotsplit.plan.evaluate import Evaluation, Score
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.planfile import Plan
from hotsplit.plan.planner import USEFUL

HOLDS = 0.85
"""Captured, from which on a plan holds. Measured on the routing of two small trained models, 10, 25 and 50 % hot: on
other requests of its own domain a plan captures 0.93 to 1.00."""
OTHER_TRAFFIC = 0.5
"""Captured, below which it was made for other traffic. On other domains the same plans capture 0.2 in the median, and
up to 0.9 on near relatives; a plan of all domains' mix, 0.3 to 0.8 on each."""
FEW_PAIRS = 20
"""Routed pairs per expert in a layer, below which the oracle in hindsight fits noise."""
SAME_RATE = 1e-6
"""Hit rates of the same counts differ by less, whatever machine or form of file they come from."""
SAME_TRAFFIC = 1e-9
"""Drift, and difference of rates, below which a test is the plan's own counts: rates are rounded to it."""

WORDS = {
    "holds": "the plan holds",
    "holds-in-part": "the plan holds in part",
    "other-traffic": "made for other traffic",
    "chance": "no better than chance",
    "no-choice": "no choice was made: everything is hot, or nothing",
    "uniform": "nothing to choose: no hot set of this size serves this traffic much better than a blind one",
}
"""By verdict name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one score means."""

    name: str
    """A key of WORDS."""
    captured: float | None
    """Of what the hot rows could serve beyond a blind choice, the part that the plan serves; None where that is
    nothing. Below 0 where it does worse than a blind choice."""

    @property
    def words(self) -> str:
        """For people."""
        return WORDS[self.name]


def useful_margin(null: float) -> float:
    """How far a hit rate must be above a blind choice's to be of use: two points, less near none and all hot.

    Args:
        null: Hit rate of a blind choice of the same bytes.

    >>> useful_margin(0.25), useful_margin(0.01)
    (0.02, 0.005)
    """
    return min(USEFUL, null / 2, (1 - null) / 2)


def judge(score: Score, *, null: float) -> Verdict:
    """Say what a score means.

    Args:
        score: Of a plan on traffic that it was not made from.
        null: Hit rate of a blind choice of the same bytes.
    """
    if not 0 < null < 1:
        return Verdict(name="no-choice", captured=None)
    margin, possible = useful_margin(null), score.oracle_reachable - null
    if possible < margin:
        return Verdict(name="uniform", captured=None)
    captured = round((score.hit_rate - null) / possible, 9)
    if score.hit_rate - null < margin:
        return Verdict(name="chance", captured=captured)
    if captured >= HOLDS:
        return Verdict(name="holds", captured=captured)
    return Verdict(name="holds-in-part" if captured >= OTHER_TRAFFIC else "other-traffic", captured=captured)


def warnings_of(verdict: Verdict, *, what: str) -> list[Notice]:
    """A verdict that asks for something to be done, as a notice; the first two are refused in strict mode.

    Args:
        verdict: On one test.
        what: The test, for the message: "test hist.json, decode".
    """
    if verdict.name == "chance":
        text = f"{what}: the plan is no better than a blind choice of the same bytes; plan from this traffic, or evenly"
        return [Notice(name="plan-is-chance", text=text)]
    if verdict.name == "other-traffic":
        text = f"{what}: the plan was made for other traffic; merge counts of this one in, or let swaps follow it"
        return [Notice(name="other-traffic", text=text)]
    return []


def few_pairs(histogram: Histogram, *, phase: str, what: str) -> list[Notice]:
    """Say that a test is too small for its oracle and drift to be believed.

    Args:
        histogram: The test.
        phase: "decode" or "prefill".
        what: The test, for the message.
    """
    if histogram.normalised:
        return []
    counts_LE = histogram.phases[phase].counts
    fewest = float(np.min(counts_LE.sum(axis=1))) / counts_LE.shape[1]
    if fewest >= FEW_PAIRS:
        return []
    text = f"{what}: {fewest:.1f} routed pairs per expert; under {FEW_PAIRS} oracle and drift are partly noise"
    return [Notice(name="small-test", text=text, strict=False)]


def made_from(plan: Plan, *, evaluation: Evaluation) -> bool:
    """Whether the counts called the plan's own can be: a plan's proof has their hit rate, in the phase it ranks on.

    Args:
        plan: The plan.
        evaluation: Of it, on counts that it is said to be made from.

    Returns:
        True too where the plan does not know its rate, or no counts are given.
    """
    own, proven = evaluation.own, plan.proof.hit_rate
    return own is None or proven is None or abs(own.hit_rate - proven) <= SAME_RATE


def other_counts(plan: Plan, *, evaluation: Evaluation, what: str) -> list[Notice]:
    """Say that counts are not those that the plan was made from.

    Args:
        plan: The plan.
        evaluation: Of it, on counts that it is said to be made from.
        what: The counts, for the message: "histogram hist.json".
    """
    if evaluation.own is None or made_from(plan, evaluation=evaluation):
        return []
    text = (
        f"{what}: the plan serves {100 * evaluation.own.hit_rate:.2f} % of it, and {100 * (plan.proof.hit_rate or 0):.2f} % "
        "of the counts that it was made from (merged and learned ones included): these are others"
    )
    return [Notice(name="not-the-plans-counts", text=text)]


def has_seen(plan: Plan, *, evaluation: Evaluation) -> bool:
    """Whether the test is what the plan was made from: by drift where its counts are known, else by its proof.

    Args:
        plan: The plan.
        evaluation: Of it, on a test.
    """
    test, proof = evaluation.test, plan.proof
    if test is None:
        return False
    if evaluation.drift is not None and made_from(plan, evaluation=evaluation):
        return evaluation.drift <= SAME_TRAFFIC
    if proof.hit_rate is None or not 0 < evaluation.null < 1 or abs(proof.hit_rate - evaluation.null) <= SAME_TRAFFIC:
        return False  # everything, nothing or anything hot serves every traffic alike
    pairs = [(test.hit_rate, proof.hit_rate)]
    if proof.held_out is None and proof.oracle_reachable is not None:  # then the oracle is of the same counts
        pairs.append((test.oracle_reachable, proof.oracle_reachable))
    return all(abs(mine - proven) <= SAME_TRAFFIC for mine, proven in pairs)


def not_unseen(plan: Plan, *, evaluation: Evaluation, what: str) -> list[Notice]:
    """Say that a test proves nothing.

    Args:
        plan: The plan.
        evaluation: Of it, on a test.
        what: The test, for the message: "test hist.json".
    """
    if not has_seen(plan, evaluation=evaluation):
        return []
    text = f"{what}: the counts that the plan was made from; a plan must be tested on traffic that it has not seen"
    return [Notice(name="test-is-train", text=text)]
