from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import ConfigError, PlanError
from hotsplit.plan.forecast import Extra, Model, Step, any_cold, breakeven, forecast_step
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.rates import Machine
from hotsplit.plan.sweep import even_budgets, kv_tokens_per_gib, sweep
from hotsplit.plan.touched import TouchCorrection

ONE = Machine(hbm_bytes_per_s=(1e12,), link_bytes_per_s=(1e10,))
HALVING = TouchCorrection(exponent=0.5, largest=8, source="an example")


def model_of(counts, hot, *, top_k=1, row_bytes=None, stages=None, tp=1):
    counts_LE = np.array(counts, dtype=np.float64)
    return Model(
        shares=shares_of(counts_LE),
        hot=np.array(hot, dtype=bool),
        row_bytes=np.array(row_bytes or [10**6] * len(counts_LE), dtype=np.int64),
        stages=stages or (tuple(range(len(counts_LE))),),
        top_k=top_k,
        tp=tp,
    )


SKEWED = model_of([[60, 20, 10, 6, 4], [50, 30, 10, 5, 5]], [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], top_k=1)


def best_of(counts_LE, *, rows, **facts):
    """The `rows` most used experts of all layers hot."""
    order = np.argsort(-shares_of(counts_LE).ravel(), kind="stable")
    hot = np.zeros(counts_LE.size, dtype=bool)
    hot[order[:rows]] = True
    return model_of(counts_LE, hot.reshape(counts_LE.shape), **facts)


@st.composite
def models(draw, *, equal_rows=False):
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    counts_LE = np.floor(random.pareto(1.0, (num_layers, num_experts)) * 100)
    rows_L = [10**6] * num_layers if equal_rows else random.integers(1, 10**7, num_layers).tolist()
    tp, cut = draw(st.integers(1, 3)), draw(st.integers(0, num_layers))
    stages = (tuple(range(cut)), tuple(range(cut, num_layers)))
    top_k = draw(st.integers(1, num_experts))
    rows = draw(st.integers(0, counts_LE.size))
    return best_of(counts_LE, rows=rows, top_k=top_k, row_bytes=rows_L, stages=stages, tp=tp)


@st.composite
def machines(draw, *, ranks):
    rate = st.floats(1e8, 1e13)
    return Machine(
        hbm_bytes_per_s=tuple(draw(st.lists(rate, min_size=ranks, max_size=ranks))),
        link_bytes_per_s=tuple(draw(st.lists(rate, min_size=ranks, max_size=ranks))),
        host_bytes_per_s=draw(st.one_of(st.just(math.inf), rate)),
    )


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["decode", "window", "prefill"]),
    requests=st.sampled_from([1, 8, 32, 128]),
    tokens=st.sampled_from([1, 2, 4, 512, 8192]),
)


@given(model=models(), step=STEPS, exponent=st.floats(0.1, 1.0), data=st.data())
def test_one_after_the_other_is_never_faster_than_overlap(model, step, exponent, data):
    machine = data.draw(machines(ranks=len(model.stages) * model.tp))
    cost = st.floats(0, 1e-2)
    extra = Extra(dense_bytes=data.draw(st.integers(0, 10**10)), other_s=data.draw(cost), cold_layer_s=data.draw(cost))
    correction = TouchCorrection(exponent=exponent, largest=data.draw(st.integers(1, 64)), source="any")
    found = forecast_step(model, machine=machine, step=step, extra=extra, correction=correction)
    assert 0 <= found.seconds_low <= found.seconds_high < math.inf
    assert found.tokens_per_s_low <= found.tokens_per_s_high
    assert found.cold_bytes_corrected <= found.cold_bytes * (1 + 1e-9)
    assert 0 <= found.byte_hit <= 1
    # Without overlap a step takes all its reads, with it the longer one of every layer: at most twice apart.
    plain = forecast_step(model, machine=machine, step=step)
    assert plain.seconds_high <= 2 * plain.seconds_low * (1 + 1e-9)


@given(model=models(equal_rows=True), batch=st.integers(2, 256))
def test_the_byte_hit_rate_stays_under_the_token_hit_rate_when_the_most_used_are_hot(model, batch):
    ranks = len(model.stages) * model.tp
    machine = Machine(hbm_bytes_per_s=(1e12,) * ranks, link_bytes_per_s=(1e10,) * ranks)
    # An expert that every token takes is read once a step, but its share says no more than 1 / top_k.
    if (model.shares * model.top_k <= 1).all():
        found = forecast_step(model, machine=machine, step=Step(kind="decode", requests=batch))
        assert found.byte_hit <= found.token_hit + 1e-9


