"""Rows in ranges: all tensors of a row move together, to where the row numbers say, and nothing else moves."""

from __future__ import annotations

import os
import tempfile
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank import range_rows, ranges
from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.residency import read_residency
from hotsplit.bank.rows import place
from hotsplit.errors import BankError

HOT = [(2, 0), (3,), (), (0, 1, 2, 3)]
"""Of four experts: with a spare row, with another, wholly cold, wholly hot."""


@pytest.fixture
def file(tmp_path):
    file = BankFile(tmp_path)
    yield file
    file.close()


@pytest.fixture
def layers():
    return [place(hot, num_experts=4, spare=True, inclusive=False) for hot in HOT]


@pytest.fixture
def rows(layers, file):
    rows = RangeRows(layers, memory=FileMemory(file))
    yield rows
    rows.close()


def fill(tensor):
    """Let every row's bytes tell its number, each byte another value."""
    raw = tensor.data.flatten(1) if tensor.dim() > 1 else tensor.data[:, None]
    raw = raw.view(torch.uint8)
    raw.copy_((torch.arange(raw.shape[1]) * 7 + torch.arange(raw.shape[0])[:, None] * 31 + 1).to(torch.uint8))
    return raw.clone()


def raw(tensor):
    return (tensor.data.flatten(1) if tensor.dim() > 1 else tensor.data[:, None]).view(torch.uint8)


def make(rows, layer_id, *, num_rows):
    """A weight and its scales in ranges, a bias outside of them; registered."""
    tensors = [
        rows.allocate(layer_id, shape=(num_rows, 120, 32), dtype=torch.bfloat16),
        rows.allocate(layer_id, shape=(num_rows, 192), dtype=torch.uint8),
        torch.empty(num_rows, 3, dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.float16),
    ]
    rows.register(layer_id, tensors)
    return tensors, [fill(tensor) for tensor in tensors]


def equal(expected, tensors):
    return all(torch.equal(one, raw(tensor)) for one, tensor in zip(expected, tensors, strict=True))


def test_rows_lie_in_the_memory_that_the_row_numbers_say(rows, layers):
    for layer_id, layer in enumerate(layers):
        tensor = rows.allocate(layer_id, shape=(layer.num_rows, 7680), dtype=torch.uint8)
        fill(tensor)
        held = rows.ranges[-1]
        assert (tensor.data_ptr(), layer.num_rows * 7680) == (held.address, held.num_bytes)
        assert held.edge == tensor.data_ptr() + layer.first_cold * 7680 or not held.slow_bytes
    found = read_residency(rows.ranges)
    assert (0, rows.hot_bytes, rows.host_bytes) == (
        found.misplaced_bytes,
        found.hot_anonymous_bytes,
        found.cold_file_bytes,
    )


def test_bytes_taken_are_those_of_ranges_and_of_plain_tensors(rows, layers):
    make(rows, 0, num_rows=5)
    # Three of the five rows are hot: 23,040 and 576 bytes, the other two 15,360 and 384; in pages of 4096.
    assert (6 + 1) * 4096 + 5 * (12 + 2) == rows.hot_bytes
    assert (4 + 1) * 4096 == rows.host_bytes
    assert 7680 + 192 + 12 + 2 == rows.row_bytes(0)


def test_a_tensor_is_owned_where_it_starts_with_a_range(rows):
    tensor = rows.allocate(0, shape=(5, 64), dtype=torch.uint8)
    assert [True, True] == [rows.owns(tensor), rows.owns(torch.nn.Parameter(tensor.view(5, 8, 8), requires_grad=False))]
    assert [False, False] == [rows.owns(tensor[1:]), rows.owns(torch.empty(5, 64))]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 64), torch.uint8), ((6, 64), torch.uint8), ((), torch.uint8), ((5, 65), torch.uint8), ((5, 0), torch.uint8)],
)
def test_a_tensor_of_other_rows_than_the_layers_is_refused(rows, shape, dtype):
    with pytest.raises(BankError, match="layer_id 0: got a tensor .*; wanted 5 rows, each a multiple of 64 bytes"):
        rows.allocate(0, shape=shape, dtype=dtype)
    assert (0, ()) == (rows.hot_bytes, rows.ranges)


