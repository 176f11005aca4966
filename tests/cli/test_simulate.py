"""`hotsplit simulate`: what it prints, what it writes, and one clear line for every input that cannot be."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.trace import Trace, load_trace, save_trace

PLAN = ("--plan-domain", "python", "--hot-fraction", 0.25)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two kinds of traffic, 120 decode tokens each and a prefill, over two layers of 16 experts."""
    path = tmp_path_factory.mktemp("simulate") / "trace.npz"
    random = np.random.default_rng(0)
    ids = np.concatenate([random.permuted(np.tile(np.arange(6), (130, 2, 1)), axis=2)[:, :, :2] + i for i in (0, 8)])
    domain = np.repeat([0, 1], 130)
    phase = np.tile(np.arange(130) >= 10, 2)
    save_trace(
        Trace(
            identity=ModelIdentity(model_type="made_up", layers=(3, 5), num_experts=16, top_k=2),
            experts=ids,
            phase=phase.astype(np.uint8),
            step=np.cumsum(np.r_[0, phase[1:] | (domain[1:] != domain[:-1])]).astype(np.uint32),
            domain=domain.astype(np.uint16),
            domains=("python", "prose"),
            meta={"expert_bytes": 2**20},
        ),
        path,
    )
    return path


def answer(result):
    assert 0 == result.code, result.err
    return json.loads(result.out)


def by_policy(found):
    return {run["policy"]: run for run in found["runs"]}


def test_every_policy_says_what_it_hit_read_cold_and_moved(cli, trace):
    found = answer(cli("simulate", trace, *PLAN, "--domain", "prose", "--dyn-steps", 10, "--json"))
    runs = by_policy(found)
    assert ["static", "dynamic", "lru", "oracle"] == [run["policy"] for run in found["runs"]]
    assert (120, 8, [2**20] * 2) == (found["steps"], found["hot_experts"], found["row_bytes"])
    assert runs["static"]["hit_rate"] < runs["dynamic"]["hit_rate"] < runs["oracle"]["hit_rate"]
    for name in ("static", "dynamic", "lru"):
        run = runs[name]
        assert 480 == run["pairs"]
        assert run["hits"] / 480 == run["hit_rate"]
        # One token a step: distinct experts are the pairs.
        assert (480 - run["hits"]) * 2**20 / 120 == run["cold_bytes_per_step"]
        assert sum(part["moved_bytes"] for part in run["windows"]) == run["moved_bytes"]
    assert 0 == runs["static"]["moved_bytes"]
    assert runs["dynamic"]["swaps"] * 2**20 == runs["dynamic"]["moved_bytes"] > 0
    assert (480 - runs["lru"]["hits"]) * 2**20 == runs["lru"]["moved_bytes"]


def test_the_table_has_a_row_for_each_and_a_column_over_time(cli, trace):
    result = cli("simulate", trace, *PLAN, "--domain", "prose", "--policy", "static,oracle", "--window", 60)
    assert 0 == result.code, result.err
    lines = [line.split() for line in result.out.splitlines()]
    assert ["static", "oracle"] == [line[0] for line in lines if line and line[0] in ("static", "oracle")]
    assert ["from", "step", "static", "oracle"] in lines
    assert ["0", "60"] == [line[0] for line in lines if line and line[0] in ("0", "60")]


