from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotsplit.errors import HistogramError, HotsplitError
from hotsplit.notices import enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import (
    Histogram,
    PhaseCounts,
    fill_empty_layers,
    fit_layers,
    is_count,
    name_layers,
    planning_counts,
    quantisation_notices,
    save_histogram,
    to_json,
    tokens_per_layer,
    validate,
)
from hotsplit.plan.identity import ModelIdentity


def histogram(decode=None, *, layers=(3, 4), top_k=2, prefill=None, tokens=None, normalised=False, **more):
    phases = {
        name: PhaseCounts(counts=np.asarray(counts), tokens=tokens)
        for name, counts in (("decode", decode), ("prefill", prefill))
        if counts is not None
    }
    num_experts = next(iter(phases.values())).counts.shape[1] if phases else 4
    identity = ModelIdentity(model_type="toy", layers=layers, num_experts=num_experts, top_k=top_k)
    return Histogram(identity=identity, phases=phases, normalised=normalised, **more)


def names(notices):
    return [notice.name for notice in notices]


GOOD = [[6.0, 3.0, 1.0, 0.0], [5.0, 5.0, 0.0, 0.0]]


def test_a_good_histogram_raises_no_doubt():
    assert [] == validate(histogram(GOOD, tokens=5), what="histogram f.json")


@pytest.mark.parametrize(
    ("value", "spelled"),
    [(np.nan, "NaN"), (np.inf, "+inf"), (-np.inf, "-inf"), (-1.0, "-1.0"), (2.0**53 + 2, "9007199254740994.0")],
)
def test_a_bad_cell_is_named_by_decoder_layer_and_expert(value, spelled):
    counts_LE = np.array(GOOD)
    counts_LE[1, 2] = value
    with pytest.raises(HistogramError) as caught:
        validate(histogram(counts_LE), what="histogram f.json")
    assert f"histogram f.json, layer 4, expert 2 (decode): got {spelled};" in str(caught.value)
    assert (4, 2) == (caught.value.layer, caught.value.expert)
    assert np.array_equal(value, caught.value.value, equal_nan=True)


def test_an_integer_array_is_checked_before_float64_rounds_it():
    counts_LE = np.array([[2**53 + 1, 1], [1, 1]], dtype=np.int64)
    with pytest.raises(HistogramError, match=r"layer 3, expert 0 .*9007199254740993"):
        validate(histogram(counts_LE), what="f")


def test_a_fraction_is_a_count_only_where_counts_are_normalised():
    with pytest.raises(HistogramError, match=r"layer 3, expert 1 .*an integer from 0"):
        validate(histogram([[1.0, 0.5], [1.0, 2.0]]), what="f")
    assert [] == validate(histogram([[1.0, 0.5], [1.0, 2.0]], normalised=True), what="f")


@pytest.mark.parametrize("tokens", [-1, 2**53 + 1, 10**30, 10**400])
@pytest.mark.parametrize("normalised", [False, True])
def test_tokens_that_are_none_are_refused(tokens, normalised):
    with pytest.raises(HistogramError, match=r"f, tokens \(decode\): got .*; wanted an integer from 0 to 2\*\*53"):
        validate(histogram(GOOD, tokens=tokens, normalised=normalised), what="f")


def test_totals_must_be_tokens_times_top_k():
    with pytest.raises(
        HistogramError, match=r"layer 4 .*got 9 routed pairs; wanted tokens x top_k = 5 x 2 = 10"
    ) as caught:
        validate(histogram([[6, 3, 1, 0], [5, 4, 0, 0]], tokens=5), what="f")
    assert (4, 9) == (caught.value.layer, caught.value.value)


def test_totals_are_not_asked_of_normalised_counts_nor_without_tokens_or_top_k():
    uneven = [[6, 3, 1, 0], [5, 4, 0, 0]]
    assert [] == validate(histogram(uneven, tokens=5, normalised=True), what="f")
    assert [] == validate(histogram(uneven), what="f")
    assert [] == validate(histogram(uneven, tokens=5, top_k=None), what="f")


def test_an_empty_layer_is_flagged_and_named_by_its_decoder_index():
    notices = validate(histogram([[6, 3, 1, 0], [5, 5, 0, 0], [0, 0, 0, 0]], layers=(3, 4, 9), tokens=5), what="f")
    assert ["empty-layer"] == names(notices)
    assert "no counts for layer 9, taken as uniform" in notices[0].text


@pytest.mark.parametrize(
    "counts",
    [[[6, 3], [0, 0], [5, 4]], [[6, 3], [0, 0], [0, 0]], [[2, 2], [2, 2], [2, 2]]],
    ids=["empty layer", "one layer", "flat"],
)
def test_strict_mode_refuses_every_doubt(counts):
    notices = validate(histogram(counts, layers=(0, 1, 2)), what="f")
    with pytest.raises(HistogramError, match="HOTSPLIT_STRICT=0"):
        enforce(notices, strict=True, error=HistogramError)
    enforce(notices, strict=False, error=HistogramError)


