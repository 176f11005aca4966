"""Rows in two banks over a fake driver, whose elements tell their number."""

from __future__ import annotations

import torch

from hotsplit.bank.rows import place
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.bank.two_banks import TwoBankMemory

NUM_EXPERTS = 6
HOT = [(4, 1), (0, 3, 5), (2,)]
LAYERS = [place(hot, num_experts=NUM_EXPERTS, spare=True, inclusive=False) for hot in HOT]
SHAPES = (((7, 12, 64), torch.int32), ((7, 128), torch.int16))


def memory_of(driver, **options):
    return TwoBankMemory(driver, tensor_at=cpu_tensor, synchronise=lambda: None, **options)


def owner(layer_id, row):
    return 100 * (layer_id + 1) + row


def fill(layer_id, tensors):
    """Every row's elements tell its number, in whole tensors and in parts."""
    for parts in tensors:
        row = 0
        for part in parts if isinstance(parts, tuple) else (parts,):
            for one in part:
                one.fill_(owner(layer_id, row))
                row += 1


def load(rows, layer_id):
    """Two tensors in two parts, and a plain one; registered, and every row with its number."""
    made = [rows.allocate_parts(layer_id, shape=shape, dtype=dtype) for shape, dtype in SHAPES]
    tensors = [*made, torch.empty(7, 5, dtype=torch.float32)]
    fill(layer_id, tensors)
    rows.register(layer_id, tensors)
    return tensors


def numbers(parts):
    """What each row says, [R]; all of its elements must say the same."""
    whole = torch.cat(parts) if isinstance(parts, tuple) else parts
    flat = whole.flatten(1)
    assert bool((flat == flat[:, :1]).all()), "a row of mixed bytes"
    return (flat[:, 0] % 100).int().tolist()
