"""What cannot work is refused in one clear line; what needs no splitting runs stock, and says so."""

from __future__ import annotations

import importlib
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hotsplit
from checkpoint_files import write_model
from engines import tiny
from engines.conftest import budget
from hotsplit.engines.transformers import hooks
from hotsplit.errors import (
    BankError,
    BudgetError,
    CheckpointError,
    ConfigError,
    EngineError,
    HistogramError,
    HotsplitError,
    PlanError,
    PlanMismatchError,
    UnsupportedEngineError,
)
from hotsplit.host import budget as budget_module
from hotsplit.host.memory import MemoryLimit, MemoryLimits
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.sizes import expert_sizes

pytestmark = pytest.mark.transformers

load_module = importlib.import_module(
    "hotsplit.engines.transformers.loading"
)  # the package has a function of this name

E, LAYERS = 8, 2


@pytest.fixture(autouse=True)
def one_line_errors():
    """Every error of this file must be one line of ordinary length."""
    seen = []
    real = HotsplitError.__init__

    def spy(self, *args, **kwargs):
        real(self, *args, **kwargs)
        seen.append(str(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HotsplitError, "__init__", spy)
        yield
    assert all("\n" not in text and len(text) < 900 for text in seen)


def refused(folder, error, match, **settings):
    with pytest.raises(error, match=match):
        hotsplit.load(folder, **({"hot_gib": 0.001, "run_when_fits": True} | settings))


def copied(folder, target):
    shutil.copytree(folder, target)
    return target


def save_small(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_dense_model_has_nothing_to_split(tmp_path):
    config = transformers.LlamaConfig(**(tiny._BASE | {"head_dim": 16}))
    folder = save_small(tmp_path, transformers.LlamaForCausalLM(config))
    refused(folder, CheckpointError, "has no routed experts.*dense.*run this model without hotsplit")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "absent", CheckpointError, str(tmp_path / "absent"))


def test_a_hub_id_that_cannot_be_had_is_named():
    refused("nobody/no-such-model", CheckpointError, "nobody/no-such-model.*check the spelling")


def test_dbrx_whose_experts_have_no_interface_is_refused(tmp_path):
    config = transformers.DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=128,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0},
    )
    folder = save_small(tmp_path, transformers.DbrxForCausalLM(config))
    refused(folder, (UnsupportedEngineError, CheckpointError), "expert")


def test_llama4_whose_experts_have_no_interface_is_refused(tmp_path):
    config = transformers.Llama4TextConfig(
        **(tiny._BASE | {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 64, "moe_layers": [0, 1]})
    )
    folder = save_small(tmp_path, transformers.Llama4ForCausalLM(config))
    refused(
        folder,
        UnsupportedEngineError,
        "no experts module that transformers lets others implement.*run this model with stock transformers",
    )


def test_experts_in_mxfp4_are_refused_with_the_way_out(tmp_path):
    shapes = {
        "gate_up_proj_blocks": ("U8", [E, 64, 2, 16]),
        "gate_up_proj_scales": ("U8", [E, 64, 2]),
        "gate_up_proj_bias": ("BF16", [E, 64]),
        "down_proj_blocks": ("U8", [E, 64, 1, 16]),
        "down_proj_scales": ("U8", [E, 64, 1]),
        "down_proj_bias": ("BF16", [E, 64]),
    }
    tensors = {
        f"model.layers.{layer}.mlp.experts.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()
    }
    config = transformers.AutoConfig.for_model("gpt_oss", **(tiny._BASE | tiny.CONFIGS["gpt_oss"])).to_dict()
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    folder = write_model(tmp_path / "model", tensors, config=json.loads(json.dumps(config, default=str)))
    refused(folder, UnsupportedEngineError, "quantisation mxfp4: .*wanted bf16, fp16, fp32 or block-FP8")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", None])
