from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotsplit.errors import HotsplitError, TraceError
from hotsplit.plan.histogram import validate
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.trace import Trace, count_ids, histogram_of, load_trace, save_trace, steps_of

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared measurements are not beside the repository")

IDENTITY = ModelIdentity(model_type="toy", layers=(3, 4), num_experts=4, top_k=2)
EXPERTS = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[3, 0], [2, 0]]], dtype=np.uint8)


def trace(experts=EXPERTS, *, phase=(0, 0, 1), identity=IDENTITY, **more):
    fields = {
        "phase": np.array(phase, dtype=np.uint8),
        "step": np.arange(len(phase), dtype=np.uint32),
        "request": np.zeros(len(phase), dtype=np.uint16),
        "position": np.arange(len(phase), dtype=np.uint16),
    }
    return Trace(identity=identity, experts=np.asarray(experts), **(fields | more))


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_ids_are_counted_per_layer_and_expert():
    assert [[3, 1, 1, 1], [1, 1, 3, 1]] == count_ids(EXPERTS, num_experts=4).tolist()


def test_padding_ids_are_not_counted():
    ids = EXPERTS.astype(np.int16)
    ids[1] = -1
    ids[2, 1, 0] = -1
    assert [[2, 1, 0, 1], [1, 0, 1, 1]] == count_ids(ids, num_experts=4).tolist()


@given(
    hnp.arrays(np.int16, hnp.array_shapes(min_dims=3, max_dims=3, max_side=4), elements=st.integers(-1, 6)),
    st.sampled_from(["reversed", "transposed", "every other", "Fortran"]),
)
def test_a_strided_view_is_counted_like_its_contiguous_copy(ids, layout):
    view = {
        "reversed": ids[::-1, :, ::-1],
        "transposed": ids.transpose(2, 1, 0),
        "every other": np.repeat(ids, 2, axis=0)[::2],
        "Fortran": np.asfortranarray(ids),
    }[layout]
    expected = count_ids(np.ascontiguousarray(view), num_experts=7)
    assert np.array_equal(expected, count_ids(view, num_experts=7))
    assert (view >= 0).sum() == expected.sum()


@pytest.mark.parametrize("value", [4, -2])
def test_an_id_that_is_no_expert_raises_with_token_layer_and_value(value):
    ids = EXPERTS.astype(np.int16)
    ids[2, 1, 0] = value
    with pytest.raises(TraceError, match=f"token 2, layer 1: got expert {value}; wanted 0 to 3"):
        count_ids(ids, num_experts=4)
    with pytest.raises(TraceError, match=f"token 2, layer 4: got expert {value}; wanted 0 to 3") as caught:
        trace(ids)
    assert (2, 4, value) == (caught.value.token, caught.value.layer, caught.value.value)


@pytest.mark.parametrize("num_experts", [2**24, 10**10, 2**53])
def test_a_model_that_no_memory_holds_is_refused_before_anything_is_counted(tmp_path, num_experts):
    meta = json.dumps({"num_experts": num_experts, "top_k": 2})
    path = write(tmp_path / "t.npz", experts=EXPERTS, phase=np.zeros(3, np.uint8), meta=np.array(meta))
    with pytest.raises(TraceError, match=f"t.npz: num_experts: got 2 layers x {num_experts} experts"):
        load_trace(path)


@pytest.mark.parametrize("number", [2**53 + 1, 10**30, 10**400])
def test_a_fact_that_no_float_holds_is_not_known(tmp_path, number):
    meta = json.dumps({"num_experts": number, "top_k": number})
    path = write(tmp_path / "t.npz", experts=EXPERTS, phase=np.zeros(3, np.uint8), meta=np.array(meta))
    identity = load_trace(path)[0].identity
    assert (None, 2) == (identity.num_experts, identity.top_k)


def test_facts_that_nest_without_end_are_refused(tmp_path):
    meta = np.array("[" * 200_000)
    path = write(tmp_path / "t.npz", experts=EXPERTS, phase=np.zeros(3, np.uint8), meta=meta)
    with pytest.raises(TraceError, match="t.npz, meta: got .*; wanted JSON"):
        load_trace(path)


def test_decode_and_prefill_are_counted_apart():
    histogram = histogram_of(trace())
    assert [[1, 0, 0, 1], [1, 0, 1, 0]] == histogram.phases["decode"].counts.tolist()
    assert [[2, 1, 1, 0], [0, 1, 2, 1]] == histogram.phases["prefill"].counts.tolist()
    assert (1, 2) == (histogram.phases["decode"].tokens, histogram.phases["prefill"].tokens)
    assert IDENTITY == histogram.identity


def test_a_phase_without_tokens_is_absent():
    assert {"prefill"} == set(histogram_of(trace(phase=(0, 0, 0))).phases)


def test_tokens_that_are_wholly_padding_are_no_tokens():
    ids = EXPERTS.astype(np.int16)
    ids[1] = -1
    assert 1 == histogram_of(trace(ids)).phases["prefill"].tokens


