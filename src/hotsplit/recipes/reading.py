"""From a TOML file to a recipe: read, and every key checked.

    [facts] what the model is      [machine] [parallel] [kv] what it is served on      [settings] hotsplit's own
    [[flags]] [[variables]] what vLLM gets, with reasons       [[known_bad]] what it must not get
    [[results]] what is known of speed       [histogram] reference counts, or how to make them

Files that a recipe names lie beside it.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotsplit.config import PREFIX, HotsplitConfig
from hotsplit.errors import ConfigError
from hotsplit.files import read_bytes
from hotsplit.nearest import nearest
from hotsplit.plan.kv import DTYPE_BYTES
from hotsplit.recipes.flags import is_flag
from hotsplit.recipes.recipe import (
    Counts,
    Facts,
    KnownBad,
    KnownResult,
    KvWish,
    MachineSize,
    Recipe,
    RecipeFlag,
    RecipeVariable,
)
from hotsplit.recipes.tables import Table

FORMAT = "hotsplit-recipe"
VERSION = 1
SETTINGS = (
    "hot_gib",
    "dynamic",
    "dyn_steps",
    "dyn_max_swaps",
    "dyn_margin",
    "dyn_half_life",
    "dyn_schedule",
    "objective",
    "vram_reserve_gib",
    "numa_policy",
)
"""Settings that a recipe may make; paths are the user's own."""
OURS = {
    "--model": "model",
    "--config": "flags: one by one",
    "--tensor-parallel-size": "[parallel]",
    "--pipeline-parallel-size": "[parallel]",
    "--max-model-len": "[kv]",
    "--max-num-seqs": "[kv]",
    "--kv-cache-dtype": "[kv]",
    "--kv-cache-memory-bytes": "[kv]",
}
"""Flags that follow from other keys, and which: said twice they could differ."""
_FLAG = re.compile(r"--[a-z0-9]+(-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What a shell takes for a variable's name: anything else would be a command when the printed line is pasted."""
_MODEL = re.compile(r"[^\s-]\S*")
_MAX_BYTES = 2**20
_MAX_INTEGER = 2**53
_STATUS = "not run by us"


def read_recipe(path: Path, *, everywhere: Sequence[KnownBad] = ()) -> Recipe:
    """Read a recipe and check all of it.

    Args:
        path: The TOML file.
        everywhere: Flags that are known to be bad with any model.

    Raises:
        ConfigError: The file cannot be read or a key is wrong; names file and key.
    """
    table = open_table(path, form=FORMAT)
    base = path.parent
    recipe = Recipe(
        path=path,
        name=_name(table, path),
        title=table.text("title"),
        model=_matching(table, "model", _MODEL, wanted="a hub id or a folder, as vLLM takes it"),
        status=table.text("status", _STATUS),
        facts=_facts(table.table("facts"), base=base),
        machine=_machine(table.table("machine")),
        **_parallel(table.table("parallel", may_lack=True)),
        kv=_kv(table.table("kv")),
        settings=_settings(table.table("settings", may_lack=True)),
        flags=tuple(_flag(one) for one in table.tables("flags")),
        variables=tuple(_variable(one) for one in table.tables("variables")),
        known_bad=(*read_known_bad(table), *everywhere),
        results=tuple(_result(one) for one in table.tables("results")),
        counts=_counts(table.table("histogram"), base=base),
    )
    table.close()
    for kind, names in (("flags", [f.flag for f in recipe.flags]), ("variables", [v.name for v in recipe.variables])):
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            table.refuse(kind, got=f"{twice} more than once", do="keep one")
    return recipe


def open_table(path: Path, *, form: str) -> Table:
    """The whole of a TOML file, whose form and version are ours.

    Args:
        path: The file.
        form: What its `format` must say.

    Raises:
        ConfigError: It cannot be read, is no TOML, or is something else.
    """
    what = f"recipe {path}"
    data = read_bytes(path, what="recipe", error=ConfigError, limit=_MAX_BYTES)
    try:
        content: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))  # editors of Windows begin a file with a mark
    except (ValueError, RecursionError) as error:  # a ValueError where an integer has more digits than Python reads
        raise ConfigError(what, got=str(error), wanted="TOML", path=path) from error
    table = Table(content, what=what)
    if (said := table.text("format")) != form:
        table.refuse("format", got=repr(said), wanted=repr(form))
    if (number := table.integer("version")) != VERSION:
        table.refuse("version", got=str(number), wanted=str(VERSION), do="use a newer hotsplit")
    return table


def read_known_bad(table: Table) -> tuple[KnownBad, ...]:
    """The [[known_bad]] tables of a file.

    Args:
        table: The whole file.
    """
    return tuple(_known_bad(one) for one in table.tables("known_bad"))


def _name(table: Table, path: Path) -> str:
    name = table.text("name", path.stem)
    if "/" in name or name.endswith(".toml"):
        table.refuse("name", got=repr(name), wanted="a short name without / and .toml")
    return name


def _facts(table: Table, *, base: Path) -> Facts:
    facts = Facts(
        file=_file(table, "file", base=base),
        source=table.texts("source"),
        unknown=table.texts("unknown"),
        layers=table.integer("layers"),
        moe_layers=table.integer("moe_layers"),
        experts=table.integer("experts"),
        top_k=table.integer("top_k"),
        total_bytes=table.optional_integer("total_bytes", low=1),
        host_bytes=table.integer("host_bytes", low=0, default=0),
        draft_bytes=table.optional_integer("draft_bytes"),
    )
    if not facts.source:
        table.refuse("source", got="nothing", wanted="where these facts are public")
    table.close()
    return facts


