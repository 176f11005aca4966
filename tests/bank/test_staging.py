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
from hotsplit.bank.cpu import CpuSwapBackend
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.route import Router
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


def in_slot(staging, source, expert, *, turn=0):
    """A row of layer 0 in a slot, as it is when its bytes are there and nobody has said yet whether they are whole."""
    slot = staging.take((0, expert), turn=turn)
    row = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in source.expected[0, expert].values()])
    pieces, start = [], row.data_ptr()
    for part in source.layouts[0].tensors:
        pieces.append((start, part.offset, part.num_bytes))
        start += part.num_bytes
    staging.copy(slot, pieces, layout=source.layouts[0])
    return slot


def copied(staging, source, expert):
    """Whether a row is copied out, and what came of it."""
    layout = source.layouts[0]
    target = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    is_whole = staging.copy_out((0, expert), layout=layout, address=target.data_ptr())
    parts = {part.name: target[part.offset : part.offset + part.num_bytes] for part in layout.tensors}
    return is_whole, {part.name: parts[part.name].view(part.dtype).view(part.shape) for part in layout.tensors}


def test_bytes_that_nobody_has_vouched_for_yet_are_not_copied_out(tmp_path):
    source, staging = toy_source(tmp_path), slots_of(2)
    assert (False, 0) == (copied(staging, source, 1)[0], len(staging._slots))
    slot = in_slot(staging, source, 1)
    assert not copied(staging, source, 1)[0], "a page of it may have been lost, and the slot then holds zeros"
    slot.is_reading = False
    is_whole, tensors = copied(staging, source, 1)
    assert is_whole
    assert same(source.expected[0, 1], tensors)


def test_a_slot_that_an_interrupt_has_left_between_two_rows_has_nothing_of_the_old_one(tmp_path):
    source, staging = toy_source(tmp_path), slots_of(1)
    in_slot(staging, source, 1).is_reading = False
    del staging._slots[0, 1]  # drop() was cut off here
    slot = staging.take((0, 2), turn=5)
    slot.is_reading = False
    assert slot.tensors is None
    assert not copied(staging, source, 2)[0]


def test_the_same_row_read_anew_while_it_is_copied_is_no_copy(tmp_path, monkeypatch):
    source, staging = toy_source(tmp_path), slots_of(1)
    in_slot(staging, source, 1).is_reading = False
    move, has_moved = ctypes.memmove, []

    def late(*arguments):
        move(*arguments)
        if not has_moved:
            has_moved.append(True)
            staging.drop((0, 1))
            in_slot(staging, source, 1).is_reading = False

    monkeypatch.setattr(module.ctypes, "memmove", late)
    assert not copied(staging, source, 1)[0]
    assert copied(staging, source, 1)[0]


def test_copies_beside_steps_that_take_the_slots_are_whole_or_none(tmp_path):
    source, staging, has_ended = toy_source(tmp_path, num_experts=8), slots_of(2), threading.Event()

    def steps():
        for turn in range(3000):
            if staging.find((0, turn * 5 % 8), turn=turn) is None:
                in_slot(staging, source, turn * 5 % 8, turn=turn).is_reading = False
        has_ended.set()

    stepping = threading.Thread(target=steps)
    stepping.start()
    num_whole, expert = 0, 0
    while not has_ended.is_set():
        expert = (expert + 3) % 8
        is_whole, tensors = copied(staging, source, expert)
        num_whole += is_whole
        assert not is_whole or same(source.expected[0, expert], tensors)
    stepping.join()
    assert num_whole


def test_an_expert_that_has_become_hot_gives_its_slot_up(rows_of):
    rows, source = rows_of(is_split=False)
    layers = place_layers(((0,), (0,)), num_experts=4, dynamic=True, inclusive=True)
    router = Router(layers, row_bytes=[layout.num_bytes for layout in source.layouts])
    backend, first = CpuSwapBackend(rows, router=router, files=source.files), rows.first_cold(0)
    rows.ask(0, [first + 3])
    list(rows.arrivals(0, [first + 3]))
    backend.copy("side", layer_id=0, source_row=first + 3, target_row=1)
    backend.record("side").result()
    assert (0, 3) in rows._staging._slots, "a step between may still want it there"
    backend.publish(0, expert=3, row=1)
    assert (0, 3) not in rows._staging._slots
    backend.publish(0, expert=0, row=first)
    rows.ask(0, [first + 3, first])
    assert {first, first + 3} == set(rows.arrivals(0, [first + 3, first]))
    assert same(source.expected[0, 3], rows.tensors(0, first + 3)), "who wants it as a cold one all the same has it"
    backend.close()


def test_rows_of_one_call_do_not_take_each_others_slots(rows_of):
    rows, _ = rows_of(is_split=False)
    first = rows.first_cold(0)
    for expert in (1, 2, 3):
        rows.ask(0, [first + expert])
        list(rows.arrivals(0, [first + expert]))
    rows.ask(0, [first, first + 1, first + 2, first + 3])
    assert 3 == rows.cold_counts.kept_rows
    list(rows.arrivals(0, [first, first + 1, first + 2, first + 3]))


def test_a_close_by_another_thread_while_a_slot_is_taken_finds_none():
    staging = slots_of(1)

    class Closing(list):
        def __bool__(self):
            there = len(self) > 0
            staging.close()
            return there

    staging._free = Closing(staging._free)
    assert staging.take((0, 0), turn=1) is None
    assert staging.take((0, 0), turn=1) is None
