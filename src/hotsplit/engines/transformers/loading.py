"""load(): from a model's name to a model that generates, with hot and cold experts behind it.

    folder -> headers -> sizes -> plan -> model without experts -> rows -> proof of equality -> hooks

Shapes: L MoE layers, E experts, D model dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hotsplit.bank.banks import BankOptions, Banks
from hotsplit.bank.build import Progress
from hotsplit.bank.runs import new_run_dir
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.engine import Engine, EngineOptions
from hotsplit.engines.transformers.guards import guard
from hotsplit.engines.transformers.index import CheckpointSource, ExpertsLayer
from hotsplit.engines.transformers.leave_out import MODEL_LOCK, experts_left_out
from hotsplit.engines.transformers.mathematics import Precision, expert_math, preparer, prove
from hotsplit.engines.transformers.opening import Opened, one_line, open_model, trusted
from hotsplit.engines.transformers.resolve import model_class, model_folder
from hotsplit.engines.transformers.steps import Steps, drive
from hotsplit.errors import UnsupportedEngineError
from hotsplit.host.budget import default_hot_bytes, require_memory
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import read_headers, require_loadable
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


def load(
    model: str | Path,
    *,
    hot_gib: float | None = None,
    force: bool = False,
    run_when_fits: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    **settings: object,
) -> Any:
    """Load a mixture-of-experts model whose routed experts need not fit in fast memory.

    Args:
        model: A local folder with safetensors files, or a hub id.
        hot_gib: Hot budget in GiB; None for the memory that is available, less a reserve and the dense weights.
        force: Use a plan or histogram of another model all the same.
        run_when_fits: Run hotsplit's banks even where every expert fits (to count traffic, or to compare).
        model_kwargs: Passed to transformers' from_pretrained (dtype, attn_implementation, ...).
        on_progress: Told bytes done and in all while hot rows are read.
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
        force=force,
        run_when_fits=run_when_fits,
        model_kwargs=model_kwargs,
        on_progress=on_progress,
    )


