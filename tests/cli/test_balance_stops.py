"""What ends a balance early: servers that cannot be used, that die or never come, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.fake_openai import FakeServer
from hotsplit.cli.balance_target import address_of, even_config, even_environ, normalised_url
from hotsplit.cli.server_process import is_local
from hotsplit.config import HotsplitConfig
from hotsplit.data import tiny_moe_path
from hotsplit.errors import ConfigError
from hotsplit.plan.dialects import load_histogram
from patience import LIMIT_S, until

DRIVER = Path(__file__).parent / "balance_driver.py"


@pytest.fixture
def traffic(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'ab'[i % 2]} {i}", "max_tokens": 6}) + "\n" for i in range(80)))
    return path


@pytest.fixture
def start(tmp_path, traffic):
    """start(mode, ...) -> the process of a balance that starts the fake server itself."""
    started = []

    def run(mode, *more):
        inherited = {
            name: value
            for name, value in os.environ.items()  # noqa: TID251 - handed on without anything that is a setting
            if not name.startswith("HOTSPLIT_")
        }
        command = [sys.executable, str(DRIVER), mode, "balance", str(tiny_moe_path()), "--hot-gib", "0.0025"]
        command += ["--data", str(traffic), "-o", str(tmp_path / "out"), "--concurrency", "4", *more]
        environ = inherited | {"PYTHONPATH": str(DRIVER.parents[1])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not servers(tmp_path / "out"))  # a killed command's server ends with it


def servers(out):
    """Fake servers that still run for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"fake_openai" in word for word in words) and any(str(out).encode() in word for word in words):
            found.append(int(path.parent.name))
    return found


def test_a_server_of_its_own_is_started_played_and_ended(start, tmp_path):
    process = start("ok", "--json")
    out, err = process.communicate(timeout=LIMIT_S)
    assert 0 == process.returncode, err
    assert 80 == json.loads(out)["requests"]["done"]
    assert [] == servers(tmp_path / "out")


def test_with_a_recipe_its_flags_start_the_server_and_the_next_command_names_it(start, tmp_path):
    process = start("ok", "--recipe", "qwen3-30b-a3b", "--json")
    out, err = process.communicate(timeout=LIMIT_S)
    assert 0 == process.returncode, err
    found = json.loads(out)["next"]
    assert found.startswith(f"hotsplit serve --recipe qwen3-30b-a3b {tiny_moe_path()} --hot-gib 0.0025 --counts ")
    assert " -- " not in found
    arguments = json.loads((tmp_path / "out" / "journal.json").read_text())["arguments"]
    assert ("qwen3-30b-a3b", True) == (arguments["recipe"], len(arguments["vllm_flags"]) > 0)


def test_a_server_that_dies_is_one_line_with_the_end_of_its_log(start, tmp_path):
    process = start("die")
    out, err = process.communicate(timeout=LIMIT_S)
    (line,) = [line for line in err.splitlines() if line.startswith("hotsplit: ")]
    assert (1, "") == (process.returncode, out)
    assert (
        "the server has ended: got exit code 7; the end of its log: RuntimeError: the engine has died of a cause"
        in line
    )
    assert "see " in line
    assert "Traceback" not in err
    assert [] == servers(tmp_path / "out")


def test_a_server_that_never_comes_is_one_line_with_the_reason(start, tmp_path):
    process = start("never")
    _, err = process.communicate(timeout=LIMIT_S)
    assert 1 == process.returncode
    assert "ValueError: the reason why it cannot start" in err.splitlines()[-1]


