"""Loading never holds the experts: what a load and a run take of memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engines import tiny

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

MIB = 2**20
HIDDEN, INNER, EXPERTS, LAYERS = 512, 512, 64, 2
ROW = 3 * HIDDEN * INNER * 2
EXPERT_BYTES = ROW * EXPERTS * LAYERS
CONSTANT = 60 * MIB
"""What the interpreter, torch and transformers may take beside rows and dense weights: half of the experts at most."""

MEASURE = """
    import json, sys, threading, time
    import torch, transformers, hotsplit
    torch.set_num_threads(1)

    def status(name):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

    folder, small, hot_gib, state = sys.argv[1:]
    ids = torch.randint(3, 100, (1, 16))
    # First a small model of the same kind, so that all code is loaded and every pool is warm.
    model = hotsplit.load(small, hot_gib=float(hot_gib) and 0.0001, dynamic=False, run_when_fits=True, state_dir=state)
    model.generate(ids, max_new_tokens=2, do_sample=False)
    model.hotsplit.close()

    peak, stop = 0, threading.Event()

    def watch():
        global peak
        while not stop.is_set():
            peak = max(peak, status("RssAnon"))
            time.sleep(0.001)

    before = status("RssAnon")
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = hotsplit.load(folder, hot_gib=float(hot_gib), dynamic=False, run_when_fits=True, state_dir=state)
    loaded, loading_peak = status("RssAnon"), peak
    model.generate(ids, max_new_tokens=8, do_sample=False)
    stop.set()
    watcher.join()
    banks = model.hotsplit.banks
    sample = {}
    for expert in (0, 63):
        row = banks.rows.tensors(1, banks.router.row_map[1, expert].item())
        sample[expert] = [int(row[name].view(torch.uint8).long().sum()) for name in ("gate_up_proj", "down_proj")]
    print(json.dumps({"loaded": loaded - before, "loading_peak": loading_peak - before, "peak": peak - before,
                      "hot": int(model.hotsplit.plan.hot_rows().sum()), "sample": sample,
                      "shared": status("RssShmem")}))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A qwen3_moe of 192 MiB of experts, written without a model in memory."""
    folder = tmp_path_factory.mktemp("wide")
    tiny.make_checkpoint(
        folder,
        model_type="qwen3_moe",
        changes={"num_experts": 4, "hidden_size": HIDDEN, "moe_intermediate_size": INNER},
    )
    tensors, generator = {}, torch.Generator().manual_seed(0)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no dict
            tensor = file.get_tensor(name)
            if name.endswith("mlp.gate.weight"):
                tensor = torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()
            if ".experts." not in name:
                tensors[name] = tensor
    pool = torch.randn(ROW // 2 + 64, generator=generator).mul_(0.02).bfloat16()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                # Every expert starts elsewhere in one pool of numbers: different, and quickly made.
                start = expert if part != "down" else expert // 2
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                tensors[name] = pool[start : start + HIDDEN * INNER].clone().view(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_config(folder, num_experts=EXPERTS, num_local_experts=EXPERTS)
    dense = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." not in name)
    return folder, dense, tensors


@pytest.fixture
def measured(wide, checkpoint, tmp_path):
    def run(hot):
        hot_gib = hot * EXPERT_BYTES / 2**30
        arguments = [str(wide[0]), str(checkpoint("qwen3_moe")), str(hot_gib), str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURE), *arguments], capture_output=True, text=True, check=False
        )
        assert 0 == done.returncode, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("hot", [0.0, 0.25])
def test_loading_and_running_take_hot_rows_and_dense_weights_and_no_more(measured, wide, hot):
    _, dense, tensors = wide
    found = measured(hot)
    assert int(hot * EXPERTS * LAYERS) == found["hot"]
    allowed = hot * EXPERT_BYTES + dense + CONSTANT
    assert allowed < 0.75 * EXPERT_BYTES, "else the bound would not notice whole experts"
    assert found["loading_peak"] < allowed
    assert found["peak"] < allowed
    assert hot * EXPERT_BYTES < found["loaded"] + MIB, "hot rows are really in memory"
    assert found["shared"] < MIB
    for expert, sums in found["sample"].items():
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (
            int(tensors[f"{prefix}.{part}_proj.weight"].view(torch.uint8).long().sum())
            for part in ("gate", "up", "down")
        )
        assert [gate + up, down] == sums