def test_a_token_with_some_padding_leaves_the_number_of_tokens_open():
    ids = EXPERTS.astype(np.int16)
    ids[1, 0, 1] = -1
    histogram = histogram_of(trace(ids))
    assert histogram.phases["prefill"].tokens is None
    assert 3 == histogram.phases["prefill"].counts[0].sum()


routings = st.integers(1, 6).flatmap(
    lambda num_experts: st.tuples(
        st.just(num_experts),
        hnp.arrays(
            np.uint16, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5), elements=st.integers(0, num_experts - 1)
        ),
    )
)


@given(routings, st.data())
def test_totals_of_a_counted_trace_are_tokens_times_k(routing, data):
    num_experts, experts = routing
    phase = data.draw(hnp.arrays(np.uint8, len(experts), elements=st.integers(0, 1)))
    identity = ModelIdentity(layers=tuple(range(experts.shape[1])), num_experts=num_experts)
    counted = histogram_of(trace(experts, phase=phase, identity=identity))
    validate(counted, what="f")
    tokens = sum(phase_counts.tokens for phase_counts in counted.phases.values())
    assert len(experts) == tokens
    for phase_counts in counted.phases.values():
        assert {phase_counts.tokens * experts.shape[2]} == set(phase_counts.counts.sum(axis=1).tolist())


def test_one_domain_is_counted_alone():
    labelled = trace(domain=np.array([0, 1, 1], dtype=np.uint8), domains=("book", "code"))
    histogram = histogram_of(labelled, domain="code")
    assert (1, 1) == (histogram.phases["decode"].tokens, histogram.phases["prefill"].tokens)
    assert "code" == histogram.source["domain"]


def test_a_domain_that_is_not_there_is_refused_with_those_that_are():
    labelled = trace(domain=np.zeros(3, dtype=np.uint8), domains=("book",))
    with pytest.raises(TraceError, match="domain: got 'code'; wanted book"):
        histogram_of(labelled, domain="code")
    with pytest.raises(TraceError, match="the trace has none"):
        histogram_of(trace(), domain="code")


def test_the_number_of_experts_is_never_guessed():
    unknown = trace(identity=ModelIdentity(layers=(3, 4)))
    with pytest.raises(TraceError, match="no num_experts"):
        histogram_of(unknown)
    assert 9 == histogram_of(unknown, num_experts=9).identity.num_experts


def test_a_trace_comes_back_from_its_file(tmp_path):
    written = trace(domain=np.array([0, 1, 1], dtype=np.uint8), domains=("book", "code"), meta={"seed": 0})
    save_trace(written, tmp_path / "t.npz")
    read, notices = load_trace(tmp_path / "t.npz")
    assert ([], IDENTITY, ("book", "code")) == (notices, read.identity, read.domains)
    for name in ("experts", "phase", "step", "request", "position", "domain"):
        assert np.array_equal(getattr(written, name), getattr(read, name))
    assert 0 == read.meta["seed"]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16), (None, np.uint8)])
def test_ids_are_stored_as_narrow_as_they_fit(tmp_path, num_experts, dtype):
    identity = ModelIdentity(layers=(3, 4), num_experts=num_experts)
    save_trace(trace(EXPERTS.astype(np.int64), identity=identity), tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as archive:
        assert dtype == archive["experts"].dtype
        assert ([3, 4], np.uint8, np.uint32) == (
            archive["layers"].tolist(),
            archive["phase"].dtype,
            archive["step"].dtype,
        )


def test_padding_is_never_written(tmp_path):
    with pytest.raises(TraceError, match="padding id"):
        save_trace(trace(EXPERTS.astype(np.int16) - 1), tmp_path / "t.npz")
    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HotsplitError, match="cannot write"):
        save_trace(trace(), tmp_path / "file" / "t.npz")


def test_a_file_without_layers_is_numbered_from_zero_aloud(tmp_path):
    read, notices = load_trace(write(tmp_path / "t.npz", experts=EXPERTS, phase=np.array([0, 0, 1], np.uint8)))
    assert ((0, 1), ["trace-layers"]) == (read.identity.layers, [notice.name for notice in notices])


def test_without_steps_a_decode_token_is_a_step_and_a_requests_prefill_is_one():
    phase = np.array([0, 0, 1, 1, 0, 0, 0, 1])
    request = np.array([7, 7, 7, 7, 9, 9, 9, 9])
    assert [0, 0, 1, 2, 3, 3, 3, 4] == steps_of(phase, request=request).tolist()
    assert [0, 0, 1, 2, 3, 3, 3, 4] == steps_of(phase, request=None).tolist()


def test_requests_that_follow_each_other_in_prefill_are_steps_of_their_own():
    assert [0, 0, 1, 1] == steps_of(np.zeros(4, np.uint8), request=np.array([7, 7, 3, 3])).tolist()


def test_an_interleaved_prefill_is_one_step_all_the_same():
    phase, request = np.array([0, 1, 0, 1]), np.array([7, 3, 7, 3])
    assert [0, 1, 0, 2] == steps_of(phase, request=request).tolist()


