"""States that a CPU run does not get into by itself: cold pages pushed out, padded batches, and a row map that is wrong.

All in one run (IN_ODD_STATES), one generation each, of the same prompts on the same schedule.
"""

from __future__ import annotations

import pytest

from engines.vllm.vllm_jobs import IN_ODD_STATES

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PLAIN, EVICTED, PADDED, ROLLED = range(4)


@pytest.fixture
def odd(played):
    return played(*IN_ODD_STATES)


@pytest.fixture
def expected(stock):
    return stock(*IN_ODD_STATES[:1], ranks=IN_ODD_STATES[1]).answers(0)


def test_cold_pages_that_were_pushed_out_come_back_bit_by_bit(odd, expected):
    (pages,) = odd.told("evict")
    assert pages["before"] > 0
    assert 0 == pages["after"]
    assert expected == odd.answers(EVICTED)


def test_padding_touches_no_row_of_its_own_and_changes_no_real_token(odd, expected):
    (report,) = odd.told("report")
    assert report["padding_tokens"] > 500
    assert 0 == report["padding_rows_of_its_own"]
    assert expected == odd.answers(PADDED)


def test_padding_is_not_counted(odd):
    """The probe counts the real tokens alone, and over the whole run hotsplit has counted as many."""
    (report,) = odd.last["report"]
    (snapshot,) = odd.snapshots
    assert report["tokens"] == dict(snapshot.tokens)
    assert report["pairs"] == dict(snapshot.pairs)


def test_a_wrong_row_map_gives_other_tokens(odd, expected):
    differing = [one for one, other in zip(odd.answers(ROLLED), expected, strict=True) if one != other]
    assert len(expected) == len(differing)


def test_a_wrong_row_map_is_what_the_probe_calls_a_mismatch(odd):
    (before,), (after,) = odd.told("report"), odd.last["report"]
    assert 0 == before["mismatches"]
    assert after["mismatches"] == after["compared"] - before["compared"]
