"""What `hotsplit profile` does: load, play, save. Imports the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from hotsplit.cli import console
from hotsplit.cli.places import histogram_files, model_files, require_places
from hotsplit.config import HotsplitConfig
from hotsplit.engines.transformers.loading import load_with
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.resolve import load_tokenizer, model_folder
from hotsplit.engines.transformers.traffic import read_prompts
from hotsplit.errors import ConfigError
from hotsplit.plan.histogram import Histogram, save_histogram
from hotsplit.plan.trace import save_trace


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileTask:
    """What `hotsplit profile` was asked for."""

    model: str
    """Folder or hub id."""
    files: tuple[Path, ...]
    """Sample traffic."""
    output: Path
    """Histogram file."""
    trace: Path | None
    """Trace file, or None."""
    config: HotsplitConfig
    """Settings."""
    device: str | None
    """Where to compute; None for a GPU where there is one, else the CPU."""
    options: Mapping[str, Any]
    """Fields of ProfileOptions."""


def profile(task: ProfileTask) -> Histogram:
    """Count sample traffic and write the files.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is wrong; nothing was written.
    """
    options = ProfileOptions(**task.options)
    require_places({"--output": task.output, "--trace": task.trace}, inputs=_inputs(task))
    if task.config.enable is False:
        raise ConfigError("HOTSPLIT_ENABLE", got="0", wanted="hotsplit on, since its banks count", do="leave it out")
    folder = model_folder(task.model)
    tokenizer = load_tokenizer(folder)
    prompts = read_prompts(
        task.files, tokenizer=tokenizer, prompt_tokens=options.prompt_tokens, max_prompts=options.max_prompts
    )
    # A profile is a measurement: the hot set stands still and nothing of it is learned.
    config = replace(task.config, dynamic=False, learned="ignore")
    transformers.utils.logging.disable_progress_bar()  # ours is on the screen
    with console.progress("loading") as loading:
        model = load_with(folder, config=config, device=task.device, run_when_fits=True, on_progress=loading)
    files = f"{len(task.files)} file{'s' if len(task.files) > 1 else ''}"
    playing_what = f"playing {len(prompts)} prompts from {files}"
    console.note(playing_what)
    with console.progress(playing_what) as playing:
        histogram, trace = play(model, prompts, options=options, on_progress=playing, want_trace=task.trace is not None)
    histogram = replace(histogram, name=task.model, source={"data": [path.name for path in task.files]})
    save_histogram(histogram, task.output)
    if task.trace is not None and trace is not None:
        save_trace(trace, task.trace)
    model.hotsplit.close()
    return histogram


def _inputs(task: ProfileTask) -> list[Path]:
    """Every file that a profile reads."""
    plan = [] if task.config.plan is None else [task.config.plan]
    return [*task.files, *plan, *histogram_files(task.config.counts), *model_files(task.model)]
