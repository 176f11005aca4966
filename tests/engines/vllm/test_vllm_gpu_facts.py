"""What hotsplit relies on in vLLM's code for GPUs, as far as that can be looked at without one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotsplit.engines.vllm.refusals import SKIP_PADDING

vllm = pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def source(path):
    return (Path(vllm.__file__).parent / path).read_text(encoding="utf-8")


def test_the_first_model_runner_writes_its_padding_mask_in_place():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(is_padding=torch.zeros(16, dtype=torch.bool))
    masks = [GPUModelRunner._prepare_padding_mask(runner, real, padded) for real, padded in ((3, 8), (8, 8), (0, 8))]
    assert {runner.is_padding.data_ptr()} == {mask.data_ptr() for mask in masks}, "a captured graph holds its address"
    assert [True] * 8 == masks[0].tolist(), "and so sees what was written last"


def test_the_second_model_runner_has_one_mask_too_and_fills_it_for_every_step_unless_told_not_to():
    assert re.search(r"self\.is_padding = torch\.zeros\(max_num_tokens", source("v1/worker/gpu/input_batch.py"))
    runner = source("v1/worker/gpu/model_runner.py")
    fill = r"is_padding = self\.input_buffers\.is_padding\[:\w+\]\s+if envs\.(\w+):\s+is_padding\[:num_tokens\]\.fill_\(False\)"
    (switch,) = re.findall(fill, runner)
    assert SKIP_PADDING == switch
    assert "input_buffers.is_padding.fill_(True)" in source("v1/worker/gpu/cudagraph_utils.py"), "what capture leaves"


def test_on_a_gpu_moe_layers_are_opaque_to_compilation(monkeypatch):
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    platform = SimpleNamespace(is_tpu=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr(moe_runner, "current_platform", platform)
    entry = moe_runner.MoERunner._select_forward(SimpleNamespace(_shared_experts=None))
    assert torch.ops.vllm.moe_forward is entry


def test_dummy_runs_and_warm_up_do_not_come_through_the_wrapper_of_the_worker():
    from vllm.v1.worker.gpu_worker import Worker

    warm_up = r"warmup_kernels\(\s*self\.model_runner, self\.execute_model, self\.sample_tokens"
    assert re.search(warm_up, source("v1/worker/gpu_worker.py")), "the worker's own, not wrapped"
    assert "self.model_runner._dummy_run" in inspect.getsource(Worker.execute_dummy_batch)


def test_the_profiler_asks_the_driver_what_is_free_and_so_sees_rows_that_are_not_torchs():
    from vllm.utils import mem_utils

    text = inspect.getsource(mem_utils.memory_profiling)
    assert "result.before_create.free_memory - result.after_profile.free_memory" in text
    assert "result.non_kv_cache_memory = result.total_consumed + result.transient_peak_headroom" in text


def test_padding_that_the_router_leaves_out_has_the_id_that_the_route_op_lets_be():
    text = source("model_executor/layers/fused_moe/router/grouped_topk_router.py")
    assert "topk_ids.masked_fill(is_padding, -1)" in text
