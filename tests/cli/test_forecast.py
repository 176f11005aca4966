from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.objectives import shares_of
from hotsplit.plan.planfile import load_plan
from hotsplit.plan.trace import Trace, save_trace

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
ROW = 49152
RATES = {
    "format": "hotsplit-rates",
    "version": 1,
    "gpus": [{"index": 0, "name": "toy", "hbm_bytes_per_s": 3e12, "in_place_bytes_per_s": 2.5e10}],
    "host": {"memory_bytes_per_s": 6e10},
}
KEYS = [
    "kind", "model", "plan_hash", "ranks", "rates", "extra", "correction", "cold_bank_bytes", "decode", "windows",
    "prefill", "kv_tokens_per_hot_gib", "sweep", "notices",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forecast")


@pytest.fixture(scope="module")
def plan(cli, counts, tiny_moe, folder):
    assert (
        0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 50 * ROW / 2**30, "-o", folder / "plan.json").code
    )
    return folder / "plan.json"


@pytest.fixture(scope="module")
def rates(folder):
    (folder / "rates.json").write_text(json.dumps(RATES))
    return folder / "rates.json"


@pytest.fixture(scope="module")
def ask(cli, plan, counts, rates):
    """ask(*more) -> the JSON of a forecast."""

    def run(*more):
        result = cli("forecast", plan, "--counts", counts, "--rates", rates, "--json", *more)
        assert 0 == result.code, result.err
        return json.loads(result.out)

    return run


@pytest.fixture
def refused(cli, plan, counts, rates):
    """refused(option, ..., code=1) -> the one line."""

    def run(*more, code=1, plan=plan, counts=counts, rates=rates):
        given = [plan, *(("--counts", counts) if counts else ()), *(("--rates", rates) if rates else ())]
        return cli("forecast", *given, *more).refusal(code)

    return run


def test_json_is_one_object_with_stable_keys(ask):
    value = ask()
    assert KEYS == list(value)
    assert [1, 8, 32, 128] == [step["requests"] for step in value["decode"]]
    assert [(1, 2), (1, 4), (1, 8), (8, 2), (8, 4), (8, 8)] == [
        (step["requests"], step["tokens_per_request"]) for step in value["windows"]
    ]
    assert [512, 1024, 2048, 4096, 8192] == [step["tokens_per_request"] for step in value["prefill"]]
    assert (None, []) == (value["kv_tokens_per_hot_gib"], value["sweep"])


def test_seconds_are_bytes_over_the_rates_of_the_file(ask, plan, counts):
    step = ask("--batch", 1)["decode"][0]
    hot_LE = load_plan(plan).hot_mask()
    pairs_LE = 4 * shares_of(load_histogram(counts)[0].phases["decode"].counts)
    hot_L, cold_L = (np.where(mask, np.minimum(pairs_LE, 1), 0).sum(axis=1) * ROW for mask in (hot_LE, ~hot_LE))
    low = np.maximum(hot_L / 3e12, cold_L / 2.5e10).sum()
    high = (hot_L / 3e12 + cold_L / 2.5e10).sum()
    assert [low, high] == pytest.approx(step["seconds"])
    assert [1 / high, 1 / low] == pytest.approx(step["tokens_per_s"])
    assert cold_L.sum() == pytest.approx(step["cold_bytes"])
    assert ("link", 0) == (step["binds"]["resource"], step["binds"]["rank"])


def test_the_byte_hit_rate_falls_with_the_batch_and_the_token_hit_rate_stays(ask):
    steps = ask()["decode"]
    assert 1 == len({step["token_hit"] for step in steps})
    falling = [step["byte_hit"] for step in steps]
    assert sorted(falling, reverse=True) == falling
    assert falling[-1] < falling[1] < steps[0]["token_hit"]


def test_a_large_chunk_is_one_sweep_of_the_cold_bank(ask):
    value = ask()
    chunk = value["prefill"][-1]
    assert chunk["is_sweep"]
    assert value["cold_bank_bytes"] == pytest.approx(chunk["cold_bytes"], rel=0.01)
    assert value["prefill"][-2]["seconds"][1] == pytest.approx(chunk["seconds"][1], rel=0.01)


