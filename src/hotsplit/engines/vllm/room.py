"""What fits where on a worker's machine: the default hot budget, and what is refused before and after vLLM starts.

Between the configuration and the plan, by device:

    cpu     hot rows, dense weights, KV cache and reserve share the host's memory, and its ranks; cold rows a disk
    cuda    hot rows, dense weights, KV cache and reserve share one rank's GPU; cold rows the host's memory

How much a GPU has is asked of the driver, here alone, by gpu_memory().
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.vllm import budget, gpu_needs
from hotsplit.engines.vllm import offload as taken
from hotsplit.engines.vllm.layer_parameters import ModelParameters
from hotsplit.errors import BudgetError
from hotsplit.host.demand import COLD_ROWS, HOT_ROWS, RESERVE, HostDemand, require_disk, require_host
from hotsplit.host.memory import memory_limits
from hotsplit.notices import Notice
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import GIB, gib

if TYPE_CHECKING:
    from hotsplit.bank.device_memory import DeviceMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the rows of a plan take on one rank."""

    hot_bytes: int
    """In fast memory, spare rows and all that stays there for all experts counted."""
    cold_bytes: int
    """In slow memory."""


def gpu_memory() -> DeviceMemory:
    """The memory of this worker's GPU as it is now."""
    import torch

    from hotsplit.bank.device_memory import device_memory

    return device_memory(torch.device("cuda", torch.cuda.current_device()))


def default_budget(
    sizes: ExpertSizes,
    *,
    config: HotsplitConfig,
    offload: dict[str, Any],
    parameters: ModelParameters | None,
    vllm_config: Any,
) -> tuple[int, str]:
    """The hot budget of this rank, and one line that says where it comes from.

    Args:
        sizes: Of the experts.
        config: Settings; a budget that was given is the answer.
        offload: vLLM's own offload flags, as the user gave them.
        parameters: What this rank holds, on a GPU; None on a CPU.
        vllm_config: vLLM's configuration.

    Raises:
        BudgetError: Nobody says how much memory there is.
    """
    if config.hot_bytes is not None:
        return config.hot_bytes, f"{variable_name('hot_gib')}, {config.origin('hot_gib')}"
    flags = taken.as_flags(offload)
    if parameters is None:
        memory = _host_memory(sizes, config=config, vllm_config=vllm_config)
        found = budget.default_hot_bytes_vllm(memory, flags=flags)
    else:
        memory = _gpu_memory_for(sizes, config=config, parameters=parameters, vllm_config=vllm_config)
        found = budget.default_hot_bytes_vllm(memory, flags=flags, layers=parameters.layers)
    return found.num_bytes, found.text


def _host_memory(sizes: ExpertSizes, *, config: HotsplitConfig, vllm_config: Any) -> budget.FastMemory:
    limits, num_ranks = memory_limits(), vllm_config.parallel_config.local_world_size
    if limits.available_bytes is None:
        raise BudgetError("the default hot budget", got=str(limits), do="set HOTSPLIT_HOT_GIB")
    return budget.FastMemory(
        available_bytes=limits.available_bytes // num_ranks,
        source=str(limits) if num_ranks == 1 else f"a share of {num_ranks} ranks; {limits}",
        reserve_bytes=config.vram_reserve_bytes // num_ranks,
        kv_cache_bytes=vllm_config.cache_config.kv_cache_memory_bytes or 0,
        dense_bytes=sizes.dense_bytes // num_ranks,
        is_gpu=False,
    )


def _gpu_memory_for(
    sizes: ExpertSizes, *, config: HotsplitConfig, parameters: ModelParameters, vllm_config: Any
) -> budget.FastMemory:
    available, source = _granted(vllm_config)
    asked = vllm_config.cache_config.kv_cache_memory_bytes
    max_tokens = int(vllm_config.model_config.max_model_len)
    needs = gpu_needs.activations(vllm_config, top_k=sizes.identity.top_k or 1, tp=sizes.tp)
    return budget.FastMemory(
        available_bytes=available,
        source=source,
        reserve_bytes=config.vram_reserve_bytes,
        kv_cache_bytes=smallest_kv_cache(vllm_config) if asked is None else asked,
        kv_cache_source=f"about one request of {max_tokens} tokens" if asked is None else "",
        dense_bytes=parameters.dense_bytes,
        activation_bytes=needs.num_bytes,
        is_gpu=True,
    )


