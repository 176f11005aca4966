"""Pages that go between their check and their use: one clear error, no zero taken for a weight, and no signal that kills."""

from __future__ import annotations

import gc
import mmap
import os
import re
import signal
import threading
from contextlib import suppress

import pytest

from bank.apart import apart
from bank.toy_source import same, toy_source
from hotsplit.bank import guard_library, map_guard
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.cold_choice import slot_needs
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.source import Span
from hotsplit.bank.staging import Staging
from hotsplit.errors import BankError, UnsupportedEngineError

E = 6
PAGE = mmap.PAGESIZE
NOTHING_THERE = r"cannot read .*layer0.bin: got nothing at byte \d+ when it was used, in a file of 0 bytes now; wanted"

pytestmark = pytest.mark.skipif(guard_library.load() is None, reason="no native code here")


@pytest.fixture
def source(tmp_path):
    return toy_source(tmp_path, num_experts=E)


def build(source, **options):
    layers = place_layers(((), ()), num_experts=E, dynamic=False, inclusive=True)
    options = RowsOptions(slot_bytes=slot_needs(source).slot_bytes, **options)
    return build_pointer_rows(source, hot=((), ()), layers=layers, options=options)


def use(rows, source, wanted, *, layer_id=0, between=lambda: None):
    """A layer's turn, as a step has it; whether all rows were the file's."""
    rows.ask(layer_id, wanted)
    held = {row: rows.tensors(layer_id, row) for row in rows.arrivals(layer_id, wanted)}
    between()
    is_same = all(same(source.expected[layer_id, row], tensors) for row, tensors in held.items())
    rows.guard.require_whole()
    return is_same


def no_guard(patch):
    patch.setattr(guard_library, "load", lambda: None)


