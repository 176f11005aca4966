"""Every form there and back, and what each has no place for (CASES T3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hotsplit.errors import ConfigError, HistogramError
from hotsplit.plan.combine import shares
from hotsplit.plan.convert import TARGETS, convert, logical_counts
from hotsplit.plan.dialects import DIALECTS, Given, load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.tables import TABLES

CREATED = "2026-01-01T00:00:00+00:00"


def histogram_with(counts, *, layers, top_k=2, normalised=False, **phases):
    identity = ModelIdentity(model_type="toy", layers=layers, num_experts=len(counts[0]), top_k=top_k)
    bodies = {"decode": counts, **phases}
    counted = {phase: PhaseCounts(counts=np.array(body, dtype=float)) for phase, body in bodies.items()}
    return Histogram(identity=identity, phases=counted, name="a toy", quantisation="fp8", normalised=normalised)


def back(tmp_path, data, *, to, layers):
    path = tmp_path / f"file-of-{to}"
    path.write_bytes(data)
    # an array has no layer numbers, a form of one phase perhaps not its name
    return load_histogram(path, given=Given(layers=layers if to in ("npy", "sets") else None))[0]


matrices = arrays.arrays(np.int64, (3, 4), elements=st.integers(0, 2**40))


@pytest.mark.parametrize("to", TARGETS)
@given_by(counts=matrices, prefill=matrices)
def test_there_and_back_are_the_same_counts(tmp_path_factory, to, counts, prefill):
    layers = (0, 1, 2) if to == "sets" else (3, 4, 11)
    more = {"prefill": prefill} if TARGETS[to].phases == 2 else {}
    histogram = histogram_with(counts, layers=layers, **more)
    data, _ = convert(histogram, to=to, created=CREATED)
    returned = back(tmp_path_factory.mktemp("back"), data, to=to, layers=layers)
    assert (list(histogram.phases), layers) == (list(returned.phases), returned.layers)
    for phase, counted in histogram.phases.items():
        assert counted.counts.tolist() == returned.phases[phase].counts.tolist()
    assert not returned.normalised


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if target.is_scaled])
@given_by(counts=arrays.arrays(np.float64, (2, 3), elements=st.floats(0.25, 4)))
def test_normalised_counts_keep_their_shares(tmp_path_factory, to, counts):
    histogram = histogram_with(counts, layers=(3, 4), normalised=True)
    returned = back(
        tmp_path_factory.mktemp("back"), convert(histogram, to=to, created=CREATED)[0], to=to, layers=(3, 4)
    )
    assert returned.normalised
    assert shares(histogram, "decode") == pytest.approx(shares(returned, "decode"), abs=1e-12)


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if not target.is_scaled])
def test_normalised_counts_are_refused_where_pairs_are_counted(to):
    histogram = histogram_with([[0.5, 1.5]], layers=(0,), normalised=True)
    with pytest.raises(HistogramError, match="got normalised counts.*use one of hotsplit, train, npz"):
        convert(histogram, to=to, created=CREATED)


def full(**more):
    identity = ModelIdentity(model_type="toy", layers=(0, 1), num_experts=2, top_k=1)
    decode = PhaseCounts(counts=np.array([[6.0, 4.0], [5.0, 5.0]]), tokens=10)
    prefill = PhaseCounts(counts=np.array([[1.0, 2.0], [3.0, 0.0]]), tokens=3)
    return Histogram(identity=identity, phases={"decode": decode, "prefill": prefill}, name="a toy", **more)


@pytest.mark.parametrize(
    ("to", "lost"),
    [
        ("hotsplit", None),
        ("npz", None),
        ("train", "tokens"),
        ("live", "tokens"),
        ("sets", "tokens"),
        ("flat", "the prefill counts"),
        ("layers", "the prefill counts, phase, tokens, name, model_type, top_k"),
        ("counts", "the prefill counts, phase, tokens, name, model_type, top_k"),
        ("pairs", "the prefill counts, phase, tokens, name, model_type, top_k"),
        ("csv", "the prefill counts, phase, tokens, name, model_type, top_k"),
        ("npy", "the prefill counts, phase, tokens, layers, name, model_type, top_k"),
    ],
)
def test_what_a_form_has_no_place_for_is_named(to, lost):
    notices = convert(full(), to=to, created=CREATED)[1]
    expected = [] if lost is None else [f"{to} has no place for {lost}: dropped [dropped-facts]"]
    assert expected == [str(notice) for notice in notices]


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if "model_type" in target.holds])
def test_a_form_that_holds_the_identity_gives_it_back(tmp_path, to):
    histogram = full()
    assert (
        histogram.identity == back(tmp_path, convert(histogram, to=to, created=CREATED)[0], to=to, layers=None).identity
    )


@pytest.mark.parametrize("to", ["hotsplit", "npz", "flat"])
def test_a_form_that_holds_tokens_gives_them_back(tmp_path, to):
    returned = back(tmp_path, convert(full(), to=to, created=CREATED)[0], to=to, layers=None)
    assert 10 == returned.phases["decode"].tokens


def test_sets_cannot_say_that_layers_do_not_begin_at_0():
    with pytest.raises(HistogramError, match="got layers 3 to 4; wanted layers 0 to L-1"):
        convert(histogram_with([[1, 2], [3, 4]], layers=(3, 4)), to="sets", created=CREATED)


def test_a_form_that_is_not_known_lists_the_known_ones():
    with pytest.raises(ConfigError, match="hotsplit, train, live"):
        convert(full(), to="parquet", created=CREATED)


def test_every_form_that_is_read_is_written():
    assert {*DIALECTS, *TABLES} - {"ours"} | {"hotsplit"} == set(TARGETS)


def test_a_recorder_s_array_has_one_step():
    assert [[[6, 4], [5, 5]]] == logical_counts(full()).tolist()
