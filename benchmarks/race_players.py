"""The engines of the race: each loads the same weights in its own way, and is fed the same tokens.

An entry of PLAYERS is a function (job) -> Player. Heavy imports stay inside, so that a process holds what its own engine
needs and no more: the llama.cpp player runs in a Python that has numpy and llama_cpp alone. Shapes: V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from race_profile import profile

Logits = npt.NDArray[np.float32]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Player:
    """A loaded engine."""

    restart: Callable[[], None]
    """Forgets all tokens."""
    forward: Callable[[Sequence[int]], Logits]
    """Takes tokens behind those before, gives the logits [V] that follow the last one."""
    reads: tuple[Path, ...] = ()
    """Files that it reads weights from while it computes; none where all are in memory."""
    counted: Callable[[], dict[str, Any]] = dict
    """hotsplit's counters so far; nothing for the others."""
    profile: Callable[[Sequence[int]], dict[str, float]] | None = None
    """Milliseconds per token by kind of module, of tokens fed one by one."""
    save_counts: Callable[[Path], None] | None = None
    """hotsplit: writes the histogram of all traffic so far."""
    close: Callable[[], None] = lambda: None
    """Gives everything back."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the result should say."""


def hotsplit_player(job: Mapping[str, Any]) -> Player:
    """Of hotsplit, with a share of the expert bytes as budget; nothing learned before plays a part.

    Args:
        job: folder, scratch, and in options fast_share, None for the budget that load() takes by itself, and any settings of
            hotsplit.load().
    """
    import hotsplit
    from hotsplit.plan.checkpoint import read_headers
    from hotsplit.plan.histogram import save_histogram
    from hotsplit.plan.sizes import expert_sizes
    from hotsplit.units import GIB

    options = dict(job["options"])
    share = options.pop("fast_share")
    sizes = expert_sizes(read_headers(Path(job["folder"])))
    if share is not None:
        # A page of slack at 100 %: the arena's own rounding is charged to the budget.
        options["hot_gib"] = (share * sizes.expert_bytes + (MIB if share == 1 else 0)) / GIB
    model = hotsplit.load(
        job["folder"],
        device="cpu",
        state_dir=Path(job["scratch"]),
        learned="ignore",
        run_when_fits=True,
        **options,
    )
    engine = model.hotsplit
    rows_L = [len(experts) for experts in engine.plan.hot]
    facts = {
        "hot_bytes": engine.banks.hot_bytes,
        "slot_bytes": engine.banks.rows.slot_bytes,
        "hot_rows": rows_L,
        "expert_bytes": sizes.expert_bytes,
        "dense_bytes": sizes.dense_bytes,
        "notices": [str(notice) for notice in engine.notices],
    }
    return _transformers_player(
        model,
        job=job,
        counted=lambda: _counted(engine),
        save_counts=lambda path: save_histogram(engine.histogram(), path),
        close=engine.close,
        facts=facts,
    )


def stock_player(job: Mapping[str, Any]) -> Player:
    """Transformers as it comes, all weights in memory.

    Args:
        job: folder, and in options what from_pretrained takes.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["folder"], **job["options"])
    return _transformers_player(model.eval(), job=job, reads=())


def accelerate_player(job: Mapping[str, Any]) -> Player:
    """Transformers with accelerate's disk offload: what does not fit in memory_share is read layer by layer.

    Args:
        job: folder, scratch, and in options memory_share, the share of the weights' bytes that may stay in memory.
    """
    from transformers import AutoModelForCausalLM

    copy = Path(job["scratch"]) / "offload"
    total = sum(path.stat().st_size for path in weights(Path(job["folder"])))
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"],
        device_map="auto",
        max_memory={"cpu": int(job["options"]["memory_share"] * total)},
        offload_folder=str(copy),
        experts_implementation="eager",
    )
    reads = (*weights(copy), *weights(Path(job["folder"])))
    facts = {"copied_bytes": sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())}
    return _transformers_player(model.eval(), job=job, reads=reads, facts=facts)


def llama_player(job: Mapping[str, Any]) -> Player:
    """llama.cpp over a GGUF file of the same weights, mapped, as it does by default.

    Args:
        job: gguf, threads, context_tokens.
    """
    import llama_cpp

    model = llama_cpp.Llama(
        model_path=job["gguf"],
        n_ctx=job["context_tokens"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )

    def forward(tokens: Sequence[int]) -> Logits:
        model.eval(list(tokens))
        pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),)).copy()

    return Player(
        restart=model.reset,
        forward=forward,
        reads=(Path(job["gguf"]),),
        close=model.close,
        facts={"llama_cpp_python": llama_cpp.__version__},
    )


PLAYERS: Mapping[str, Callable[[Mapping[str, Any]], Player]] = {
    "hotsplit": hotsplit_player,
    "stock": stock_player,
    "accelerate": accelerate_player,
    "llama": llama_player,
}
"""By the name that a job gives."""


def weights(folder: Path) -> tuple[Path, ...]:
    """A folder's files of weights; accelerate writes its copies in one format or the other.

    Args:
        folder: Of a checkpoint, or of copies.
    """
    return tuple(sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".dat")))


def _transformers_player(model: Any, *, job: Mapping[str, Any], **more: Any) -> Player:
    import torch
    from transformers import DynamicCache

    caches: list[Any] = []

    def restart() -> None:
        caches[:] = [DynamicCache(config=model.config)]

    def forward(tokens: Sequence[int]) -> Logits:
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([list(tokens)]), past_key_values=caches[0], use_cache=True, logits_to_keep=1
            ).logits
        last: Logits = logits[0, -1].float().numpy().copy()
        return last

    restart()
    clocked = partial(profile, model, forward)
    return Player(restart=restart, forward=forward, profile=clocked, **({"reads": weights(Path(job["folder"]))} | more))


def _counted(engine: Any) -> dict[str, Any]:
    """Counters of decode, and pairs per layer and expert, [L, E]."""
    seen, decode = engine.snapshot(), engine.histogram().phases.get("decode")
    return {
        "pairs": seen.pairs.get("decode", 0),
        "hit_pairs": seen.hit_pairs.get("decode", 0),
        "touched_hot_bytes": seen.touched_hot_bytes,
        "touched_cold_bytes": seen.touched_cold_bytes,
        "kept_bytes": seen.kept_bytes,
        "swaps": seen.swaps_done,
        "swap_bytes": seen.swap_bytes,
        "shifts": seen.shifts,
        "counts": None if decode is None else decode.counts.tolist(),
    }
