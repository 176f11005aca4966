"""The replay behind the share of slots: what is hot or was read lately is not read again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench_cold_memory import NUM_EXPERTS, RESULTS, LastUsed, Wanted, missed

from hotsplit.bank.cold_choice import FITS_RATIO, KEEPS_RATIO

LAYERS, TOP_K = 2, 2

both = pytest.mark.parametrize("kept", [LastUsed, Wanted])


@pytest.fixture
def ids():
    draws = np.random.default_rng(0)
    chosen = [[draws.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(300)]
    return np.array(chosen, dtype=np.uint8)


@pytest.fixture
def counts():
    return np.arange(LAYERS * NUM_EXPERTS).reshape(LAYERS, NUM_EXPERTS)


@both
@pytest.mark.parametrize("slots", [0.0, 0.5, 1.0])
def test_memory_for_everything_reads_nothing_once_it_is_warm(ids, counts, slots, kept):
    warm = np.concatenate([ids] * 20)
    assert 0 == missed(warm, counts=counts, memory=1.0, slots=slots, kept=kept)


@both
def test_without_slots_what_is_not_hot_is_read(ids, counts, kept):
    hot = np.zeros(counts.size, dtype=bool)
    hot[np.argsort(-counts.ravel(), kind="stable")[: counts.size // 2 - LAYERS]] = True
    rows = ids + np.arange(LAYERS)[None, :, None] * NUM_EXPERTS
    cold = 1 - hot[rows[len(ids) // 10 :]].mean()
    # As many slots as a layer chooses are the least there is.
    assert cold * 0.9 < missed(ids, counts=counts, memory=0.5, slots=0.0, kept=kept) <= cold


@both
def test_slots_keep_what_comes_again(counts, kept):
    again = np.tile(np.array([[[0, 1], [0, 1]]], dtype=np.uint8), (50, 1, 1))
    assert 0 == missed(again, counts=counts, memory=0.25, slots=1.0, kept=kept)
    assert 1 == missed(again, counts=counts, memory=0.25, slots=0.0, kept=kept)


def test_what_is_kept_says_half_of_the_memory_costs_little_at_worst_and_saves_much_where_traffic_moves():
    for one in json.loads(RESULTS.read_text())["results"]:
        rates = one["read_share_by_slots"]
        assert rates["0.5"] <= 1.25 * rates["0.0"]
        if "by counts of" in one["traffic"]:
            assert rates["0.5"] <= 0.55 * rates["0.0"]


def test_what_is_kept_says_the_product_chooses_the_cheaper_way_where_it_matters():
    for one in json.loads(RESULTS.read_text())["choice"]:
        enough = min(KEEPS_RATIO, FITS_RATIO * (1 - one["budget"]))
        if one["page_cache"] >= enough:
            assert one["cost_over_direct"] <= 1.15
        else:
            assert one["cost_over_direct"] >= 0.85
