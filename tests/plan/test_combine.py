"""Merging by shares, by pairs and by ranks (CASES T3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hotsplit.errors import ConfigError, HistogramError, PlanMismatchError
from hotsplit.plan.combine import RULES, add_counts, join_ranks, merge_shares
from hotsplit.plan.histogram import Histogram, PhaseCounts
from plan_builders import histogram_of

A, B = [[6.0, 3.0, 1.0], [2.0, 2.0, 0.0]], [[1.0, 1.0, 2.0], [0.0, 0.0, 5.0]]
matrices = arrays.arrays(np.float64, (2, 3), elements=st.integers(0, 10**6).map(float))


def counts_of(histogram, phase="decode"):
    return histogram.phases[phase].counts


def test_a_weight_of_a_quarter_is_a_quarter_of_every_layer_s_shares():
    merged, _ = merge_shares([histogram_of(A), histogram_of(B)], weights=[1.0, 0.25])
    expected = [[0.6 + 0.0625, 0.3 + 0.0625, 0.1 + 0.125], [0.5, 0.5, 0.25]]
    assert expected == pytest.approx(counts_of(merged), abs=1e-15)
    assert merged.normalised


def test_how_long_a_sample_was_changes_nothing():
    long = histogram_of(1000 * np.array(A))
    one, other = (merge_shares([h, histogram_of(B)], weights=[1.0, 0.25])[0] for h in (histogram_of(A), long))
    assert counts_of(one).tolist() == counts_of(other).tolist()


@given(st.lists(st.tuples(matrices, st.floats(0.1, 4)), min_size=2, max_size=4), st.randoms())
def test_the_order_of_files_changes_nothing(parts, random):
    shuffled = random.sample(parts, len(parts))
    one, other = (
        merge_shares([histogram_of(m) for m, _ in order], weights=[w for _, w in order])[0]
        for order in (parts, shuffled)
    )
    assert counts_of(one).tolist() == counts_of(other).tolist()
    one, other = (add_counts([histogram_of(m) for m, _ in order])[0] for order in (parts, shuffled))
    assert counts_of(one).tolist() == counts_of(other).tolist()


@given(matrices, st.integers(0, 2**6 - 1))
def test_parts_of_different_experts_are_the_whole_whatever_the_cut_and_the_order(whole, bits):
    mask = (bits >> np.arange(6) & 1).astype(bool).reshape(2, 3)
    parts = [histogram_of(np.where(mask, whole, 0.0)), histogram_of(np.where(mask, 0.0, whole))]
    for order in (parts, parts[::-1]):
        assert whole.tolist() == counts_of(join_ranks(order)[0]).tolist()


@given(matrices, st.integers(1, 4))
def test_copies_count_once(whole, number):
    joined, notices = join_ranks([histogram_of(whole)] * number)
    assert whole.tolist() == counts_of(joined).tolist()
    assert f"{number - 1} are copies" in notices[0].text


def test_copies_of_parts_are_told_apart_from_parts():
    left, right = histogram_of([[3.0, 0.0], [4.0, 0.0]]), histogram_of([[0.0, 5.0], [0.0, 6.0]])
    joined, notices = join_ranks([left, right, left, right])
    assert [[3.0, 5.0], [4.0, 6.0]] == counts_of(joined).tolist()
    assert "4 rank files: 2 are copies" in notices[0].text


def test_ranks_that_counted_one_cell_differently_are_an_error_with_its_place():
    other = [[6.0, 3.0, 1.0], [2.0, 1.0, 1.0]]
    with pytest.raises(HistogramError, match="layer 4, expert 0 .*counts 2 and 3 from different ranks") as caught:
        join_ranks([histogram_of(A[1:], first_layer=4), histogram_of([[3.0, 2.0, 0.0]], first_layer=4)])
    assert (4, 0) == (caught.value.layer, caught.value.expert)
    with pytest.raises(HistogramError, match="--rule sum"):
        join_ranks([histogram_of(A), histogram_of(other)])


def test_a_rank_may_leave_out_the_experts_and_layers_of_others():
    few, last = histogram_of([[3.0, 1.0]]), histogram_of([[0.0, 0.0, 5.0], [1.0, 1.0, 2.0]])
    assert [[3.0, 1.0, 5.0], [1.0, 1.0, 2.0]] == counts_of(join_ranks([few, last])[0]).tolist()


def with_tokens(counts, tokens, *, top_k=1):
    histogram = histogram_of(counts, top_k=top_k)
    return replace(histogram, phases={"decode": PhaseCounts(counts=np.array(counts, dtype=float), tokens=tokens)})


def test_ranks_together_have_tokens_times_top_k_pairs_per_layer():
    left, right = with_tokens([[3, 0], [2, 0]], 5), with_tokens([[0, 2], [0, 3]], 5)
    assert 5 == join_ranks([left, right])[0].phases["decode"].tokens
    with pytest.raises(HistogramError, match=r"tokens x top_k = 5 x 1 = 5"):
        join_ranks([left, with_tokens([[0, 1], [0, 3]], 5)])


def test_added_pairs_add_their_tokens():
    assert 12 == add_counts([with_tokens([[3, 2]], 5), with_tokens([[4, 3]], 7)])[0].phases["decode"].tokens
    assert add_counts([with_tokens([[3, 2]], 5), histogram_of([[4, 3]])])[0].phases["decode"].tokens is None


def test_a_phase_that_one_file_has_is_that_file_s_alone():
    merged, _ = merge_shares([histogram_of(A), histogram_of(B, phase="prefill")], weights=[1, 2])
    assert [0.5, 0.5, 1.0] == counts_of(merged, "prefill")[0].tolist()
    assert 0.6 == counts_of(merged)[0, 0]


def test_what_one_file_knows_of_the_model_the_result_knows():
    bare = Histogram(
        identity=replace(histogram_of(A).identity, model_type=None, top_k=None), phases=histogram_of(A).phases
    )
    merged, notices = merge_shares([bare, histogram_of(B)], weights=[1, 1])
    assert histogram_of(B).identity == merged.identity
    assert ["identity-not-compared"] == [notice.name for notice in notices]


@pytest.mark.parametrize("rule", RULES)
def test_normalised_counts_cannot_be_added(rule):
    scaled = replace(histogram_of(A), normalised=True)
    with pytest.raises(HistogramError, match="file 2: got normalised counts"):
        RULES[rule]([histogram_of(A), scaled])


@pytest.mark.parametrize("rule", [*RULES, "shares"])
def test_files_of_different_models_are_refused_by_the_field(rule):
    parts = [histogram_of(A), histogram_of(A, top_k=2)]
    with pytest.raises(PlanMismatchError, match="top_k is 2, not 1"):
        merge_shares(parts, weights=[1, 1]) if rule == "shares" else RULES[rule](parts)


@pytest.mark.parametrize("weights", [[1], [1, -1], [1, float("nan")], [float("inf"), 1], [0, 0]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ConfigError):
        merge_shares([histogram_of(A), histogram_of(B)], weights=weights)


@pytest.mark.parametrize("lacking", [0, 1])
def test_the_file_that_lacks_a_field_is_the_one_that_is_named(lacking):
    parts = [replace(part, identity=replace(part.identity, model_type="toy")) for part in map(histogram_of, (A, B))]
    parts[lacking] = replace(parts[lacking], identity=replace(parts[lacking].identity, model_type=None))
    notices = add_counts(parts, names=["a.json", "b.json"])[1]
    told = [notice.text for notice in notices if notice.name == "identity-not-compared"]
    assert [f"{'ab'[lacking]}.json does not carry model_type: not compared"] == told


def test_a_file_that_cannot_be_added_is_named():
    parts = [histogram_of(A), replace(histogram_of(B), normalised=True)]
    with pytest.raises(HistogramError, match="b.json: got normalised counts"):
        add_counts(parts, names=["a.json", "b.json"])
