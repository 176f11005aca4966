"""The settings: one frozen object, read once, every value with its origin.

Decides what HOTSPLIT_ variables and options mean, and refuses what they must not be. Stands at the edge of the flow:
the command line and an engine's register() make one and hand plain values on; plan, host and bank never see it.

An option beats the environment, the environment a recipe, and a recipe the default; all pass the same checks. An empty or blank
variable is the same as none at all. Blanks around a number or a word are ignored; digits are ASCII and carry no
underscores; a switch is 0 or 1, from Python also False or True.

    >>> config = HotsplitConfig.from_options({"HOTSPLIT_HOT_GIB": "8", "HOTSPLIT_DYN_STEPS": "500"}, hot_gib=12)
    >>> config.hot_gib, config.origin("hot_gib"), config.dyn_steps, config.origin("dyn_steps")
    (12.0, 'option', 500, 'environment')
    >>> HotsplitConfig.from_env({"HOTSPLIT_DYN_MARGIN": "0.9"})
    Traceback (most recent call last):
        ...
    hotsplit.errors.ConfigError: HOTSPLIT_DYN_MARGIN: got '0.9'; wanted a finite number >= 1; leave it out for 1.25
    >>> HotsplitConfig.from_options({}, dyn_margin=0.9)
    Traceback (most recent call last):
        ...
    hotsplit.errors.ConfigError: dyn_margin (--dyn-margin): got 0.9; wanted a finite number >= 1; leave it out for 1.25
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import numbers
import os.path
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from hotsplit.errors import ConfigError
from hotsplit.nearest import nearest
from hotsplit.units import GIB

PREFIX: Final = "HOTSPLIT_"
Origin = Literal["default", "recipe", "environment", "option"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What one setting may be."""

    values: str
    """The allowed values, for messages and for the docs."""
    parse: Callable[[object], object]
    """Text or Python value in, checked value out; ValueError when it is not allowed."""


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value.strip()


def _matched(pattern: re.Pattern[str], value: object) -> str:
    """The text of a number. A bool, which Python counts among the numbers, has none: "True" matches no pattern."""
    text = str(value) if isinstance(value, numbers.Real) else _as_text(value)
    if not pattern.fullmatch(text):
        raise ValueError(text)
    return text


def _number(low: int, *, inclusive: bool = True) -> _Rule:
    def parse(value: object) -> float:
        number = float(_matched(_NUMBER, value))
        if not math.isfinite(number) or number < low or (number == low and not inclusive):
            raise ValueError(value)
        return number + 0.0  # -0.0 becomes 0.0

    return _Rule(values=f"a finite number {'>=' if inclusive else '>'} {low}", parse=parse)


def _integer(low: int) -> _Rule:
    def parse(value: object) -> int:
        number = int(_matched(_INTEGER, value))
        if number < low:
            raise ValueError(value)
        return number

    return _Rule(values=f"an integer >= {low}", parse=parse)


def _switch() -> _Rule:
    def parse(value: object) -> bool:
        if isinstance(value, numbers.Integral) and value in (0, 1):
            return bool(value)
        return {"0": False, "1": True}[_as_text(value)]

    return _Rule(values="0 or 1", parse=parse)


def _choice(*names: str) -> _Rule:
    def parse(value: object) -> str:
        text = _as_text(value)
        if text not in names:
            raise ValueError(text)
        return text

    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return _Rule(values=listed, parse=parse)