def test_any_other_quantisation_is_refused_by_name(checkpoint, tmp_path, method):
    folder = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    tiny.edit_config(folder, quantization_config={"quant_method": method} if method else {"bits": 4})
    refused(folder, UnsupportedEngineError, f"quantisation {method}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_map", "auto"),
        ("quantization_config", {}),
        ("experts_implementation", "eager"),
        ("tp_plan", "auto"),
        ("state_dict", {}),
        ("gguf_file", "model.gguf"),
    ],
)
def test_arguments_that_would_move_the_experts_are_refused(checkpoint, name, value):
    refused(checkpoint("qwen3_moe"), UnsupportedEngineError, f"model_kwargs '{name}'", model_kwargs={name: value})


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny.make_checkpoint(tmp_path / "model", model_type="qwen3_moe", max_shard_size="30KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    refused(folder, CheckpointError, shard.name)


def test_a_truncated_shard_is_refused(checkpoint, tmp_path):
    folder = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 100)
    refused(folder, CheckpointError, "model.safetensors")


def limits(available):
    return lambda: MemoryLimits(
        limits=(MemoryLimit(name="MemAvailable", state="limited", available_bytes=available, source="/proc/meminfo"),)
    )


def test_hot_rows_that_no_memory_can_hold_are_refused_before_anything_is_read(checkpoint, monkeypatch):
    folder = checkpoint("qwen3_moe")
    dense = expert_sizes(read_headers(folder)).dense_bytes
    monkeypatch.setattr(budget_module, "memory_limits", limits(dense + 5000))
    monkeypatch.setattr(load_module, "Banks", lambda *args, **kwargs: pytest.fail("rows were built"))
    refused(
        folder,
        BudgetError,
        "exceeds real memory: .*MemAvailable.*set HOTSPLIT_HOT_GIB",
        hot_gib=budget(folder, 0.5),
        dynamic=False,
        vram_reserve_gib=0,
    )


@pytest.mark.parametrize("run_when_fits", [False, True])
def test_a_budget_beyond_the_experts_is_capped_and_then_held_against_real_memory(
    checkpoint, monkeypatch, run_when_fits
):
    monkeypatch.setattr(budget_module, "memory_limits", limits(100_000))
    refused(checkpoint("qwen3_moe"), BudgetError, "real memory", hot_gib=10_000, run_when_fits=run_when_fits)


@pytest.mark.parametrize("share", [0.6, 1.5])
def test_a_default_budget_is_not_refused_when_memory_goes_while_it_is_used(checkpoint, load, monkeypatch, share):
    folder = checkpoint("qwen3_moe")
    sizes = expert_sizes(read_headers(folder))
    left = [sizes.dense_bytes + int(share * sizes.expert_bytes)]

    def less_each_time():
        left[0] -= 4096
        return limits(left[0])()

    monkeypatch.setattr(budget_module, "memory_limits", less_each_time)
    model = load(folder, hot_gib=None, run_when_fits=False, vram_reserve_gib=0, dynamic=False)
    assert (share < 1) == hasattr(model, "hotsplit")


def test_a_default_budget_without_known_memory_asks_for_a_number(checkpoint, monkeypatch):
    monkeypatch.setattr(budget_module, "memory_limits", lambda: MemoryLimits(limits=()))
    refused(checkpoint("qwen3_moe"), BudgetError, "no way to tell.*HOTSPLIT_HOT_GIB", hot_gib=None)


@pytest.mark.parametrize("hot_gib", [0, 1e-6])
def test_a_budget_that_is_too_small_to_swap_names_the_least_and_static_mode(checkpoint, hot_gib):
    refused(checkpoint("qwen3_moe"), BudgetError, "wanted at least .* GiB.*HOTSPLIT_DYNAMIC=0", hot_gib=hot_gib)