def test_a_plan_file_and_the_counts_that_it_was_made_from_start_alike(cli, trace, tmp_path):
    from hotsplit.plan.histogram import save_histogram
    from hotsplit.plan.trace import histogram_of

    counts, plan = tmp_path / "counts.json", tmp_path / "plan.json"
    save_histogram(histogram_of(load_trace(trace)[0], domain="python"), counts)
    assert 0 == cli("plan", "--counts", counts, "--hot-fraction", 0.25, "-o", plan).code
    static = ("--policy", "static", "--json")
    runs = [
        answer(cli("simulate", trace, *source, *static))["runs"]
        for source in (("--plan", plan), ("--counts", counts, "--hot-fraction", 0.25), PLAN)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_a_sweep_replays_the_dynamic_policy_for_each_value_and_the_others_once(cli, trace):
    sweep = ("--sweep", "dyn-steps=10,40", "--sweep", "dyn-schedule=fixed,adaptive")
    found = answer(cli("simulate", trace, *PLAN, "--domain", "prose", *sweep, "--json"))
    assert ["static", "dynamic", "lru", "oracle", *["dynamic"] * 3] == [run["policy"] for run in found["runs"]]
    dynamic = [run for run in found["runs"] if run["policy"] == "dynamic"]
    assert [("10", "fixed"), ("10", "adaptive"), ("40", "fixed"), ("40", "adaptive")] == [
        (run["settings"]["dyn_steps"], run["settings"]["dyn_schedule"]) for run in dynamic
    ]
    assert [12 - 1, 3 - 1] == [dynamic[0]["updates"], dynamic[2]["updates"]]


def test_a_sweep_of_the_budget_replays_every_policy(cli, trace):
    budgets = ("--sweep", "hot-fraction=0.25,0.5", "--policy", "static,oracle")
    found = answer(cli("simulate", trace, "--plan-domain", "python", *budgets, "--json"))
    assert ["static", "oracle"] * 2 == [run["policy"] for run in found["runs"]]
    assert found["runs"][0]["hit_rate"] < found["runs"][2]["hit_rate"]


def test_domains_are_played_in_turn(cli, trace):
    turns = ("--domain", "python", "--domain", "prose", "--domain", "python", "--steps", 50)
    found = answer(cli("simulate", trace, *PLAN, *turns, "--policy", "static", "--window", 50, "--json"))
    rates = [part["hit_rate"] for part in found["runs"][0]["windows"]]
    assert 150 == found["steps"]
    assert rates[1] == 0.0 < min(rates[0], rates[2])


def test_a_budget_in_gib_takes_the_rows_that_the_trace_or_the_user_says(cli, trace):
    gib = ("--plan-domain", "python", "--hot-gib", 12 / 1024, "--policy", "static", "--json")
    assert 12 == answer(cli("simulate", trace, *gib))["hot_experts"]
    assert 6 == answer(cli("simulate", trace, *gib, "--row-mib", 2))["hot_experts"]


def test_rates_turn_bytes_into_bounds_of_tokens_per_second(cli, trace, tmp_path):
    rates = tmp_path / "rates.json"
    gpu = {"index": 0, "hbm_bytes_per_s": 1e12, "in_place_bytes_per_s": 1e10}
    rates.write_text(json.dumps({"format": "hotsplit-rates", "version": 1, "gpus": [gpu], "host": {}}))
    found = answer(cli("simulate", trace, *PLAN, "--policy", "static", "--rates", rates, "--json"))
    (run,) = found["runs"]
    cold_s = run["cold_bytes_per_step"] / 1e10
    hot_s = (4 * 2**20 - run["cold_bytes_per_step"]) / 1e12
    assert [pytest.approx(1 / (hot_s + cold_s)), pytest.approx(1 / max(hot_s, cold_s))] == run["tokens_per_s"]


def test_the_result_is_written_as_it_is_printed(cli, trace, tmp_path):
    output = tmp_path / "result.json"
    result = cli("simulate", trace, *PLAN, "--policy", "static", "-o", output, "--json")
    assert answer(result) == json.loads(output.read_text())
    assert f"simulation written to {output}" in result.err


def test_a_trace_of_another_model_is_refused_and_the_field_is_named(cli, trace, tmp_path, write_counts):
    counts = write_counts(tmp_path / "counts.json")
    line = cli("simulate", trace, "--counts", counts, "--hot-fraction", 0.2).refusal(1)
    assert "was made for another model" in line
    assert "num_experts is 16, not 32" in line


def test_force_does_not_replay_a_trace_of_another_shape(cli, trace, tmp_path, write_counts):
    counts = write_counts(tmp_path / "counts.json")
    line = cli("simulate", trace, "--counts", counts, "--hot-fraction", 0.2, "--force").refusal(1)
    assert "got 2 layers, top-2; wanted 4 layers, top-4" in line


REFUSED = [
    (("--plan-domain", "verse", "--hot-fraction", 0.2), 1, "domain: got 'verse'; wanted python, prose"),
    ((*PLAN, "--domain", "verse"), 1, "domain: got 'verse'; wanted python, prose"),
    (("--plan-domain", "python", "--hot-gib", -1), 2, "hot_gib (--hot-gib): got '-1'; wanted a finite number >= 0"),
    (("--plan-domain", "python", "--hot-fraction", -0.1), 2, "hot fraction: got -0.1; wanted a number from 0 to 1"),
    (("--plan-domain", "python", "--even", "--hot-fraction", "nan"), 2, "hot fraction: got nan"),
    (("--plan-domain", "python"), 2, "the budget: got none; wanted --hot-gib, or --hot-fraction"),
    (("--plan-domain", "python", "--hot-fraction", 0.2, "--hot-gib", 1), 2, "got --hot-fraction and --hot-gib"),
    (("--hot-fraction", 0.2), 2, "the plan: got none; wanted one of --plan, --counts, --plan-domain"),
    ((*PLAN, "--counts", "x.json"), 2, "the plan: got --counts and --plan-domain"),
    ((*PLAN, "--policy", "static,mru"), 2, "--policy: got 'mru'; wanted some of static, dynamic, lru, oracle"),
    ((*PLAN, "--sweep", "speed=3"), 2, "--sweep: got 'speed=3'; wanted NAME=V,V with one of dyn-schedule"),
    ((*PLAN, "--sweep", "dyn-steps=5,"), 2, "--sweep: got 'dyn-steps=5,'"),
    ((*PLAN, "--sweep", "dyn-steps=5,0"), 2, "dyn_steps (--dyn-steps): got '0'; wanted an integer >= 1"),
    ((*PLAN, "--row-mib", 0), 2, "--row-mib: got 0.0; wanted a number > 0"),
    ((*PLAN, "--rates", "absent.json"), 1, "rates absent.json: got no such file"),
    (("--plan-domain", "python", "--hot-gib", 0.0001), 1, "hot budget: got 9.99998e-05 GiB; wanted at least"),
]


@pytest.mark.parametrize(("options", "code", "expected"), REFUSED, ids=[str(case[2])[:40] for case in REFUSED])
def test_what_cannot_be_is_one_line_and_nothing_is_written(cli, trace, tmp_path, options, code, expected):
    output = tmp_path / "result.json"
    assert expected in cli("simulate", trace, *options, "-o", output).refusal(code)
    assert not output.exists()


def test_a_truncated_trace_is_one_line_and_nothing_is_written(cli, trace, tmp_path):
    cut, output = tmp_path / "cut.npz", tmp_path / "result.json"
    cut.write_bytes(trace.read_bytes()[:-200])
    assert f"trace {cut}: got" in cli("simulate", cut, *PLAN, "-o", output).refusal(1)
    assert not output.exists()


def test_a_trace_with_a_damaged_array_is_one_line(cli, trace, tmp_path):
    broken = tmp_path / "broken.npz"
    with zipfile.ZipFile(trace) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[: len(data) // 2] if name == "experts.npy" else data)
    assert f"trace {broken}: got" in cli("simulate", broken, *PLAN).refusal(1)


def test_an_output_that_would_destroy_the_trace_is_refused(cli, trace):
    before = trace.read_bytes()
    assert "--output: got" in cli("simulate", trace, *PLAN, "-o", trace).refusal(2)
    assert before == trace.read_bytes()


def test_a_trace_that_does_not_say_how_many_experts_there_are_is_refused(cli, trace, tmp_path):
    silent = tmp_path / "silent.npz"
    known = load_trace(trace)[0]
    save_trace(replace(known, identity=replace(known.identity, num_experts=None), meta={}), silent)
    assert "got no num_experts" in cli("simulate", silent, *PLAN).refusal(1)


def test_a_profile_of_the_bundled_model_can_be_replayed(cli, profiled):
    adaptive = ("--dyn-schedule", "adaptive", "--phase", "all")
    found = answer(
        cli("simulate", profiled.trace, "--plan-domain", "english", "--hot-fraction", 0.3, *adaptive, "--json")
    )
    assert 4 == len(found["runs"])
    assert 12 * (24 + 12) == found["runs"][0]["tokens"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--row-mib", 1e300), "--row-mib: got 1e+300; wanted a number > 0 and <= "),
        (("--domain", "prose", "--steps", 10**20), "wanted an integer from 1 to 16777216"),
        (("--sweep", "dyn-half-life=1e-320"), "wanted at least 0.001 updates"),
    ],
)
def test_a_number_that_cannot_be_replayed_is_one_clear_line(cli, trace, more, said):
    assert said in cli("simulate", trace, *PLAN, *more).refusal(2)


@pytest.mark.parametrize(
    "environment", [{"HOTSPLIT_HOT_GIB": "1"}, {"HOTSPLIT_PLAN": "no.json"}, {"HOTSPLIT_COUNTS": "no.json"}]
)
def test_an_option_beats_what_the_environment_says_otherwise(cli, trace, environment):
    plain, beside = (answer(cli("simulate", trace, *PLAN, "--json", env=env)) for env in ({}, environment))
    assert plain == beside


def test_a_replay_without_an_update_says_so_and_what_to_try(cli, trace):
    result = cli("simulate", trace, *PLAN, "--domain", "prose")
    assert 0 == result.code, result.err
    assert "dynamic: no update in 120 steps (every 2,000); try --dyn-steps 12." in " ".join(result.out.split())


def test_a_domain_that_begins_anew_is_said_aloud(cli, trace):
    result = cli("simulate", trace, *PLAN, "--domain", "prose", "--steps", 300, "--policy", "static")
    assert "played 3 times over" in result.err
    assert "[trace-repeated]" in result.err


def test_a_swept_fraction_has_its_hot_experts_in_its_row(cli, trace):
    plan = ("--plan-domain", "python", "--sweep", "hot-fraction=0.25,0.5", "--policy", "static")
    result = cli("simulate", trace, *plan)
    rows = [line.split() for line in result.out.splitlines() if line.startswith("static")]
    assert [["hot-fraction=0.25", "8"], ["hot-fraction=0.5", "16"]] == [row[1:3] for row in rows]


def test_a_sampled_policy_is_marked_in_its_row(cli, trace, monkeypatch):
    monkeypatch.setattr("hotsplit.cli.simulating.sample_layers", lambda steps: (0,))
    result = cli("simulate", trace, *PLAN, "--policy", "lru")
    assert any(line.startswith("lru (1 of 2 layers) ") for line in result.out.splitlines())
