from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.metrics import UpdateLine
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import load_plan, save_plan
from report.reports import data_of, run_folder, snapshot_of

OTHER = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=16, top_k=4)
LINE = UpdateLine(
    update=1, step=100, tokens=100, hit=0.5, byte_hit=0.4, oracle=0.7, drift=0.1, swaps=1, refused=0, failed=0, moved_mib=1.0,
    cost_ms=1.0, rank=0,
)  # fmt: skip


@pytest.fixture
def plan(cli, counts, tiny_moe, tmp_path):
    """A plan of the bundled model."""
    path = tmp_path / "plan.json"
    assert 0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.002, "-o", path).code
    return path


@pytest.fixture
def rates(tmp_path):
    path = tmp_path / "rates.json"
    gpu = {"index": 0, "hbm_bytes_per_s": 1e12, "in_place_bytes_per_s": 2e10}
    path.write_text(json.dumps({"format": "hotsplit-rates", "version": 1, "gpus": [gpu], "host": {}}))
    return path


def test_a_page_is_written_and_its_summary_printed(cli, counts, plan, tmp_path):
    result = cli("report", plan, "--counts", counts, "-o", tmp_path / "page.html")
    assert (0, f"page written to {tmp_path / 'page.html'}\n") == (result.code, result.err)
    assert "not tested on unseen" in " ".join(result.out.split())
    assert "What to do" in result.out
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!doctype html>")


def test_what_is_printed_fits_78_columns(cli, counts, plan, tmp_path):
    out = cli("report", plan, "--counts", counts, "--test", counts, "-o", tmp_path / "page.html").out
    assert [] == [line for line in out.splitlines() if len(line) > 78 or line != line.rstrip()]


def test_json_and_page_have_the_rates_of_plan(cli, counts, write_counts, plan, tiny_moe, tmp_path):
    test = write_counts(tmp_path / "test.json", tokens=90_000)
    options = ("--counts", counts, "--test", test)
    value = json.loads(cli("report", plan, *options, "-o", tmp_path / "page.html", "--json").out)
    planned = json.loads(cli("plan", tiny_moe, *options, "--hot-gib", 0.002, "--json").out)
    (found,) = value["plans"]
    names = ["hit_rate", "held_out", "null", "oracle_free", "oracle_reachable", "worst_layer", "hot_experts"]
    assert [planned[name] for name in names] == [found[name] for name in names]
    data = data_of((tmp_path / "page.html").read_bytes())["plans"][0]
    assert [planned["hit_rate"], planned["held_out"]] == [data["own"], data["test"]]
    assert list(planned["hot"].values()) == data["hot"]


def test_json_is_one_object_with_stable_keys(cli, counts, plan, tmp_path):
    value = json.loads(cli("report", plan, "--counts", counts, "-o", tmp_path / "page.html", "--json").out)
    assert ["kind", "page", "bytes", "model", "plans", "notices"] == list(value)
    assert (tmp_path / "page.html").stat().st_size == value["bytes"]
    assert "not-tested" == value["plans"][0]["verdict"]


def test_the_verdict_is_that_of_evaluate(cli, counts, write_counts, plan, tmp_path):
    test = write_counts(tmp_path / "test.json", seed=3)
    report = json.loads(
        cli("report", plan, "--counts", counts, "--test", test, "-o", tmp_path / "p.html", "--json").out
    )
    evaluated = json.loads(cli("evaluate", plan, "--counts", test, "--train", counts, "--json").out)
    assert evaluated["tests"][0]["verdict"] == report["plans"][0]["verdict"]


def test_the_forecast_is_that_of_forecast(cli, counts, plan, rates, tmp_path):
    cli("report", plan, "--counts", counts, "--rates", rates, "-o", tmp_path / "page.html")
    forecast = json.loads(cli("forecast", plan, "--counts", counts, "--rates", rates, "--json").out)
    _, low, high = data_of((tmp_path / "page.html").read_bytes())["plans"][0]["forecast"][0]["plan"]
    assert [1e3 * seconds for seconds in forecast["decode"][0]["seconds"]] == pytest.approx([low, high], rel=1e-4)


def test_a_run_is_shown_from_its_folder_and_its_log(cli, counts, plan, tmp_path):
    routed = load_histogram(counts)[0].phases["decode"].counts
    folder = run_folder(tmp_path / "run", snapshot_of(load_plan(plan), counts=routed))
    log = tmp_path / "server.log"
    log.write_text("".join(f"INFO {replace(LINE, update=update, step=100 * update)}\n" for update in (1, 2, 3)))
    result = cli("report", plan, "--counts", counts, "--run", folder, "--run", log, "-o", tmp_path / "page.html")
    assert 0 == result.code, result.err
    page = (tmp_path / "page.html").read_bytes()
    assert b"Where rank 0 stands" in page
    assert [100, 200, 300] == [line[0] for line in data_of(page)["run"][0]["lines"]]
    assert routed.tolist() == data_of(page)["traffic"][1]["rows"]


def test_several_plans_share_a_page(cli, counts, plan, tmp_path):
    smaller = tmp_path / "smaller.json"
    cli("plan", "--counts", counts, "--hot-fraction", 0.1, "-o", smaller)
    result = cli("report", plan, smaller, "--counts", counts, "-o", tmp_path / "page.html")
    assert [str(plan), str(smaller)] == [
        each["name"] for each in data_of((tmp_path / "page.html").read_bytes())["plans"]
    ]
    assert 2 == result.out.count("What to do")


