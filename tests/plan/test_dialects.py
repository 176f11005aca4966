from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from histogram_files import FORMS, PHASELESS, ROWS, flat, live, ours, train
from hotsplit.errors import HistogramError
from hotsplit.plan.dialects import DIALECTS, load_histogram
from hotsplit.plan.histogram import to_json
from hotsplit.plan.identity import ModelIdentity

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared measurements are not beside the repository")


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="h.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


def names(notices):
    return [notice.name for notice in notices]


def test_every_dialect_is_tried_here_or_beside():
    assert set(DIALECTS) == {*FORMS, *PHASELESS, "sets"}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_counts_in_every_form_are_the_same_matrix(write, form):
    histogram, notices = load_histogram(write(FORMS[form]()))
    assert ([], (3, 4), False) == (notices, histogram.layers, histogram.normalised)
    assert [[6.0, 3.0, 1.0, 0.0], [5.0, 5.0, 0.0, 0.0]] == histogram.phases["decode"].counts.tolist()
    assert np.float64 == histogram.phases["decode"].counts.dtype


@pytest.mark.parametrize(
    ("form", "identity"),
    [
        ("ours", ModelIdentity(model_type="toy", layers=(3, 4), num_experts=4, top_k=2)),
        ("flat", ModelIdentity(model_type=None, layers=(3, 4), num_experts=4, top_k=2)),
        ("train", ModelIdentity(model_type=None, layers=(3, 4), num_experts=4, top_k=None)),
        ("live", ModelIdentity(model_type="toy", layers=(3, 4), num_experts=4, top_k=2)),
    ],
)
def test_a_file_claims_no_more_identity_than_it_carries(write, form, identity):
    assert identity == load_histogram(write(FORMS[form]()))[0].identity


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("NaN", "NaN"),
        ("Infinity", "+inf"),
        ("-1", "-1"),
        ("9007199254740993", "9007199254740993"),
        ("1e999", "+inf"),
        ("true", "True"),
        ("null", "None"),
        ('"7"', "'7'"),
    ],
)
def test_a_bad_cell_raises_with_its_layer_and_expert(write, form, text, spelled):
    content = json.dumps(FORMS[form]({"3": [6, 3, 1, 0], "4": [5, 5, "BAD", 0]})).replace('"BAD"', text)
    path = write(content)
    with pytest.raises(HistogramError) as caught:
        load_histogram(path)
    assert f"histogram {path}, layer 4, expert 2 (decode): got {spelled};" in str(caught.value)
    assert (4, 2) == (caught.value.layer, caught.value.expert)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("row", "expert"), [([5, 5, 0], 3), ([5, 5, 0, 0, 0], 4)], ids=["short", "long"])
def test_a_wrong_number_of_experts_raises_with_its_layer_and_first_expert(write, form, row, expert):
    with pytest.raises(HistogramError, match=f"layer 4, expert {expert} .*got {len(row)} experts; wanted 4") as caught:
        load_histogram(write(FORMS[form]({"3": [6, 3, 1, 0], "4": row, "5": [1, 2, 3, 4]} | {}, **layers_of(form))))
    assert (4, expert) == (caught.value.layer, caught.value.expert)


def layers_of(form):
    return {"layers": (3, 4, 5)} if form == "ours" else {}


@pytest.mark.parametrize("form", ["ours", "flat"])
def test_a_total_that_is_not_tokens_times_top_k_raises_with_its_layer(write, form):
    with pytest.raises(HistogramError, match=r"layer 4 .*got 9 routed pairs; wanted tokens x top_k = 5 x 2 = 10"):
        load_histogram(write(FORMS[form]({"3": [6, 3, 1, 0], "4": [5, 4, 0, 0]})))


@pytest.mark.parametrize("form", FORMS)
def test_an_all_zero_layer_is_flagged(write, form):
    histogram, notices = load_histogram(
        write(FORMS[form]({"3": [6, 3, 1, 0], "4": [0] * 4, "5": [6, 2, 1, 1]}, **layers_of(form)))
    )
    assert ["empty-layer"] == names(notices)
    assert "layer 4" in notices[0].text
    assert 3 == len(histogram.layers)


