from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hotsplit.cli.work import SNAPSHOT_FORMAT
from hotsplit.data import text_path
from hotsplit.metrics import MetricsSnapshot, read_snapshot, write_snapshot
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import load_plan
from hotsplit.plan.trace import Trace, save_trace


@pytest.fixture
def plan(cli, counts, tmp_path):
    cli("plan", "--counts", counts, "--hot-fraction", 0.3, "-o", tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def trace(tmp_path):
    identity = ModelIdentity(model_type="toy", layers=(3, 5), num_experts=4, top_k=2)
    experts_TLK = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[0, 2], [3, 1]]])
    save_trace(
        Trace(
            identity=identity,
            experts=experts_TLK,
            phase=np.array([0, 0, 1], dtype=np.uint8),
            step=np.array([1, 1, 2], dtype=np.uint32),
            domain=np.array([1, 1, 0]),
            domains=("[code]", "prose:cat:"),
        ),
        tmp_path / "trace.npz",
    )
    return tmp_path / "trace.npz"


def test_a_histogram_is_shown_with_its_skew(cli, counts):
    result = cli("show", counts)
    assert (0, "") == (result.code, result.err)
    assert f"{counts}: 4 layers x 32 experts, top-4" == result.out.splitlines()[0]
    assert ["decode", "60,000"] == result.out.splitlines()[2].split()[:2]


def test_a_histogram_as_json(cli, counts):
    value = json.loads(cli("show", counts, "--json").out)
    assert ["kind", "model", "normalised", "phases"] == list(value)
    decode = value["phases"]["decode"]
    assert ("histogram", 60_000, 960_000.0) == (value["kind"], decode["tokens"], decode["pairs"])
    assert ["0.1", "0.2", "0.3", "0.5"] == list(decode["coverage"])


def test_a_plan_is_shown_with_its_proof(cli, plan):
    result = cli("show", plan)
    assert "38 of 128 experts are hot" in result.out
    shown = {line.rpartition("  ")[0].strip(): line.split("  ")[-1].strip() for line in result.out.splitlines()}
    assert ["in-sample", "held-out", "null", "oracle reachable", "oracle free", "bound", "gap"] == [
        name for name in shown if name and "proof" not in name
    ][-7:]
    assert "29.7 %" == shown["null"]  # 38 of 128


def test_a_plan_as_json_lists_its_hot_experts(cli, plan):
    hot = json.loads(cli("show", plan, "--json").out)["hot"]
    assert {str(layer): list(experts) for layer, experts in enumerate(load_plan(plan).hot)} == hot


def test_layers_with_as_many_hot_experts_each_are_told_by_one_number(cli, tiny_moe, tmp_path):
    assert 0 == cli("plan", tiny_moe, "--hot-gib", 44 * 49152 / 2**30, "-o", tmp_path / "even.json").code
    assert "40 of 128 experts are hot, 10 per layer (4 layers x 32)" in cli("show", tmp_path / "even.json").out


@pytest.fixture
def snapshot(tmp_path):
    numbers = MetricsSnapshot(
        rank=0,
        version="0.1.0",
        plan_hash="0123456789abcdef",
        mode="dynamic",
        backend="cpu-pointers",
        tokens={"decode": 1500, "prefill": 0},
        pairs={"decode": 6000, "prefill": 0},
        hit_pairs={"decode": 4500, "prefill": 0},
        touched_hot_bytes=2**20,
        touched_cold_bytes=3 * 2**20,
        steps=1500,
        swaps_done=7,
        swaps_refused=2,
        swaps_failed=1,
        swap_bytes=7 * 2**20,
        update_failures=1,
        hot_bytes=2**21,
        host_bytes=2**22,
        budget_bytes=3 * 2**20,
        hit_ratio_window=0.8,
        byte_hit_ratio_window=0.5,
        oracle_ratio_window=0.9,
        drift_ratio=0.1,
        update_seconds=0.001,
        counts={"decode": {0: [4500, 1500]}},
    )
    return write_snapshot(numbers, tmp_path / "run")


def test_a_snapshot_is_shown_with_its_tokens_hit_rates_swaps_and_bytes(cli, snapshot):
    result = cli("show", snapshot)
    assert (0, "") == (result.code, result.err)
    text = " ".join(result.out.split())
    assert f"{snapshot}: rank 0, dynamic, 1,500 steps, plan 0123456789ab" in text
    assert "decode 1,500 75.0 % prefill 0 - " in text
    assert "byte hit rate 25.0 % of 4.0 MiB touched" in text
    assert "7 swaps (7.0 MiB copied), 2 refused, 1 failed; 1 updates failed" in text
    assert "2.0 MiB hot of a budget of 3.0 MiB, 4.0 MiB cold" in text
    assert "last window: hit rate 80.0 %, byte hit rate 50.0 %, oracle reachable 90.0 %" in text


def test_what_slots_kept_is_shown_where_there_is_any_and_nothing_of_it_where_there_is_none(cli, snapshot):
    assert "kept in slots" not in cli("show", snapshot).out
    kept = replace(read_snapshot(snapshot), kept_bytes=2 * 2**20, kept_ratio_window=0.375)
    path = write_snapshot(kept, snapshot.parent)
    text = " ".join(cli("show", path).out.split())
    assert "byte hit rate 25.0 % of 4.0 MiB touched, 50.0 % more kept in slots" in text
    assert "byte hit rate 50.0 %, kept in slots 37.5 %, oracle reachable 90.0 %" in text
    value = json.loads(cli("show", path, "--json").out)
    assert (0.5, 2 * 2**20, 0.375) == (value["kept_rate"], value["kept_bytes"], value["kept_ratio_window"])


