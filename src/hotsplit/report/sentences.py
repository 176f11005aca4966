"""What the numbers mean, in sentences: what a plan does, whether it is better than chance, what to do next.

Stands between report and page. Written for somebody who decides and does not plan: no word of the planner's own, every
number with what it is of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotsplit.plan.verdict import judge
from hotsplit.report.content import PlanPart
from hotsplit.units import gib

_MORE = 0.1
"""The next step of the budget that is spoken of: a tenth of all experts' bytes."""


UNTESTED = "not-tested"
"""Verdict on a plan that was scored on nothing but its own traffic, and is better than chance there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """One thing that the summary says."""

    topic: str
    """What it is about, two or three words."""
    text: str
    """Plain text."""


def percent(rate: float | None) -> str:
    """A ratio in [0, 1] with one place: "68.3 %".

    Args:
        rate: None is a dash.

    >>> percent(0.6832), percent(None)
    ('68.3 %', '-')
    """
    return "-" if rate is None else f"{100 * rate:.1f} %"


def points(difference: float) -> str:
    """A difference of two rates: "2.1 points".

    Args:
        difference: Of ratios.
    """
    return f"{100 * difference:.1f} points"


def headline(part: PlanPart) -> str:
    """The one sentence: which part of the bytes serves which part of the traffic.

    Args:
        part: The plan.
    """
    traffic = "traffic that the plan has not seen" if part.has_test else "the traffic"
    return (
        f"{percent(part.evaluation.null)} of the experts\u2019 bytes serve {percent(part.score.hit_rate)} of {traffic}"
    )


def verdict(part: PlanPart) -> tuple[str, str]:
    """Judge a plan on what it was scored on.

    Args:
        part: The plan.

    Returns:
        A stable name, one of plan/verdict.py or UNTESTED, and the same in words.
    """
    judged = judge(part.score, null=part.evaluation.null)
    if not part.has_test and judged.name in ("holds", "holds-in-part", "other-traffic"):
        return UNTESTED, "not tested on unseen traffic"
    return judged.name, judged.words


def advice(part: PlanPart, *, name: str) -> str:
    """What to do next.

    Args:
        part: The plan.
        name: Of its verdict.
    """
    score = part.score
    follow = f"let swaps follow the traffic (HOTSPLIT_DYNAMIC=1): up to {percent(score.oracle_reachable)} are in reach"
    return {
        "holds": f"Use it. {_more_budget(part)}".rstrip(),
        "holds-in-part": f"Use it, and {follow}. Counts of traffic like the unseen one, merged in, would help from the start.",
        "other-traffic": f"Plan from traffic like the unseen one, or {follow}.",
        "chance": "Record traffic like what will be served (hotsplit profile) and plan again; until then this budget buys no "
        "more than any experts of the same size would.",
        "uniform": "No choice of experts helps this traffic much: only a larger budget does.",
        "no-choice": "Nothing was chosen: everything is in fast memory, or nothing is.",
        UNTESTED: "Score the plan on traffic that it was not made from (--test FILE) before relying on this rate.",
    }[name]


def summary(part: PlanPart) -> list[Sentence]:
    """What a plan does, and how good that is.

    Args:
        part: The plan.
    """
    return [
        Sentence(topic="In fast memory", text=_placed(part)),
        Sentence(topic="On unseen traffic", text=_unseen(part)),
        Sentence(topic="Better than chance?", text=_chance(part)),
        Sentence(topic="What is possible", text=_possible(part)),
        Sentence(topic="Weakest layer", text=_weakest(part)),
        Sentence(topic="What to do", text=advice(part, name=verdict(part)[0])),
    ]


def _placed(part: PlanPart) -> str:
    hot, everything = int(part.plan.hot_rows().sum()), part.plan.hot_mask().size
    per = "per rank" if len(part.plan.stages) == 1 else "on one rank of every stage together"
    sizes = f" ({gib(part.hot_bytes)} of {gib(part.all_bytes)} {per})" if part.has_bytes else ""
    named = "that the plan was made from" if part.has_own_counts else "given, which the plan was not made from"
    return (
        f"{hot:,} of {everything:,} experts{sizes}. They serve {percent(part.evaluation.in_sample)} of the traffic {named}; "
        "the rest is read from slow memory."
    )


def _unseen(part: PlanPart) -> str:
    if not part.has_test:
        return (
            "Not known: no other traffic was given. A plan always flatters itself on the traffic that it was made from."
        )
    apart = (
        "" if part.evaluation.drift is None else f" The two differ by {percent(part.evaluation.drift)} of the routing."
    )
    return f"The same experts serve {percent(part.evaluation.held_out)} of it.{apart}"


def _chance(part: PlanPart) -> str:
    scored, null = part.score, part.evaluation.null
    gain = scored.hit_rate - null
    answer = {"chance": "No", "uniform": "Hardly", "no-choice": "Nothing was chosen"}.get(verdict(part)[0], "Yes")
    return (
        f"{answer}. Experts drawn blindly for the same bytes would serve {percent(null)}, whole layers in order "
        f"{percent(scored.layer_order)}; the plan serves {percent(scored.hit_rate)}, {points(abs(gain))} "
        f"{'more' if gain >= 0 else 'less'} than a blind draw."
    )


def _possible(part: PlanPart) -> str:
    scored = part.score
    return (
        f"Chosen in hindsight, the same bytes could serve {percent(scored.oracle_free)}, and with as many experts per layer "
        f"as here {percent(scored.oracle_reachable)}: {points(scored.oracle_free - scored.hit_rate)} are left."
    )


def _weakest(part: PlanPart) -> str:
    scored = part.score
    hot = len(part.plan.hot[part.plan.layers.index(scored.worst_layer)])
    experts = part.plan.identity.model.num_experts
    return (
        f"Layer {scored.worst_layer} is served {percent(min(scored.per_layer))} from {hot} of {experts} hot experts; "
        f"the middle layer {percent(float(np.median(scored.per_layer)))}."
    )


def _more_budget(part: PlanPart) -> str:
    """What the next tenth of the bytes would bring, where there is one and the curve knows."""
    null = part.evaluation.null
    gain = part.curves.at(min(null + _MORE, 1.0)) - part.score.hit_rate
    if null + _MORE > 1.0 or gain <= 0:
        return ""
    return f"A tenth more of the experts\u2019 bytes in fast memory would serve about {points(gain)} more."
