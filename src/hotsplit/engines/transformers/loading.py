"""load(): from a model's name to a model that generates, with hot and cold experts behind it.

    folder -> headers -> sizes -> plan -> model without experts -> rows -> proof of equality -> hooks

On a GPU the same steps have other sizes, rows and kernels behind them: gpu.py.

Shapes: L MoE layers, E experts, D model dim.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotsplit.bank.banks import BankOptions, Banks, EngineBanks
from hotsplit.bank.build import Progress
from hotsplit.bank.runs import new_run_dir
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.transformers import cpu, gpu, hooks
from hotsplit.engines.transformers.cpu_rows import cold_choice, rows_options
from hotsplit.engines.transformers.dense_memory import move_out_of_files
from hotsplit.engines.transformers.engine import Engine, EngineOptions
from hotsplit.engines.transformers.guards import guard
from hotsplit.engines.transformers.leave_out import MODEL_LOCK, experts_left_out
from hotsplit.engines.transformers.opening import Opened, one_line, open_model, trusted
from hotsplit.engines.transformers.places import GpuPlace, place_of
from hotsplit.engines.transformers.resolve import model_class, model_folder
from hotsplit.engines.transformers.steps import Steps, drive
from hotsplit.errors import UnsupportedEngineError
from hotsplit.host.budget import require_gpu_memory, require_memory
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import Checkpoint, read_headers, require_loadable
from hotsplit.plan.choose import PlanChoice, PlanRequest, choose_plan, needed_bytes
from hotsplit.plan.planner import PlanOptions
from hotsplit.plan.rebalance import RebalanceOptions, thrash_notice
from hotsplit.plan.sizes import ExpertSizes, expert_sizes
from hotsplit.units import gib

logger = logging.getLogger(__name__)

# They would move or replace the experts, load other files than those that were planned for, or change what comes back.
_REFUSED_KWARGS = (
    "config",
    "device_map",
    "experts_implementation",
    "gguf_file",
    "output_loading_info",
    "quantization_config",
    "state_dict",
    "subfolder",
    "tp_plan",
    "use_safetensors",
    "variant",
)


def load(  # noqa: PLR0913 - what a user may ask for, all of it by name
    model: str | Path,
    *,
    hot_gib: float | None = None,
    device: str | torch.device | None = None,
    force: bool = False,
    run_when_fits: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    **settings: object,
) -> Any:
    """Load a mixture-of-experts model whose routed experts need not fit in fast memory.

    Args:
        model: A local folder with safetensors files, or a hub id.
        hot_gib: Hot budget in GiB. None on a CPU for the memory that is available, less a reserve and the dense weights;
            on a GPU for what stock transformers would keep of the model there.
        device: "cpu", "cuda" or "cuda:1"; None for an NVIDIA GPU with memory of its own where torch sees one,
            else the CPU.
        force: Use a plan or histogram of another model all the same.
        run_when_fits: Run hotsplit's banks even where every expert fits (to count traffic, or to compare).
        model_kwargs: Passed to transformers' from_pretrained (dtype, attn_implementation, ...).
        on_progress: Told bytes done and in all while rows are read: the hot ones, on a GPU all of them.
        **settings: Any other setting of docs/configuration.md by its lower-case name: plan="plan.json", dynamic=False.

    Returns:
        The transformers model, generate included; `model.hotsplit` is the Engine behind it. Where every expert fits
        the budget the model is the stock one and has no such attribute. The environment is never read.

    Raises:
        HotsplitError: What is wrong, what was wanted and what to do, in one line.

    Example:
        >>> import hotsplit
        >>> model = hotsplit.load("path/to/model", hot_gib=8)  # doctest: +SKIP
    """
    config = HotsplitConfig.from_options({}, hot_gib=hot_gib, **settings)
    return load_with(
        model,
        config=config,
        device=device,
        force=force,
        run_when_fits=run_when_fits,
        model_kwargs=model_kwargs,
        on_progress=on_progress,
    )


def load_with(  # noqa: PLR0913 - the same
    model: str | Path,
    *,
    config: HotsplitConfig,
    device: str | torch.device | None = None,
    force: bool = False,
    run_when_fits: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """The same, with settings that a caller has read already; see load().

    Args:
        model: A local folder, or a hub id.
        config: All settings.
        device: As in load().
        force: As in load().
        run_when_fits: As in load().
        model_kwargs: As in load().
        on_progress: As in load().
    """
    # Whatever a caller's own code runs under: rows are made on the CPU, and counters are written to between two steps.
    with torch.device("cpu"), torch.inference_mode(mode=False):
        kwargs, place = _checked_kwargs(model_kwargs or {}), place_of(device)
        folder = model_folder(model)
        checkpoint = read_headers(folder)
        require_loadable(checkpoint)
        if config.enable is False:
            place = _stock_place(place, is_given=device is not None, checkpoint=checkpoint, config=config)
            return _load_stock(folder, kwargs, place=place)
        given = [f"{name}={value} ({origin})" for name, value, origin in config.rows() if origin != "default"]
        logger.info("settings: %s; all others default", ", ".join(given) or "none given")
        if place is not None:
            gpu.require_kernel(config)
        for notice in [
            *_idle_settings(config),
            *(cpu.idle_on_cpu(config) if place is None else gpu.idle_on_gpu(config)),
        ]:
            _say(notice)
        with MODEL_LOCK:
            opened = open_model(folder, checkpoint=checkpoint, sizes=expert_sizes(checkpoint), kwargs=kwargs)
        asked = _Asked(config=config, kwargs=kwargs, force=force, run_when_fits=run_when_fits, on_progress=on_progress)
        loaded = (
            _on_cpu(opened, asked=asked) if place is None else _on_gpu(gpu.on_gpu(place, opened=opened), asked=asked)
        )
        if loaded is None:
            return _load_stock(folder, kwargs, place=place)
        _report(loaded.hotsplit)
        return loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What load() was asked for."""

    config: HotsplitConfig
    kwargs: Mapping[str, Any]
    force: bool
    run_when_fits: bool
    on_progress: Progress | None


