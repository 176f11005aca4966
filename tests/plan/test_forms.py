"""JSON forms without phases or without layer numbers, and what the user may say about them."""

from __future__ import annotations

import json

import pytest

from histogram_files import FORMS, PHASELESS, ROWS, flat, sets
from hotsplit.errors import HistogramError
from hotsplit.plan.dialects import Given, load_histogram

MATRIX = [[6.0, 3.0, 1.0, 0.0], [5.0, 5.0, 0.0, 0.0]]


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="h.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


def names(notices):
    return [notice.name for notice in notices]


@pytest.mark.parametrize("form", PHASELESS)
def test_counts_that_do_not_say_their_phase_are_decode_and_it_is_said(write, form):
    histogram, notices = load_histogram(write(PHASELESS[form]()))
    assert (["unknown-phase"], (3, 4), ["decode"]) == (names(notices), histogram.layers, list(histogram.phases))
    assert MATRIX == histogram.phases["decode"].counts.tolist()


@pytest.mark.parametrize("form", PHASELESS)
def test_the_user_may_say_the_phase(write, form):
    histogram, notices = load_histogram(write(PHASELESS[form]()), given=Given(phase="prefill"))
    assert ([], ["prefill"]) == (names(notices), list(histogram.phases))


def test_of_two_phases_the_one_that_is_wanted_is_kept(write):
    path = write({"live": {"decode": ROWS, "prefill": {"3": [1, 2, 3, 4], "4": [4, 3, 2, 1]}}})
    histogram, _ = load_histogram(path, given=Given(phase="prefill"))
    assert (["prefill"], [1.0, 2.0, 3.0, 4.0]) == (
        list(histogram.phases),
        histogram.phases["prefill"].counts[0].tolist(),
    )


def test_a_phase_that_is_not_there_is_refused(write):
    with pytest.raises(HistogramError, match="got no prefill counts, only decode"):
        load_histogram(write(flat()), given=Given(phase="prefill"))


@pytest.mark.parametrize("form", [*FORMS, *PHASELESS])
def test_layers_are_not_taken_for_a_file_that_numbers_its_own(write, form):
    content = (FORMS | PHASELESS)[form]()
    with pytest.raises(HistogramError, match="leave --layers out"):
        load_histogram(write(content), given=Given(layers=(0, 1)))


@pytest.mark.parametrize("form", PHASELESS)
@pytest.mark.parametrize(("text", "spelled"), [("NaN", "NaN"), ("-1", "-1"), ("1.5", "1.5"), ('"7"', "'7'")])
def test_a_bad_cell_is_refused_with_its_place(write, form, text, spelled):
    content = json.dumps(PHASELESS[form]({"3": [6, 3, 1, 0], "4": [5, 5, 987654, 0]})).replace("987654", text)
    with pytest.raises(HistogramError, match=f"layer 4, expert 2 .*got {spelled}") as caught:
        load_histogram(write(content))
    assert (4, 2) == (caught.value.layer, caught.value.expert)


def test_a_total_that_its_counts_do_not_add_up_to_is_refused(write):
    path = write({"3": {"counts": [6, 3, 1, 0], "total": 10}, "4": {"counts": [5, 5, 0, 0], "total": 11}})
    with pytest.raises(HistogramError, match="layer 4: got counts that add up to 10; wanted its total, 11"):
        load_histogram(path)


def test_a_cell_that_stands_twice_is_refused(write):
    with pytest.raises(HistogramError, match="layer 3, expert 1: got two counts"):
        load_histogram(write('{"3,0": 1, "3,1": 2, "3,01": 5}'))


def test_cells_that_are_left_out_are_zero_and_the_number_of_experts_is_doubted(write):
    histogram, notices = load_histogram(write({"3,0": 6, "3,1": 3, "4,2": 9}))
    assert [[6.0, 3.0, 0.0], [0.0, 0.0, 9.0]] == histogram.phases["decode"].counts.tolist()
    assert ["unknown-phase", "experts-from-ids"] == names(notices)


def test_the_user_may_say_how_many_experts_there_are(write):
    histogram, notices = load_histogram(write({"3,0": 6, "4,2": 9}), given=Given(num_experts=8))
    assert (8, ["unknown-phase"]) == (histogram.identity.num_experts, [n for n in names(notices) if n != "flat-counts"])
    with pytest.raises(HistogramError, match="expert 2: got an expert too many; wanted ids below 2"):
        load_histogram(write({"3,0": 6, "4,2": 9}), given=Given(num_experts=2))


def test_a_cell_far_out_claims_no_memory(write):
    with pytest.raises(HistogramError, match="at most 16777216"):
        load_histogram(write(json.dumps({f"{layer},999999": 1 for layer in range(20)})))


def test_sets_are_layers_from_0_on_and_may_be_numbered_by_the_user(write):
    histogram, notices = load_histogram(write(sets()))
    assert ((0, 1), [], 2, "toy") == (
        histogram.layers,
        names(notices),
        histogram.identity.top_k,
        histogram.identity.model_type,
    )
    assert (3, 4) == load_histogram(write(sets()), given=Given(layers=(3, 4)))[0].layers


def test_sets_are_chosen_and_listed(write):
    one = sets()["counts"]["english"]
    path = write({"meta": {}, "counts": {"english": one, "python": {"prefill": [[1, 2, 3, 4], [4, 3, 2, 1]]}}})
    assert ["prefill"] == list(load_histogram(f"{path}#python")[0].phases)
    with pytest.raises(HistogramError, match="english, python"):
        load_histogram(path)


@pytest.mark.parametrize(
    "content",
    [
        {"counts": {}},
        {"counts": {"a": {}}},
        {"counts": {"a": {"decode": {}}}},
        {"counts": {"a": {"decode": [[1], 2]}}},
        {"counts": {"a": {"sleep": [[1]]}}},
        {"counts": {"a": {"decode": []}}},
        {"3": {"counts": []}},
        {"3": {"counts": [1]}, "x": {"counts": [1]}},
        {"layers": {"3": 7}},
        {"layers": {}},
    ],
)
def test_what_only_looks_like_a_form_is_refused(write, content):
    with pytest.raises(HistogramError):
        load_histogram(write(content))


@pytest.mark.parametrize("given", [{"phase": "sleep"}, {"layers": ()}, {"layers": (2, 1)}, {"num_experts": 0}])
def test_what_the_user_says_must_be_possible(given):
    with pytest.raises(HistogramError):
        Given(**given)


def test_a_part_of_the_counts_need_not_have_the_totals_of_the_whole(write):
    path = write(flat({"3": [6, 3, 0, 0], "4": [0, 0, 0, 0]}))
    with pytest.raises(HistogramError, match="tokens x top_k"):
        load_histogram(path)
    histogram, notices = load_histogram(path, given=Given(is_part=True))
    assert (5, []) == (histogram.phases["decode"].tokens, notices)


def test_a_train_file_may_say_itself_whether_it_is_scaled(write):
    rows = {"3": [600_000, 400_000], "4": [500_000, 500_000]}
    assert load_histogram(write({"train": {"decode": rows}}))[0].normalised
    assert not load_histogram(write({"train": {"decode": rows}, "meta": {"normalised": False}}))[0].normalised