def test_the_least_budget_that_is_named_is_enough(checkpoint, load):
    with pytest.raises(BudgetError) as caught:
        load(checkpoint("qwen3_moe"), hot_gib=0)
    named = float(caught.value.do.split("HOTSPLIT_HOT_GIB=")[1].split(",")[0])
    assert [3, 3] == load(checkpoint("qwen3_moe"), hot_gib=named).hotsplit.plan.hot_rows().tolist()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hot_gib": -1}, "hot_gib"),
        ({"hot_gib": float("nan")}, "hot_gib"),
        ({"dyn_margin": 0.9}, "dyn_margin"),
        ({"dyn_step": 5}, "did you mean dyn_steps"),
        ({"kernel": "slow"}, "wanted exact or fast"),
        ({"dyn_schedule": "sometimes"}, "wanted fixed or adaptive"),
    ],
)
def test_a_bad_setting_is_refused_before_the_model_is_looked_at(tmp_path, settings, match):
    refused(tmp_path / "absent", ConfigError, match, **settings)


@pytest.fixture
def plan_of(load, tmp_path):
    """A saved plan of a checkpoint."""

    def make(folder, *, name="plan.json", **settings):
        model = load(folder, dynamic=False, **settings)
        save_plan(model.hotsplit.plan, tmp_path / name)
        return tmp_path / name

    return make


def test_a_plan_of_another_model_is_refused_and_the_field_is_named(checkpoint, plan_of):
    plan = plan_of(checkpoint("mixtral"))
    refused(
        checkpoint("qwen3_moe"), PlanMismatchError, "model_type is mixtral, not qwen3_moe", hot_gib=None, plan=str(plan)
    )


def test_a_plan_of_another_revision_is_refused(checkpoint, plan_of, tmp_path):
    folder = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    plan = plan_of(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, PlanMismatchError, "header", hot_gib=None, plan=str(plan), dynamic=False)


def test_a_plan_with_another_budget_than_given_is_refused(checkpoint, plan_of):
    folder = checkpoint("qwen3_moe")
    plan = plan_of(folder)
    refused(folder, PlanError, "a budget of .* in the plan and", hot_gib=budget(folder, 0.75), plan=str(plan))


def test_a_plan_of_its_own_model_is_used_as_it_is(checkpoint, expected, load, plan_of):
    folder = checkpoint("qwen3_moe")
    plan = plan_of(folder)
    model = load(folder, hot_gib=None, plan=str(plan), dynamic=False)
    assert model.hotsplit.origin.startswith(f"plan {plan}")
    assert ((0, 1, 2, 3),) * 2 == model.hotsplit.plan.hot
    assert all(torch.equal(*pair) for pair in zip(expected(folder), tiny.play(model), strict=True))


def histogram(tmp_path, *, model_type="qwen3_moe", layers=(0, 1), num_experts=E, top_k=3):
    counts = np.random.default_rng(0).integers(1, 1000, (len(layers), num_experts)).astype(float)
    counts[:, 0] += 3 * 10**6 - counts.sum(axis=1)
    identity = ModelIdentity(model_type=model_type, layers=layers, num_experts=num_experts, top_k=top_k)
    tokens = int(counts[0].sum() / top_k) if counts[0].sum() % top_k == 0 else None
    made = Histogram(identity=identity, phases={"decode": PhaseCounts(counts=counts, tokens=tokens)})
    save_histogram(made, tmp_path / "hist.json")
    return str(tmp_path / "hist.json")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"model_type": "mixtral"}, "model_type is mixtral, not qwen3_moe"),
        ({"layers": (0, 1, 2)}, r"layers is \[0, 1, 2\], not \[0, 1\]"),
        ({"num_experts": 16}, "num_experts is 16, not 8"),
        ({"top_k": 2}, "top_k is 2, not 3"),
    ],
)
def test_a_histogram_of_another_model_is_refused_and_the_field_is_named(checkpoint, tmp_path, other, match):
    folder = checkpoint("qwen3_moe")
    counts = histogram(tmp_path, **other)
    refused(folder, PlanMismatchError, match, counts=counts, hot_gib=budget(folder, 0.5), dynamic=False)


