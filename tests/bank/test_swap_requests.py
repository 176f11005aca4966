"""What may be asked of a Swapper, what it refuses, and what it reports."""

from __future__ import annotations

import pytest

from bank.explorer import exclusive, inclusive
from hotsplit.bank.rows import place
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Swapper, TickResult
from hotsplit.errors import SwapError
from hotsplit.plan.rebalance import Swap


def engine(*layouts, **options):
    backend = SimBackend(layouts)
    return Swapper(backend, layouts=layouts, **options), backend


def finish(swapper, backend):
    """Tick and run until nothing is under way; what was published, in order."""
    published = []
    while not swapper.is_idle():
        published += swapper.tick().published
        backend.launch_step()
        backend.drain()
    return published


def test_an_exclusive_swap_trades_places_through_the_spare_row():
    swapper, backend = engine(exclusive(3, hot=1))
    assert swapper.request(0, expert_in=2, expert_out=0)
    assert [Swap(layer_id=0, expert_in=2, expert_out=0)] == finish(swapper, backend)
    assert ((3, 2, 1), 0) == (swapper.row_map(0), swapper.spare_row(0))
    assert (3, 2, 1) == backend.row_map(0)


def test_an_inclusive_swap_sends_the_expert_home_and_writes_nothing_back():
    swapper, backend = engine(inclusive(3, hot=1))
    swapper.request(0, expert_in=2, expert_out=0)
    assert (0,) == swapper.tick().copied_layers
    backend.drain()
    result = swapper.tick()
    assert (1, ()) == (len(result.published), result.copied_layers)
    assert ((2, 3, 1), 0) == (swapper.row_map(0), swapper.spare_row(0))


def test_every_expert_can_come_home_again():
    for layout in (exclusive(3, hot=1), inclusive(3, hot=1)):
        swapper, backend = engine(layout)
        for expert_in, expert_out in [(1, 0), (2, 1), (0, 2)]:
            assert swapper.request(0, expert_in=expert_in, expert_out=expert_out)
            finish(swapper, backend)
        assert frozenset({0}) == swapper.hot_experts(0)


def test_requests_between_two_ticks_are_one_update_and_queue_in_one_layer():
    swapper, backend = engine(exclusive(4, hot=2))
    asked = [Swap(layer_id=0, expert_in=2, expert_out=0), Swap(layer_id=0, expert_in=3, expert_out=1)]
    for swap in asked:
        assert swapper.request(0, expert_in=swap.expert_in, expert_out=swap.expert_out)
    assert asked == finish(swapper, backend)
    assert frozenset({2, 3}) == swapper.hot_experts(0)


def test_an_update_that_finds_a_swap_in_flight_is_refused_and_the_next_one_is_taken():
    swapper, backend = engine(exclusive(4, hot=2), exclusive(4, hot=2))
    swapper.request(0, expert_in=2, expert_out=0)
    swapper.tick()
    assert frozenset({0}) == swapper.busy()
    before = swapper.row_map(0)
    assert not swapper.request(0, expert_in=3, expert_out=1)
    assert swapper.request(1, expert_in=3, expert_out=1)
    assert before == swapper.row_map(0)
    finish(swapper, backend)
    assert swapper.request(0, expert_in=3, expert_out=1)
    finish(swapper, backend)
    assert (frozenset({2, 3}), frozenset({0, 3})) == (swapper.hot_experts(0), swapper.hot_experts(1))


def test_a_layer_whose_swap_is_still_queued_is_busy_too():
    swapper, _ = engine(exclusive(4, hot=2))
    swapper.request(0, expert_in=2, expert_out=0)
    with swapper.frozen():
        swapper.tick()
    assert not swapper.request(0, expert_in=3, expert_out=1)


@pytest.mark.parametrize(
    ("expert_in", "expert_out", "message"),
    [
        (1, 0, "expert 1, which is hot already"),
        (2, 3, "expert 3, which is not hot"),
        (2, 2, "expert 2, which is not hot"),
        (4, 0, "got expert 4; wanted experts 0..3"),
        (2, -1, "got expert -1; wanted experts 0..3"),
    ],
)
def test_an_illegal_pair_is_an_error_that_names_it(expert_in, expert_out, message):
    swapper, _ = engine(exclusive(4, hot=2))
    with pytest.raises(SwapError, match=message):
        swapper.request(0, expert_in=expert_in, expert_out=expert_out)
    assert swapper.is_idle()


