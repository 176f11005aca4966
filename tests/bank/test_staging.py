"""Slots: which row has to go, by a sum over all of its uses; and copies out of them beside the thread that runs the steps."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bank.toy_source import same, toy_source
from hotsplit.bank import staging as module
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.cold_choice import slot_needs
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.staging import HALF_LIFE, Staging

BLOCK = 4096


def slots_of(number, *, turns=1):
    return Staging(None, num_slots=number, slot_bytes=BLOCK, turns=turns)


def use(staging, key, *, turn):
    """Ask for a row as the cold path does; whether it was there."""
    if staging.find(key, turn=turn) is not None:
        return True
    slot = staging.take(key, turn=turn)
    if slot is not None:
        slot.is_reading = False
    return False


@given(
    uses=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True), max_size=60),
    number=st.integers(3, 6),
    turns=st.integers(1, 3),
)
@settings(deadline=None)
def test_the_row_whose_faded_uses_sum_up_to_least_goes(uses, number, turns):
    staging, kept, history = slots_of(number, turns=turns), set(), {}
    for turn, experts in enumerate(uses):
        for expert in experts:
            was_there = use(staging, (0, expert), turn=turn)
            assert was_there == (expert in kept)
            history.setdefault(expert, []).append(turn)
            if not was_there and len(kept) == number:
                worth = {
                    one: sum(0.5 ** ((turn - at) / (HALF_LIFE * turns)) for at in history[one])
                    for one in kept
                    if history[one][-1] != turn
                }
                least = min(worth.values())
                gone = [one for one in kept if (0, one) not in staging._slots]
                assert 1 == len(gone)
                assert worth[gone[0]] == pytest.approx(least)
                kept -= set(gone)
            kept.add(expert)
    staging.close()


def test_what_comes_again_and_again_outlasts_what_came_last():
    staging = slots_of(2)
    for turn in range(4):
        use(staging, (0, 0), turn=turn)
    use(staging, (0, 1), turn=4)
    use(staging, (0, 2), turn=5)
    assert use(staging, (0, 0), turn=6), "by its last use alone it had to go"
    assert not use(staging, (0, 1), turn=7)


def test_uses_count_from_before_a_row_had_its_slot():
    staging = slots_of(1)
    for turn in range(6):
        use(staging, (0, turn % 2), turn=turn)
    wants = staging._wants
    assert wants[0, 1] > wants[0, 0] > 4 / HALF_LIFE, "three uses each, the latter one turn later"


@pytest.mark.parametrize(("turns", "gone"), [(1, 0), (3, 1)])
def test_uses_fade_with_tokens_of_which_each_takes_a_turn_per_layer(turns, gone):
    staging = slots_of(2, turns=turns)
    for turn, expert in ((0, 0), (1, 0), (4 * HALF_LIFE // 3, 1), (4 * HALF_LIFE // 3 + 1, 2)):
        use(staging, (0, expert), turn=turn)
    assert (0, gone) not in staging._slots


def test_very_many_turns_neither_overflow_nor_forget_the_order():
    staging = slots_of(2)
    for turn in (0, 10**6, 10**9, 10**12):
        use(staging, (0, 0), turn=turn)
        use(staging, (0, 1), turn=turn + HALF_LIFE)
        use(staging, (0, 2), turn=turn + 2 * HALF_LIFE)
        assert (0, 0) not in staging._slots, "the one that came first, and has faded most"


def test_rows_in_use_and_under_way_keep_their_slots():
    staging = slots_of(2)
    use(staging, (0, 0), turn=0)
    assert staging.take((0, 1), turn=0).is_reading
    assert staging.take((0, 2), turn=0) is None, "the one is held, the other is being read"
    assert staging.take((0, 2), turn=1) is not None, "the held one may go in the next turn"
    assert staging.take((0, 3), turn=2) is None, "both are being read"


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """rows_of(is_split): rows with slots that are read directly, expert 0 hot, row 1 spare; and what all must hold."""
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)
    with contextlib.ExitStack() as stack:

        def build(*, is_split):
            source = toy_source(tmp_path, is_split=is_split)
            layers = place_layers(((0,), (0,)), num_experts=4, dynamic=True, inclusive=True)
            options = RowsOptions(is_direct=True, slots=3, slot_bytes=slot_needs(source).slot_bytes)
            rows = build_pointer_rows(source, hot=((0,), (0,)), layers=layers, options=options)
            stack.callback(rows.close)
            return rows, source

        yield build


class NoReader(DirectReader):
    """Of files that must not be read."""

    def __init__(self):
        super().__init__([])

    def read_into(self, target, *, file, offset):
        raise AssertionError("the files were read")


@pytest.mark.parametrize("is_split", [True, False])
def test_a_row_in_a_slot_is_copied_from_there_into_a_hot_one_and_the_files_are_not_read(rows_of, is_split):
    rows, source = rows_of(is_split=is_split)
    with pytest.raises(AssertionError, match="the files were read"):
        rows.fill(0, expert=3, row=1, reader=NoReader())
    first = rows.first_cold(0)
    rows.ask(0, [first + 3])
    list(rows.arrivals(0, [first + 3]))
    assert sum(span.num_bytes for span in source.spans(0, 3)) == rows.fill(0, expert=3, row=1, reader=NoReader())
    assert same(source.expected[0, 3], rows.tensors(0, 1))
    assert same(source.expected[0, 3], rows.tensors(0, first + 3)), "until the row map says so the cold one is used"


@pytest.mark.parametrize("is_split", [True, False])
def test_a_slot_that_another_row_takes_while_it_is_copied_from_is_no_copy(rows_of, is_split, monkeypatch):
    rows, source = rows_of(is_split=is_split)
    first = rows.first_cold(0)
    rows.ask(0, [first + 3])
    list(rows.arrivals(0, [first + 3]))
    move, main, has_moved = ctypes.memmove, threading.get_ident(), []

    def late(*arguments):
        result = move(*arguments)
        if not has_moved and threading.get_ident() == main:  # in the middle of the copy other rows take all three slots
            has_moved.append(True)
            for expert in (1, 2, 3):
                rows.ask(1, [first + expert])
                list(rows.arrivals(1, [first + expert]))
        return result

    monkeypatch.setattr(module.ctypes, "memmove", late)
    reader = DirectReader(source.files)
    rows.fill(0, expert=3, row=1, reader=reader)
    reader.close()
    assert (0, 3) not in rows._staging._slots
    assert same(source.expected[0, 3], rows.tensors(0, 1)), "read from the files instead"


def test_what_was_copied_to_a_hot_row_is_the_first_to_go(rows_of):
    rows, source = rows_of(is_split=False)
    first = rows.first_cold(0)
    for expert in (1, 3, 3, 3, 2):
        rows.ask(0, [first + expert])
        list(rows.arrivals(0, [first + expert]))
        rows.ask(1, [])
    rows.fill(0, expert=3, row=1, reader=NoReader())
    rows.ask(1, [first + 1])
    list(rows.arrivals(1, [first + 1]))
    staging = rows._staging
    assert [True, True, False] == [(0, expert) in staging._slots for expert in (1, 2, 3)]
    rows.ask(0, [first + 3])
    assert [first + 3] == list(rows.arrivals(0, [first + 3]))
    assert same(source.expected[0, 3], rows.tensors(0, first + 3)), "and who wants it as a cold one all the same has it"
    assert torch.isfinite(torch.tensor(staging._wants[0, 3]))