def test_a_snapshot_as_json(cli, snapshot):
    value = json.loads(cli("show", snapshot, "--json").out)
    assert ("snapshot", 7, 0.25, 0.0) == (
        value["kind"],
        value["swaps_done"],
        value["byte_hit_rate"],
        value["kept_rate"],
    )
    assert {"decode": 0.75, "prefill": None} == value["hit_rate"]
    assert SNAPSHOT_FORMAT == json.loads(snapshot.read_text())["format"]


def test_a_broken_snapshot_is_refused_by_name(cli, tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps({"format": SNAPSHOT_FORMAT, "version": 1, "snapshot": {}}))
    assert f"snapshot {tmp_path / 'rank0.json'}" in cli("show", tmp_path / "rank0.json").refusal()


def test_a_text_is_refused_with_its_beginning(cli):
    line = cli("show", text_path("c")).refusal()
    assert "got text that begins '### " in line
    assert "wanted JSON or npz: a histogram, plan, trace or snapshot" in line


def test_a_file_that_is_not_there_is_called_nothing_but_a_file(cli, tmp_path):
    for name in (tmp_path / "gone", f"{tmp_path / 'gone'}#code"):
        assert (
            f"hotsplit: file {tmp_path / 'gone'}: got no such file; wanted a histogram" in cli("show", name).refusal()
        )


def test_a_plan_as_json_has_the_keys_of_the_command_that_made_it(cli, counts, plan):
    shown = json.loads(cli("show", plan, "--json").out)
    made = json.loads(cli("plan", "--counts", counts, "--hot-fraction", 0.3, "--json").out)
    assert list(made)[: len(shown)] == list(shown)
    assert {key: made[key] for key in shown} == shown


def test_a_trace_is_shown_as_tokens_steps_and_counts(cli, trace):
    result = cli("show", trace)
    assert "3 tokens in 2 steps; domains [code], prose:cat:" == result.out.splitlines()[0]
    assert "2 layers x 4 experts, top-2" in result.out


def test_a_trace_as_json(cli, trace):
    value = json.loads(cli("show", trace, "--json").out)
    assert ("trace", ["[code]", "prose:cat:"]) == (value["kind"], value["domains"])
    assert (1, 2) == (value["phases"]["decode"]["tokens"], value["phases"]["prefill"]["tokens"])


def test_a_set_of_a_file_is_shown(cli, tmp_path):
    path = tmp_path / "sets.json"
    rows = {f"{domain}/{layer}": [3, 2, 1] for domain in ("code", "prose") for layer in range(2)}
    path.write_text(json.dumps({"phase": "decode", "top_k": 1, "layers": rows}))
    assert f"{path}#code: 2 layers x 3 experts, top-1" in cli("show", f"{path}#code").out
    assert "none chosen" in cli("show", path).refusal()


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_a_histogram_that_is_no_json_is_shown_as_the_one_it_was_made_from(cli, counts, tmp_path, form):
    file = tmp_path / f"counts.{form}"
    done = cli("convert", counts, "--to", form, "--phase", "decode", "-o", file)
    assert 0 == done.code, done.err
    wanted = json.loads(cli("show", counts, "--json").out)["phases"]["decode"]
    found = json.loads(cli("show", file, "--json").out)
    assert "histogram" == found["kind"]
    assert wanted["pairs"] == found["phases"]["decode"]["pairs"]


def test_counts_without_layer_numbers_are_refused_and_not_guessed_at(cli, counts, tmp_path):
    file = tmp_path / "counts.pt"
    assert 0 == cli("convert", counts, "--to", "pt", "--phase", "decode", "-o", file).code
    assert "layer" in cli("show", file).refusal()


def test_markup_and_emoji_codes_in_a_file_name_are_printed_as_they_are(cli, counts, tmp_path):
    path = tmp_path / "[bold]a[] :cat:.json"
    path.write_bytes(counts.read_bytes())
    assert cli("show", path).out.startswith(f"{path}: 4 layers")


def test_a_long_file_name_neither_wraps_nor_cuts_anything(cli, counts, tmp_path):
    path = tmp_path / f"{'long ' * 40}.json"
    path.write_bytes(counts.read_bytes())
    result = cli("show", path)
    assert f"{path}: 4 layers x 32 experts, top-4" == result.out.splitlines()[0]
    assert 3 == len(result.out.splitlines())


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_a_table_in_a_pipe_is_never_cut_whatever_the_terminals_width(cli, plan, columns):
    wide = cli("show", plan).out
    assert wide == cli("show", plan, env={"COLUMNS": columns}).out
    assert "\N{HORIZONTAL ELLIPSIS}" not in wide


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("gone.json", None, "no such file"),
        ("empty.json", b"", "wanted JSON"),
        ("list.json", b"[]", "wanted a JSON object"),
        ("odd.json", b"{}", "wanted one of: ours"),
        ("zip.npz", b"PK\x05\x06" + bytes(18), "no array 'experts'"),
        ("plan.json", b'{"format": "hotsplit-plan"}', "wanted the keys"),
        ("n" * 300, None, "file name too long"),
    ],
)
def test_what_is_no_file_of_ours_is_refused(cli, tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert reason in cli("show", tmp_path / name).refusal()