@pytest.mark.parametrize(("expert_in", "expert_out"), [(2, 1), (3, 0)])
def test_an_expert_moves_at_most_once_per_update(expert_in, expert_out):
    swapper, _ = engine(exclusive(4, hot=2))
    swapper.request(0, expert_in=2, expert_out=0)
    with pytest.raises(SwapError, match="twice in one update"):
        swapper.request(0, expert_in=expert_in, expert_out=expert_out)


@pytest.mark.parametrize("hot", [(), (0, 1, 2)])
def test_a_layer_without_spare_row_cannot_swap(hot):
    swapper, _ = engine(place(hot, num_experts=3, spare=True, inclusive=False))
    with pytest.raises(SwapError, match="without spare row"):
        swapper.request(0, expert_in=2, expert_out=0)


@pytest.mark.parametrize("layer_id", [-1, 1])
def test_a_layer_that_does_not_exist_is_an_error(layer_id):
    swapper, _ = engine(exclusive(3, hot=1))
    with pytest.raises(SwapError, match="layer_id of a swap"):
        swapper.request(layer_id, expert_in=1, expert_out=0)


def test_hot_experts_are_those_of_the_plan_in_any_layer():
    layouts = [place(hot, num_experts=3, spare=True, inclusive=False) for hot in [(), (2,), (0, 1, 2)]]
    swapper, _ = engine(*layouts)
    assert [set(), {2}, {0, 1, 2}] == [swapper.hot_experts(layer_id) for layer_id in range(3)]


def test_nothing_is_enqueued_published_or_queried_while_frozen():
    swapper, backend = engine(exclusive(3, hot=1))
    swapper.request(0, expert_in=2, expert_out=0)
    with swapper.frozen(), swapper.frozen():
        assert TickResult() == swapper.tick()
        assert backend.is_empty()
    assert (0,) == swapper.tick().copied_layers
    backend.drain()
    backend.query = pytest.fail
    with swapper.frozen():
        assert TickResult() == swapper.tick()
    assert backend.is_empty()
    del backend.query
    assert 1 == len(finish(swapper, backend))


def test_freezing_ends_when_its_block_fails():
    swapper, backend = engine(exclusive(3, hot=1))
    swapper.request(0, expert_in=2, expert_out=0)
    with pytest.raises(KeyError), swapper.frozen():
        raise KeyError
    assert 1 == len(finish(swapper, backend))


def test_write_backs_go_to_their_own_stream_where_there_are_two():
    streams_per_choice = []
    for side_streams in (1, 2):
        swapper, backend = engine(exclusive(3, hot=1), side_streams=side_streams)
        swapper.request(0, expert_in=2, expert_out=0)
        swapper.tick()
        backend.drain()
        swapper.tick()
        streams_per_choice.append(backend.enabled())
        backend.advance("compute")  # the wait w2
        backend.advance("compute")  # publish 2
        backend.advance("compute")  # the record that w3 waits for
        streams_per_choice.append(backend.enabled())
    assert [("compute",), ("side",), ("compute",), ("side_out",)] == streams_per_choice


def test_a_layer_publishes_one_swap_while_others_go_on():
    swapper, backend = engine(exclusive(3, hot=1), inclusive(3, hot=1))
    swapper.request(0, expert_in=2, expert_out=0)
    swapper.request(1, expert_in=1, expert_out=0)
    assert (0, 1) == swapper.tick().copied_layers
    backend.drain()
    result = swapper.tick()
    assert ((Swap(layer_id=1, expert_in=1, expert_out=0),), (0,)) == (result.published, result.copied_layers)
    assert frozenset({0}) == swapper.busy()


def test_a_copy_that_is_not_done_is_not_published():
    swapper, backend = engine(inclusive(3, hot=1))
    swapper.request(0, expert_in=2, expert_out=0)
    swapper.tick()
    for _ in range(2):  # both parts; the event is still to come
        backend.advance("side")
        assert TickResult() == swapper.tick()
    backend.advance("side")
    assert 1 == len(swapper.tick().published)
