"""`hotsplit convert`: there and back through the command, the losses said, nothing written where it fails."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from hotsplit.cli.converting import TARGET_NAMES
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import save_histogram

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
TO = [pytest.param(name, marks=needs_torch if name == "pt" else []) for name in TARGET_NAMES]


def counts_in(path):
    return load_histogram(path)[0].phases["decode"].counts.tolist()


@pytest.mark.parametrize("to", TO)
def test_there_and_back_is_the_same_matrix_in_every_form(cli, counts, tmp_path, to):
    there, back = tmp_path / f"there.{to}", tmp_path / "back.json"
    result = cli("convert", counts, "--to", to, "-o", there)
    assert 0 == result.code, result.err
    layers = ("--layers", "0-3") if to in ("npy", "pt") else ()
    assert 0 == cli("convert", there, "--to", "hotsplit", "-o", back, *layers).code
    assert counts_in(counts) == counts_in(back)


def test_what_the_form_cannot_hold_is_said_aloud(cli, counts, tmp_path):
    result = cli("convert", counts, "--to", "csv", "-o", tmp_path / "c.csv")
    assert "csv has no place for phase, tokens, name, model_type, top_k: dropped [dropped-facts]" in result.err
    assert f"histogram written to {tmp_path / 'c.csv'}" in result.err


@needs_torch
def test_what_a_pytorch_file_cannot_hold_is_said_of_that_form(cli, counts, tmp_path):
    result = cli("convert", counts, "--to", "pt", "-o", tmp_path / "c.pt")
    assert "pt has no place for phase, tokens, layers, name" in result.err


@needs_torch
@pytest.mark.parametrize("steps", [1, 3])
def test_a_recorder_s_file_is_read_with_the_layers_that_the_user_lists(cli, tmp_path, steps):
    import torch

    recorded = torch.arange(2 * 4).reshape(1, 2, 4).expand(steps, 2, 4).contiguous()
    torch.save({"rank": 0, "logical_count": recorded}, tmp_path / "r.pt")
    line = cli("convert", tmp_path / "r.pt", "--to", "hotsplit", "-o", tmp_path / "h.json").refusal()
    assert "2 rows without layer numbers" in line
    assert not (tmp_path / "h.json").exists()
    arguments = ("--to", "hotsplit", "-o", tmp_path / "h.json", "--layers", "3,7", "--phase", "prefill")
    result = cli("convert", tmp_path / "r.pt", *arguments, "--json")
    assert (0, [3, 7]) == (result.code, json.loads(result.out)["model"]["layers"])
    histogram = load_histogram(tmp_path / "h.json")[0]
    assert (steps * np.arange(8).reshape(2, 4)).tolist() == histogram.phases["prefill"].counts.tolist()


@needs_torch
@pytest.mark.parametrize("kind", ["junk", "pickle", "other", "list"])
def test_a_pytorch_file_that_holds_no_counts_is_one_clear_line(cli, tmp_path, kind):
    import torch

    path = tmp_path / "r.pt"
    if kind == "junk":
        path.write_bytes(b"junk")
    elif kind == "pickle":
        path.write_bytes(b"\x80\x04cos\nsystem\n.")
    else:
        torch.save({"other": 1} if kind == "other" else [1], path)
    line = cli("convert", path, "--to", "csv", "-o", tmp_path / "c.csv", "--layers", "0").refusal()
    assert "r.pt" in line
    assert "logical_count" in line
    assert not (tmp_path / "c.csv").exists()


def test_without_torch_a_pytorch_file_is_one_clear_line(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (tmp_path / "r.pt").write_bytes(b"x")
    line = cli("convert", tmp_path / "r.pt", "--to", "csv", "-o", tmp_path / "c.csv", "--layers", "0").refusal()
    assert "torch is not installed" in line


@pytest.mark.parametrize("layers", ["", "a", "3-", "5-3", "1,1", "2,1", "-1", "0-9999999"])
def test_a_list_of_layers_that_is_none_is_a_usage_error(cli, counts, tmp_path, layers):
    result = cli("convert", counts, "--to", "csv", "-o", tmp_path / "c.csv", "--layers", layers)
    assert 2 == result.code
    assert not (tmp_path / "c.csv").exists()


def test_a_set_is_converted_by_its_name(cli, counts, write_counts, tmp_path):
    one, other = load_histogram(counts)[0], load_histogram(write_counts(tmp_path / "o.json", seed=3))[0]
    rows = {
        name: {"decode": h.phases["decode"].counts.astype(int).tolist()} for name, h in {"a": one, "b": other}.items()
    }
    (tmp_path / "sets.json").write_text(json.dumps({"meta": {}, "counts": rows}))
    assert 0 == cli("convert", f"{tmp_path / 'sets.json'}#b", "--to", "layers", "-o", tmp_path / "b.json").code
    assert other.phases["decode"].counts.tolist() == counts_in(tmp_path / "b.json")


def test_a_doubt_is_an_error_in_strict_mode_and_nothing_is_written(cli, tmp_path):
    (tmp_path / "c.csv").write_text("layer,expert,count\n0,0,4\n0,2,1\n1,0,3\n")
    arguments = ("convert", tmp_path / "c.csv", "--to", "hotsplit", "-o", tmp_path / "h.json")
    assert "unknown-phase" in cli(*arguments, "--strict", 1).refusal()
    assert "experts-from-ids" in cli(*arguments, "--strict", 1, "--phase", "decode").refusal()
    assert not (tmp_path / "h.json").exists()
    assert 0 == cli(*arguments, "--strict", 1, "--phase", "decode", "--experts", 8).code
    assert 8 == load_histogram(tmp_path / "h.json")[0].identity.num_experts


@pytest.mark.parametrize("content", ["{", '{"layers": {"0": [1, NaN]}}', "layer,expert,count\n0,0,nan\n"])
def test_a_damaged_file_is_one_clear_line_and_nothing_is_written(cli, tmp_path, content):
    path = tmp_path / ("h.json" if content.startswith("{") else "h.csv")
    path.write_text(content)
    assert path.name in cli("convert", path, "--to", "npz", "-o", tmp_path / "o.npz").refusal()
    assert not (tmp_path / "o.npz").exists()


def test_a_file_is_not_converted_onto_itself(cli, counts):
    before = counts.read_bytes()
    assert "which is read" in cli("convert", counts, "--to", "csv", "-o", counts).refusal(2)
    assert before == counts.read_bytes()


def test_normalised_counts_keep_to_forms_that_hold_them(cli, counts, write_counts, tmp_path):
    other = write_counts(tmp_path / "o.json", seed=1)
    assert 0 == cli("merge", counts, other, "-o", tmp_path / "m.json").code
    line = cli("convert", tmp_path / "m.json", "--to", "csv", "-o", tmp_path / "c.csv").refusal()
    assert "use one of hotsplit, train, npz" in line
    assert 0 == cli("convert", tmp_path / "m.json", "--to", "train", "-o", tmp_path / "t.json").code
    assert load_histogram(tmp_path / "t.json")[0].normalised


def test_the_published_counts_survive_every_form(cli, shared_data, tmp_path):
    source = shared_data / "histograms" / "qwen3-30b-a3b.decode.json"
    for to in ("train", "counts", "pairs", "npz"):
        assert 0 == cli("convert", source, "--to", to, "-o", tmp_path / to).code
        assert counts_in(source) == counts_in(tmp_path / to)


def test_a_trace_is_converted_to_the_histogram_that_its_profile_wrote(cli, profiled, tmp_path):
    assert 0 == cli("convert", profiled.trace, "--to", "hotsplit", "-o", tmp_path / "h.json").code
    expected, found = (load_histogram(path)[0] for path in (profiled.histogram, tmp_path / "h.json"))
    assert expected.identity == found.identity
    for phase in ("decode", "prefill"):
        assert expected.phases[phase].counts.tolist() == found.phases[phase].counts.tolist()


def test_a_form_is_read_wherever_a_histogram_is_named(cli, counts, tiny_moe, tmp_path):
    save_histogram(load_histogram(counts)[0], tmp_path / "same.json")
    assert 0 == cli("convert", counts, "--to", "npz", "-o", tmp_path / "c.npz").code
    plans = []
    for name in (tmp_path / "same.json", tmp_path / "c.npz"):
        result = cli("plan", tiny_moe, "--counts", name, "--hot-gib", 0.002, "--json")
        assert 0 == result.code, result.err
        plans.append(json.loads(result.out)["hash"])
    assert plans[0] == plans[1]


def test_a_source_that_no_json_can_hold_is_one_clear_line(cli, counts, tmp_path):
    value = json.loads(counts.read_text(encoding="utf-8"))
    value["source"] = {"a": float("nan")}
    file = tmp_path / "nan.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    result = cli("convert", file, "--to", "hotsplit", "-o", tmp_path / "out.json")
    assert "the histogram's source: got out of range float values" in result.refusal()
    assert not (tmp_path / "out.json").exists()
