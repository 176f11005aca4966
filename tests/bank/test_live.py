"""The live loop: windows, the update line at its cadence, and what becomes of swaps that are published, refused or failed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotsplit.bank.live import Live
from hotsplit.bank.route import Router
from hotsplit.bank.rows import place
from hotsplit.bank.swap import TickResult
from hotsplit.errors import BankError, SwapError
from hotsplit.metrics import UpdateLine
from hotsplit.plan.counters import window_between
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer, Swap
from hotsplit.plan.steering import make_policy

E, ROW_BYTES = 4, (100, 1000)


class Swapper:
    """Does as it is told: what the next ticks report, which layers are busy, whether it takes requests."""

    def __init__(self):
        self.results, self.busy_layers, self.takes, self.asked = [], frozenset(), True, []

    def tick(self):
        return self.results.pop(0) if self.results else TickResult()

    def busy(self):
        return self.busy_layers

    def request(self, layer_id, *, expert_in, expert_out):
        self.asked.append(Swap(layer_id=layer_id, expert_in=expert_in, expert_out=expert_out))
        return self.takes


def live_of(*, dyn_steps=2, shares=None, hot=((0, 1), (2, 3)), rank=0):
    layers = [place(experts, num_experts=E, spare=True, inclusive=True) for experts in hot]
    router = Router(layers, row_bytes=ROW_BYTES)
    live = Live(router, plan_shares=shares, row_bytes=ROW_BYTES, dyn_steps=dyn_steps, rank=rank)
    return live, router


def adapt(live, router, **options):
    swapper = Swapper()
    chosen = RebalanceOptions(**({"margin": 1.0, "half_life": 1.0} | options))
    live.adapt(swapper, rebalancer=Rebalancer(hot=router.hot_mask(), prior=None, top_k=1, options=chosen))
    return swapper


def step(live, router, *ids, phase="decode"):
    """One engine step as an engine drives it: tick, then the layers."""
    live.tick()
    for layer_id, layer_ids in enumerate(ids):
        router.route(layer_id, torch.tensor(layer_ids), is_padding=None, phase=phase, step=router.counters.steps + 1)


def lines(caplog):
    return [UpdateLine.parse(message) for message in caplog.messages if message.startswith("hotsplit update=")]


@pytest.fixture(autouse=True)
def listen(caplog):
    caplog.set_level("INFO", logger="hotsplit")


def test_one_line_is_logged_every_so_many_steps_and_none_between(caplog):
    live, router = live_of(dyn_steps=3)
    for _ in range(10):
        step(live, router, [[0]], [[2]])
    assert [(1, 3), (2, 6), (3, 9)] == [(line.update, line.step) for line in lines(caplog)]
    assert 3 == live.num_updates


def test_ticks_without_a_step_do_not_update_again(caplog):
    live, router = live_of(dyn_steps=1)
    step(live, router, [[0]], [[2]])
    for _ in range(5):
        live.tick()
    assert 1 == len(lines(caplog))


def test_the_line_says_what_the_window_was(caplog):
    live, router = live_of(dyn_steps=2, shares=np.full((2, E), 0.25), rank=3)
    step(live, router, [[0], [0]], [[2], [0]])
    step(live, router, [[3]], [[0]])
    live.tick()
    (line,) = lines(caplog)
    # 6 pairs: expert 0, 0, 3 in layer 0 (0 is hot), 2, 0, 0 in layer 1 (2 is hot): 3 hits.
    # Touched per step, layer by layer: 100 hot; 1000 hot + 1000 cold; 100 cold; 1000 cold.
    # The best two experts of each layer serve all; shares 2/3, 1/3 against 1/4 each are 1/2 apart.
    assert (1, 2, 3, 0.5, 0.5) == (line.update, line.step, line.tokens, line.hit, line.drift)
    assert round(1100 / 3200, 3) == line.byte_hit
    assert (1.0, 0, 0, 0, 0.0, 3) == (
        line.oracle,
        line.swaps,
        line.refused,
        line.failed,
        line.moved_mib,
        line.rank,
    )
    assert line.cost_ms >= 0


def test_windows_do_not_overlap(caplog):
    live, router = live_of(dyn_steps=1)
    step(live, router, [[0]], [[2]])
    step(live, router, [[3]], [[0]])
    step(live, router, [[0]], [[0]])
    live.tick()
    assert [1.0, 0.0, 0.5] == [line.hit for line in lines(caplog)]
    assert [1, 2, 3] == [line.tokens for line in lines(caplog)]


def test_without_a_plans_shares_there_is_no_drift(caplog):
    live, router = live_of(dyn_steps=1)
    step(live, router, [[0]], [[2]])
    live.tick()
    assert lines(caplog)[0].drift is None


def test_a_window_is_of_decode_where_there_was_any():
    live, router = live_of(dyn_steps=9)
    step(live, router, [[0], [0], [0]], [[2], [2], [2]], phase="prefill")
    step(live, router, [[3]], [[0]])
    live.tick()
    window = live.window()
    assert ("decode", 1, 0.0) == (window.phase, window.tokens, window.hit_ratio)
    assert [[0, 0, 0, 1], [1, 0, 0, 0]] == window.counts.tolist()


def test_a_window_without_decode_is_of_prefill():
    live, router = live_of(dyn_steps=9)
    step(live, router, [[0], [3]], [[2], [2]], phase="prefill")
    live.tick()
    window = live.window()
    assert ("prefill", 2, 0.75) == (window.phase, window.tokens, window.hit_ratio)


def test_an_empty_window_has_no_rates():
    live, router = live_of()
    window = live.window()
    assert (0, None, None) == (window.tokens, window.hit_ratio, window.byte_hit_ratio)
    assert window_between(router.counters, router.counters).counts.sum() == 0


def test_swaps_are_asked_for_when_an_update_is_due_and_not_before():
    live, router = live_of(dyn_steps=2)
    swapper = adapt(live, router)
    step(live, router, [[3]], [[2]])
    step(live, router, [[3]], [[2]])
    assert [] == swapper.asked
    live.tick()
    assert [Swap(layer_id=0, expert_in=3, expert_out=0)] == swapper.asked


def test_static_mode_updates_without_swaps(caplog):
    live, router = live_of(dyn_steps=1)
    step(live, router, [[3]], [[0]])
    live.tick()
    assert (0, 0, 0) == (lines(caplog)[0].swaps, lines(caplog)[0].refused, lines(caplog)[0].failed)


def test_dynamic_live_counts_fade_with_the_half_life():
    live, router = live_of(dyn_steps=1)
    adapt(live, router, half_life=1.0)
    step(live, router, [[3]], [[0]])
    step(live, router, [[1]], [[0]])
    live.tick()
    assert [[0, 1, 0, 0.5], [1.5, 0, 0, 0]] == live.learned().counts.tolist()


def test_a_busy_layer_is_refused_and_counted_without_being_asked(caplog):
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)
    swapper.busy_layers = frozenset({0})
    step(live, router, [[3]], [[0]])
    live.tick()
    assert [1] == [swap.layer_id for swap in swapper.asked]
    assert (1, 1) == (live.swaps.refused, lines(caplog)[0].refused)


def test_a_request_that_the_swapper_refuses_is_counted():
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)
    swapper.takes = False
    step(live, router, [[3]], [[0]])
    live.tick()
    assert (2, 0) == (live.swaps.refused, live.swaps.done)


def test_a_published_swap_is_counted_with_its_layers_bytes_and_followed(caplog):
    live, router = live_of(dyn_steps=2)
    swapper = adapt(live, router)
    swap = Swap(layer_id=1, expert_in=0, expert_out=2)
    swapper.results = [TickResult(published=(swap,))]
    router.publish(1, expert=0, row=2)
    router.publish(1, expert=2, row=5)
    live.tick()
    assert (1, ROW_BYTES[1]) == (live.swaps.done, live.swaps.moved_bytes)
    for _ in range(2):
        step(live, router, [[0]], [[0]])
    live.tick()
    # The rebalancer has followed: expert 0 of layer 1 is hot and asks for nothing.
    assert [] == [asked for asked in swapper.asked if asked.layer_id == 1]
    assert (1, round(ROW_BYTES[1] / 2**20, 1)) == (lines(caplog)[0].swaps, lines(caplog)[0].moved_mib)


def failed(layer_id=0, reason="disk on fire"):
    return TickResult(failed=((Swap(layer_id=layer_id, expert_in=3, expert_out=0), reason),))


def play_failing_updates(live, router, swapper, number):
    for _ in range(number):
        step(live, router, [[3]], [[2]])
        swapper.results = [failed()]
        live.tick()


def test_the_third_failed_update_in_a_row_stops_the_run_with_the_reason():
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)
    play_failing_updates(live, router, swapper, 2)
    assert (2, 2) == (live.update_failures, live.swaps.failed)
    with pytest.raises(BankError, match="3 updates in a row failed: got disk on fire; .*HOTSPLIT_DYNAMIC=0"):
        play_failing_updates(live, router, swapper, 1)


def test_a_swap_that_goes_through_in_between_forgives():
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)
    there_and_back = [(3, 0), (0, 3)]
    for i in range(4):
        play_failing_updates(live, router, swapper, 2)
        expert_in, expert_out = there_and_back[i % 2]
        swapper.results = [TickResult(published=(Swap(layer_id=0, expert_in=expert_in, expert_out=expert_out),))]
        for _ in range(2):
            step(live, router, [[3]], [[2]])
            live.tick()
    assert 8 == live.update_failures


def test_an_update_that_only_finds_layers_busy_with_a_failing_copy_does_not_forgive():
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)

    def fail_slowly():
        for _ in range(3):
            for busy in (frozenset(), frozenset({0, 1})):  # a disk that takes two updates' time to fail
                swapper.busy_layers = busy
                step(live, router, [[3]], [[0]])
                live.tick()
            swapper.results = [failed()]
            live.tick()

    with pytest.raises(BankError, match="3 updates in a row failed"):
        fail_slowly()


def test_an_update_fails_once_however_many_of_its_swaps_do(caplog):
    live, router = live_of(dyn_steps=5)
    swapper = adapt(live, router)
    swapper.results = [failed(0), failed(1), failed(0, "again"), failed(1)]
    for _ in range(6):
        step(live, router, [[3]], [[2]])
    assert (1, 4) == (live.update_failures, live.swaps.failed)
    assert 4 == lines(caplog)[0].failed
    assert 4 == sum("failed: " in message and "swap of expert 3" in message for message in caplog.messages)


def test_observers_are_told_of_every_update_after_it_was_reported():
    live, router = live_of(dyn_steps=1)
    told = []
    live.on_update.append(lambda update: told.append((update.line.update, live.window().tokens)))
    step(live, router, [[0]], [[2]])
    step(live, router, [[0]], [[2]])
    live.tick()
    assert [(1, 0), (2, 0)] == told


def test_an_update_tells_what_its_ticks_cost():
    live, router = live_of(dyn_steps=1)
    step(live, router, [[0]], [[2]])
    live.tick()
    assert live.last.line.cost_ms > 0


def test_what_was_saved_is_not_told_again_and_earlier_counts_fade_by_the_updates_since():
    live, router = live_of(dyn_steps=1)
    adapt(live, router)
    step(live, router, [[3]], [[0]])
    live.tick()
    live.learned_saved(live.learned())
    assert (0, 0.0, 1.0) == (live.learned().tokens, live.learned().counts.sum(), live.learned().decay)
    for _ in range(3):
        step(live, router, [[3]], [[0]])
        live.tick()
    learned = live.learned()
    decay = learned.decay ** (1 / 3)
    assert 3 == learned.tokens
    assert learned.counts[0, 3] == pytest.approx(1 + decay + decay**2)


def test_what_comes_between_telling_and_saving_is_told_the_next_time_and_what_was_told_is_not():
    live, router = live_of(dyn_steps=2)
    adapt(live, router)
    step(live, router, [[3]], [[0]])
    live.tick()
    told = live.learned()
    for _ in range(4):
        step(live, router, [[3]], [[0]])
        live.tick()
    live.learned_saved(told)
    # Windows of 2, 2 and 1 steps weigh 1/2, 1 and 1 by now; of the step that was told the file keeps 1/4.
    learned = live.learned()
    assert (4, 0.25) == (learned.tokens, learned.decay)
    assert 0.5 * 2 + 2 + 1 - 0.25 * 1 == learned.counts[0, 3]
    live.learned_saved(learned)
    assert (0, 0.0) == (live.learned().tokens, live.learned().counts.sum())


def test_prefill_does_not_steer_once_there_is_decode():
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)
    step(live, router, [[0]], [[2]])
    live.tick()
    swapper.asked.clear()
    for _ in range(5):
        step(live, router, [[3]] * 50, [[0]] * 50, phase="prefill")
        live.tick()
    assert [] == swapper.asked


def test_a_rebalance_that_fails_is_logged_and_counted_and_the_third_in_a_row_stops_the_run(caplog):
    live, router = live_of(dyn_steps=1)
    swapper = adapt(live, router)

    def fail(*args, **kwargs):
        raise SwapError("layer 0 has no spare row")

    swapper.request = fail
    for _ in range(3):
        step(live, router, [[3]], [[0]])
    assert 2 == live.update_failures
    assert any("update 1 failed: layer 0 has no spare row" in message for message in caplog.messages)
    with pytest.raises(BankError, match="3 updates in a row failed: got layer 0 has no spare row"):
        live.tick()


def adaptive_live(*, shares):
    """A live loop with the adaptive schedule: lines every 30 steps, looks every ten."""
    live, router = live_of(dyn_steps=30, shares=shares)
    swapper = Swapper()
    policy = make_policy(
        hot=router.hot_mask(),
        prior=shares,
        top_k=1,
        options=RebalanceOptions(schedule="adaptive"),
        row_bytes=ROW_BYTES,
    )
    live.adapt(swapper, rebalancer=policy)
    return live, router, swapper


def test_the_adaptive_schedule_looks_between_updates_and_lines_stay_as_far_apart(caplog):
    live, router, swapper = adaptive_live(shares=None)
    for _ in range(11):
        step(live, router, [[3]], [[0]])
    assert {(0, 3), (1, 0)} == {(swap.layer_id, swap.expert_in) for swap in swapper.asked}
    assert [] == lines(caplog)
    for _ in range(20):
        step(live, router, [[3]], [[0]])
    assert [(1, 30)] == [(line.update, line.step) for line in lines(caplog)]


def test_a_shift_of_the_traffic_is_logged_counted_and_told_in_the_next_line_alone(caplog):
    expected = np.array([[0.45, 0.45, 0.05, 0.05], [0.05, 0.05, 0.45, 0.45]])
    live, router, _ = adaptive_live(shares=expected)
    for _ in range(91):
        step(live, router, [[3]], [[0]])
    assert 1 == live.num_shifts
    # The recent memory says something after 40 steps, its half-life.
    assert ["the traffic has shifted at step 40: settling"] == [text for text in caplog.messages if "shifted" in text]
    assert [0, 1, 0] == [line.shifts for line in lines(caplog)]


def test_a_busy_layer_of_the_adaptive_schedule_is_asked_for_nothing_and_nothing_is_refused():
    live, router, swapper = adaptive_live(shares=None)
    swapper.busy_layers = frozenset({0})
    for _ in range(11):
        step(live, router, [[3]], [[0]])
    assert ([1], 0) == ([swap.layer_id for swap in swapper.asked], live.swaps.refused)
