"""Building the banks: every hot row gets its expert, progress is told, and failures give everything back."""

from __future__ import annotations

import itertools
import os

import pytest

from bank.toy_source import same, toy_source
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.pointers import PointerRows
from hotsplit.errors import BankError

HOT = [(3, 0), (1,), ()]


def layers_of(source, hot):
    return place_layers(hot, num_experts=source.num_experts, dynamic=True, inclusive=True)


def test_every_hot_row_holds_its_expert_in_the_plans_order(tmp_path):
    source = toy_source(tmp_path, num_layers=3)
    rows = build_pointer_rows(source, hot=HOT, layers=layers_of(source, HOT))
    for layer_id, experts in enumerate(HOT):
        for row, expert in enumerate(experts):
            assert same(source.expected[layer_id, expert], rows.tensors(layer_id, row))


def test_progress_goes_row_by_row_up_to_all_bytes(tmp_path):
    source = toy_source(tmp_path, num_layers=3)
    row, told = source.layouts[0].num_bytes, []
    build_pointer_rows(source, hot=HOT, layers=layers_of(source, HOT), on_progress=lambda *seen: told.append(seen))
    assert [(row, 3 * row), (2 * row, 3 * row), (3 * row, 3 * row)] == told


def test_a_long_load_says_every_ten_seconds_how_far_it_is(tmp_path, monkeypatch, caplog):
    seconds = itertools.count(0.0, 6.0)  # a slow disk: a row takes six seconds
    monkeypatch.setattr("hotsplit.bank.build.time.monotonic", lambda: next(seconds))
    source = toy_source(tmp_path, num_layers=2)
    hot = [(0, 1, 2), (3, 1)]
    with caplog.at_level("INFO", logger="hotsplit"):
        build_pointer_rows(source, hot=hot, layers=layers_of(source, hot))
    said = [record.message for record in caplog.records if record.message.startswith("reading hot experts")]
    assert ["about 18 s left", "about 6 s left"] == [line.rpartition(", ")[2] for line in said]


def test_a_plan_without_hot_experts_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(PointerRows, "fill", lambda *args, **kwargs: pytest.fail("a row was read"))
    source = toy_source(tmp_path)
    rows = build_pointer_rows(source, hot=[(), ()], layers=layers_of(source, [(), ()]))
    assert not rows.is_hot(0, 0)


def test_a_failed_read_gives_memory_and_files_back(tmp_path, monkeypatch):
    source = toy_source(tmp_path, num_layers=3)
    os.truncate(source.files[1], 20)
    closed = []
    close = PointerRows.close
    monkeypatch.setattr(PointerRows, "close", lambda rows: (closed.append(rows), close(rows)))
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BankError, match="layer1.bin ended early"):
        build_pointer_rows(source, hot=HOT, layers=layers_of(source, HOT))
    assert 1 == len(closed)
    assert handles == len(os.listdir("/proc/self/fd"))


def test_progress_that_raises_gives_memory_and_files_back(tmp_path):
    source = toy_source(tmp_path, num_layers=3)
    handles = len(os.listdir("/proc/self/fd"))

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_pointer_rows(source, hot=HOT, layers=layers_of(source, HOT), on_progress=interrupt)
    assert handles == len(os.listdir("/proc/self/fd"))
