"""House rules that no single module can hold: imports, the public face, texts of the sources, generated pages."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hotsplit
from hotsplit import data, errors

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "hotsplit").rglob("*.py"))
PYTHON_FILES = sorted(
    path for folder in ("src", "tests", "scripts", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
HEAVY = ("torch", "transformers", "accelerate", "vllm")


def name_of(path):
    return str(path.relative_to(ROOT))


def modules_after(statement):
    """Names in sys.modules of a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(package):
    folder = ROOT / "src" / "hotsplit"
    paths = [folder / f"{package}.py"] if (folder / f"{package}.py").exists() else (folder / package).rglob("*.py")
    dotted = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in dotted)


def test_importing_hotsplit_loads_nothing_heavy():
    loaded = modules_after("import hotsplit")
    assert set() == loaded & {*HEAVY, "numpy", "click", "rich", "safetensors", "platformdirs"}
    assert ["hotsplit.version"] == [name for name in loaded if name.startswith("hotsplit.")]


@pytest.mark.parametrize("package", ["plan", "report", "config", "errors", "metrics", "notices", "files", "data"])
def test_planner_and_leaf_modules_load_no_torch(package):
    modules = modules_of(package)
    loaded = modules_after("\n".join(f"import {name}" for name in modules))
    assert set(modules) <= loaded
    assert set() == loaded & {*HEAVY, "click", "rich"}


def test_reading_the_settings_loads_no_numpy():
    loaded = modules_after(
        "from hotsplit import HotsplitConfig; HotsplitConfig.from_env({'HOTSPLIT_ENABLE': '1'}).is_on"
    )
    assert set() == loaded & {*HEAVY, "numpy"}


def test_the_command_line_starts_without_torch():
    assert set() == modules_after("import hotsplit.cli.main") & set(HEAVY)


def test_the_public_names_are_sorted_and_each_is_there():
    assert sorted(hotsplit.__all__) == list(hotsplit.__all__)
    assert len(set(hotsplit.__all__)) == len(hotsplit.__all__)
    assert [] == [name for name in hotsplit.__all__ if getattr(hotsplit, name, None) is None]
    assert set(hotsplit.__all__) <= set(dir(hotsplit))


def test_every_error_class_is_public():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes <= set(hotsplit.__all__)


def test_the_names_for_type_checkers_are_the_public_names():
    tree = ast.parse((ROOT / "src" / "hotsplit" / "__init__.py").read_text())
    guarded = next(statement for statement in tree.body if isinstance(statement, ast.If))
    names = {alias.name for statement in guarded.body for alias in statement.names}
    assert {*names, "__version__"} == set(hotsplit.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hotsplit' has no attribute 'lode'"):
        hotsplit.lode  # noqa: B018 - the access is the test


def test_the_version_is_that_of_the_package():
    assert hotsplit.__version__ == importlib.metadata.version("hotsplit")


def test_the_entry_point_resolves_to_something_callable():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="hotsplit")
    assert ["hotsplit.cli.main:main"] == [script.value for script in scripts]
    assert callable(next(iter(scripts)).load())


def test_imports_go_one_way():
    # The command beside the interpreter that runs the tests, not one that happens to be on PATH.
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_file_says_what_it_is_for_and_asserts_nothing(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert (ast.get_docstring(tree) or "").strip(), "no module docstring"
    if len(tree.body) > 1:
        first = tree.body[1]
        assert isinstance(first, ast.ImportFrom), "the first import is not `from __future__`"
        assert ("__future__", ["annotations"]) == (first.module, [alias.name for alias in first.names])
    assert [] == [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_every_folder_with_modules_is_a_package_and_so_ships():
    assert [] == sorted({name_of(path.parent) for path in SOURCES if not (path.parent / "__init__.py").exists()})


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_a_python_file_is_ascii(path):
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_command_line_prints(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert [] == prints or "cli" in path.relative_to(ROOT).parts


def test_the_configuration_page_is_what_the_settings_say():
    done = subprocess.run(
        [sys.executable, "scripts/configuration_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_an_outdated_configuration_page_is_found(tmp_path):
    script = tmp_path / "scripts" / "configuration_docs.py"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "configuration_docs.py").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "configuration.md").write_text("# Configuration\n")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert 1 == done.returncode
    assert "make docs" in done.stderr


def test_every_lint_exception_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    lint = text[text.index("\nignore = [") : text.index("[tool.ruff.lint.flake8-bugbear]")]
    codes = [line for line in lint.splitlines() if line.strip().startswith('"') and "= [" not in line]
    assert len(codes) > 10
    assert [] == [line for line in codes if "#" not in line]


def test_the_hard_dependencies_are_few_and_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert {"numpy", "click", "rich", "safetensors", "platformdirs", "prometheus-client"} == names
    assert {"transformers", "vllm", "docs", "dev"} == set(project["optional-dependencies"])


def test_the_bundled_model_and_texts_are_there_with_their_notices():
    files = {path.name for path in data.tiny_moe_path().iterdir()}
    assert {"NOTICE.md", "config.json", "model.safetensors", "tokenizer.json"} <= files
    notices = (data.text_path("c").parent / "LICENSES.md").read_text()
    for domain in data.DOMAINS:
        assert data.text_path(domain).read_text(encoding="utf-8").startswith("### ")
        assert f"`{domain}.txt`" in notices


def test_every_bundled_text_is_a_domain():
    assert {f"{domain}.txt" for domain in data.DOMAINS} == {
        path.name for path in data.text_path("c").parent.glob("*.txt") if not path.name.startswith("LICENSE")
    }


def test_a_domain_that_does_not_ship_is_refused_with_those_that_do():
    with pytest.raises(KeyError, match="python"):
        data.text_path("russian")
