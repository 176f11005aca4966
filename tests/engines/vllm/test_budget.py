from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hotsplit.engines.vllm.budget import (
    FastMemory,
    OffloadFlags,
    Parameter,
    default_hot_bytes_vllm,
    freed_bytes,
    from_vllm_config,
    resident_expert_bytes,
)
from hotsplit.errors import BudgetError, UnsupportedEngineError

GIB = 2**30
MIXED = ("self_attn.qkv_proj.weight", "mlp.gate.weight", "mlp.experts.routed_experts.w13_weight",
         "mlp.experts.routed_experts.w2_weight", "mlp.experts.routed_experts.w2_weight_scale",
         "mlp.shared_experts.down_proj.weight", "input_layernorm.weight")  # fmt: skip
SEGMENTS = ("experts", "routed_experts.w2_weight", "w2_weight", "w2", "mlp", "self_attn.qkv_proj", "weight", "nothing")


def parameter(name, num_bytes):
    return Parameter(name=name, num_bytes=num_bytes, is_expert=".experts." in name)


def layers_of(num_layers, **sizes):
    names = {"attention": MIXED[0], "w13": MIXED[2], "w2": MIXED[3], "scale": MIXED[4]}
    return [[parameter(names[key], num_bytes) for key, num_bytes in sizes.items()] for _ in range(num_layers)]


def uva(num_bytes, *segments):
    return OffloadFlags(cpu_offload_gb=num_bytes / GIB, cpu_offload_params=frozenset(segments))


# -- the rules, by hand


def test_without_flags_all_expert_bytes_stay():
    assert 4 * 30 == resident_expert_bytes(layers_of(4, attention=7, w13=20, w2=10), flags=OffloadFlags())


@pytest.mark.parametrize(
    ("limit", "moved"), [(1, 7), (7, 7), (8, 27), (27, 27), (28, 37), (37, 37), (38, 44), (10**6, 4 * 37)]
)
def test_uva_moves_whole_parameters_in_order_until_the_limit_is_reached(limit, moved):
    layers = layers_of(4, attention=7, w13=20, w2=10)
    assert moved == freed_bytes(layers, flags=uva(limit))
    assert max(4 * 30 - moved, 0) == resident_expert_bytes(layers, flags=uva(limit))


def test_uva_passes_over_what_its_segments_do_not_name():
    layers = layers_of(4, attention=7, w13=20, w2=10, scale=1)
    assert 4 * 31 - 20 == resident_expert_bytes(layers, flags=uva(15, "routed_experts.w2_weight"))
    assert 4 * 31 - 4 * 7 == resident_expert_bytes(layers, flags=uva(10**6, "self_attn"))
    assert 4 * 31 == resident_expert_bytes(layers, flags=uva(10**6, "w2"))


def test_more_moved_than_there_are_expert_bytes_leaves_none():
    assert 0 == resident_expert_bytes(layers_of(2, attention=90, w13=20), flags=uva(10**6))


def test_prefetch_moves_the_last_layers_of_a_group_and_takes_buffers():
    layers = layers_of(6, attention=7, w13=20, w2=10)
    flags = OffloadFlags(group_size=3, num_in_group=1, prefetch_step=1)
    assert 2 * 37 - 37 == freed_bytes(layers, flags=flags)
    assert 6 * 30 - 37 == resident_expert_bytes(layers, flags=flags)


def test_prefetch_buffers_that_outweigh_what_was_moved_give_no_more_than_all_experts():
    flags = OffloadFlags(group_size=2, num_in_group=1, prefetch_step=5, params=frozenset({"experts"}))
    layers = layers_of(4, attention=7, w13=20)
    assert 2 * 20 - 5 * 20 == freed_bytes(layers, flags=flags)
    assert 4 * 20 == resident_expert_bytes(layers, flags=flags)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, None),
        ({"cpu_offload_gb": 2}, "uva"),
        ({"group_size": 4}, "prefetch"),
        ({"group_size": 4, "cpu_offload_gb": 2}, "prefetch"),
        ({"group_size": 4, "cpu_offload_gb": 2, "backend": "uva"}, "uva"),
        ({"group_size": 4, "cpu_offload_gb": 2, "backend": "prefetch"}, "prefetch"),
        ({"backend": "uva"}, None),
    ],
)
def test_the_backend_is_the_one_that_the_flags_choose(flags, kind):
    assert kind == OffloadFlags(**flags).kind


def test_an_unknown_backend_is_refused():
    with pytest.raises(UnsupportedEngineError, match="got 'nvme'; wanted one of auto, uva, prefetch"):
        OffloadFlags(backend="nvme")


def test_an_offload_configuration_with_other_fields_is_refused_by_the_field():
    config = SimpleNamespace(offload_config=SimpleNamespace(uva=SimpleNamespace(), prefetch=SimpleNamespace()))
    with pytest.raises(UnsupportedEngineError, match="got no field 'offload_backend'; .*; set HOTSPLIT_HOT_GIB"):
        from_vllm_config(config)


# -- the default budget