def test_a_link_on_the_command_line_beats_the_file(ask):
    value = ask("--link", 50, "--hbm", 2000, "--host-memory", 10)
    assert {"hbm_bytes_per_s": [2e12], "link_bytes_per_s": [5e10], "host_bytes_per_s": 1e10} == value["rates"]
    assert "host" == value["decode"][0]["binds"]["resource"]


def test_no_rates_file_is_needed_beside_both_rates(cli, plan, counts):
    result = cli("forecast", plan, "--counts", counts, "--link", 25, "--hbm", 3000)
    assert 0 == result.code
    assert "[host-rate-unknown]" in result.err
    assert "host memory unknown" in result.out


def test_what_is_known_of_the_rest_is_added_to_both_bounds(ask):
    plain = ask()["decode"][0]["seconds"]
    more = ask("--other-ms", 2, "--dense-gib", 1, "--cold-layer-us", 0)["decode"][0]["seconds"]
    assert [seconds + 0.002 + 2**30 / 3e12 for seconds in plain] == pytest.approx(more)
    layers = ask("--cold-layer-us", 10)["decode"][0]["seconds"]
    assert plain[1] < layers[1] <= plain[1] + 4 * 1e-5


def test_the_scope_of_the_seconds_is_said(cli, plan, counts, rates):
    call = ("forecast", plan, "--counts", counts, "--rates", rates)
    assert "seconds of the experts alone" in " ".join(cli(*call).out.split())
    assert "experts alone" not in " ".join(cli(*call, "--other-ms", 1).out.split())


def test_a_sweep_tells_speed_and_kv_tokens_by_budget(ask):
    value = ask("--sweep", "0,0.001,0.002", "--kv-bytes-per-token", 1024)
    assert 2**20 == value["kv_tokens_per_hot_gib"]
    points = value["sweep"]
    assert [0, round(0.001 * 2**30), round(0.002 * 2**30)] == [point["budget_bytes"] for point in points]
    assert [0, 21, 43] == [point["hot_experts"] for point in points]
    assert [0, 21 * ROW / 1024, 43 * ROW / 1024] == [point["kv_tokens_taken"] for point in points]
    speeds = [point["decode"][0]["tokens_per_s"][0] for point in points]
    assert sorted(speeds) == speeds


def test_a_sweep_of_its_own_goes_from_nothing_to_all(ask):
    points = ask("--sweep", "auto")["sweep"]
    assert (11, 0, 128) == (len(points), points[0]["hot_experts"], points[-1]["hot_experts"])


def test_a_window_pays_from_the_ratio_of_seconds_and_its_speed_needs_the_accepted_tokens(ask):
    windows = ask()["windows"]
    assert {None} == {window["tokens_per_s"] and 0 for window in windows}
    assert all(1 < window["breakeven_tokens"][0] <= window["tokens_per_request"] for window in windows)
    told = ask("--accepted", 3)["windows"]
    assert [2 / window["seconds"][1] for window in told[:1]] == [window["tokens_per_s"][0] for window in told[:1]]
    assert 3 / told[1]["seconds"][1] == told[1]["tokens_per_s"][0]


def test_prefill_counts_forecast_prefill_where_there_are_any(cli, plan, rates, tmp_path, ask):
    random = np.random.default_rng(1)
    phases = {
        name: PhaseCounts(counts=np.array([random.multinomial(4000, shares) for _ in range(4)], dtype=np.float64))
        for name, shares in (("decode", np.full(32, 1 / 32)), ("prefill", [0.5, 0.5] + [0.0] * 30))
    }
    path = tmp_path / "both.json"
    save_histogram(Histogram(identity=TINY, phases=phases), path)
    result = cli("forecast", plan, "--counts", path, "--rates", rates, "--json")
    assert "[decode-counts-for-prefill]" not in result.err
    assert 2 == pytest.approx(json.loads(result.out)["prefill"][-1]["distinct_experts"])
    assert any("decode-counts-for-prefill" in notice for notice in ask()["notices"])