def load_with(
    model: str | Path,
    *,
    config: HotsplitConfig,
    force: bool = False,
    run_when_fits: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """The same, with settings that a caller has read already; see load().

    Args:
        model: A local folder, or a hub id.
        config: All settings.
        force: As in load().
        run_when_fits: As in load().
        model_kwargs: As in load().
        on_progress: As in load().
    """
    kwargs = _checked_kwargs(model_kwargs or {})
    folder = model_folder(model)
    checkpoint = read_headers(folder)
    require_loadable(checkpoint)
    if config.enable is False:
        _say(Notice(name="off", text="hotsplit is off (HOTSPLIT_ENABLE=0): running stock transformers", strict=False))
        return _load_stock(folder, kwargs)
    given = [f"{name}={value} ({origin})" for name, value, origin in config.rows() if origin != "default"]
    logger.info("settings: %s; all others default", ", ".join(given) or "none given")
    for notice in _idle_settings(config):
        _say(notice)
    with MODEL_LOCK:
        opened = open_model(folder, checkpoint=checkpoint, sizes=expert_sizes(checkpoint), kwargs=kwargs)
    budget, is_given = _budget(opened.sizes, config=config)
    if budget >= opened.sizes.expert_bytes and config.plan is None and not run_when_fits:
        require_memory(opened.sizes.expert_bytes, sizes=opened.sizes, reserve_bytes=config.vram_reserve_bytes)
        text = f"all routed experts fit ({gib(opened.sizes.expert_bytes)} of {gib(budget)}): hotsplit is off"
        _say(Notice(name="fits", text=f"{text}, running stock transformers", strict=False))
        return _load_stock(folder, kwargs)
    budget = min(budget, opened.sizes.expert_bytes) if run_when_fits else budget
    choice = _choose(opened.sizes, config=config, budget=budget, is_given=is_given, force=force)
    needed = needed_bytes(choice.plan, sizes=opened.sizes, dynamic=config.dynamic)
    require_memory(needed, sizes=opened.sizes, reserve_bytes=config.vram_reserve_bytes)
    loaded = _load_without_experts(opened, kwargs)
    engine = _build(loaded, opened=opened, config=config, choice=choice, on_progress=on_progress)
    _report(engine, origin=choice.origin)
    return loaded


def _idle_settings(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on here: silence would look like obedience."""
    idle = {
        "numa_policy": (True, "the transformers engine's rows lie in plain memory and mapped files"),
        "bank_dir": (True, "the transformers engine reads cold rows from the model's own files"),
        "dyn_max_swaps": (not config.dynamic, "nothing swaps in static mode"),
        "dyn_margin": (not config.dynamic, "nothing swaps in static mode"),
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


def _budget(sizes: ExpertSizes, *, config: HotsplitConfig) -> tuple[int, bool]:
    """Bytes, and whether a user named them."""
    if config.hot_bytes is not None:
        return config.hot_bytes, True
    return default_hot_bytes(sizes, reserve_bytes=config.vram_reserve_bytes), False


def _choose(sizes: ExpertSizes, *, config: HotsplitConfig, budget: int, is_given: bool, force: bool) -> PlanChoice:
    options = PlanOptions(dynamic=config.dynamic, objective=config.objective, strict=config.strict)
    request = PlanRequest(
        budget_bytes=budget,
        is_budget_given=is_given,
        plan=config.plan,
        counts=config.counts,
        state_dir=config.state_path if config.learned == "use" else None,
        force=force,
        options=options,
    )
    return choose_plan(sizes, request=request)


def _load_stock(folder: Path, kwargs: Mapping[str, Any]) -> Any:
    import transformers

    with one_line(f"the stock model of {folder}"), MODEL_LOCK:
        config = transformers.AutoConfig.from_pretrained(folder, **trusted(kwargs))
        kind: Any = model_class(config)
        return kind.from_pretrained(folder, **kwargs).eval()


def _load_without_experts(opened: Opened, kwargs: Mapping[str, Any]) -> Any:
    kind: Any = opened.model_class
    left_out = experts_left_out(kind, experts_classes=opened.experts_classes, layers=opened.source.layers)
    with left_out, one_line(f"the dense weights of {opened.folder}"):
        loaded = kind.from_pretrained(opened.folder, config=opened.config, experts_implementation=hooks.NAME, **kwargs)
    # Dense weights that want gradients would make every forward want them.
    return loaded.eval().requires_grad_(requires_grad=False)


def _build(
    loaded: Any, *, opened: Opened, config: HotsplitConfig, choice: PlanChoice, on_progress: Progress | None
) -> Engine:
    """Rows, mathematics, hooks."""
    rebalance = RebalanceOptions(
        half_life=config.dyn_half_life, margin=config.dyn_margin, max_swaps=config.dyn_max_swaps
    )
    notices = [*choice.notices]
    if config.dynamic and (notice := thrash_notice(rebalance)):
        notices.append(notice)
    options = BankOptions(
        top_k=opened.sizes.identity.top_k or 1,
        dynamic=config.dynamic,
        dyn_steps=config.dyn_steps,
        kernel=config.kernel,
        rebalance=rebalance,
    )
    banks = Banks(opened.source, hot=choice.plan.hot, prior=choice.prior, options=options, on_progress=on_progress)
    try:
        _teach(loaded, banks=banks, source=opened.source)
        engine = Engine(
            banks,
            plan=choice.plan,
            sizes=opened.sizes,
            options=_engine_options(config, choice=choice),
            notices=notices,
            origin=choice.origin,
        )
    except BaseException:
        banks.close()
        raise
    guard(loaded, engine=engine)
    drive(loaded, steps=Steps(banks))
    return engine


def _teach(loaded: Any, *, banks: Banks, source: CheckpointSource) -> None:
    """Give every layer its mathematics; one proof per class of experts."""
    proven: dict[type, Precision] = {}
    for layer_id, layer in enumerate(source.layers):
        module = loaded.get_submodule(layer.path)
        prepare = preparer(layer, layout=source.layouts[layer_id], conversions=source.conversions)
        if type(module) not in proven:
            proven[type(module)] = prove(
                module,
                prepare=prepare,
                read=_reader(banks, layer_id),
                num_experts=source.num_experts,
                hidden_dim=_hidden_dim(module, layer=layer),
            )
        math = expert_math(
            module,
            layer=layer,
            prepare=prepare,
            precision=proven[type(module)],
            num_experts=source.num_experts,
        )
        banks.use_math(layer_id, math)
        _, dtype = next(iter(layer.parameters.values()))
        hooks.attach(module, banks=banks, layer_id=layer_id, dtype=dtype)


def _reader(banks: Banks, layer_id: int) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """An expert's stored tensors, wherever it lies."""
    row_map = banks.router.row_map[layer_id].tolist()
    return lambda expert: banks.rows.tensors(layer_id, row_map[expert])


def _hidden_dim(module: Any, *, layer: ExpertsLayer) -> int:
    """D, from the shape of the first projection."""
    shape, _ = layer.parameters["gate_up_proj" if module.has_gate else "up_proj"]
    return shape[1] if module.is_transposed else shape[2]


def _engine_options(config: HotsplitConfig, *, choice: PlanChoice) -> EngineOptions:
    return EngineOptions(
        learn_into=config.state_path if config.dynamic and config.learned == "use" else None,
        run_dir=new_run_dir(config.state_path),
        budget_bytes=choice.plan.stages[0].budget_bytes,
        dynamic=config.dynamic,
    )


def _say(notice: Notice) -> None:
    logger.warning("%s", notice)


def _report(engine: Engine, *, origin: str) -> None:
    for notice in engine.notices:
        _say(notice)
    hot, proof = engine.plan.hot_rows(), engine.plan.proof
    logger.info(
        "hotsplit is on: plan %s, %d layers, %d of %d experts hot (%s), expected hit rate %s; %s",
        engine.snapshot().plan_hash[:12],
        len(hot),
        int(hot.sum()),
        len(hot) * (engine.sizes.identity.num_experts or 0),
        gib(engine.banks.hot_bytes),
        "unknown" if proof.hit_rate is None else f"{proof.held_out or proof.hit_rate:.3f}",
        origin,
    )