def memory_of(available_gib, *, is_gpu=True, kv_gib=4, dense_gib=3):
    return FastMemory(
        available_bytes=int(available_gib * GIB), source="0.9 x 141 GiB of GPU memory", reserve_bytes=2 * GIB,
        kv_cache_bytes=kv_gib * GIB, dense_bytes=dense_gib * GIB, is_gpu=is_gpu,
    )  # fmt: skip


def test_without_flags_it_is_what_reserve_kv_cache_and_dense_weights_leave():
    budget = default_hot_bytes_vllm(memory_of(20), flags=OffloadFlags())
    assert 11 * GIB == budget.num_bytes
    assert (
        "20.000 GiB (0.9 x 141 GiB of GPU memory) - 2.000 GiB reserve - 4.000 GiB KV cache - 3.000 GiB dense weights"
    ) == budget.text


@pytest.mark.parametrize("available_gib", [9, 8.5, 0])
def test_where_nothing_is_left_it_is_zero(available_gib):
    budget = default_hot_bytes_vllm(memory_of(available_gib), flags=OffloadFlags())
    assert 0 == budget.num_bytes
    assert (available_gib < 9) == budget.text.endswith("nothing is left for hot experts")


def test_with_flags_it_is_what_vllm_would_keep_on_the_gpu():
    layers = layers_of(10, attention=GIB, w13=4 * GIB)
    budget = default_hot_bytes_vllm(memory_of(20), flags=OffloadFlags(cpu_offload_gb=8), layers=layers)
    assert 30 * GIB == budget.num_bytes
    assert (
        "40.000 GiB of routed experts - 10.000 GiB that vLLM's uva offloader would free (--cpu-offload-gb 8); dense "
        "weights stay on the GPU"
    ) == budget.text


def test_on_a_cpu_the_flags_do_nothing_and_that_is_said():
    flags = OffloadFlags(group_size=8, num_in_group=2)
    budget = default_hot_bytes_vllm(memory_of(20, is_gpu=False), flags=flags)
    assert 11 * GIB == budget.num_bytes
    assert budget.text.endswith("; vLLM ignores --offload-group-size 8 --offload-num-in-group 2 on a CPU")


def test_flags_without_any_expert_parameter_are_an_error_and_no_budget_of_zero():
    with pytest.raises(BudgetError, match="got --cpu-offload-gb 8 and no expert parameter; set HOTSPLIT_HOT_GIB"):
        default_hot_bytes_vllm(memory_of(20), flags=OffloadFlags(cpu_offload_gb=8))


def test_negative_memory_is_refused_by_name():
    with pytest.raises(BudgetError, match="kv_cache_bytes: got -4294967296; wanted bytes >= 0"):
        memory_of(20, kv_gib=-4)


# -- against vLLM's own offloaders, run over fake CUDA parameters


@st.composite
def trees(draw):
    """Decoder layers as name -> (shape, dtype), every one with some of the usual parameters in some order."""
    shapes = st.tuples(st.integers(1, 9), st.integers(1, 40))
    kinds = st.sampled_from([torch.bfloat16, torch.float32, torch.uint8])
    layers = st.dictionaries(st.sampled_from(MIXED), st.tuples(shapes, kinds), max_size=len(MIXED))
    return draw(st.lists(layers, min_size=1, max_size=7))


def module_of(tree):
    root = torch.nn.Module()
    for name, (shape, dtype) in tree.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        data = torch.empty(shape, dtype=dtype, device="cuda")
        module.register_parameter(leaf, torch.nn.Parameter(data, requires_grad=False))
    return root


def parameters_of(modules, *, prefix=""):
    return [[parameter(prefix + name, p.data.nbytes) for name, p in module.named_parameters()] for module in modules]


def dense_bytes_of(layers):
    return sum(p.num_bytes for layer in layers for p in layer if not p.is_expert)


@pytest.fixture(scope="module")
def uva_module():
    """vLLM's UVA offloader without a GPU: what needs one is replaced, the choice of parameters is its own."""
    module = pytest.importorskip("vllm.model_executor.offloader.uva")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "should_pin_memory", lambda: False)
        patch.setattr(module, "is_uva_available", lambda: True)
        patch.setattr(
            module,
            "get_accelerator_view_from_cpu_tensor",
            lambda cpu: torch.empty(cpu.shape, dtype=cpu.dtype, device="cuda"),
        )
        yield module


@pytest.mark.vllm
@given(trees(), st.integers(0, 20_000), st.frozensets(st.sampled_from(SEGMENTS), max_size=3))
def test_uva_keeps_on_the_gpu_what_it_is_played_to_keep(uva_module, tree, limit, segments):
    with FakeTensorMode():
        modules = [module_of(layer) for layer in tree]
        layers = parameters_of(modules)
        offloader = uva_module.UVAOffloader(limit, cpu_offload_params=set(segments))
        offloader.wrap_modules(module for module in modules)
        kept = [p for module in modules for p in module.parameters() if not hasattr(p, "_vllm_is_uva_offloaded")]
        resident = sum(p.nbytes for p in kept)
    flags = uva(limit, *segments)
    assert max(resident - dense_bytes_of(layers), 0) == resident_expert_bytes(layers, flags=flags)
    assert offloader.cpu_offload_bytes == freed_bytes(layers, flags=flags)


