"""One GPU, over a stand-in: steps, counts, budgets, settings, and how a model there ends."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hotsplit
from engines import tiny
from engines.stand_in import budget
from hotsplit.bank.fake_driver import NOTHING
from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.steps import Steps, drive
from hotsplit.engines.transformers.traffic import Prompt
from hotsplit.errors import BankError, BudgetError, ConfigError, EngineError, UnsupportedEngineError
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import expert_sizes

pytestmark = pytest.mark.transformers

load_module = importlib.import_module("hotsplit.engines.transformers.loading")

E = 8
SWAPPING = {"dyn_steps": 2, "dyn_margin": 1, "dyn_half_life": 1}


# Steps, counts, metrics, learned counts.


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_device_counts_what_the_cpu_counts(checkpoint, load_on_gpu, model_type, monkeypatch, tmp_path):
    folder = checkpoint(model_type, dtype=torch.float32)
    on_gpu = load_on_gpu(folder)
    monkeypatch.setattr(load_module, "place_of", lambda device: None)
    on_cpu = hotsplit.load(folder, hot_gib=0.01, run_when_fits=True, dynamic=False, state_dir=tmp_path)
    for model in (on_gpu, on_cpu):
        tiny.play(model)
    found, wanted = (model.hotsplit.histogram() for model in (on_gpu, on_cpu))
    for phase in ("decode", "prefill"):
        assert wanted.phases[phase].tokens == found.phases[phase].tokens
        assert np.array_equal(wanted.phases[phase].counts, found.phases[phase].counts)
    on_cpu.hotsplit.close()


def test_sequences_that_have_ended_are_not_counted(checkpoint, load_on_gpu):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    batch = tiny.prompts(batch=2)
    with torch.no_grad():
        first = model.generate(**batch, **tiny.greedy(4))[:, -4:]
    before = model.hotsplit.histogram().phases["decode"].tokens
    end = int(first[0, 1])
    with torch.no_grad():
        model.generate(**batch, max_new_tokens=4, min_new_tokens=0, do_sample=False, eos_token_id=end, pad_token_id=0)
    ended = model.hotsplit.histogram().phases["decode"].tokens - before
    assert ended < 2 * 3


def test_a_trace_has_every_token_that_was_counted(checkpoint, load_on_gpu, monkeypatch, tmp_path):
    folder = checkpoint("qwen3_moe", dtype=torch.float32)
    prompts = [Prompt(domain="a", token_ids=tuple(range(3, 3 + n))) for n in (5, 9, 7)]
    options = ProfileOptions(prompt_tokens=16, decode_tokens=4, batch_size=2, temperature=0)
    on_gpu = load_on_gpu(folder)
    _, found = play(on_gpu, prompts, options=options, want_trace=True)
    assert [] == on_gpu.hotsplit.banks.observers
    monkeypatch.setattr(load_module, "place_of", lambda device: None)
    on_cpu = hotsplit.load(folder, hot_gib=0.01, run_when_fits=True, dynamic=False, state_dir=tmp_path)
    _, wanted = play(on_cpu, prompts, options=options, want_trace=True)
    for name in ("experts", "phase", "request", "position", "domain"):
        assert getattr(wanted, name).tolist() == getattr(found, name).tolist()
    on_cpu.hotsplit.close()


def test_metrics_say_where_rows_lie_and_what_they_take(checkpoint, load_on_gpu):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    banks = model.hotsplit.banks
    snapshot = model.hotsplit.snapshot()
    assert (banks.rows.hot_bytes, banks.rows.host_bytes) == (snapshot.hot_bytes, snapshot.host_bytes)
    assert snapshot.host_bytes > 0
    assert snapshot.hot_bytes <= snapshot.budget_bytes


def test_what_was_learned_is_saved_and_taken_up(checkpoint, load_on_gpu, tmp_path):
    folder = checkpoint("qwen3_moe")
    model = load_on_gpu(folder, dynamic=True, **SWAPPING)
    tiny.play(model)
    model.hotsplit.close()
    assert "no learned counts" in model.hotsplit.origin
    assert "no learned counts" not in load_on_gpu(folder, dynamic=True).hotsplit.origin


def test_a_step_of_another_thread_finds_the_drivers_context(checkpoint, load_on_gpu):
    model = load_on_gpu(checkpoint("qwen3_moe"), rows=3, dynamic=True, **SWAPPING)
    failures = []

    def generate():
        try:
            for _ in range(3):
                tiny.play(model)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must see it
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert [] == failures
    assert model.hotsplit.snapshot().swaps_done > 0


def test_counters_are_read_by_one_thread_at_a_time(checkpoint, load_on_gpu, monkeypatch):
    engine = load_on_gpu(checkpoint("qwen3_moe")).hotsplit
    lock, router, seen = engine.banks._banks.lock, engine.banks.router, []
    real = router.settle

    def free():
        """Whether another thread could take the lock."""
        got = []
        thread = threading.Thread(target=lambda: got.append(lock.acquire(blocking=False) and (lock.release() or True)))
        thread.start()
        thread.join()
        return got == [True]

    monkeypatch.setattr(router, "settle", lambda: (seen.append(free()), real()))
    engine.histogram()
    engine.snapshot()
    engine.close()
    assert ([False] * 3, True) == (seen, free())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_mask_on_the_cpu_comes_to_the_banks_on_their_device(device):
    seen = []

    class Banks:
        def __init__(self):
            self.device = torch.device(device)

        def tick(self):
            """Nothing to do."""

        def step(self, *, phase, is_padding):
            seen.append(is_padding)
            return contextlib.nullcontext()

    steps, ids = Steps(Banks()), torch.ones(2, 1, dtype=torch.int64, device=device)
    past = SimpleNamespace(get_seq_length=lambda: 3)
    with steps.generation(end_ids=frozenset({9}), is_speculative=False):
        for kept in (0, 1):
            mask = torch.tensor([[kept], [1]])
            with steps.step((), {"input_ids": ids, "attention_mask": mask, "past_key_values": past}):
                pass
    with steps.step((), {"input_ids": ids, "attention_mask": torch.ones(2, 1)}):
        pass
    assert device == seen[0].device.type
    assert seen[2] is None, "a mask on the CPU that hides nothing"


# What a model there must not do.


def test_saving_copying_and_another_device_are_refused(checkpoint, load_on_gpu, tmp_path):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    with pytest.raises(EngineError, match="not among its weights"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(EngineError, match="cannot be copied"):
        copy.deepcopy(model)
    module = model.model.layers[0].mlp.experts
    with pytest.raises(EngineError, match="tokens on meta; do not move the model"):
        hooks.experts_forward(module, torch.empty(1, 64, device="meta"), torch.tensor([[0]]), torch.ones(1, 1))


def test_after_the_end_nothing_is_computed(checkpoint, load_on_gpu):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    model.hotsplit.close()
    model.hotsplit.close()
    with pytest.raises(BankError, match="the banks are closed"):
        model(torch.tensor([[3]]))


def test_a_model_that_goes_gives_its_memory_back(checkpoint, stand_in, tmp_path):
    machine = stand_in()
    model = hotsplit.load(
        checkpoint("qwen3_moe"), hot_gib=0.0005, run_when_fits=True, dynamic=False, state_dir=tmp_path
    )
    assert NOTHING != machine.driver.held
    del model
    gc.collect()
    assert NOTHING == machine.driver.held


@pytest.mark.parametrize(
    ("call", "at"),
    [("cuMemCreate", 1), ("cuMemCreate", 3), ("cuMemSetAccess", 3), ("cuMemcpyAsync", 1), ("cuMemcpyAsync", 30)],
)
def test_a_load_that_breaks_off_gives_everything_back(checkpoint, stand_in, tmp_path, call, at):
    other, machine = stand_in(), stand_in()
    other.open("off")
    while_opened = [one.name for one in other.driver.calls].count(call)
    machine.driver.fail(while_opened + at, call=call)
    with pytest.raises(BankError):
        hotsplit.load(checkpoint("qwen3_moe"), hot_gib=0.0005, run_when_fits=True, dynamic=False, state_dir=tmp_path)
    assert NOTHING == machine.driver.held


@pytest.mark.parametrize(
    ("capability", "fp8", "least"), [((8, 6), True, "8.9"), ((7, 5), False, "8.0")], ids=["fp8", "bf16"]
)
def test_weights_that_a_gpu_cannot_multiply_are_refused_before_the_first_step(
    checkpoint, load_on_gpu, stand_in, capability, fp8, least
):
    machine = stand_in(capability=capability)
    with pytest.raises(UnsupportedEngineError, match=rf"experts on cpu: got .*; wanted compute capability {least} or"):
        load_on_gpu(checkpoint("qwen3_moe", fp8=fp8), machine=machine, hot_gib=0.001)
    load_on_gpu(checkpoint("qwen3_moe", dtype=torch.float32), machine=machine, hot_gib=0.001)


# Budget and room.


def limits(available_bytes):
    one = MemoryLimit(name="MemAvailable", state=LIMITED, available_bytes=available_bytes, source="/proc/meminfo")
    return MemoryLimits(limits=(one,))


def test_rows_that_the_gpu_cannot_hold_are_refused_before_any_is_filled(checkpoint, load_on_gpu, stand_in):
    folder = checkpoint("qwen3_moe")
    stand_in()
    hot_gib = budget(folder, rows=4, dynamic=False)
    other, machine = stand_in(), stand_in(free_bytes=150_000)
    other.open("off")
    with pytest.raises(BudgetError, match=r"the hot budget exceeds real memory.*0.1 MiB of 0.3 MiB free on cpu"):
        load_on_gpu(folder, machine=machine, vram_reserve_gib=0, hot_gib=hot_gib)
    tried, found = ([call.name for call in one.driver.calls].count("cuMemcpyAsync") for one in (other, machine))
    assert tried == found


def test_cold_rows_that_the_host_cannot_hold_are_refused(checkpoint, load_on_gpu, monkeypatch):
    monkeypatch.setattr("hotsplit.host.demand.memory_limits", lambda: limits(50_000))
    with pytest.raises(BudgetError, match="the run exceeds host memory: got cold rows"):
        load_on_gpu(checkpoint("qwen3_moe"), rows=2)


def test_without_a_budget_it_is_what_a_device_map_would_keep(checkpoint, stand_in, tmp_path, caplog):
    caplog.set_level("INFO", logger="hotsplit.engines.transformers.gpu")
    folder = checkpoint("qwen3_moe")
    machine = stand_in(free_bytes=300_000)
    model = hotsplit.load(folder, dynamic=False, vram_reserve_gib=0, state_dir=tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "hot budget" in record.getMessage()]
    assert 'which device_map="auto" would keep of this model' in line
    assert 0 < model.hotsplit.plan.hot_rows().sum() < 2 * E
    assert model.hotsplit.snapshot().hot_bytes <= machine.free_bytes
    model.hotsplit.close()


def test_a_model_that_fits_runs_as_stock(checkpoint, stand_in, tmp_path, caplog):
    machine = stand_in()
    model = hotsplit.load(checkpoint("qwen3_moe"), state_dir=tmp_path)
    assert not hasattr(model, "hotsplit")
    assert 0 == machine.num_opened
    assert any("[fits]" in record.getMessage() for record in caplog.records)


def test_a_plan_file_is_taken_by_its_own_measure_and_page_edges_are_said(checkpoint, load_on_gpu, tmp_path):
    folder = checkpoint("gpt_oss")  # whose biases stay fast for all experts
    sizes = expert_sizes(read_headers(folder))
    plan, _ = make_plan(sizes, histogram=None, budget_bytes=sizes.expert_bytes // 2, options=PlanOptions(dynamic=False))
    save_plan(plan, tmp_path / "plan.json")
    model = load_on_gpu(folder, plan=tmp_path / "plan.json", hot_gib=None)
    assert plan.hot == model.hotsplit.plan.hot
    assert "page-edges" in [notice.name for notice in model.hotsplit.notices]


# Settings.


def test_the_numa_policy_reaches_the_device(checkpoint, load_on_gpu, stand_in, caplog):
    machine = stand_in()
    load_on_gpu(checkpoint("qwen3_moe"), machine=machine, numa_policy="bind", hot_gib=0.0005)
    assert ["bind"] == machine.policies
    assert [] == [record for record in caplog.records if "NUMA_POLICY has no effect" in record.getMessage()]


def test_a_bank_folder_has_no_effect_which_is_said(checkpoint, load_on_gpu, tmp_path, caplog):
    load_on_gpu(checkpoint("qwen3_moe"), bank_dir=tmp_path, hot_gib=0.0005)
    assert any("HOTSPLIT_BANK_DIR has no effect: on a GPU" in record.getMessage() for record in caplog.records)


def test_a_kernel_that_only_a_cpu_has_is_refused_where_it_is_asked_for(checkpoint, load_on_gpu):
    with pytest.raises(ConfigError, match="HOTSPLIT_KERNEL on a GPU: got exact.*leave it out, or use device='cpu'"):
        load_on_gpu(checkpoint("qwen3_moe"), kernel="exact", hot_gib=0.0005)


def test_progress_counts_every_row(checkpoint, load_on_gpu):
    seen = []
    load_on_gpu(checkpoint("qwen3_moe"), on_progress=lambda done, total: seen.append((done, total)), hot_gib=0.0005)
    assert 2 * E == len(seen)
    assert seen[-1][0] == seen[-1][1]


def test_generate_on_a_gpu_never_compiles(monkeypatch):
    """Its forward is wrapped by steps, which a compiler cannot follow."""

    class Model(torch.nn.Module):
        generation_config = SimpleNamespace()

        def generate(self, **kwargs):
            return kwargs

        def forward(self, **kwargs):
            return kwargs

    for device, wanted in (("cuda", {"disable_compile": True}), ("cpu", {})):
        model = Model()
        model.__dict__["base_model"] = model
        banks = SimpleNamespace(device=torch.device(device))
        drive(model, steps=Steps(banks))
        assert wanted == model.generate()
