"""Publication safety with real threads (CASES T8): 10,000 swaps by the real Swapper while readers play engine steps.

The launching thread ticks; then readers run one step, each reading every expert of every layer through the row map,
while workers copy rows for the swaps in flight; then the next tick. Broken backends show that the readers would see it.
"""

from __future__ import annotations

from random import Random
from threading import Barrier, Event, Thread

import pytest

from bank.explorer import exclusive, inclusive
from bank.threaded_bank import ThreadedBank
from hotsplit.bank.swap import Swapper
from hotsplit.errors import SwapError

NUM_LAYERS, NUM_EXPERTS, NUM_HOT, NUM_READERS = 8, 6, 2, 2


class Readers:
    """Threads that play one engine step each time they are asked to, and keep what they found wrong."""

    def __init__(self, bank):
        self.bank, self.wrong, self.num_overlapping = bank, [], 0
        self._barrier = Barrier(NUM_READERS + 1)
        self._closing = False
        self._threads = [Thread(target=self._run, daemon=True) for _ in range(NUM_READERS)]
        for thread in self._threads:
            thread.start()

    def step(self):
        """One step of every reader, begin to end."""
        self.num_overlapping += self.bank.num_copying > 0
        self._barrier.wait(timeout=60)
        self._barrier.wait(timeout=60)

    def close(self):
        self._closing = True
        self._barrier.wait(timeout=60)
        for thread in self._threads:
            thread.join()

    def _run(self):
        while True:
            self._barrier.wait()
            if self._closing:
                return
            self.wrong += self.bank.wrong_experts()
            self._barrier.wait()


class PublishesTooEarly(ThreadedBank):
    """Calls a copy done while it has not begun: copies stand still until `gate` opens."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.gate = Event()

    def query(self, event):
        return True

    def wait(self, stream, event, why):
        """Forget every wait."""

    def copy_row(self, layer_id, *, source_row, target_row):
        self.gate.wait(timeout=60)
        super().copy_row(layer_id, source_row=source_row, target_row=target_row)


class PublishesBetweenTensors(ThreadedBank):
    """Calls a copy done when the weights are copied; the scale would follow too late to matter."""

    def copy_row(self, layer_id, *, source_row, target_row):
        self.copy_tensor(self.weights_LRN[layer_id], source_row=source_row, target_row=target_row)


class LosesEveryThirdCopy(ThreadedBank):
    """A copy ends with an error after its weights."""

    num_copies = 0

    def copy_row(self, layer_id, *, source_row, target_row):
        self.num_copies += 1
        if self.num_copies % 3 == 0:
            self.copy_tensor(self.weights_LRN[layer_id], source_row=source_row, target_row=target_row)
            raise OSError("the link is gone")
        super().copy_row(layer_id, source_row=source_row, target_row=target_row)


def require_permutation(swapper, bank, *, layouts):
    """Every expert has one row of its own; hot rows are full but for the spare."""
    for layer_id, layout in enumerate(layouts):
        row_map = swapper.row_map(layer_id)
        assert list(row_map) == bank.row_map_LE[layer_id].tolist()
        assert NUM_EXPERTS == len(set(row_map))
        spare_row, num_hot = swapper.spare_row(layer_id), len(swapper.hot_experts(layer_id))
        assert spare_row not in row_map
        assert NUM_HOT + (spare_row is None) == num_hot
        assert set(range(layout.first_cold)) == {row for row in row_map if row < layout.first_cold} | (
            set() if spare_row is None else {spare_row}
        )


def request_swaps(swapper, *, random):
    """One random swap in every layer that is free."""
    for layer_id in sorted(set(range(NUM_LAYERS)) - swapper.busy()):
        hot = swapper.hot_experts(layer_id)
        expert_in = random.choice([expert for expert in range(NUM_EXPERTS) if expert not in hot])
        assert swapper.request(layer_id, expert_in=expert_in, expert_out=random.choice(sorted(hot)))


def run_swaps(bank, *, layouts, num_swaps, side_streams=1, max_steps=100_000):
    """Drive swaps between the readers' steps until so many are done; returns swapper, readers, failures seen."""
    swapper, readers, random = Swapper(bank, layouts=layouts, side_streams=side_streams), Readers(bank), Random(0)
    num_done, num_failed = 0, 0
    for _ in range(max_steps):
        if num_done < num_swaps:
            request_swaps(swapper, random=random)
        result = swapper.tick()
        num_done, num_failed = num_done + len(result.published), num_failed + len(result.failed)
        require_permutation(swapper, bank, layouts=layouts)
        readers.step()
        if readers.wrong or (swapper.is_idle() and num_done >= num_swaps):
            break
    readers.close()
    return swapper, readers, num_done, num_failed


@pytest.mark.parametrize(("place", "side_streams"), [(exclusive, 1), (exclusive, 2), (inclusive, 1)])
def test_readers_never_see_a_wrong_expert_during_ten_thousand_swaps(place, side_streams):
    layouts = [place(NUM_EXPERTS, hot=NUM_HOT) for _ in range(NUM_LAYERS)]
    bank = ThreadedBank(layouts)
    swapper, readers, num_done, num_failed = run_swaps(
        bank, layouts=layouts, num_swaps=10_000, side_streams=side_streams
    )
    bank.close()
    assert [] == readers.wrong
    assert 10_000 <= num_done
    assert (True, 0) == (swapper.is_idle(), num_failed)
    # Copies ran beside the steps: the test would mean nothing if they had always been over.
    assert 0 < readers.num_overlapping


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_readers_never_see_a_wrong_expert_while_copies_fail(place):
    layouts = [place(NUM_EXPERTS, hot=NUM_HOT) for _ in range(NUM_LAYERS)]
    bank = LosesEveryThirdCopy(layouts)
    _, readers, num_done, num_failed = run_swaps(bank, layouts=layouts, num_swaps=500)
    bank.close()
    assert [] == readers.wrong
    assert (True, True) == (500 <= num_done, 100 <= num_failed)


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_readers_catch_a_backend_that_publishes_before_its_copy_is_done(place):
    layouts = [place(NUM_EXPERTS, hot=NUM_HOT) for _ in range(NUM_LAYERS)]
    bank = PublishesTooEarly(layouts)
    _, readers, _, _ = run_swaps(bank, layouts=layouts, num_swaps=10, max_steps=20)
    bank.gate.set()
    bank.close()
    assert {"weights", "scales"} == {wrong.split()[0] for wrong in readers.wrong}


@pytest.mark.parametrize("place", [exclusive, inclusive])
def test_readers_catch_a_backend_that_publishes_a_row_before_all_its_tensors_are_copied(place):
    layouts = [place(NUM_EXPERTS, hot=NUM_HOT) for _ in range(NUM_LAYERS)]
    bank = PublishesBetweenTensors(layouts)
    _, readers, _, _ = run_swaps(bank, layouts=layouts, num_swaps=10, max_steps=1000)
    bank.close()
    assert {"scales"} == {wrong.split()[0] for wrong in readers.wrong}


def test_an_error_of_the_worker_is_the_error_of_its_event_alone():
    layouts = [exclusive(NUM_EXPERTS, hot=NUM_HOT)]
    bank = LosesEveryThirdCopy(layouts)
    bank.num_copies = 2
    events = []
    for _ in range(2):
        bank.copy("side", layer_id=0, source_row=4, target_row=2)
        events.append(bank.record("side"))
    bank.close()
    with pytest.raises(SwapError, match="the link is gone"):
        bank.query(events[0])
    assert bank.query(events[1])