def _expand_user(value: object) -> str:
    """A leading ~ is the user's folder, also where no shell has seen to it."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(value)
    return os.path.expanduser(os.fspath(value))


def _path() -> _Rule:
    return _Rule(values="a path", parse=lambda value: Path(_expand_user(value)))


def _setting(rule: _Rule, *, default: object = None) -> Any:
    """A dataclass field with its rule. Any, as `dataclasses.field` is to its own caller."""
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HotsplitConfig:
    """All settings of one run, checked.

    Make one with `from_env` or `from_options`; the constructor checks its arguments in the same way.

    Raises:
        ConfigError: A value is not allowed.
    """

    hot_gib: float | None = _setting(_number(0))
    """Hot budget per rank in GiB, everything that hotsplit takes of fast memory counted. Without it: what the engine's own
    placement would keep in fast memory; with the transformers engine on a CPU that is the RAM that is available, less the
    reserve, less the dense weights."""
    dynamic: bool = _setting(_switch(), default=True)
    """Whether the hot experts follow the live traffic while the model runs."""
    dyn_steps: int = _setting(_integer(1), default=2000)
    """Engine steps between two updates."""
    dyn_max_swaps: int = _setting(_integer(1), default=2)
    """Swaps per layer and update, at most."""
    dyn_margin: float = _setting(_number(1), default=1.25)
    """A cold expert replaces a hot one only if its score is more than this many times as high."""
    vram_reserve_gib: float = _setting(_number(0), default=2.0)
    """Fast memory in GiB that is left free for all else, such as activations, the KV cache and CUDA graphs: RAM with the
    transformers engine on a CPU, GPU memory where an engine runs on a GPU."""
    numa_policy: str = _setting(_choice("preferred", "bind", "off"), default="preferred")
    """How cold rows are bound to the memory next to their GPU: as a wish, as a must, or not at all."""
    enable: bool | None = _setting(_switch())
    """0 turns hotsplit off (the other values are checked all the same), 1 turns it on with all defaults. Without it:
    on as soon as any setting is given."""
    counts: str | None = _setting(_Rule(values="a path, or FILE#SET", parse=_expand_user))
    """Histogram that the plan is made from. Without it: the same number of hot experts in every layer, said aloud."""
    plan: Path | None = _setting(_path())
    """Plan that is used as it is; counts then only score it. Without it: a plan is made at start."""
    learned: str = _setting(_choice("use", "ignore"), default="use")
    """Whether counts that earlier runs have learned take part in the plan."""
    state_dir: Path | None = _setting(_path())
    """Where learned counts and the snapshots of runs go. Without it: the user's cache folder; never the model's folder."""
    objective: str = _setting(_choice("share", "time"), default="share")
    """What the plan gets most of for its bytes: routed tokens (share), or steps without a cold read (time)."""
    strict: bool = _setting(_switch(), default=False)
    """Whether warnings about inputs are errors."""
    dyn_half_life: float = _setting(_number(0, inclusive=False), default=10.0)
    """Updates after which a count weighs half."""
    dyn_schedule: str = _setting(_choice("fixed", "adaptive"), default="fixed")
    """fixed: at every update, if wanted dyn_margin times as much. adaptive: looks every ten steps, quick after a start or a
    shift of the traffic, slow else, within a bound on bytes moved (docs/policy.md); dyn_margin has no part in it."""
    kernel: str = _setting(_choice("exact", "fast"), default="exact")
    """How the transformers engine computes experts on a CPU: bit-identical to its own eager code, or up to 16 tokens at a
    time by native code, within a tolerance (docs/fast-kernel.md). Refused on a GPU, which has kernels of its own."""
    bank_dir: Path | None = _setting(_path())
    """Where an engine that keeps cold rows in files of its own puts them. Without it: the state folder."""
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    """Where each value comes from, by field name; what is not named is filled in at construction."""

    def __post_init__(self) -> None:
        """Check every value, and fill in the origins."""
        origins: dict[str, Origin] = {}
        for setting in _setting_fields():
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                value = _checked(setting, value, origin="option")
                object.__setattr__(self, setting.name, value)
            origins[setting.name] = "default" if value == setting.default else "option"
        object.__setattr__(self, "origins", origins | dict(self.origins))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> HotsplitConfig:
        """Read the settings from an environment; the only reader there is.

        Args:
            environ: Variables by name; those without the prefix are not looked at.

        Raises:
            ConfigError: A HOTSPLIT_ name is unknown, or a value is not allowed.
        """
        return cls.from_options(environ)

    @classmethod
    def from_options(
        cls, environ: Mapping[str, str], recipe: Mapping[str, object] | None = None, /, **options: object
    ) -> HotsplitConfig:
        """Read the settings from an environment, and let options beat it.

        Args:
            environ: Variables by name; {} where the environment must not matter.
            recipe: By field name: what holds where neither says anything.
            **options: By field name; None means not given, an empty string the default whatever the environment says.

        Raises:
            ConfigError: A name is unknown, or a value is not allowed.
        """
        known = {setting.name: setting for setting in _setting_fields()}
        names, variables = {name: name for name in known}, {variable_name(name): name for name in known}
        given: dict[str, tuple[object, Origin]] = {}
        for name, value in (recipe or {}).items():
            given[_known(name, names, what=f"recipe setting {name}")] = (value, "recipe")
        for name in sorted(name for name in environ if name.startswith(PREFIX)):
            key = _known(name, variables, what=name)
            if environ[name].strip():
                given[key] = (environ[name], "environment")
        for name, value in options.items():
            key = _known(name, names, what=f"option {name}")
            if value is not None:
                given[key] = (value, "option")
        values: dict[str, Any] = {
            name: known[name].default
            if isinstance(value, str) and not value.strip()
            else _checked(known[name], value, origin=origin)
            for name, (value, origin) in given.items()
        }
        return cls(**values, origins={name: origin for name, (_, origin) in given.items()})

    @property
    def is_on(self) -> bool:
        """Whether an engine that loads every plugin should use hotsplit: some setting is given, and `enable` is not 0."""
        return self.enable is not False and any(origin != "default" for origin in self.origins.values())

    @property
    def hot_bytes(self) -> int | None:
        """The hot budget per rank in bytes, None where it is not given."""
        return None if self.hot_gib is None else _gib_to_bytes(self.hot_gib)

    @property
    def vram_reserve_bytes(self) -> int:
        """The reserve in bytes."""
        return _gib_to_bytes(self.vram_reserve_gib)

    @property
    def state_path(self) -> Path:
        """`state_dir`, or the user's cache folder for hotsplit."""
        if self.state_dir is not None:
            return self.state_dir
        import platformdirs

        return Path(platformdirs.user_cache_dir("hotsplit", appauthor=False))

    @property
    def bank_path(self) -> Path:
        """`bank_dir`, or the state folder."""
        return self.state_path if self.bank_dir is None else self.bank_dir

    def origin(self, name: str) -> Origin:
        """Where the value of a field comes from: "default", "recipe", "environment" or "option"."""
        return self.origins[name]

    def rows(self) -> list[tuple[str, str, str]]:
        """A table of all settings: variable, value as it would be written there, origin."""
        names = [setting.name for setting in _setting_fields()]
        return [(variable_name(name), as_written(getattr(self, name)), self.origins[name]) for name in names]

    def __repr__(self) -> str:
        values = (f"{s.name}={getattr(self, s.name)!r} [{self.origins[s.name]}]" for s in _setting_fields())
        return f"HotsplitConfig({', '.join(values)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingInfo:
    """What is to be told about one setting, in the docs and in a command's help."""

    name: str
    """The field's name, "hot_gib"."""
    variable: str
    """The environment variable, "HOTSPLIT_HOT_GIB"."""
    option: str
    """The option of a command, "--hot-gib"."""
    values: str
    """The allowed values."""
    default: str
    """The default as it would be written; empty where there is none."""
    meaning: str
    """The field's docstring, on one line."""


