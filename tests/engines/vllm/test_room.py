"""What fits where, by device: default budgets, what is refused before anything is allocated, and what after."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engines.vllm.planned_ranks import (
    ALL_BYTES,
    LAYERS,
    MAX_MODEL_LEN,
    ROW_BYTES,
    E,
    Ranks,
    gib,
    limits_of,
    model_sizes,
    skewed_counts,
    vllm_config,
)
from hotsplit.bank.device_memory import DeviceMemory
from hotsplit.config import HotsplitConfig
from hotsplit.data import tiny_moe_path
from hotsplit.engines.vllm import memory_watch, padding, room
from hotsplit.engines.vllm.layer_parameters import model_parameters
from hotsplit.engines.vllm.memory_watch import MemoryWatch
from hotsplit.errors import BudgetError
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.planner import PlanOptions, make_plan

GIB, MIB = 2**30, 2**20
HALF = LAYERS * (E // 2 + 1) * ROW_BYTES
PAGE = 4096
PAGES = LAYERS * 2 * PAGE
"""Two split tensors a layer; smaller pages than a GPU's, or this model would be all page edges."""
DENSE = model_sizes().dense_bytes
KV_TOKEN = LAYERS * 2 * 2 * 64 * 2
"""Of the bundled model."""
KV = (MAX_MODEL_LEN + 16) * KV_TOKEN


@pytest.fixture
def log(caplog):
    caplog.set_level("INFO", logger="hotsplit")
    return lambda: "\n".join(caplog.messages)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(free, total) -> what every rank's GPU has from now on."""

    def make(free_bytes, total_bytes=None):
        found = DeviceMemory(free_bytes=free_bytes, total_bytes=total_bytes or 2 * free_bytes)
        monkeypatch.setattr(room, "gpu_memory", lambda: found)

    make(64 * GIB)
    return make


@pytest.fixture
def planned(monkeypatch, gpu, tmp_path):
    """planned(HOT_GIB="1", offload={...}) -> what one rank on a GPU has decided."""

    monkeypatch.setattr(padding, "GPU_PAGE_BYTES", PAGE)

    def make(*, memory_bytes=2**40, tp=1, offload=None, kv_cache_bytes=None, **settings):
        given = {"STATE_DIR": str(tmp_path / "state"), "VRAM_RESERVE_GIB": "0"} | settings
        environ = {f"HOTSPLIT_{name}": value for name, value in given.items()}
        ranks = Ranks(monkeypatch, memory_bytes=memory_bytes)
        more = {"offload": offload, "kv_cache_bytes": kv_cache_bytes, "device": "cuda", "tp": tp}
        return ranks.prepare(*(vllm_config(environ, rank=rank, **more) for rank in range(tp)))[0]

    return make


# -- the default budget of a GPU


def activations_of_the_bundled_model():
    config = vllm_config({"HOTSPLIT_ENABLE": "1"}, device="cuda")
    return room.gpu_needs.activations(config, top_k=4, tp=1).num_bytes


def test_without_flags_it_is_what_the_gpu_leaves_beside_all_else(planned, gpu, log):
    left = PAGES + HALF
    others = DENSE + KV + activations_of_the_bundled_model() + GIB
    gpu(16 * GIB, 2 * (left + others))
    assert left == planned(VRAM_RESERVE_GIB="1").asked_bytes
    assert f"(0.5 x {room.gib(2 * (left + others))} of GPU memory) - 1.000 GiB reserve" in log()
    assert f"KV cache (about one request of {MAX_MODEL_LEN} tokens)" in log()
    assert "for activations" in log()


def test_a_kv_cache_that_was_asked_for_takes_the_place_of_the_smallest(planned, gpu, log):
    others = DENSE + 5 * MIB + activations_of_the_bundled_model()
    gpu(16 * GIB, 2 * (PAGES + HALF + others))
    assert PAGES + HALF == planned(kv_cache_bytes=5 * MIB).asked_bytes
    assert "- 5.0 MiB KV cache - " in log()


