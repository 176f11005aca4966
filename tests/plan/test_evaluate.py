"""How good a choice is: hit rates, null, oracles, drift (CASES T10)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import PlanMismatchError
from hotsplit.plan.evaluate import (
    drift,
    evaluate,
    hit_rate,
    layer_hit_rates,
    layer_order,
    null_rate,
    oracle_free,
    oracle_reachable,
)
from hotsplit.plan.histogram import PHASES, Histogram, PhaseCounts
from hotsplit.plan.planner import PlanOptions, plan_fraction
from plan_builders import histogram_of, published

HOT = np.array([[True, False, False], [True, True, False]])
COUNTS = np.array([[6.0, 2.0, 2.0], [1.0, 3.0, 6.0]])
ONES = np.ones((2, 3), dtype=np.int64)


def test_the_hit_rate_is_hot_pairs_over_all_pairs():
    assert 0.5 == hit_rate(HOT, counts=COUNTS)


def test_no_traffic_is_a_hit_rate_of_zero():
    assert 0.0 == hit_rate(HOT, counts=np.zeros((2, 3)))


def test_every_layer_has_its_own_hit_rate_and_an_empty_one_that_of_uniform_traffic():
    rates = layer_hit_rates(HOT, counts=np.array([[6.0, 2.0, 2.0], [0.0, 0.0, 0.0]]))
    assert [0.6, 2 / 3] == pytest.approx(rates.tolist())


def test_null_is_the_part_of_the_bytes_that_is_hot():
    assert 0.5 == null_rate(HOT, sizes=ONES)
    assert 5 / 12 == null_rate(HOT, sizes=np.array([[1, 1, 1], [2, 2, 5]]))


def test_the_reachable_oracle_keeps_the_rows_of_every_layer_and_the_free_one_does_not():
    assert 15 / 20 == oracle_reachable(HOT.sum(axis=1), counts=COUNTS)
    counts = np.array([[5.0, 4.0, 1.0], [10.0, 0.0, 0.0]])
    assert 15 / 20 == oracle_reachable(HOT.sum(axis=1), counts=counts)
    assert 19 / 20 == oracle_free(HOT, sizes=ONES, counts=counts)


@given(st.lists(st.integers(0, 20), min_size=6, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_oracles_are_what_trying_every_choice_finds(cells, bits):
    counts = 1.0 + np.array(cells).reshape(2, 3)
    counts *= 60 / counts.sum(axis=1, keepdims=True)
    hot = np.array(bits).reshape(2, 3)
    choices = [np.array(choice).reshape(2, 3) for choice in itertools.product([False, True], repeat=6)]
    free = max(hit_rate(c, counts=counts) for c in choices if c.sum() == hot.sum())
    reachable = max(hit_rate(c, counts=counts) for c in choices if (c.sum(axis=1) == hot.sum(axis=1)).all())
    assert free == pytest.approx(oracle_free(hot, sizes=ONES, counts=counts))
    assert reachable == pytest.approx(oracle_reachable(hot.sum(axis=1), counts=counts))


def test_with_mixed_sizes_the_free_oracle_is_never_below_the_reachable_one():
    counts, sizes = np.array([[60.0, 45.0, 45.0]]), np.array([[6, 5, 5]])
    hot = np.array([[False, True, True]])
    assert 105 / 150 == pytest.approx(oracle_free(hot, sizes=sizes, counts=counts))


@pytest.mark.parametrize(("budget", "expected"), [(2, 0.0), (3, 0.5), (5, 0.5), (6, 1.0)])
def test_layer_order_takes_whole_layers_only(budget, expected):
    assert expected == layer_order(ONES, budget=budget, counts=COUNTS)


def test_drift_is_half_the_distance_of_shares_and_the_mean_over_layers():
    ours = np.array([[1.0, 0.0], [1.0, 1.0]])
    theirs = np.array([[0.0, 5.0], [2.0, 2.0]])
    assert 0.5 == drift(ours, theirs)
    assert 0.0 == drift(ours, 3 * ours)


def test_phases_are_scored_apart_and_the_headline_is_decode():
    both = Histogram(
        identity=histogram_of(COUNTS).identity,
        phases={"prefill": PhaseCounts(counts=COUNTS[:, ::-1]), "decode": PhaseCounts(counts=COUNTS)},
    )
    plan, _ = plan_fraction(both, fraction=0.5, options=PlanOptions())
    result = evaluate(plan, histogram=both, test=both)
    expected = [(traffic, phase) for traffic in ("in-sample", "held-out") for phase in PHASES]
    assert expected == [(score.traffic, score.phase) for score in result.scores]
    assert ("decode", plan.proof.hit_rate) == (result.own.phase, result.in_sample)
    assert result.scores[0].hit_rate > result.scores[1].hit_rate


def test_the_worst_layer_is_named_by_its_decoder_index():
    counts = histogram_of(COUNTS, first_layer=3)
    plan, _ = plan_fraction(counts, fraction=0.5, options=PlanOptions())
    score = evaluate(plan, histogram=counts).scored
    assert (0.6, 0.9) == score.per_layer
    assert 3 == score.worst_layer


def test_counts_of_another_model_are_not_scored():
    plan, _ = plan_fraction(histogram_of(COUNTS), fraction=0.5, options=PlanOptions())
    with pytest.raises(PlanMismatchError, match="held-out histogram"):
        evaluate(plan, histogram=None, test=histogram_of(COUNTS, top_k=2))


def test_published_domains_drift_apart_and_halves_of_one_do_not():
    book, github = (published(f"olmoe-1b-7b.domains.json#{name}") for name in ("book", "github"))
    sample = np.random.default_rng(0).poisson(github.phases["prefill"].counts / 50).astype(float)
    assert 0.5 < drift(book.phases["prefill"].counts, github.phases["prefill"].counts)
    assert 0.02 > drift(sample, github.phases["prefill"].counts)