def test_on_skewed_traffic_the_byte_hit_rate_falls_below_the_token_hit_rate_as_the_batch_grows():
    found = [forecast_step(SKEWED, machine=ONE, step=Step(kind="decode", requests=many)) for many in (1, 8, 32)]
    assert [0.65, 0.65, 0.65] == [pytest.approx(step.token_hit) for step in found]
    assert found[0].byte_hit == pytest.approx(0.65)
    assert 0.65 > found[1].byte_hit > found[2].byte_hit > 0.3


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_unique_cold_bytes_are_those_of_independent_tokens(batch):
    found = forecast_step(SKEWED, machine=ONE, step=Step(kind="decode", requests=batch))
    cold_p = [0.10, 0.06, 0.04, 0.30, 0.10, 0.05, 0.05]
    assert 1e6 * math.fsum(1 - (1 - p) ** batch for p in cold_p) == pytest.approx(found.cold_bytes)


def test_a_speculative_window_counts_its_tokens_and_is_corrected():
    found = forecast_step(SKEWED, machine=ONE, step=Step(kind="window", tokens=4), correction=HALVING)
    assert 4 == found.step.num_tokens
    batch = [forecast_step(SKEWED, machine=ONE, step=Step(kind="decode", requests=many)) for many in (2, 4)]
    assert batch[1].cold_bytes == pytest.approx(found.cold_bytes)
    assert batch[0].cold_bytes == pytest.approx(found.cold_bytes_corrected)  # 4^0.5 tokens


def test_a_batch_of_single_tokens_is_not_corrected():
    step = Step(kind="decode", requests=32)
    assert forecast_step(SKEWED, machine=ONE, step=step) == forecast_step(
        SKEWED, machine=ONE, step=step, correction=HALVING
    )


def test_a_prefill_chunk_beyond_saturation_is_one_sweep_of_the_cold_bank():
    chunks = [forecast_step(SKEWED, machine=ONE, step=Step(kind="prefill", tokens=many)) for many in (4, 512, 8192)]
    assert [False, True, True] == [chunk.is_sweep for chunk in chunks]
    assert 7e6 == SKEWED.cold_bank_bytes
    assert [pytest.approx(7e6), pytest.approx(7e6)] == [chunk.cold_bytes for chunk in chunks[1:]]
    assert chunks[1].seconds_high == pytest.approx(chunks[2].seconds_high)
    assert 16 == pytest.approx(chunks[2].tokens_per_s_low / chunks[1].tokens_per_s_low)  # a larger chunk is the lever


def test_the_bounds_of_a_known_step():
    model = model_of([[50, 50]], [[1, 0]], row_bytes=[10**8], top_k=2)  # every token takes both
    found = forecast_step(model, machine=ONE, step=Step(kind="decode"))
    assert 0.01 == pytest.approx(found.seconds_low)  # 1e8 over 1e10
    assert 0.0101 == pytest.approx(found.seconds_high)  # and 1e8 over 1e12
    extra = Extra(dense_bytes=10**9, other_s=0.002, cold_layer_s=0.003)
    more = forecast_step(model, machine=ONE, step=Step(kind="decode"), extra=extra)
    assert 0.016 == pytest.approx(more.seconds_low)
    assert 0.0161 == pytest.approx(more.seconds_high)


def test_overlap_is_within_a_layer_and_not_across_layers():
    model = model_of([[50, 50], [50, 50]], [[1, 1], [0, 0]], row_bytes=[10**8, 10**6], top_k=2)
    found = forecast_step(model, machine=ONE, step=Step(kind="decode"))
    assert 2e8 / 1e12 + 2e6 / 1e10 == pytest.approx(found.seconds_low)


@pytest.mark.parametrize(
    ("machine", "binds"),
    [
        (Machine(hbm_bytes_per_s=(1e12,) * 2, link_bytes_per_s=(2e10, 1e10)), ("link", 1)),
        (Machine(hbm_bytes_per_s=(1e12,) * 2, link_bytes_per_s=(1e10, 2e10)), ("link", 0)),
        (Machine(hbm_bytes_per_s=(1e12,) * 2, link_bytes_per_s=(1e10,) * 2, host_bytes_per_s=1.9e10), ("host", 0)),
        (Machine(hbm_bytes_per_s=(1e12,) * 2, link_bytes_per_s=(1e10,) * 2, host_bytes_per_s=2.1e10), ("link", 0)),
        (Machine(hbm_bytes_per_s=(2e9, 1e9), link_bytes_per_s=(1e10,) * 2), ("hbm", 1)),
    ],
)
def test_the_slowest_resource_and_its_rank_bind(machine, binds):
    model = model_of([[50, 50]], [[1, 0]], top_k=2, tp=2)
    found = forecast_step(model, machine=machine, step=Step(kind="decode")).binding
    assert binds == (found.resource, found.rank)


def test_ranks_that_share_a_host_each_get_a_part_of_it():
    model = model_of([[50, 50]], [[0, 0]], row_bytes=[10**8], top_k=2, tp=4)
    shared = Machine(hbm_bytes_per_s=(1e12,) * 4, link_bytes_per_s=(2.5e10,) * 4, host_bytes_per_s=6e10)
    found = forecast_step(model, machine=shared, step=Step(kind="decode"))
    assert 4 * 2e8 / 6e10 == pytest.approx(found.seconds_low)
    alone = forecast_step(model, machine=replace(shared, host_bytes_per_s=math.inf), step=Step(kind="decode"))
    assert 2e8 / 2.5e10 == pytest.approx(alone.seconds_low)