def test_a_layer_that_our_file_declares_and_lacks_is_flagged(write):
    histogram, notices = load_histogram(write(ours({"3": [6, 3, 1, 0], "5": [6, 2, 1, 1]}, layers=(3, 4, 5))))
    assert ["empty-layer"] == names(notices)
    assert [0.0] * 4 == histogram.phases["decode"].counts[1].tolist()


@pytest.mark.parametrize("form", ["flat", "train", "live"])
def test_a_layer_of_the_model_that_a_keyed_file_lacks_is_flagged(write, form):
    path = write(FORMS[form]({"3": [6, 3, 1, 0], "5": [6, 2, 1, 1]}))
    histogram, notices = load_histogram(path, layers=(3, 4, 5))
    assert (["empty-layer"], (3, 4, 5)) == (names(notices), histogram.layers)


def test_our_file_keeps_the_layers_it_declares_whatever_the_model_has(write):
    assert (3, 4) == load_histogram(write(ours()), layers=(3, 4, 5))[0].layers


def test_draft_layers_are_left_out_and_named(write):
    histogram, notices = load_histogram(write(flat({**ROWS, "61": [4, 3, 2, 1]})), layers=(3, 4))
    assert ((3, 4), ["draft-layer"]) == (histogram.layers, names(notices))


@pytest.mark.parametrize("form", FORMS)
def test_flat_counts_and_counts_of_one_layer_are_named(write, form):
    assert ["flat-counts"] == names(load_histogram(write(FORMS[form]({"3": [5, 5, 0, 0], "4": [0, 5, 0, 5]})))[1])
    one = load_histogram(write(FORMS[form]({"3": [6, 3, 1, 0], "4": [0, 0, 0, 0]})))[1]
    assert ["one-layer-counts", "empty-layer"] == names(one)


def test_the_first_word_of_a_phase_rules(write):
    histogram, notices = load_histogram(write(flat(phase="prefill (teacher forced over text, 2048-token blocks)")))
    assert (["prefill"], []) == (list(histogram.phases), notices)


def test_an_unknown_phase_counts_as_decode_and_says_so(write):
    histogram, notices = load_histogram(write(flat(phase="unknown")))
    assert (["decode"], ["unknown-phase"]) == (list(histogram.phases), names(notices))


@pytest.mark.parametrize("phase", ["", "decoding", 3, None])
def test_any_other_phase_is_refused(write, phase):
    with pytest.raises(HistogramError, match="wanted decode, prefill or unknown"):
        load_histogram(write(flat(phase=phase)))


SETS = {"book/3": [6, 3, 1, 0], "book/4": [5, 5, 0, 0], "code/3": [0, 1, 3, 4], "code/4": [1, 1, 3, 3]}


def test_a_set_is_chosen_after_the_file_name(write):
    path = write(flat(SETS, tokens={"book": 5, "code": 4}))
    histogram, notices = load_histogram(f"{path}#code")
    counted = histogram.phases["decode"]
    assert ([], 4, [[0, 1, 3, 4], [1, 1, 3, 3]]) == (notices, counted.tokens, counted.counts.tolist())
    assert "code" == histogram.source["set"]


def test_several_sets_and_none_chosen_is_an_error_that_lists_them(write):
    with pytest.raises(
        HistogramError, match="2 sets and none chosen; wanted FILE#set with one of book, code"
    ) as caught:
        load_histogram(write(flat(SETS, tokens={"book": 5, "code": 4})))
    assert ["book", "code"] == caught.value.sets


def test_a_set_that_is_not_there_is_an_error_that_lists_those_that_are(write):
    with pytest.raises(HistogramError, match="no set 'poem'; wanted FILE#set with one of book, code"):
        load_histogram(write(flat(SETS, tokens={"book": 5, "code": 4})) + "#poem")


@pytest.mark.parametrize("form", FORMS)
def test_a_set_of_a_file_without_sets_is_refused(write, form):
    with pytest.raises(HistogramError, match="got #book; wanted a file with sets"):
        load_histogram(write(FORMS[form]()) + "#book")


