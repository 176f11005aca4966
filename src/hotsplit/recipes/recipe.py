"""A recipe as it is once it was read and checked: plain values, each with its reason or its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What config.json and the checkpoint's headers are known to say."""

    file: Path
    """The fields of config.json that say what the model weighs."""
    source: tuple[str, ...]
    """Where they were read, publicly."""
    unknown: tuple[str, ...]
    """What could not be found, in words: it is left out, never guessed."""
    layers: int
    """Decoder layers, dense ones included, draft ones not."""
    moe_layers: int
    """Decoder layers with routed experts."""
    experts: int
    """Routed experts per layer."""
    top_k: int
    """Experts per token."""
    total_bytes: int | None
    """Of all safetensors files; None where nobody tells."""
    host_bytes: int
    """Of these, what the recipe's flags keep in host memory beside experts (an Engram table)."""
    draft_bytes: int | None
    """Of these, draft layers; None to take them by the config's number of such layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSize:
    """The machine that the recipe is for."""

    gpus: int
    """One rank each."""
    vram_gib: float
    """Of one GPU, as its driver tells."""
    ram_gib: float
    """Of the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvWish:
    """The KV cache that is asked for."""

    context: int
    """Tokens per sequence."""
    concurrency: int
    """Sequences at once."""
    dtype: str | None
    """vLLM's --kv-cache-dtype; None for the model's own."""
    gib: float | None
    """On one rank, where it is chosen and not computed: the fields of some configs do not tell."""
    why: str
    """For this much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeFlag:
    """One flag that vLLM gets."""

    flag: str
    """In its long spelling, "--moe-backend"."""
    value: tuple[str, ...]
    """Words behind it; none for a switch."""
    why: str
    """One sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeVariable:
    """One variable that vLLM gets."""

    name: str
    """Of vLLM or its libraries, never HOTSPLIT_."""
    value: str
    """As text."""
    why: str
    """One sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """A flag or variable that is known to do harm."""

    name: str
    """Flag in its long spelling, or variable."""
    value: str | None
    """With this value; None for any."""
    harmless: tuple[str, ...]
    """Values with which it does nothing."""
    is_refused: bool
    """Whether hotsplit refuses it, so that nobody can run into it."""
    why: str
    """What happens, and what to do instead."""
    source: str
    """Who says so."""

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag, else a variable."""
        return self.name.startswith("-")

    def __str__(self) -> str:
        between = " " if self.is_flag else "="
        return self.name if self.value is None else f"{self.name}{between}{self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownResult:
    """One figure that somebody has published, or measured here."""

    what: str
    """What was measured, with its unit."""
    value: str
    """The figure."""
    on: str
    """Machine and software."""
    source: str
    """Where it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The reference histogram, or how to make one."""

    file: Path | None
    """None where no free one exists."""
    source: str
    """Where it comes from; empty without one."""
    licence: str
    """Its licence; empty without one."""
    steps: tuple[str, ...]
    """Commands that make one of one's own traffic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is known of one model on one kind of machine."""

    path: Path
    """The TOML file."""
    name: str
    """Short, for the command line."""
    title: str
    """For people."""
    model: str
    """Hub id that serves without a folder of one's own."""
    status: str
    """What of it was run, and where."""
    facts: Facts
    """What the model is."""
    machine: MachineSize
    """What it is served on."""
    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    kv: KvWish
    """What of its memory the cache takes."""
    settings: Mapping[str, object]
    """Of hotsplit, by field name, as they were written."""
    flags: tuple[RecipeFlag, ...]
    """Of vLLM, beside those of layout and KV cache."""
    variables: tuple[RecipeVariable, ...]
    """Of vLLM and its libraries."""
    known_bad: tuple[KnownBad, ...]
    """The recipe's own first, then those of every recipe."""
    results: tuple[KnownResult, ...]
    """What others, or we, have measured."""
    counts: Counts
    """What the plan is made from."""
