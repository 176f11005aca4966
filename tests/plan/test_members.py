"""Members of histogram files that no honest program writes: huge, missing, doubled, of another type."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from histogram_files import FORMS, ours, train
from hotsplit.errors import HistogramError
from hotsplit.plan.dialects import load_histogram


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="h.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


HUGE = [10**10, 2**53 + 1, 10**30, 10**400]


@pytest.mark.parametrize("number", HUGE, ids=["10**10", "2**53+1", "10**30", "10**400"])
@pytest.mark.parametrize("member", ["num_experts", "top_k", "layers"])
def test_a_model_that_no_memory_holds_is_refused_before_anything_is_allocated(write, member, number):
    content = ours()
    content["model"][member] = [3, 4, number] if member == "layers" else number
    content["phases"]["decode"]["layers"] = {"3": [6, 3, 1, 0]}
    is_layer = member == "layers" and number == 10**10  # an odd index, and one that fits
    with contextlib.nullcontext() if is_layer else pytest.raises(HistogramError, match=Path(write(content)).name):
        load_histogram(write(content))


@pytest.mark.parametrize("number", HUGE, ids=["10**10", "2**53+1", "10**30", "10**400"])
@pytest.mark.parametrize("form", ["flat", "train", "live"])
def test_facts_of_the_other_forms_cannot_exceed_their_rows(write, form, number):
    content = FORMS[form]()
    facts = [("n_experts", content), ("tokens", content)] if form == "flat" else []
    facts += [("num_experts", content.setdefault("meta", {})), ("top_k", content["meta"])] if form != "flat" else []
    for name, place in facts:
        before, place[name] = place.get(name), number
        with pytest.raises(HistogramError, match="histogram .*h.json"):
            load_histogram(write(content))
        place[name] = before


@pytest.mark.parametrize("number", HUGE[1:], ids=["2**53+1", "10**30", "10**400"])
def test_tokens_that_no_float_holds_are_refused_also_where_counts_are_scaled(write, number):
    for more in ({}, {"normalised": True}):
        with pytest.raises(HistogramError, match=r"tokens: got .*; wanted an integer from 0 to 2\*\*53"):
            load_histogram(write(ours(tokens=number, **more)))


def test_many_layers_and_one_long_row_claim_no_memory(write):
    content = ours({"0": [1] * 5_000}, layers=range(5_000), tokens=None, top_k=1, num_experts=5_000)
    with pytest.raises(HistogramError, match="5000 layers x 5000 experts; wanted at most"):
        load_histogram(write(content))


@pytest.mark.parametrize("form", ["ours", "train", "live"])
def test_an_empty_phase_is_an_absent_one(write, form):
    content = FORMS[form]()
    content["phases" if form == "ours" else form]["prefill"] = {}
    histogram, notices = load_histogram(write(content))
    assert (["decode"], []) == (list(histogram.phases), notices)


def test_of_two_equal_keys_neither_is_believed(write):
    text = json.dumps(ours()).replace('"source": {}', '"source": {}, "source": {"made_by": "x"}')
    with pytest.raises(HistogramError, match="h.json: got the key 'source' twice in one object"):
        load_histogram(write(text))
    rows = json.dumps(train()).replace('"4": [', '"3": [')
    with pytest.raises(HistogramError, match="h.json: got the key '3' twice in one object"):
        load_histogram(write(rows))


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["3", "book/3", "decode", "layers", "tokens", "num_experts"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(FORMS)),
    st.dictionaries(
        st.sampled_from(
            [
                "format",
                "version",
                "model",
                "phases",
                "train",
                "live",
                "meta",
                "layers",
                "phase",
                "tokens",
                "n_experts",
                "top_k",
            ]
        ),
        junk,
        max_size=2,
    ),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300, deadline=None
)
def test_any_junk_ends_in_a_histogram_error_or_a_histogram(write, form, change):
    path = write(json.dumps(FORMS[form]() | change))
    histogram = None
    with contextlib.suppress(HistogramError):
        histogram, _ = load_histogram(path)
    assert histogram is None or histogram.phases
