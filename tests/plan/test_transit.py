"""Swaps on their way: when they become visible, and what a busy layer does."""

from __future__ import annotations

import pytest

from hotsplit.errors import ConfigError
from hotsplit.plan.rebalance import Swap
from hotsplit.plan.transit import Move, Transit

FIRST = Swap(layer_id=0, expert_in=2, expert_out=0)
SECOND = Swap(layer_id=0, expert_in=3, expert_out=1)
OTHER = Swap(layer_id=1, expert_in=2, expert_out=0)


def ticks(transit, number):
    return [transit.tick() for _ in range(number)]


def whole(swap):
    return Move(swap=swap, comes_in=True, goes_out=True)


def test_an_inclusive_swap_is_visible_at_the_second_tick_and_the_next_of_its_layer_at_the_third():
    transit = Transit(placement="inclusive")
    assert [True, True] == [transit.request(FIRST), transit.request(SECOND)]
    assert [(), (whole(FIRST),), (whole(SECOND),), ()] == ticks(transit, 4)
    assert transit.is_idle()


def test_an_exclusive_swap_comes_in_at_the_second_tick_and_goes_out_at_the_third():
    transit = Transit(placement="exclusive")
    transit.request(FIRST)
    transit.request(SECOND)
    comes, goes = {"comes_in": True, "goes_out": False}, {"comes_in": False, "goes_out": True}
    expected = [(), (Move(swap=FIRST, **comes),), (Move(swap=FIRST, **goes),)]
    expected += [(Move(swap=SECOND, **comes),), (Move(swap=SECOND, **goes),), ()]
    assert expected == ticks(transit, 6)


def test_layers_do_not_wait_for_each_other():
    transit = Transit(placement="inclusive")
    transit.request(OTHER)
    transit.request(FIRST)
    assert [(), (whole(FIRST), whole(OTHER))] == ticks(transit, 2)


def test_a_layer_that_is_busy_with_an_earlier_update_refuses_and_another_does_not():
    transit = Transit(placement="inclusive")
    transit.request(FIRST)
    transit.tick()
    assert frozenset({0}) == transit.busy()
    assert [False, True] == [transit.request(SECOND), transit.request(OTHER)]
    ticks(transit, 2)
    assert transit.request(SECOND)


def test_an_instant_swap_is_visible_at_once_and_never_under_way():
    transit = Transit(placement="instant")
    transit.request(FIRST)
    assert (whole(FIRST),) == transit.settle()
    assert ((), True) == (transit.tick(), transit.is_idle())


def test_nothing_settles_where_copies_take_time():
    transit = Transit(placement="exclusive")
    transit.request(FIRST)
    assert () == transit.settle()


def test_an_unknown_placement_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="got 'beside'; wanted inclusive or exclusive or instant"):
        Transit(placement="beside")
