from __future__ import annotations

import json

import numpy as np
import pytest

from hotsplit.plan.identity import ModelIdentity
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
    assert "oracle_reachable" in result.out


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
