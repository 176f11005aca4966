"""Pointer rows: hot rows hold the file's bytes, cold rows are the file, and read-ahead asks for exactly them."""

from __future__ import annotations

import mmap

import pytest
import torch

from bank.toy_source import same, toy_source
from hotsplit.bank.build import build_pointer_rows, place_layers
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.pointers import PointerRows
from hotsplit.errors import BankError


def build(source, hot, *, dynamic=True):
    layers = place_layers(hot, num_experts=source.num_experts, dynamic=dynamic, inclusive=True)
    return build_pointer_rows(source, hot=hot, layers=layers), layers


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("gap", [0, 1, 3, 64])
@pytest.mark.parametrize("hot", [[(), ()], [(2, 0), (3,)], [(3, 2, 1, 0), (0, 1, 2, 3)]])
def test_every_expert_has_its_bytes_wherever_it_lies(tmp_path, hot, is_split, gap):
    source = toy_source(tmp_path, is_split=is_split, gap=gap)
    rows, layers = build(source, hot)
    for (layer_id, expert), expected in source.expected.items():
        row = layers[layer_id].row_map[expert]
        assert (expert in hot[layer_id]) == rows.is_hot(layer_id, row)
        assert same(expected, rows.tensors(layer_id, row))
        assert same(expected, rows.tensors(layer_id, row)), "and again, from the remembered views"
        assert same(expected, rows.tensors(layer_id, layers[layer_id].home_row[expert]))


def test_a_cold_tensor_in_one_piece_is_a_view_of_the_file_and_not_a_copy(tmp_path):
    source = toy_source(tmp_path, is_split=False, gap=1)
    rows, layers = build(source, [(), ()])
    file_bytes, row = rows._cold._files._maps[0].content, layers[0].row_map[0]
    first, last = file_bytes.data_ptr(), file_bytes.data_ptr() + file_bytes.numel()
    aligned = [span for span in source.spans(0, 0) if span.offset % 2 == 0]
    assert aligned, "the case needs a tensor that starts at an even byte"
    inside = {name: first <= tensor.data_ptr() < last for name, tensor in rows.tensors(0, row).items()}
    assert inside["scale"]
    assert any(inside[name] for name in ("gate_up_proj", "down_proj"))


def test_a_tensor_that_starts_at_an_odd_byte_is_gathered_anew_and_right(tmp_path):
    source = toy_source(tmp_path, is_split=False, gap=0)
    rows, layers = build(source, [(), ()])
    assert 1 == source.spans(0, 0)[0].offset % 2
    assert same(source.expected[0, 0], rows.tensors(0, layers[0].row_map[0]))


def test_hot_rows_start_aligned(tmp_path):
    rows, _ = build(toy_source(tmp_path), [(0, 1, 2), (3, 1)])
    base = rows.tensors(0, 0)["gate_up_proj"].data_ptr()
    assert 0 == base % mmap.PAGESIZE
    starts = [rows.tensors(layer_id, row)["down_proj"].data_ptr() for layer_id, row in [(0, 1), (0, 2), (1, 0), (1, 1)]]
    assert all(start % 64 == 0 for start in starts)


def test_hot_bytes_are_hot_and_spare_rows_and_nothing_else(tmp_path):
    source = toy_source(tmp_path)
    row = source.layouts[0].num_bytes
    assert (2 + 1 + 1 + 1) * row == build(source, [(2, 0), (3,)])[0].hot_bytes
    many = toy_source(tmp_path, num_experts=40)
    rows = build(many, [tuple(range(40)), tuple(range(39))], dynamic=False)[0]
    assert 79 * row == rows.hot_bytes


def test_filling_a_spare_row_leaves_its_neighbours_as_they_are(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2, 0), (3,)])
    reader = DirectReader(source.files)
    spare = layers[0].spare_row
    assert sum(span.num_bytes for span in source.spans(0, 1)) == rows.fill(0, expert=1, row=spare, reader=reader)
    reader.close()
    assert same(source.expected[0, 1], rows.tensors(0, spare))
    for layer_id, row, expert in [(0, 0, 2), (0, 1, 0), (1, 0, 3)]:
        assert same(source.expected[layer_id, expert], rows.tensors(layer_id, row))


def test_a_view_of_a_hot_row_follows_what_is_filled_into_it(tmp_path):
    source = toy_source(tmp_path)
    rows, _ = build(source, [(2, 0), (3,)])
    before = rows.tensors(0, 1)
    assert same(source.expected[0, 0], before)
    reader = DirectReader(source.files)
    rows.fill(0, expert=3, row=1, reader=reader)
    reader.close()
    assert same(source.expected[0, 3], before)


def test_a_cold_row_is_never_filled(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2, 0), (3,)])
    reader = DirectReader(source.files)
    with pytest.raises(BankError, match="wanted a hot or spare row"):
        rows.fill(0, expert=1, row=layers[0].first_cold, reader=reader)
    reader.close()


def test_the_real_kernel_takes_every_range_that_is_asked_for(tmp_path):
    source = toy_source(tmp_path, num_experts=60)
    rows, layers = build(source, [(), ()])
    rows.ask(0, layers[0].row_map)
    rows.ask(1, reversed(layers[1].row_map))
    assert same(source.expected[1, 59], rows.tensors(1, layers[1].row_map[59]))


def test_dropping_cold_pages_changes_no_bytes(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2,), ()])
    rows.tensors(0, layers[0].row_map[1])
    rows.drop_cold_pages()
    for (layer_id, expert), expected in source.expected.items():
        assert same(expected, rows.tensors(layer_id, layers[layer_id].row_map[expert]))


def test_the_arena_is_private_memory_that_is_no_file(tmp_path):
    source = toy_source(tmp_path, num_experts=64)
    hot = [tuple(range(64))] * 2
    rows, _ = build(source, hot, dynamic=False)
    address = rows.tensors(0, 0)["gate_up_proj"].data_ptr()
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(end, 16) for end in fields[0].split("-"))
            if first <= address < last:
                # permissions "p": private; inode 0: no file, no shared memory.
                assert ("rw-p", "0") == (fields[1], fields[4])
                return
    pytest.fail("the arena is not mapped")


def test_a_file_that_vanished_is_one_clear_error(tmp_path):
    source = toy_source(tmp_path)
    source.files[1].unlink()
    layers = place_layers([(), ()], num_experts=4, dynamic=False, inclusive=True)
    with pytest.raises(BankError, match="cannot map .*layer1.bin.*check the model folder"):
        PointerRows(source, layers=layers)


def test_views_that_are_still_held_outlive_closing(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2, 0), (3,)])
    hot, cold = rows.tensors(0, 0), rows.tensors(0, layers[0].row_map[1])
    rows.close()
    rows.close()
    assert same(source.expected[0, 2], hot)
    assert same(source.expected[0, 1], cold)


def test_rows_are_not_served_after_closing(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2, 0), (3,)])
    rows.close()
    for row in (0, layers[0].row_map[1]):
        with pytest.raises(BankError):
            rows.tensors(0, row)


def test_no_tensor_of_a_row_shares_bytes_with_another_row(tmp_path):
    source = toy_source(tmp_path)
    rows, layers = build(source, [(2, 0), (3,)])
    with torch.no_grad():
        for tensor in rows.tensors(0, layers[0].spare_row).values():
            tensor.fill_(1)
    for expert, row in ((2, 0), (0, 1)):
        assert same(source.expected[0, expert], rows.tensors(0, row))
    assert same(source.expected[1, 3], rows.tensors(1, 0))