def test_a_plan_without_a_model_needs_the_bytes_of_a_row(cli, counts, rates, tmp_path):
    path = tmp_path / "fraction.json"
    cli("plan", "--counts", counts, "--hot-fraction", 0.3, "-o", path)
    call = ("forecast", path, "--counts", counts, "--rates", rates)
    assert "pass --row-mib" in cli(*call).refusal()
    assert "--row-mib: got 1e+300; wanted" in cli(*call, "--row-mib", 1e300).refusal(2)
    value = json.loads(cli(*call, "--row-mib", 18, "--json").out)
    assert 18 * 2**20 * (128 - 38) == value["cold_bank_bytes"]


def test_the_bytes_of_a_row_are_not_told_twice(refused):
    assert "--row-mib" in refused("--row-mib", 18, code=2)


def test_four_ranks_share_what_the_host_gives(cli, counts, tiny_moe, rates, tmp_path):
    path = tmp_path / "tp4.json"
    cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.0006, "--tp", 4, "-o", path)
    result = cli("forecast", path, "--counts", counts, "--rates", rates, "--json")
    step = json.loads(result.out)["decode"][0]
    assert "[one-gpu-for-all]" in result.err
    assert "host" == step["binds"]["resource"]  # 4 x 25 GB/s asked of 60
    assert 4 * step["cold_bytes"] / 6e10 == pytest.approx(step["binds"]["seconds"]["host"])


@pytest.fixture(scope="module")
def trace(folder):
    """Routing of one request whose tokens repeat half of the experts of the one before."""
    random = np.random.default_rng(0)
    ids_TLK = np.argsort(random.random((800, 4, 32)), axis=2)[:, :, :4]
    for token in range(1, 800):
        fresh_LE = np.argsort(random.random((4, 32)), axis=1)
        for layer_id in range(4):
            kept = ids_TLK[token - 1, layer_id, 1:3].tolist()
            others = [expert for expert in fresh_LE[layer_id].tolist() if expert not in kept]
            ids_TLK[token, layer_id] = [*kept, *others[:2]]
    made = Trace(
        identity=TINY,
        experts=ids_TLK,
        phase=np.ones(800, dtype=np.uint8),
        step=np.arange(800, dtype=np.uint32),
        request=np.zeros(800, dtype=np.int32),
    )
    save_trace(made, folder / "trace.npz")
    return folder / "trace.npz"


def test_a_trace_corrects_windows_and_its_source_is_printed(cli, ask, trace, plan, counts, rates):
    corrected, plain = ask("--trace", trace), ask()
    assert corrected["decode"] == plain["decode"]
    for window, bound in zip(corrected["windows"], plain["windows"], strict=True):
        assert window["seconds"][0] < bound["seconds"][0]
        assert window["seconds"][1] == bound["seconds"][1]
    assert 0.3 < corrected["correction"]["exponent"] < 0.95
    printed = " ".join(cli("forecast", plan, "--counts", counts, "--rates", rates, "--trace", trace).out.split())
    assert corrected["correction"]["source"] in printed


def test_without_a_trace_independence_is_said(cli, plan, counts, rates):
    printed = " ".join(cli("forecast", plan, "--counts", counts, "--rates", rates).out.split())
    assert "tokens in a row: no trace: tokens are taken as independent" in printed


def test_what_is_printed_fits_78_columns(cli, plan, counts, rates):
    call = ("--sweep", "auto", "--kv-bytes-per-token", 1024, "--accepted", 2.5)
    result = cli("forecast", plan, "--counts", counts, "--rates", rates, *call)
    assert [] == [line for line in result.out.splitlines() if len(line) > 78 or line != line.rstrip()]


# What is refused, in one line.


