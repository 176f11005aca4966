from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotsplit.errors import ConfigError, HistogramError, PlanMismatchError
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.rerank import merge, rerank

IDENTITY = ModelIdentity(model_type="toy", layers=(3, 4), num_experts=2, top_k=1)


def histogram(decode=None, *, prefill=None, identity=IDENTITY, **more):
    given_counts = {"decode": decode, "prefill": prefill}
    phases = {
        phase: PhaseCounts(counts=np.asarray(counts, dtype=float))
        for phase, counts in given_counts.items()
        if counts is not None
    }
    return Histogram(identity=identity, phases=phases, **more)


def decode_of(merged):
    return merged.phases["decode"].counts


OLD = [[3e9, 1e9], [1.0, 1.0]]
NEW = [[10_000.0, 40_000.0], [50_000.0, 0.0]]


def test_a_weight_of_a_quarter_is_the_manual_arithmetic_on_shares():
    expected = [[0.75 + 0.25 * 0.2, 0.25 + 0.25 * 0.8], [0.5 + 0.25 * 1.0, 0.5]]
    assert expected == decode_of(merge(histogram(OLD), histogram(NEW), live_weight=0.25)).tolist()


def test_the_merged_histogram_is_normalised_and_named_like_the_reference():
    merged = merge(histogram(OLD, name="old", source={"a": 1}), histogram(NEW, name="new"), live_weight=0.25)
    assert (True, "old") == (merged.normalised, merged.name)
    assert {"reference": {"a": 1}, "live": {}, "live_weight": 0.25} == merged.source


counts = hnp.arrays(np.float64, (2, 2), elements=st.integers(0, 2**40).map(float))
weights = st.floats(0, 100)


@given(counts, counts, weights)
def test_each_layer_adds_up_to_one_plus_the_weight(old, new, weight):
    totals = decode_of(merge(histogram(old), histogram(new), live_weight=weight)).sum(axis=1)
    expected = old.any(axis=1) * 1.0 + new.any(axis=1) * weight
    assert np.allclose(expected, totals, rtol=1e-12, atol=0)


@given(counts, counts, weights, st.integers(1, 1000))
def test_the_length_of_either_sample_does_not_matter(old, new, weight, factor):
    once = decode_of(merge(histogram(old), histogram(new), live_weight=weight))
    assert np.allclose(once, decode_of(merge(histogram(old * factor), histogram(new), live_weight=weight)), rtol=1e-12)
    assert np.allclose(once, decode_of(merge(histogram(old), histogram(new * factor), live_weight=weight)), rtol=1e-12)


@given(counts, counts)
def test_at_weight_one_the_sides_are_equals(old, new):
    one = decode_of(merge(histogram(old), histogram(new)))
    assert np.array_equal(one, decode_of(merge(histogram(new), histogram(old))))


@given(counts, counts)
def test_a_weight_of_nothing_leaves_the_references_order(old, new):
    merged = decode_of(merge(histogram(old), histogram(new), live_weight=0.0))
    assert np.array_equal(np.argsort(old, axis=1, kind="stable"), np.argsort(merged, axis=1, kind="stable"))


@given(counts, counts, weights)
def test_a_merged_histogram_survives_its_file(tmp_path_factory, old, new, weight):
    merged = merge(histogram(old), histogram(new), live_weight=weight)
    path = tmp_path_factory.mktemp("merged") / "m.json"
    save_histogram(merged, path)
    read, _ = load_histogram(path)
    assert np.array_equal(decode_of(merged), decode_of(read))
    assert read.normalised


def test_merging_changes_neither_side():
    old, new = histogram(OLD), histogram(NEW)
    merge(old, new)
    assert (OLD, NEW) == (decode_of(old).tolist(), decode_of(new).tolist())


def test_a_strided_view_merges_like_its_copy():
    base = np.arange(16.0).reshape(4, 4)
    view = base[::2, ::-2]
    expected = decode_of(merge(histogram(OLD), histogram(np.ascontiguousarray(view))))
    viewed = replace(histogram(OLD), phases={"decode": PhaseCounts(counts=view)})
    assert np.array_equal(expected, decode_of(merge(histogram(OLD), viewed)))


