"""Everything a worker decides before its model is built: which experts are hot, and whether they fit.

    vllm_config -> settings, headers -> sizes -> budget (one for all ranks) -> plan -> this stage's rows

All ranks make the same plan from the same files; its hash is compared before anything is loaded.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.bank.rows import LayerRows, place
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.vllm import budget, exchange, padding, refusals, settings
from hotsplit.engines.vllm import offload as taken
from hotsplit.errors import BudgetError, EngineError, PlanMismatchError
from hotsplit.host.demand import HostDemand, require_disk, require_host
from hotsplit.host.memory import memory_limits
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import read_headers, require_loadable
from hotsplit.plan.choose import PlanChoice, PlanRequest, choose_plan, read_counts
from hotsplit.plan.planfile import plan_hash
from hotsplit.plan.planner import PlanOptions
from hotsplit.plan.rebalance import RebalanceOptions, thrash_notice
from hotsplit.plan.sizes import ExpertSizes, expert_sizes
from hotsplit.plan.stage import StagePlan, require_same_hash, revalidate, smallest_budget, stage_sizes
from hotsplit.units import GIB, gib

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker stands among the others."""

    rank: int
    """Of the worker, over all stages."""
    tp: int
    """Tensor-parallel size."""
    tp_rank: int
    """In the tensor-parallel group."""
    pp: int
    """Pipeline stages."""
    stage: int
    """Its pipeline stage."""
    run_dir: Path | None
    """Folder for snapshots."""
    is_compiled: bool
    """Whether vLLM compiles the model."""
    device_type: str = "cpu"
    """Of the worker: "cpu" or "cuda"."""
    num_local: int = 1
    """Ranks on this host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What was decided."""

    config: HotsplitConfig
    """Settings."""
    place: Place
    """Which worker this is."""
    sizes: ExpertSizes
    """Of this stage's layers."""
    is_stock: bool
    """Whether every expert fits: the model then runs unchanged."""
    plan_choice: PlanChoice | None = None
    """The plan and where it comes from; None where the model runs unchanged."""
    asked_bytes: int = 0
    """The budget as asked for, before it was capped to what there is."""

    @property
    def choice(self) -> PlanChoice:
        """The plan and where it comes from."""
        if self.plan_choice is None:
            raise EngineError("the plan of this worker", got="a model that runs unchanged")
        return self.plan_choice

    @property
    def stage(self) -> StagePlan:
        """This worker's part of the plan."""
        return self.choice.part

    @property
    def rows(self) -> tuple[LayerRows, ...]:
        """The rows of this stage's layers."""
        num_experts = self.sizes.identity.num_experts or 0
        dynamic = self.config.dynamic
        return tuple(place(hot, num_experts=num_experts, spare=dynamic, inclusive=False) for hot in self.stage.hot)

    @property
    def expert_bytes(self) -> int:
        """Bytes of this stage's experts on this rank."""
        return self.sizes.expert_bytes

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.sizes.identity.top_k or 1

    @property
    def rebalance(self) -> RebalanceOptions:
        """Margin, swaps, half-life."""
        config = self.config
        return RebalanceOptions(
            half_life=config.dyn_half_life, margin=config.dyn_margin, max_swaps=config.dyn_max_swaps
        )

    @property
    def is_learning(self) -> bool:
        """Whether this rank saves what it learns: one of each stage does, since all of a group see the same."""
        return self.config.dynamic and self.config.learned == "use" and self.place.tp_rank == 0

    def with_real_rows(self, row_bytes: Sequence[int], *, hot_bytes: int) -> tuple[ExpertSizes, list[Notice]]:
        """The sizes as the engine has made them, checked against the budget again.

        Args:
            row_bytes: Of this stage's layers, all tensors that move, [L].
            hot_bytes: Fast memory taken.

        Raises:
            BudgetError: Rows that grew do not fit.
        """
        stage, dynamic = self.stage, self.config.dynamic
        fixed = max(hot_bytes - stage.needed_bytes(dynamic=dynamic, row_bytes=row_bytes, fixed_bytes=0), 0)
        notices = revalidate(
            stage,
            row_bytes=row_bytes,
            fixed_bytes=fixed,
            budget_bytes=max(self.asked_bytes, stage.budget_bytes),
            dynamic=dynamic,
        )
        return replace(self.sizes, row_bytes=np.array(row_bytes, dtype=np.int64)), notices


