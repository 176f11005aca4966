"""Replays by hand: what a policy is asked, when its swaps serve, and what comes out of windows."""

from __future__ import annotations

import numpy as np
import pytest

from hotsplit.errors import ConfigError
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer, Swap
from hotsplit.plan.replay import Steps
from hotsplit.plan.simulate import ReplayOptions, oracle, replay

E = 3
HOT = np.array([[True, False, False]])


def steps_of_ids(ids, *, is_decode=None):
    ids = np.asarray(ids).reshape(len(ids), 1, -1)
    phases = np.ones(len(ids), dtype=bool) if is_decode is None else np.array(is_decode)
    return Steps(experts=ids, starts=np.arange(len(ids) + 1), is_decode=phases, num_experts=E)


def fixed(**options):
    chosen = RebalanceOptions(**({"margin": 1.0, "half_life": 1.0, "max_swaps": 1} | options))
    return Rebalancer(hot=HOT, prior=None, top_k=1, options=chosen)


class Told:
    """A policy that writes down what it is asked and answers from a list."""

    look_steps, decay, num_shifts = None, 1.0, 0

    def __init__(self, *answers, look_steps=None):
        self.answers, self.look_steps, self.windows = list(answers), look_steps, []

    def observe(self, window, *, busy=()):
        self.windows.append((window.phase, window.tokens, window.counts.tolist(), sorted(busy)))
        return self.answers.pop(0) if self.answers else ()

    def follow(self, hot):
        self.seen = hot.copy()

    def hot(self):
        return self.seen


def hits(result):
    return [round(part.hit_rate) for part in result.parts]


IN = Swap(layer_id=0, expert_in=1, expert_out=0)
BACK = Swap(layer_id=0, expert_in=0, expert_out=1)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("instant", [0, 0, 1, 1, 1, 1, 1]), ("inclusive", [0, 0, 0, 0, 1, 1, 1]), ("exclusive", [0, 0, 0, 0, 1, 1, 1])],
)
def test_a_swap_that_is_asked_for_after_two_steps_serves_when_its_placement_lets_it(placement, expected):
    options = ReplayOptions(row_bytes=(10,), dyn_steps=2, placement=placement, window_steps=1)
    result = replay(steps_of_ids([1] * 7), hot=HOT, policy=Told((IN,)), options=options)
    assert expected == hits(result)
    assert (1, 10, [(2, IN)]) == (result.done, result.moved_bytes, [(c.step, c.swap) for c in result.asked])


def test_while_an_exclusive_swap_is_written_back_both_experts_serve():
    options = ReplayOptions(row_bytes=(10,), dyn_steps=2, placement="exclusive", window_steps=1)
    result = replay(steps_of_ids([0] * 7), hot=HOT, policy=Told((IN,)), options=options)
    # Asked for before step 2, copied from before step 3, in before step 4, out before step 5.
    assert [1, 1, 1, 1, 1, 0, 0] == hits(result)


def test_a_policy_is_asked_at_every_update_with_the_window_since_the_last():
    policy = Told()
    options = ReplayOptions(row_bytes=(10,), dyn_steps=3)
    result = replay(steps_of_ids([0, 0, 1, 1, 1, 2, 2]), hot=HOT, policy=policy, options=options)
    assert [("decode", 3, [[2, 1, 0]], []), ("decode", 3, [[0, 2, 1]], [])] == policy.windows
    assert 2 == result.updates


def test_a_policy_that_looks_more_often_is_asked_more_often_and_updates_stay_what_they_were():
    policy = Told(look_steps=2)
    options = ReplayOptions(row_bytes=(10,), dyn_steps=5)
    result = replay(steps_of_ids([0] * 11), hot=HOT, policy=policy, options=options)
    # Looks after 2, 4, 5 (an update), 7, 9 and 10 steps (an update).
    assert [2, 2, 1, 2, 2, 1] == [window[1] for window in policy.windows]
    assert 2 == result.updates


def test_a_busy_layer_refuses_and_is_told_to_the_policy():
    policy = Told((IN,), (IN,), (BACK,))
    options = ReplayOptions(row_bytes=(10,), dyn_steps=1)
    result = replay(steps_of_ids([0] * 6), hot=HOT, policy=policy, options=options)
    assert [[], [0], []] == [window[3] for window in policy.windows[:3]]
    assert (2, 1, 2) == (len(result.asked), result.refused, result.done)


def test_where_there_is_decode_prefill_does_not_speak():
    policy = Told()
    steps = steps_of_ids([0, 1, 1, 0], is_decode=[True, False, False, True])
    replay(steps, hot=HOT, policy=policy, options=ReplayOptions(row_bytes=(10,), dyn_steps=1))
    assert [("decode", 1, [[1, 0, 0]], [])] == policy.windows


def test_a_replay_before_any_decode_is_steered_by_prefill():
    policy = Told()
    steps = steps_of_ids([0, 1, 1], is_decode=[False] * 3)
    replay(steps, hot=HOT, policy=policy, options=ReplayOptions(row_bytes=(10,), dyn_steps=2))
    assert [("prefill", 2, [[1, 1, 0]], [])] == policy.windows


def test_the_rebalancer_of_a_run_moves_the_hot_expert_to_where_the_traffic_is():
    options = ReplayOptions(row_bytes=(10,), dyn_steps=2, placement="instant", window_steps=2)
    result = replay(steps_of_ids([0, 0, 1, 1, 1, 1, 2, 2]), hot=HOT, policy=fixed(), options=options)
    # After four steps both have two counts, the older of which have faded to one.
    assert [1, 0, 1, 0] == hits(result)
    assert [[False, True, False]] == result.hot.tolist()


def test_windows_add_up_to_the_whole_and_the_policy_does_not_see_them():
    ids = np.random.default_rng(0).integers(0, E, 60)
    runs = [
        replay(steps_of_ids(ids), hot=HOT, policy=fixed(), options=ReplayOptions(row_bytes=(7,), dyn_steps=6, **window))
        for window in ({}, {"window_steps": 7}, {"window_steps": 60})
    ]
    assert 1 == len({(run.hits, run.moved_bytes, run.asked, run.cold_bytes_per_step) for run in runs})
    for run in runs:
        assert run.hits == round(sum(part.hit_rate * part.tokens for part in run.parts))
        assert run.moved_bytes == sum(part.moved_bytes for part in run.parts)
        assert 60 == sum(part.steps for part in run.parts)


def test_the_oracle_is_the_best_in_hindsight_of_the_whole_and_of_every_window_for_itself():
    found = oracle(steps_of_ids([0, 1, 1, 2, 2, 2]), hot=HOT, window_steps=3)
    assert (pytest.approx(0.5), 3) == (found.hit_rate, found.hits)
    assert [2 / 3, 1.0] == [part.hit_rate for part in found.parts]


def test_progress_is_told_up_to_the_end():
    told = []
    options = ReplayOptions(row_bytes=(1,), window_steps=2, on_progress=lambda done, total: told.append((done, total)))
    replay(steps_of_ids([0] * 5), hot=HOT, policy=None, options=options)
    assert [(2, 5), (4, 5), (5, 5)] == told


def test_a_hot_mask_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="the hot mask and row bytes"):
        replay(steps_of_ids([0]), hot=np.ones((2, E), bool), policy=None, options=ReplayOptions(row_bytes=(1,)))


@pytest.mark.parametrize("options", [{"dyn_steps": 0}, {"window_steps": 0}])
def test_steps_below_one_are_refused(options):
    with pytest.raises(ConfigError, match="wanted an integer >= 1"):
        ReplayOptions(row_bytes=(1,), **options)