def test_a_stage_goes_at_the_rate_of_its_own_slowest_rank():
    model = model_of([[50, 50], [50, 50]], [[0, 0], [0, 0]], row_bytes=[10**8] * 2, top_k=2, stages=((0,), (1,)))
    machine = Machine(hbm_bytes_per_s=(1e12,) * 2, link_bytes_per_s=(1e10, 2e10))
    found = forecast_step(model, machine=machine, step=Step(kind="decode"))
    assert 2e8 / 1e10 + 2e8 / 2e10 == pytest.approx(found.seconds_low)
    assert 0 == found.binding.rank


def test_what_is_known_of_the_rest_can_bind():
    found = forecast_step(SKEWED, machine=ONE, step=Step(kind="decode"), extra=Extra(other_s=1.0))
    assert "other" == found.binding.resource


def test_everything_hot_waits_for_no_link():
    model = model_of([[50, 50]], [[1, 1]])
    found = forecast_step(model, machine=ONE, step=Step(kind="decode", requests=8), extra=Extra(cold_layer_s=1.0))
    assert (0.0, 1.0, 1.0, False) == (found.cold_bytes, found.token_hit, found.byte_hit, found.is_sweep)
    assert found.seconds_low == found.seconds_high < 1e-3


def test_any_cold_work_is_a_chance_per_layer():
    chances_LE, hot_LE = np.array([[0.5, 0.5, 0.9], [0.5, 0.5, 0.9]]), np.array([[0, 0, 1], [1, 1, 1]], dtype=bool)
    assert [0.75, 0.0] == any_cold(chances_LE, hot=hot_LE).tolist()


def test_a_window_pays_from_the_ratio_of_its_seconds():
    model = model_of([[50, 50]], [[0, 0]], row_bytes=[10**8])
    steps = [Step(kind="decode"), Step(kind="window", tokens=2)]
    single, window = (forecast_step(model, machine=ONE, step=step) for step in steps)
    assert (pytest.approx(1.5), pytest.approx(1.5)) == breakeven(window, single=single)


@pytest.mark.parametrize("name", ["dense_bytes", "other_s", "cold_layer_s"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_cost_that_is_none_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Extra(**{name: value})


def test_a_machine_of_other_ranks_is_refused():
    with pytest.raises(PlanError, match="got 1 ranks; wanted 2"):
        forecast_step(replace(SKEWED, tp=2), machine=ONE, step=Step(kind="decode"))


@pytest.mark.parametrize("change", [{"stages": ((0,),)}, {"top_k": 6}, {"tp": 0}, {"row_bytes": np.array([1])}])
def test_a_model_that_does_not_add_up_is_refused(change):
    with pytest.raises(PlanError):
        replace(SKEWED, **change)


@given(model=models())
def test_a_sweep_never_gets_slower_with_more_hot_bytes(model):
    ranks = len(model.stages) * model.tp
    machine = Machine(hbm_bytes_per_s=(1e12,) * ranks, link_bytes_per_s=(1e10,) * ranks)
    points = sweep(model, budgets=even_budgets(model), machine=machine, steps=[Step(kind="decode")])
    hits = [point.token_hit for point in points]
    assert sorted(hits) == pytest.approx(hits, abs=1e-9)
    assert all(point.hot_bytes <= point.budget_bytes for point in points)
    assert (0, model.hot.size) == (points[0].hot_rows, points[-1].hot_rows)


def test_a_sweep_under_the_objective_time_reads_fewer_cold_bytes_and_serves_fewer_tokens():
    model = model_of([[40, 60], [90, 10]], [[0, 0], [0, 0]], row_bytes=[4, 1])
    found = {
        objective: sweep(model, budgets=[4], machine=ONE, steps=[Step(kind="decode")], objective=objective)[0].steps[0]
        for objective in ("share", "time")
    }
    assert found["time"].cold_bytes <= found["share"].cold_bytes
    assert found["share"].token_hit >= found["time"].token_hit


@pytest.mark.parametrize("budget", [-1, -(2**30)])
def test_a_negative_budget_is_refused(budget):
    with pytest.raises(ConfigError, match="wanted at least 0"):
        sweep(SKEWED, budgets=[0, budget], machine=ONE, steps=[Step(kind="decode")])


def test_a_hot_gib_takes_the_place_of_its_kv_tokens():
    assert 2**30 / 56_180 == kv_tokens_per_gib(56_180)


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_kv_bytes_that_are_none_are_refused(size):
    with pytest.raises(ConfigError, match="KV bytes per token"):
        kv_tokens_per_gib(size)
