from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from hotsplit.data import text_path
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.trace import histogram_of, load_trace

pytestmark = pytest.mark.transformers

TEXT = text_path("c")
SMALL = ("--prompt-tokens", 8, "--decode-tokens", 2, "--max-prompts", 2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_totals_are_tokens_times_top_k_in_every_layer_and_phase(profiled):
    histogram, notices = load_histogram(profiled.histogram)
    assert [] == notices
    assert {"decode": 12 * 12, "prefill": 12 * 24} == {
        phase: counted.tokens for phase, counted in histogram.phases.items()
    }
    for counted in histogram.phases.values():
        assert [counted.tokens * 4] * 4 == counted.counts.sum(axis=1).tolist()


def test_the_histogram_carries_the_models_identity(profiled, tiny_moe):
    model = json.loads(profiled.histogram.read_text())["model"]
    identity = {"model_type": "qwen3_moe", "layers": [0, 1, 2, 3], "num_experts": 32, "top_k": 4}
    assert identity | {"name": str(tiny_moe), "quantisation": None} == model


def test_the_trace_counts_to_the_histogram(profiled):
    trace, notices = load_trace(profiled.trace)
    counted, histogram = histogram_of(trace), load_histogram(profiled.histogram)[0]
    assert [] == notices
    assert histogram.identity == counted.identity
    for phase in ("decode", "prefill"):
        np.testing.assert_array_equal(histogram.phases[phase].counts, counted.phases[phase].counts)


def test_the_trace_numbers_requests_positions_and_domains(profiled):
    trace, _ = load_trace(profiled.trace)
    assert ("english", "python") == trace.domains
    for request in range(12):
        mine = trace.request == request
        assert list(range(36)) == sorted(trace.position[mine].tolist())
        assert [trace.position[mine].tolist()] == [
            trace.position[mine][np.argsort(trace.step[mine], kind="stable")].tolist()
        ]
        assert [0] * 24 + [1] * 12 == trace.phase[mine].tolist()
        assert {int(request < 6)} == set(trace.domain[mine].tolist())


def test_results_go_to_stdout_and_notes_to_stderr(profiled):
    assert "4 layers x 32 experts, top-4" in profiled.result.out
    assert ["decode", "prefill"] == [line.split()[0] for line in profiled.result.out.splitlines()[2:]]
    assert f"histogram written to {profiled.histogram}, trace to {profiled.trace}" in profiled.result.err


def test_a_profile_says_how_many_prompts_from_how_many_files(profiled):
    assert "playing 12 prompts from 2 files" in profiled.result.err.splitlines()


def test_a_profile_plans_itself_and_scores_a_plan(cli, profiled, tiny_moe):
    arguments = (tiny_moe, "--counts", profiled.histogram, "--test", profiled.histogram, "--hot-gib", 0.002, "--json")
    value = json.loads(cli("plan", *arguments).out)
    assert 0.3 < value["null"] + 0.1 < value["held_out"] == value["hit_rate"]


def test_json_is_one_object(cli, tiny_moe, tmp_path):
    result = cli("profile", tiny_moe, "--data", text_path("c"), *SMALL, "-o", tmp_path / "h.json", "--json")
    assert ["kind", "model", "normalised", "phases"] == list(json.loads(result.out))


def test_where_experts_lie_does_not_change_what_is_counted(cli, tiny_moe, tmp_path):
    counts = []
    for hot_gib in ("0.002", "1"):
        path = tmp_path / f"{hot_gib}.json"
        cli("profile", tiny_moe, "--data", text_path("html"), *SMALL, "--hot-gib", hot_gib, "-o", path)
        counts.append(json.loads(path.read_text())["phases"])
    assert counts[0] == counts[1]


def test_a_seed_gives_the_same_counts_again_and_another_one_others(cli, tiny_moe, tmp_path):
    found = []
    for seed in (1, 1, 2):
        cli("profile", tiny_moe, "--data", text_path("c"), *SMALL, "--seed", seed, "-o", tmp_path / "h.json")
        found.append(json.loads((tmp_path / "h.json").read_text())["phases"])
    assert found[0] == found[1]
    assert found[0]["decode"] != found[2]["decode"]


def test_requests_and_chats_of_a_jsonl_are_played(cli, tiny_moe, tmp_path):
    lines = [{"text": "import os"}, {"messages": [{"role": "user", "content": "Hello there"}]}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    data = (tmp_path / "chat.jsonl", "--prompt-tokens", 50, "--decode-tokens", 3)
    result = cli("profile", tiny_moe, "--data", *data, "-o", tmp_path / "h.json")
    assert 0 == result.code, result.err
    assert 2 * 3 == load_histogram(tmp_path / "h.json")[0].phases["decode"].tokens


# What is refused. Neither of the user's own files changes.


@pytest.fixture
def refused(cli, tiny_moe, tmp_path):
    """refused(*arguments, code=1) -> the one line, after a look at the files that must not change."""
    histogram, trace = tmp_path / "mine.json", tmp_path / "mine.npz"
    histogram.write_text("mine")
    trace.write_text("mine too")

    def run(*arguments, model=tiny_moe, data=TEXT, code=1, env=None):
        files = ("-o", histogram, "--trace", trace)
        line = cli("profile", model, "--data", data, *SMALL, *files, *arguments, env=env).refusal(code)
        assert ("mine", "mine too") == (histogram.read_text(), trace.read_text())
        return line

    return run


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("gone.txt", None, "no such file or directory"),
        ("folder", "folder", "is a directory"),
        ("binary.txt", b"\x00\xff\xfe", "bytes that are no UTF-8 at 1"),
        ("empty.txt", b"", "no text"),
        ("empty.jsonl", b"\n\n", "no text"),
        ("other.jsonl", b'{"text": "fine"}\n{"prompt": "x"}\n', 'line 2: got {"prompt": "x"}; wanted "text"'),
        ("broken.jsonl", b'{"text": "fine"}\n\n{"text": "x\n', "line 3: got Unterminated string"),
        ("deep.jsonl", b"[" * 200_000, "line 1: got"),
        ("number.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1: got"),
        ("half.jsonl", b'{"text": "\\ud800"}', "line 1: got half a surrogate pair"),
        ("chat.jsonl", b'{"messages": [1]}', "line 1: got messages that the chat template refuses"),
    ],
)
def test_a_data_file_that_is_no_traffic_is_refused_by_name(refused, tmp_path, name, content, reason):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    line = refused(data=path)
    assert f"data file {path}" in line
    assert reason in line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prompt-tokens", "0"),
        ("--decode-tokens", "-1"),
        ("--max-prompts", "0"),
        ("--batch-size", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
    ],
)
def test_an_option_out_of_range_is_a_setting_error(refused, option, value):
    assert f"hotsplit: {option}: got" in refused(option, value, code=2)


