"""What a recipe may say, and how one that says something else is refused: by file, key and nearest known name."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.errors import ConfigError
from hotsplit.recipes import load, names
from hotsplit.recipes.shelf import data_folder, is_recipe, known_bad_everywhere
from hotsplit.recipes.tables import Table


def test_a_users_own_recipe_is_read_by_its_path(write_recipe):
    recipe = load(str(write_recipe()))
    assert ("tiny", "hotsplit/tiny-moe", 1, 1) == (recipe.name, recipe.model, recipe.tp, recipe.pp)
    assert ({"vram_reserve_gib": 0.001, "hot_gib": 0.002}, "not run by us") == (recipe.settings, recipe.status)
    assert ("triton",) == recipe.flags[0].value
    assert ("VLLM_USE_DEEP_GEMM", "0") == (recipe.variables[0].name, recipe.variables[0].value)


def test_flags_that_are_bad_everywhere_stand_behind_the_recipes_own(write_recipe):
    bad = load(str(write_recipe())).known_bad
    assert "--load-format runai_streamer" == str(bad[0])
    assert known_bad_everywhere() == bad[1:]
    assert {"--enable-eplb", "--enable-expert-parallel", "VLLM_MOE_SKIP_PADDING"} <= {one.name for one in bad}


WRONG = {
    "unknown key": ("top_k = 4", "topk = 4\ntop_k = 4", "facts.topk: got an unknown key; did you mean top_k?"),
    "misspelt key": ("experts = 32", "expert = 32", "facts.experts: got nothing; add experts; is expert meant for it?"),
    "unknown table": ("[machine]", "[machines]", "machine: got nothing; add machine; is machines meant for it?"),
    "type": ("layers = 4\nmoe", "layers = '4'\nmoe", "facts.layers: got '4'; wanted an integer >= 1"),
    "zero": ("context = 256", "context = 0", "kv.context: got 0; wanted an integer >= 1"),
    "switch as number": ("context = 256", "context = true", "kv.context: got True"),
    "infinite": ("ram_gib = 10", "ram_gib = inf", "machine.ram_gib: got inf; wanted a number above 0"),
    "setting": ("hot_gib = 0.002", "hot_gb = 0.002", "settings.hot_gb: got a setting that recipes do not make; did you mean hot_gib?"),
    "setting's value": ("hot_gib = 0.002", "hot_gib = -1", "settings.hot_gib: got -1; wanted a finite number >= 0"),
    "a path": ("hot_gib = 0.002", "state_dir = '/x'", "settings.state_dir: got a setting that recipes do not make"),
    "flag's spelling": ('"--moe-backend"', '"--moe_backend"', "flags[0].flag: got '--moe_backend'; wanted vLLM's long spelling"),
    "flag of layout": ('"--moe-backend"', '"--max-model-len"', "flags[0].flag: got --max-model-len; say it in [kv]"),
    "flag's value": ('value = "triton"', "value = true", "flags[0].value: got True; wanted a text, a number"),
    "flag of the cache's bytes": ('"--moe-backend"', '"--kv-cache-memory-bytes"', "flags[0].flag: got --kv-cache-memory-bytes; say it in [kv]"),
    "flag of a second model": ('"--moe-backend"', '"--model"', "flags[0].flag: got --model; say it in model"),
    "flag with a part": ('"--moe-backend"', '"--kernel-config.x"', "flags[0].flag: got '--kernel-config.x'; wanted vLLM's long spelling"),
    "flag of dashes": ('"--moe-backend"', '"--"', "flags[0].flag: got '--'; wanted vLLM's long spelling"),
    "flag of a shell": ('"--moe-backend"', '"--x;reboot"', "flags[0].flag: got '--x;reboot'; wanted vLLM's long spelling"),
    "flag behind a flag": ('value = "triton"', 'value = "--enable-eplb"', "flags[0].value: got ['--enable-eplb']; wanted what stands behind this flag"),
    "flag twice": ("[[variables]]", "[[flags]]\nflag = '--moe-backend'\nvalue = 'marlin'\nwhy = 'x'\n[[variables]]", "flags: got --moe-backend more than once; keep one"),
    "variable twice": ("[[known_bad]]", "[[variables]]\nname = 'VLLM_USE_DEEP_GEMM'\nvalue = 1\nwhy = 'x'\n[[known_bad]]", "variables: got VLLM_USE_DEEP_GEMM more than once"),
    "variable of a shell": ('"VLLM_USE_DEEP_GEMM"', '"X; reboot; Y"', "variables[0].name: got 'X; reboot; Y'; wanted a variable's name"),
    "variable with equals": ('"VLLM_USE_DEEP_GEMM"', '"X=Y"', "variables[0].name: got 'X=Y'; wanted a variable's name"),
    "model like a flag": ('"hotsplit/tiny-moe"', '"--enable-eplb"', "model: got '--enable-eplb'; wanted a hub id or a folder"),
    "model of two words": ('"hotsplit/tiny-moe"', '"a b"', "model: got 'a b'; wanted a hub id or a folder"),
    "escape in a text": ('"The bundled model"', r'"\u001b]0;x\u0007"', r"title: got '\x1b]0;x\x07'; wanted printable characters"),
    "zero byte in a word": ('value = "triton"', r'value = "a\u0000b"', r"flags[0].value: got 'a\x00b'; wanted printable characters"),
    "escape in a key": ("top_k = 4", '"\\u001b[1m" = 1\ntop_k = 4', r"facts.'\x1b[1m': got an unknown key"),
    "bad flag's spelling": ('flag = "--load-format"', 'flag = "-tp"', "known_bad[0].flag: got '-tp'; wanted vLLM's long spelling"),
    "bad variable's name": ('flag = "--load-format"', 'variable = "--x"', "known_bad[0].variable: got '--x'; wanted a variable's name"),
    "home of nobody": ('"config.json"', '"~nobody-here/config.json"', "facts.file: got ~nobody-here/config.json, which is no file in"),
    "counts at nobody's": ('"counts.json"', '"~nobody-here/c.json"', "histogram.file: got ~nobody-here/c.json, which is no file in"),
    "a name too long": ('"config.json"', f'"{"a" * 5000}"', f"facts.file: got {'a' * 50}"),
    "digits beyond floats": ("vram_gib = 0.02", f"vram_gib = 1{'0' * 400}", "machine.vram_gib: got 1000"),
    "more than memory": ("ram_gib = 10", "ram_gib = 1e300", "machine.ram_gib: got 1e+300; wanted a number above 0, of GiB and at most 8,388,608"),
    "a cache beyond memory": ("concurrency = 2", "concurrency = 2\ngib = 1e308", "kv.gib: got 1e+308; wanted a number above 0"),
    "digits beyond Python": ("gpus = 1", f"gpus = 0x{'f' * 5000}", "machine.gpus: got an integer of thousands of digits; wanted an integer >= 1"),
    "setting beyond Python": ("hot_gib = 0.002", f"hot_gib = 0x{'f' * 5000}", "settings.hot_gib: got an integer beyond 2^53"),
    "our variable": ("VLLM_USE_DEEP_GEMM", "HOTSPLIT_HOT_GIB", "variables[0].name: got HOTSPLIT_HOT_GIB; say it in [settings]"),
    "no file": ('"config.json"', '"gone.json"', "facts.file: got gone.json, which is no file in"),
    "no source": ('source = "ships with hotsplit"\n', "", "facts.source: got nothing; wanted where these facts are public"),
    "no licence": ('licence = "none"', "", "histogram.licence: got a file without source and licence; wanted both"),
    "no counts": ('file = "counts.json"', "", "histogram.steps: got neither a file nor steps that make one"),
    "kv type": ("concurrency = 2", "concurrency = 2\ndtype = 'fp9'", "kv.dtype: got 'fp9'"),
    "bad of nothing": ('flag = "--load-format"', "", "known_bad[0].flag: got both or none of flag and variable"),
    "form": ('"hotsplit-recipe"', '"recipe"', "format: got 'recipe'; wanted 'hotsplit-recipe'"),
    "version": ("version = 1", "version = 2", "version: got 2; wanted 1; use a newer hotsplit"),
    "name": ('name = "tiny"', 'name = "a/b"', "name: got 'a/b'; wanted a short name"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_by_file_and_key(write_recipe, what):
    old, new, said = WRONG[what]
    path = write_recipe((old, new))
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert f"recipe {path}, {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[facts", "wanted TOML"),
        ("a = 1\na = 2", "wanted TOML"),
        ("", "format: got nothing"),
        (f"a = {'9' * 5000}", "4300 digits.*wanted TOML"),
        ("a = " + "[" * 5000, "wanted TOML"),
    ],
)
def test_what_is_no_recipe_at_all_is_one_line(tmp_path, text, said):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(str(tmp_path / "x.toml"))


def test_a_mark_at_the_beginning_is_no_part_of_it(write_recipe):
    path = write_recipe()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "tiny" == load(str(path)).name


def test_what_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in (str(tmp_path / "loop.toml"), str(tmp_path / "folder.toml"), f"{tmp_path}/{'a' * 300}.toml"):
        with pytest.raises(ConfigError, match=f"recipe .*{name[-11:]}: got "):
            load(name)


@pytest.mark.parametrize("name", ["gone.toml", "./none/gone.toml", "~nobody-here/gone.toml"])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises(ConfigError, match="gone.toml: got no such file"):
        load(name)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError, match="did you mean mimo-v2.6-pro?") as caught:
        load("mimo")
    assert all(name in str(caught.value) for name in names())


def test_a_name_like_none_gets_no_suggestion():
    with pytest.raises(ConfigError, match="got no recipe of that name") as caught:
        load("foo")
    assert "did you mean" not in str(caught.value)


def test_words_that_mean_a_recipe():
    assert [True, True, False, False] == [is_recipe(one) for one in ("glm-5.3", "my.toml", "glm", "org/model")]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from(["text", "integer", "number", "texts", "words", "table", "tables", "truth"]))
def test_any_value_is_either_taken_or_refused_with_one_line(value, kind):
    table = Table({"key": value}, what="recipe x")
    said = "recipe x, key: "
    with contextlib.suppress(ConfigError):
        getattr(table, kind)("key")
        return
    with pytest.raises(ConfigError) as caught:
        getattr(Table({"key": value}, what="recipe x"), kind)("key")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", names())
def test_a_recipe_that_ships_has_a_source_for_every_fact_result_and_warning(name):
    recipe = load(name)
    assert recipe.facts.source
    assert all(one.source and one.on for one in recipe.results)
    assert all(one.source and one.why for one in recipe.known_bad)
    assert all(flag.why for flag in recipe.flags)
    assert recipe.counts.file is not None or recipe.counts.steps


def test_every_shipped_histogram_has_its_notice():
    folder = data_folder() / "histograms"
    notice = (folder / "NOTICE.md").read_text()
    assert [] == [path.name for path in folder.iterdir() if path.name != "NOTICE.md" and path.name not in notice]


def test_the_wheel_takes_every_file_along(request):
    project = tomllib.loads((request.config.rootpath / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["hotsplit"]
    package = data_folder().parents[1]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in data_folder().rglob("*") if path.is_file()} <= shipped


def test_the_shortest_recipe_of_the_docs_is_one(request, tmp_path):
    page = (request.config.rootpath / "docs" / "recipes.md").read_text()
    lines = page.partition("The shortest:\n")[2].lstrip("\n").splitlines()
    block = list(itertools.takewhile(lambda line: not line or line.startswith("    "), lines))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mine.toml").write_text(textwrap.dedent("\n".join(block)))
    recipe = load(str(tmp_path / "mine.toml"))
    assert ("mine", 2, 48, 32768) == (recipe.name, recipe.tp, recipe.facts.layers, recipe.kv.context)


def test_the_docs_list_every_recipe_that_ships(request):
    page = (request.config.rootpath / "docs" / "recipes.md").read_text()
    assert [] == [name for name in names() if f"| `{name}` |" not in page]
