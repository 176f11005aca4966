"""The real Swapper over the real CUDA backend on simulated streams: every state of small layers, every rule needed.

Memory is exclusive, as on a GPU. See cuda_machine.py for what is checked in every state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest

from bank.cuda_machine import MANY, CudaMachine
from bank.explorer import Finding, Scenario, exclusive, explore
from hotsplit.bank.cuda_swaps import CudaSwapBackend, RowMemory
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.swap import Stream, WaitName

TWO_LAYERS = (exclusive(2, hot=1),) * 2


@cache
def dropping(name: WaitName) -> type[CudaSwapBackend]:
    """A backend that forgets one wait."""

    class Dropping(CudaSwapBackend):
        def wait(self, stream: Stream, event: Any, why: WaitName) -> None:
            if why != name:
                super().wait(stream, event, why)

    return Dropping


class OneEvent(CudaSwapBackend):
    """Records the same event again and again: to a wait or a query it is what was recorded last."""

    newest: Any = None

    def record(self, stream: Stream) -> Any:
        self.newest = super().record(stream)
        return "the event"

    def wait(self, stream: Stream, event: Any, why: WaitName) -> None:
        super().wait(stream, self.newest, why)

    def query(self, event: Any) -> bool:
        return super().query(self.newest)


class OneEventMachine(CudaMachine):
    def event_key(self, event: Any) -> Any:
        return super().event_key(self.backend.newest)


class PublishesOnTheSideStream(CudaSwapBackend):
    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        for one in self._row_maps:
            address = one.entry_address(layer_id, expert=expert)
            self._driver.write32(address, value=row, stream=self._streams.handle("side"))


class WritesOneMapOnly(CudaSwapBackend):
    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        address = self._row_maps[0].entry_address(layer_id, expert=expert)
        self._driver.write32(address, value=row, stream=self._streams.handle("compute"))


class WritesTheOtherHalf(CudaSwapBackend):
    """Of an entry of eight bytes, the half that never changes."""

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        for one in self._row_maps:
            address = one.entry_address(layer_id, expert=expert) + one.entry_bytes - 4
            self._driver.write32(address, value=row, stream=self._streams.handle("compute"))


class WritesTheSecondMapLater(CudaSwapBackend):
    """Of two maps, one is a publish behind."""

    late: tuple[int, int] | None = None

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        compute = self._streams.handle("compute")
        if self.late is not None:
            self._driver.write32(self.late[0], value=self.late[1], stream=compute)
        first, second = (one.entry_address(layer_id, expert=expert) for one in self._row_maps)
        self._driver.write32(first, value=row, stream=compute)
        self.late = (second, row)


class WithoutLastTensor:
    """Row memory that forgets the scales."""

    def __init__(self, rows: RowMemory) -> None:
        self.rows = rows

    def tensors(self, layer_id: int) -> Sequence[RowTensor]:
        return self.rows.tensors(layer_id)[:-1]


class LeavesOutATensor(CudaSwapBackend):
    def __init__(self, rows: RowMemory, **options: Any) -> None:
        super().__init__(WithoutLastTensor(rows), **options)


class OneBankOnly(CudaSwapBackend):
    """Takes cold rows to lie behind the hot ones, as they do in a stitched range."""

    def __init__(self, rows: RowMemory, **options: Any) -> None:
        super().__init__(FromTheFirstRow(rows), **options)


class FromTheFirstRow:
    """Row memory that knows of no second part."""

    def __init__(self, rows: RowMemory) -> None:
        self.rows = rows

    def tensors(self, layer_id: int) -> Sequence[RowTensor]:
        return [RowTensor(pieces=one.pieces[:1], row_bytes=one.row_bytes) for one in self.rows.tensors(layer_id)]


class EventBeforeTheLastTensor(CudaSwapBackend):
    """The event is recorded behind the first tensor of a row; the last one follows it."""

    def _start(self, copy: Any) -> None:
        rows, self._rows = self._rows, WithoutLastTensor(self._rows)
        super()._start(copy)
        self._rows = rows
        last = rows.tensors(copy.layer_id)[-1]
        target, source = last.address_of(copy.target_row), last.address_of(copy.source_row)
        self._driver.copy(target, source=source, num_bytes=last.row_bytes, stream=self._streams.handle(copy.stream))


class WritesBackLate(CudaSwapBackend):
    """Hands a write-back to the device behind the copy that comes next, which may reuse the row; its event comes early."""

    late: Any = None

    def _start(self, copy: Any) -> None:
        late, self.late = self.late, None
        if self._is_write_back(copy):
            self.late = copy
            self._outcomes[copy] = self._streams.record(copy.stream)
        else:
            super()._start(copy)
        if late is not None:
            super()._start(late)

    def _is_write_back(self, copy: Any) -> bool:
        return copy.target_row >= self._rows.layouts[copy.layer_id].first_cold


class EventOfACopyInTheQueue(CudaSwapBackend):
    """Takes what was enqueued last for the event of a copy that is still in the queue."""

    def record(self, stream: Stream) -> Any:
        return self._streams.record(stream)


class NeverStartsTheQueue(CudaSwapBackend):
    def _has_room(self) -> bool:
        return not self._waiting and super()._has_room()


class TakesNoTurns(CudaSwapBackend):
    def _has_room(self) -> bool:
        return True


class LyingQuery(CudaSwapBackend):
    def query(self, event: Any) -> bool:
        return True


def machine(backend: type[CudaSwapBackend] = CudaSwapBackend, **options: Any) -> Any:
    return partial(CudaMachine, backend=backend, **options)


def require_sound(finding: Finding, *, min_states: int, min_swaps: int) -> None:
    assert finding.violation is None, finding.trace
    assert 0 == finding.num_stuck
    assert min_states <= finding.num_states
    assert min_swaps <= finding.num_swaps


@pytest.mark.parametrize("max_copies", [1, MANY])
@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize(
    ("layout", "side_streams", "min_states"),
    [
        (exclusive(3, hot=1), 1, 1600),
        (exclusive(3, hot=1), 2, 1600),
        (exclusive(3, hot=2), 2, 600),
    ],
)
def test_every_state_of_one_small_layer_is_sound(layout, side_streams, min_states, publish, max_copies):
    scenario = Scenario(
        layouts=(layout,),
        publish=publish,
        side_streams=side_streams,
        num_chunks=2,
        backend=machine(max_copies=max_copies),
    )
    require_sound(explore(scenario), min_states=min_states, min_swaps=24)


@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize("layouts", [(exclusive(3, hot=1),), (exclusive(3, hot=2),), TWO_LAYERS])
def test_every_state_of_rows_in_two_banks_is_sound_and_there_are_as_many_as_of_stitched_ones(layouts, publish):
    banked, stitched = (
        explore(Scenario(layouts=layouts, publish=publish, launch_ahead=1, backend=machine(num_banks=num_banks)))
        for num_banks in (2, 1)
    )
    require_sound(banked, min_states=250, min_swaps=8)
    assert stitched.num_states == banked.num_states


@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize("layouts", [(exclusive(3, hot=1),), TWO_LAYERS])
def test_copies_that_know_of_one_bank_alone_are_found_where_there_are_two(layouts, publish):
    scenario = Scenario(layouts=layouts, publish=publish, backend=machine(OneBankOnly, num_banks=2))
    assert explore(scenario).violation is not None
    stitched = Scenario(layouts=layouts, publish=publish, launch_ahead=1, backend=machine(OneBankOnly))
    assert explore(stitched).violation is None


@pytest.mark.parametrize("num_banks", [1, 2])
@pytest.mark.parametrize(("publish", "min_states"), [("done", 13_000), ("enqueued", 19_000)])
def test_every_state_of_a_layer_with_two_hot_and_two_cold_experts_is_sound(publish, min_states, num_banks):
    backend = machine(max_copies=MANY, num_banks=num_banks)
    scenario = Scenario(layouts=(exclusive(4, hot=2),), publish=publish, backend=backend)
    require_sound(explore(scenario), min_states=min_states, min_swaps=440)


@pytest.mark.parametrize(
    ("publish", "max_copies", "side_streams", "min_states"),
    [("done", 1, 1, 7000), ("done", MANY, 2, 8000), ("enqueued", 1, 2, 7000), ("enqueued", MANY, 1, 7000)],
)
def test_every_state_of_two_layers_on_shared_streams_is_sound(publish, max_copies, side_streams, min_states):
    scenario = Scenario(
        layouts=TWO_LAYERS, publish=publish, side_streams=side_streams, backend=machine(max_copies=max_copies)
    )
    require_sound(explore(scenario), min_states=min_states, min_swaps=400)


@pytest.mark.parametrize("side_streams", [1, 2])
def test_no_more_than_one_row_is_on_its_way_in_any_state_however_many_layers_swap(side_streams):
    scenario = Scenario(layouts=TWO_LAYERS, side_streams=side_streams, launch_ahead=1, backend=machine(limit=1))
    require_sound(explore(scenario), min_states=1000, min_swaps=80)


def test_a_backend_that_takes_no_turns_is_found():
    finding = explore(Scenario(layouts=TWO_LAYERS, backend=machine(TakesNoTurns, limit=1)))
    assert "more on their way than may be" in str(finding.violation)


@pytest.mark.parametrize("ordinal", range(8))
@pytest.mark.parametrize("side_streams", [1, 2])
def test_every_state_is_sound_whichever_copy_the_driver_refuses(side_streams, ordinal):
    scenario = Scenario(
        layouts=(exclusive(3, hot=1),),
        side_streams=side_streams,
        launch_ahead=1,
        backend=machine(failing_copies=[ordinal]),
    )
    finding = explore(scenario)
    require_sound(finding, min_states=400, min_swaps=10)
    assert 1 <= finding.num_failures


@pytest.mark.parametrize("ordinal", [2, 3, 5])
def test_every_state_is_sound_when_the_driver_refuses_a_copy_that_waited_for_its_turn(ordinal):
    finding = explore(Scenario(layouts=TWO_LAYERS, launch_ahead=1, backend=machine(failing_copies=[ordinal])))
    require_sound(finding, min_states=2000, min_swaps=100)
    assert 1 <= finding.num_failures


@pytest.mark.parametrize(("max_copies", "num_banks"), [(1, 1), (MANY, 1), (1, 2)])
@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize("hot", [1, 2])
@pytest.mark.parametrize(
    ("name", "symptom"),
    [
        ("w1", "written to"),
        ("w2", "with bytes of others"),
        ("w3", "written to"),
        ("w4", "with bytes of others"),
    ],
)
def test_each_dropped_wait_is_found_when_swaps_are_published_as_enqueued(
    name, symptom, hot, side_streams, max_copies, num_banks
):
    scenario = Scenario(
        layouts=(exclusive(3, hot=hot),),
        publish="enqueued",
        side_streams=side_streams,
        backend=machine(dropping(name), max_copies=max_copies, num_banks=num_banks),
    )
    assert symptom in str(explore(scenario).violation)


@pytest.mark.parametrize("side_streams", [1, 2])
@pytest.mark.parametrize("name", ["w1", "w3"])
def test_dropping_w1_or_w3_is_found_under_the_products_rule_too(name, side_streams):
    layouts = (exclusive(3, hot=1),)
    finding = explore(Scenario(layouts=layouts, side_streams=side_streams, backend=machine(dropping(name))))
    assert "written to" in str(finding.violation)


@pytest.mark.parametrize(
    ("layouts", "launch_ahead"), [((exclusive(3, hot=1),), 2), ((exclusive(3, hot=2),), 2), (TWO_LAYERS, 1)]
)
@pytest.mark.parametrize("name", ["w2", "w4"])
def test_dropping_w2_or_w4_is_harmless_once_a_query_has_said_done(name, layouts, launch_ahead):
    scenario = Scenario(layouts=layouts, launch_ahead=launch_ahead, backend=machine(dropping(name)))
    require_sound(explore(scenario), min_states=400, min_swaps=24)


@pytest.mark.parametrize("publish", ["done", "enqueued"])
@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        (PublishesOnTheSideStream, "changed while a step ran"),
        (WritesOneMapOnly, "wanted equal ones"),
        (WritesTheSecondMapLater, "wanted equal ones"),
        (WritesTheOtherHalf, "does not exist"),
        (LeavesOutATensor, "with bytes of others"),
        (EventBeforeTheLastTensor, "with bytes of others"),
        (WritesBackLate, "with bytes of others"),
    ],
)
def test_each_broken_rule_is_found(mutant, symptom, publish):
    layouts = (exclusive(3, hot=1),)
    finding = explore(Scenario(layouts=layouts, publish=publish, backend=machine(mutant, max_copies=MANY)))
    assert symptom in str(finding.violation)


@pytest.mark.parametrize("publish", ["done", "enqueued"])
def test_an_event_that_is_used_again_is_found_where_two_layers_swap(publish):
    backend = partial(OneEventMachine, backend=OneEvent, max_copies=MANY)
    finding = explore(Scenario(layouts=TWO_LAYERS, publish=publish, backend=backend))
    assert "written to" in str(finding.violation)


def test_an_event_that_is_recorded_before_its_copy_has_left_the_queue_is_found():
    finding = explore(Scenario(layouts=TWO_LAYERS, backend=machine(EventOfACopyInTheQueue)))
    assert "with bytes of others" in str(finding.violation)


def test_a_queue_that_never_moves_on_is_found():
    finding = explore(Scenario(layouts=TWO_LAYERS, launch_ahead=1, backend=machine(NeverStartsTheQueue)))
    assert (None, True) == (finding.violation, finding.num_stuck > 0)


def test_a_query_that_lies_is_harmless_behind_the_waits():
    finding = explore(Scenario(layouts=(exclusive(3, hot=1),), backend=machine(LyingQuery)))
    require_sound(finding, min_states=1000, min_swaps=24)