def test_the_same_input_gives_the_same_bytes(cli, counts, plan, tmp_path):
    for name in ("a.html", "b.html"):
        cli("report", plan, "--counts", counts, "-o", tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("which", ["plan", "counts", "rates", "snapshot"])
def test_an_output_that_is_read_is_refused_and_stays(cli, counts, plan, rates, tmp_path, which):
    folder = run_folder(tmp_path / "run", snapshot_of(load_plan(plan), counts=np.ones((4, 32))))
    path = {"plan": plan, "counts": counts, "rates": rates, "snapshot": folder / "rank0.json"}[which]
    before = path.read_bytes()
    result = cli("report", plan, "--counts", counts, "--rates", rates, "--run", folder, "-o", path)
    assert "--output: got" in result.refusal(code=2)
    assert before == path.read_bytes()


def test_without_counts_the_report_says_what_it_needs(cli, plan, tmp_path):
    assert "--counts" in cli("report", plan, "-o", tmp_path / "page.html").refusal(code=2)


def refused(cli, page, *arguments, code=1):
    line = cli("report", *arguments, "-o", page).refusal(code=code)
    assert not page.exists()
    return line


def test_counts_of_another_model_are_refused(cli, write_counts, plan, tmp_path):
    other = write_counts(tmp_path / "other.json", identity=OTHER)
    assert "num_experts is 16, not 32" in refused(cli, tmp_path / "page.html", plan, "--counts", other)


def test_a_histogram_with_a_nan_is_refused(cli, counts, plan, tmp_path):
    broken = json.loads(counts.read_text())
    broken["phases"]["decode"]["layers"]["2"][7] = float("nan")
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    assert "layer 2, expert 7" in refused(cli, tmp_path / "page.html", plan, "--counts", path)


def test_rates_in_another_unit_are_refused(cli, counts, plan, rates, tmp_path):
    rates.write_text(rates.read_text().replace("20000000000.0", "20.0"))
    line = refused(cli, tmp_path / "page.html", plan, "--counts", counts, "--rates", rates)
    assert "in_place_bytes_per_s" in line
    assert "check the unit" in line


def test_rates_for_a_plan_without_bytes_are_refused(cli, counts, rates, tmp_path):
    path = tmp_path / "fraction.json"
    cli("plan", "--counts", counts, "--hot-fraction", 0.1, "-o", path)
    assert "leave --rates out" in refused(cli, tmp_path / "page.html", path, "--counts", counts, "--rates", rates)


def test_a_run_that_is_none_is_refused(cli, counts, plan, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused(cli, tmp_path / "page.html", plan, "--counts", counts, "--run", tmp_path / "empty")
    assert "neither a snapshot nor an update line" in line


def test_a_damaged_plan_is_refused_by_name(cli, counts, plan, tmp_path):
    broken = json.loads(plan.read_text())
    broken["hot"]["1"] = [99]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    assert "hot.1" in refused(cli, tmp_path / "page.html", plan, path, "--counts", counts)


def test_more_plans_than_a_page_shows_are_refused(cli, counts, plan, tmp_path):
    assert "at most 12" in refused(cli, tmp_path / "page.html", *[plan] * 13, "--counts", counts, code=2)


def test_doubtful_counts_are_refused_in_strict_mode(cli, counts, plan, tmp_path):
    flat = json.loads(counts.read_text())
    for row in flat["phases"]["decode"]["layers"].values():
        row[:] = [60_000 * 4 // 32] * 32
    path = tmp_path / "flat.json"
    path.write_text(json.dumps(flat))
    assert "[flat-counts]" in refused(cli, tmp_path / "page.html", plan, "--counts", path, "--strict", 1)


def test_a_plan_file_with_a_hostile_name_is_only_named(cli, counts, plan, tmp_path):
    path = tmp_path / "<img src=x onerror=alert(1)>.json"
    save_plan(load_plan(plan), path)
    assert 0 == cli("report", path, "--counts", counts, "-o", tmp_path / "page.html").code
    assert b"<img" not in (tmp_path / "page.html").read_bytes()


def test_a_test_that_the_plan_was_made_from_is_no_unseen_traffic(cli, counts, plan, tmp_path):
    options = (plan, "--counts", counts, "--test", counts)
    result = cli("report", *options, "-o", tmp_path / "page.html", "--json")
    (found,) = json.loads(result.out)["plans"]
    assert ("not-tested", None) == (found["verdict"], found["held_out"])
    assert "[test-is-train]" in result.err
    assert "[test-is-train]" in refused(cli, tmp_path / "strict.html", *options, "--strict", 1)


def test_counts_that_the_plan_was_not_made_from_are_not_called_its_own(cli, write_counts, plan, tmp_path):
    other = write_counts(tmp_path / "other.json", seed=3)
    result = cli("report", plan, "--counts", other, "-o", tmp_path / "page.html", "--json")
    assert "[not-the-plans-counts]" in result.err
    placed = json.loads(result.out)["plans"][0]["summary"]["In fast memory"]
    assert "of the traffic given, which the plan was not made from" in placed
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "of the traffic given, not its own, served there" in page
    assert "of its own traffic served there" not in page
    assert "[not-the-plans-counts]" in refused(cli, tmp_path / "s.html", plan, "--counts", other, "--strict", 1)


@pytest.mark.parametrize("experts", [16, 64])
def test_a_run_of_another_model_is_refused(cli, counts, plan, tmp_path, experts):
    folder = run_folder(tmp_path / "run", snapshot_of(load_plan(plan), counts=np.ones((4, experts))))
    line = refused(cli, tmp_path / "page.html", plan, "--counts", counts, "--run", folder)
    assert f"num_experts is {experts}, not 32" in line