def _on_cpu(opened: Opened, *, asked: _Asked) -> Any:
    """The model over pointer rows; None where everything fits and stock shall run."""
    config, sizes = asked.config, opened.sizes
    budget = cpu.default_budget(sizes, config=config) if config.hot_bytes is None else config.hot_bytes
    if _fits(sizes, budget=budget, asked=asked):
        if config.hot_bytes is not None:
            require_memory(sizes.expert_bytes, sizes=sizes, reserve_bytes=config.vram_reserve_bytes)
        return None
    unfit = [*cpu.kernel_notices(config), *cpu.budget_notices(config, budget=budget)]
    budget = min(budget, sizes.expert_bytes)
    cold = cold_choice(opened, budget=budget, config=config)
    choice = _choose(sizes, asked=asked, budget=budget - cold.num_bytes)
    needed = needed_bytes(choice.plan, sizes=sizes, dynamic=config.dynamic) + cold.num_bytes
    if (
        config.hot_bytes is not None or needed > budget
    ):  # a default budget is what was free a moment ago, or a page less
        require_memory(needed, sizes=sizes, reserve_bytes=config.vram_reserve_bytes)
    rows, said = rows_options(cold, config=config)
    loaded = _load_without_experts(opened, asked.kwargs)
    logger.info("%s of dense weights copied out of mapped files", gib(move_out_of_files(loaded)))
    banks = Banks(
        opened.source,
        hot=choice.plan.hot,
        prior=choice.prior,
        options=replace(_bank_options(sizes, config=config), rows=rows),
        on_progress=asked.on_progress,
    )
    with _closed_on_error(banks), banks.rows.guard.watched():
        unfit += cpu.teach(loaded, banks=banks, source=opened.source, strict=config.strict)
        notices = [*said, *banks.rows.notices, *unfit]
        _put_together(loaded, banks=banks, sizes=sizes, choice=choice, config=config, notices=notices)
    logger.info("%s", cold.text)
    return loaded