def _granted(vllm_config: Any) -> tuple[int, str]:
    """GPU memory that vLLM may take, in bytes and in words."""
    memory, share = gpu_memory(), float(vllm_config.cache_config.gpu_memory_utilization)
    granted = math.ceil(memory.total_bytes * share)
    if memory.free_bytes < granted:
        return memory.free_bytes, f"free of {gib(memory.total_bytes)} of GPU memory"
    return granted, f"{share:g} x {gib(memory.total_bytes)} of GPU memory"


def smallest_kv_cache(vllm_config: Any) -> int:
    """What one request of the greatest length takes of the KV cache, about, in bytes.

    Args:
        vllm_config: vLLM's configuration.
    """
    num_tokens = int(vllm_config.model_config.max_model_len)
    return gpu_needs.request_bytes(gpu_needs.kv_shape(vllm_config), num_tokens=num_tokens)


def require_room(
    rows: Rows, *, sizes: ExpertSizes, config: HotsplitConfig, parameters: ModelParameters | None, vllm_config: Any
) -> list[Notice]:
    """Refuse what this machine cannot hold, with all of its ranks, before anything is allocated.

    Args:
        rows: Of the plan, on each rank.
        sizes: Of the experts.
        config: Settings.
        parameters: What this rank holds, on a GPU; None on a CPU.
        vllm_config: vLLM's configuration.

    Returns:
        What is to be said about where cold rows go.

    Raises:
        BudgetError: They do not fit.
        BankError: The bank folder cannot be used.
    """
    num_ranks = vllm_config.parallel_config.local_world_size
    if parameters is not None:
        dense_bytes = 0 if _is_quantised_while_loading(sizes, vllm_config=vllm_config) else parameters.dense_bytes
        _require_gpu(rows.hot_bytes, dense_bytes=dense_bytes, config=config, vllm_config=vllm_config)
        require_host(HostDemand(items={COLD_ROWS: rows.cold_bytes}), ranks=num_ranks, limits=memory_limits())
        return []
    demand = HostDemand(
        items={
            HOT_ROWS: rows.hot_bytes,
            "dense weights": sizes.dense_bytes // num_ranks,
            "KV cache": vllm_config.cache_config.kv_cache_memory_bytes or 0,
            RESERVE: config.vram_reserve_bytes // num_ranks,
        }
    )
    require_host(demand, ranks=num_ranks, limits=memory_limits())
    return require_disk(config.bank_path, needed=rows.cold_bytes, ranks=num_ranks)


def require_stages(expert_bytes: int, *, num_ranks: int) -> None:
    """In two banks all experts lie in host memory once, while they are loaded: refuse it where they do not fit.

    Args:
        expert_bytes: Of one rank.
        num_ranks: Ranks of this host.

    Raises:
        BudgetError: They do not.
    """
    demand = HostDemand(items={"all experts, while they are loaded into two banks": expert_bytes})
    require_host(demand, ranks=num_ranks, limits=memory_limits())


def _is_quantised_while_loading(sizes: ExpertSizes, *, vllm_config: Any) -> bool:
    """Whether dense weights will be smaller than the checkpoint's, by vLLM's --quantization."""
    return sizes.quantisation is None and getattr(vllm_config.model_config, "quantization", None) is not None


def _require_gpu(hot_bytes: int, *, dense_bytes: int, config: HotsplitConfig, vllm_config: Any) -> None:
    """Refuse hot rows that leave no room for what is certain: dense weights, the reserve, a KV cache that was asked for."""
    granted, source = _granted(vllm_config)
    kv_cache_bytes = vllm_config.cache_config.kv_cache_memory_bytes or 0
    reserve = config.vram_reserve_bytes
    room = granted - dense_bytes - reserve - kv_cache_bytes
    if hot_bytes <= room:
        return
    others = f"{gib(dense_bytes)} of dense weights, a reserve of {gib(reserve)}"
    others += f" and {gib(kv_cache_bytes)} of KV cache" if kv_cache_bytes else ""
    raise BudgetError(
        "the hot budget exceeds GPU memory",
        got=f"{gib(hot_bytes)} of hot rows beside {others}",
        wanted=f"at most {gib(max(room, 0))} of them ({gib(granted)}: {source})",
        do=_cure(room, other="raise --gpu-memory-utilization, or lower HOTSPLIT_VRAM_RESERVE_GIB"),
        room_bytes=max(room, 0),
    )


