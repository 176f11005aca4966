"""What vLLM gets: a recipe's flags and variables, beaten by the user's, with a word on every difference.

layout, KV cache, flags of the recipe  +  flags behind --  ->  one command line
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotsplit.notices import Notice
from hotsplit.recipes.flags import VllmFlags, pairs
from hotsplit.recipes.recipe import KnownBad, Recipe, RecipeFlag
from hotsplit.recipes.weighing import kv_bytes

_KV_BYTES = "--kv-cache-memory-bytes"
_MAX_DIGITS = 15
"""Of a size that a machine may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A recipe and a user's wishes in one."""

    flags: tuple[str, ...]
    """All of vLLM's, the recipe's first."""
    variables: Mapping[str, str]
    """Those of the recipe that the environment does not have."""
    notices: tuple[Notice, ...]
    """What was overridden, and what is known to be bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wishes:
    """A user's flags and environment, by the long spelling of each flag."""

    flags: Mapping[str, tuple[str, ...]]
    """Words behind the last of several."""
    shown: Mapping[str, str]
    """The last of several with its words, for people; every one of a flag that was given by its parts."""
    negated: frozenset[str]
    """Those whose last was --no-..."""
    environ: Mapping[str, str]
    """Variables by name."""


def compose(recipe: Recipe, *, flags: Sequence[str], environ: Mapping[str, str], vllm: VllmFlags) -> Composed:
    """Put a recipe and a user's wishes together; the user's win.

    Args:
        recipe: A recipe.
        flags: vLLM's, as the user typed them.
        environ: The user's.
        vllm: How flags may be spelled.
    """
    wishes = _wishes(flags, environ=environ, vllm=vllm)
    notices = [*_known_bad(recipe, wishes), *_config_file(wishes)]
    kept: list[str] = []
    for flag in (*layout_flags(recipe), *recipe.flags):
        if flag.flag in wishes.flags:
            notices += _beaten(flag, wishes)
        else:
            kept += [flag.flag, *flag.value]
    sized, said = _kv_flag(recipe, wishes)
    variables = {one.name: one.value for one in recipe.variables if not environ.get(one.name, "").strip()}
    for one in recipe.variables:
        if one.name not in variables and environ[one.name] != one.value:
            text = f"{one.name}={environ[one.name]} of the environment beats the recipe's {one.value} ({one.why})"
            notices.append(Notice(name="recipe-overridden", text=text, strict=False))
    return Composed(flags=(*kept, *sized, *flags), variables=variables, notices=(*notices, *said))


def _wishes(flags: Sequence[str], *, environ: Mapping[str, str], vllm: VllmFlags) -> _Wishes:
    """A user's flags by their long spelling; of several the last counts, as for vLLM's parser."""
    last: dict[str, tuple[str, ...]] = {}
    shown: dict[str, str] = {}
    negated: dict[str, bool] = {}
    for spelt, words in pairs(flags):
        name = vllm.canonical(spelt)
        dot, part = spelt.partition(".")[1:]
        negated[name] = spelt.replace("_", "-").startswith("--no-") and not name.startswith("--no-")
        long = f"--no-{name.removeprefix('--')}" if negated[name] else name
        whole = " ".join((f"{long}{dot}{part}", *words))
        shown[name] = f"{shown[name]} {whole}" if dot and name in shown else whole
        last[name] = words
    return _Wishes(
        flags=last, shown=shown, negated=frozenset(name for name, off in negated.items() if off), environ=environ
    )


def _config_file(wishes: _Wishes) -> Iterator[Notice]:
    """A file of flags is weaker than a command line for vLLM, and so weaker than the recipe."""
    if "--config" in wishes.flags:
        text = "the recipe's flags beat those in the file behind your --config, as a command line does for vLLM: give them behind -- too"
        yield Notice(name="recipe-config-file", text=text, strict=False)