def test_what_is_free_counts_where_it_is_less_than_vllm_may_take(planned, gpu, log):
    free = PAGES + HALF + DENSE + KV + activations_of_the_bundled_model()
    gpu(free, 16 * GIB)
    assert PAGES + HALF == planned().asked_bytes
    assert "free of 16.000 GiB of GPU memory" in log()


def test_ranks_have_a_gpu_each_and_share_nothing(planned, gpu):
    gpu(64 * GIB, 128 * GIB)
    one, two = planned().asked_bytes, planned(tp=2).asked_bytes
    assert one <= two < one + DENSE + KV + activations_of_the_bundled_model()


def test_under_offload_flags_it_is_what_vllms_offloader_would_leave(planned, log):
    parameters = model_parameters(read_headers(tiny_moe_path()), sizes=model_sizes(), layers=range(LAYERS))
    one_layer = sum(parameter.num_bytes for parameter in parameters.layers[0])
    prepared = planned(offload={"cpu_offload_gb": one_layer / GIB})
    assert ALL_BYTES - one_layer == prepared.asked_bytes
    assert "vLLM's uva offloader would free" in log()


def test_a_host_counts_no_gpu_and_a_gpu_no_host(planned, gpu):
    gpu(64 * GIB)
    assert planned(memory_bytes=ALL_BYTES).is_stock, "everything fits the GPU; the host's memory was asked for nothing"


# -- the plan of a GPU


def test_page_edges_are_charged_before_the_plan_is_made(planned):
    prepared = planned(HOT_GIB=gib(HALF + PAGES))
    assert [E // 2] * LAYERS == [rows.num_hot for rows in prepared.rows]
    assert PAGES == prepared.stage.fixed_bytes
    sizes, notices = prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF + PAGES - 7)
    assert ([], prepared.expert_bytes) == (notices, sizes.expert_bytes)
    with pytest.raises(BudgetError, match="as they are at start"):
        prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF + PAGES + 7)


def test_a_plan_file_that_counts_no_page_edges_may_exceed_its_budget_by_them_and_that_is_said(planned, tmp_path):
    plan, *_ = make_plan(model_sizes(), histogram=skewed_counts(), budget_bytes=HALF, options=PlanOptions())
    save_plan(plan, tmp_path / "plan.json")
    prepared = planned(PLAN=str(tmp_path / "plan.json"), HOT_GIB=gib(HALF))
    _, notices = prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF + PAGES // 2)
    assert ["page-edges"] == [notice.name for notice in notices]
    with pytest.raises(BudgetError, match="as they are at start"):
        prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF + PAGES + 7)


def test_nothing_hot_charges_no_pages(planned):
    prepared = planned(HOT_GIB="0", DYNAMIC="0")
    assert (0, 0) == (prepared.stage.fixed_bytes, sum(rows.num_hot for rows in prepared.rows))


# -- refused before anything is allocated


def test_hot_rows_beyond_the_gpu_are_refused_with_the_largest_budget_that_fits(planned, gpu):
    gpu(64 * GIB, 2 * (3 * MIB + DENSE + GIB))
    with pytest.raises(
        BudgetError, match="the hot budget exceeds GPU memory: got .* a reserve of 1.000 GiB;"
    ) as caught:
        planned(HOT_GIB=gib(HALF + PAGES), VRAM_RESERVE_GIB="1")
    assert 3 * MIB == caught.value.room_bytes
    assert "set HOTSPLIT_HOT_GIB=0.002929 or less, or raise --gpu-memory-utilization" in str(caught.value)


def test_a_kv_cache_that_was_asked_for_needs_room_beside_hot_rows(planned, gpu):
    gpu(64 * GIB, 2 * (HALF + PAGES + DENSE + MIB))
    planned(HOT_GIB=gib(HALF + PAGES), kv_cache_bytes=MIB)
    with pytest.raises(BudgetError, match="and 2.0 MiB of KV cache"):
        planned(HOT_GIB=gib(HALF + PAGES), kv_cache_bytes=2 * MIB)