@pytest.mark.vllm
@given(trees(), st.integers(0, 20_000))
def test_uva_without_unified_addresses_moves_the_same(uva_module, tree, limit):
    with FakeTensorMode():
        modules = [module_of(layer) for layer in tree]
        layers = parameters_of(modules)
        offloader = uva_module.UVAOffloader(limit)
        offloader.uva_offloading = False
        offloader.wrap_modules(module for module in modules)
    assert offloader.cpu_offload_bytes == freed_bytes(layers, flags=uva(limit))


@pytest.mark.vllm
@given(trees(), trees(), st.integers(1, 20_000), st.sampled_from([(), ("visual",), ("visual.mlp", "w2_weight")]))
def test_a_tower_that_comes_first_uses_up_the_limit_under_its_own_name(uva_module, tower, tree, limit, segments):
    with FakeTensorMode():
        towers, decoder = [module_of(layer) for layer in tower], [module_of(layer) for layer in tree]
        offloader = uva_module.UVAOffloader(limit, cpu_offload_params=set(segments))
        layers = parameters_of(towers, prefix="visual.") + parameters_of(decoder)
        offloader.wrap_modules((module for module in towers), prefix="visual")
        offloader.wrap_modules(module for module in decoder)
    assert offloader.cpu_offload_bytes == freed_bytes(layers, flags=uva(limit, *segments))


@pytest.fixture(scope="module")
def prefetch_module():
    """vLLM's prefetch offloader without a GPU: no streams, no events, no copies; sizes and buffers are its own."""
    module = pytest.importorskip("vllm.model_executor.offloader.prefetch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "should_pin_memory", lambda: False)
        patch.setattr(torch.cuda, "Stream", SimpleNamespace)
        patch.setattr(torch.cuda, "Event", SimpleNamespace)
        patch.setattr(module._ModuleOffloader, "start_onload_to_static", lambda self: None)
        yield module


@pytest.mark.vllm
@given(trees(), st.data(), st.frozensets(st.sampled_from(SEGMENTS), max_size=3))
def test_prefetch_frees_what_it_is_played_to_free(prefetch_module, tree, data, segments):
    group_size = data.draw(st.integers(1, 5))
    num_in_group, step = data.draw(st.integers(1, group_size)), data.draw(st.integers(1, 3))
    # Parameters of one name share their buffers where they look alike, and in a model they do.
    looks = {name: look for layer in tree for name, look in layer.items()}
    with FakeTensorMode():
        modules = [module_of({name: looks[name] for name in layer}) for layer in tree]
        layers = parameters_of(modules)
        offloader = prefetch_module.PrefetchOffloader(group_size, num_in_group, step, offload_params=set(segments))
        offloader.wrap_modules(module for module in modules)
        offloader.post_init()
    buffer_bytes = offloader.buffer_pool.total_bytes if offloader.buffer_pool else 0
    flags = OffloadFlags(
        group_size=group_size, num_in_group=num_in_group, prefetch_step=step, params=frozenset(segments)
    )
    assert offloader.total_offloaded_bytes - buffer_bytes == freed_bytes(layers, flags=flags)


@pytest.mark.vllm
@pytest.mark.parametrize(("backend", "group_size"), [("auto", 0), ("auto", 4), ("uva", 0), ("uva", 4), ("prefetch", 4)])
@pytest.mark.parametrize("gigabytes", [0, 1.5])
@pytest.mark.filterwarnings("ignore:.*offload fields are set:UserWarning")
def test_the_flags_read_from_vllm_choose_the_offloader_that_vllm_makes(prefetch_module, backend, gigabytes, group_size):
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
    from vllm.model_executor.offloader.base import NoopOffloader, create_offloader
    from vllm.model_executor.offloader.uva import UVAOffloader

    config = OffloadConfig(
        offload_backend=backend,
        uva=UVAOffloadConfig(cpu_offload_gb=gigabytes, cpu_offload_params={"experts"}),
        prefetch=PrefetchOffloadConfig(
            offload_group_size=group_size, offload_num_in_group=2, offload_prefetch_step=3, offload_params={"w2_weight"}
        ),
    )
    flags = from_vllm_config(SimpleNamespace(offload_config=config))
    offloader = create_offloader(config)
    if isinstance(offloader, UVAOffloader):
        assert ("uva" if gigabytes else None) == flags.kind
        assert (offloader.cpu_offload_max_bytes, {"experts"}) == (flags.limit_bytes, flags.cpu_offload_params)
    elif isinstance(offloader, NoopOffloader):
        assert flags.kind is None
    else:
        assert "prefetch" == flags.kind
        assert (group_size, 2, 3, {"w2_weight"}) == (
            flags.group_size, flags.num_in_group, flags.prefetch_step, flags.params,
        )  # fmt: skip
