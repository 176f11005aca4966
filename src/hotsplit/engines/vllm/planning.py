"""Everything a worker decides before its model is built: which experts are hot, and whether they fit.

    vllm_config -> settings, headers -> sizes -> budget (one for all ranks) -> plan -> this stage's rows

All ranks make the same plan from the same files; its hash is compared before anything is loaded.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.bank.rows import LayerRows, place
from hotsplit.config import HotsplitConfig
from hotsplit.engines.vllm import exchange, padding, refusals, room, settings
from hotsplit.engines.vllm.layer_parameters import ModelParameters, model_parameters
from hotsplit.errors import EngineError, PlanMismatchError
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import Checkpoint, read_headers, require_loadable
from hotsplit.plan.choose import PlanChoice, PlanRequest, choose_plan, read_counts
from hotsplit.plan.planfile import plan_hash
from hotsplit.plan.planner import PlanOptions
from hotsplit.plan.rebalance import RebalanceOptions, thrash_notice
from hotsplit.plan.sizes import ExpertSizes, expert_sizes
from hotsplit.plan.stage import StagePlan, require_same_hash, revalidate, smallest_budget, stage_sizes
from hotsplit.units import gib

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
    page_bytes: int = 0
    """The most that page edges, and tensors too small to be split, may take of a GPU beside hot rows; 0 on a CPU."""

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
    def room(self) -> room.Rows:
        """What its rows take, as planned."""
        num_cold = [len(rows.row_map) - rows.num_hot for rows in self.rows]
        hot_bytes = self.stage.needed_bytes(dynamic=self.config.dynamic)
        return room.rows_of(hot_bytes, num_cold=num_cold, row_bytes=self.stage.row_bytes)

    @property
    def rebalance(self) -> RebalanceOptions:
        """Margin, swaps, half-life."""
        config = self.config
        return RebalanceOptions(
            half_life=config.dyn_half_life,
            margin=config.dyn_margin,
            max_swaps=config.dyn_max_swaps,
            schedule=config.dyn_schedule,
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
        is_allowed = fixed <= self.page_bytes
        notices = revalidate(
            stage,
            row_bytes=row_bytes,
            fixed_bytes=stage.fixed_bytes if is_allowed and fixed else fixed,
            budget_bytes=max(self.asked_bytes, stage.budget_bytes),
            dynamic=dynamic,
        )
        if is_allowed and fixed > stage.fixed_bytes:
            text = f"page edges take {gib(fixed - stage.fixed_bytes)} of GPU memory that the plan file does not count"
            notices.append(Notice(name="page-edges", text=text, strict=False))
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
    sizes = _weigh(checkpoint, tp=place_here.tp, config=config, vllm_config=vllm_config)
    parameters = _parameters(checkpoint, sizes=sizes, vllm_config=vllm_config)
    gather = exchange.gather_of_all()
    asked, line = room.default_budget(
        sizes, config=config, offload=offload, parameters=parameters, vllm_config=vllm_config
    )
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
        config=config,
        place=place_here,
        sizes=mine,
        is_stock=False,
        plan_choice=choice,
        asked_bytes=asked,
        page_bytes=0 if parameters is None else padding.fixed_bytes(parameters.layers, sizes=mine),
    )
    require_same_hash(gather(plan_hash(choice.plan)))
    _require_layers(prepared)
    if not mine.identity.layers:
        logger.info("hotsplit: pipeline stage %d has no routed experts", place_here.stage)
        return stock
    for rows in prepared.rows:
        refusals.require_rows(rows.num_rows)
    _say(room.require_room(prepared.room, sizes=mine, config=config, parameters=parameters, vllm_config=vllm_config))
    idle = room.idle_settings(config, device_type=place_here.device_type)
    _say([*choice.notices, *idle, *_thrash(prepared), *_unwritable(prepared)])
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
    sizes = _weigh(checkpoint, tp=parallel.tensor_parallel_size, config=config, vllm_config=vllm_config)
    budget_bytes = sizes.expert_bytes if config.hot_bytes is None else config.hot_bytes
    if config.plan is None and budget_bytes >= sizes.expert_bytes:
        read_counts(config.counts, sizes=sizes)
        return
    request = _request(config, stage=0, pp=parallel.pipeline_parallel_size, budget_bytes=budget_bytes)
    choose_plan(sizes, request=request)


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


def _weigh(checkpoint: Checkpoint, *, tp: int, config: HotsplitConfig, vllm_config: Any) -> ExpertSizes:
    """What experts weigh as vLLM will make them: padded on a CPU, and on a GPU with what page edges waste."""
    sizes = expert_sizes(checkpoint, tp=tp)
    if not _is_on_gpu(vllm_config):
        return padding.as_padded(sizes, vllm_config=vllm_config)
    # Plan files are made without the pages of a machine, and where no row is hot there is no page.
    is_charged = config.plan is None and config.hot_bytes != 0
    if not is_charged:
        return sizes
    made = model_parameters(checkpoint, sizes=sizes, layers=sizes.identity.layers or ())
    return padding.with_pages(sizes, layers=made.layers)


def _parameters(checkpoint: Checkpoint, *, sizes: ExpertSizes, vllm_config: Any) -> ModelParameters | None:
    """What a GPU's rank holds; None on a CPU, where nobody asks."""
    if not _is_on_gpu(vllm_config):
        return None
    start, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    return model_parameters(checkpoint, sizes=sizes, layers=range(start, end))


def _is_on_gpu(vllm_config: Any) -> bool:
    return str(vllm_config.device_config.device_type) == "cuda"


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


def _say_settings(config: HotsplitConfig) -> None:
    given = [f"{name}={value} ({origin})" for name, value, origin in config.rows() if origin != "default"]
    logger.info("hotsplit: settings %s; all others default", ", ".join(given) or "none given")


def _say(notices: Sequence[Notice]) -> None:
    for notice in notices:
        logger.warning("hotsplit: %s", notice)
