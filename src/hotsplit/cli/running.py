"""What `hotsplit run` does: load, generate, report. Imports the engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import torch
import transformers

from hotsplit.cli import console
from hotsplit.config import HotsplitConfig
from hotsplit.engines.transformers.loading import load_with
from hotsplit.engines.transformers.resolve import load_tokenizer, model_folder
from hotsplit.engines.transformers.traffic import is_encodable
from hotsplit.errors import ConfigError

_NUMBERS = (
    "hit_rate",
    "byte_hit_rate",
    "kept_rate",
    "hot_experts",
    "experts",
    "hot_bytes",
    "budget_bytes",
    "swaps",
    "updates",
    "plan_hash",
    "mode",
)
"""What a run with banks tells; a stock run has the same keys, with nothing to tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTask:
    """What `hotsplit run` was asked for."""

    model: str
    """Folder or hub id."""
    config: HotsplitConfig
    """Settings."""
    prompt: str
    """What to continue."""
    chat: bool
    """Whether the prompt is a chat message."""
    max_new_tokens: int
    """Tokens to generate."""
    temperature: float
    """0 decodes greedily."""
    seed: int
    """Of sampling."""
    device: str | None
    """Where to compute; None for a GPU where there is one, else the CPU."""
    force: bool
    """Use a plan or histogram of another model all the same."""

    def __post_init__(self) -> None:
        """Check what click lets through."""
        if not 0 <= self.temperature < math.inf:
            raise ConfigError("--temperature", got=str(self.temperature), wanted="a finite number >= 0")


def run(task: RunTask, *, is_streamed: bool = False) -> dict[str, Any]:
    """Generate, and say what it took.

    Args:
        task: What was asked for.
        is_streamed: Print the text on stdout: while it comes, or at the end where beams are still compared.

    Raises:
        HotsplitError: An input is wrong.
    """
    folder = model_folder(task.model)
    tokenizer = load_tokenizer(folder)
    ids = _prompt_ids(task, tokenizer)
    transformers.utils.logging.disable_progress_bar()  # ours is on the screen
    with console.progress("loading") as loading:
        model = load_with(folder, config=task.config, device=task.device, force=task.force, on_progress=loading)
    can_stream = is_streamed and (model.generation_config.num_beams or 1) == 1
    started = time.perf_counter()
    with _streamer(tokenizer) if can_stream else contextlib.nullcontext() as streamer:
        new_ids = _generate(model, ids.to(model.device), task=task, streamer=streamer)
    seconds = time.perf_counter() - started
    result = {
        "text": tokenizer.decode(new_ids, skip_special_tokens=True),
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(new_ids),
        "seconds": seconds,
        **dict.fromkeys(_NUMBERS),
    }
    if is_streamed and not can_stream:
        click.echo(result["text"])
    engine = getattr(model, "hotsplit", None)
    if engine is not None:
        result |= _numbers(engine)
        engine.close()
    return result


def _prompt_ids(task: RunTask, tokenizer: Any) -> torch.Tensor:
    if not is_encodable(task.prompt):
        raise ConfigError("--prompt", got="bytes that are no UTF-8", wanted="text")
    if task.chat and not tokenizer.chat_template:
        raise ConfigError("--chat", got="a model without a chat template", do="leave --chat out")
    if task.chat:
        messages = [{"role": "user", "content": task.prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(task.prompt)["input_ids"]
    if not ids:
        raise ConfigError("--prompt", got="no tokens", wanted="text", do="give the model something to continue")
    return torch.tensor([ids])


@contextlib.contextmanager
def _streamer(tokenizer: Any) -> Iterator[Any]:
    """What prints the text as it comes; log lines follow it, and its line ends whatever ends the text."""
    with console.logging_after():
        try:
            yield transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        except BaseException:
            click.echo()
            raise


def _generate(model: Any, ids: torch.Tensor, *, task: RunTask, streamer: Any) -> list[int]:
    sampling: dict[str, Any] = {"do_sample": False}
    if task.temperature > 0:
        sampling = {"do_sample": True, "temperature": task.temperature}
    torch.manual_seed(task.seed)
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task.max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    new_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return new_ids


def _numbers(engine: Any) -> dict[str, Any]:
    snapshot = engine.snapshot()
    pairs, hits = sum(snapshot.pairs.values()), sum(snapshot.hit_pairs.values())
    touched = snapshot.touched_hot_bytes + snapshot.touched_cold_bytes
    hot = engine.banks.router.hot_mask()
    values = (
        hits / pairs if pairs else None,
        snapshot.touched_hot_bytes / touched if touched else None,
        snapshot.kept_bytes / touched if touched else None,
        int(hot.sum()),
        int(hot.size),
        snapshot.hot_bytes,
        snapshot.budget_bytes,
        snapshot.swaps_done,
        engine.updates,
        snapshot.plan_hash,
        snapshot.mode,
    )
    return dict(zip(_NUMBERS, values, strict=True))