def _file(table: Table, key: str, *, base: Path) -> Path:
    """A file that the recipe names, beside the recipe."""
    name = table.text(key)
    try:
        path = base / Path(name).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError):  # a name that no file can have; the home of a user who does not exist
        is_file = False
    if not is_file:
        table.refuse(key, got=f"{name}, which is no file in {base}", wanted="a file beside the recipe")
    return path


def _matching(table: Table, key: str, form: re.Pattern[str], *, wanted: str) -> str:
    """A text that has a form."""
    text = table.text(key)
    if form.fullmatch(text) is None:
        table.refuse(key, got=repr(text), wanted=wanted)
    return text


def _machine(table: Table) -> MachineSize:
    machine = MachineSize(
        gpus=table.integer("gpus"), vram_gib=table.number("vram_gib"), ram_gib=table.number("ram_gib")
    )
    table.close()
    return machine


def _parallel(table: Table) -> dict[str, Any]:
    sizes = {"tp": table.integer("tp", default=1), "pp": table.integer("pp", default=1)}
    table.close()
    return sizes


def _kv(table: Table) -> KvWish:
    wish = KvWish(
        context=table.integer("context"),
        concurrency=table.integer("concurrency"),
        dtype=table.optional_text("dtype"),
        gib=table.optional_number("gib"),
        why=table.text("why", ""),
    )
    if wish.dtype is not None and wish.dtype not in DTYPE_BYTES:
        near = nearest(wish.dtype, DTYPE_BYTES)
        do = f"did you mean {near}?" if near else None
        table.refuse("dtype", got=repr(wish.dtype), wanted=" or ".join(DTYPE_BYTES), do=do)
    table.close()
    return wish


def _settings(table: Table) -> dict[str, object]:
    """Settings by field name, each held against its own rule."""
    values = table.values()
    for name, value in values.items():
        if name not in SETTINGS:
            near = nearest(name, SETTINGS)
            do = f"did you mean {near}?" if near else f"leave it out: recipes make {', '.join(SETTINGS)}"
            table.refuse(name, got="a setting that recipes do not make", do=do)
        if type(value) is int and abs(value) > _MAX_INTEGER:
            table.refuse(name, got="an integer beyond 2^53", wanted="a number that a machine has")
        try:
            HotsplitConfig.from_options({}, {name: value})
        except ConfigError as error:
            raise ConfigError(
                f"{table.what}, {table.where}.{name}", got=error.got, wanted=error.wanted, do=error.do
            ) from error
    return values


def _flag(table: Table) -> RecipeFlag:
    name = _matching(table, "flag", _FLAG, wanted="vLLM's long spelling, as --moe-backend")
    flag = RecipeFlag(flag=name, value=table.words("value"), why=table.text("why"))
    if name in OURS:
        table.refuse("flag", got=name, do=f"say it in {OURS[name]}, from which this flag follows")
    if any(map(is_flag, flag.value)):
        table.refuse("value", got=repr(list(flag.value)), wanted="what stands behind this flag, and no other flag")
    table.close()
    return flag


def _variable(table: Table) -> RecipeVariable:
    words = table.words("value")
    name = _matching(table, "name", _VARIABLE, wanted="a variable's name, as VLLM_USE_DEEP_GEMM")
    variable = RecipeVariable(name=name, value=words[0] if words else "", why=table.text("why"))
    if len(words) != 1:
        table.refuse("value", got=repr(list(words)), wanted="one value")
    if variable.name.startswith(PREFIX):
        table.refuse("name", got=variable.name, do="say it in [settings]")
    table.close()
    return variable


def _known_bad(table: Table) -> KnownBad:
    flag, variable = table.optional_text("flag"), table.optional_text("variable")
    if (flag is None) == (variable is None):
        table.refuse("flag", got="both or none of flag and variable", wanted="one of them")
    if flag is not None and _FLAG.fullmatch(flag) is None:
        table.refuse("flag", got=repr(flag), wanted="vLLM's long spelling, as --moe-backend")
    if variable is not None and _VARIABLE.fullmatch(variable) is None:
        table.refuse("variable", got=repr(variable), wanted="a variable's name, as VLLM_USE_DEEP_GEMM")
    words = table.words("value")
    if len(words) > 1:
        table.refuse("value", got=repr(list(words)), wanted="one value, or none for any")
    bad = KnownBad(
        name=flag or variable or "",
        value=words[0] if words else None,
        harmless=table.words("harmless"),
        is_refused=table.truth("refused"),
        why=table.text("why"),
        source=table.text("source"),
    )
    table.close()
    return bad


def _result(table: Table) -> KnownResult:
    words = table.words("value")
    result = KnownResult(
        what=table.text("what"), value=" ".join(words), on=table.text("on"), source=table.text("source")
    )
    if not words:
        table.refuse("value", got="nothing", wanted="the figure")
    table.close()
    return result


def _counts(table: Table, *, base: Path) -> Counts:
    has_file = table.has("file")
    counts = Counts(
        file=_file(table, "file", base=base) if has_file else None,
        source=table.text("source", ""),
        licence=table.text("licence", ""),
        steps=table.texts("steps"),
    )
    if has_file and not (counts.source and counts.licence):
        table.refuse("licence", got="a file without source and licence", wanted="both")
    if not has_file and not counts.steps:
        table.refuse("steps", got="neither a file nor steps that make one", wanted="one of them")
    table.close()
    return counts
