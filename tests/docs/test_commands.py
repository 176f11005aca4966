"""Every command of the documents is run, or at least parsed by the program that it calls; what cannot be is in a table.

Pages are scripts: the commands of one run in its order in one folder, with stand-ins for what they need and do not make
themselves (tests/doc_world.py). Translations have the same commands as the English page (test_translations.py).
"""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib

import click
import pytest

from doc_pages import PAGES, ROOT, Command, commands, inline_code, name_of, sections
from doc_world import furnish, scaled, shortened
from hotsplit.cli.main import _COMMANDS, group
from hotsplit.config import HotsplitConfig
from hotsplit.errors import HotsplitError

PROGRAMS = frozenset(
    {
        "apt",
        "apt-get",
        "bash",
        "cd",
        "cp",
        "curl",
        "docker",
        "export",
        "git",
        "hotsplit",
        "jq",
        "lint-imports",
        "ls",
        "make",
        "mkdir",
        "nvidia-smi",
        "numactl",
        "pip",
        "podman",
        "printf",
        "python",
        "python3",
        "python3.11",
        "ruff",
        "sudo",
        "tail",
        "ulimit",
        "vllm",
        "watch",
    }
)
LOG_LINE = re.compile(r"hotsplit (?:update=\d+ |is on: |top time=|top  http)")
NOT_RUN = {
    r"hotsplit rerank .*--learned ": "needs 50,000 learned tokens a layer; tests/cli/test_rerank.py has them",
    r"hotsplit balance .*": "starts vLLM and plays traffic; tests/engines/vllm/test_vllm_balance.py runs it on one",
}
"""hotsplit's commands that are parsed here and run elsewhere."""
OTHERS = {
    r"docker ": "needs a Docker daemon; the containers' own test reads the files",
    r"cd |mkdir |printf |export ": "of the shell, and changes nothing of ours",
    r"python3?(?:\.11)? -m venv ": "makes an environment, as the Makefile does",
    r"\S*pip (?:un)?install ": "installs from the network; what it names is looked up",
    r"\.venv/bin/ruff ": "make check runs it",
    r"\.venv/bin/python -m pytest ": "it is what is running",
}
"""What is not hotsplit's and is not looked at word by word."""
TRANSLATED = ("docs/ru/", "docs/zh/")
PAGE_TEXTS = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}


def all_commands():
    """Of every page, in order; lines of a log are none."""
    found = [command for page, text in PAGE_TEXTS.items() for command in commands(page, text, programs=PROGRAMS)]
    return [command for command in found if not LOG_LINE.match(command.text)]


def looked_up():
    """The commands that troubleshooting says to look with, which stand inside of a line."""
    page = "docs/troubleshooting.md"
    lines = enumerate(PAGE_TEXTS[page].splitlines(), start=1)
    return [
        Command(page=page, line=number, text=code)
        for number, line in lines
        if line.startswith("- **Look:**")
        for code in inline_code(line)
    ]


COMMANDS = [*all_commands(), *looked_up()]
OURS = [command for command in COMMANDS if command.program == "hotsplit" and not command.is_synopsis]


def where(command):
    return f"{command.page}:{command.line}"


def run_pages():
    """Pages with commands of ours that are run here, without translations."""
    names = dict.fromkeys(command.page for command in OURS)
    return [name for name in names if not name.startswith(TRANSLATED)]


def options_of(verb):
    """Every spelling of every option of a command, and of the commands below it."""
    command = importlib.import_module(f"hotsplit.cli.{verb}").command
    below = command.commands.values() if isinstance(command, click.Group) else ()
    parameters = [parameter for one in (command, *below) for parameter in one.params]
    return {spelling for parameter in parameters for spelling in (*parameter.opts, *parameter.secondary_opts)}


def parse(words):
    """Parse a command line of ours with the real command; a wrong option or value is a click.UsageError."""
    with group.make_context("hotsplit", list(words)) as context:
        name, command, rest = "hotsplit", group, list(words)
        while isinstance(command, click.Group) and rest:
            name, command, rest = command.resolve_command(context, rest)
        return command.make_context(name, rest, parent=context).params


def is_listed(text, *, table):
    return any(re.match(pattern, text) for pattern in table)


def test_there_are_commands_on_many_pages():
    assert len(run_pages()) > 8
    assert len(OURS) > 30