def test_a_histogram_of_its_own_model_chooses_the_hot_experts(checkpoint, expected, load, tmp_path):
    folder = checkpoint("qwen3_moe")
    model = load(folder, counts=histogram(tmp_path), dynamic=False)
    assert 0 == model.hotsplit.plan.hot[0][0] == model.hotsplit.plan.hot[1][0]
    assert (0, 1, 2, 3) != model.hotsplit.plan.hot[0]
    assert all(torch.equal(*pair) for pair in zip(expected(folder), tiny.play(model), strict=True))


def test_an_unreadable_histogram_is_refused(checkpoint, tmp_path):
    (tmp_path / "hist.json").write_text("{")
    refused(checkpoint("qwen3_moe"), HistogramError, "hist.json", counts=str(tmp_path / "hist.json"))


def test_switched_off_it_runs_stock_and_says_so(checkpoint, caplog):
    folder = checkpoint("qwen3_moe")
    model = hotsplit.load(folder, hot_gib=0.001, enable=False)
    assert not hasattr(model, "hotsplit")
    assert [True] == ["running stock transformers [off]" in message for message in caplog.messages]
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert all(torch.equal(*pair) for pair in zip(tiny.play(stock), tiny.play(model), strict=True))


def test_switched_off_a_dense_model_runs_stock(tmp_path):
    config = transformers.LlamaConfig(**(tiny._BASE | {"head_dim": 16}))
    folder = save_small(tmp_path, transformers.LlamaForCausalLM(config))
    assert not hasattr(hotsplit.load(folder, enable=False), "hotsplit")


def test_a_model_that_fits_runs_stock_and_says_so(checkpoint, caplog):
    folder = checkpoint("qwen3_moe")
    model = hotsplit.load(folder, hot_gib=1)
    assert not hasattr(model, "hotsplit")
    assert [True] == [
        message.endswith("hotsplit is off, running stock transformers [fits]") for message in caplog.messages
    ]
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert all(torch.equal(*pair) for pair in zip(tiny.play(stock), tiny.play(model), strict=True))


def test_without_a_budget_a_small_model_fits(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(budget_module, "memory_limits", limits(8 << 30))
    assert not hasattr(hotsplit.load(checkpoint("qwen3_moe")), "hotsplit")
    assert any("[fits]" in message for message in caplog.messages)


def test_training_is_refused(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=0.5)
    embedded = torch.randn(1, 4, tiny.HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(EngineError, match="hotsplit models only infer: .*torch.no_grad"):
        model(inputs_embeds=embedded)


def test_saving_or_pushing_a_model_without_its_experts_is_refused(checkpoint, load, tmp_path):
    model = load(checkpoint("qwen3_moe"), hot=0.5)
    for save in (model.save_pretrained, model.push_to_hub):
        with pytest.raises(EngineError, match="(save_pretrained|push_to_hub): .*copy the model folder instead"):
            save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_experts_without_banks_are_refused(checkpoint, load):
    load(checkpoint("qwen3_moe"), hot=0.5)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("qwen3_moe"), experts_implementation=hooks.NAME
    )
    with torch.no_grad(), pytest.raises(EngineError, match=r"Qwen3MoeExperts: got no hotsplit banks; .*hotsplit\.load"):
        stock(tiny.prompts()["input_ids"])


def test_a_model_that_was_moved_off_the_cpu_is_refused(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=0.5)
    with pytest.raises(EngineError, match="tokens on meta"), torch.no_grad():
        model.model.layers[0].mlp.experts(torch.zeros(2, tiny.HIDDEN, device="meta"), None, None)


def test_a_checkpoint_that_shrinks_after_its_headers_were_read_is_refused(checkpoint, tmp_path, monkeypatch):
    folder = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    file, real = folder / "model.safetensors", load_module._load_without_experts

    def shrink(*args):
        loaded = real(*args)
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
        return loaded

    monkeypatch.setattr(load_module, "_load_without_experts", shrink)
    with pytest.raises(BankError, match="model.safetensors ended early"):
        hotsplit.load(folder, hot_gib=budget(folder, 1.0), dynamic=False, run_when_fits=True)