@pytest.mark.parametrize("layer_id", [-1, 4])
def test_a_layer_that_does_not_exist_is_refused(rows, layer_id):
    for call in (
        lambda: rows.allocate(layer_id, shape=(5, 64), dtype=torch.uint8),
        lambda: rows.register(layer_id, []),
        lambda: rows.copy_row(layer_id, source_row=0, target_row=1),
    ):
        with pytest.raises(BankError, match=f"layer_id of a row: got {layer_id}; wanted 0..3"):
            call()


def test_releasing_gives_the_memory_up_and_forgets_what_was_registered(rows, file):
    (weight, scale, bias, _), _ = make(rows, 0, num_rows=5)
    other = rows.allocate(1, shape=(5, 64), dtype=torch.uint8)
    expected = [fill(scale), fill(other)]
    rows.release(0, weight)
    assert (False, 2, 2 * 4096) == (rows.owns(weight), len(rows.ranges), file.num_bytes)
    wider = rows.allocate(0, shape=(5, 128, 32), dtype=torch.bfloat16)
    fill(wider)
    assert (True, 3) == (rows.owns(wider), len(rows.ranges))
    assert 2 * 8192 + 2 * 4096 == rows.host_bytes == file.num_bytes
    assert equal(expected, [scale, other])
    with pytest.raises(BankError, match="layer_id 0: got no registered tensors"):
        rows.copy_row(0, source_row=0, target_row=1)
    rows.register(0, [wider, scale, bias])
    assert 8192 + 192 + 12 == rows.row_bytes(0)


def test_a_tensor_that_is_not_the_layers_is_not_released(rows):
    weight = rows.allocate(0, shape=(5, 64), dtype=torch.uint8)
    expected = fill(weight)
    for layer_id, tensor in [(1, weight), (0, torch.empty(5, 64))]:
        with pytest.raises(BankError, match="got another tensor; wanted one that was allocated for it"):
            rows.release(layer_id, tensor)
    assert equal([expected], [weight])


@pytest.mark.parametrize(("source_row", "target_row"), [(4, 0), (0, 4), (1, 2), (3, 4), (2, 2)])
def test_a_copied_row_is_whole_and_its_neighbours_are_as_they_were(rows, source_row, target_row):
    tensors, expected = make(rows, 0, num_rows=5)
    assert 7680 + 192 + 12 + 2 == rows.copy_row(0, source_row=source_row, target_row=target_row)
    for one in expected:
        one[target_row] = one[source_row]
    assert equal(expected, tensors)


@pytest.mark.parametrize(("a", "b"), [(0, 4), (4, 0), (0, 1), (3, 4), (2, 2)])
def test_two_rows_change_places(rows, a, b):
    tensors, expected = make(rows, 0, num_rows=5)
    rows.exchange(0, a, b)
    for one in expected:
        one[[a, b]] = one[[b, a]]
    assert equal(expected, tensors)


def test_rows_of_a_layer_without_spare_row_change_places(rows):
    tensors, expected = make(rows, 3, num_rows=4)
    rows.exchange(3, 0, 3)
    assert equal([one[[3, 1, 2, 0]] for one in expected], tensors)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_does_not_exist_is_refused_and_nothing_moves(rows, row):
    tensors, expected = make(rows, 0, num_rows=5)
    for call in (
        lambda: rows.copy_row(0, source_row=row, target_row=0),
        lambda: rows.copy_row(0, source_row=0, target_row=row),
        lambda: rows.exchange(0, 0, row),
        lambda: rows.exchange(0, row, 0),
        lambda: rows.permute(0, rows=[1, 0, row], free_row=None),
        lambda: rows.permute(0, rows=[1, 0], free_row=row),
    ):
        with pytest.raises(BankError, match=f"layer_id 0: got row {row}; wanted 0..4"):
            call()
    assert equal(expected, tensors)


@pytest.mark.parametrize(("named", "free_row"), [([0, 0], None), ([0, 1, 2], 2), ([4, 3, 4], None)])
def test_a_row_that_two_shall_lie_in_is_refused_and_nothing_moves(rows, named, free_row):
    tensors, expected = make(rows, 0, num_rows=5)
    with pytest.raises(BankError, match="wanted different rows, and none of them the free one"):
        rows.permute(0, rows=named, free_row=free_row)
    assert equal(expected, tensors)


