"""The numbers of `hotsplit top`: rates between changes, several ranks as one, and servers that come and go."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.metrics_server import snapshot, text_of
from hotsplit.cli.scrape import ScrapeError, parse
from hotsplit.cli.watch_rates import IDLE_AFTER_S, SPAN_S, Board
from hotsplit.cli.watching import Clock, frame_json, frames, one_frame

URL = "http://host:8000/metrics"
MIB = 2**20


def reading(*snapshots, started_s=None):
    head = "" if started_s is None else f"process_start_time_seconds {started_s}\n"
    return parse(head + text_of(*snapshots), url=URL)


def board_of(*readings):
    """A board that has seen (seconds, reading), or (seconds, None) where there was no answer."""
    board = Board(history=100)
    for at_s, one in readings:
        board.miss() if one is None else board.add(one, at_s=at_s)
    return board


def newest(board):
    ranks, together = board.past[-1]
    return together, ranks


def steps_at(*pairs, **changes):
    return [(at_s, reading(snapshot(steps=steps, **changes))) for at_s, steps in pairs]


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.s = 1000.0

    def clock(self):
        return Clock(steady=lambda: self.s, sleep=self.sleep, now=lambda: datetime.fromtimestamp(self.s, UTC))

    def sleep(self, seconds):
        assert seconds >= 0
        self.s += seconds


def server_like_vllm(time, *, steps_per_s=10.0, every_s=5.0, ranks=1, until_s=None):
    """A server whose ranks write every so often, whenever they are asked."""

    def ask():
        wrote_s = min(time.s, until_s or time.s) // every_s * every_s
        steps = int(steps_per_s * wrote_s)
        return reading(*(snapshot(rank, steps=steps) for rank in range(ranks)))

    return ask


def test_the_first_reading_has_totals_and_no_rates():
    figures, _ = newest(board_of(*steps_at((0, 100))))
    assert ("waiting", None, None, None) == (figures.state, figures.tokens_per_s, figures.hit_ratio, figures.span_s)
    assert (7, 2, 0, 0) == (figures.swaps.done, figures.swaps.refused, figures.swaps.failed, figures.update_failures)
    assert (2**30, 3 * 2**30, 2**30) == (figures.hot_bytes, figures.host_bytes, figures.budget_bytes)
    assert 0.1 == pytest.approx(figures.oracle_gap_ratio)


def test_the_first_change_has_ratios_and_no_rates_since_nobody_saw_the_one_before():
    figures, _ = newest(board_of(*steps_at((0, 100), (2, 150))))
    assert ("waiting", None) == (figures.state, figures.tokens_per_s)
    assert (0.75, 0.25, 3 * MIB) == (figures.hit_ratio, figures.byte_hit_ratio, figures.cold_bytes_per_step)


def test_rates_are_between_two_changes_and_repeated_readings_change_nothing():
    seen = steps_at((0, 100), (2, 150), (4, 150), (6, 150), (7, 200), (9, 200))
    figures, _ = newest(board_of(*seen))
    assert ("live", 5.0) == (figures.state, figures.span_s)
    assert 10.0 == figures.steps_per_s
    assert (20.0, 20.0, 0.0) == (figures.tokens_per_s, figures.decode_tokens_per_s, figures.prefill_tokens_per_s)
    assert 10_000.0 == figures.swap_bytes_per_s


def test_a_span_is_as_short_as_it_may_be():
    seen = steps_at(*((2 * i, 100 + 10 * i) for i in range(40)))
    figures, _ = newest(board_of(*seen))
    assert SPAN_S == figures.span_s
    assert 5.0 == figures.steps_per_s


def test_prefill_counts_as_hits_only_where_there_was_no_decode():
    before = snapshot(steps=100)
    after = snapshot(
        steps=101,
        tokens={"decode": 200, "prefill": 40},
        pairs={"decode": 1600, "prefill": 180},
        hit_pairs={"decode": 1200, "prefill": 60},
    )
    figures, _ = newest(board_of((0, reading(before)), (2, reading(after))))
    assert 0.2 == figures.hit_ratio


def test_a_rank_without_changes_is_idle_with_rates_of_zero():
    together, _ = newest(board_of(*steps_at((0, 100), (IDLE_AFTER_S - 1, 100))))
    assert ("waiting", None) == (together.state, together.tokens_per_s)
    seen = steps_at((0, 100), (2, 150), (7, 200), (7 + IDLE_AFTER_S, 200))
    together, _ = newest(board_of(*seen))
    assert ("idle", 0.0, 0.0) == (together.state, together.tokens_per_s, together.steps_per_s)
    assert 0.75 == together.hit_ratio


def test_after_a_rest_rates_begin_anew_and_do_not_count_it():
    seen = steps_at((0, 100), (5, 150), (10, 200), *((t, 200) for t in range(15, 600, 5)), (600, 230), (605, 280))
    board = board_of(*seen[:-1])
    assert ("waiting", None, 0.75) == tuple(
        getattr(newest(board)[0], n) for n in ("state", "tokens_per_s", "hit_ratio")
    )
    board.add(seen[-1][1], at_s=605)
    assert ("live", 10.0) == (newest(board)[0].state, newest(board)[0].steps_per_s)


def test_readings_far_apart_are_no_rest():
    together, _ = newest(board_of(*steps_at((0, 100), (60, 700), (120, 1300))))
    assert ("live", 10.0) == (together.state, together.steps_per_s)


def test_of_all_ranks_bytes_and_swaps_are_sums_and_tokens_are_those_of_one():
    def at(at_s, steps):
        return at_s, reading(*(snapshot(rank, steps=steps, update_seconds=0.001 * (rank + 1)) for rank in range(4)))

    together, ranks = newest(board_of(at(0, 100), at(5, 150), at(10, 200)))
    assert [0, 1, 2, 3] == list(ranks)
    assert 20.0 == together.tokens_per_s == ranks[3].tokens_per_s
    assert (12 * MIB, 4 * 2**30) == (together.cold_bytes_per_step, together.hot_bytes)
    assert (28, 8, 0) == (together.swaps.done, together.swaps.refused, together.swaps.failed)
    assert (0.75, 0.25) == (together.hit_ratio, together.byte_hit_ratio)
    assert 0.004 == together.update_seconds
    assert 40_000.0 == together.swap_bytes_per_s


def test_ranks_that_weigh_differently_are_not_averaged():
    def at(at_s, steps):
        busy = snapshot(0, steps=steps, touched_hot_bytes=9 * MIB * steps, touched_cold_bytes=MIB * steps)
        return at_s, reading(busy, snapshot(1, steps=steps))

    together, ranks = newest(board_of(at(0, 100), at(5, 150)))
    assert (0.9, 0.25) == (ranks[0].byte_hit_ratio, ranks[1].byte_hit_ratio)
    assert 10 / 14 == pytest.approx(together.byte_hit_ratio)


def test_what_slots_kept_is_a_share_of_all_that_was_touched():
    def at(at_s, steps):
        some = snapshot(0, steps=steps, kept_bytes=2 * MIB * steps, kept_ratio_window=0.5)
        return at_s, reading(some, snapshot(1, steps=steps, kept_ratio_window=0.25))

    together, ranks = newest(board_of(at(0, 100), at(5, 150)))
    assert (0.5, 0.0, 0.25) == (ranks[0].kept_ratio, ranks[1].kept_ratio, together.kept_ratio)
    assert (0.5, 0.375) == (ranks[0].kept_ratio_window, together.kept_ratio_window)


def test_a_server_that_does_not_tell_what_slots_kept_has_none():
    def at(at_s, steps):
        lines = [line for line in text_of(snapshot(0, steps=steps)).splitlines() if "kept" not in line]
        return at_s, parse("\n".join([*lines, ""]), url=URL)

    together, _ = newest(board_of(at(0, 100), at(5, 150)))
    assert (0.25, None, None) == (together.byte_hit_ratio, together.kept_ratio, together.kept_ratio_window)
    assert not together.has_slots


def test_a_sum_of_some_ranks_is_no_sum():
    def at(at_s, steps):
        return at_s, parse(text_of(snapshot(0, steps=steps)) + f'hotsplit_steps_total{{rank="1"}} {steps}\n', url=URL)

    together, ranks = newest(board_of(at(0, 100), at(5, 150), at(10, 200)))
    assert (None, None) == (together.hot_bytes, together.cold_bytes_per_step)
    assert 3 * MIB == ranks[0].cold_bytes_per_step
    assert 10.0 == together.steps_per_s == ranks[1].steps_per_s


def test_a_restart_is_seen_by_counters_that_fall_and_gives_no_negative_rate():
    seen = steps_at((0, 100), (5, 150), (10, 200), (15, 20))
    board = board_of(*seen)
    together, _ = newest(board)
    assert (1, "waiting", None, None) == (board.num_restarts, together.state, together.tokens_per_s, together.hit_ratio)
    for at_s, one in steps_at((20, 70), (25, 120)):
        board.add(one, at_s=at_s)
    assert 20.0 == newest(board)[0].tokens_per_s


def test_a_restart_is_seen_by_the_start_time_though_counters_have_grown():
    first = [(at_s, reading(snapshot(steps=steps), started_s=1)) for at_s, steps in ((0, 100), (5, 150), (10, 200))]
    board = board_of(*first, (11, None), (90, reading(snapshot(steps=900), started_s=77)))
    together, _ = newest(board)
    assert (1, "waiting", None) == (board.num_restarts, together.state, together.hit_ratio)


def test_what_changed_while_nobody_looked_has_no_rate():
    seen = [*steps_at((0, 100), (5, 150), (10, 200)), (12, None), *steps_at((60, 700))]
    together, _ = newest(board_of(*seen))
    assert ("waiting", None) == (together.state, together.tokens_per_s)


def test_a_late_rank_waits_while_others_live_and_a_rank_that_goes_is_left_out():
    def at(at_s, *ranks):
        return at_s, reading(*(snapshot(rank, steps=100 + 10 * at_s) for rank in ranks))

    board = board_of(at(0, 0), at(5, 0), at(10, 0, 2))
    together, ranks = newest(board)
    assert ("live", "waiting", "waiting") == (ranks[0].state, ranks[2].state, together.state)
    board.add(at(15, 0)[1], at_s=15)
    together, ranks = newest(board)
    assert ("live", "gone", 2**30) == (together.state, ranks[2].state, together.hot_bytes)
    board.add(at(20, 0, 2)[1], at_s=20)
    assert "waiting" == newest(board)[1][2].state


@settings(max_examples=25)
@given(st.floats(0.1, 30), st.floats(0.5, 6), st.floats(0.5, 200))
def test_rates_are_right_to_the_share_that_an_interval_is_of_the_span(every_s, interval_s, steps_per_s):
    time, found = FakeTime(), []
    ask = server_like_vllm(time, steps_per_s=steps_per_s, every_s=every_s)
    for frame in frames(ask, url=URL, every_s=interval_s, history=1, clock=time.clock()):
        if frame.all.state == "live":
            found.append(frame.all)
        if time.s > 1100:
            break
    # A change is seen up to an interval late, and steps are whole.
    for figures in found:
        assert abs(figures.steps_per_s - steps_per_s) * figures.span_s <= steps_per_s * interval_s + 1.01


def test_frames_come_at_even_intervals_however_long_an_answer_takes():
    time, asked = FakeTime(), []

    def ask():
        asked.append(time.s)
        time.s += 0.5 if len(asked) != 3 else 7
        return reading(snapshot(steps=len(asked)))

    for frame in frames(ask, url=URL, every_s=2, history=10, clock=time.clock()):
        if frame.num_readings == 5:
            break
    assert [0, 2, 4, 11, 13] == [at_s - 1000 for at_s in asked]


def in_turn(*answers):
    """Asks one after the other."""
    rest = iter(answers)

    def ask():
        return next(rest)()

    return ask


def lost(message="connection refused", *, is_final=False):
    raise ScrapeError(URL, got=message, is_final=is_final)


def test_a_server_that_goes_and_comes_back_is_shown_all_the_while():
    time = FakeTime()
    script = iter([100, None, None, 10])

    def ask():
        steps = next(script)
        return lost() if steps is None else reading(snapshot(steps=steps))

    seen = []
    for frame in frames(ask, url=URL, every_s=2, history=10, clock=time.clock()):
        seen.append(frame)
        if len(seen) == 4:
            break
    assert ["", f"{URL}: got connection refused", f"{URL}: got connection refused", ""] == [one.error for one in seen]
    assert [0, 2, 4, 0] == [one.age_s for one in seen]
    assert 7 == seen[1].all.swaps.done
    assert ([], None) == (frame_json(seen[1])["ranks"], frame_json(seen[1])["all"])
    assert 1 == seen[3].num_restarts
    assert ("restarted while watched: 1x",) == seen[3].notes


def test_what_can_never_work_ends_the_watch_at_once_and_only_at_first():
    with pytest.raises(ScrapeError, match="401"):
        next(frames(lambda: lost("401", is_final=True), url=URL, every_s=1, history=1, clock=FakeTime().clock()))
    ask = in_turn(lambda: reading(snapshot()), lambda: lost("401", is_final=True))
    watched = frames(ask, url=URL, every_s=1, history=1, clock=FakeTime().clock())
    assert ["", f"{URL}: got 401"] == [next(watched).error for _ in range(2)]


def test_a_server_that_is_not_up_yet_is_waited_for():
    frame = next(frames(lost, url=URL, every_s=1, history=1, clock=FakeTime().clock()))
    assert ({}, None, f"{URL}: got connection refused") == (frame.ranks, frame.all, frame.error)


def test_once_waits_for_two_changes_and_is_right():
    time = FakeTime()
    frame = one_frame(server_like_vllm(time, ranks=2), url=URL, least_s=2, clock=time.clock())
    assert 10.0 == pytest.approx(frame.all.steps_per_s, rel=0.1)
    assert time.s - 1000 <= 11


def test_once_takes_at_least_its_interval():
    time = FakeTime()
    frame = one_frame(server_like_vllm(time), url=URL, least_s=14, clock=time.clock())
    assert 15.0 == pytest.approx(frame.all.span_s, abs=0.5)


def test_once_ends_at_an_idle_server_and_at_one_that_never_settles():
    time = FakeTime()
    frame = one_frame(server_like_vllm(time, until_s=1000), url=URL, least_s=2, clock=time.clock())
    assert ("idle", 0.0, 1000 + IDLE_AFTER_S) == (frame.all.state, frame.all.tokens_per_s, time.s)
    restless = iter(range(10**6))

    def ask():
        return reading(snapshot(steps=next(restless) % 2))

    time = FakeTime()
    assert "waiting" == one_frame(ask, url=URL, least_s=2, clock=time.clock()).all.state
    assert time.s < 1060


def test_once_fails_with_the_reason_also_in_the_middle():
    ask = in_turn(lambda: reading(snapshot()), lost)
    with pytest.raises(ScrapeError, match="connection refused"):
        one_frame(ask, url=URL, least_s=2, clock=FakeTime().clock())


def notes_of(*snapshots):
    ask = lambda: reading(*snapshots)  # noqa: E731
    return next(frames(ask, url=URL, every_s=1, history=1, clock=FakeTime().clock())).notes


def test_what_is_odd_is_noted_by_rank():
    assert () == notes_of(snapshot(0), snapshot(1))
    assert ("rank 1: never in an answer, though a later one is",) == notes_of(snapshot(0), snapshot(2))
    assert ("the ranks show different plans",) == notes_of(snapshot(0), snapshot(1, plan_hash="cd34"))
    assert ("ranks 0, 1: failed updates; the server's log says why",) == notes_of(
        snapshot(0, update_failures=1), snapshot(1, update_failures=2)
    )
    assert ("rank 0: failed swaps; the server's log says why",) == notes_of(snapshot(0, swaps_failed=1))


def test_a_note_names_no_more_ranks_than_a_line_holds():
    (note,) = notes_of(snapshot(100_000))
    assert note.startswith("ranks 0, 1, 2, ")
    assert note.endswith("15 and 99984 more: never in an answer, though a later one is")