def test_a_server_whose_experts_all_fit_counts_nothing(start, tmp_path):
    process = start("stock")
    _, err = process.communicate(timeout=LIMIT_S)
    assert 1 == process.returncode
    assert "the server counts nothing" in err.splitlines()[-1]
    assert "--hot-gib" in err.splitlines()[-1]
    assert [] == servers(tmp_path / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_an_interrupt_ends_the_server_keeps_the_journal_and_the_next_start_goes_on(start, tmp_path, number, code):
    out = tmp_path / "out"
    process = start("slow")
    log = out / "server.log"
    until(lambda: log.exists() and "generation 20\n" in log.read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert code == process.returncode, err
    assert [] == servers(out)
    journal = json.loads((out / "journal.json").read_text())
    assert 0 < len(journal["done"]) < 80
    assert f"{len(journal['done'])} of 80 requests are kept" in err
    process = start("ok", "--json")
    found, err = process.communicate(timeout=LIMIT_S)
    assert 0 == process.returncode, err
    assert f"going on: {len(journal['done'])} of 80" in err
    assert 80 == json.loads(found)["requests"]["done"]
    counted = load_histogram(out / "histogram.json")[0].phases["decode"].tokens
    # Of the four requests that were under way, some may have been counted twice.
    assert 80 * 6 <= counted <= 84 * 6


def test_a_server_ends_with_its_command_also_when_that_is_killed_and_the_next_start_goes_on(start, tmp_path):
    out = tmp_path / "out"
    process = start("slow")
    log = out / "server.log"
    until(lambda: log.exists() and "generation 5\n" in log.read_text())
    process.kill()
    process.communicate()
    until(lambda: not servers(out))
    process = start("ok", "--json")
    found, err = process.communicate(timeout=LIMIT_S)
    assert 0 == process.returncode, err
    assert 80 == json.loads(found)["requests"]["done"]


def test_a_server_that_outlives_its_command_is_named_and_not_joined_by_another(start, tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        (tmp_path / "out" / "state" / "runs" / f"20260101T000000-{left.pid}-0").mkdir(parents=True)
        _, err = start("ok").communicate(timeout=LIMIT_S)
        left.kill()
    assert f"still runs: got process {left.pid}" in err.splitlines()[-1]


def test_a_port_that_is_taken_is_refused_before_a_server_is_started(start, tmp_path):
    with FakeServer(tmp_path / "elsewhere") as other:
        port = other.url.rpartition(":")[2]
        _, err = start("ok", "--", "--port", port).communicate(timeout=LIMIT_S)
        assert f"port {port}: got somebody who listens there already" in err.splitlines()[-1]
        assert [] == other.bodies
    assert not (tmp_path / "out" / "server.log").exists()


@pytest.fixture
def refused(cli, traffic, tmp_path):
    """refused(url, ...) -> the line that refuses it."""

    def run(url, *more, code=1):
        out = tmp_path / "out"
        return cli(
            "balance", "--url", url, "--data", traffic, "-o", out, "--state-dir", tmp_path / "state", *more
        ).refusal(code)

    return run


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8000", "198.51.100.7:8000", "http://no-such-host.invalid", "a..b:80", f"{'a' * 70}.b"]
)
def test_a_server_on_another_host_is_refused_with_the_reason_and_never_asked(refused, url):
    line = refused(url)
    assert "got another host; wanted one on this host: counts per expert are in its state folder" in line


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:port", "http://[::1"])
def test_what_is_no_address_is_refused(refused, url):
    assert "wanted an address such as" in refused(url, code=2)


def test_a_server_without_hotsplit_is_refused(refused):
    with FakeServer(None) as server:
        assert "got no hotsplit_ numbers on /metrics" in refused(server.url)


def test_a_server_whose_state_folder_is_another_is_refused(refused, tmp_path):
    with FakeServer(tmp_path / "elsewhere") as server:
        line = refused(server.url)
    assert "no running server's snapshots" in line
    assert "--state-dir" in line


def test_a_run_that_counts_something_else_is_not_taken_for_the_servers(refused, tmp_path, monkeypatch):
    with FakeServer(tmp_path / "elsewhere") as server, FakeServer(tmp_path / "state") as other:
        other.count({"prompt": "a", "max_tokens": 3})
        assert "no run that counts what it shows" in refused(server.url)


def test_a_server_of_another_model_is_refused(refused, tmp_path):
    with FakeServer(tmp_path / "state", layers=(0, 1, 2)) as server:
        assert "the server counts another model: got layers [0, 1, 2]" in refused(server.url)


def test_a_server_that_does_not_answer_asks_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hotsplit.cli.run_counts.CountedRun.__init__.__kwdefaults__", {"is_alive": lambda: None, "timeout_s": 0.2}
    )
    with FakeServer(tmp_path / "state") as server:
        server.is_answering = False
        assert "no answer of rank 0 for 0.2 s" in refused(server.url)


def test_nobody_listens(refused):
    server = FakeServer(None)
    server.close()
    assert "no connection" in refused(server.url)


def test_neither_model_nor_url_and_both_url_and_flags_are_refused(cli, traffic, tmp_path):
    assert "neither MODEL nor --recipe nor --url" in cli("balance", "--data", traffic, "-o", tmp_path / "o").refusal(2)
    line = cli(
        "balance", "--url", "http://127.0.0.1:1", "--data", traffic, "-o", tmp_path / "o", "--", "--port", "1"
    ).refusal(2)
    assert "--url and vLLM flags" in line


def test_a_budget_that_no_plan_fits_is_refused_before_anything_is_played(refused, tmp_path):
    with FakeServer(tmp_path / "state") as server:
        assert "wanted at least" in refused(server.url, "--hot-gib", "0.0000001")
        assert [] == server.bodies


def test_local_is_what_this_host_has():
    assert [True, True, False, False] == [is_local(h) for h in ("localhost", "127.0.0.1", "192.0.2.1", "x.invalid")]


def test_the_servers_own_placement_is_even_and_stays_so(tmp_path):
    given = {"HOTSPLIT_COUNTS": "h.json", "HOTSPLIT_DYNAMIC": "1", "HOTSPLIT_STRICT": "1", "HOTSPLIT_HOT_GIB": "3"}
    config, notices = even_config(HotsplitConfig.from_env(given), state_dir=tmp_path)
    assert (None, None, False, "ignore", False) == (
        config.counts, config.plan, config.dynamic, config.learned, config.strict,
    )  # fmt: skip
    assert (3.0, tmp_path) == (config.hot_gib, config.state_path)
    assert ["HOTSPLIT_COUNTS has no effect: the placement is even [no-effect]"] == [str(one) for one in notices]
    assert {"PATH": "p"} == even_environ(given | {"PATH": "p"})


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (("--port", "8123"), "http://127.0.0.1:8123"),
        (("--port=8123", "--host", "0.0.0.0"), "http://127.0.0.1:8123"),
        (("--host", "::1", "--port", "9"), "http://[::1]:9"),
    ],
)
def test_vllms_flags_say_where_it_listens(flags, url):
    assert url == address_of(flags, environ={}).url


def test_without_them_it_listens_on_a_free_port_of_this_host_alone():
    address = address_of(("--enforce-eager",), environ={})
    assert ("--enforce-eager", "--host", "127.0.0.1", "--port") == address.flags[:4]
    assert address.url == f"http://127.0.0.1:{address.flags[4]}"


def test_a_key_of_the_server_goes_with_the_requests():
    key = {"Authorization": "Bearer k"}
    assert key == dict(address_of(("--api-key", "k"), environ={}).headers)
    assert key == dict(address_of((), environ={"VLLM_API_KEY": "k"}).headers)


@pytest.mark.parametrize("flags", [("--port", "x"), ("--port", "0"), ("--uds", "/tmp/s"), ("--ssl-certfile", "c")])
def test_flags_that_leave_no_plain_http_are_refused(flags):
    with pytest.raises(ConfigError):
        address_of(flags, environ={})


def test_addresses_are_read_as_people_write_them():
    assert "http://localhost:8000" == normalised_url("localhost:8000")
