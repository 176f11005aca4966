"""What is not served is refused with what, why and the way out; and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hotsplit.engines.vllm import refusals
from hotsplit.engines.vllm.refusals import LOAD_FORMATS, MAX_ROWS, REFUSALS, require_arguments, require_rows
from hotsplit.errors import UnsupportedEngineError

_PARALLEL = {
    "enable_eplb": False,
    "enable_expert_parallel": False,
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "use_sequence_parallel_moe": False,
    "use_ubatching": False,
    "distributed_executor_backend": "mp",
}
_PLAIN = {
    "model_config": {"is_moe": True, "enable_sleep_mode": False},
    "parallel_config": _PARALLEL,
    "load_config": {"load_format": "auto"},
    "device_config": {"device_type": "cpu"},
    "cache_config": {"kv_cache_memory_bytes": 2**30},
}


def config(section=None, **values):
    """A vLLM configuration that is served, but for these values."""
    parts = {name: SimpleNamespace(**(part | (values if name == section else {}))) for name, part in _PLAIN.items()}
    top = {"lora_config": None, "weight_transfer_config": None} | ({} if section else values)
    return SimpleNamespace(**parts, **top)


class RayDistributedExecutor:
    """An executor may be given as a class."""


class MultiprocExecutor:
    """This one is served."""


ASKING = {
    "a model without routed experts": config("model_config", is_moe=False),
    "--enable-eplb": config("parallel_config", enable_eplb=True),
    "--enable-expert-parallel": config("parallel_config", enable_expert_parallel=True),
    "--data-parallel-size above 1": config("parallel_config", data_parallel_size=2),
    "prefill context parallelism": config("parallel_config", prefill_context_parallel_size=2),
    "sequence-parallel MoE": config("parallel_config", use_sequence_parallel_moe=True),
    "--enable-dbo or micro-batches": config("parallel_config", use_ubatching=True),
    "--distributed-executor-backend ray": config("parallel_config", distributed_executor_backend="ray"),
    "--enable-lora": config(lora_config=SimpleNamespace()),
    "--enable-sleep-mode": config("model_config", enable_sleep_mode=True),
    "weight transfer": config(weight_transfer_config=SimpleNamespace()),
    "this --load-format": config("load_config", load_format="dummy"),
    "no size for the KV cache": config("cache_config", kv_cache_memory_bytes=None),
    "a device other than the CPU and NVIDIA's GPUs": config("device_config", device_type="xpu"),
    "an AMD GPU": config("device_config", device_type="cuda"),
}
"""What is refused -> a configuration that asks for it and for nothing else."""


@pytest.fixture
def rocm(monkeypatch):
    """torch as AMD's builds call themselves; without it a GPU is NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", "7.0")


def refused(vllm_config):
    with pytest.raises(UnsupportedEngineError) as caught:
        refusals.require_supported(vllm_config)
    return caught.value


def test_a_plain_configuration_is_served():
    refusals.require_supported(config())


def test_an_nvidia_gpu_is_served_also_without_a_size_for_its_kv_cache():
    on_gpu = config("device_config", device_type="cuda")
    on_gpu.cache_config.kv_cache_memory_bytes = None
    refusals.require_supported(on_gpu)


@pytest.mark.parametrize("device_type", ["xpu", "tpu", "mps", ""])
def test_devices_without_a_memory_for_rows_are_refused(device_type):
    assert refused(config("device_config", device_type=device_type)).what.startswith("a device other than the CPU")


@pytest.mark.parametrize(("value", "is_refused"), [(None, False), ("1", False), ("0", True), (" 0 ", True)])
def test_a_padding_mask_that_nobody_keeps_is_refused_on_a_gpu_alone(value, is_refused):
    environ = {} if value is None else {refusals.SKIP_PADDING: value}
    refusals.require_environment(environ, device_type="cpu")
    if is_refused:
        with pytest.raises(UnsupportedEngineError, match="every token would be padding; leave VLLM_MOE_SKIP_PADDING"):
            refusals.require_environment(environ, device_type="cuda")
    else:
        refusals.require_environment(environ, device_type="cuda")


def test_a_kernel_that_turns_out_to_route_inside_is_refused_by_its_layer():
    modules = [
        SimpleNamespace(layer_name=f"model.layers.{i}.mlp.experts", quant_method=SimpleNamespace(is_monolithic=i == 1))
        for i in range(2)
    ]
    refusals.require_modular(modules[:1])
    with pytest.raises(UnsupportedEngineError, match="layers.1.mlp.experts: SimpleNamespace: got a monolithic kernel"):
        refusals.require_modular(modules)


def test_every_refusal_has_a_configuration_that_asks_for_it():
    assert [refusal.what for refusal in REFUSALS] == list(ASKING)


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("what", ASKING)
def test_what_is_asked_for_is_refused_and_by_no_other_refusal(what):
    assert [what] == [refusal.what for refusal in REFUSALS if refusal.applies(ASKING[what])]


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("what", ASKING)
def test_the_error_says_what_why_and_the_way_out(what):
    error = refused(ASKING[what])
    (refusal,) = [one for one in REFUSALS if one.what == what]
    assert (what, refusal.why, refusal.do) == (error.what, error.got, error.do)
    assert f"{what}: got {refusal.why}; {refusal.do}" == str(error)
    assert min(len(refusal.why), len(refusal.do)) > 10