@cache
def settings() -> tuple[SettingInfo, ...]:
    """All settings in the order of the fields; the meanings are the fields' docstrings."""
    meanings = _field_docstrings(HotsplitConfig)
    return tuple(
        SettingInfo(
            name=setting.name,
            variable=variable_name(setting.name),
            option=option_name(setting.name),
            values=_rule(setting).values,
            default=as_written(setting.default),
            meaning=meanings[setting.name],
        )
        for setting in _setting_fields()
    )


def variable_name(name: str) -> str:
    """The environment variable of a field: "hot_gib" -> "HOTSPLIT_HOT_GIB"."""
    return PREFIX + name.upper()


def option_name(name: str) -> str:
    """The option of a field: "hot_gib" -> "--hot-gib"."""
    return f"--{name.replace('_', '-')}"


def as_written(value: object) -> str:
    """A value as one would write it into the environment: True -> "1", 2.0 -> "2", None -> ""."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


@cache
def _setting_fields() -> tuple[Field[Any], ...]:
    return tuple(candidate for candidate in fields(HotsplitConfig) if "rule" in candidate.metadata)


def _rule(setting: Field[Any]) -> _Rule:
    rule: _Rule = setting.metadata["rule"]
    return rule


def _known(name: str, keys: Mapping[str, str], *, what: str) -> str:
    """The field that a name stands for."""
    if name in keys:
        return keys[name]
    bare = {key.removeprefix(PREFIX): key for key in keys}  # what all names begin with makes none of them likely
    near = bare.get(nearest(name.removeprefix(PREFIX), bare) or "")
    do = f"did you mean {near}?" if near else "docs/configuration.md lists them"
    raise ConfigError(what, got="an unknown setting", do=do, setting=name, nearest=near)


def _checked(setting: Field[Any], value: object, *, origin: Origin) -> object:
    """A value that its rule allows, or one error that says where it came from and what is allowed."""
    rule = _rule(setting)
    named = f"{setting.name} ({option_name(setting.name)})"  # as it is typed in Python, and at a prompt
    try:
        return rule.parse(value)
    except (ValueError, KeyError, OverflowError) as error:
        default, shown = as_written(setting.default), repr(value)
        way_out = f"leave it out for {default}" if default else "or leave it out"
        raise ConfigError(
            variable_name(setting.name) if origin == "environment" else named,
            got=shown if len(shown) <= 80 else f"{shown[:77]}...",
            wanted=rule.values,
            do=way_out,
            setting=variable_name(setting.name),
            value=value,
            origin=origin,
        ) from error


def _gib_to_bytes(gib: float) -> int:
    """Whole bytes, rounded down; exact, so that no finite number of GiB overflows."""
    return int(Fraction(gib) * GIB)


def _field_docstrings(kind: type) -> dict[str, str]:
    """The string under each field, on one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        name.id: " ".join(text.split())
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(name := statement.target, ast.Name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(text := following.value.value, str)
    }