def test_dense_weights_that_vllm_quantises_while_loading_are_not_counted_as_they_lie(planned, gpu, monkeypatch):
    gpu(64 * GIB, 2 * (HALF + PAGES + DENSE // 2))
    with pytest.raises(BudgetError, match="the hot budget exceeds GPU memory"):
        planned(HOT_GIB=gib(HALF + PAGES))
    monkeypatch.setattr(room, "_is_quantised_while_loading", lambda sizes, vllm_config: True)
    planned(HOT_GIB=gib(HALF + PAGES))


@pytest.mark.parametrize(
    ("of_checkpoint", "asked", "is_so"), [(None, "fp8", True), ("fp8", "fp8", False), (None, None, False)]
)
def test_what_is_quantised_while_loading_is_told_by_flag_and_checkpoint(of_checkpoint, asked, is_so):
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=asked))
    sizes = SimpleNamespace(quantisation=of_checkpoint)
    assert is_so == room._is_quantised_while_loading(sizes, vllm_config=config)


def test_the_host_must_hold_cold_rows_of_all_ranks_and_nothing_else(planned):
    cold = LAYERS * E // 2 * ROW_BYTES
    planned(HOT_GIB=gib(HALF + PAGES), memory_bytes=cold)
    with pytest.raises(
        BudgetError, match="the run exceeds host memory: got cold rows 3.0 MiB.*raise HOTSPLIT_HOT_GIB by"
    ):
        planned(HOT_GIB=gib(HALF + PAGES), memory_bytes=cold - 1)


# -- settings


@pytest.mark.parametrize(("name", "value", "on_cpu", "on_gpu"), [
    ("NUMA_POLICY", "bind", True, False), ("BANK_DIR", "/x", False, True), ("KERNEL", "exact", True, True),
])  # fmt: skip
def test_settings_without_effect_are_named_by_device(name, value, on_cpu, on_gpu):
    config = HotsplitConfig.from_env({f"HOTSPLIT_{name}": value})
    for device_type, is_idle in (("cpu", on_cpu), ("cuda", on_gpu)):
        found = room.idle_settings(config, device_type=device_type)
        assert [f"HOTSPLIT_{name} has no effect"] * is_idle == [notice.text.split(":")[0] for notice in found]


# -- after vLLM has profiled a step


def kv_config(*, asked=None):
    return vllm_config({"HOTSPLIT_ENABLE": "1"}, device="cuda", kv_cache_bytes=asked)


@pytest.mark.parametrize(("num_bytes", "asked"), [(KV, None), (2 * KV, None), (1, 1)])
def test_a_kv_cache_that_is_large_enough_or_was_asked_for_is_no_notice(num_bytes, asked):
    assert [] == room.look_at_kv_cache(num_bytes, hot_bytes=GIB, vllm_config=kv_config(asked=asked))