def prepare(vllm_config: Any, *, run_dir: str | None) -> Prepared:
    """Decide everything, before anything is allocated.

    Args:
        vllm_config: vLLM's configuration, as this worker has it.
        run_dir: Folder for snapshots.

    Raises:
        HotsplitError: An input is wrong, ranks disagree, or nothing fits.
    """
    config, offload = settings.from_additional(vllm_config.additional_config)
    place_here = _place(vllm_config, run_dir=run_dir)
    if place_here.rank == 0:
        _say_settings(config)
    checkpoint = read_headers(_model_folder(vllm_config))
    require_loadable(checkpoint)
    sizes = padding.as_padded(expert_sizes(checkpoint, tp=place_here.tp), vllm_config=vllm_config)
    gather = exchange.gather_of_all()
    asked, line = _budget(sizes, config=config, offload=offload, vllm_config=vllm_config)
    asked, notice = smallest_budget(gather(asked))
    _say([notice] if notice else [])
    logger.info("hotsplit: budget per rank: %s (%s)", gib(asked), line)
    mine = stage_sizes(sizes, _stage_layers(sizes, vllm_config=vllm_config))
    stock = Prepared(config=config, place=place_here, sizes=mine, is_stock=True)
    # Of all ranks or of none: a stage of fewer layers may fit where another does not, and that one waits for its plan.
    if all(gather(config.plan is None and asked >= mine.expert_bytes)):
        text = f"all routed experts of this rank fit ({gib(mine.expert_bytes)} of {gib(asked)}): they run stock"
        _say([Notice(name="fits", text=text, strict=False)])
        return stock
    choice = choose_plan(sizes, request=_request(config, stage=place_here.stage, pp=place_here.pp, budget_bytes=asked))
    prepared = Prepared(
        config=config, place=place_here, sizes=mine, is_stock=False, plan_choice=choice, asked_bytes=asked
    )
    require_same_hash(gather(plan_hash(choice.plan)))
    _require_layers(prepared)
    if not mine.identity.layers:
        logger.info("hotsplit: pipeline stage %d has no routed experts", place_here.stage)
        return stock
    for rows in prepared.rows:
        refusals.require_rows(rows.num_rows)
    _require_room(prepared, vllm_config=vllm_config)
    _say([*choice.notices, *_idle(config), *_thrash(prepared), *_unwritable(prepared)])
    # Compiled code depends on the numbers of rows: they belong into vLLM's compile-cache key.
    text = settings.rows_text([rows.num_rows for rows in prepared.rows])
    vllm_config.additional_config[settings.KEY] = {**vllm_config.additional_config[settings.KEY], "rows": text}
    return prepared


def precheck(vllm_config: Any) -> None:
    """Find what is wrong with the files in the process that starts: a worker's error is buried under vLLM's own.

    Hub models that are not here yet are left to the workers, and so is everything that needs the device.

    Args:
        vllm_config: vLLM's configuration, settings included.

    Raises:
        HotsplitError: A file is unreadable, of another model, or nothing fits the budget that was given.
    """
    folder = Path(vllm_config.model_config.model_weights or vllm_config.model_config.model)
    if not folder.is_dir():
        return
    config, _ = settings.from_additional(vllm_config.additional_config)
    parallel = vllm_config.parallel_config
    checkpoint = read_headers(folder)
    require_loadable(checkpoint)
    sizes = padding.as_padded(expert_sizes(checkpoint, tp=parallel.tensor_parallel_size), vllm_config=vllm_config)
    budget_bytes = sizes.expert_bytes if config.hot_bytes is None else config.hot_bytes
    if config.plan is None and budget_bytes >= sizes.expert_bytes:
        read_counts(config.counts, sizes=sizes)
        return
    request = _request(config, stage=0, pp=parallel.pipeline_parallel_size, budget_bytes=budget_bytes)
    choose_plan(sizes, request=request)


