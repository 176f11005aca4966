"""How cold rows are read follows from what the page cache can hold, and slots come out of the budget."""

from __future__ import annotations

import pytest

from bank.toy_source import toy_source
from hotsplit.bank.cold_choice import FITS_RATIO, KEEPS_RATIO, RECENT_SHARE, SlotNeeds, choose_cold, slot_needs

GIB = 2**30
NEEDS = SlotNeeds(slot_bytes=8 << 20, lie_apart=False)
APART = SlotNeeds(slot_bytes=8 << 20, lie_apart=True)


def choose(*, cold=20.0, cache=20.0, budget=8.0, needs=NEEDS, top_k=8):
    return choose_cold(
        expert_bytes=int((cold + budget) * GIB),
        cold_bytes=int(cold * GIB),
        cache_bytes=None if cache is None else int(cache * GIB),
        room_bytes=int(budget * GIB),
        needs=needs,
        top_k=top_k,
    )


@pytest.mark.parametrize("cache", [20, 28 * KEEPS_RATIO + 0.001, None])
def test_where_the_page_cache_keeps_enough_rows_go_through_it(cache):
    choice = choose(cache=cache)
    assert (False, 0, 0) == (choice.is_direct, choice.slots, choice.num_bytes)
    assert "through the page cache" in choice.text


@pytest.mark.parametrize("cache", [-3, 0, 1, 28 * KEEPS_RATIO - 0.1])
def test_where_it_keeps_too_little_they_are_read_past_it_into_half_of_the_budget(cache):
    choice = choose(cache=cache)
    assert (True, 512, 4 * GIB) == (choice.is_direct, choice.slots, choice.num_bytes)
    assert "directly, past the page cache" in choice.text
    assert "512 slots for them take 4.000 GiB of the budget" in choice.text


@pytest.mark.parametrize(("cache", "is_direct"), [(6 * FITS_RATIO + 0.1, False), (6 * FITS_RATIO - 0.1, True)])
def test_where_a_large_budget_leaves_few_cold_rows_a_part_of_them_is_enough(cache, is_direct):
    assert 28 * KEEPS_RATIO > cache
    assert is_direct == choose(cold=6.0, budget=22.0, cache=cache).is_direct


@pytest.mark.parametrize("budget", [0.0, 0.01, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("needs", [NEEDS, APART])
@pytest.mark.parametrize("cache", [0, 20])
def test_slots_never_take_more_than_their_share_of_the_budget(budget, needs, cache):
    choice = choose(cache=cache, budget=budget, needs=needs)
    assert choice.num_bytes <= budget * GIB * (1 / 16 if cache else RECENT_SHARE)
    assert choice.slots == 0 or choice.slots >= 8
    assert choice.is_direct == (cache == 0 and choice.slots > 0)


def test_rows_that_lie_apart_have_slots_to_be_put_together_in():
    choice = choose(needs=APART)
    assert (False, 32) == (choice.is_direct, choice.slots)
    assert "through the page cache" in choice.text


def test_needs_are_those_of_the_largest_row(tmp_path):
    apart, together = toy_source(tmp_path, is_split=True), toy_source(tmp_path, is_split=False, gap=0)
    assert slot_needs(apart).lie_apart
    assert slot_needs(apart).slot_bytes >= apart.layouts[0].num_bytes
    even = toy_source(tmp_path, is_split=False, gap=1)
    assert 0 == slot_needs(even).slot_bytes % 4096
    assert slot_needs(together).slot_bytes <= 2 * 4096
