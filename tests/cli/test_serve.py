"""hotsplit serve: what it checks, what it hands to vLLM, and how it becomes vLLM, which is not needed here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from checkpoint_files import write_model
from hotsplit.cli import vllm_process
from hotsplit.cli.vllm_process import Vllm, find_vllm, parallel_sizes
from hotsplit.config import HotsplitConfig
from hotsplit.errors import ConfigError, EngineError
from hotsplit.plan.planfile import load_plan

KEYS = [
    "kind", "model", "vllm", "tp", "pp", "settings", "plan", "ready_timeout_s", "recipe", "command", "arguments",
    "environment", "notices",
]  # fmt: skip
HERE = Vllm(version="0.32.0", ready_timeout_s=600, has_command=True, has_plugin=True)
MODULE = [sys.executable, "-P", "-m"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """What vLLM would have got."""

    program: str
    arguments: list[str]
    environ: dict[str, str]


@pytest.fixture
def handed(monkeypatch, tmp_path):
    """Every start of vLLM, which does not take place; the user's state folder is this test's own."""
    starts = []

    def execve(program, arguments, environ):
        starts.append(Handed(program=program, arguments=list(arguments), environ=dict(environ)))

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FROM_OUTSIDE", "stays")
    return starts


@pytest.fixture
def vllm_is(monkeypatch):
    """vllm_is(**facts): the vLLM that is found."""

    def be(**facts):
        values = {name: getattr(HERE, name) for name in Vllm.__slots__}
        monkeypatch.setattr(vllm_process, "find_vllm", lambda: Vllm(**values | facts))

    be()
    return be


@pytest.fixture
def serve(cli, handed, vllm_is, tiny_moe):
    """serve(*options, flags=(...)) -> Result, vLLM being here."""

    def go(*options, flags=(), model=tiny_moe, env=None):
        behind = ("--", *flags) if flags else ()
        return cli("serve", model, *options, *behind, env=env)

    return go


@pytest.fixture
def checked(serve):
    """checked(...) -> the object that --check --json prints."""

    def go(*options, **others):
        result = serve(*options, "--check", "--json", **others)
        assert 0 == result.code, result.err
        return json.loads(result.out)

    return go


def names_of(value):
    """Of the notices in a printed object."""
    return [text.rpartition("[")[2].rstrip("]") for text in value["notices"]]


def test_vllm_gets_the_model_and_its_own_flags_unchanged(serve, handed, tiny_moe):
    flags = ("--port", "8000", "--served_model_name=a b", "-O3", "--", "--json.x")
    assert 0 == serve("--hot-gib", 0.002, flags=flags).code
    (start,) = handed
    assert sys.executable == start.program
    assert [*MODULE, "vllm.entrypoints.cli.main", "serve", str(tiny_moe), *flags] == start.arguments


def test_options_become_variables_and_the_rest_of_the_environment_stays(serve, handed):
    assert 0 == serve("--hot-gib", 0.002, "--dynamic", 0, "--learned", "ignore").code
    environ = handed[0].environ
    ours = {name: value for name, value in environ.items() if name.startswith("HOTSPLIT_")}
    assert {"HOTSPLIT_HOT_GIB": "0.002", "HOTSPLIT_DYNAMIC": "0", "HOTSPLIT_LEARNED": "ignore"} == ours
    assert "stays" == environ["FROM_OUTSIDE"]


def test_the_workers_read_the_settings_that_were_checked(serve, handed, counts, tmp_path):
    options = {
        "hot-gib": 0.0025, "dyn-steps": 7, "dyn-max-swaps": 3, "dyn-margin": 1.125, "dyn-half-life": 0.5,
        "counts": counts, "state-dir": tmp_path / "my state", "objective": "time", "vram-reserve-gib": 0,
        "numa-policy": "off", "bank-dir": tmp_path, "enable": 1,
    }  # fmt: skip
    pairs = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert 0 == serve(*pairs, env={"HOTSPLIT_STRICT": "0", "HOTSPLIT_DYN_STEPS": "9"}).code
    given = {name.replace("-", "_"): str(value) for name, value in options.items()}
    assert HotsplitConfig.from_options({}, strict="0", **given) == HotsplitConfig.from_env(handed[0].environ)


def test_an_option_beats_a_variable_and_an_empty_one_takes_it_away(serve, handed):
    env = {"HOTSPLIT_HOT_GIB": "0.004", "HOTSPLIT_COUNTS": "gone.json"}
    assert 0 == serve("--hot-gib", "0.002", "--counts", "", env=env).code
    assert "0.002" == handed[0].environ["HOTSPLIT_HOT_GIB"]
    assert "HOTSPLIT_COUNTS" not in handed[0].environ


@pytest.mark.parametrize("options", [(), ("--hot-gib", "")])
def test_without_any_setting_hotsplit_is_turned_on_by_being_called(serve, handed, options):
    assert 0 == serve(*options).code
    assert "1" == handed[0].environ["HOTSPLIT_ENABLE"]
    assert HotsplitConfig.from_env(handed[0].environ).is_on


def test_with_enable_0_stock_vllm_starts_with_a_notice_and_the_0_travels(serve, handed, tmp_path):
    result = serve("--enable", 0, model=tmp_path / "none")
    assert (0, "0") == (result.code, handed[0].environ["HOTSPLIT_ENABLE"])
    assert "hotsplit is off (HOTSPLIT_ENABLE=0): stock vLLM starts [off]" in result.err
    assert "in host memory" not in result.out


def test_what_is_printed_is_out_before_vllm_takes_over(monkeypatch, cli, vllm_is, tiny_moe):
    waiting = []

    def execve(*_):
        waiting.append(sys.stdout.getvalue())

    monkeypatch.setattr(os, "execve", execve)
    cli("serve", tiny_moe, "--hot-gib", 0.002)
    assert "HOTSPLIT_HOT_GIB" in waiting[0]


def test_the_table_has_every_setting_with_its_value_and_where_it_comes_from(serve):
    result = serve("--hot-gib", 0.002, "--check", env={"HOTSPLIT_DYN_STEPS": "50"})
    rows = [line.split() for line in result.out.splitlines()]
    assert ["setting", "value", "from"] in rows
    assert ["HOTSPLIT_HOT_GIB", "0.002", "option"] in rows
    assert ["HOTSPLIT_DYN_STEPS", "50", "environment"] in rows
    assert ["HOTSPLIT_DYN_MARGIN", "1.25", "default"] in rows
    assert [name for name, *_ in HotsplitConfig().rows()] == [
        row[0] for row in rows if row and row[0].startswith("HOTSPLIT_") and "=" not in row[0]
    ]


def test_the_preview_is_what_the_planner_says(checked, cli, counts, tiny_moe):
    value = checked("--hot-gib", 0.002, "--counts", counts)
    plan = json.loads(cli("plan", tiny_moe, "--hot-gib", 0.002, "--counts", counts, "--json").out)
    (rank,) = value["plan"]["ranks"]
    assert (plan["hot_experts"], 128) == (rank["hot_experts"], rank["experts"])
    assert (plan["used_bytes"], plan["budget_bytes"]) == ([rank["hot_bytes"]], [rank["budget_bytes"]])
    assert (plan["hit_rate"], None) == (value["plan"]["hit_rate"], value["plan"]["held_out"])


def test_the_preview_in_words(serve, counts):
    text = " ".join(serve("--hot-gib", 0.002, "--counts", counts, "--check").out.split())
    assert "the rank: 39 of 128 experts hot, 2.0 MiB of a budget of 2.0 MiB, 4.2 MiB in host memory" in text
    assert "% (in-sample); " in text
    assert "expected hit rate -; " in " ".join(serve("--hot-gib", 0.002, "--check").out.split())


def test_hot_and_cold_rows_are_all_rows_and_a_static_plan_has_no_spare_ones(checked, cli, tiny_moe):
    (rank,) = checked("--hot-gib", 0.002, "--dynamic", 0)["plan"]["ranks"]
    row = 6 * 2**20 // 128
    assert rank["experts"] * row == rank["hot_bytes"] + rank["host_bytes"]
    assert rank["hot_experts"] * row == rank["hot_bytes"]


def test_a_plan_file_is_previewed_without_a_budget(checked, cli, counts, tiny_moe, tmp_path):
    path = tmp_path / "plan.json"
    cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 0.003, "-o", path)
    value = checked("--plan", path)
    assert load_plan(path).stages[0].used_bytes == value["plan"]["ranks"][0]["hot_bytes"]
    assert value["plan"]["origin"].startswith(f"plan {path}")


def test_a_budget_for_everything_is_said_to_change_nothing(checked):
    assert "fits" in names_of(checked("--hot-gib", 1))
    assert "fits" not in names_of(checked("--hot-gib", 0.002))


def test_without_a_budget_there_is_no_preview_and_the_counts_are_checked_all_the_same(serve, checked, counts, tmp_path):
    assert None is checked("--counts", counts)["plan"]
    text = " ".join(serve("--check").out.split())
    assert "no preview of the plan: the workers settle budget and plan, and log both" in text
    (tmp_path / "broken.json").write_text("{}")
    assert f"histogram {tmp_path / 'broken.json'}" in serve("--counts", tmp_path / "broken.json").refusal()


SPELLINGS = [
    ("-tp", "2"),
    ("-tp=2",),
    ("--tensor-parallel-size", "2"),
    ("--tensor_parallel_size=2",),
    ("--tensor-parallel", "2"),
    ("-tp", "4", "--port", "8000", "--tensor-parallel-size=2"),
]


@pytest.mark.parametrize("flags", SPELLINGS, ids=" ".join)
def test_tensor_parallel_size_is_read_in_every_spelling(checked, flags):
    whole, half = checked("--hot-gib", 1, "--dynamic", 0), checked("--hot-gib", 1, "--dynamic", 0, flags=flags)
    assert (1, 2) == (whole["tp"], half["tp"])
    assert whole["plan"]["ranks"][0]["hot_bytes"] == 2 * half["plan"]["ranks"][0]["hot_bytes"]


@pytest.mark.parametrize("flags", [("-pp", "2"), ("--pipeline_parallel_size=2",)], ids=" ".join)
def test_every_pipeline_stage_is_previewed(checked, serve, flags):
    value = checked("--hot-gib", 0.001, flags=flags)
    assert (2, [0, 1]) == (value["pp"], [rank["stage"] for rank in value["plan"]["ranks"]])
    assert [64, 64] == [rank["experts"] for rank in value["plan"]["ranks"]]
    text = " ".join(serve("--hot-gib", 0.001, "--check", flags=(*flags, "-tp", "2")).out.split())
    assert "stage 1, each rank: " in text


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (("-tp", "two"), "'two'"),
        (("-tp", "0"), "'0'"),
        (("--tensor-parallel-size=",), "nothing"),
        (("-tp",), "nothing"),
    ],
    ids=str,
)
def test_a_parallel_size_that_is_none_is_refused(serve, flags, got):
    assert f"vLLM's --tensor-parallel-size: got {got}; wanted an integer >= 1" in serve(flags=flags).refusal(2)


def test_flags_that_only_look_alike_are_no_parallel_size():
    assert (1, 1) == parallel_sizes(
        ["--tokenizer", "2", "--data-parallel-size", "2", "-t", "2", "--tensor-parallel-sizes=2"]
    )


def test_check_starts_nothing(serve, handed):
    assert 0 == serve("--hot-gib", 0.002, "--check").code
    assert [] == handed


def test_json_is_one_object_with_stable_keys(checked, serve, handed, tmp_path, tiny_moe):
    value = checked("--hot-gib", 0.002)
    assert KEYS == list(value)
    assert ("serve", "0.32.0", 600) == (value["kind"], value["vllm"], value["ready_timeout_s"])
    assert {"value": "0.002", "origin": "option"} == value["settings"]["HOTSPLIT_HOT_GIB"]
    assert {"HOTSPLIT_HOT_GIB": "0.002"} == value["environment"]
    keys = {"stage", "hot_experts", "experts", "hot_bytes", "host_bytes", "budget_bytes"}
    assert [keys] == [set(rank) for rank in value["plan"]["ranks"]]
    assert [] == handed
    assert KEYS == list(json.loads(serve("--hot-gib", 0.002, "--json").out))
    assert value["arguments"] == handed[0].arguments
    assert KEYS == list(checked("--enable", 0))


def test_a_hub_id_is_left_to_the_workers_and_nothing_is_downloaded(checked, serve, handed):
    value = checked("--hot-gib", 8, model="org/model")
    assert (None, ["checked-later"]) == (value["plan"], names_of(value))
    assert 0 == serve("--hot-gib", 8, model="org/model").code
    assert "org/model" == handed[0].arguments[-1]
    assert "gone.json: got no such file" in serve("--counts", "gone.json#a", model="org/model").refusal()


def test_a_folder_of_the_users_home_is_named_in_full(serve, handed, tiny_moe, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny_moe.parent))
    assert 0 == serve(model=f"~/{tiny_moe.name}").code
    assert str(tiny_moe) == handed[0].arguments[-1]


def test_a_configuration_file_of_vllms_is_not_read_and_that_is_said(checked):
    assert ["checked-later"] == names_of(checked("--learned", "ignore", flags=("--config", "vllm.yaml")))


def sparse(folder, *, nbytes):
    """A mixture-of-experts checkpoint of one layer with so many bytes of embedding, none of them on disk."""
    config = {"model_type": "toy", "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": ("BF16", (32, 32))
        for expert in range(2)
        for name in ("gate", "up", "down")
    }
    return write_model(folder, {"model.embed.weight": ("U8", (nbytes,)), **experts}, config=config)


def test_a_long_load_raises_the_time_that_vllm_waits(checked, serve, handed, vllm_is, tmp_path):
    model = sparse(tmp_path / "big", nbytes=100 * 10**9)
    value = checked(model=model)
    assert 300 + 1000 == value["ready_timeout_s"]
    assert "1300" == value["environment"]["VLLM_ENGINE_READY_TIMEOUT_S"]
    assert "VLLM_ENGINE_READY_TIMEOUT_S=1300 instead of 600 [ready-timeout]" in serve(model=model).err
    assert "1300" == handed[0].environ["VLLM_ENGINE_READY_TIMEOUT_S"]


@pytest.mark.parametrize("user_s", [1300, 9999])
def test_a_time_that_is_long_enough_is_left_alone(checked, vllm_is, tmp_path, user_s):
    vllm_is(ready_timeout_s=user_s)
    value = checked(model=sparse(tmp_path / "big", nbytes=100 * 10**9))
    assert user_s == value["ready_timeout_s"]
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in value["environment"]
    assert "ready-timeout" not in names_of(value)


def test_without_a_distribution_called_vllm_the_older_entry_point_starts(serve, handed, vllm_is, tiny_moe):
    vllm_is(has_command=False)
    result = serve("--hot-gib", 0.002, flags=("--port", "1"))
    expected = [*MODULE, "vllm.entrypoints.openai.api_server", "--model", str(tiny_moe), "--port", "1"]
    assert expected == handed[0].arguments
    assert "[no-vllm-command]" in result.err


def test_a_dense_model_is_refused(serve, handed, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 1}
    model = write_model(tmp_path / "dense", {"model.layers.0.mlp.up_proj.weight": ("BF16", (4, 4))}, config=config)
    assert "has no routed experts: got a dense model" in serve(model=model).refusal()
    assert [] == handed


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (("--hot-gib", "0"), 1, "hot budget: got 0 GiB; wanted at least"),
        (("--hot-gib", "-1"), 2, "hot_gib (--hot-gib): got '-1'"),
        (("--plan", "gone.json"), 1, "plan gone.json: got no such file"),
        (("--counts", "gone.json"), 1, "gone.json"),
        (("--numa-policy", "near"), 2, "preferred, bind or off"),
        (("--strict", "1", "--hot-gib", "0.002"), 1, "[no-histogram]"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_in_one_line_and_nothing_starts(serve, handed, options, code, reason):
    assert reason in serve(*options).refusal(code)
    assert [] == handed


def test_a_folder_that_is_not_there_is_refused(serve, tmp_path):
    assert f"model folder {tmp_path / 'none'}" in serve(model=tmp_path / "none").refusal()


def test_counts_of_another_model_are_refused(serve, write_counts, tmp_path):
    from hotsplit.plan.identity import ModelIdentity

    other = ModelIdentity(model_type="other", layers=(0, 1), num_experts=8, top_k=2)
    path = write_counts(tmp_path / "other.json", identity=other)
    for options in ((), ("--hot-gib", 0.002)):
        assert "was made for another model" in serve("--counts", path, *options).refusal()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--dynamic", 0, "--dyn-margin", 2), "HOTSPLIT_DYN_MARGIN"),
        (("--dynamic", 0, "--dyn-max-swaps", 1), "HOTSPLIT_DYN_MAX_SWAPS"),
        (("--dynamic", 0, "--dyn-half-life", 1), "HOTSPLIT_DYN_HALF_LIFE"),
    ],
)
def test_a_setting_without_effect_is_said(serve, options, named):
    assert f"{named} has no effect: nothing swaps in static mode [no-effect]" in serve(*options, "--check").err


def test_the_kernel_of_the_other_engine_has_no_effect_and_no_option(serve):
    err = serve("--check", env={"HOTSPLIT_KERNEL": "exact"}).err
    assert "HOTSPLIT_KERNEL has no effect: experts are computed by vLLM's own kernels [no-effect]" in err
    assert "No such option '--kernel'" in serve("--kernel", "exact").err


@pytest.mark.parametrize("flag", ["--hot-gib", "--hot-gib=4", "--hot_gib=4", "--check", "--json", "--state-dir"])
def test_an_option_of_ours_behind_the_dashes_is_a_usage_error(serve, handed, flag):
    result = serve(flags=("--port", "1", flag))
    assert (2, "", []) == (result.code, result.out, handed)
    name = flag.partition("=")[0].replace("_", "-")
    assert f"Error: {name} is hotsplit's: it stands before --" in result.err


@pytest.mark.parametrize("flag", ["--port", "-tp", "--enforce-eager"])
def test_a_flag_of_vllms_before_the_dashes_is_a_usage_error_that_says_where_it_belongs(serve, handed, flag):
    result = serve(flag, "2")
    assert (2, "", []) == (result.code, result.out, handed)
    assert "vLLM's own flags stand behind --, as in: hotsplit serve MODEL --hot-gib 40 -- --port" in result.err


def test_a_second_model_is_a_usage_error_on_either_side(serve, handed):
    assert "--model behind -- would be a second model" in serve(flags=("--model=x",)).err
    assert "unexpected extra argument" in serve("another").err
    assert [] == handed


def test_vllms_help_can_be_asked_for(serve, handed):
    assert 0 == serve(flags=("--help",)).code
    assert "--help" == handed[0].arguments[-1]


def test_a_vllm_without_our_plugin_is_refused_since_it_would_run_stock(serve, handed, vllm_is):
    vllm_is(has_plugin=False)
    assert "vLLM would run without hotsplit" in serve().refusal()
    assert [] == handed
    assert 0 == serve("--enable", 0).code


@pytest.mark.parametrize(("plugins", "code"), [("", 2), ("other", 2), ("other,hotsplit", 0), ("hotsplit", 0)])
def test_a_list_of_plugins_that_leaves_us_out_is_refused(serve, plugins, code):
    result = serve("--check", env={"VLLM_PLUGINS": plugins})
    assert code == result.code
    assert (code == 2) == (f"hotsplit: VLLM_PLUGINS: got '{plugins}'; wanted hotsplit among them" in result.err)


def pretend_vllm(monkeypatch, **envs):
    """A package called vllm, as far as it is asked."""
    package, module = types.ModuleType("vllm"), types.ModuleType("vllm.envs")
    package.__version__, package.envs = "0.32.0", module
    vars(module).update(envs)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.envs", module)


def pretend_broken(monkeypatch, error):
    """A vLLM whose import fails, also where there is one that works."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "vllm":
                raise error

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def test_a_vllm_is_asked_for_its_version_and_its_time(monkeypatch):
    pretend_vllm(monkeypatch, VLLM_ENGINE_READY_TIMEOUT_S=600)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.32.0"}[name])
    assert HERE == find_vllm()