def require_reserve(config: HotsplitConfig, *, hot_bytes: int, num_ranks: int = 1) -> None:
    """After warm-up, whether the reserve has been kept.

    Args:
        config: Settings.
        hot_bytes: Fast memory taken by hot rows of this rank.
        num_ranks: Ranks that share this host's memory.

    Raises:
        BudgetError: Less is left than the reserve; names the largest budget that fits.
    """
    available = memory_limits().available_bytes
    reserve = config.vram_reserve_bytes
    if available is None or available >= reserve:
        return
    fits = max(hot_bytes - -(-(reserve - available) // num_ranks), 0)
    shown = f"{math.floor(fits / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")
    raise BudgetError(
        "memory left after warm-up",
        got=gib(available),
        wanted=f"the reserve of {gib(reserve)}",
        do=(f"set HOTSPLIT_HOT_GIB={shown} or less, or " if fits else "") + "lower HOTSPLIT_VRAM_RESERVE_GIB",
        room_bytes=fits,
    )


def _place(vllm_config: Any, *, run_dir: str | None) -> Place:
    from vllm.config import CompilationMode
    from vllm.distributed import get_pp_group, get_tp_group

    parallel, tp, pp = vllm_config.parallel_config, get_tp_group(), get_pp_group()
    return Place(
        rank=parallel.rank,
        tp=tp.world_size,
        tp_rank=tp.rank_in_group,
        pp=pp.world_size,
        stage=pp.rank_in_group,
        run_dir=Path(run_dir) if run_dir else None,
        is_compiled=vllm_config.compilation_config.mode != CompilationMode.NONE,
        device_type=str(vllm_config.device_config.device_type),
        num_local=parallel.local_world_size,
    )


def _model_folder(vllm_config: Any) -> Path:
    """The checkpoint's folder; of a hub model, where vLLM itself keeps it."""
    model = vllm_config.model_config.model_weights or vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model)
    from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

    patterns = ["*.safetensors", "*.safetensors.index.json", "config.json"]
    download_dir, revision = vllm_config.load_config.download_dir, vllm_config.model_config.revision
    for pattern in patterns:  # it stops at the first pattern that matches
        folder = download_weights_from_hf(model, download_dir, [pattern], revision)
    return Path(folder)


def _budget(
    sizes: ExpertSizes, *, config: HotsplitConfig, offload: dict[str, Any], vllm_config: Any
) -> tuple[int, str]:
    """Bytes on this rank, and one line that says where they come from."""
    if config.hot_bytes is not None:
        return config.hot_bytes, f"{variable_name('hot_gib')}, {config.origin('hot_gib')}"
    limits, num_ranks = memory_limits(), vllm_config.parallel_config.local_world_size
    if limits.available_bytes is None:
        raise BudgetError("the default hot budget", got=str(limits), do="set HOTSPLIT_HOT_GIB")
    memory = budget.FastMemory(
        available_bytes=limits.available_bytes // num_ranks,
        source=str(limits) if num_ranks == 1 else f"a share of {num_ranks} ranks; {limits}",
        reserve_bytes=config.vram_reserve_bytes // num_ranks,
        kv_cache_bytes=vllm_config.cache_config.kv_cache_memory_bytes or 0,
        dense_bytes=sizes.dense_bytes // num_ranks,
        is_gpu=False,
    )
    default = budget.default_hot_bytes_vllm(memory, flags=taken.as_flags(offload))
    return default.num_bytes, default.text


