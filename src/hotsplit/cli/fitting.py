"""What `hotsplit fit` does; fit_view.py has how it looks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hotsplit.config import HotsplitConfig
from hotsplit.errors import ConfigError
from hotsplit.plan.fit import Fit, Load, Machine, fit
from hotsplit.plan.weigh import Weighed, require_there, weigh, with_dense
from hotsplit.recipes import shelf
from hotsplit.recipes.recipe import Recipe
from hotsplit.recipes.weighing import has_chosen_kv, kv_bytes, weigh_recipe, with_kv_chosen
from hotsplit.units import GIB

_MAX_GIB = 2.0**23
"""Eight exbibytes: no machine has more, and all numbers stay exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitTask:
    """What `hotsplit fit` was asked for."""

    config: HotsplitConfig
    """Reserve and mode."""
    model: Path
    """Folder or config.json."""
    gpus: int
    """Ranks."""
    vram_gib: float
    """Of one GPU."""
    ram_gib: str
    """Of the machine, or of each NUMA node, separated by commas."""
    numa: str | None
    """NUMA node of each GPU, separated by commas."""
    link: float | None
    """GB/s."""
    context: int
    """Tokens per sequence."""
    concurrency: int
    """Sequences at once."""
    kv_dtype: str | None
    """Type of the KV cache."""
    draft: bool
    """Whether draft layers are loaded."""
    dense_gib: float | None
    """The user's word for the dense weights on one GPU."""
    ram_reserve_gib: float
    """Host memory left free."""
    recipe: Recipe | None = None
    """What knows the model, in place of a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """A model on a machine."""

    weighed: Weighed
    """The model."""
    machine: Machine
    """What there is."""
    load: Load
    """What was asked."""
    fit: Fit
    """What came out."""


def fit_task(options: dict[str, Any], *, given: Mapping[str, object], environ: Mapping[str, str]) -> FitTask:
    """Make the task of a command line; a recipe fills what was left out.

    Args:
        options: Of the command, without settings.
        given: Settings by field name.
        environ: The environment.

    Raises:
        UsageError: A size that nobody told.
        ConfigError: A setting or the recipe is wrong.
    """
    model = Path(os.path.expanduser(options["model"]))
    options = {**options, "model": model}
    is_recipe = shelf.is_recipe(str(model)) and not model.is_dir()
    recipe = shelf.load(str(model)) if is_recipe else None
    if not is_recipe:
        _require_model(model)
    known: dict[str, object] = {"gpus": 1, "context": 32768, "concurrency": 1}
    if recipe is not None:
        machine, kv = recipe.machine, recipe.kv
        known = {"gpus": machine.gpus, "vram_gib": machine.vram_gib, "ram_gib": f"{machine.ram_gib:g}"}
        known |= {"context": kv.context, "concurrency": kv.concurrency}
    filled = {**options, **{name: value for name, value in known.items() if options[name] is None}}
    missing = [f"--{name.replace('_', '-')}" for name in ("vram_gib", "ram_gib") if filled[name] is None]
    if missing:
        raise click.UsageError(f"Missing {' and '.join(missing)}: only a recipe may stand in for what is not said.")
    config = HotsplitConfig.from_options(environ, None if recipe is None else recipe.settings, **given)
    return FitTask(config=config, recipe=recipe, **filled)


def _require_model(model: Path) -> None:
    """Say that there is no such model before anything is said of options, which a recipe would have filled in."""
    if model.exists():
        return
    near = shelf.nearest_recipe(str(model))
    if near is not None:
        raise ConfigError(f"MODEL {model}", got="no recipe or folder of that name", do=f"did you mean {near}?")
    require_there(model)


def fit_model(task: FitTask) -> FitResult:
    """Check the numbers, weigh, and fit.

    Args:
        task: What was asked for.

    Raises:
        ConfigError: A number is not possible.
        CheckpointError: The model cannot be weighed.
    """
    machine = Machine(
        num_gpus=task.gpus,
        vram_bytes=_bytes("--vram-gib", task.vram_gib),
        ram_bytes=tuple(_bytes("--ram-gib", _number("--ram-gib", part)) for part in task.ram_gib.split(",")),
        nodes=None if task.numa is None else tuple(_node(part) for part in task.numa.split(",")),
        link_bytes_per_s=None if task.link is None else _link(task.link),
    )
    load = Load(
        context=task.context,
        concurrency=task.concurrency,
        reserve_bytes=task.config.vram_reserve_bytes,
        ram_reserve_bytes=_bytes("--ram-reserve-gib", task.ram_reserve_gib),
        has_draft=task.draft,
        dynamic=task.config.dynamic,
    )
    dense = None if task.dense_gib is None else _bytes("--dense-gib", task.dense_gib)
    weighed = _weighed(task)
    if task.recipe is not None:
        load = replace(load, ram_reserve_bytes=load.ram_reserve_bytes + task.recipe.facts.host_bytes)
    weighed = weighed if dense is None else with_dense(weighed, dense)
    return FitResult(weighed=weighed, machine=machine, load=load, fit=fit(weighed, machine=machine, load=load))


def _weighed(task: FitTask) -> Weighed:
    """The model, by its files or by a recipe's facts and its choice of a KV cache."""
    recipe = task.recipe
    if recipe is None:
        return weigh(task.model, tp=task.gpus, kv_dtype=task.kv_dtype)
    weighed = weigh_recipe(recipe, tp=task.gpus, kv_dtype=task.kv_dtype)
    if not has_chosen_kv(recipe, tp=task.gpus, kv_dtype=task.kv_dtype):
        return weighed
    asked = kv_bytes(recipe, tp=task.gpus, context=task.context, concurrency=task.concurrency) or 0
    return with_kv_chosen(weighed, kv_bytes=asked, concurrency=task.concurrency)


def _bytes(option: str, gibs: float) -> int:
    """GiB of memory in bytes."""
    if not (math.isfinite(gibs) and 0 <= gibs <= _MAX_GIB):
        raise ConfigError(option, got=f"{gibs:g}", wanted=f"0 to {_MAX_GIB:,.0f} GiB", do="check the unit", value=gibs)
    return int(gibs * GIB)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(option, got=repr(text), wanted="GiB, or GiB of each NUMA node: 256,256") from error


def _node(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text) <= 6):
        raise ConfigError("--numa", got=repr(text), wanted="a node's number for each GPU: 0,0,1,1")
    return int(text)


def _link(gigabytes: float) -> float:
    """GB/s in bytes per second; what no link has is another unit."""
    if not 0.1 <= gigabytes <= 1000:
        raise ConfigError("--link", got=f"{gigabytes:g} GB/s", wanted="0.1 to 1000 GB/s", do="check the unit")
    return gigabytes * 1e9