def test_flat_counts_are_named_as_presence_counting():
    notices = validate(histogram([[7, 7, 7, 7], [7, 7, 7, 7]]), what="f")
    assert ["flat-counts"] == names(notices)
    assert "presence" in notices[0].text


def test_equal_counts_among_used_experts_are_flat_too():
    assert ["flat-counts"] == names(validate(histogram([[1, 1, 0, 0], [0, 1, 1, 1]]), what="f"))


def test_one_skewed_layer_is_enough_not_to_be_flat():
    assert [] == validate(histogram([[7, 7, 7, 7], [7, 7, 7, 8]]), what="f")


def test_one_expert_for_every_token_is_not_flat():
    assert [] == validate(histogram([[7, 0], [0, 7]], top_k=1), what="f")


def test_all_counts_in_the_first_layer_are_named_as_a_capture_bug():
    notices = validate(histogram([[6, 3, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], layers=(3, 4, 5)), what="f")
    assert ["one-layer-counts", "empty-layer"] == names(notices)
    assert "all counts are in layer 3, a capture bug" in notices[0].text


def test_a_model_of_one_layer_may_have_all_counts_in_it():
    assert [] == validate(histogram([[6, 3, 1, 0]], layers=(3,)), what="f")


def test_a_histogram_without_phases_is_refused():
    with pytest.raises(HistogramError, match="f: got no phase"):
        validate(histogram(), what="f")


@given(hnp.arrays(np.float64, (6, 8), elements=st.integers(0, 9).map(float)), st.sampled_from("FCT-"))
def test_a_strided_view_is_judged_and_filled_like_its_contiguous_copy(base, layout):
    view_LE = {"F": np.asfortranarray(base), "C": base[::2, 1::3], "T": base.T, "-": base[::-1, ::-2]}[layout]
    layers = tuple(range(len(view_LE)))
    copy_LE = np.ascontiguousarray(view_LE)
    one, other = histogram(view_LE, layers=layers), histogram(copy_LE, layers=layers)
    assert validate(other, what="f") == validate(one, what="f")
    assert to_json(other, "now") == to_json(one, "now")
    for expected, got in zip(fill_empty_layers(copy_LE), fill_empty_layers(view_LE), strict=True):
        assert np.array_equal(expected, got)


def test_empty_layers_are_filled_uniformly_at_the_weight_of_the_others():
    counts_LE = np.array([[6, 2], [0, 0], [3, 1]])
    filled_LE, empty = fill_empty_layers(counts_LE)
    assert [1] == empty
    assert [[6.0, 2.0], [3.0, 3.0], [3.0, 1.0]] == filled_LE.tolist()
    assert [[6, 2], [0, 0], [3, 1]] == counts_LE.tolist()


def test_a_histogram_of_nothing_is_filled_uniformly():
    filled_LE, empty = fill_empty_layers(np.zeros((2, 3)))
    assert ([0, 1], 1) == (empty, len(np.unique(filled_LE)))
    assert filled_LE.min() > 0


def test_plans_rank_on_decode_where_there_is_any():
    counted, phase, notices = planning_counts(histogram(GOOD, prefill=[[1, 2, 3, 4], [4, 3, 2, 1]]))
    assert ("decode", [], GOOD) == (phase, notices, counted.counts.tolist())


@pytest.mark.parametrize("decode", [None, np.zeros((2, 4))], ids=["absent", "all zero"])
def test_plans_rank_on_prefill_only_without_decode_and_say_so(decode):
    _, phase, notices = planning_counts(histogram(decode, prefill=GOOD))
    assert ("prefill", ["prefill-counts"]) == (phase, names(notices))


def test_no_phase_gives_nothing_to_plan_on():
    with pytest.raises(HistogramError, match="no phase"):
        planning_counts(histogram())


def test_tokens_of_a_layer_are_its_pairs_over_top_k():
    assert [5.0, 4.5] == tokens_per_layer(histogram([[6, 4], [4, 5]]), phase="decode", top_k=2).tolist()
    assert [0.0, 0.0] == tokens_per_layer(histogram([[6, 4], [4, 5]]), phase="prefill", top_k=2).tolist()


def test_scaled_counts_answer_only_with_the_tokens_they_carry():
    scaled = [[0.5, 0.5], [0.0, 0.0]]
    assert tokens_per_layer(histogram(scaled, normalised=True), phase="decode", top_k=2) is None
    carried = tokens_per_layer(histogram(scaled, normalised=True, tokens=7), phase="decode", top_k=2)
    assert [7.0, 0.0] == carried.tolist()


def test_a_missing_layer_of_a_keyed_file_becomes_an_empty_one():
    fitted, notices = fit_layers(histogram([[6, 4], [4, 5]], layers=(0, 2)), layers=(0, 1, 2), what="f")
    assert ((0, 1, 2), [[6, 4], [0, 0], [4, 5]]) == (fitted.layers, fitted.phases["decode"].counts.tolist())
    assert ([], ["empty-layer"]) == (names(notices), names(validate(fitted, what="f")))


def test_a_draft_layer_after_the_last_one_is_left_out_and_named():
    fitted, notices = fit_layers(histogram([[6, 4], [4, 5]], layers=(3, 61)), layers=(3,), what="f")
    assert ((3,), ["draft-layer"]) == (fitted.layers, names(notices))
    assert "layer 61" in notices[0].text


@pytest.mark.parametrize("layers", [tuple(range(48)), (0, 1, 2, 3, 4, 5), (1, 2)])
def test_the_layers_of_another_model_are_left_for_the_identity_check(layers):
    theirs = histogram(np.ones((94, 2)), layers=tuple(range(94)))
    if len(layers) == 6:
        theirs = histogram(np.ones((3, 2)), layers=(0, 2, 4))
    assert theirs is fit_layers(theirs, layers=layers, what="f")[0]


def test_another_quantisation_is_a_notice_and_an_unknown_one_is_none():
    assert ["other-quantisation"] == names(quantisation_notices("fp8", "int4", what="f"))
    assert [] == quantisation_notices("fp8", "fp8", what="f") + quantisation_notices(None, "fp8", what="f")


def test_an_identity_that_cannot_index_counts_is_refused():
    with pytest.raises(HistogramError, match="layers and num_experts"):
        Histogram(identity=ModelIdentity(layers=(0,)), phases={})
    with pytest.raises(HistogramError, match="shape"):
        histogram([[1, 2]], layers=(0, 1))
    with pytest.raises(HistogramError, match="'draft'"):
        Histogram(
            identity=ModelIdentity(layers=(0,), num_experts=1), phases={"draft": PhaseCounts(counts=np.ones((1, 1)))}
        )


def test_many_layers_are_named_by_the_first_three():
    assert "layer 7" == name_layers([7])
    assert "layers 3, 4, 5 and 58 more" == name_layers(range(3, 64))


@pytest.mark.parametrize("value", [True, None, "3", [1], float("nan"), 2**53 + 1, 10**400, -1, 1.5])
def test_is_count_refuses(value):
    assert not is_count(value, normalised=False)


@pytest.mark.parametrize("value", [0, 2**53, 3.0])
def test_is_count_accepts_whole_numbers(value):
    assert is_count(value, normalised=False)


counts_arrays = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 2**53).map(float)
)
share_arrays = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.floats(0, 2.0**53)
)