def test_every_command_of_ours_is_parsed(tmp_path, monkeypatch, server_url):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for command in OURS:
        HotsplitConfig.from_env({k: v for k, v in command.variables.items() if k.startswith("HOTSPLIT_")})
        words = scaled(command.arguments, url=server_url)
        furnish(tmp_path, words=words)
        try:
            parse(words)
        except click.ClickException as error:
            wrong.append(f"{where(command)}: {command.text}: {error.format_message()}")
    assert [] == wrong


def test_every_command_of_ours_in_a_container_is_parsed(tmp_path, monkeypatch, server_url):
    monkeypatch.chdir(tmp_path)
    inside = [command for command in COMMANDS if command.program == "docker" and "hotsplit" in command.words]
    assert inside
    for command in inside:
        words = command.words[len(command.words) - command.words[::-1].index("hotsplit") :]
        if words:
            parse(scaled(words, url=server_url))


def test_a_wrong_command_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        "plan MODEL --hot-gb 8",
        "plam MODEL",
        "run MODEL",
        "fit MODEL --gpus four",
        "show a b",
        "recipe wist",
    ):
        with pytest.raises(click.ClickException):
            parse(words.split())


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.parametrize("page", run_pages())
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, started, server_url):
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTSPLIT_STATE_DIR", str(tmp_path / "state"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products of so small a model only lose by a second one
    serves = 0
    try:
        for command in (command for command in OURS if command.page == page):
            if is_listed(command.text, table=NOT_RUN):
                continue
            words = shortened(scaled(command.arguments, url=server_url))
            furnish(tmp_path, words=words)
            serves += words[0] == "serve" and not {"--check", "--help"} & set(words)
            run(command, words=words, monkeypatch=monkeypatch)
    finally:
        torch.set_num_threads(threads)
    assert serves == len(started)


def run(command, *, words, monkeypatch):
    """Run a command line of ours in this process, its variables set."""
    if words[0] == "top" and "--once" not in words:
        words = [*words, "--once", "--interval", "0.1"]  # else it watches until Ctrl-C
    with monkeypatch.context() as patch:
        for name, value in command.variables.items():
            patch.setenv(name, value)
        try:
            group.main(words, standalone_mode=False)
        except (click.ClickException, HotsplitError, OSError) as error:
            pytest.fail(f"{where(command)}: {command.text}\n{type(error).__name__}: {error}")


@pytest.mark.parametrize("table", [NOT_RUN, OTHERS], ids=["ours", "others"])
def test_every_row_of_the_tables_is_needed(table):
    assert [] == [pattern for pattern in table if not any(re.match(pattern, command.text) for command in COMMANDS)]


def test_every_other_command_is_looked_at_or_listed():
    unknown = [
        f"{where(command)}: {command.text}"
        for command in COMMANDS
        if command.program != "hotsplit"
        and command.program not in LOOKERS
        and not is_listed(command.text, table=OTHERS)
    ]
    assert [] == unknown


@pytest.mark.parametrize("program", ["make", "python", "vllm", "pip", "curl"])
def test_what_other_commands_name_exists(program):
    mine = [command for command in COMMANDS if command.program == program]
    assert [] == [f"{where(command)}: {problem}" for command in mine for problem in LOOKERS[program](command)]


def wrong_make(command):
    """Targets and variables that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in command.arguments:
        name, is_variable, _ = word.partition("=")
        if f"\n{name} ?=" not in makefile if is_variable else f"\n{name}:" not in makefile:
            yield f"make has no {name}"


def wrong_python(command):
    """Scripts that are not there, and options that they do not read."""
    if command.arguments[0] == "-m":
        return
    script = ROOT / command.arguments[0]
    if not script.is_file():
        yield f"no {command.arguments[0]}"
        return
    text = script.read_text(encoding="utf-8")
    for word in command.arguments[1:]:
        if word.startswith("-") and f'"{word.partition("=")[0]}"' not in text:
            yield f"{command.arguments[0]} has no {word}"


def wrong_vllm(command):
    """Settings of ours and flags of the tested release."""
    HotsplitConfig.from_env({k: v for k, v in command.variables.items() if k.startswith("HOTSPLIT_")})
    if command.arguments[0] != "serve":
        yield "not `vllm serve`"
    known = vllm_flags()
    for word in command.arguments:
        if word.startswith("--") and known and word.partition("=")[0] not in known:
            yield f"vLLM has no {word}"


def wrong_pip(command):
    """Extras that pyproject.toml does not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:\.|hotsplit)\[([\w,]+)\]", command.text):
        for extra in extras.split(","):
            if extra not in project["optional-dependencies"]:
                yield f"no extra {extra}"


