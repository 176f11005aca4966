"""Ten thousand tokens: memory stays what it was after the first thousand, swaps and updates included."""

from __future__ import annotations

import pytest
import torch

from hotsplit.bank.kernels import fast_library
from hotsplit.data import tiny_moe_path

pytestmark = [pytest.mark.transformers, pytest.mark.soak]

MIB = 2**20
TOKENS, FIRST, CONTEXT = 10_000, 1_000, 250
ALLOWED = 4 * MIB
"""Of growth; 0.2 MiB were measured. A row of the model has 24 KiB, and hundreds of swaps move one each."""


def anonymous_bytes():
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_anonymous_memory_is_flat_over_ten_thousand_tokens(load):
    model = load(tiny_moe_path(), hot=0.35, dyn_steps=50, dyn_margin=1, dyn_half_life=2)
    require_flat(model)


@pytest.mark.skipif(fast_library.load() is None, reason="the native code is not built here")
def test_it_is_flat_with_slots_and_the_fast_kernel_too(load, full):
    model = load(tiny_moe_path(), hot=0.6, kernel="fast", dyn_steps=50, dyn_margin=1, dyn_half_life=2)
    require_flat(model)
    assert model.hotsplit.snapshot().kept_bytes > 0, "else there were no slots"
    assert model.hotsplit.banks.rows.cold_counts.staged_rows > 1000, "else nothing was read that could leak"


def require_flat(model):
    """Decode; after the first thousand tokens memory does not grow."""
    from transformers import DynamicCache

    torch.set_num_threads(1)
    dice, seen = torch.Generator().manual_seed(0), {}
    for number in range(TOKENS):
        if number % CONTEXT == 0:
            cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=torch.randint(3, 100, (1, 1), generator=dice), past_key_values=cache, use_cache=True)
        if number + 1 in (FIRST, TOKENS):
            seen[number + 1] = anonymous_bytes()
    assert model.hotsplit.snapshot().swaps_done > 100, "else nothing was swapped that could leak"
    assert seen[TOKENS] - seen[FIRST] < ALLOWED
