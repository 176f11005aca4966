"""The engines under comparison: each loads the same checkpoint in its own way.

An entry of LOADERS is a function (model folder, options) -> Loaded. Heavy imports stay inside, so that a process holds
what its own engine needs and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """What a loader may need beside the model's folder."""

    experts_implementation: str = "eager"
    """Stock transformers' own kernel for experts."""
    fast_share: float | None = None
    """hotsplit: share of the expert bytes that may be hot."""
    dynamic: bool = False
    """hotsplit: whether hot experts follow the traffic."""
    dyn_steps: int = 2000
    """hotsplit: steps between two updates."""
    counts: str | None = None
    """hotsplit: histogram that the hot experts are chosen by."""
    scratch: Path = field(default_factory=Path)
    """A folder of this run's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model that is ready to compute."""

    model: Any
    """A transformers model."""
    reads: tuple[Path, ...] = ()
    """Files that it reads weights from while it computes; none where all of them are in memory."""
    let_go: Callable[[], None] = lambda: None
    """Unmaps what the process holds of these files, so that the page cache can drop them."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """hotsplit's own figures in bytes: hot, dense."""


def load_stock(folder: Path, options: LoadOptions) -> Loaded:
    """Transformers as it comes, all weights in memory.

    Args:
        folder: The checkpoint.
        options: The kernel for experts.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=options.experts_implementation)
    return Loaded(model=model.eval())


def load_accelerate(folder: Path, options: LoadOptions) -> Loaded:
    """Transformers with accelerate's disk offload: what does not fit in 1 GiB is read layer by layer.

    Args:
        folder: The checkpoint.
        options: Where the offloaded copy goes.
    """
    from transformers import AutoModelForCausalLM

    copy = options.scratch / "offload"
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        device_map="auto",
        max_memory={"cpu": "1GiB"},
        offload_folder=str(copy),
        experts_implementation=options.experts_implementation,
    )
    return Loaded(model=model.eval(), reads=(*_weights(copy), *_weights(folder)))


def load_hotsplit(folder: Path, options: LoadOptions) -> Loaded:
    """Load hotsplit with a share of the experts hot; nothing learned before plays a part.

    Args:
        folder: The checkpoint.
        options: Share, mode, counts.
    """
    import hotsplit
    from hotsplit.plan.checkpoint import read_headers
    from hotsplit.plan.sizes import expert_sizes
    from hotsplit.units import GIB

    share = options.fast_share or 0.0
    sizes = expert_sizes(read_headers(folder))
    # A page of slack at 100 %: the arena's own rounding is charged to the budget.
    budget = share * sizes.expert_bytes + (MIB if share == 1 else 0)
    model = hotsplit.load(
        folder,
        hot_gib=budget / GIB,
        dynamic=options.dynamic,
        dyn_steps=options.dyn_steps,
        counts=options.counts,
        state_dir=options.scratch,
        learned="ignore",
        run_when_fits=True,
    )
    return Loaded(
        model=model,
        reads=_weights(folder),
        let_go=model.hotsplit.banks.rows.drop_cold_pages,
        memory={"hot": model.hotsplit.banks.hot_bytes, "dense": sizes.dense_bytes},
    )


def _weights(folder: Path) -> tuple[Path, ...]:
    """A folder's files of weights; accelerate writes its copies in one format or the other."""
    return tuple(sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".dat")))


LOADERS: Mapping[str, Callable[[Path, LoadOptions], Loaded]] = {
    "stock": load_stock,
    "accelerate": load_accelerate,
    "hotsplit": load_hotsplit,
}
"""By the name that a job gives."""