def layout_flags(recipe: Recipe) -> tuple[RecipeFlag, ...]:
    """The flags that follow from layout and KV cache, but for the cache's bytes.

    Args:
        recipe: A recipe.
    """
    kv = recipe.kv
    values = {
        "--tensor-parallel-size": (recipe.tp, recipe.tp > 1, "one rank per GPU, experts cut over all"),
        "--pipeline-parallel-size": (recipe.pp, recipe.pp > 1, "stages of layers"),
        "--max-model-len": (kv.context, True, kv.why),
        "--max-num-seqs": (kv.concurrency, True, kv.why),
        "--kv-cache-dtype": (kv.dtype, kv.dtype is not None, kv.why),
    }
    return tuple(
        RecipeFlag(flag=name, value=(str(value),), why=why) for name, (value, is_said, why) in values.items() if is_said
    )


def _beaten(flag: RecipeFlag, wishes: _Wishes) -> Iterator[Notice]:
    """A flag of the recipe that the user set to something else."""
    theirs, negated = wishes.flags[flag.flag], flag.flag in wishes.negated
    if theirs != flag.value or negated:
        ours = " ".join((flag.flag, *flag.value))
        yours = wishes.shown[flag.flag]
        reason = f" ({flag.why})" if flag.why else ""
        yield Notice(name="recipe-overridden", text=f"your {yours} beats the recipe's {ours}{reason}", strict=False)


def _kv_flag(recipe: Recipe, wishes: _Wishes) -> tuple[list[str], list[Notice]]:
    """The KV cache in bytes, for the layout that rules; left to vLLM where that is not known."""
    if _KV_BYTES in wishes.flags:
        text = f"your {_KV_BYTES} beats what the recipe's context and concurrency take"
        return [], [Notice(name="recipe-overridden", text=text, strict=False)]
    sizes = [
        _number(wishes.flags.get(name), default)
        for name, default in (
            ("--tensor-parallel-size", recipe.tp),
            ("--max-model-len", recipe.kv.context),
            ("--max-num-seqs", recipe.kv.concurrency),
        )
    ]
    dtype = (wishes.flags.get("--kv-cache-dtype") or (recipe.kv.dtype,))[-1]
    known = {recipe.kv.dtype, "bfloat16", "float16", "fp8"}
    known |= {"auto"} if recipe.kv.dtype is None else set()  # else the checkpoint may say another type than the recipe
    if None in sizes or dtype not in known:
        text = "the KV cache is left to vLLM: your flags do not tell its size in numbers"
        return [], [Notice(name="recipe-kv-open", text=text, strict=False)]
    tp, context, concurrency = (size or 1 for size in sizes)
    size = kv_bytes(
        recipe, tp=tp, context=context, concurrency=concurrency, kv_dtype=None if dtype == "auto" else dtype
    )
    if size is None and wishes.flags.keys() & {"--tensor-parallel-size", "--kv-cache-dtype"}:
        text = "the KV cache is left to vLLM: the recipe chose its size for other ranks or another type"
        return [], [Notice(name="recipe-kv-open", text=text, strict=False)]
    return ([], []) if size is None else ([_KV_BYTES, str(size)], [])


def _number(words: tuple[str, ...] | None, default: int) -> int | None:
    """A whole number as the user typed it; None for a word."""
    if words is None:
        return default
    text = words[-1] if words else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text) >= 1 else None


def _known_bad(recipe: Recipe, wishes: _Wishes) -> Iterator[Notice]:
    """What the user asks for and the recipe knows to do harm."""
    for bad in recipe.known_bad:
        theirs = _asked(bad, wishes)
        if theirs is not None:
            text = f"{theirs} is known to be bad here: {bad.why} ({bad.source})"
            yield Notice(name="known-bad-flag", text=text)


def _asked(bad: KnownBad, wishes: _Wishes) -> str | None:
    """How the user asks for something bad; None where nobody does."""
    if not bad.is_flag:
        value = wishes.environ.get(bad.name, "").strip()
        return f"{bad.name}={value}" if value and _matches(bad, (value,)) else None
    words = wishes.flags.get(bad.name)
    if words is None or bad.name in wishes.negated or not _matches(bad, words):
        return None
    return wishes.shown[bad.name]


def _matches(bad: KnownBad, words: tuple[str, ...]) -> bool:
    """Whether these words behind a flag are the bad ones."""
    given = {_folded(word) for word in words}
    if given & {_folded(word) for word in bad.harmless}:
        return False
    return bad.value is None or _folded(bad.value) in given


def _folded(word: str) -> str:
    """A value as vLLM compares it: names of kernels are taken with dashes and capitals too."""
    return word.lower().replace("-", "_")