def permuted(expected, named):
    """What lies in row i, moved to row named[i], for the rows that are named."""
    moved = expected.clone()
    for source, target in enumerate(named):
        moved[target] = expected[source]
    return moved


@given(data=st.data(), num_rows=st.integers(1, 12))
def test_rows_come_to_lie_where_they_shall_and_others_stay(data, num_rows):
    num_named = data.draw(st.integers(0, num_rows))
    named = data.draw(st.permutations(range(num_rows)))[:num_named]
    unnamed = sorted(set(range(num_rows)) - set(named))
    free_row = data.draw(st.sampled_from([None, *unnamed]))
    layer = place(range(num_rows // 2), num_experts=num_rows, spare=False, inclusive=False)
    with tempfile.TemporaryDirectory() as folder:
        file = BankFile(Path(folder))
        rows = RangeRows([layer], memory=FileMemory(file))
        tensors, expected = make(rows, 0, num_rows=num_rows)
        rows.permute(0, rows=named, free_row=free_row)
        for one, tensor in zip(expected, tensors, strict=True):
            assert torch.equal(permuted(one, named)[named], raw(tensor)[named])
            # A row that is neither source nor target keeps its bytes, unless it was given to move through.
            idle = [row for row in unnamed if row >= num_named and row != free_row]
            assert torch.equal(one[idle], raw(tensor)[idle])
        rows.close()
        file.close()


def test_every_permutation_of_few_rows_is_right_and_moves_each_row_once():
    for num_rows in range(1, 6):
        for num_named, order in product(range(num_rows + 1), permutations(range(num_rows))):
            named, at = order[:num_named], {row: row for row in range(num_rows)}
            moves = list(range_rows._moves(named, through=-1))
            for source, target in moves:
                at[target] = at[source]
            assert list(range(num_named)) == [at[row] for row in named]
            targets = [target for _, target in moves if target != -1]
            assert sorted(row for i, row in enumerate(named) if i != row) == sorted(targets)


def test_experts_loaded_in_the_order_of_their_ids_are_permuted_by_the_row_map(rows, layers):
    for layer_id, layer in enumerate(layers):
        tensors, expected = make(rows, layer_id, num_rows=layer.num_rows)
        rows.permute(layer_id, rows=layer.row_map, free_row=layer.spare_row)
        for one, tensor in zip(expected, tensors, strict=True):
            assert torch.equal(one[:4], raw(tensor)[list(layer.row_map)])


def test_a_permutation_without_a_free_row_takes_memory_for_one_row_alone(rows, monkeypatch):
    tensor = rows.allocate(3, shape=(4, 1 << 16), dtype=torch.uint8)
    rows.register(3, [tensor])
    empty, asked = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (asked.append(args), empty(*args, **kwargs))[1])
    rows.permute(3, rows=[1, 2, 3, 0], free_row=None)
    assert [(1 << 16,)] == asked


def test_tensors_given_twice_count_once_and_empty_ones_not_at_all(rows):
    tensor = rows.allocate(0, shape=(5, 64), dtype=torch.uint8)
    rows.register(0, [tensor, torch.nn.Parameter(tensor.view(5, 8, 8), requires_grad=False), torch.empty(5, 0)])
    assert 64 == rows.row_bytes(0)


def test_registering_again_replaces_what_was_registered(rows):
    (weight, scale, *_), _ = make(rows, 0, num_rows=5)
    rows.register(0, [weight, scale])
    assert 7680 + 192 == rows.row_bytes(0)
    rows.register(0, [])
    assert 0 == rows.row_bytes(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 64),
        torch.empty(6, 64),
        torch.empty(64),
        torch.tensor(1),
        torch.empty(64, 5).t(),
        torch.empty(5, 65)[:, :64],
        torch.empty(10, 64)[::2],
        torch.empty(1, 64).expand(5, 64),
        torch.empty(5, 64, device="meta"),
    ],
    ids=["few", "many", "flat", "scalar", "transposed", "padded", "strided", "expanded", "meta"],
)
def test_a_tensor_without_rows_one_behind_the_other_is_refused_by_its_shape(rows, tensor):
    with pytest.raises(BankError) as caught:
        rows.register(0, [tensor])
    assert f"layer_id 0: got a tensor {tuple(tensor.shape)} with strides {tensor.stride()}" in str(caught.value)
    assert "wanted 5 rows that lie one behind the other in memory" in str(caught.value)