def test_a_cpu_build_without_a_distribution_of_that_name_has_no_command(monkeypatch):
    pretend_vllm(monkeypatch, VLLM_ENGINE_READY_TIMEOUT_S=600)

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not find_vllm().has_command


def test_the_plugin_is_found_by_its_entry_point(monkeypatch):
    pretend_vllm(monkeypatch, VLLM_ENGINE_READY_TIMEOUT_S=600)
    assert find_vllm().has_plugin
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    assert not find_vllm().has_plugin


def test_a_missing_vllm_is_one_line_that_says_how_to_install_it(monkeypatch, cli, tiny_moe):
    pretend_broken(monkeypatch, ModuleNotFoundError("No module named 'vllm'", name="vllm"))
    result = cli("serve", tiny_moe)
    assert result.err.startswith("loading vLLM")
    line = result.refusal()
    assert (
        "vLLM is not installed: in hotsplit's checkout run pip install '.[vllm]', or on a machine without a GPU as docs/vllm.md"
        in line
    )


@pytest.mark.parametrize("arguments", [("gone/",), (".", "--", "-tp", "0"), (".", "--counts", "gone.json")], ids=str)
def test_what_is_wrong_here_is_said_before_vllm_is_looked_for(monkeypatch, cli, tiny_moe, arguments):
    monkeypatch.chdir(tiny_moe)
    monkeypatch.setattr(vllm_process, "find_vllm", lambda: pytest.fail("vLLM was loaded"))
    result = cli("serve", *arguments)
    assert result.code in (1, 2)
    assert "loading vLLM" not in result.err
    assert any(word in result.err for word in ("gone", "--tensor-parallel-size"))