def test_a_rate_in_gb_per_s_in_the_file_is_refused_with_the_unit(refused, tmp_path):
    wrong = copy.deepcopy(RATES)
    wrong["gpus"][0]["in_place_bytes_per_s"] = 25
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    line = refused(rates=tmp_path / "wrong.json")
    assert "in_place_bytes_per_s: got 25; wanted bytes per second" in line
    assert "check the unit" in line


def test_without_rates_what_is_needed_is_said(refused):
    assert "pass a rates file that has it with --rates, or --hbm" in refused(rates=None)
    assert "or --link" in refused("--hbm", 3000, rates=None)


def test_without_counts_they_are_asked_for(refused):
    assert "got no --counts" in refused(counts=None, code=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--link", "25e9"), ("--link", "nan"), ("--hbm", "-1"), ("--host-memory", "0"), ("--dense-gib", "-1"),
        ("--other-ms", "nan"), ("--cold-layer-us", "inf"), ("--kv-bytes-per-token", "0"), ("--accepted", "0.5"),
        ("--batch", "0"), ("--batch", "1,x"), ("--window", ""), ("--chunk", "-512"), ("--chunk", "1e3"),
        ("--sweep", "-1"), ("--sweep", "nan"), ("--sweep", "1,inf"), ("--sweep", "all"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_a_setting_error(refused, option, value):
    line = refused(option, value, code=2)
    assert "wanted" in line


def test_counts_of_another_model_are_refused_by_the_field_that_differs(refused, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, model_type="mixtral"))
    assert "model_type is mixtral, not qwen3_moe" in refused(counts=other)


def test_force_cannot_bend_counts_of_another_shape(refused, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, num_experts=16))
    assert "--force cannot help" in refused("--force", counts=other)


def test_force_uses_counts_of_another_type_and_says_so(cli, plan, rates, write_counts, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=replace(TINY, model_type="mixtral"))
    result = cli("forecast", plan, "--counts", other, "--rates", rates, "--force")
    assert 0 == result.code
    assert "[identity-forced]" in result.err


def test_a_count_that_is_nan_is_named(refused, tmp_path):
    rows = {str(layer): [1.5] * 32 for layer in range(4)}
    rows["2"][7] = math.nan
    (tmp_path / "nan.json").write_text(json.dumps({"train": {"decode": rows}}))
    assert "layer 2, expert 7 (decode): got NaN" in refused(counts=tmp_path / "nan.json")


def test_a_histogram_is_no_plan(refused, counts):
    assert "got a histogram, not a plan" in refused(plan=counts)


def test_a_trace_of_another_model_is_refused(refused, tmp_path, trace):
    made = Trace(
        identity=replace(TINY, num_experts=64),
        experts=np.zeros((4, 4, 4), dtype=np.uint8),
        phase=np.ones(4, dtype=np.uint8),
        step=np.arange(4, dtype=np.uint32),
        request=np.zeros(4, dtype=np.int32),
    )
    save_trace(made, tmp_path / "other.npz")
    assert "num_experts is 64, not 32" in refused("--trace", tmp_path / "other.npz")
    (tmp_path / "cut.npz").write_bytes(trace.read_bytes()[:2000])
    assert "wanted an npz file" in refused("--trace", tmp_path / "cut.npz")


def test_strict_refuses_doubtful_counts(refused, tmp_path):
    rows = {str(layer): [3] * 32 for layer in range(4)}
    (tmp_path / "flat.json").write_text(json.dumps({"live": {"decode": rows}, "meta": {"top_k": 4}}))
    assert "[flat-counts]" in refused("--strict", 1, counts=tmp_path / "flat.json")


@pytest.mark.parametrize("option", [("--dense-gib", 1e300), ("--other-ms", 1e308), ("--cold-layer-us", 1e308)])
def test_a_cost_that_no_machine_has_is_one_clear_line(cli, plan, counts, rates, option):
    line = cli("forecast", plan, "--counts", counts, "--rates", rates, *option).refusal(2)
    assert f"{option[0]}: got {option[1]!r}; wanted a finite number >= 0 and <= " in line