def _on_gpu(model: gpu.OnGpu, *, asked: _Asked) -> Any:
    """The model over rows that a GPU reads; None where everything fits and stock shall run."""
    config = asked.config
    budget = gpu.default_budget(model, config=config) if config.hot_bytes is None else config.hot_bytes
    if _fits(model.sizes, budget=budget, asked=asked):
        require_gpu_memory(model.sizes.expert_bytes, memory=model.memory(config))
        return None
    parts = model.place.open(config.numa_policy)
    logger.info("%s: %s", parts.kit.name, parts.kit.description)
    sizes = gpu.planned_sizes(model, parts=parts, config=config, budget=budget)
    choice = _choose(sizes, asked=asked, budget=budget)
    gpu.require_room(model, parts=parts, choice=choice, config=config)
    loaded = _load_without_experts(model.opened, asked.kwargs).to(model.place.device)
    banks = gpu.build_banks(
        model, parts=parts, choice=choice, options=_bank_options(sizes, config=config), on_progress=asked.on_progress
    )
    with _closed_on_error(banks):
        gpu.teach(loaded, banks=banks, model=model, parts=parts)
        said = gpu.notices(banks, parts=parts, budget=choice.plan.stages[0].budget_bytes)
        _put_together(loaded, banks=banks, sizes=model.sizes, choice=choice, config=config, notices=said)
    return loaded


def _fits(sizes: ExpertSizes, *, budget: int, asked: _Asked) -> bool:
    """Whether nothing needs splitting, which is said."""
    if budget < sizes.expert_bytes or asked.config.plan is not None or asked.run_when_fits:
        return False
    text = f"all routed experts fit ({gib(sizes.expert_bytes)} of {gib(budget)}): hotsplit is off"
    _say(Notice(name="fits", text=f"{text}, running stock transformers", strict=False))
    return True