def require_reserve(config: HotsplitConfig, *, hot_bytes: int, num_ranks: int = 1, available: int | None) -> None:
    """After warm-up, whether the reserve has been kept.

    Args:
        config: Settings.
        hot_bytes: Fast memory taken by hot rows of this rank.
        num_ranks: Ranks that share the memory.
        available: What is left of it for all else: of a GPU, what is free and what vLLM's KV cache took; None for unknown.

    Raises:
        BudgetError: Less is left than the reserve; names the largest budget that fits.
    """
    reserve = config.vram_reserve_bytes
    if available is None or available >= reserve:
        return
    fits = max(hot_bytes - -(-(reserve - available) // num_ranks), 0)
    raise BudgetError(
        "memory left after warm-up",
        got=gib(available),
        wanted=f"the reserve of {gib(reserve)}",
        do=_cure(fits, other="lower HOTSPLIT_VRAM_RESERVE_GIB"),
        room_bytes=fits,
    )


def look_at_kv_cache(num_bytes: int, *, hot_bytes: int, vllm_config: Any) -> list[Notice]:
    """What vLLM has found for its KV cache on a GPU, once it has profiled a step: enough for one request?

    Args:
        num_bytes: Found.
        hot_bytes: GPU memory taken by hot rows of this rank.
        vllm_config: vLLM's configuration.

    Returns:
        A notice where one request of the greatest length may not fit: vLLM knows exactly, and refuses then.

    Raises:
        BudgetError: There is none at all.
    """
    max_tokens = int(vllm_config.model_config.max_model_len)
    wanted = smallest_kv_cache(vllm_config)
    if num_bytes >= wanted or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return []
    fits = hot_bytes - (wanted - num_bytes)
    do = _cure(fits, other="raise --gpu-memory-utilization, or lower --max-model-len")
    if num_bytes <= 0:
        raise BudgetError(
            "GPU memory left for vLLM's KV cache",
            got=f"none ({gib(-num_bytes)} too few)",
            wanted=f"about {gib(wanted)}, one request of {max_tokens} tokens",
            do=do,
            room_bytes=max(fits, 0),
        )
    text = f"vLLM has {gib(num_bytes)} for its KV cache, and one request of {max_tokens} tokens may take {gib(wanted)}"
    return [Notice(name="small-kv-cache", text=f"{text}; {do}", strict=False)]


def _cure(fits: int, *, other: str) -> str:
    """The next step: the largest budget that fits, rounded down so that it does, or something else."""
    shown = f"{math.floor(fits / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")
    return f"set HOTSPLIT_HOT_GIB={shown} or less, or {other}" if fits > 0 else other


def idle_settings(config: HotsplitConfig, *, device_type: str) -> list[Notice]:
    """Settings that were given and have nothing to act on here: silence would look like obedience.

    Args:
        config: Settings.
        device_type: Of the worker.
    """
    is_gpu = device_type == "cuda"
    idle: dict[str, tuple[bool, str]] = {
        "numa_policy": (not is_gpu, "the CPU twin's rows lie in plain memory and a mapped file"),
        "bank_dir": (is_gpu, "cold rows lie in memory that the GPU reads, and in no file"),
        "kernel": (True, "vLLM's own kernels compute the experts"),
        "dyn_max_swaps": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_margin": (
            not config.dynamic or config.dyn_schedule == "adaptive",
            "the adaptive schedule has no margin" if config.dynamic else "nothing swaps in static mode",
        ),
        "dyn_schedule": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_half_life": (not config.dynamic, "nothing swaps in static mode"),
        "objective": (config.plan is not None, "a plan file is used as it is"),
    }
    return [
        Notice(name="no-effect", text=f"{variable_name(name)} has no effect: {reason}", strict=False)
        for name, (is_idle, reason) in idle.items()
        if is_idle and config.origin(name) != "default"
    ]


def rows_of(hot_bytes: int, *, num_cold: Sequence[int], row_bytes: Sequence[int]) -> Rows:
    """What the rows of a plan take.

    Args:
        hot_bytes: In fast memory, all counted.
        num_cold: Experts in slow memory per layer, [L].
        row_bytes: Bytes of one row per layer, [L].
    """
    cold = sum(number * nbytes for number, nbytes in zip(num_cold, row_bytes, strict=True))
    return Rows(hot_bytes=hot_bytes, cold_bytes=cold)
