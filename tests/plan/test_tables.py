"""Histograms that are no JSON: CSV, npy, npz, traces (CASES T3)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st

from histogram_files import ROWS, csv
from hotsplit.errors import HistogramError
from hotsplit.plan.dialects import Document, Given, load_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.tables import histogram_of_array
from hotsplit.plan.trace import Trace, save_trace

MATRIX = [[6.0, 3.0, 1.0, 0.0], [5.0, 5.0, 0.0, 0.0]]
COUNTS = np.array(MATRIX, dtype=np.int64)
LAYERS = Given(layers=(3, 4))


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="h.csv"):
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content)
            return str(path)
        with path.open("wb") as file:
            np.savez(file, **content) if isinstance(content, dict) else np.save(file, content)
        return str(path)

    return write_file


def names(notices):
    return [notice.name for notice in notices]


@pytest.mark.parametrize(
    "text",
    [
        csv(),
        csv(header=""),
        csv(header="layer_id, expert_id, count\n"),
        csv(header="Layer,Expert,Count\n"),
        "\ufefflayer,expert,count\n" + csv(header=""),
        csv().replace("\n", "\r\n"),
        "count,expert,layer\n" + "".join(f"{n},{e},{layer}\n" for layer, r in ROWS.items() for e, n in enumerate(r)),
    ],
)
def test_lines_of_layer_expert_and_count_are_the_matrix(write, text):
    histogram, notices = load_histogram(write(text))
    assert ((3, 4), ["unknown-phase"]) == (histogram.layers, names(notices))
    assert MATRIX == histogram.phases["decode"].counts.tolist()


def test_joined_files_add_up(write):
    assert (2 * COUNTS).tolist() == load_histogram(write(csv() + csv()))[0].phases["decode"].counts.tolist()


def test_csv_is_known_by_its_first_line_whatever_the_file_is_called(write):
    assert (3, 4) == load_histogram(write(csv(), name="counts.txt"))[0].layers


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("nan", "NaN"), ("-1", "-1"), ("1.5", "1.5"), ("9007199254740993", "9007199254740993"), ("x", "'x'")],
)
def test_a_bad_count_of_a_csv_is_refused_with_its_place(write, text, spelled):
    with pytest.raises(HistogramError, match=f"layer 3, expert 1 .*got {spelled}") as caught:
        load_histogram(write(f"layer,expert,count\n3,0,4\n3,1,{text}\n"))
    assert (3, 1) == (caught.value.layer, caught.value.expert)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("layer,expert,count\n3,0\n", "line 2: got 2 columns"),
        ("layer,expert,count\n3,a,1\n", "line 2, expert"),
        ("layer,expert,count\n-1,0,1\n", "line 2, layer"),
        ("layer,expert,count\n", "no counts"),
        ("", "got nothing"),
        ("a,b,c,d\n1,2,3,4\n", "wanted lines of layer,expert,count"),
        ("0,5\n1,6\n", "or a header expert,count"),
    ],
)
def test_a_csv_that_is_none_of_ours_is_refused(write, text, match):
    with pytest.raises(HistogramError, match=match):
        load_histogram(write(text))


LAYERLESS = "expert,count\n" + "".join(f"{e},{n}\n" for row in ROWS.values() for e, n in enumerate(row))


def test_lines_without_layers_are_refused_unless_the_user_says_them(write):
    path = write(LAYERLESS)
    with pytest.raises(HistogramError, match="8 lines without layer numbers"):
        load_histogram(path)
    histogram, _ = load_histogram(path, given=LAYERS)
    assert ((3, 4), MATRIX) == (histogram.layers, histogram.phases["decode"].counts.tolist())


def test_lines_without_layers_are_refused_where_layers_do_not_divide_them(write):
    with pytest.raises(HistogramError, match="got 8 lines; wanted a multiple of 3 layers"):
        load_histogram(write(LAYERLESS), given=Given(layers=(0, 1, 2)))


def test_lines_without_layers_are_refused_where_a_block_is_not_every_expert_once(write):
    # four layers divide eight lines, but each block then starts over in the middle of the experts
    with pytest.raises(HistogramError, match="layer 1: got lines 3 to 4 that are not experts 0 to 1"):
        load_histogram(write(LAYERLESS), given=Given(layers=(0, 1, 2, 3)))


@pytest.mark.parametrize("steps", [COUNTS, COUNTS[None], np.stack([COUNTS - COUNTS // 2, COUNTS // 2])])
def test_steps_of_a_recorder_add_up(write, steps):
    histogram, notices = load_histogram(write(steps, name="h.npy"), given=LAYERS)
    assert ((3, 4), MATRIX) == (histogram.layers, histogram.phases["decode"].counts.tolist())
    assert ["unknown-phase"] == names(notices)


def test_a_strided_view_is_its_contiguous_copy(write):
    wide = np.zeros((2, 8), dtype=np.int64)
    wide[:, ::2] = COUNTS
    view = wide[:, ::2]
    assert not view.flags["C_CONTIGUOUS"]
    document = Document(content={}, what="array", given=LAYERS)
    histogram, _ = histogram_of_array(view, document, model_layers=None)
    assert MATRIX == histogram.phases["decode"].counts.tolist()
    assert MATRIX == load_histogram(write(view, name="h.npy"), given=LAYERS)[0].phases["decode"].counts.tolist()


@pytest.mark.parametrize("content", [COUNTS, {"counts": COUNTS}], ids=["npy", "npz"])
def test_rows_without_numbers_are_refused_unless_user_or_model_numbers_them(write, content):
    path = write(content, name="h.bin")
    with pytest.raises(HistogramError, match="2 rows without layer numbers.*--layers, 0-1"):
        load_histogram(path)
    histogram, notices = load_histogram(path, layers=(3, 4))
    assert ((3, 4), ["unknown-phase", "layers-from-model"]) == (histogram.layers, names(notices))


def test_rows_of_all_decoder_layers_are_reduced_to_those_with_experts_if_the_rest_is_empty(write):
    rows = np.concatenate([np.zeros((3, 4), dtype=np.int64), COUNTS])
    histogram, _ = load_histogram(write(rows, name="h.npy"), given=LAYERS)
    assert ((3, 4), MATRIX) == (histogram.layers, histogram.phases["decode"].counts.tolist())
    rows[1, 2] = 1
    with pytest.raises(HistogramError, match="got 5 rows, counts in row 1"):
        load_histogram(write(rows, name="h.npy"), given=LAYERS)


@pytest.mark.parametrize("layers", [(0,), (9,), (0, 1, 2), (3, 4, 5)])
def test_a_list_of_layers_that_does_not_fit_the_rows_is_refused(write, layers):
    with pytest.raises(HistogramError, match="check the list of layers"):
        load_histogram(write(COUNTS, name="h.npy"), given=Given(layers=layers))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.array([[1.0, np.nan]]), "expert 1 .*got NaN"),
        (np.array([[1, -1]]), "expert 1 .*got -1"),
        (np.array([[0.5, 1.0]]), "got 0.5"),
        (np.zeros(4), r"\[4\]"),
        (np.array([["a", "b"]]), "wanted numbers"),
        (np.zeros((0, 4)), "wanted numbers"),
    ],
)
def test_an_array_that_is_no_counts_is_refused(write, array, match):
    with pytest.raises(HistogramError, match=match):
        load_histogram(write(array, name="h.npy"), given=Given(layers=(0,)))


def test_an_npz_has_an_array_per_phase_and_its_own_layers(write):
    path = write({"decode": COUNTS, "prefill": 2 * COUNTS, "layers": np.array([3, 4])}, name="h.npz")
    histogram, notices = load_histogram(path)
    assert ((3, 4), ["decode", "prefill"], []) == (histogram.layers, list(histogram.phases), names(notices))
    assert (2 * COUNTS).tolist() == histogram.phases["prefill"].counts.tolist()


def test_an_npz_s_facts_are_its_identity(write):
    meta = np.array(json.dumps({"model_type": "toy", "top_k": 2, "tokens": {"decode": 5}}))
    histogram, _ = load_histogram(write({"decode": COUNTS, "layers": np.array([3, 4]), "meta": meta}, name="h.npz"))
    assert ModelIdentity(model_type="toy", layers=(3, 4), num_experts=4, top_k=2) == histogram.identity
    assert 5 == histogram.phases["decode"].tokens


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": COUNTS},
        {"counts": COUNTS, "decode": COUNTS},
        {"decode": COUNTS, "prefill": COUNTS[:1]},
        {"decode": COUNTS, "layers": np.array([4, 3])},
        {"decode": COUNTS, "layers": np.array([3])},
        {"decode": COUNTS, "meta": np.array("[")},
        {"decode": COUNTS, "meta": np.array("[]")},
    ],
)
def test_arrays_that_are_no_histogram_are_refused(write, arrays):
    with pytest.raises(HistogramError):
        load_histogram(write(arrays, name="h.npz"), layers=(3, 4))


@given_by(st.binary(max_size=40), st.sampled_from(["h.npz", "h.npy", "h.csv"]))
def test_damaged_files_end_in_a_histogram_error(tmp_path_factory, junk, name):
    path = tmp_path_factory.mktemp("junk") / name
    path.write_bytes({"h.npz": b"PK\x03\x04", "h.npy": b"\x93NUMPY", "h.csv": b"layer,expert,count\n"}[name] + junk)
    try:
        load_histogram(path)
    except HistogramError:
        return
    assert path.name == "h.csv"


def test_a_pytorch_file_is_sent_to_convert(write):
    with pytest.raises(HistogramError, match="got a PyTorch file.*hotsplit convert"):
        load_histogram(write("x", name="h.pt"))


@pytest.fixture
def trace(tmp_path):
    identity = ModelIdentity(model_type="toy", layers=(3, 4), num_experts=4, top_k=1)
    experts = np.array([[[0], [1]], [[0], [2]], [[3], [1]]])
    path = tmp_path / "trace.npz"
    kinds = {"domain": np.array([0, 1, 1]), "domains": ("english", "python")}
    phase, step = np.array([1, 1, 0], dtype=np.uint8), np.arange(3, dtype=np.uint32)
    save_trace(Trace(identity=identity, experts=experts, phase=phase, step=step, **kinds), path)
    return path


def test_a_trace_is_counted_and_its_domains_are_sets(trace):
    histogram, _ = load_histogram(trace)
    assert [[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]] == histogram.phases["decode"].counts.tolist()
    python, _ = load_histogram(f"{trace}#python")
    assert ([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], 1) == (
        python.phases["prefill"].counts.tolist(),
        python.phases["decode"].tokens,
    )
    with pytest.raises(HistogramError, match="english, python"):
        load_histogram(f"{trace}#french")