def test_tensors_that_share_bytes_are_refused_since_a_row_moves_once(rows):
    memory = torch.empty(12, 64)
    for pair in ([memory[:5], memory[4:9]], [memory[:5], memory.view(-1)[:5]], [memory[4:9], memory[:5]]):
        with pytest.raises(BankError, match="wanted tensors that share no bytes"):
            rows.register(0, pair)
    rows.register(0, [memory[:5], memory[5:10]])
    assert 512 == rows.row_bytes(0)


def test_rows_of_tensors_made_for_inference_or_for_training_move_as_well(rows):
    with torch.inference_mode():
        weight = rows.allocate(0, shape=(5, 64), dtype=torch.float32)
        plain = torch.empty(5, 3)
    trained = torch.nn.Parameter(torch.empty(5, 2))
    tensors = [weight, plain, trained]
    with torch.inference_mode():
        expected = [fill(tensor) for tensor in tensors]
        rows.register(0, tensors)
    rows.copy_row(0, source_row=4, target_row=0)
    rows.exchange(0, 1, 2)
    assert equal([one[[4, 2, 1, 3, 4]] for one in expected], tensors)


def test_a_row_of_a_dtype_that_torch_cannot_compute_with_moves(rows):
    tensor = rows.allocate(0, shape=(5, 64), dtype=torch.float8_e4m3fn)
    rows.register(0, [tensor])
    expected = fill(tensor)
    rows.copy_row(0, source_row=3, target_row=1)
    assert torch.equal(expected[[0, 3, 2, 3, 4]], raw(tensor))


def test_a_registered_tensor_outlives_the_callers_name_for_it(rows):
    rows.register(0, [torch.ones(5, 1 << 16)])
    assert [4 << 16] * 50 == [rows.copy_row(0, source_row=i % 5, target_row=0) for i in range(50)]


def test_evicted_rows_are_read_back_to_the_bit(rows):
    tensors, expected = make(rows, 0, num_rows=5)
    rows.evict()
    assert equal(expected, tensors)


def test_closing_gives_everything_back_and_ends_all_service(rows, file):
    make(rows, 0, num_rows=5)
    make(rows, 1, num_rows=5)
    rows.close()
    rows.close()
    assert (0, 0, (), 0) == (rows.hot_bytes, rows.host_bytes, rows.ranges, file.num_bytes)
    assert 0 == os.fstat(file.handle).st_blocks
    for call in (
        lambda: rows.allocate(0, shape=(5, 64), dtype=torch.uint8),
        lambda: rows.copy_row(0, source_row=0, target_row=1),
        lambda: rows.exchange(0, 0, 1),
        lambda: rows.permute(0, rows=[1, 0], free_row=None),
        lambda: rows.register(0, []),
    ):
        with pytest.raises(BankError, match="the banks are closed: load the model again"):
            call()


def test_a_range_that_cannot_be_closed_keeps_none_of_the_others_open(rows, monkeypatch):
    for layer_id in (0, 1):
        rows.allocate(layer_id, shape=(5, 64), dtype=torch.uint8)
    held = rows.ranges
    closed, close = [], ranges.StitchedRange.close

    def fail_once(one):
        closed.append(one)
        if len(closed) == 1:
            raise BankError("address range cannot be unmapped")
        close(one)

    monkeypatch.setattr(ranges.StitchedRange, "close", fail_once)
    with pytest.raises(BankError, match="cannot be unmapped"):
        rows.close()
    assert set(held) == set(closed)
    monkeypatch.undo()
    closed[0].close()


def test_a_disk_that_fills_up_midway_is_one_clear_error_and_closing_still_gives_everything_back(
    rows, file, monkeypatch
):
    rows.allocate(0, shape=(5, 64), dtype=torch.uint8)

    def no_room(handle, offset, size):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(BankError, match="No space left on device"):
            rows.allocate(1, shape=(5, 64), dtype=torch.uint8)
    assert (1, 4096) == (len(rows.ranges), file.num_bytes)
    rows.close()
    assert 0 == file.num_bytes
