"""The flags that a release of vLLM's server has: which there are, what stands behind them, and how they may be spelled.

A file of the tested release ships (scripts/vllm_flags.py makes it of the real parser); where vLLM is installed the
command line makes the same object of that parser.

    >>> flags = shipped_flags()
    >>> flags.canonical("-tp"), flags.canonical("--tensor_parallel_size=4"), flags.canonical("--no-enable-eplb")
    ('--tensor-parallel-size', '--tensor-parallel-size', '--enable-eplb')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from hotsplit.errors import ConfigError
from hotsplit.files import canonical_json, read_json
from hotsplit.nearest import nearest

FORMAT: Final = "hotsplit-vllm-flags"
SHIPPED: Final = "0.32.0"
"""The release whose flags ship: the tested one."""
_LEVEL = "--optimization-level"
"""What vLLM makes of -O, -O3 and -O=3 before its parser sees them."""
NOTHING, ONE, SEVERAL = "nothing", "one", "several"
"""What stands behind a flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmFlag:
    """One flag."""

    names: tuple[str, ...]
    """Its spellings, the long one first."""
    takes: str
    """NOTHING, ONE or SEVERAL."""
    choices: tuple[str, ...] | None
    """What may stand behind it; None for anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmFlags:
    """All flags of a release."""

    version: str
    """Of vLLM."""
    options: tuple[VllmFlag, ...]
    """By their first name."""

    def find(self, word: str) -> VllmFlag | None:
        """The flag that a word on the command line means, in any of vLLM's spellings.

        Args:
            word: "--max_model_len", "-tp=4", "--tensor-parallel", "--speculative-config.method".
        """
        name = _plain(word)
        by_name = {spelt: option for option in self.options for spelt in option.names}
        if name in by_name:
            return by_name[name]
        begun = {id(option): option for spelt, option in by_name.items() if spelt.startswith(name)}
        return next(iter(begun.values())) if len(begun) == 1 else None

    def canonical(self, word: str) -> str:
        """The long spelling of a flag; of one that is not known, the word itself without what is behind the equals.

        Args:
            word: As it was typed.
        """
        option = self.find(word)
        return _plain(word) if option is None else option.names[0]

    def nearest(self, word: str) -> str | None:
        """The flag that a word looks like a misspelling of; None where there is none.

        Args:
            word: One that is not known.
        """
        spelt = [name for option in self.options for name in option.names]
        return nearest(_plain(word), spelt)


def _plain(word: str) -> str:
    """A flag without its value, its dots and its underscores."""
    name = word.partition("=")[0].partition(".")[0]
    if name.startswith("-O"):
        return _LEVEL
    return name.replace("_", "-") if name.startswith("--") else name


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, and no value behind one.

    Args:
        word: "-1" and "-0.5" are values.
    """
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def pairs(words: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Flags with what stands behind each.

    Args:
        words: Of a command line.

    >>> pairs(["--port", "8000", "--enable-eplb", "-tp=4"])
    [('--port', ('8000',)), ('--enable-eplb', ()), ('-tp', ('4',))]
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for word in words:
        if is_flag(word):
            name, equals, value = word.partition("=")
            if name.startswith("-O") and len(name) > len("-O"):  # -O3: vLLM takes the level without a blank
                name, equals, value = "-O", "=", name.removeprefix("-O")
            found.append((name, (value,) if equals else ()))
        elif found:
            found[-1] = (found[-1][0], (*found[-1][1], word))
    return found


def flags_bytes(flags: VllmFlags) -> bytes:
    """The file of a release's flags.

    Args:
        flags: Of a release.
    """
    return canonical_json(
        {"format": FORMAT, "version": 1, "vllm": flags.version, "flags": list(map(asdict, flags.options))}
    )


@cache
def shipped_flags() -> VllmFlags:
    """The flags of the release that this was tested with.

    Raises:
        ConfigError: The file was damaged.
    """
    path = Path(str(files("hotsplit.recipes"))) / "data" / f"vllm-flags-{SHIPPED}.json"
    content: Any = read_json(path, what="flags of vLLM", error=ConfigError)
    try:
        options = tuple(
            VllmFlag(
                names=tuple(one["names"]),
                takes=one["takes"],
                choices=None if one["choices"] is None else tuple(one["choices"]),
            )
            for one in content["flags"]
        )
        return VllmFlags(version=str(content["vllm"]), options=options)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"flags of vLLM {path}", got=repr(error), do="install hotsplit anew") from error