@given(hnp.arrays(np.uint8, st.integers(0, 30), elements=st.integers(0, 1)), st.data())
def test_steps_are_one_per_decode_token_and_one_per_request_in_prefill(phase, data):
    request = data.draw(hnp.arrays(np.uint16, len(phase), elements=st.integers(0, 4)))
    steps = steps_of(phase, request=request)
    expected = int((phase == 1).sum()) + len(set(request[phase == 0].tolist()))
    assert list(range(expected)) == sorted(set(steps.tolist()))
    first_seen = list(dict.fromkeys(steps.tolist()))
    assert list(range(expected)) == first_seen


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"experts": None}, "no array 'experts'"),
        ({"phase": None}, "no array 'phase'"),
        ({"experts": np.zeros((3, 2))}, r"experts: got shape \(3, 2\)"),
        ({"experts": np.zeros((3, 2, 2))}, "experts: got float64"),
        ({"phase": np.array([0, 1], np.uint8)}, r"phase: got uint8 \(2,\); wanted 3 integers"),
        ({"phase": np.array([0, 1, 2], np.uint8)}, "phase: got 2; wanted 0"),
        ({"phase": np.array([0.0, 1.0, 1.0])}, "phase: got float64"),
        ({"request": np.zeros((3, 1), np.uint16)}, "request: got uint16"),
        ({"step": np.zeros(2, np.uint32)}, "step: got uint32"),
        ({"layers": np.array([3])}, "layers: got .*wanted 2 ascending"),
        ({"layers": np.array([4, 3])}, "layers: got .*wanted 2 ascending"),
        ({"layers": np.array(["a", "b"])}, "layers: got .*wanted decoder layer indices"),
        (
            {"domain": np.array([0, 0, 1], np.uint8), "domains": np.array(["a"])},
            "domain: got 1; wanted an index into 1",
        ),
        ({"meta": np.array("{")}, "meta: got .*wanted JSON"),
        ({"meta": np.array("[]")}, "meta: got list; wanted a JSON object"),
        ({"meta": np.array(json.dumps({"num_experts": 3}))}, "token 0, layer 1: got expert 3; wanted 0 to 2"),
    ],
)
def test_a_malformed_trace_is_refused_with_file_and_field(tmp_path, change, match):
    arrays = {"experts": EXPERTS, "phase": np.array([0, 0, 1], np.uint8)} | change
    path = write(tmp_path / "t.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(TraceError, match=match) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_pickled_objects_are_never_loaded(tmp_path):
    with pytest.raises(TraceError, match="wanted an npz file"):
        load_trace(write(tmp_path / "t.npz", experts=np.array([{}], dtype=object), phase=np.zeros(1, np.uint8)))


def test_a_missing_file_and_a_plain_array_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "nothing.npz")
    np.save(tmp_path / "t.npy", EXPERTS)
    with pytest.raises(TraceError, match="wanted an npz file"):
        load_trace(tmp_path / "t.npy")


def _good_bytes():
    file = io.BytesIO()
    np.savez_compressed(file, experts=EXPERTS, phase=np.array([0, 0, 1], np.uint8))
    return file.getvalue()


GOOD_BYTES = _good_bytes()


@given(st.integers(0, len(GOOD_BYTES)), st.binary(max_size=4))
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_ends_in_a_trace_error_or_a_trace(tmp_path_factory, place, bytes_there):
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    path.write_bytes(GOOD_BYTES[:place] + bytes_there + GOOD_BYTES[place + len(bytes_there) + (not bytes_there) :])
    try:
        read, _ = load_trace(path)
    except TraceError:
        return
    assert (3, 2) == read.experts.shape[:2]


@needs_shared
@pytest.mark.parametrize(
    ("model", "layers", "num_experts", "tokens"), [("tiny-moe", 4, 32, 61440), ("small-moe", 8, 64, 98304)]
)
def test_recorded_traces_count_to_the_histograms_beside_them(model, layers, num_experts, tokens):
    recorded, notices = load_trace(SHARED / "traces" / f"{model}.npz")
    assert ["trace-layers"] == [notice.name for notice in notices]
    assert ("qwen3_moe", layers, num_experts) == (
        recorded.identity.model_type,
        recorded.experts.shape[1],
        recorded.identity.num_experts,
    )
    beside = json.loads((SHARED / "traces" / f"{model}-histograms.json").read_text())["counts"]
    for domain in ("python", "json"):
        counted = histogram_of(recorded, domain=domain)
        assert [] == validate(counted, what=domain)
        for phase, rows in beside[domain].items():
            assert np.array_equal(rows, counted.phases[phase].counts)
    assert tokens == sum(counted.tokens for counted in histogram_of(recorded).phases.values())


def test_a_layer_below_0_is_refused():
    with pytest.raises(TraceError, match="layers: got -1; wanted decoder indices >= 0"):
        trace(identity=ModelIdentity(layers=(-1, 4), num_experts=4, top_k=2))


@pytest.mark.parametrize("content", [b"no arrays", b'{"format": "hotsplit-plan"}'])
def test_nobody_is_told_to_unpickle_a_file_that_is_none(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="got no arrays, or arrays of Python objects; wanted an npz file"):
        load_trace(path)