def test_a_kv_cache_below_one_request_is_said_with_the_budget_that_leaves_it():
    (notice,) = room.look_at_kv_cache(KV // 2, hot_bytes=GIB, vllm_config=kv_config())
    assert "small-kv-cache" == notice.name
    assert f"one request of {MAX_MODEL_LEN} tokens may take {room.gib(KV)}" in notice.text
    assert "set HOTSPLIT_HOT_GIB=0.99974 or less" in notice.text


def test_no_kv_cache_at_all_stops_the_start_with_the_budget_that_leaves_one():
    with pytest.raises(BudgetError, match="KV cache: got none .*; set HOTSPLIT_HOT_GIB=") as caught:
        room.look_at_kv_cache(-MIB, hot_bytes=GIB, vllm_config=kv_config())
    assert GIB - KV - MIB == caught.value.room_bytes


def test_where_no_budget_would_leave_one_that_is_what_is_said():
    with pytest.raises(BudgetError, match="room?.*; raise --gpu-memory-utilization, or lower --max-model-len$|too few"):
        room.look_at_kv_cache(-MIB, hot_bytes=MIB, vllm_config=kv_config())


def watch(*, is_on_gpu=True, **settings):
    config = HotsplitConfig.from_env(
        {f"HOTSPLIT_{name}": value for name, value in settings.items()} or {"HOTSPLIT_ENABLE": "1"}
    )
    return MemoryWatch(config, is_on_gpu=is_on_gpu, num_ranks=2, hot_bytes=lambda: GIB)


def test_the_kv_cache_is_looked_at_on_a_gpu_alone(caplog):
    for is_on_gpu in (False, True):
        watch(is_on_gpu=is_on_gpu).look_at_kv_cache(KV - 1, vllm_config=kv_config())
        assert is_on_gpu == ("[small-kv-cache]" in caplog.text)


def test_where_the_model_runs_unchanged_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(room, "gpu_memory", None)
    monkeypatch.setattr(memory_watch, "memory_limits", None)
    stock = MemoryWatch(None, is_on_gpu=False, num_ranks=1, hot_bytes=lambda: 1 // 0)
    stock.look_at_kv_cache(0, vllm_config=None)
    with stock.making_kv_cache():
        pass
    stock.require_reserve()


# -- after warm-up


def reserved(monkeypatch, *, available, num_ranks=1, hot_bytes, reserve="2"):
    monkeypatch.setattr(memory_watch, "memory_limits", lambda: limits_of(available))
    config = HotsplitConfig.from_env({"HOTSPLIT_VRAM_RESERVE_GIB": reserve})
    MemoryWatch(config, is_on_gpu=False, num_ranks=num_ranks, hot_bytes=lambda: hot_bytes).require_reserve()


@pytest.mark.parametrize("available", [2 * 2**30, 3 * 2**30, None])
def test_a_reserve_that_is_kept_or_not_known_is_no_error(monkeypatch, available):
    reserved(monkeypatch, available=available, hot_bytes=2**30)


@pytest.mark.parametrize(
    ("num_ranks", "hot_bytes", "fits"),
    [(1, 5 * 2**30, "4.5"), (2, 5 * 2**30, "4.75"), (1, 2**29 + 10**7, "0.009313"), (1, 100 * 2**30 - 7, "99.499999")],
)
def test_a_reserve_that_is_not_kept_names_the_largest_budget_that_fits(monkeypatch, num_ranks, hot_bytes, fits):
    with pytest.raises(BudgetError, match=f"set HOTSPLIT_HOT_GIB={fits} or less, or lower HOTSPLIT_VRAM_RES") as caught:
        reserved(monkeypatch, available=3 * 2**29, hot_bytes=hot_bytes, num_ranks=num_ranks)
    assert hot_bytes - 2**29 // num_ranks == caught.value.room_bytes
    assert int(float(fits) * 2**30) <= caught.value.room_bytes < int((float(fits) + 1e-6) * 2**30) + 1
    assert "got 1.500 GiB; wanted the reserve of 2.000 GiB" in str(caught.value)


def test_a_reserve_that_no_budget_keeps_names_the_reserve_alone(monkeypatch):
    with pytest.raises(BudgetError, match=r"GiB; lower HOTSPLIT_VRAM_RESERVE_GIB$"):
        reserved(monkeypatch, available=2**29, hot_bytes=2**30)


def test_on_a_gpu_the_reserve_is_the_gpus_and_what_the_kv_cache_took_counts(monkeypatch):
    looks = [3 * GIB, GIB, GIB]
    monkeypatch.setattr(memory_watch, "memory_limits", None)
    monkeypatch.setattr(room, "gpu_memory", lambda: DeviceMemory(free_bytes=looks.pop(0), total_bytes=9 * GIB))
    watched = watch(VRAM_RESERVE_GIB="3")
    with watched.making_kv_cache():
        pass
    watched.require_reserve()
    looks.append(GIB - 1)
    with pytest.raises(BudgetError, match="the reserve of 3.000 GiB"):
        watched.require_reserve()