def test_the_only_set_needs_no_choice(write):
    rows = {key: row for key, row in SETS.items() if key.startswith("book/")}
    assert (3, 4) == load_histogram(write(flat(rows, tokens={"book": 5})))[0].layers


def test_a_hash_in_a_file_name_is_no_set(write):
    assert (3, 4) == load_histogram(write(flat(), name="run#2.json"))[0].layers


HASHED = {"b#c/3": [6, 3, 1, 0], "b#c/4": [5, 5, 0, 0], "b/3": [0, 1, 3, 4], "b/4": [1, 1, 3, 3]}


@pytest.mark.parametrize("name", ["h.json", "run#2.json", "#", "run#b"])
@pytest.mark.parametrize(("chosen", "first"), [("b#c", 6), ("b", 0)])
def test_a_set_whose_name_has_a_hash_is_reached_whatever_the_file_is_called(write, name, chosen, first):
    histogram, _ = load_histogram(write(flat(HASHED, tokens=None), name=name) + f"#{chosen}")
    assert (first, chosen) == (histogram.phases["decode"].counts[0, 0], histogram.source["set"])


def test_of_a_file_that_is_not_there_what_stands_before_the_first_hash_is_named(tmp_path):
    with pytest.raises(HistogramError, match=r"histogram .*gone.json: got no such file"):
        load_histogram(f"{tmp_path / 'gone.json'}#b#c")


def test_keys_with_and_without_a_domain_are_refused(write):
    with pytest.raises(HistogramError, match="with and without a domain"):
        load_histogram(write(flat({"3": [1, 2, 3, 4], "book/3": [1, 2, 3, 4]})))


def test_a_training_mix_scaled_to_a_million_is_normalised(write):
    rows = {"3": [600000.5, 299999.5, 100000.0, 0.0], "4": [500000.0, 400000.0, 100000.0, 0.0]}
    assert load_histogram(write(train(rows)))[0].normalised
    rounded = {"3": [600001, 299999, 100000, 0], "4": [500000, 400000, 99999, 0]}
    assert load_histogram(write(train(rounded)))[0].normalised


@pytest.mark.parametrize("form", ["ours", "flat", "live"])
def test_a_fraction_is_refused_where_counts_are_pairs(write, form):
    with pytest.raises(HistogramError, match=r"layer 3, expert 1 .*got 3.5; wanted an integer"):
        load_histogram(write(FORMS[form]({"3": [6, 3.5, 0.5, 0], "4": [5, 5, 0, 0]})))


def test_our_normalised_form_holds_fractions(write):
    content = ours({"3": [0.6, 0.3, 0.1, 0], "4": [0.5, 0.5, 0, 0]}, normalised=True)
    histogram, notices = load_histogram(write(content))
    assert (True, [0.6, 0.3, 0.1, 0.0]) == (histogram.normalised, histogram.phases["decode"].counts[0].tolist())
    assert ([], True) == (notices, to_json(histogram, "now")["normalised"])


def test_both_phases_of_a_file_are_kept_apart(write):
    content = live()
    content["live"]["prefill"] = {"3": [1, 2, 3, 4], "4": [4, 3, 2, 1]}
    histogram, _ = load_histogram(write(content))
    assert [1.0, 2.0, 3.0, 4.0] == histogram.phases["prefill"].counts[0].tolist()
    assert [6.0, 3.0, 1.0, 0.0] == histogram.phases["decode"].counts[0].tolist()


def test_layer_keys_are_ordered_as_numbers(write):
    histogram, _ = load_histogram(write(train({"10": [1, 2], "9": [4, 3]})))
    assert ((9, 10), [4.0, 3.0]) == (histogram.layers, histogram.phases["decode"].counts[0].tolist())


@pytest.mark.parametrize("key", ["-1", "x", "", "3.0", "\u0663"])
def test_a_layer_key_that_is_no_index_is_refused(write, key):
    with pytest.raises(HistogramError, match="decoder layer indices as keys"):
        load_histogram(write(train({key: [1, 2]})))