def test_a_vllm_that_cannot_be_imported_is_one_line_with_the_reason(monkeypatch):
    pretend_broken(monkeypatch, ImportError("libcudart.so.13: cannot open shared object file"))
    with pytest.raises(EngineError, match="vLLM cannot be imported: got libcudart.so.13: cannot open"):
        find_vllm()


def test_a_time_that_is_no_number_is_refused_by_its_name(monkeypatch):
    class Envs(types.ModuleType):
        @property
        def VLLM_ENGINE_READY_TIMEOUT_S(self):  # noqa: N802 - vLLM's name
            return int("soon")

    pretend_vllm(monkeypatch)
    sys.modules["vllm"].envs = Envs("vllm.envs")
    with pytest.raises(ConfigError, match="VLLM_ENGINE_READY_TIMEOUT_S: got invalid literal"):
        find_vllm()


def test_the_process_becomes_the_program_with_its_exit_code_and_its_number(tiny_moe, tmp_path):
    child = "import os, sys; print(os.getpid(), os.environ['HOTSPLIT_HOT_GIB'], *sys.argv[1:]); sys.exit(7)"
    code = f"""
import os
from hotsplit.cli import serving, vllm_process
vllm_process.find_vllm = lambda: vllm_process.Vllm(
    version="0", ready_timeout_s=1, has_command=True, has_plugin=True)
become = os.execve
os.execve = lambda program, arguments, environ: become(program, [program, "-c", {child!r}, *arguments[-2:]], environ)
from hotsplit.cli.main import main
main()
"""
    words = ["serve", str(tiny_moe), "--hot-gib", "0.002", "--state-dir", str(tmp_path), "--", "--port", "8000"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=300)
    assert 7 == process.returncode, err
    assert f"{process.pid} 0.002 --port 8000" == out.splitlines()[-1]
    assert "vLLM 0 takes over this process" in err
