"""Who takes part in a race, and what everyone computes.

Two races. In "cached" everything fits the page cache: what does hotsplit cost, or save, where it is not needed? In
"drift" the model is larger than memory, and traffic changes its domain twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from make_large_model import LargeShape, domain_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One row of a race."""

    engine: str
    """Name in race_players.PLAYERS."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For its player."""
    max_s: float | None = None
    """Longest time that one part of the script may take; None for no bound."""
    parts: int | None = None
    """How many of the script's parts it plays; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """How many tokens."""

    prompt: int = 512
    """Of a cached prefill."""
    skipped: int = 4
    """Decoded before cached timing begins."""
    decoded: int = 64
    """Timed, cached."""
    warm_up: int = 50
    """Decoded before drift timing begins."""
    part: int = 150
    """Of a timed part of a drift race."""
    settled: int = 400
    """Of a part whose hit rate is compared with the oracle's: the shorter, the more an oracle in hindsight owes to luck."""
    profile: int = 512
    """Other tokens, by whose counts experts are chosen at first."""


STOCK = "stock eager"
"""What hotsplit's exact kernel promises to equal."""
LLAMA = "llama.cpp"
NONE_HOT = "hotsplit, none hot"
"""The page cache alone: what the split is worth is what it adds to this one."""
AS_IT_COMES = "hotsplit, as it comes"
"""No budget given: load() takes what memory there is, for hot rows and slots."""
_MOST_S = 30
"""Longest time for a part of a row of which only speed is asked."""
_LONG_S = 150
"""The same of rows that must settle."""


def cached_entries(kernels: Sequence[str]) -> dict[str, Entry]:
    """Everyone, with everything in memory.

    Args:
        kernels: hotsplit's, each raced with all experts hot and with none.
    """
    return {
        STOCK: Entry(engine="stock", options={"experts_implementation": "eager"}),
        "stock grouped_mm": Entry(engine="stock", options={"experts_implementation": "grouped_mm"}),
        LLAMA: Entry(engine="llama"),
        **{
            f"hotsplit {kernel}, {words}": Entry(
                engine="hotsplit", options={"fast_share": share, "kernel": kernel, "dynamic": False}
            )
            for kernel in kernels
            for share, words in ((1.0, "all hot"), (0.0, "none hot"))
        },
    }


def drift_entries(kernel: str, *, counts: str, dynamic: Mapping[str, Any]) -> dict[str, Entry]:
    """Everyone, beyond memory.

    Args:
        kernel: hotsplit's.
        counts: Histogram that the hot experts are chosen by.
        dynamic: Settings of the dynamic rows.
    """
    # A race has the machine to itself, and its budgets are stated: no reserve for others.
    common = {"kernel": kernel, "vram_reserve_gib": 0}
    none_hot = {**common, "fast_share": 0.0, "dynamic": False}
    entries = {NONE_HOT: Entry(engine="hotsplit", options=none_hot, max_s=_MOST_S)}
    for share in (0.3, 0.5):
        for words, settings in (("static", {"dynamic": False}), ("dynamic", {"dynamic": True, **dynamic})):
            options = {**common, "fast_share": share, "counts": counts, **settings}
            most = _LONG_S if settings["dynamic"] else _MOST_S
            entries[f"hotsplit, {share:.0%} hot, {words}"] = Entry(engine="hotsplit", options=options, max_s=most)
    for words, settings in (("static", {"dynamic": False}), ("dynamic", {"dynamic": True, **dynamic})):
        options = {"kernel": kernel, "fast_share": None, "counts": counts, **settings}
        most = _LONG_S if settings["dynamic"] else _MOST_S
        entries[f"{AS_IT_COMES}, {words}"] = Entry(engine="hotsplit", options=options, max_s=most)
    # Seconds per token: fewer tokens are measured, and the result says how many. llama.cpp comes last: its copy of all
    # weights may need the room that accelerate's copies had.
    return entries | {
        "accelerate disk offload": Entry(engine="accelerate", options={"memory_share": 0.5}, max_s=60, parts=2),
        LLAMA: Entry(engine="llama", max_s=60),
    }


def cached_script(vocabulary: int, *, amounts: Amounts, seed: int) -> list[dict[str, Any]]:
    """A prompt and a continuation, once to warm up and once timed.

    Args:
        vocabulary: Token ids.
        amounts: How many tokens.
        seed: Of the tokens.
    """
    dice = _dice(seed)
    prompt, first = dice(vocabulary, amounts.prompt), dice(vocabulary, amounts.skipped)
    rest = dice(vocabulary, amounts.decoded)
    return [
        _part("warm-up", prompt, restarts=True, at_once=True),
        _part("warm-up decode", first),
        _part("prefill", prompt, restarts=True, at_once=True),
        _part("skipped", first),
        _part("decode", rest, is_kept=True),
    ]


DRIFT_PARTS = ("domain 0", "0 to 1", "domain 1", "1 to 0", "domain 0 again")
"""Timed parts; those named by two numbers come right after a change, those behind them have settled."""
SETTLED = ("domain 1", "domain 0 again")
"""Where the hit rate is compared with the oracle's."""


def drift_script(shape: LargeShape, *, amounts: Amounts, seed: int, max_s: float | None) -> list[dict[str, Any]]:
    """Tokens one by one: of domain 0, then 1, then 0 again.

    Args:
        shape: Of the model.
        amounts: How many tokens.
        seed: Of the tokens.
        max_s: Longest time for one part.
    """
    parts = [_part("warm-up", domain_tokens(shape, domain=0, number=amounts.warm_up, seed=seed), restarts=True)]
    for place, (name, domain) in enumerate(zip(DRIFT_PARTS, (0, 1, 1, 0, 0), strict=True), start=1):
        number = amounts.settled if name in SETTLED else amounts.part
        tokens = domain_tokens(shape, domain=domain, number=number, seed=seed + place)
        parts.append(_part(name, tokens, is_kept=place == 1))
    return [{**part, "max_s": max_s} for part in parts]


def profile_script(shape: LargeShape, *, amounts: Amounts, seed: int) -> list[dict[str, Any]]:
    """Other tokens of domain 0, all at once.

    Args:
        shape: Of the model.
        amounts: How many tokens.
        seed: Of the tokens; another than the race's.
    """
    return [
        _part("profile", domain_tokens(shape, domain=0, number=amounts.profile, seed=seed), restarts=True, at_once=True)
    ]


def _part(
    name: str, tokens: Sequence[int], *, restarts: bool = False, at_once: bool = False, is_kept: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "tokens": list(tokens),
        "restarts": restarts,
        "at_once": at_once,
        "is_kept": is_kept,
        "max_s": None,
    }


def _dice(seed: int) -> Any:
    import numpy as np

    source = np.random.default_rng(seed)
    return lambda size, number: source.integers(size, size=number).tolist()