def test_two_spellings_of_one_layer_are_refused(write):
    with pytest.raises(HistogramError, match="layer 3: got two rows"):
        load_histogram(write(train({"3": [1, 2], "03": [1, 2]})))


def test_a_row_of_a_layer_that_the_model_lacks_is_refused(write):
    with pytest.raises(HistogramError, match=r"layer 7: got a layer that model.layers lacks"):
        load_histogram(write(ours({**ROWS, "7": [1, 1, 1, 1]})))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version 2; wanted version 1"),
        ({"model": {"num_experts": 4, "layers": []}}, r"model.layers: got \[\]"),
        ({"model": {"num_experts": 4, "layers": [4, 3]}}, r"model.layers: got \[4, 3\]; wanted ascending"),
        ({"model": {"num_experts": None, "layers": [3, 4]}}, "model.num_experts: got None"),
        ({"model": {"num_experts": 4, "top_k": 5, "layers": [3, 4]}}, "top_k: got 5; wanted an integer from 1 to 4"),
        ({"model": {"num_experts": 4, "top_k": "2", "layers": [3, 4]}}, "top_k: got '2'"),
        ({"phases": {}}, "got no phase"),
        ({"phases": {"draft": {}}}, "'draft'"),
        ({"phases": {"decode": {"layers": {}}}}, "got no layers"),
        ({"phases": {"decode": {"layers": {"3": 7}}}}, "wanted a list of counts"),
        ({"phases": {"decode": {"tokens": -1, "layers": ROWS}}}, "tokens: got -1"),
        ({"phases": {"decode": {}, "prefill": {}}}, "got no phase"),
        ({"normalised": "true"}, "normalised: got 'true'; wanted true or false"),
        ({"normalised": 1}, "normalised: got 1; wanted true or false"),
        ({"normalised": None}, "normalised: got None; wanted true or false"),
    ],
)
def test_a_malformed_file_of_ours_is_refused_with_the_field(write, change, match):
    with pytest.raises(HistogramError, match=match):
        load_histogram(write(ours() | change))


def test_a_form_that_is_not_known_lists_the_known_ones(write):
    with pytest.raises(HistogramError, match="with keys a, b") as caught:
        load_histogram(write({"a": 1, "b": 2}))
    assert all(name in str(caught.value) for name in DIALECTS)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "7", '"x"', "[" * 100_000])
def test_what_is_no_json_object_is_refused_by_file_name(write, content):
    path = write(content)
    with pytest.raises(HistogramError, match=Path(path).name):
        load_histogram(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(HistogramError, match=r"nothing.json: got no such file"):
        load_histogram(str(tmp_path / "nothing.json"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "h.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HistogramError, match="UTF-8"):
        load_histogram(tmp_path / "h.json")


@needs_shared
@pytest.mark.parametrize(
    ("file", "layers", "num_experts", "phase", "tokens", "expected"),
    [
        ("qwen3-30b-a3b.decode.json", 48, 128, "decode", 75773, []),
        ("mimo-v2.6-pro.8prompt.json", 69, 384, "decode", 3011, ["unknown-phase"]),
        ("olmoe-1b-7b.domains.json#book", 3, 64, "prefill", 208896, []),
        ("olmoe-1b-7b.domains.json#tulu-dpo", 3, 64, "prefill", 205243, []),
        ("mixtral-8x7b.domains.json#arxiv", 3, 8, "prefill", 208896, []),
    ],
)
def test_published_measurements_are_read(file, layers, num_experts, phase, tokens, expected):
    histogram, notices = load_histogram(SHARED / "histograms" / file)
    assert (layers, num_experts) == (len(histogram.layers), histogram.identity.num_experts)
    assert ([phase], expected) == (list(histogram.phases), names(notices))
    assert tokens * histogram.identity.top_k == histogram.phases[phase].counts.sum(axis=1).max()


@needs_shared
def test_published_sets_are_listed():
    with pytest.raises(HistogramError, match="8 sets and none chosen") as caught:
        load_histogram(SHARED / "histograms" / "olmoe-1b-7b.domains.json")
    assert {"book", "github", "tulu"} < set(caught.value.sets)