def test_a_model_folder_that_is_not_there_is_refused(refused, tmp_path):
    assert "got no such folder" in refused(model=tmp_path / "none")


def test_a_folder_without_config_is_refused(refused, tmp_path):
    assert "got no config.json" in refused(model=tmp_path)


def test_a_model_without_a_tokenizer_is_refused(refused, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"tokenizer of {folder}" in refused(model=folder)


def test_a_broken_tokenizer_is_refused(refused, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    assert f"tokenizer of {folder}" in refused(model=folder)


def test_a_truncated_model_is_refused(refused, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5_000_000)
    assert "model.safetensors is truncated" in refused(model=folder)


def test_counting_needs_hotsplit_on(refused):
    assert "HOTSPLIT_ENABLE: got 0" in refused(code=2, env={"HOTSPLIT_ENABLE": "0"})


def test_a_histogram_and_a_trace_cannot_be_one_file(refused, tmp_path):
    assert "wanted another file" in refused("--trace", tmp_path / "mine.json", code=2)


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(refused, tmp_path, option):
    (tmp_path / "file").write_text("")
    line = refused(option, tmp_path / "file" / "out", data=tmp_path / "not looked at")
    assert f"cannot write {tmp_path / 'file' / 'out'}: got not a directory" in line
    assert "got is a directory" in refused(option, tmp_path, data=tmp_path / "not looked at")