def test_of_two_reasons_the_first_is_told():
    both = config("parallel_config", enable_eplb=True, enable_expert_parallel=True)
    assert "--enable-eplb" == refused(both).what


@pytest.mark.parametrize(
    ("backend", "is_refused"),
    [
        ("ray", True),
        (RayDistributedExecutor, True),
        ("vllm.v1.executor.ray_executor.RayDistributedExecutor", True),
        ("mp", False),
        ("uni", False),
        (MultiprocExecutor, False),
        (None, False),
    ],
)
def test_ray_is_known_by_name_and_by_class(backend, is_refused):
    found = config("parallel_config", distributed_executor_backend=backend)
    assert is_refused == any(refusal.applies(found) for refusal in REFUSALS)


@pytest.mark.parametrize("load_format", sorted(LOAD_FORMATS))
def test_load_formats_that_ask_for_rows_are_served(load_format):
    refusals.require_supported(config("load_config", load_format=load_format))


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "gguf", "bitsandbytes", "tensorizer", "mine", None])
def test_every_other_load_format_is_refused(load_format):
    assert "this --load-format" == refused(config("load_config", load_format=load_format)).what


def test_a_release_that_knows_no_weight_transfer_is_served():
    without = config()
    del without.weight_transfer_config
    refusals.require_supported(without)


_ARGUMENTS = {
    "enable_eplb": False,
    "prefill_context_parallel_size": 1,
    "enable_dbo": False,
    "ubatch_size": 0,
    "distributed_executor_backend": None,
    "enable_sleep_mode": False,
}
ASKED = {
    "enable_eplb": (True, "--enable-eplb"),
    "prefill_context_parallel_size": (2, "prefill context parallelism"),
    "enable_dbo": (True, "--enable-dbo or micro-batches"),
    "ubatch_size": (2, "--enable-dbo or micro-batches"),
    "distributed_executor_backend": ("ray", "--distributed-executor-backend ray"),
    "enable_sleep_mode": (True, "--enable-sleep-mode"),
}
"""Argument -> value, and what is refused: vLLM may switch it off, or fail, before there is a configuration."""


def test_plain_arguments_are_served():
    require_arguments(SimpleNamespace(**_ARGUMENTS))


@pytest.mark.parametrize("name", ASKED)
def test_what_arguments_ask_for_is_refused_before_vllm_answers(name):
    value, what = ASKED[name]
    arguments = SimpleNamespace(**_ARGUMENTS | {name: value})
    assert [what] == [refusal.what for refusal in REFUSALS if refusal.asked(arguments)]
    with pytest.raises(UnsupportedEngineError, match=what):
        require_arguments(arguments)


@pytest.mark.parametrize("num_rows", [1, 129, MAX_ROWS])
def test_rows_up_to_the_most_that_kernels_take_are_served(num_rows):
    require_rows(num_rows)


def test_one_row_more_is_refused_with_both_ways_out():
    with pytest.raises(
        UnsupportedEngineError, match=r"got 993; wanted at most 992.*HOTSPLIT_DYNAMIC=0.*unset"
    ) as caught:
        require_rows(MAX_ROWS + 1)
    assert 992 == MAX_ROWS
    assert "rows of a layer" == caught.value.what


# -- the same on vLLM's own configuration, as its CPU build makes it


def on_vllm(test):
    """Marks a test that needs vLLM, whose own imports give warnings."""
    return pytest.mark.vllm(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture
def arguments(tiny_moe, monkeypatch):
    """arguments(enable_lora=True) -> vLLM's EngineArgs for the bundled model."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    return lambda **given: arg_utils.EngineArgs(model=str(tiny_moe), max_model_len=64, **given)


@on_vllm
@pytest.mark.parametrize("given", [{}, {"tensor_parallel_size": 2}, {"load_format": "safetensors"}])
def test_vllms_own_plain_configuration_is_served(arguments, given):
    made = arguments(**given)
    require_arguments(made)
    refusals.require_supported(made.create_engine_config())


@on_vllm
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"data_parallel_size": 2}, "--data-parallel-size above 1"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"load_format": "dummy"}, "this --load-format"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "weight transfer"),
    ],
)
def test_what_vllms_own_configuration_asks_for_is_refused(arguments, given, what):
    made = arguments(**given)
    require_arguments(made)
    assert what == refused(made.create_engine_config()).what


@on_vllm
@pytest.mark.parametrize("name", ASKED)
def test_what_vllm_switches_off_or_fails_on_by_itself_is_refused_before(arguments, name):
    value, what = ASKED[name]
    with pytest.raises(UnsupportedEngineError, match=what):
        require_arguments(arguments(**{name: value}))


@on_vllm
def test_vllm_switches_two_batch_overlap_off_without_an_error(arguments):
    """So its configuration alone cannot tell that it was asked for; if this fails, the check of arguments may go."""
    refusals.require_supported(arguments(enable_dbo=True).create_engine_config())


@on_vllm
def test_every_argument_that_is_looked_at_has_the_plain_value_by_default(arguments):
    made = arguments()
    assert _ARGUMENTS == {name: getattr(made, name) for name in _ARGUMENTS}
