"""The race beyond memory: its models, its GGUF names, its figures, its partial results, and all of it once, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import bench_larger_than_memory
import make_gguf
import make_large_model
import make_model
import numpy as np
import pytest
import race_cgroup
import race_ledger
import race_run
import race_summary
import race_tables
import torch

ROOT = Path(__file__).parents[2]
TINY = make_large_model.SIZES["tiny"]
LARGE = make_large_model.SIZES["large"]


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """Both races over tiny models, by the command that a stranger would type; its result, and what it printed."""
    folder = tmp_path_factory.mktemp("race")
    output = folder / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "bench_larger_than_memory.py", "--smoke", "--threads", "1"]
    command += ["--root", folder, "--output", output, "--kernels", "exact", "--llama-python", sys.executable]
    command += ["--only", "exact, all hot", "50% hot, dynamic", "llama.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text(encoding="utf-8")), done, folder


def rows_of(result, race):
    section = next(section for name, section in result["races"].items() if name.startswith(race))
    return {row["engine"]: row for row in section["rows"]}


def test_the_exact_kernel_gives_stocks_bits_in_the_cached_race(smoke):
    rows = rows_of(smoke[0], "cached")
    assert rows["hotsplit exact, all hot"]["same_bits_as_reference"]
    assert rows["hotsplit exact, all hot"]["compared_tokens"] == 4


def test_the_race_beyond_memory_counts_bytes_and_hits_of_every_part(smoke):
    row = rows_of(smoke[0], "drift")["hotsplit, 50% hot, dynamic"]
    assert row["tokens"] == 30
    assert row["same_bits"]
    assert list(row["parts"]) == ["domain 0", "0 to 1", "domain 1", "1 to 0", "domain 0 again"]
    touched = TINY.num_layers * TINY.top_k * 3 * TINY.hidden_dim * TINY.expert_dim * 2
    assert {part["touched_bytes_per_token"] for part in row["parts"].values()} == {touched}
    assert all(part["byte_hit_rate"] <= part["oracle"] for part in row["parts"].values())


def test_an_engine_that_is_not_there_is_a_row_that_says_why(smoke):
    result, done, _ = smoke
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        assert "--llama-python" in rows_of(result, "drift")["llama.cpp"]["failed"]
        assert "llama.cpp: not measured: " in done.stdout
    else:
        assert rows_of(result, "drift")["llama.cpp"]["top1_agreement"] > 0.8


def test_nothing_partial_stays_behind(smoke):
    assert sorted(path.name for path in smoke[2].iterdir() if not path.name.endswith(".gguf")) == [
        "glm4-moe-tiny",
        "qwen3-moe-tiny",
        "result.json",
    ]


def test_its_tables_are_made_from_the_result_alone(smoke):
    whole = smoke[0]
    assert any("hotsplit, 50% hot, dynamic" in line for line in race_tables.lines(whole))
    assert "MISSED" in "".join(race_tables.text(whole)) or "met" in "".join(race_tables.text(whole))


def test_a_quarter_of_the_experts_takes_about_60_percent_and_another_quarter_in_the_other_domain():
    dice = torch.Generator().manual_seed(1)
    embeddings_VD = make_large_model._embeddings(LARGE, dice=dice).float()
    hidden_VD = embeddings_VD / embeddings_VD.square().mean(dim=1, keepdim=True).sqrt()
    bias_E = torch.randn(LARGE.num_experts, generator=dice) * LARGE.bias_spread
    scores_VE = (hidden_VD @ make_large_model._router(LARGE, dice=dice).float().T).sigmoid() + bias_E
    ids_VK = scores_VE.topk(LARGE.top_k).indices
    first, second = ([torch.bincount(half.flatten(), minlength=LARGE.num_experts).tolist()] for half in ids_VK.chunk(2))
    assert 0.52 < race_summary.top_share(first, share=0.25) < 0.72
    assert 0.52 < race_summary.top_share(second, share=0.25) < 0.72
    assert race_summary.top_share(second, share=0.25, by=first) < 0.45


def test_a_large_model_that_broke_off_is_finished_to_the_same_bytes(tmp_path):
    whole = make_large_model.make_large_model(TINY, tmp_path / "whole")
    broken = make_large_model.make_large_model(TINY, tmp_path / "broken")
    partial = broken.rename(tmp_path / "broken.partial")
    lost = sorted(partial.glob("*.safetensors"))[2]
    lost.rename(lost.with_name(f"{lost.name}.unfinished"))
    make_large_model.make_large_model(TINY, tmp_path / "broken")
    assert not list(tmp_path.glob("*.partial"))
    for path in sorted(whole.iterdir()):
        assert path.read_bytes() == (tmp_path / "broken" / path.name).read_bytes()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, 10**9))
    with pytest.raises(SystemExit, match=r"1\.0 GB free, wanted 30\.\d GB"):
        make_large_model.make_large_model(LARGE, tmp_path / "model")
    assert not list(tmp_path.rglob("*.safetensors*"))


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    make_large_model.make_large_model(TINY, tmp_path / "model")
    with pytest.raises(SystemExit, match="holds something else"):
        make_large_model.make_large_model(replace(TINY, seed=1), tmp_path / "model")


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe"])
def test_every_tensor_of_a_checkpoint_has_one_place_in_the_gguf_file(tmp_path, kind):
    if kind == "glm4_moe":
        folder = make_large_model.make_large_model(TINY, tmp_path / "model")
    else:
        folder = make_model.make_model(make_model.SIZES["tiny"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arrays = make_gguf._arrays(folder)
    named = [source for tensor in make_gguf.tensors(config) for source in tensor.sources]
    assert len(named) == len(set(named))
    assert arrays.keys() <= set(named)


def test_bf16_becomes_float32_by_its_own_bits_where_llama_cpp_wants_that():
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    arrays = {"a": weights.view(torch.uint16).numpy()}
    gate = make_gguf.Tensor("blk.0.ffn_gate_inp.weight", ("a",))
    assert np.array_equal(weights.float().numpy(), make_gguf._joined(gate, arrays=arrays))
    experts = make_gguf.Tensor("blk.0.ffn_up_exps.weight", ("a", "a"))
    assert np.array_equal(np.stack([arrays["a"]] * 2), make_gguf._joined(experts, arrays=arrays))


def test_the_oracle_takes_as_many_rows_per_layer_as_the_plan():
    assert race_summary.oracle([[5, 1, 3, 1], [1, 1, 1, 7]], [2, 1]) == pytest.approx(15 / 20)
    assert race_summary.oracle([[5, 1, 3, 1], [1, 1, 1, 7]], [0, 0]) == 0


def test_agreement_sees_another_choice_and_other_bits():
    ours = np.eye(4, 6, dtype=np.float32)
    other = ours.copy()
    other[0] = ours[1]
    assert race_summary.agreement(ours, ours)["same_bits"]
    found = race_summary.agreement(ours, other)
    assert not found["same_bits"]
    assert found["top1_agreement"] == 0.75
    assert found["logit_correlation"] < 1
    assert race_summary.agreement(ours[:2], ours)["compared_tokens"] == 2


def test_aims_are_met_and_missed_by_their_ratios():
    def row(name, rate, lost=0.0):
        parts = {part: {"points_lost": lost} for part in ("domain 1", "domain 0 again")}
        return {"engine": name, "tokens_per_s": rate, "parts": parts}

    rows = [row("hotsplit, none hot", 2.0), row("llama.cpp", 1.0), row("accelerate disk offload", 0.1)]
    aims = race_summary.drift_aims([*rows, row("hotsplit, 50% hot, dynamic", 3.0, lost=4.0)])
    assert aims["speed_over_the_best_other"]["is_met"]
    assert aims["speed_over_none_hot"]["is_met"]
    assert not aims["points_lost_on_the_oracle, hotsplit, 50% hot, dynamic"]["is_met"]
    slower = race_summary.drift_aims([*rows, row("hotsplit, 50% hot, dynamic", 2.9)])
    assert not slower["speed_over_the_best_other"]["is_met"]
    assert not slower["speed_over_none_hot"]["is_met"]


def test_a_race_that_broke_off_is_taken_up_with_the_same_settings_only(tmp_path):
    ledger = race_ledger.Ledger(tmp_path / "race.partial", settings={"seed": 1})
    ledger.put("stock", {"tokens": 3})
    again = race_ledger.Ledger(tmp_path / "race.partial", settings={"seed": 1})
    assert again.get("stock") == {"tokens": 3}
    assert "taken up" in again.note
    other = race_ledger.Ledger(tmp_path / "race.partial", settings={"seed": 2})
    assert other.get("stock") is None
    assert "dropped" in other.note


@pytest.mark.parametrize(
    ("version", "limit_file"), [(1, "memory/{}/memory.limit_in_bytes"), (2, "{}/memory.max")], ids=["v1", "v2"]
)
def test_a_memory_limit_is_a_group_of_either_version(tmp_path, monkeypatch, version, limit_file):
    monkeypatch.setattr(race_cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(race_cgroup, "_remove", lambda folder: None)  # files of a real group are no obstacle to rmdir
    if version == 1:
        (tmp_path / "memory").mkdir()
        (tmp_path / "memory" / "cgroup.procs").touch()
    with race_cgroup.memory_limit(123) as group:
        assert (tmp_path / limit_file.format(group.name)).read_text(encoding="ascii") == "123"
    with race_cgroup.memory_limit(None) as group:
        assert group is None


def test_where_no_group_can_be_made_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(race_cgroup, "_ROOT", tmp_path / "missing")
    with pytest.raises(SystemExit, match="systemd-run"), race_cgroup.memory_limit(1):
        pass


def test_a_worker_that_fails_or_is_killed_says_so():
    fails = [sys.executable, "-c", "import sys; print('progress: x', file=sys.stderr); sys.exit('no such model')"]
    assert race_run._watched(fails) == "no such model"
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert "more memory" in race_run._watched(killed)
    assert race_run._watched([sys.executable, "-c", "pass"]) is None


def test_an_unknown_race_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_larger_than_memory.main(["sideways"])
    assert "invalid choice" in capsys.readouterr().err
