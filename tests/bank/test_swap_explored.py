"""The real Swapper, explored exhaustively: every state of small layers is sound, and every rule is needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bank.explorer import Finding, Scenario, exclusive, explore, inclusive
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Stream, Swapper, WaitName


@cache
def dropping(name: WaitName) -> type[SimBackend]:
    """A backend that forgets one wait."""

    class Dropping(SimBackend):
        def wait(self, stream: Stream, event: int, why: WaitName) -> None:
            if why != name:
                super().wait(stream, event, why)

    return Dropping


class MapOnSideStream(SimBackend):
    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        compute = self._queues["compute"]
        super().publish(layer_id, expert=expert, row=row)
        self._queues["side"] = (*self._queues["side"], self._queues["compute"][-1])
        self._queues["compute"] = compute


class LyingQuery(SimBackend):
    def query(self, event: int) -> bool:
        return True


class LyingQueryWithoutW2(LyingQuery):
    def wait(self, stream: Stream, event: int, why: WaitName) -> None:
        if why != "w2":
            super().wait(stream, event, why)


class TensorsApart(SimBackend):
    """The event after a copy is done when the first tensor is copied; the second one follows."""

    def _run_copy(self, work: Any, *, stream: Stream, fail: bool) -> Any:
        left = super()._run_copy(work, stream=stream, fail=fail)
        if left is not None and left.part == self._num_parts // 2:
            self._pending -= {self._queues[stream][1].event}
        return left


class PublishBeforeCopy(Swapper):
    def _enqueue_copy(self, layer: Any, flight: Any, *, report: Any) -> Any:
        if not flight.is_in:
            swap = flight.swap
            self._backend.publish(swap.layer_id, expert=swap.expert_in, row=flight.spare_row)
        return super()._enqueue_copy(layer, flight, report=report)


class SpareBeforeItsEvent(Swapper):
    """The event that frees the spare row is recorded before the publish that un-names the row."""

    def _publish_out(self, layer: Any, flight: Any, *, report: Any) -> Any:
        too_early = self._backend.record("compute")
        return replace(super()._publish_out(layer, flight, report=report), free=too_early)


class NeverRetries(Swapper):
    """A failed write-back leaves its layer waiting for ever."""

    def _advance(self, layer: Any, flight: Any, *, report: Any) -> Any:
        return super()._advance(layer, flight, report=report) if flight.is_copying else layer


def require_sound(finding: Finding, *, min_states: int, min_swaps: int) -> None:
    assert finding.violation is None, finding.trace
    assert 0 == finding.num_stuck
    assert min_states <= finding.num_states
    assert min_swaps <= finding.num_swaps


@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize(
    ("layout", "side_streams", "min_states"),
    [
        (exclusive(3, hot=1), 1, 1500),
        (exclusive(3, hot=1), 2, 1500),
        (exclusive(3, hot=2), 1, 600),
        (exclusive(3, hot=2), 2, 600),
        (inclusive(3, hot=1), 1, 1000),
        (inclusive(3, hot=2), 1, 350),
    ],
)
def test_every_state_of_one_small_layer_is_sound(layout, side_streams, min_states, publish):
    scenario = Scenario(layouts=(layout,), publish=publish, side_streams=side_streams, num_chunks=2)
    require_sound(explore(scenario), min_states=min_states, min_swaps=24)


@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize(
    ("layouts", "side_streams", "min_states"),
    [
        ((exclusive(2, hot=1),) * 2, 1, 6000),
        ((exclusive(2, hot=1),) * 2, 2, 7000),
        ((inclusive(2, hot=1),) * 2, 1, 2000),
    ],
)
def test_every_state_of_two_layers_on_shared_streams_is_sound(layouts, side_streams, min_states, publish):
    scenario = Scenario(layouts=layouts, publish=publish, side_streams=side_streams)
    require_sound(explore(scenario), min_states=min_states, min_swaps=400)


@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize(
    ("layout", "min_states"),
    [
        (exclusive(3, hot=1), 10_000),
        (exclusive(3, hot=2), 4000),
        (inclusive(3, hot=1), 6000),
        (inclusive(3, hot=2), 1500),
    ],
)
def test_every_state_is_sound_when_any_two_copies_fail_at_any_part(layout, min_states, side_streams):
    scenario = Scenario(layouts=(layout,), side_streams=side_streams, num_chunks=2, num_failures=2)
    finding = explore(scenario)
    require_sound(finding, min_states=min_states, min_swaps=60)
    assert 80 <= finding.num_failures


@pytest.mark.slow
@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize("layout", [exclusive(4, hot=2), inclusive(4, hot=2)])
def test_every_state_is_sound_when_an_update_queues_two_swaps_in_a_layer(layout, publish):
    scenario = Scenario(layouts=(layout,), publish=publish, max_swaps=2)
    require_sound(explore(scenario), min_states=15_000, min_swaps=800)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [exclusive(4, hot=2), inclusive(4, hot=2)])
def test_a_failed_swap_never_harms_the_one_queued_behind_it(layout):
    finding = explore(Scenario(layouts=(layout,), max_swaps=2, num_failures=1, launch_ahead=1))
    require_sound(finding, min_states=25_000, min_swaps=500)
    assert 800 <= finding.num_failures


@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize("hot", [1, 2])
@pytest.mark.parametrize(
    ("place", "name", "symptom"),
    [
        (exclusive, "w1", "written to"),
        (exclusive, "w2", "with bytes of experts"),
        (exclusive, "w3", "written to"),
        (exclusive, "w4", "with bytes of experts"),
        (inclusive, "w1", "written to"),
        (inclusive, "w2", "with bytes of experts"),
    ],
)
def test_each_dropped_wait_is_found_when_swaps_are_published_as_enqueued(place, name, symptom, hot, side_streams):
    layouts = (place(3, hot=hot),)
    scenario = Scenario(layouts=layouts, publish="enqueued", side_streams=side_streams, backend=dropping(name))
    assert symptom in str(explore(scenario).violation)


@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize("hot", [1, 2])
@pytest.mark.parametrize(("place", "name"), [(exclusive, "w1"), (exclusive, "w3"), (inclusive, "w1")])
def test_dropping_w1_or_w3_is_found_under_the_products_rule_too(place, name, hot, side_streams):
    scenario = Scenario(layouts=(place(3, hot=hot),), side_streams=side_streams, backend=dropping(name))
    assert "written to" in str(explore(scenario).violation)


@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize("hot", [1, 2])
@pytest.mark.parametrize(("place", "name"), [(exclusive, "w2"), (exclusive, "w4"), (inclusive, "w2")])
def test_dropping_w2_or_w4_is_harmless_once_a_query_has_said_done(place, name, hot, side_streams):
    scenario = Scenario(layouts=(place(3, hot=hot),), side_streams=side_streams, backend=dropping(name))
    require_sound(explore(scenario), min_states=200, min_swaps=24)


@pytest.mark.parametrize("publish", ["done", "enqueued"])
def test_inclusive_placement_never_waits_for_a_write_back(publish):
    layouts = (inclusive(3, hot=1),)
    whole = explore(Scenario(layouts=layouts, publish=publish))
    for name in ("w3", "w4"):
        assert whole == explore(Scenario(layouts=layouts, publish=publish, backend=dropping(name)))


@pytest.mark.parametrize("place", [exclusive, inclusive])
@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        ({"swapper": PublishBeforeCopy}, "with bytes of experts"),
        ({"swapper": SpareBeforeItsEvent}, "written to"),
        ({"backend": MapOnSideStream}, "changed while a step ran"),
        ({"backend": TensorsApart}, "with bytes of experts"),
    ],
)
def test_each_broken_rule_is_found(mutant, symptom, publish, place):
    finding = explore(Scenario(layouts=(place(3, hot=1),), publish=publish, **mutant))
    assert symptom in str(finding.violation)


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_a_query_that_lies_is_harmless_only_behind_the_waits(place):
    layouts = (place(3, hot=1),)
    require_sound(explore(Scenario(layouts=layouts, backend=LyingQuery)), min_states=1000, min_swaps=24)
    assert explore(Scenario(layouts=layouts, backend=LyingQueryWithoutW2)).violation is not None


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_a_query_that_hides_a_failed_copy_is_found(place):
    finding = explore(Scenario(layouts=(place(3, hot=1),), backend=LyingQuery, num_failures=1))
    assert "with bytes of experts" in str(finding.violation)


def test_a_swap_that_never_ends_is_found():
    finding = explore(Scenario(layouts=(exclusive(3, hot=1),), swapper=NeverRetries, num_failures=1))
    assert (None, True) == (finding.violation, finding.num_stuck > 0)


def test_a_finding_tells_the_moves_that_lead_to_it():
    finding = explore(Scenario(layouts=(exclusive(3, hot=1),), publish="enqueued", backend=dropping("w2")))
    assert ("start", "compute goes on") == (finding.trace[0], finding.trace[-1])
