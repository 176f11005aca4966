"""The adaptive schedule: what it may move, when it settles, and what it must not do whatever the traffic is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import ConfigError, PlanError
from hotsplit.plan.adaptive import AdaptiveOptions, AdaptiveRebalancer, coverage_drop
from hotsplit.plan.counters import Window
from hotsplit.plan.evaluate import drift
from hotsplit.plan.rebalance import RebalanceOptions, Swap

E, H, LAYERS, TOP_K, LOOK = 16, 4, 2, 2, 10


def hot_of(*experts):
    return np.isin(np.arange(E), experts)[None].repeat(LAYERS, axis=0)


FIRST, LAST = hot_of(0, 1, 2, 3), hot_of(12, 13, 14, 15)


def shares(favourites, *, of=0.9):
    """Shares of one layer: the favourites take most."""
    part = np.full(E, (1 - of) / (E - len(favourites)))
    part[list(favourites)] = of / len(favourites)
    return part


ON_FIRST, ON_LAST = shares(range(4)), shares(range(12, 16))


def adaptive(*, hot=FIRST, prior=None, row_bytes=(1, 1), max_swaps=2, **numbers):
    return AdaptiveRebalancer(
        hot=hot,
        prior=prior,
        top_k=TOP_K,
        options=RebalanceOptions(max_swaps=max_swaps),
        row_bytes=row_bytes,
        adaptive=AdaptiveOptions(**numbers),
    )


def window_of(counts, *, hot, row_bytes=(1, 1), tokens=LOOK, steps=LOOK):
    counts = np.asarray(counts)
    cold = int((np.where(hot, 0, counts) * np.array(row_bytes)[:, None]).sum())
    return Window(
        phase="decode", counts=counts, tokens=tokens, steps=steps, cold_bytes=cold, hit_ratio=None, byte_hit_ratio=None
    )


def play(policy, part, *, looks, seed=0, row_bytes=(1, 1)):
    """Traffic drawn from shares; swaps are published at once. Returns swaps per look, hit pairs and cold bytes."""
    random = np.random.default_rng(seed)
    swaps, hits, cold = [], 0, 0
    for _ in range(looks):
        counts = random.multinomial(LOOK * TOP_K, part, size=LAYERS)
        window = window_of(counts, hot=policy.hot(), row_bytes=row_bytes)
        hits += int(counts[policy.hot()].sum())
        cold += window.cold_bytes
        found = policy.observe(window)
        for swap in found:
            policy.published(swap)
        swaps.append(found)
    return swaps, hits / (looks * LOOK * TOP_K * LAYERS), cold


def test_a_start_without_a_prior_settles_on_the_traffic_within_a_hundred_steps():
    policy = adaptive()
    swaps, _, _ = play(policy, ON_LAST, looks=10)
    assert LAST.tolist() == policy.hot().tolist()
    assert 8 == sum(map(len, swaps))
    assert (True, 0) == (policy.is_settling, policy.num_shifts)


def test_a_start_with_a_prior_that_fits_moves_nothing():
    policy = adaptive(prior=np.tile(ON_FIRST, (LAYERS, 1)))
    swaps, rate, _ = play(policy, ON_FIRST, looks=300)
    assert 0 == sum(map(len, swaps))
    assert rate > 0.88


def test_a_start_with_a_prior_of_other_traffic_is_a_shift_as_soon_as_the_recent_memory_says_something():
    policy = adaptive(prior=np.tile(ON_FIRST, (LAYERS, 1)))
    play(policy, ON_LAST, looks=3)
    assert (0, False) == (policy.num_shifts, policy.is_settling)
    play(policy, ON_LAST, looks=12, seed=1)
    assert (1, True) == (policy.num_shifts, policy.is_settling)
    assert LAST.tolist() == policy.hot().tolist()


def test_a_shift_in_mid_run_is_acted_upon_once_and_settled():
    policy = adaptive(prior=np.tile(ON_FIRST, (LAYERS, 1)))
    play(policy, ON_FIRST, looks=200)
    play(policy, ON_LAST, looks=30, seed=1)
    assert 1 == policy.num_shifts
    assert LAST.tolist() == policy.hot().tolist()


def test_a_shift_that_nothing_is_saved_for_is_not_acted_upon():
    policy = adaptive(settle_share=0.0)  # no prior: the start has spent what there was
    play(policy, ON_FIRST, looks=100)
    play(policy, ON_LAST, looks=15, seed=1)
    assert policy.drop() > AdaptiveOptions().shift_drop
    assert (0, 0) == (policy.num_shifts, policy.saved_bytes)


def test_shifts_are_a_rest_apart():
    policy = adaptive(prior=np.tile(ON_FIRST, (LAYERS, 1)), settle_share=1.0, ready=0.0, rest_steps=300)
    for i in range(6):
        play(policy, (ON_LAST, ON_FIRST)[i % 2], looks=15, seed=i)
    assert policy.num_shifts <= 900 // 300


def test_outside_a_settling_time_a_gain_within_chance_moves_nothing():
    # 9 pairs against 6 pays back twice, and differs by less than one standard error of 3.9.
    counts = np.zeros((LAYERS, E), np.int64)
    counts[:, 0:4], counts[:, 4] = 6, 9
    prior = np.tile(np.full(E, 1 / E), (LAYERS, 1))
    numbers = {"long_weight": 0.0, "drift_share": 1.0}
    drifting = adaptive(prior=prior, **numbers)
    assert () == drifting.observe(window_of(counts, hot=FIRST))
    settling = adaptive(**numbers)
    assert 2 == len(settling.observe(window_of(counts, hot=FIRST)))
    certain = adaptive(prior=prior, noise=0.5, **numbers)
    assert 2 == len(certain.observe(window_of(counts, hot=FIRST)))


def test_a_swap_must_pay_back():
    counts = np.zeros((LAYERS, E), np.int64)
    counts[:, 0:4], counts[:, 4] = 3, 4
    assert () == adaptive(payback=1.5, long_weight=0.0).observe(window_of(counts, hot=FIRST))
    assert 2 == len(adaptive(payback=0.5, long_weight=0.0).observe(window_of(counts, hot=FIRST)))


def test_the_best_swaps_are_paid_for_first_and_a_row_too_wide_does_not_hold_up_a_narrower_one():
    counts = np.zeros((LAYERS, E), np.int64)
    counts[0, [4, 5]], counts[1, [4, 5]] = (30, 20), (40, 10)
    policy = adaptive(row_bytes=(10, 100), burst=130 / 440)
    found = policy.observe(window_of(counts, hot=FIRST, row_bytes=(0, 0)))
    swaps = [(1, 4), (0, 4), (0, 5)]  # 100 + 10 + 10 of 130 bytes; the second of layer 1 would cost 100 more
    assert swaps == [(swap.layer_id, swap.expert_in) for swap in found]
    assert 10 == policy.credit_bytes


def test_a_busy_layer_gets_no_proposal_and_its_turn_later():
    counts = np.zeros((LAYERS, E), np.int64)
    counts[:, 4] = 30
    policy = adaptive()
    window = window_of(counts, hot=FIRST)
    assert [1] == [swap.layer_id for swap in policy.observe(window, busy={0})]
    policy.published(Swap(layer_id=1, expert_in=4, expert_out=0))
    assert [0] == [swap.layer_id for swap in policy.observe(window, busy=())]


def test_a_window_without_tokens_teaches_and_earns_nothing():
    policy = adaptive(prior=np.tile(ON_FIRST, (LAYERS, 1)))
    empty = window_of(np.zeros((LAYERS, E), np.int64), hot=FIRST, tokens=0, steps=0)
    assert ((), 0) == (policy.observe(empty), policy.credit_bytes)
    assert 0.0 == policy.scores().sum()


def test_traffic_that_alternates_cannot_move_more_than_is_earned_and_is_not_followed_to_and_fro():
    policy, swaps, cold = adaptive(), [], 0
    for i in range(40):
        found, _, missed = play(policy, (ON_FIRST, ON_LAST)[i % 2], looks=25, seed=i)
        swaps += found
        cold += missed
    numbers = AdaptiveOptions()
    bound = numbers.burst * FIRST.sum() + (numbers.drift_share + numbers.settle_share) * cold
    assert sum(map(len, swaps)) <= bound
    followed = 20 * len(ON_FIRST[:4]) * LAYERS  # swaps of the last twenty changes if every one were followed
    assert sum(map(len, swaps[500:])) < followed / 2


def test_stationary_traffic_comes_to_rest():
    random = np.random.default_rng(5)
    part = np.sort(random.dirichlet(np.full(E, 0.5)))[::-1]
    policy = adaptive(prior=np.tile(part, (LAYERS, 1)))
    swaps, rate, _ = play(policy, part, looks=600)
    assert rate >= part[:H].sum() - 0.01
    assert sum(map(len, swaps)) <= 12


@given(
    seed=st.integers(0, 2**16),
    has_prior=st.booleans(),
    max_swaps=st.integers(1, 4),
    row_bytes=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_whatever_the_traffic_swaps_are_legal_few_and_paid_for(seed, has_prior, max_swaps, row_bytes):
    random = np.random.default_rng(seed)
    prior = np.tile(random.dirichlet(np.full(E, 0.3)), (LAYERS, 1)) if has_prior else None
    policy = adaptive(prior=prior, max_swaps=max_swaps, row_bytes=row_bytes)
    moved, cold = 0, 0
    for _ in range(30):
        part = random.dirichlet(np.full(E, 0.2))
        counts = random.multinomial(int(random.integers(0, 200)), part, size=LAYERS)
        before = policy.hot()
        window = window_of(counts, hot=before, row_bytes=row_bytes, tokens=int(counts[0].sum()) // TOP_K)
        cold += window.cold_bytes if window.tokens else 0
        swaps = policy.observe(window)
        experts = [(swap.layer_id, expert) for swap in swaps for expert in (swap.expert_in, swap.expert_out)]
        assert len(set(experts)) == len(experts)
        for swap in swaps:
            assert not before[swap.layer_id, swap.expert_in]
            assert before[swap.layer_id, swap.expert_out]
            policy.published(swap)
            moved += row_bytes[swap.layer_id]
        assert all(sum(swap.layer_id == n for swap in swaps) <= max_swaps for n in range(LAYERS))
        assert (H * LAYERS, H) == (policy.hot().sum(), policy.hot()[0].sum())
        numbers = AdaptiveOptions()
        cap = numbers.burst * H * sum(row_bytes)
        assert moved <= cap + (numbers.drift_share + numbers.settle_share) * cold + 1e-6
        assert 0 <= policy.credit_bytes <= cap
        assert 0 <= policy.saved_bytes <= cap


@given(st.integers(0, 2**16))
def test_the_drop_is_never_more_than_the_drift(seed):
    random = np.random.default_rng(seed)
    before, now = (random.dirichlet(np.full(E, 0.3), size=LAYERS) for _ in range(2))
    drop = coverage_drop(before, now, hot_rows=np.array([H, 7]))
    assert drop <= drift(before, now) + 1e-12
    assert 0.0 == coverage_drop(before, before, hot_rows=np.array([H, 7]))


def test_the_drop_of_disjoint_traffic_is_all_that_was_served():
    assert pytest.approx(1.0) == coverage_drop(FIRST * 1.0, LAST * 1.0, hot_rows=np.array([H, H]))
    assert 0.0 == coverage_drop(FIRST * 0.0, LAST * 1.0, hot_rows=np.array([H, H]))


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"look_steps": 0}, "look_steps: got 0; wanted an integer >= 1"),
        ({"recent_half_life": 0.0}, "recent_half_life: got 0.0; wanted a finite number > 0"),
        ({"long_half_life": float("nan")}, "long_half_life: got nan"),
        ({"payback": -1.0}, "payback: got -1.0; wanted a finite number >= 0"),
        ({"drift_share": float("inf")}, "drift_share: got inf"),
    ],
)
def test_a_number_out_of_its_range_is_refused(numbers, match):
    with pytest.raises(ConfigError, match=match):
        AdaptiveOptions(**numbers)


def test_row_bytes_of_other_layers_are_refused():
    with pytest.raises(PlanError, match="got 1 layers; wanted 2"):
        adaptive(row_bytes=(1,))
