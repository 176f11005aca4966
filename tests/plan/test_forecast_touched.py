from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_traces import cold_rows
from forecast_truth import page, worst
from hotsplit.errors import ConfigError, TraceError
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.touched import (
    INDEPENDENT,
    TouchCorrection,
    batches_of,
    distinct_rows,
    effective_tokens_of,
    fit_correction,
    fit_exponent,
    runs_of,
    touch_chances,
)
from hotsplit.plan.trace import Trace, load_trace


def trace_of(ids, *, request, phase=1, num_experts=8):
    """One layer, top-1 unless ids say more; ids [T] or [T, K]."""
    ids_TK = np.array(ids).reshape(len(ids), -1)
    return Trace(
        identity=ModelIdentity(layers=(0,), num_experts=num_experts, top_k=ids_TK.shape[1]),
        experts=ids_TK[:, None, :],
        phase=np.full(len(ids), phase, dtype=np.uint8),
        step=np.arange(len(ids), dtype=np.uint32),
        request=np.array(request),
    )


def walk(*, repeat, tokens=4000, num_experts=32, seed=0):
    """Tokens that repeat the expert of the one before with this chance."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, num_experts, tokens)
    for i in range(1, tokens):
        if random.random() < repeat:
            ids[i] = ids[i - 1]
    return trace_of(ids, request=[0] * tokens, num_experts=num_experts)


@given(
    counts=st.lists(st.integers(0, 1000), min_size=2, max_size=20),
    top_k=st.integers(1, 8),
    tokens=st.integers(1, 256),
)
def test_chances_are_those_of_independent_tokens(counts, top_k, tokens):
    shares_LE = shares_of(np.array([counts], dtype=np.float64))
    expected = [1 - (1 - min(share * top_k, 1)) ** tokens for share in shares_LE[0]]
    assert expected == pytest.approx(touch_chances(shares_LE, top_k=top_k, tokens=tokens)[0].tolist())


def test_an_expert_that_every_token_takes_is_touched_for_certain_and_one_that_none_takes_never():
    assert [1.0, 0.0] == touch_chances(np.array([[1.0, 0.0]]), top_k=1, tokens=0.5)[0].tolist()


def test_runs_are_tokens_in_a_row_of_one_request_and_do_not_overlap():
    trace = trace_of(range(7), request=[4, 4, 4, 4, 4, 9, 9])
    assert [[0, 1], [2, 3], [5, 6]] == runs_of(trace, length=2).tolist()


def test_requests_that_lie_mixed_in_the_file_are_told_apart():
    trace = trace_of(range(6), request=[1, 0, 1, 0, 1, 0])
    assert [[1, 3], [0, 2]] == runs_of(trace, length=2).tolist()


def test_a_batch_takes_one_token_of_every_request():
    trace = trace_of(range(6), request=[0, 0, 0, 1, 1, 1])
    steps = batches_of(trace, size=2)
    assert [[0, 3], [1, 4], [2, 5]] == np.sort(steps, axis=1).tolist()


def test_prefill_tokens_are_no_runs():
    assert (0, 2) == runs_of(trace_of(range(4), request=[0] * 4, phase=0), length=2).shape


def test_replay_counts_distinct_cold_experts_and_no_padding():
    trace = trace_of([[0, 1], [1, 2], [3, 3], [-1, 0]], request=[0] * 4)
    cold_LE = np.array([[False] + [True] * 7])
    steps = runs_of(trace, length=2)
    assert [1.5] == distinct_rows(trace, steps=steps, counted=cold_LE).tolist()  # {1, 2}, {3}
    assert [2.5] == distinct_rows(trace, steps=steps, counted=np.ones((1, 8), dtype=bool)).tolist()


def test_independent_tokens_are_found_independent():
    found = fit_correction(walk(repeat=0.0))
    assert 1.0 == pytest.approx(found.exponent, abs=0.02)


def test_tokens_that_repeat_each_other_touch_fewer_experts_and_count_for_fewer():
    exponents = [fit_correction(walk(repeat=chance)).exponent for chance in (0.0, 0.3, 0.6, 0.9)]
    assert sorted(exponents, reverse=True) == exponents
    assert exponents[-1] < 0.5


def test_a_fit_tells_its_trace_its_runs_and_its_error_when_one_is_left_out():
    found = fit_correction(walk(repeat=0.3), name="walk.npz")
    assert 0 < found.worst_error < 0.06
    assert "fitted on walk.npz: 4000 decode tokens, runs of 2, 3, 4, 6, 8" in found.source
    assert f"largest leave-one-out error {100 * found.worst_error:.1f} %" in found.source


@given(tokens=st.floats(0.5, 64.0))
def test_effective_tokens_undo_the_chances(tokens):
    shares_LE = np.array([[0.4, 0.3, 0.2, 0.1], [0.25] * 4])
    distinct = touch_chances(shares_LE, top_k=1, tokens=tokens).sum() / 2
    assert tokens == pytest.approx(effective_tokens_of(float(distinct), shares=shares_LE, top_k=1), rel=1e-3)


def test_more_experts_than_there_are_have_no_number_of_tokens():
    assert np.inf == effective_tokens_of(5.0, shares=np.full((1, 4), 0.25), top_k=1)


def test_an_exponent_is_read_off_a_power_law():
    assert 0.75 == pytest.approx(fit_exponent([2, 4, 8], [2**0.75, 4**0.75, 8**0.75]))


def test_an_exponent_is_never_above_independence():
    assert 1.0 == fit_exponent([2, 4], [2.2, 4.8])


@pytest.mark.parametrize(
    ("tokens", "effective"), [([], []), ([1], [1.0]), ([2], [np.inf]), ([2], [0.0]), ([2, 4], [1.5])]
)
def test_points_that_cannot_be_are_refused(tokens, effective):
    with pytest.raises(TraceError):
        fit_exponent(tokens, effective)


def test_a_run_longer_than_any_fitted_counts_as_several_of_those():
    correction = TouchCorrection(exponent=0.5, largest=4, source="an example")
    assert [1, 2**0.5, 2, 2 * 16] == [correction.effective_tokens(tokens) for tokens in (1, 2, 4, 64)]
    assert 64 == INDEPENDENT.effective_tokens(64)


@pytest.mark.parametrize("change", [{"exponent": 0.0}, {"exponent": 1.1}, {"exponent": np.nan}, {"largest": 0}])
def test_a_correction_that_is_none_is_refused(change):
    with pytest.raises(ConfigError):
        TouchCorrection(**{"exponent": 0.8, "largest": 8, "source": "an example", **change})


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (trace_of(range(4), request=[0] * 4), "runs of 2 decode tokens"),
        (trace_of([0] * 200, request=[0] * 200, phase=0), "got 0 runs"),
        (trace_of([0] * 200, request=[0] * 200, num_experts=None), "got no num_experts"),
    ],
)
def test_a_trace_that_says_too_little_is_refused(trace, reason):
    with pytest.raises(TraceError, match=reason):
        fit_correction(trace)


@pytest.mark.parametrize(("name", "exponent"), [("tiny-moe", 0.771), ("small-moe", 0.791)])
def test_recorded_traffic_gives_an_exponent_and_small_errors_when_left_out(shared_data, name, exponent):
    found = fit_correction(load_trace(shared_data / "traces" / f"{name}.npz")[0])
    assert exponent == pytest.approx(found.exponent, abs=0.01)
    assert found.worst_error < 0.03


@pytest.mark.parametrize("name", ["tiny-moe", "small-moe"])
def test_unique_cold_rows_of_requests_that_were_left_out_are_forecast_within_five_percent(shared_data, name):
    runs, batches, _ = cold_rows(shared_data / "traces" / f"{name}.npz")
    corrected, bound = runs[:3], runs[3:]
    assert worst(corrected) < 0.05
    assert all(held.error > 0.10 for held in bound)  # real tokens in a row stay under it
    assert worst(batches) < 0.01  # while requests side by side are independent


def test_the_page_shows_the_replayed_rows(shared_data):
    for name in ("tiny-moe", "small-moe"):
        runs, batches, _ = cold_rows(shared_data / "traces" / f"{name}.npz")
        assert [] == [held.row() for held in (*runs, *batches) if held.row() not in page()]