def _request(config: HotsplitConfig, *, stage: int, pp: int, budget_bytes: int) -> PlanRequest:
    return PlanRequest(
        budget_bytes=budget_bytes,
        is_budget_given=config.hot_bytes is not None,
        plan=config.plan,
        counts=config.counts,
        state_dir=config.state_path if config.learned == "use" else None,
        stage=stage,
        options=PlanOptions(dynamic=config.dynamic, objective=config.objective, strict=config.strict, pp=pp),
    )


def _stage_layers(sizes: ExpertSizes, *, vllm_config: Any) -> list[int]:
    """Decoder indices of the MoE layers that vLLM gives to this worker's pipeline stage."""
    start, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    return [layer for layer in sizes.identity.layers or () if start <= layer < end]


def _require_layers(prepared: Prepared) -> None:
    """The engine cuts the model into stages as the plan does."""
    theirs, ours = prepared.sizes.identity.layers, prepared.stage.layers
    if theirs != ours:
        raise PlanMismatchError(
            f"layers of pipeline stage {prepared.place.stage}",
            got=f"{theirs} in vLLM",
            wanted=f"{ours}, as the plan has",
            do="leave VLLM_PP_LAYER_PARTITION out",
        )


def _require_room(prepared: Prepared, *, vllm_config: Any) -> None:
    """Refuse what this machine cannot hold, with all of its ranks, before anything is allocated."""
    config, parallel = prepared.config, vllm_config.parallel_config
    num_ranks = parallel.local_world_size
    hot = prepared.stage.needed_bytes(dynamic=config.dynamic)
    demand = HostDemand(
        items={
            "hot rows": hot,
            "dense weights": prepared.sizes.dense_bytes // num_ranks,
            "KV cache": vllm_config.cache_config.kv_cache_memory_bytes or 0,
            "reserve": config.vram_reserve_bytes // num_ranks,
        }
    )
    require_host(demand, ranks=num_ranks)
    cold = sum(
        (len(rows.row_map) - rows.num_hot) * nbytes
        for rows, nbytes in zip(prepared.rows, prepared.stage.row_bytes, strict=True)
    )
    _say(require_disk(config.bank_path, needed=cold, ranks=num_ranks))


def _thrash(prepared: Prepared) -> list[Notice]:
    notice = thrash_notice(prepared.rebalance) if prepared.config.dynamic else None
    return [notice] if notice else []


def _unwritable(prepared: Prepared) -> list[Notice]:
    """A state folder that cannot be written would otherwise be noticed when there is something to lose."""
    folder = prepared.config.state_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return []
    except OSError as error:
        text = f"HOTSPLIT_STATE_DIR {folder} cannot be written ({error.strerror}): nothing learned, and no metrics, will be kept"
        return [Notice(name="state-unwritable", text=text, strict=False)]


def _idle(config: HotsplitConfig) -> list[Notice]:
    """Settings that were given and have nothing to act on here: silence would look like obedience."""
    idle = {
        "numa_policy": (True, "the CPU twin's rows lie in plain memory and a mapped file"),
        "kernel": (True, "vLLM's own kernels compute the experts"),
        "dyn_max_swaps": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_margin": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_half_life": (not config.dynamic, "nothing swaps in static mode"),
        "objective": (config.plan is not None, "a plan file is used as it is"),
    }
    return [
        Notice(name="no-effect", text=f"{variable_name(name)} has no effect: {reason}", strict=False)
        for name, (is_idle, reason) in idle.items()
        if is_idle and config.origin(name) != "default"
    ]


def _say_settings(config: HotsplitConfig) -> None:
    given = [f"{name}={value} ({origin})" for name, value, origin in config.rows() if origin != "default"]
    logger.info("hotsplit: settings %s; all others default", ", ".join(given) or "none given")


def _say(notices: Sequence[Notice]) -> None:
    for notice in notices:
        logger.warning("hotsplit: %s", notice)