def test_phases_are_merged_apart_and_one_side_alone_stays_alone():
    merged = merge(histogram(prefill=OLD), histogram(NEW), live_weight=0.5)
    assert [[0.1, 0.4], [0.5, 0.0]] == decode_of(merged).tolist()
    assert [[0.75, 0.25], [0.5, 0.5]] == merged.phases["prefill"].counts.tolist()
    assert {"prefill"} == set(merge(histogram(prefill=OLD), histogram(NEW), live_weight=0.0).phases)


def test_an_empty_layer_of_either_side_leaves_the_other():
    merged = merge(histogram([[0, 0], [3, 1]]), histogram([[1, 3], [0, 0]]), live_weight=0.5)
    assert [[0.125, 0.375], [0.75, 0.25]] == decode_of(merged).tolist()


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_bad_weight_is_refused(weight):
    with pytest.raises(ConfigError, match="live weight: got .*; wanted a finite number >= 0"):
        merge(histogram(OLD), histogram(NEW), live_weight=weight)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"model_type": "other"}, "model_type"), ({"top_k": 2}, "top_k"), ({"layers": (3, 5)}, "layers")],
)
def test_a_sample_of_another_model_is_refused_by_the_field(change, field):
    other = histogram(NEW, identity=replace(IDENTITY, **change))
    for join in (merge, rerank):
        with pytest.raises(PlanMismatchError, match=f"{field} is "):
            join(histogram(OLD), other)


def test_a_sample_with_another_number_of_experts_is_refused():
    other = histogram([[1, 2, 3], [4, 5, 6]], identity=replace(IDENTITY, num_experts=3))
    with pytest.raises(PlanMismatchError, match="num_experts is 3, not 2"):
        rerank(histogram(OLD), other)


def test_a_field_that_one_side_lacks_is_said_and_kept_from_the_other():
    reference = histogram(OLD, identity=replace(IDENTITY, model_type=None, top_k=None))
    merged, notices = rerank(reference, histogram(NEW))
    assert ["identity-not-compared"] == [notice.name for notice in notices]
    assert IDENTITY == merged.identity


def test_another_quantisation_is_only_a_notice():
    _, notices = rerank(histogram(OLD, quantisation="fp8"), histogram(NEW, quantisation="int4"))
    assert ["other-quantisation"] == [notice.name for notice in notices]


def test_fifty_thousand_decode_tokens_per_layer_are_enough():
    merged, notices = rerank(histogram(OLD), histogram(NEW))
    assert ([], True) == (notices, merged.normalised)


def test_one_decode_token_less_is_refused_with_layer_and_number():
    few = [NEW[0], [49_999.0, 0.0]]
    with pytest.raises(HistogramError, match="layer 4: got 49999 decode tokens; wanted at least 50000") as caught:
        rerank(histogram(OLD), histogram(few))
    assert (4, 49_999.0) == (caught.value.layer, caught.value.value)


def test_tokens_are_pairs_over_top_k():
    by_two = replace(IDENTITY, top_k=2)
    with pytest.raises(HistogramError, match="got 25000 decode tokens"):
        rerank(histogram(OLD, identity=by_two), histogram(NEW, identity=by_two))


def test_prefill_tokens_do_not_make_a_sample_large_enough():
    with pytest.raises(HistogramError, match="layer 3: got 0 decode tokens"):
        rerank(histogram(prefill=OLD), histogram(prefill=NEW))


def test_the_minimum_is_the_users_to_lower():
    few = histogram([[1.0, 4.0], [5.0, 0.0]])
    assert rerank(histogram(OLD), few, min_tokens=5)[0].normalised
    with pytest.raises(HistogramError, match="at least 6"):
        rerank(histogram(OLD), few, min_tokens=6)


def test_scaled_counts_that_do_not_say_their_tokens_are_no_live_sample():
    scaled = histogram(NEW, normalised=True)
    with pytest.raises(HistogramError, match="do not say how many"):
        rerank(histogram(OLD), scaled)
    assert rerank(histogram(OLD), scaled, min_tokens=0)[0].normalised


def test_a_reference_without_decode_counts_says_that_the_sample_decides_alone():
    merged, notices = rerank(histogram(prefill=OLD), histogram(NEW))
    assert ["live-alone"] == [notice.name for notice in notices]
    assert {"decode", "prefill"} == set(merged.phases)