def single_file(tmp_path, *, num_pages=300):
    path = tmp_path / "big.bin"
    path.write_bytes(bytes(range(256)) * (num_pages * PAGE // 256))
    return path, Span(file=0, offset=0, num_bytes=num_pages * PAGE, row_offset=0)


def test_a_file_that_is_cut_short_after_the_check_is_an_error_that_names_file_and_byte(source):
    rows = build(source)
    found = apart(lambda: use(rows, source, [1, 4], between=lambda: os.truncate(source.files[0], 0)))
    assert isinstance(found, BankError)
    assert re.match(NOTHING_THERE, str(found))
    rows.close()


def test_without_the_guard_the_same_ends_the_process(source, monkeypatch):
    no_guard(monkeypatch)
    rows = build(source)
    assert -signal.SIGBUS == apart(lambda: use(rows, source, [1, 4], between=lambda: os.truncate(source.files[0], 0)))
    rows.close()


def test_what_is_cut_inside_of_the_last_page_gives_no_signal_and_is_an_error_all_the_same(source, monkeypatch):
    size = source.files[0].stat().st_size
    assert size < PAGE, "zeros up to the page's end"
    for is_guarded in (True, False):
        with monkeypatch.context() as patch:
            if not is_guarded:
                no_guard(patch)
            rows = build(source)
            content = source.files[0].read_bytes()
            with pytest.raises(BankError, match=f"got a file of {size - 5} bytes now"):
                use(rows, source, [E - 1], between=lambda: os.truncate(source.files[0], size - 5))
            source.files[0].write_bytes(content)
            assert use(rows, source, [E - 1])
            rows.close()


def test_a_file_that_is_whole_again_is_read_again_and_until_then_every_use_is_an_error(source):
    rows = build(source)
    content = source.files[0].read_bytes()

    def story():
        found = []
        for _ in range(3):
            with suppress(BankError):
                found.append(use(rows, source, range(E), between=lambda: os.truncate(source.files[0], 0)))
        found.append(use(rows, source, range(E), layer_id=1))  # another file, whole all the time
        source.files[0].write_bytes(content)
        return [*found, use(rows, source, range(E)), use(rows, source, [2])]

    assert [True, True, True] == apart(story)
    rows.close()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_row_that_is_put_together_from_pages_that_go_is_an_error(source, monkeypatch, is_guarded):
    if not is_guarded:
        no_guard(monkeypatch)
    rows = build(source, slots=E)
    content, real = source.files[0].read_bytes(), Staging.copy

    def cut_first(*arguments, **named):
        os.truncate(source.files[0], 0)
        real(*arguments, **named)

    def story():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staging, "copy", cut_first)
            with pytest.raises(BankError, match=NOTHING_THERE):
                use(rows, source, [1])
        with pytest.raises(BankError, match="a file of 0 bytes now"):
            use(rows, source, [1])
        source.files[0].write_bytes(content)
        with suppress(BankError):
            use(rows, source, [1])  # may hear of a read that an earlier turn began
        return use(rows, source, [1])

    assert (True if is_guarded else -signal.SIGBUS) == apart(story)
    rows.close()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_row_that_is_gathered_by_the_computing_thread_from_pages_that_go_is_an_error(source, monkeypatch, is_guarded):
    if not is_guarded:
        no_guard(monkeypatch)
    rows = build(source)

    def story():
        rows.ask(0, [2])
        assert [2] == list(rows.arrivals(0, [2]))
        os.truncate(source.files[0], 0)
        rows.tensors(0, 2)
        rows.guard.require_whole()

    found = apart(story)
    assert re.match(NOTHING_THERE, str(found)) if is_guarded else -signal.SIGBUS == found
    rows.close()


def test_a_swap_and_a_direct_read_touch_no_mapping(source, monkeypatch):
    no_guard(monkeypatch)
    layers = place_layers(((0,), (1,)), num_experts=E, dynamic=True, inclusive=True)
    options = RowsOptions(slot_bytes=slot_needs(source).slot_bytes, slots=E, is_direct=True)
    rows = build_pointer_rows(source, hot=((0,), (1,)), layers=layers, options=options)
    reader = DirectReader(source.files)
    os.truncate(source.files[0], 0)
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)

    def swap():
        rows.fill(0, expert=3, row=1, reader=reader)

    def read():
        rows.ask(0, [layers[0].first_cold + 1])
        return list(rows.arrivals(0, [layers[0].first_cold + 1]))

    for work in (swap, read):
        found = apart(work)
        assert isinstance(found, BankError)
        assert "ended early" in str(found)
    reader.close()
    rows.close()


