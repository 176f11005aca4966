"""Who answers to which name, and when it is time."""

from __future__ import annotations

import numpy as np
import pytest

from hotsplit.config import HotsplitConfig, settings
from hotsplit.errors import ConfigError
from hotsplit.plan.adaptive import AdaptiveRebalancer
from hotsplit.plan.counters import Counters
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer, thrash_notice
from hotsplit.plan.steering import POLICIES, Steering, make_policy

HOT = np.array([[True, False]])


def policy(schedule):
    options = RebalanceOptions(schedule=schedule)
    return make_policy(hot=HOT, prior=None, top_k=1, options=options, row_bytes=(10,))


def test_every_schedule_that_can_be_set_has_a_policy_and_no_other():
    (info,) = [info for info in settings() if info.name == "dyn_schedule"]
    assert " or ".join(POLICIES) == info.values
    assert "fixed" == HotsplitConfig().dyn_schedule


def test_the_names_give_the_policies():
    assert (Rebalancer, AdaptiveRebalancer) == (type(policy("fixed")), type(policy("adaptive")))


def test_an_unknown_schedule_lists_the_known_ones():
    with pytest.raises(ConfigError, match="schedule: got 'sometimes'; wanted fixed or adaptive"):
        policy("sometimes")


def test_an_update_is_a_look_and_looks_are_no_further_apart_than_updates():
    counters = Counters.zeros((1, 2))
    assert 2000 == Steering(counters, dyn_steps=2000, policy=policy("fixed")).look_steps
    assert 10 == Steering(counters, dyn_steps=2000, policy=policy("adaptive")).look_steps
    assert 3 == Steering(counters, dyn_steps=3, policy=policy("adaptive")).look_steps


@pytest.mark.parametrize(
    ("steps", "look", "update", "left"),
    [(0, False, False, 10), (9, False, False, 1), (10, True, False, 0), (25, True, True, 0)],
)
def test_it_says_when_it_is_time(steps, look, update, left):
    steering = Steering(Counters.zeros((1, 2)), dyn_steps=25, policy=policy("adaptive"))
    assert (look, update, left) == (
        steering.is_look_due(steps),
        steering.is_update_due(steps),
        steering.steps_to_look(steps),
    )


def test_a_bound_on_bytes_needs_no_warning_of_thrash():
    restless = {"half_life": 1.0, "margin": 1.0}
    assert thrash_notice(RebalanceOptions(**restless)) is not None
    assert thrash_notice(RebalanceOptions(schedule="adaptive", **restless)) is None
