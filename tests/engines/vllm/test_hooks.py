"""What the wraps around vLLM's arguments and workers do, over stand-ins for both."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engines.vllm.test_refusals import config as plain_config
from hotsplit.engines.vllm import exposition, hooks, planning, refusals, settings
from hotsplit.engines.vllm import session as sessions
from hotsplit.errors import ConfigError, EngineError, UnsupportedEngineError


def wrapped_arguments(monkeypatch, environ, *, config=None):
    """A class of arguments that is wrapped, and what has been exposed and asked of the stock method."""
    seen = SimpleNamespace(exposed=[], flags=[], checked=[])
    monkeypatch.setattr(exposition, "expose", seen.exposed.append)

    @dataclasses.dataclass
    class EngineArgs:
        additional_config: dict = dataclasses.field(default_factory=dict)
        cpu_offload_gb: float = 0
        enable_eplb: bool = False
        enable_dbo: bool = False
        ubatch_size: int = 0
        prefill_context_parallel_size: int = 1
        distributed_executor_backend: str | None = None
        enable_sleep_mode: bool = False

        def create_engine_config(self, usage=None, *, headless=False):
            """Stock."""
            seen.flags.append((self.cpu_offload_gb, usage, headless))
            made = plain_config() if config is None else config
            made.additional_config = self.additional_config
            return made

    monkeypatch.setattr(planning, "precheck", seen.checked.append)
    hooks._wrap_engine_args(EngineArgs, environ=environ)
    return EngineArgs, seen


@pytest.fixture
def environ(tmp_path):
    return {"HOTSPLIT_HOT_GIB": "4", "HOTSPLIT_STATE_DIR": str(tmp_path)}


def test_settings_and_flags_travel_with_the_configuration_beside_what_is_there(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    made = arguments(additional_config={"somebody": "else"}, cpu_offload_gb=3).create_engine_config("a", headless=True)
    found, flags = settings.from_additional(made.additional_config)
    assert (4.0, {"cpu_offload_gb": 3}, "else") == (found.hot_gib, flags, made.additional_config["somebody"])
    assert [(0, "a", True)] == seen.flags, "vLLM's own offloader must see none of its flags"
    assert "Stock." == arguments.create_engine_config.__doc__


def test_two_engines_of_one_process_have_run_folders_of_their_own(monkeypatch, environ, tmp_path):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    for _ in range(2):
        arguments().create_engine_config()
    first, second = seen.exposed
    assert first != second
    assert (tmp_path / "runs", str(second)) == (second.parent, environ[hooks.RUN_DIR]), "where children find it"


def test_a_child_of_vllms_own_takes_its_parents_run_folder(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    arguments().create_engine_config()
    monkeypatch.setattr(hooks.multiprocessing, "parent_process", lambda: "the API server's")
    arguments().create_engine_config()
    assert 1 == len(set(seen.exposed))


def test_settings_are_read_anew_for_every_engine(monkeypatch, environ):
    arguments, _ = wrapped_arguments(monkeypatch, environ)
    arguments().create_engine_config()
    environ["HOTSPLIT_HOT_GIB"] = "7"
    found, _ = settings.from_additional(arguments().create_engine_config().additional_config)
    assert 7.0 == found.hot_gib


def test_an_engine_without_settings_is_stock_also_after_one_with_them(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    used = arguments(additional_config={"somebody": "else"})
    used.create_engine_config()
    for name in [name for name in environ if name.startswith("HOTSPLIT_")]:
        del environ[name]
    assert {"somebody": "else"} == used.create_engine_config().additional_config
    assert 1 == len(seen.exposed)


def test_files_are_checked_before_a_worker_starts(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    assert [arguments().create_engine_config()] == seen.checked


@pytest.mark.parametrize(("asked", "given"), [(0, hooks.SHUTDOWN_S), (3, 3)])
def test_a_server_is_given_time_to_save_unless_it_has_been(asked, given):
    config = SimpleNamespace(shutdown_timeout=asked)
    hooks._grant_time_to_save(config)
    assert given == config.shutdown_timeout


def test_a_switch_that_leaves_vllms_padding_mask_alone_is_refused_on_a_gpu(monkeypatch, environ):
    environ["VLLM_MOE_SKIP_PADDING"] = "0"
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    arguments().create_engine_config()
    on_gpu = plain_config("device_config", device_type="cuda")
    arguments, seen = wrapped_arguments(monkeypatch, environ, config=on_gpu)
    with pytest.raises(UnsupportedEngineError, match="VLLM_MOE_SKIP_PADDING=0: got a padding mask .*; leave VLLM_MOE"):
        arguments().create_engine_config()
    assert [] == seen.exposed


def test_the_run_folder_is_not_in_the_configuration(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    made = arguments().create_engine_config()
    assert str(seen.exposed[0]) not in str(made.additional_config)


def test_what_is_not_served_is_refused_before_vllm_is_asked(monkeypatch, environ):
    arguments, seen = wrapped_arguments(monkeypatch, environ)
    with pytest.raises(UnsupportedEngineError, match="--enable-dbo"):
        arguments(enable_dbo=True).create_engine_config()
    assert ([], []) == (seen.flags, seen.exposed)


def test_what_only_the_configuration_tells_is_refused_after(monkeypatch, environ):
    refused = plain_config("model_config", is_moe=False)
    arguments, seen = wrapped_arguments(monkeypatch, environ, config=refused)
    with pytest.raises(UnsupportedEngineError, match="a dense model"):
        arguments().create_engine_config()
    assert (1, []) == (len(seen.flags), seen.exposed)


class Worker:
    """What WorkerWrapperBase hands on to."""

    def __init__(self, calls):
        self._calls = calls

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._calls.append((name, args, kwargs)) or f"{name} done"


class Session:
    def __init__(self, calls, *, is_stock=False):
        self.is_stock, self._calls = is_stock, calls

    @contextmanager
    def loading(self):
        self._calls.append("loading")
        yield
        self._calls.append("loaded")

    @contextmanager
    def closed_on_error(self):
        yield

    @contextmanager
    def step(self, scheduler_output):
        self._calls.append(f"step {scheduler_output}")
        yield
        self._calls.append("stepped")

    @property
    def memory_watch(self):
        return self

    def require_reserve(self):
        self._calls.append("reserve")

    def look_at_kv_cache(self, num_bytes, *, vllm_config):
        self._calls.append(f"found {num_bytes}")

    @contextmanager
    def making_kv_cache(self):
        self._calls.append("making")
        yield
        self._calls.append("made")

    def close(self):
        self._calls.append("closed")


@pytest.fixture
def calls():
    return []


@pytest.fixture
def wrapper(monkeypatch, calls):
    """A wrapped wrapper of a worker, with a session under way."""

    class WorkerWrapperBase:
        vllm_config = SimpleNamespace(additional_config={settings.KEY: {}})

        def __init__(self):
            self.worker = Worker(calls)

        def __getattr__(self, name):
            return getattr(self.worker, name)

        def execute_model(self, scheduler_output, *args):
            calls.append(("stock", scheduler_output, *args))
            return "output"

        def initialize_from_config(self, kv_cache_configs):
            calls.append(("stock", kv_cache_configs))

        def shutdown(self):
            calls.append("stock shutdown")

    session = Session(calls)
    monkeypatch.setattr(sessions, "_current", session)
    monkeypatch.setattr(sessions, "begin", lambda prepared: calls.append(f"begin {prepared}") or session)
    monkeypatch.setattr(planning, "prepare", lambda config, run_dir: f"plan in {run_dir}")
    hooks._wrap_worker(WorkerWrapperBase, environ={hooks.RUN_DIR: "/run"})
    return WorkerWrapperBase()


def test_the_model_is_loaded_between_planning_and_the_start_of_the_banks(wrapper, calls):
    assert "load_model done" == wrapper.load_model(load_dummy_weights=False)
    loaded = ("load_model", (), {"load_dummy_weights": False})
    assert ["begin plan in /run", "loading", loaded, "loaded"] == calls


def test_an_engine_without_settings_is_loaded_without_a_plan(wrapper, calls):
    wrapper.vllm_config.additional_config.clear()
    wrapper.load_model()
    assert "begin None" == calls[0]


def test_a_model_that_cannot_be_planned_is_not_loaded(wrapper, calls, monkeypatch):
    def fail(config, run_dir):
        raise ConfigError("HOTSPLIT_X")

    monkeypatch.setattr(planning, "prepare", fail)
    with pytest.raises(ConfigError):
        wrapper.load_model()
    assert [] == calls


def test_a_step_of_the_engine_is_a_step_of_the_session(wrapper, calls):
    assert "output" == wrapper.execute_model("scheduled", "more")
    assert ["step scheduled", ("stock", "scheduled", "more"), "stepped"] == calls


def test_the_reserve_is_looked_at_after_warm_up(wrapper, calls):
    assert "compile_or_warm_up_model done" == wrapper.compile_or_warm_up_model()
    assert [("compile_or_warm_up_model", (), {}), "reserve"] == calls


def test_what_is_left_for_the_kv_cache_is_looked_at_when_vllm_has_profiled_a_step(wrapper, calls):
    assert "determine_available_memory done" == wrapper.determine_available_memory()
    profiled = ("determine_available_memory", (), {})
    assert [profiled, "found determine_available_memory done"] == calls


def test_the_kv_cache_is_made_while_memory_is_watched(wrapper, calls):
    wrapper.initialize_from_config(["a cache"])
    assert ["making", ("stock", ["a cache"]), "made"] == calls


def test_shutting_down_saves_first(wrapper, calls):
    wrapper.shutdown()
    assert ["closed", "stock shutdown"] == calls


def test_a_worker_that_never_loaded_shuts_down_all_the_same(wrapper, calls, monkeypatch):
    monkeypatch.setattr(sessions, "_current", None)
    wrapper.shutdown()
    assert ["stock shutdown"] == calls


@pytest.mark.parametrize("name", refusals.REFUSED_CALLS)
def test_a_call_that_rewrites_or_saves_weights_is_refused_by_name(wrapper, calls, name):
    with pytest.raises(EngineError, match=rf"{name}\(\): got a call that moves, rewrites or saves weights.*restart"):
        getattr(wrapper, name)(1)
    assert [] == calls


@pytest.mark.parametrize("session", [None, Session([], is_stock=True)])
def test_where_nothing_is_split_these_calls_are_vllms_own(wrapper, calls, monkeypatch, session):
    monkeypatch.setattr(sessions, "_current", session)
    for name in refusals.REFUSED_CALLS:
        assert f"{name} done" == getattr(wrapper, name)(1, level=2)
    assert [(name, (1,), {"level": 2}) for name in refusals.REFUSED_CALLS] == calls


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_every_refused_call_is_one_of_a_worker():
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker").Worker
    assert [] == [name for name in refusals.REFUSED_CALLS if not hasattr(worker, name)]
