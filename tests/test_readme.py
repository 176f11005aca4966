"""The README keeps its word: its commands and its Python run, its targets exist, and its numbers were measured."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from hotsplit.config import HotsplitConfig
from hotsplit.data import text_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "engines.json"
RESULTS = README.split("## Results")[1].split("## When not to use it")[0]
TINY_HOT_GIB = 0.003
"""About half of the bundled model's experts, where the README says 8."""


def commands(name):
    """Command lines of one program in the indented blocks, as words; comments are cut off, NAME=value words stay."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("    ")]
    return [words for words in lines if name in [Path(word).name for word in words if "=" not in word][:1]]


@pytest.fixture
def traffic(tmp_path, monkeypatch):
    """The README's data files, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, domain in (("chats.jsonl", "english"), ("other.jsonl", "python")):
        pieces = text_path(domain).read_text(encoding="utf-8").split("\n\n")[:24]
        lines = [json.dumps({"text": piece}) for piece in pieces if piece.strip()]
        Path(name).write_text("\n".join(lines), encoding="utf-8")
    Path("code.txt").write_text(text_path("python").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    return tmp_path


@pytest.fixture
def one_thread():
    """So small a model only loses by a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def scaled(text, *, model):
    """The README's words for the bundled model."""
    text = text.replace("hot_gib=8", f"hot_gib={TINY_HOT_GIB}")
    return text.replace("src/hotsplit/data/tiny-moe", "MODEL").replace("MODEL", str(model))


def run(words, *, model, monkeypatch):
    """Run a `hotsplit` command line in this process, its leading variables set."""
    from hotsplit.cli.main import group

    start = [Path(word).name for word in words].index("hotsplit")
    for assignment in words[:start]:
        variable, _, value = assignment.partition("=")
        monkeypatch.setenv(variable, value)
    arguments = [
        str(TINY_HOT_GIB) if words[i - 1 : i + 1] == ["--hot-gib", "8"] else words[i]
        for i in range(start + 1, len(words))
    ]
    group.main([scaled(word, model=model) for word in arguments], standalone_mode=False)


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_its_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {words[1] for words in commands("make")} | set(re.findall(r"`make ([\w-]+)", README))
    assert {"demo", "test"} <= targets
    assert set() == {target for target in targets if f"\n{target}:" not in makefile}
    assert "\nTORCH_INDEX ?=" in makefile


def test_make_checks_and_writes_every_generated_page():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = {name: makefile.split(f"\n{name}:")[1].partition("\n\n")[0] for name in ("check", "docs")}
    for script in (ROOT / "scripts").glob("*.py"):
        assert f"python scripts/{script.name} --check\n" in f"{recipes['check']}\n"
        assert f"python scripts/{script.name}\n" in f"{recipes['docs']}\n"


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
def test_its_commands_run_one_after_the_other(traffic, tiny_moe, one_thread, monkeypatch, capsys):
    lines = [words for words in commands("hotsplit") if "serve" not in words]  # test_vllm_page.py has that one
    verbs = [next(word for word in words if "=" not in word and Path(word).name != "hotsplit") for words in lines]
    assert ["run", "profile", "profile", "plan", "run", "fit", "evaluate", "report", "run"] == verbs
    for words in lines:
        with monkeypatch.context() as patch:
            run(words, model=tiny_moe, monkeypatch=patch)
    assert {"hist.json", "test.json", "plan.json", "report.html"} <= {path.name for path in traffic.iterdir()}
    plan = json.loads((traffic / "plan.json").read_text(encoding="utf-8"))
    assert None is not plan["proof"]["held_out"]
    said = capsys.readouterr().err
    assert 3 == said.count("; hit rate ")
    assert 3 <= said.count("hotsplit update=")


@pytest.mark.transformers
@pytest.mark.slow
def test_its_two_lines_of_python_run(traffic, tiny_moe, one_thread, monkeypatch):
    import torch

    profile = next(words for words in commands("hotsplit") if "profile" in words)
    run(profile, model=tiny_moe, monkeypatch=monkeypatch)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 2 == len([line for line in block.splitlines() if line.strip()])
    names = {}
    exec(scaled(block, model=tiny_moe), names)
    model = names["model"]
    with torch.no_grad():
        output = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert 7 == output.shape[1]
    assert 0 < sum(model.hotsplit.snapshot().hit_pairs.values())
    assert 0 < model.hotsplit.histogram().phases["prefill"].counts.sum()
    model.hotsplit.close()


def test_its_results_are_those_of_the_benchmark():
    script = runpy.run_path(str(ROOT / "scripts" / "readme_results.py"))
    assert script["section"](json.loads(RESULT.read_text(encoding="utf-8"))) == script["split"](README)[1]


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
    found = leaves(json.loads(RESULT.read_text(encoding="utf-8")))
    text = RESULTS.replace("batch 1.", "batch one.")  # how it is measured, no figure
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", re.sub(r"\(.*?\)|<!--.*?-->", "", text))
    assert len(numbers) > 30
    assert [] == [number for number in numbers if not is_measured(number, found=found)]


def test_a_number_that_was_not_measured_is_found():
    found = leaves({"a": [12.34], "b": {"bytes": 5_600_000_000, "text": "torch 2.13.0"}})
    assert [True, True, True, False, False] == [
        is_measured(number, found=found) for number in ("12.3", "5.6", "2.13", "12.4", "7")
    ]
