"""Workers that plan, without vLLM: what planning reads of its configuration, and ranks that wait for each other."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from hotsplit.config import HotsplitConfig
from hotsplit.data import tiny_moe_path
from hotsplit.engines.vllm import exchange, planning, room, settings
from hotsplit.engines.vllm.planning import Place
from hotsplit.host import demand
from hotsplit.host.memory import MemoryLimit, MemoryLimits
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.sizes import expert_sizes
from patience import LIMIT_S

LAYERS, E, TOP_K, ROW_BYTES = 4, 32, 4, 49152
"""Of the bundled model."""
ALL_BYTES = LAYERS * E * ROW_BYTES
MAX_MODEL_LEN, MAX_TOKENS = 256, 128
"""Tokens of a request and of a step, at most."""


def gib(num_bytes):
    """As a setting is written."""
    return repr(num_bytes / 2**30)


def model_sizes(*, tp=1):
    """What the experts of the bundled model weigh."""
    return expert_sizes(read_headers(tiny_moe_path()), tp=tp)


def skewed_counts(*, layers=range(LAYERS), tokens=100_000):
    """Decode counts of which every layer's favourites are others."""
    weights = np.array([[1.0 + (e * 7 + layer) % E for e in range(E)] for layer in layers]) ** 3
    counts_LE = np.floor(weights / weights.sum(axis=1, keepdims=True) * tokens * TOP_K)
    counts_LE[:, 0] += tokens * TOP_K - counts_LE.sum(axis=1)
    identity = replace(model_sizes().identity, layers=tuple(layers))
    return Histogram(identity=identity, phases={"decode": PhaseCounts(counts=counts_LE, tokens=tokens)})


def limits_of(num_bytes):
    limit = MemoryLimit(name="a limit", available_bytes=num_bytes, source="a test")
    return MemoryLimits(limits=(limit,))


def vllm_config(
    environ, *, rank=0, tp=1, pp=1, model=None, cuts=None, offload=None, kv_cache_bytes=0, local=None, device="cpu"
):
    """vLLM's configuration as a worker has it.

    Args:
        environ: HOTSPLIT_ variables.
        rank: Of the worker.
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        model: Folder.
        cuts: Decoder layers before which a stage ends; even ones where None.
        offload: vLLM's offload flags.
        kv_cache_bytes: Asked for.
        local: Ranks on this host; all where None.
        device: vLLM's device type.
    """
    folder = Path(model or tiny_moe_path())
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stage = rank // tp
    ends = [*(cuts or [LAYERS * (i + 1) // pp for i in range(pp - 1)]), LAYERS]
    mine = settings.to_additional(HotsplitConfig.from_env(environ), offload=offload or {})
    return SimpleNamespace(
        additional_config={"somebody": "else", settings.KEY: mine},
        model_config=SimpleNamespace(
            model=str(folder),
            model_weights="",
            hf_text_config=SimpleNamespace(**text),
            get_layers_start_end_indices=lambda _: ([0, *ends][stage], ends[stage]),
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.bfloat16,
            use_mla=False,
            quantization=None,
            get_num_layers=lambda _: ends[stage] - [0, *ends][stage],
            get_num_kv_heads=lambda _: text["num_key_value_heads"],
            get_head_size=lambda: text["head_dim"],
        ),
        parallel_config=SimpleNamespace(
            local_world_size=local or tp * pp, tensor_parallel_size=tp, pipeline_parallel_size=pp
        ),
        cache_config=SimpleNamespace(
            kv_cache_memory_bytes=kv_cache_bytes, cache_dtype="auto", gpu_memory_utilization=0.5
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=8),
        device_config=SimpleNamespace(device_type=device),
        place=Place(
            rank=rank,
            tp=tp,
            tp_rank=rank % tp,
            pp=pp,
            stage=stage,
            run_dir=None,
            is_compiled=False,
            num_local=tp * pp,
            device_type=device,
        ),
    )


class Ranks:
    """All ranks of one engine, each on a thread; a rank that others wait for in vain is an error and no deadlock."""

    def __init__(self, monkeypatch, *, memory_bytes=2**40):
        self._local, self._barrier, self._values = threading.local(), None, {}
        monkeypatch.setattr(exchange, "gather_of_all", lambda: self._gather)
        monkeypatch.setattr(planning, "_place", lambda config, run_dir: config.place)
        for module in (room, demand):
            monkeypatch.setattr(module, "memory_limits", lambda: limits_of(memory_bytes))
        monkeypatch.setattr(demand, "free_disk_bytes", lambda _: 2**40)

    def prepare(self, *configs):
        """What every rank decides, in rank order."""
        self._barrier = threading.Barrier(len(configs), timeout=LIMIT_S)
        with ThreadPoolExecutor(len(configs)) as pool:
            told = [pool.submit(self._prepare, config) for config in configs]
        failures = [failure for one in told if (failure := one.exception())]
        for failure in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise failure
        return [one.result() for one in told]

    def _prepare(self, config):
        self._local.rank = config.place.rank
        try:
            return planning.prepare(config, run_dir=None)
        except BaseException:
            self._barrier.abort()
            raise

    def _gather(self, value):
        self._values[self._local.rank] = value
        self._barrier.wait()
        gathered = [self._values[rank] for rank in sorted(self._values)]
        self._barrier.wait()
        return gathered