def wrong_curl(command):
    """Paths that vLLM's server does not answer."""
    for path in re.findall(r"https?://[^/\s]+(/\S*)", command.text):
        if path.strip("'\"") not in ("/metrics", "/health", "/v1/models", "/v1/completions", "/v1/chat/completions"):
            yield f"no {path}"


LOOKERS = {
    "make": wrong_make,
    "python": wrong_python,
    "vllm": wrong_vllm,
    "pip": wrong_pip,
    "curl": wrong_curl,
}
"""What looks at the words of a program that is not run."""


def test_what_does_not_exist_is_found():
    def problems(text):
        command = Command(page="page.md", line=1, text=text)
        return list(LOOKERS[command.program](command))

    assert ["make has no tost", "make has no TORCH"] == problems("make tost TORCH=1")
    assert ["no scripts/gone.py"] == problems(".venv/bin/python scripts/gone.py")
    assert 1 == len(problems(".venv/bin/python scripts/readme_results.py --chekc"))
    assert ["no extra vlm"] == problems("pip install 'hotsplit[vlm]'")
    assert ["no /metric"] == problems("curl http://127.0.0.1:8000/metric")
    assert [] == problems("make demo TORCH_INDEX=URL")


def vllm_flags():
    """Flags of the tested release of vLLM, as they are kept for recipes."""
    folder = ROOT / "src" / "hotsplit" / "recipes" / "data"
    return set(re.findall(r'"(--[\w-]+)"', "".join(path.read_text() for path in folder.glob("vllm-flags-*.json"))))


def spoken():
    """(page, words) of everything in backticks that begins as a command of ours, and of every synopsis."""
    for command in COMMANDS:
        if command.program == "hotsplit" and command.is_synopsis:
            yield command.page, [word.strip("[]") for word in command.words]
    for page, text in PAGE_TEXTS.items():
        for section in sections(text):
            for code in inline_code(section.prose):
                words = re.sub(r"[\[\]]|\.\.\.", " ", code).split()
                if len(words) > 1 and words[0] in ("hotsplit", ".venv/bin/hotsplit") and not LOG_LINE.match(code):
                    yield page, words


def test_commands_that_the_text_speaks_of_exist_and_have_these_options():
    wrong = []
    for page, words in spoken():
        ours = words[: words.index("--")] if "--" in words else words
        if words[1] not in _COMMANDS:
            wrong.append(f"{page}: hotsplit {words[1]}")
            continue
        known = {*options_of(words[1]), "--help"}
        wrong += [f"{page}: {shlex.join(words)}: {word}" for word in ours if word.startswith("-") and word not in known]
    assert [] == wrong
    assert len(list(spoken())) > 30


DOCKERS = {"--cap-add", "--gpus", "--ipc", "--memory", "--shm-size", "--ulimit", "--volumes"}
"""Options of Docker that pages speak of."""
WINDOWS = {"--shutdown"}
"""Of `wsl`."""


def scripts_options():
    """Of the benchmarks, and of the checks on a GPU."""
    paths = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "src" / "hotsplit" / "bank" / "cuda_check.py"]
    return set(re.findall(r'"(--[a-z][\w-]*)"', "".join(path.read_text(encoding="utf-8") for path in paths)))


def spoken_options():
    """(page, option) of every option in backticks."""
    return {
        (page, option.replace("_", "-"))
        for page, text in PAGE_TEXTS.items()
        for section in sections(text)
        for code in inline_code(section.prose)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    }


def test_options_that_the_text_speaks_of_exist():
    ours = {option for verb in _COMMANDS for option in options_of(verb)}
    known = ours | vllm_flags() | scripts_options() | DOCKERS | WINDOWS | {"--help", "--version"}
    assert set() == {(page, option) for page, option in spoken_options() if option not in known}


def test_every_option_of_others_is_spoken_of():
    assert set() == (DOCKERS | WINDOWS) - {option for _, option in spoken_options()}


def test_every_command_is_on_a_page():
    shown = {command.arguments[0] for command in OURS if command.arguments} | {words[1] for _, words in spoken()}
    assert [] == [verb for verb in _COMMANDS if verb not in shown]
