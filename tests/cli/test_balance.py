"""`hotsplit balance` against a server that runs: what it plays, counts, scores and writes, and how it goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cli.fake_openai import PREFILL_TOKENS, FakeServer, routed
from hotsplit.cli.balancing import _without_keys
from hotsplit.data import tiny_moe_path
from hotsplit.errors import HotsplitError
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.planfile import load_plan, plan_hash

BUDGET = ("--hot-gib", "0.0025")


def write_traffic(path, *, number=60, topics="abc", seed=0, tokens=40):
    lines = [{"prompt": f"{topics[i % len(topics)]} {seed} {i}", "max_tokens": tokens} for i in range(number)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def expected(bodies):
    """Pairs of these requests, by the specification of the fake server."""
    each = [routed(body) for body in bodies]
    return {phase: sum(one[phase] for one in each) for phase in ("decode", "prefill")}


@pytest.fixture
def traffic(tmp_path):
    return write_traffic(tmp_path / "traffic.jsonl")


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def balance(cli, traffic, state, tmp_path):
    """balance(server, ...) -> Result of `hotsplit balance --url`, into tmp_path/out."""

    def run(server, *more, data=traffic, out="out"):
        command = ("balance", "--url", server.url, "--data", data, "-o", tmp_path / out, "--state-dir", state)
        return cli(*command, *BUDGET, *more)

    return run


@pytest.fixture
def server(state):
    with FakeServer(state) as fake:
        yield fake


def test_every_request_is_played_once_with_the_model_of_the_server(balance, server, traffic):
    assert 0 == balance(server, "--max-tokens", 16).code
    sent = sorted(body["prompt"] for body in server.bodies)
    assert sorted(json.loads(line)["prompt"] for line in traffic.read_text().splitlines()) == sent
    assert {("model", 16)} == {(body["model"], body["max_tokens"]) for body in server.bodies}
    assert {"/v1/completions"} == set(server.paths)


def test_the_histogram_has_what_the_requests_routed_phases_apart(balance, server, tmp_path):
    server.count({"prompt": "other traffic before", "max_tokens": 100})
    result = balance(server)
    histogram, _ = load_histogram(tmp_path / "out" / "histogram.json")
    want = expected(server.bodies)
    assert 0 == result.code, result.err
    assert {"decode": 60 * 40, "prefill": 60 * PREFILL_TOKENS} == {n: one.tokens for n, one in histogram.phases.items()}
    for phase, counted in histogram.phases.items():
        np.testing.assert_array_equal(want[phase], counted.counts)


def test_the_halves_are_the_first_and_the_second_half_of_the_requests(balance, server, tmp_path, traffic):
    balance(server, "--concurrency", 7)
    lines = [json.loads(line) for line in traffic.read_text().splitlines()]
    for name, bodies in (("first-half.json", lines[:30]), ("second-half.json", lines[30:])):
        counted = load_histogram(tmp_path / "out" / name)[0].phases["decode"].counts
        np.testing.assert_array_equal(expected(bodies)["decode"], counted)


def test_the_held_out_score_is_that_of_the_first_halfs_plan_on_the_second(balance, cli, server, tmp_path):
    found = json.loads(balance(server, "--json").out)["held_out"]
    first, second, plan = (tmp_path / "out" / name for name in ("first-half.json", "second-half.json", "half.json"))
    planned = json.loads(
        cli("plan", tiny_moe_path(), "--counts", first, "--test", second, *BUDGET, "-o", plan, "--json").out
    )
    for name in ("null", "oracle_reachable", "oracle_free", "drift"):
        assert planned[name] == found[name]
    assert planned["held_out"] == found["hit_rate"] > found["null"] + 0.1
    assert "holds" == found["verdict"]


def test_the_plan_is_the_planners_on_the_whole_histogram(balance, cli, server, tmp_path):
    balance(server)
    whole, mine = tmp_path / "out" / "histogram.json", tmp_path / "mine.json"
    cli("plan", tiny_moe_path(), "--counts", whole, *BUDGET, "-o", mine)
    assert mine.read_bytes() == (tmp_path / "out" / "plan.json").read_bytes()


def test_halves_of_other_traffic_are_told_and_the_plan_spreads_evenly(balance, cli, server, tmp_path):
    data = tmp_path / "shift.jsonl"
    lines = [write_traffic(tmp_path / "half.jsonl", number=30, topics=topic).read_text() for topic in "<>"]
    data.write_text("".join(lines))
    result = balance(server, "--json", data=data)
    found = json.loads(result.out)["held_out"]
    assert found["hit_rate"] < found["null"]
    assert "--counts" not in json.loads(result.out)["next"]
    assert "[held-out-no-better]" in result.err
    rows = load_plan(tmp_path / "out" / "plan.json").hot_rows()
    assert rows.max() - rows.min() <= 1
    assert 1 == balance(server, "--strict", 1, data=data).code


def test_without_a_budget_the_plan_gets_that_of_the_server(cli, server, traffic, state, tmp_path):
    command = ("balance", "--url", server.url, "--data", traffic, "-o", tmp_path / "out", "--state-dir", state)
    assert 0 == cli(*command).code
    assert [2_000_000] == [stage.budget_bytes for stage in load_plan(tmp_path / "out" / "plan.json").stages]


def test_json_is_one_object_with_these_keys_and_the_files_are_those_it_names(balance, server, tmp_path):
    found = json.loads(balance(server, "--json").out)
    assert ["kind", "histogram", "held_out", "plan", "requests", "next", "notices"] == list(found)
    del found["requests"]["sent_again"]  # a busy machine may need a second try
    assert {"total": 60, "done": 60, "failed": {}} == found["requests"]
    assert plan_hash(load_plan(Path(found["plan"]["file"]))) == found["plan"]["hash"]


def test_the_table_says_what_the_plan_is_worth_and_what_to_run_next(balance, server, tmp_path):
    out = balance(server).out
    assert "held-out, decode" in out
    assert "points on an even placement" in out
    assert f"hotsplit serve {tiny_moe_path()} --hot-gib 0.0025 --counts {tmp_path / 'out' / 'histogram.json'}" in out


def test_the_next_command_is_one_that_serve_takes(balance, cli, server, monkeypatch):
    from hotsplit.cli import vllm_process

    found = vllm_process.Vllm(version="0", ready_timeout_s=1, has_command=True, has_plugin=True)
    monkeypatch.setattr(vllm_process, "find_vllm", lambda: found)
    words = json.loads(balance(server, "--json").out)["next"].split()
    result = cli(*words[1:], "--check", "--json")
    assert (0, "hotsplit") == (result.code, words[0])
    assert "counts: reference" in json.loads(result.out)["plan"]["origin"]


def test_a_second_start_plays_nothing_again(balance, server):
    first = json.loads(balance(server, "--json").out)
    played = len(server.bodies)
    second = json.loads(balance(server, "--json").out)
    assert (played, 0) == (len(server.bodies), second["requests"].pop("sent_again"))
    del first["requests"]["sent_again"]  # of what that start played
    assert first == second


def test_it_goes_on_where_it_stopped_on_another_server_and_counts_the_same(balance, state, tmp_path):
    with FakeServer(state, behave=lambda number, body: 500 if number > 30 else None) as first:
        line = balance(first, "--concurrency", 4, out="two").refusal()
    assert "requests in a row failed: got HTTP 500 (said 500)" in line
    answered = expected(first.bodies[:30])
    with FakeServer(state) as second:
        result = balance(second, "--concurrency", 4, out="two")
        assert "going on: 30 of 60 requests" in result.err
        assert 30 == len(second.bodies)
    counted = load_histogram(tmp_path / "two" / "histogram.json")[0].phases
    rest = expected(second.bodies)
    for phase in ("decode", "prefill"):
        np.testing.assert_array_equal(answered[phase] + rest[phase], counted[phase].counts)
    assert 60 == len({body["prompt"] for body in [*first.bodies[:30], *second.bodies]})


def test_requests_that_fail_are_counted_by_kind_shown_and_played_again_by_the_next_start(balance, state):
    bad = {"a 0 0": 400, "b 0 1": 413, "a 0 3": 400}
    with FakeServer(state, behave=lambda number, body: bad.get(body["prompt"])) as server:
        result = balance(server)
        assert "57 of 60 requests answered" in result.out
        assert "2 failed, HTTP 400: first data file" in result.out
        assert "said 400" in result.out
        assert "1 failed, HTTP 413" in result.out
        assert "3 of 60 requests failed and are not counted" in result.err
        sent = len(server.bodies)
        found = json.loads(balance(server, "--json").out)["requests"]
        assert ({"HTTP 400": 2, "HTTP 413": 1}, 3) == (found["failed"], len(server.bodies) - sent)
        bad.clear()
        assert 60 == json.loads(balance(server, "--json").out)["requests"]["done"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (("--max-tokens", 8), "max_tokens: got 8; wanted 256"),
        (("--concurrency", 3), "concurrency: got 3; wanted 32"),
        (("--max-requests", 10), "max_requests: got 10; wanted none"),
        (("--hot-gib", "0.003"), 'hot_gib: got "0.003"; wanted "0.0025"'),
    ],
)
def test_other_arguments_are_refused_by_the_field_that_differs(balance, server, more, field):
    balance(server)
    line = balance(server, *more).refusal(2)
    assert f"was begun with another {field}" in line
    assert "name another -o" in line


def test_other_lines_under_the_same_name_are_other_traffic(balance, server, traffic):
    balance(server)
    traffic.write_text(traffic.read_text().replace("b 0", "c 0"))
    assert "was begun with another data" in balance(server).refusal(2)


@pytest.mark.parametrize(
    "text", ["{}", "[", '{"format": "hotsplit-balance", "version": 2}', "null"], ids=["other", "cut", "newer", "null"]
)
def test_a_journal_that_is_none_is_refused_and_kept(balance, server, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "journal.json").write_text(text)
    assert "journal" in balance(server).refusal()
    assert text == (tmp_path / "out" / "journal.json").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"done": [99]}, {"parts": []}, {"parts": [{}, {}]}, {"done": "x"}, {"done": "12"}, {"done": [1.5]},
        {"parts": "none"}, {"prompt_tokens": -1}, {"budget_bytes": float("inf")}, {"prompt_tokens": float("inf")},
        {"arguments": {"concurrency": float("nan")}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_journal_is_refused(balance, server, tmp_path, change):
    balance(server)
    path = tmp_path / "out" / "journal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if "arguments" in change:
        assert "was begun with another" in balance(server).refusal(2)
    else:
        assert "journal" in balance(server).refusal()


@pytest.mark.parametrize("bad", [0.5, "1", 2**70, -1])
def test_a_journal_with_counts_that_are_none_is_refused(balance, server, tmp_path, bad):
    balance(server)
    path = tmp_path / "out" / "journal.json"
    content = json.loads(path.read_text())
    content["parts"][0]["counts"]["decode"][0][0] = bad
    path.write_text(json.dumps(content))
    assert "damaged content" in balance(server).refusal()


def test_a_journal_with_counts_of_another_model_is_refused_before_anything_is_played(balance, server, tmp_path):
    balance(server)
    path = tmp_path / "out" / "journal.json"
    content = json.loads(path.read_text())
    for part in content["parts"]:
        part["layers"] = [layer + 1 for layer in part["layers"]]
    content["done"] = [0]
    path.write_text(json.dumps(content))
    sent = len(server.bodies)
    assert "got counts of another model than" in balance(server).refusal()
    assert sent == len(server.bodies)


def test_what_could_not_be_saved_is_not_called_kept(balance, server, monkeypatch):
    def full(path, data):
        raise HotsplitError(f"cannot write {path}", got="No space left on device")

    monkeypatch.setattr("hotsplit.cli.journal.write_atomic", full)
    result = balance(server)
    assert "No space left" in result.refusal()
    assert "0 of 60 requests are kept; the same command goes on from there" in result.err.splitlines()


def test_where_no_request_of_a_half_is_answered_the_failure_is_named(balance, state, traffic):
    with FakeServer(state, behave=lambda number, body: 400) as server:
        line = balance(server, "--max-requests", 6).refusal()
    assert "no request of the first half was answered: got HTTP 400 (data file" in line
    assert re.search(r"line \d+: said 400", line)  # whichever failed first


@pytest.mark.parametrize("flags", [("--api-key", "s3cret", "--port", "1"), ("--api_key=s3cret", "--port", "1")])
def test_a_key_is_not_written_into_the_journal(flags):
    kept = _without_keys(flags)
    assert "s3cret" not in str(kept)
    assert ["--port", "1"] == kept[-2:]


def test_two_commands_in_one_folder_are_refused(balance, server, tmp_path):
    from hotsplit.cli.journal import locked

    with locked(tmp_path / "out"):
        assert "another command that writes into it" in balance(server).refusal()


def test_several_files_are_mixed_so_that_each_half_has_some_of_each(cli, server, state, tmp_path):
    files = [write_traffic(tmp_path / f"{topic}.jsonl", number=20, topics=topic) for topic in "ab"]
    out = tmp_path / "out"
    data = [argument for file in files for argument in ("--data", file)]
    cli("balance", "--url", server.url, *data, "-o", out, "--state-dir", state, *BUDGET, "--concurrency", 1)
    first = [body["prompt"][0] for body in server.bodies[:20]]
    assert (10, 10) == (first.count("a"), first.count("b"))


def test_traffic_of_others_is_told(balance, state):
    def busy(number, body):
        server.count({"prompt": "x somebody else", "max_tokens": 30})

    with FakeServer(state, behave=busy) as server:
        assert "[other-traffic-counted]" in balance(server).err
