"""The cold path: whatever is asked for, in any order, late or failing, is the expert's own bytes or a clear error."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bank.toy_source import same, toy_source
from hotsplit.bank import workers
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.cold_choice import slot_needs
from hotsplit.bank.direct import DirectFiles, DirectReader
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.staging import Staging
from hotsplit.errors import BankError
from patience import LIMIT_S

E = 6


class DiskError(BankError):
    """What the tests let a read fail with."""


WAYS = {
    "page cache": {"slots": 0},
    "put together": {"slots": 4},
    "direct": {"slots": 4, "is_direct": True},
    "one slot": {"slots": 1, "is_direct": True},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}
    for gap, is_split in ((3, True), (64, False)):
        folder = tmp_path_factory.mktemp("toy")
        made[is_split] = toy_source(folder, num_experts=E, gap=gap, is_split=is_split)
    return made


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def absent(monkeypatch):
    """Nothing is ever found in the page cache, so that every row is read."""
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)


def build(source, *, hot=((), ()), **options):
    layers = place_layers(hot, num_experts=source.num_experts, dynamic=True, inclusive=True)
    options = RowsOptions(slot_bytes=slot_needs(source).slot_bytes, threads=2, **options)
    return build_pointer_rows(source, hot=hot, layers=layers, options=options), layers


def slowly(patch, *, until=None, failing=(), dice=None):
    """Reads wait for an event or for a moment, and some of them fail."""
    numbers = itertools.count()

    def around(real):
        def read(*arguments):
            if until is not None:
                until.wait(LIMIT_S)
            elif dice is not None:
                time.sleep(dice.random() / 2000)
            if next(numbers) in failing:
                raise DiskError("cannot read the disk", got="Input/output error")
            return real(*arguments)

        return read

    patch.setattr(Staging, "read", around(Staging.read))
    patch.setattr(MappedFiles, "await_present", around(MappedFiles.await_present))


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-cold")]


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("is_absent", [True, False])
def test_each_row_arrives_once_with_its_own_bytes(sources, way, is_split, is_absent, monkeypatch):
    if is_absent:
        monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)
    source = sources[is_split]
    rows, _ = build(source, **way)
    for layer_id, wanted in ((0, [3, 0, 5]), (1, [2]), (0, [0, 1, 2, 3, 4, 5]), (1, [])):
        rows.ask(layer_id, wanted)
        arrived = []
        for row in rows.arrivals(layer_id, wanted):
            arrived.append(row)
            assert same(source.expected[layer_id, row], rows.tensors(layer_id, row))
        assert sorted(wanted) == sorted(arrived)
        # All of them at once, in place until the next turn.
        held = [rows.tensors(layer_id, row) for row in wanted]
        assert all(same(source.expected[layer_id, row], got) for row, got in zip(wanted, held, strict=True))
    rows.close()
    assert [] == threads()


def test_asking_returns_before_the_rows_are_there_and_tensors_wait(sources, way, absent, monkeypatch):
    go = threading.Event()
    slowly(monkeypatch, until=go)
    rows, _ = build(sources[False], **way)
    rows.ask(0, [1, 4])  # would hang here
    timer = threading.Timer(0.05, go.set)
    timer.start()
    assert same(sources[False].expected[0, 4], rows.tensors(0, 4))
    assert go.is_set()
    timer.join()
    rows.close()


def test_what_is_there_comes_before_what_is_late(sources, absent, monkeypatch):
    rows, _ = build(sources[False], **WAYS["direct"])
    rows.ask(0, [2])
    assert [2] == list(rows.arrivals(0, [2]))
    go = threading.Event()
    slowly(monkeypatch, until=go)
    rows.ask(0, [1, 2])
    arrivals = rows.arrivals(0, [1, 2])
    assert 2 == next(arrivals)
    go.set()
    assert [1] == list(arrivals)
    rows.close()


def test_rows_that_were_just_read_are_kept_and_not_read_again(sources, absent):
    rows, _ = build(sources[True], **WAYS["direct"])
    for layer_id, wanted in ((0, [1, 2]), (1, [1]), (0, [2, 1])):
        rows.ask(layer_id, wanted)
        list(rows.arrivals(layer_id, wanted))
    assert (3, 2, 0) == (rows.cold_counts.staged_rows, rows.cold_counts.kept_rows, rows.cold_counts.paged_rows)
    rows.ask(1, [2, 3, 4, 5])
    list(rows.arrivals(1, [2, 3, 4, 5]))
    rows.ask(0, [1])
    list(rows.arrivals(0, [1]))
    assert 8 == rows.cold_counts.staged_rows, "the slots of the longest unused rows were taken"
    rows.close()


def test_more_rows_than_slots_go_through_the_page_cache(sources, absent):
    rows, _ = build(sources[False], **WAYS["one slot"])
    rows.ask(0, range(E))
    assert set(range(E)) == set(rows.arrivals(0, range(E)))
    assert (1, E - 1) == (rows.cold_counts.staged_rows, rows.cold_counts.paged_rows)
    rows.close()


def test_a_read_that_fails_is_one_error_and_the_next_turn_reads_anew(sources, way, absent):
    source = sources[False]
    with pytest.MonkeyPatch.context() as patch:
        slowly(patch, failing={0})
        rows, _ = build(source, **way)
        rows.ask(0, [1, 3])
        with pytest.raises(BankError, match="cannot read the disk: got Input/output error"):
            list(rows.arrivals(0, [1, 3]))
    rows.ask(0, [1, 3])
    for row in rows.arrivals(0, [1, 3]):
        assert same(source.expected[0, row], rows.tensors(0, row))
    rows.close()
    assert [] == threads()


def test_closing_ends_a_wait_in_another_thread(sources, way, absent, monkeypatch):
    go = threading.Event()
    slowly(monkeypatch, until=go)
    rows, _ = build(sources[False], **way)
    found = []

    def wait():
        try:
            found.append(list(rows.arrivals(0, range(E))))
        except BankError as error:
            found.append(str(error))

    rows.ask(0, range(E))
    waiting = threading.Thread(target=wait)
    waiting.start()
    # The reads under way go on when whoever closes waits for them and has given the others up.
    leave = workers._Seat.leave
    monkeypatch.setattr(workers._Seat, "leave", lambda seat: (seat.has_thread and go.set(), leave(seat)))
    rows.close()
    go.set()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert ["the banks are closed: load the model again"] == found
    assert [] == threads()


def test_a_forked_process_reads_with_threads_of_its_own(sources, way, absent):
    source = sources[False]
    rows, _ = build(source, **way)
    rows.ask(0, [0, 1])
    list(rows.arrivals(0, [0, 1]))
    child = os.fork()
    if child == 0:
        rows.ask(0, [1, 2])
        got = {row: same(source.expected[0, row], rows.tensors(0, row)) for row in rows.arrivals(0, [1, 2])}
        os._exit(0 if got == {1: True, 2: True} else 1)
    assert 0 == os.waitpid(child, 0)[1]
    rows.close()


@st.composite
def programs(draw):
    """Turns, each with rows of one layer that are taken in some way, and swaps between them."""
    layers, experts = st.integers(0, 1), st.integers(0, E - 1)
    turn = st.tuples(
        st.just("turn"), layers, st.lists(experts, unique=True, max_size=E), st.integers(0, E), st.booleans()
    )
    other = st.tuples(st.sampled_from(["tensors", "fill", "drop"]), layers, experts)
    return draw(st.lists(turn | other, max_size=8))


@given(
    program=programs(),
    seed=st.integers(0, 2**16),
    failing=st.sets(st.integers(0, 30), max_size=3),
    way=st.sampled_from(list(WAYS.values())),
    is_split=st.booleans(),
)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_interleaving_gives_each_row_its_own_bytes_or_an_error(sources, program, seed, failing, way, is_split):
    source, dice = sources[is_split], random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFiles, "is_present", lambda *_: dice.random() < 0.3)
        slowly(patch, failing=failing, dice=dice)
        rows, layers = build(source, hot=((0,), (1,)), **way)
        reader, holds = DirectReader(source.files), {}
        for name, layer_id, *rest in program:
            first = layers[layer_id].first_cold
            with contextlib.suppress(DiskError):
                if name == "turn":
                    wanted, num_taken, is_ascending = rest
                    rows.ask(layer_id, [first + expert for expert in wanted])
                    cold = [first + expert for expert in wanted]
                    order = iter(sorted(cold)) if is_ascending else rows.arrivals(layer_id, cold)
                    held = {row: rows.tensors(layer_id, row) for row in itertools.islice(order, num_taken)}
                    for row, tensors in held.items():
                        assert same(source.expected[layer_id, row - first], tensors)
                elif name == "tensors":
                    assert same(source.expected[layer_id, rest[0]], rows.tensors(layer_id, first + rest[0]))
                elif name == "drop":
                    rows.drop_cold_pages()
                else:
                    rows.fill(layer_id, expert=rest[0], row=0, reader=reader)
                    holds[layer_id] = rest[0]
            for layer, expert in holds.items():
                assert same(source.expected[layer, expert], rows.tensors(layer, 0))
        reader.close()
        rows.close()
        rows.close()
    assert [] == threads()
    for touch in (lambda: rows.ask(0, [first]), lambda: rows.tensors(0, first)) if program else ():
        with pytest.raises(BankError, match="the banks are closed"):
            touch()


def test_a_gathered_row_is_not_kept_alive_by_who_remembers_its_tensors(sources):
    rows, _ = build(sources[True], **WAYS["page cache"])
    rows.ask(0, [1])
    remembered = rows.tensors(0, 1)
    assert same(sources[True].expected[0, 1], remembered)
    rows.ask(0, [2])
    assert {} == remembered
    assert same(sources[True].expected[0, 1], rows.tensors(0, 1))
    rows.close()


def test_slots_need_direct_files_for_direct_reads(tmp_path):
    source = toy_source(tmp_path)
    needs = slot_needs(source)
    assert 0 == needs.slot_bytes % 4096
    files = DirectFiles(source.files)
    staging = Staging(files, num_slots=2, slot_bytes=needs.slot_bytes)
    assert 2 * needs.slot_bytes == staging.num_bytes
    assert torch.uint8 == staging._content.dtype
    staging.close()
    staging.close()


def test_at_the_end_of_a_process_slots_are_let_go_without_a_pool_which_python_refuses_by_then(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    rows, _ = build(toy_source(tmp_path, num_experts=E), **WAYS["direct"])
    rows.ask(0, [1])
    list(rows.arrivals(0, [1]))
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", refuse)
    rows.close()


def test_a_file_that_is_cut_short_while_the_model_runs_is_an_error_of_every_way(tmp_path, way, absent):
    source = toy_source(tmp_path, num_experts=E)
    rows, layers = build(source, hot=((0,), (1,)), **way)
    first = layers[0].first_cold
    rows.ask(0, [first + 3])
    assert [first + 3] == list(rows.arrivals(0, [first + 3]))
    os.truncate(source.files[0], source.spans(0, 2)[0].offset)
    for wanted in ([first + 2, first + 5], [first + 4]):
        rows.ask(0, wanted)
        with pytest.raises(BankError, match=r"layer0.bin.*(ended early|bytes now).*load (it|the model) again"):
            list(rows.arrivals(0, wanted))
    assert same(source.expected[0, 0], rows.tensors(0, 0)), "hot rows are in memory"
    rows.ask(1, [layers[1].first_cold + 2])
    assert same(source.expected[1, 2], rows.tensors(1, layers[1].first_cold + 2)), "and other files are whole"
    rows.close()
    assert [] == threads()


def test_a_file_that_is_cut_short_is_found_in_the_page_cache_too(tmp_path, way):
    source = toy_source(tmp_path, num_experts=E)
    rows, _ = build(source, **way)
    rows.ask(0, range(E))
    assert set(range(E)) == set(rows.arrivals(0, range(E)))
    os.truncate(source.files[0], 0)
    rows.ask(1, range(E))
    list(rows.arrivals(1, range(E)))
    rows.ask(0, [1])
    with pytest.raises(BankError, match="layer0.bin"):
        list(rows.arrivals(0, [1]))
    rows.close()
