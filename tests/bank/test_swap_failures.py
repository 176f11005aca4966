"""A copy that fails midway (CASES T7 e): nothing is lost, nothing torn is named, and the failure is reported."""

from __future__ import annotations

import pytest

from bank.explorer import exclusive, inclusive
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Swapper
from hotsplit.errors import SwapError
from hotsplit.plan.rebalance import Swap

SWAP = Swap(layer_id=0, expert_in=2, expert_out=0)


class RefusesCopies(SimBackend):
    """Copies cannot even be enqueued, as often as `num_refusals` says."""

    num_refusals = 1

    def copy(self, stream, *, layer_id, source_row, target_row):
        if self.num_refusals:
            self.num_refusals -= 1
            raise SwapError("row copy", got="a full queue")
        super().copy(stream, layer_id=layer_id, source_row=source_row, target_row=target_row)


def run_ticks(swapper, backend, *, num_ticks):
    results = []
    for _ in range(num_ticks):
        results.append(swapper.tick())
        backend.launch_step()
        backend.drain()
    return results


def start(layout, **options):
    backend = SimBackend([layout], **options)
    swapper = Swapper(backend, layouts=[layout])
    swapper.request(0, expert_in=SWAP.expert_in, expert_out=SWAP.expert_out)
    return swapper, backend


@pytest.mark.parametrize("layout", [exclusive(3, hot=1), inclusive(3, hot=1)])
def test_a_failed_copy_of_the_incoming_expert_leaves_the_map_and_drops_the_swap(layout):
    swapper, backend = start(layout, failing_copies=[0])
    results = run_ticks(swapper, backend, num_ticks=2)
    assert [(), (SWAP,)] == [tuple(swap for swap, _ in result.failed) for result in results]
    assert "simulated failure" in results[1].failed[0][1]
    assert (layout.row_map, layout.spare_row) == (swapper.row_map(0), swapper.spare_row(0))
    assert layout.row_map == backend.row_map(0)
    assert swapper.is_idle()


@pytest.mark.parametrize("layout", [exclusive(3, hot=1), inclusive(3, hot=1)])
def test_a_half_written_spare_row_is_named_by_nobody_and_used_again(layout):
    swapper, backend = start(layout, failing_copies=[0])
    run_ticks(swapper, backend, num_ticks=2)
    assert (2, -1) == backend.owners(0, row=layout.spare_row)
    assert swapper.request(0, expert_in=1, expert_out=0)
    run_ticks(swapper, backend, num_ticks=4)
    assert (frozenset({1}), (1, 1)) == (swapper.hot_experts(0), backend.owners(0, row=layout.spare_row))


def test_a_failed_write_back_is_reported_every_time_and_tried_until_it_succeeds():
    swapper, backend = start(exclusive(3, hot=1), failing_copies=[1, 2])
    results = run_ticks(swapper, backend, num_ticks=7)
    failures = [bool(result.failed) for result in results]
    copies = [len(result.copied_layers) for result in results]
    # Copy in, publish and write back, failure, again, failure, again, publish.
    assert [False, False, True, False, True, False, False] == failures
    assert [1, 1, 0, 1, 0, 1, 0] == copies
    assert (SWAP,) == results[-1].published
    assert ((3, 2, 1), True) == (backend.row_map(0), swapper.is_idle())


def test_both_experts_stay_valid_and_the_layer_busy_while_a_write_back_fails():
    swapper, backend = start(exclusive(3, hot=1), failing_copies=range(1, 100))
    run_ticks(swapper, backend, num_ticks=20)
    assert ((0, 2, 1), None) == (swapper.row_map(0), swapper.spare_row(0))
    assert (frozenset({0, 2}), frozenset({0})) == (swapper.hot_experts(0), swapper.busy())
    assert ((0, 0), (2, 2)) == (backend.owners(0, row=0), backend.owners(0, row=1))
    assert not swapper.request(0, expert_in=1, expert_out=2)


def test_the_swap_queued_behind_a_dropped_one_goes_on():
    layout = exclusive(4, hot=2)
    backend = SimBackend([layout], failing_copies=[0])
    swapper = Swapper(backend, layouts=[layout])
    swapper.request(0, expert_in=2, expert_out=0)
    swapper.request(0, expert_in=3, expert_out=1)
    results = run_ticks(swapper, backend, num_ticks=4)
    assert [1, 1] == [sum(len(result.failed) for result in results), sum(len(result.published) for result in results)]
    assert (frozenset({0, 3}), True) == (swapper.hot_experts(0), swapper.is_idle())


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_a_copy_that_cannot_be_enqueued_fails_the_swap_at_once(place):
    layout = place(3, hot=1)
    backend = RefusesCopies([layout])
    swapper = Swapper(backend, layouts=[layout])
    swapper.request(0, expert_in=2, expert_out=0)
    result = swapper.tick()
    assert (((SWAP, "row copy: got a full queue"),), ()) == (result.failed, result.copied_layers)
    assert (layout.row_map, True) == (swapper.row_map(0), swapper.is_idle())


def test_a_write_back_that_cannot_be_enqueued_is_tried_again():
    layout = exclusive(3, hot=1)
    backend = RefusesCopies([layout])
    backend.num_refusals = 0
    swapper = Swapper(backend, layouts=[layout])
    swapper.request(0, expert_in=2, expert_out=0)
    run_ticks(swapper, backend, num_ticks=1)
    backend.num_refusals = 1
    results = run_ticks(swapper, backend, num_ticks=3)
    assert [1, 0, 0] == [len(result.failed) for result in results]
    assert [0, 0, 1] == [len(result.published) for result in results]
    assert (3, 2, 1) == backend.row_map(0)


def test_a_failure_in_one_layer_does_not_touch_another():
    layouts = [exclusive(3, hot=1), exclusive(3, hot=1)]
    backend = SimBackend(layouts, failing_copies=[0])
    swapper = Swapper(backend, layouts=layouts)
    for layer_id in (0, 1):
        swapper.request(layer_id, expert_in=2, expert_out=0)
    run_ticks(swapper, backend, num_ticks=4)
    assert (frozenset({0}), frozenset({2})) == (swapper.hot_experts(0), swapper.hot_experts(1))
