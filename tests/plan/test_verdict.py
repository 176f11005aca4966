"""What scores mean in words, on made-up and on real routing (CASES T10)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.plan.evaluate import Score, evaluate, score
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.planner import PlanOptions, plan_fraction
from hotsplit.plan.trace import DECODE, count_ids, load_trace
from hotsplit.plan.verdict import (
    WORDS,
    few_pairs,
    has_seen,
    judge,
    not_unseen,
    other_counts,
    useful_margin,
    warnings_of,
)
from plan_builders import histogram_of


def scored(hit_rate, *, reachable):
    return Score(
        traffic="held-out",
        phase="decode",
        hit_rate=hit_rate,
        oracle_free=reachable,
        oracle_reachable=reachable,
        layer_order=0.0,
        per_layer=(hit_rate,),
        worst_layer=0,
    )


@pytest.mark.parametrize(
    ("hit_rate", "null", "reachable", "name", "captured"),
    [
        (0.66, 0.25, 0.68, "holds", 0.41 / 0.43),
        (0.50, 0.25, 0.68, "holds-in-part", 0.25 / 0.43),
        (0.34, 0.25, 0.68, "other-traffic", 0.09 / 0.43),
        (0.26, 0.25, 0.68, "chance", 0.01 / 0.43),
        (0.14, 0.25, 0.72, "chance", -0.11 / 0.47),
        (0.26, 0.25, 0.26, "uniform", None),
        (1.0, 1.0, 1.0, "no-choice", None),
        (0.0, 0.0, 0.0, "no-choice", None),
        # one percent hot: half a point above chance is of use there
        (0.016, 0.01, 0.02, "holds-in-part", 0.6),
    ],
)
def test_a_plan_is_judged_by_what_it_captures_of_what_could_be_had(hit_rate, null, reachable, name, captured):
    verdict = judge(scored(hit_rate, reachable=reachable), null=null)
    assert (name, pytest.approx(captured) if captured is not None else None) == (verdict.name, verdict.captured)
    assert WORDS[name] == verdict.words


@given(st.floats(0.01, 0.99), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_better_hit_rate_is_never_judged_worse(null, one, other, reachable):
    order = ["chance", "other-traffic", "holds-in-part", "holds"]
    reachable = max(null + useful_margin(null) * 1.01, reachable)
    low, high = sorted(min(rate, reachable) for rate in (one, other))
    ranks = [order.index(judge(scored(rate, reachable=reachable), null=null).name) for rate in (low, high)]
    assert ranks[0] <= ranks[1]


@pytest.mark.parametrize(
    ("hit_rate", "names"), [(0.66, []), (0.5, []), (0.34, ["other-traffic"]), (0.2, ["plan-is-chance"])]
)
def test_only_a_plan_for_other_traffic_and_one_of_chance_are_warned_of(hit_rate, names):
    verdict = judge(scored(hit_rate, reachable=0.68), null=0.25)
    assert names == [notice.name for notice in warnings_of(verdict, what="test")]


def test_a_small_test_is_said_to_be_noise():
    assert ["small-test"] == [n.name for n in few_pairs(histogram_of([[30.0, 9.0]]), phase="decode", what="test")]
    assert [] == few_pairs(histogram_of([[30.0, 10.0]]), phase="decode", what="test")


@pytest.fixture(scope="module", params=["small-moe", "tiny-moe"])
def halves(request, shared_data):
    """Decode counts of two halves of every domain's requests."""
    trace, _ = load_trace(shared_data / "traces" / f"{request.param}.npz")
    num_experts, found = trace.identity.num_experts, {}
    for number, domain in enumerate(trace.domains):
        mine_T = (trace.domain == number) & (trace.phase == DECODE)
        first = np.unique(trace.request[mine_T])[::2]
        found[domain] = []
        for chosen_T in (np.isin(trace.request, first), ~np.isin(trace.request, first)):
            counts = count_ids(trace.experts[mine_T & chosen_T], num_experts=num_experts).astype(float)
            phases = {"decode": PhaseCounts(counts=counts)}
            found[domain].append(Histogram(identity=trace.identity, phases=phases))
    return found


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_on_other_requests_of_its_own_domain_every_plan_holds_and_nothing_is_warned_of(halves, fraction):
    for first, second in halves.values():
        plan, notices = plan_fraction(first, fraction=fraction, options=PlanOptions(test=second))
        found = evaluate(plan, histogram=first, test=second)
        assert [] == notices
        assert "holds" == judge(found.test, null=found.null).name
        assert found.null < found.held_out <= found.test.oracle_reachable <= found.test.oracle_free


def test_on_other_domains_most_plans_are_told_to_be_made_for_other_traffic_or_chance(halves):
    verdicts = []
    for domain, (first, _) in halves.items():
        plan, _ = plan_fraction(first, fraction=0.25, options=PlanOptions())
        others = [halves[other][1].phases["decode"].counts for other in halves if other != domain]
        scores = [score(plan, counts=counts, traffic="held-out", phase="decode") for counts in others]
        verdicts += [judge(one, null=0.25).name for one in scores]
    assert verdicts.count("holds") == 0
    assert (verdicts.count("other-traffic") + verdicts.count("chance")) / len(verdicts) > 0.85


OWN, OTHER = histogram_of([[40.0, 30.0, 20.0, 10.0]]), histogram_of([[40.0, 10.0, 20.0, 30.0]])


@pytest.fixture
def half():
    """Half of the experts, chosen from OWN."""
    return plan_fraction(OWN, fraction=0.5, options=PlanOptions())[0]


@pytest.mark.parametrize(
    ("counts", "test", "seen"),
    [
        (OWN, OWN, True),
        (None, OWN, True),
        (OWN, OTHER, False),
        (None, OTHER, False),
        (OTHER, OTHER, False),
        (OTHER, OWN, True),
    ],
)
def test_a_test_is_seen_only_where_the_plan_was_made_from_it(half, counts, test, seen):
    found = evaluate(half, histogram=counts, test=test)
    assert seen == has_seen(half, evaluation=found)
    assert (["test-is-train"] if seen else []) == [n.name for n in not_unseen(half, evaluation=found, what="test")]


def test_another_traffic_of_the_same_hit_rate_is_unseen(half):
    alike = histogram_of([[20.0, 50.0, 30.0, 0.0]])
    assert 0.7 == evaluate(half, histogram=None, test=alike).held_out == half.proof.hit_rate
    assert not has_seen(half, evaluation=evaluate(half, histogram=None, test=alike))


def test_a_plan_that_has_everything_hot_has_seen_nothing():
    everything = plan_fraction(OWN, fraction=1.0, options=PlanOptions())[0]
    assert not has_seen(everything, evaluation=evaluate(everything, histogram=None, test=OTHER))


def test_counts_of_another_hit_rate_are_not_the_plans_own(half):
    found = evaluate(half, histogram=OTHER)
    assert ["not-the-plans-counts"] == [n.name for n in other_counts(half, evaluation=found, what="histogram")]
    assert [] == other_counts(half, evaluation=evaluate(half, histogram=OWN), what="histogram")
    unknown = replace(half, proof=replace(half.proof, hit_rate=None))
    assert [] == other_counts(unknown, evaluation=found, what="histogram")