def _idle_settings(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on here: silence would look like obedience."""
    idle = {
        "dyn_max_swaps": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_margin": (
            not config.dynamic or config.dyn_schedule == "adaptive",
            "the adaptive schedule has no margin" if config.dynamic else "nothing swaps in static mode",
        ),
        "dyn_schedule": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_half_life": (not config.dynamic, "nothing swaps in static mode"),
        "objective": (config.plan is not None, "a plan file is used as it is"),
    }
    for name, (is_idle, reason) in idle.items():
        if is_idle and config.origin(name) != "default":
            text = f"{variable_name(name)} has no effect: {reason}"
            yield Notice(name="no-effect", text=text, strict=False)


def _checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What from_pretrained must not be told, since it would move or replace the experts."""
    for name in _REFUSED_KWARGS:
        if name in kwargs:
            raise UnsupportedEngineError(
                f"model_kwargs {name!r}", got=repr(kwargs[name]), wanted="no such argument", do="leave it out"
            )
    return dict(kwargs)


def _choose(sizes: ExpertSizes, *, asked: _Asked, budget: int) -> PlanChoice:
    config = asked.config
    options = PlanOptions(dynamic=config.dynamic, objective=config.objective, strict=config.strict)
    request = PlanRequest(
        budget_bytes=budget,
        is_budget_given=config.hot_bytes is not None,
        plan=config.plan,
        counts=config.counts,
        state_dir=config.state_path if config.learned == "use" else None,
        force=asked.force,
        options=options,
    )
    return choose_plan(sizes, request=request)


def _stock_place(
    place: GpuPlace | None, *, is_given: bool, checkpoint: Checkpoint, config: HotsplitConfig
) -> GpuPlace | None:
    """Where a model runs that shall not be split: on a GPU that nobody asked for only where it fits there, which is said."""
    text = "hotsplit is off (HOTSPLIT_ENABLE=0): running stock transformers"
    if place is not None and not is_given:
        needed = sum(info.nbytes for info in checkpoint.tensors.values())
        free = place.memory().free_bytes - config.vram_reserve_bytes
        if needed > free:
            text = f"{text} on the CPU, since {place.device} has {gib(max(0, free))} free for {gib(needed)}"
            place = None
    _say(Notice(name="off", text=text, strict=False))
    return place


def _load_stock(folder: Path, kwargs: Mapping[str, Any], *, place: GpuPlace | None) -> Any:
    import transformers

    with one_line(f"the stock model of {folder}"), MODEL_LOCK:
        config = transformers.AutoConfig.from_pretrained(folder, **trusted(kwargs))
        kind: Any = model_class(config)
        loaded = kind.from_pretrained(folder, **kwargs).eval()
        return loaded if place is None else loaded.to(place.device)


def _load_without_experts(opened: Opened, kwargs: Mapping[str, Any]) -> Any:
    kind: Any = opened.model_class
    left_out = experts_left_out(kind, experts_classes=opened.experts_classes, layers=opened.source.layers)
    with left_out, one_line(f"the dense weights of {opened.folder}"):
        loaded = kind.from_pretrained(opened.folder, config=opened.config, experts_implementation=hooks.NAME, **kwargs)
    # Dense weights that want gradients would make every forward want them.
    return loaded.eval().requires_grad_(requires_grad=False)


def _bank_options(sizes: ExpertSizes, *, config: HotsplitConfig) -> BankOptions:
    return BankOptions(
        top_k=sizes.identity.top_k or 1,
        dynamic=config.dynamic,
        dyn_steps=config.dyn_steps,
        kernel=config.kernel,
        rebalance=_rebalance(config),
    )


def _rebalance(config: HotsplitConfig) -> RebalanceOptions:
    return RebalanceOptions(
        half_life=config.dyn_half_life,
        margin=config.dyn_margin,
        max_swaps=config.dyn_max_swaps,
        schedule=config.dyn_schedule,
    )


@contextmanager
def _closed_on_error(banks: EngineBanks) -> Iterator[None]:
    try:
        yield
    except BaseException:
        banks.close()
        raise


def _put_together(
    loaded: Any,
    *,
    banks: EngineBanks,
    sizes: ExpertSizes,
    choice: PlanChoice,
    config: HotsplitConfig,
    notices: Sequence[Notice],
) -> None:
    """The handle on the model, what it must not do, and the steps around its forward."""
    thrash = thrash_notice(_rebalance(config)) if config.dynamic else None
    engine = Engine(
        banks,
        plan=choice.plan,
        sizes=sizes,
        options=_engine_options(config, budget_bytes=choice.plan.stages[0].budget_bytes + banks.slot_bytes),
        notices=[*choice.notices, *([thrash] if thrash else []), *notices],
        origin=choice.origin,
    )
    guard(loaded, engine=engine)
    drive(loaded, steps=Steps(banks))


def _engine_options(config: HotsplitConfig, *, budget_bytes: int) -> EngineOptions:
    return EngineOptions(
        learn_into=config.state_path if config.dynamic and config.learned == "use" else None,
        run_dir=new_run_dir(config.state_path),
        budget_bytes=budget_bytes,
        dynamic=config.dynamic,
    )


def _say(notice: Notice) -> None:
    logger.warning("%s", notice)


def _report(engine: Engine) -> None:
    for notice in engine.notices:
        _say(notice)
    hot, proof = engine.plan.hot_rows(), engine.plan.proof
    logger.info(
        "hotsplit is on: plan %s, %d layers, %d of %d experts hot (%s), expected hit rate %s; %s",
        engine.snapshot().plan_hash[:12],
        len(hot),
        int(hot.sum()),
        len(hot) * (engine.sizes.identity.num_experts or 0),
        gib(engine.banks.hot_bytes - engine.banks.slot_bytes),
        "unknown" if proof.hit_rate is None else f"{proof.held_out or proof.hit_rate:.3f}",
        engine.origin,
    )