def test_a_break_of_one_model_is_none_of_another(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    sources = [toy_source(folder, num_experts=E, is_split=False, gap=64, seed=i) for i, folder in enumerate(folders)]
    first, second = (build(source) for source in sources)

    def story():
        def use_the_other():
            os.truncate(sources[0].files[0], 0)
            assert sum(first.tensors(0, 1)["scale"].tolist()) == 0
            assert use(second, sources[1], range(E))

        second.ask(0, [1])
        held = second.tensors(0, 1)
        with pytest.raises(BankError, match="a/layer0.bin"):
            use(first, sources[0], [1], between=use_the_other)
        assert same(sources[1].expected[0, 1], held)
        second.guard.require_whole()
        first.close()
        return use(second, sources[1], range(E))

    assert apart(story) is True
    first.close()
    second.close()


def test_many_threads_that_touch_lost_pages_at_once_all_go_on(tmp_path):
    path, span = single_file(tmp_path)
    files = MappedFiles([path])

    def story():
        found, go = [], threading.Barrier(8)

        def touch():
            go.wait()
            found.append(int(files.content(span)[::PAGE].sum()) + int(files.content(span)[7 * PAGE + 5]))

        for _ in range(20):
            files.guard.begin()
            path.write_bytes(bytes([1]) * span.num_bytes)
            files.make_present([span])
            os.truncate(path, 0)
            threads = [threading.Thread(target=touch) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pytest.raises(BankError, match="nothing at byte"):
                files.guard.require_whole()
        return set(found)

    assert {0} == apart(story)


def test_zeros_that_another_thread_made_are_noticed_by_whoever_read_them(tmp_path):
    path, span = single_file(tmp_path)
    files = MappedFiles([path])

    def story():
        files.guard.begin()
        files.make_present([span])
        reading = files.guard.reading([span])
        os.truncate(path, 100 * PAGE)  # this reader's pages are there
        other = threading.Thread(target=lambda: int(files.content(span)[200 * PAGE]))
        other.start()
        other.join()
        found = int(files.content(span)[5])
        for look in (files.guard.require_whole, reading.require_whole, lambda: files.guard.reading([span])):
            with pytest.raises(BankError, match=f"nothing at byte {200 * PAGE} when it was used"):
                look()
        return found

    assert 0 == apart(story)


def test_what_breaks_in_a_forked_process_stays_whole_in_its_parent(tmp_path):
    path, span = single_file(tmp_path)
    files = MappedFiles([path])
    files.guard.begin()
    files.make_present([span])
    content = path.read_bytes()

    def story():
        files.guard.begin()
        os.truncate(path, 0)
        return int(files.content(span)[5])

    assert 0 == apart(story)
    path.write_bytes(content)
    files.guard.require_whole()
    assert 5 == int(files.content(span)[5])


def test_a_file_that_cannot_be_mapped_again_is_an_error_of_every_turn(source, monkeypatch):
    rows = build(source)
    content = source.files[0].read_bytes()
    library = guard_library.load()
    refused = {name: getattr(library, name) for name in library.__slots__} | {"mend": lambda _: 12}

    def story():
        with pytest.raises(BankError, match="nothing at byte"):
            use(rows, source, [1], between=lambda: os.truncate(source.files[0], 0))
        source.files[0].write_bytes(content)
        rows.guard._library = guard_library.GuardLibrary(**refused)
        for _ in range(2):
            with pytest.raises(BankError, match="no mapping of it again: Cannot allocate memory"):
                use(rows, source, [1])
        rows.guard._library = library
        return use(rows, source, [1])

    assert apart(story) is True
    rows.close()


def test_an_error_that_comes_of_lost_pages_is_told_as_theirs_and_no_other_is(source):
    rows = build(source)

    def refuse(cut):
        with rows.guard.watched():
            rows.ask(0, [1])
            held = rows.tensors(0, 1)
            if cut:
                os.truncate(source.files[0], 0)
            held["scale"].sum()
            raise UnsupportedEngineError("experts", got="zeros")

    with pytest.raises(UnsupportedEngineError):
        refuse(cut=False)
    found = apart(lambda: refuse(cut=True))
    assert BankError is type(found)
    rows.close()


def test_the_guard_lives_as_long_as_a_view_and_no_longer(tmp_path):
    path, span = single_file(tmp_path)
    dropped, library = [], guard_library.load()
    real = {name: getattr(library, name) for name in library.__slots__}
    watched = guard_library.GuardLibrary(**real | {"drop": lambda n: (dropped.append(n), library.drop(n))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_library, "load", lambda: watched)
        files = MappedFiles([path])
    view = files.content(span)[3:]
    files.close()
    del files
    gc.collect()
    assert [] == dropped
    assert 3 == int(view[0])
    del view
    gc.collect()
    assert 1 == len(dropped)


def test_a_mapping_that_the_guard_cannot_watch_is_read_as_ever(source, monkeypatch):
    real = guard_library.load()
    functions = {name: getattr(real, name) for name in real.__slots__}
    refusing = guard_library.GuardLibrary(**functions | {"add": lambda *_: -1})
    monkeypatch.setattr(guard_library, "load", lambda: refusing)
    rows = build(source, slots=2)
    assert use(rows, source, range(E))
    rows.close()


def test_a_library_of_another_hotsplit_is_not_used(monkeypatch):
    monkeypatch.setattr(guard_library, "_ABI", 99)
    assert guard_library.load.__wrapped__() is None


def test_closed_files_are_told_of_as_ever(source):
    rows = build(source)
    rows.close()
    rows.guard.require_whole()
    with pytest.raises(BankError, match="the banks are closed"):
        rows.ask(0, [1])
    assert map_guard.MapGuard([]).require_whole() is None
