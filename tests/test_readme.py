"""The README keeps its word: its Python runs, its targets exist, and its numbers were measured.

Its commands are run with those of all documents: tests/docs/test_commands.py.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from doc_world import TINY_HOT_GIB, furnish
from hotsplit.config import HotsplitConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "engines.json"
RESULTS = README.split("## Results")[1].split("\n## ")[0]


@pytest.fixture
def one_thread():
    """So small a model only loses by a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_make_checks_and_writes_every_generated_page():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = {name: makefile.split(f"\n{name}:")[1].partition("\n\n")[0] for name in ("check", "docs")}
    for name in ("configuration_docs.py", "readme_results.py"):
        assert f"python scripts/{name} --check\n" in f"{recipes['check']}\n"
        assert f"python scripts/{name}\n" in f"{recipes['docs']}\n"


def test_make_test_builds_the_site():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ntest: check " in makefile
    assert "docs-site" in makefile.split("\ncheck: ")[1].partition("##")[0].split()


def test_make_installs_the_versions_that_were_measured_with():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    packages = json.loads(RESULT.read_text(encoding="utf-8"))["environment"]["packages"]
    assert f"\nTRANSFORMERS_VERSION ?= {packages['transformers']}\n" in makefile
    assert f"\nTORCH_VERSION ?= {packages['torch'].partition('+')[0]}\n" in makefile
    assert 2 == makefile.count(" transformers==$(TRANSFORMERS_VERSION)\n")


def test_the_model_to_play_with_is_where_it_says():
    assert "src/hotsplit/data/tiny-moe --hot-gib" in README
    assert (ROOT / "src/hotsplit/data/tiny-moe/config.json").is_file()


def test_state_goes_where_it_says(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Path("~/.cache/hotsplit").expanduser() == HotsplitConfig().state_path
    assert "`~/.cache/hotsplit`" in README


def test_the_settings_that_it_names_exist():
    variables = set(re.findall(r"HOTSPLIT_[A-Z_]+", README))
    assert {"HOTSPLIT_HOT_GIB", "HOTSPLIT_COUNTS", "HOTSPLIT_DYNAMIC"} <= variables
    assert HotsplitConfig.from_env(dict.fromkeys(variables, ""))
    assert "a reserve of 2 GiB" in README
    assert (2, 2000) == (HotsplitConfig().vram_reserve_gib, HotsplitConfig().dyn_steps)
    assert "steps between two updates, 2000 unless" in README


@pytest.mark.transformers
@pytest.mark.slow
def test_its_two_lines_of_python_run(tmp_path, tiny_moe, one_thread, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, words=["--counts", "hist.json"])
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 2 == len([line for line in block.splitlines() if line.strip()])
    names = {}
    exec(block.replace("hot_gib=8", f"hot_gib={TINY_HOT_GIB}").replace("MODEL", str(tiny_moe)), names)
    model = names["model"]
    with torch.no_grad():
        output = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert 7 == output.shape[1]
    assert 0 < sum(model.hotsplit.snapshot().hit_pairs.values())
    assert 0 < model.hotsplit.histogram().phases["prefill"].counts.sum()
    model.hotsplit.close()


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "readme_results.py"))


@pytest.mark.parametrize("language", SCRIPT["WORDS"])
def test_its_results_are_those_of_the_benchmark(language):
    words = SCRIPT["WORDS"][language]
    page = (ROOT / words["page"]).read_text(encoding="utf-8")
    section = SCRIPT["section"](json.loads(RESULT.read_text(encoding="utf-8")), words=words)
    assert section == SCRIPT["split"](page)[1]
    assert page == SCRIPT["page"](page, words=words)


def test_the_results_say_the_same_in_every_language():
    keys = {language: set(words) for language, words in SCRIPT["WORDS"].items()}
    assert ["en", "ru", "zh"] == list(keys)
    assert 1 == len({frozenset(names) for names in keys.values()})
    assert 1 == len({len(words["head"]) for words in SCRIPT["WORDS"].values()})


def leaves(value):
    """Every number in a parsed JSON file, and every text."""
    if isinstance(value, dict | list):
        children = [*value, *value.values()] if isinstance(value, dict) else value
        return [leaf for child in children for leaf in leaves(child)]
    return [value]


def is_measured(number, *, found):
    """Whether a number is one of the file's, in its unit or in MB or GB, rounded as it is written, or part of a text."""
    decimals = len(number.partition(".")[2])
    numbers = [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    rounded = {f"{value / scale:.{decimals}f}" for value in numbers for scale in (1, 10**6, 10**9)}
    return number in rounded or any(number in value for value in found if isinstance(value, str))


def test_every_number_of_its_results_is_in_the_benchmarks_file():
    found = leaves([json.loads(file.read_text(encoding="utf-8")) for file in (RESULT, SCRIPT["RACE"])])
    text = RESULTS.replace("batch 1.", "batch one.")  # how it is measured, no figure
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", re.sub(r"\(.*?\)|<!--.*?-->", "", text))
    assert len(numbers) > 30
    assert [] == [number for number in numbers if not is_measured(number, found=found)]


def test_a_number_that_was_not_measured_is_found():
    found = leaves({"a": [12.34], "b": {"bytes": 5_600_000_000, "text": "torch 2.13.0"}})
    assert [True, True, True, False, False] == [
        is_measured(number, found=found) for number in ("12.3", "5.6", "2.13", "12.4", "7")
    ]