@given(counts_arrays | share_arrays, st.booleans(), st.data())
def test_every_valid_histogram_comes_back_from_its_file(tmp_path_factory, counts_LE, both, data):
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, 99), min_size=len(counts_LE), max_size=len(counts_LE)))))
    normalised = bool((counts_LE != np.floor(counts_LE)).any())
    written = histogram(
        counts_LE,
        layers=layers,
        prefill=counts_LE[::-1] if both else None,
        normalised=normalised,
        top_k=1,
        name=data.draw(st.none() | st.text(max_size=5)),
        quantisation="fp8",
        source={"command": "profile"},
    )
    path = tmp_path_factory.mktemp("histogram") / "h.json"
    save_histogram(written, path)
    read, _ = load_histogram(path)
    for name in ("identity", "normalised", "name", "quantisation", "source"):
        assert getattr(written, name) == getattr(read, name)
    assert set(written.phases) == set(read.phases)
    for phase, counted in written.phases.items():
        assert np.array_equal(counted.counts, read.phases[phase].counts)
        assert counted.tokens == read.phases[phase].tokens


def test_our_file_is_the_documented_form(tmp_path):
    save_histogram(
        histogram([[6, 4], [4, 6]], tokens=5, name="toy"), tmp_path / "h.json", created="2026-01-01T00:00:00"
    )
    expected = {
        "format": "hotsplit-histogram",
        "version": 1,
        "model": {
            "name": "toy",
            "model_type": "toy",
            "num_experts": 2,
            "top_k": 2,
            "layers": [3, 4],
            "quantisation": None,
        },
        "source": {},
        "created": "2026-01-01T00:00:00",
        "phases": {"decode": {"tokens": 5, "layers": {"3": [6, 4], "4": [4, 6]}}},
    }
    assert expected == json.loads((tmp_path / "h.json").read_text())


def test_a_bad_histogram_is_never_written_over_a_good_one(tmp_path):
    path = tmp_path / "h.json"
    path.write_text("mine")
    with pytest.raises(HistogramError, match="layer 3, expert 1"):
        save_histogram(histogram([[1.0, -1.0], [1.0, 1.0]]), path)
    with pytest.raises(HistogramError, match="source"):
        save_histogram(histogram(GOOD, source={"when": float("nan")}), path)
    assert "mine" == path.read_text()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HotsplitError, match="cannot write"):
        save_histogram(histogram(GOOD), tmp_path / "file" / "h.json")
