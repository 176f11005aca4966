"""The door: off and weightless without a setting, loud with a wrong one, and the same however often it is called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hotsplit.engines.vllm import plugin
from hotsplit.errors import ConfigError

HEAVY = ("torch", "vllm", "numpy", "hotsplit.config", "hotsplit.engines.vllm.hooks")

_LOADED = """
import json, sys
from hotsplit.engines.vllm.plugin import register
register()
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_registering(environ):
    """Names in sys.modules of a fresh interpreter that vLLM's plugin loader would have called."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True, env=environ, timeout=300
    )
    return set(json.loads(done.stdout))


@pytest.fixture
def environ(monkeypatch):
    """This process's environment without anything of ours, to start others in."""
    import os

    return {name: value for name, value in os.environ.items() if "HOTSPLIT_" not in name}  # noqa: TID251


@pytest.mark.parametrize("more", [{}, {"_HOTSPLIT_RUN_DIR": "/somewhere"}, {"HOT_GIB": "4", "hotsplit_hot_gib": "4"}])
def test_without_a_setting_nothing_is_imported(environ, more):
    assert set() == modules_after_registering(environ | more) & set(HEAVY)


@pytest.mark.parametrize("more", [{"HOTSPLIT_ENABLE": "0"}, {"HOTSPLIT_ENABLE": "0", "HOTSPLIT_HOT_GIB": "4"}])
def test_switched_off_the_settings_are_read_and_nothing_heavy_is_imported(environ, more):
    assert {"hotsplit.config"} == modules_after_registering(environ | more) & set(HEAVY)


def test_an_empty_setting_is_none(environ):
    assert {"hotsplit.config"} == modules_after_registering(environ | {"HOTSPLIT_HOT_GIB": ""}) & set(HEAVY)


@pytest.fixture
def installed(monkeypatch):
    """What register() would install, without vLLM."""
    from hotsplit.engines.vllm import hooks

    seen = []
    monkeypatch.setattr(hooks, "install", seen.append)
    return seen


@pytest.mark.parametrize("name", ["HOTSPLIT_ENABLE", "HOTSPLIT_DYNAMIC"])
def test_any_setting_switches_it_on(monkeypatch, installed, name):
    import os

    monkeypatch.setenv(name, "1")
    plugin.register()
    (environ,) = installed
    assert environ is os.environ, "what is set later must reach child processes"  # noqa: TID251


def test_switched_off_other_values_are_checked_all_the_same(monkeypatch, installed):
    monkeypatch.setenv("HOTSPLIT_ENABLE", "0")
    monkeypatch.setenv("HOTSPLIT_DYN_STEPS", "500")
    plugin.register()
    assert [] == installed, "off is off"
    monkeypatch.setenv("HOTSPLIT_DYN_STEPS", "0")
    with pytest.raises(ConfigError, match="HOTSPLIT_DYN_STEPS: got '0'; wanted an integer >= 1"):
        plugin.register()


def test_an_unknown_setting_stops_vllm_with_the_nearest_name(monkeypatch, installed):
    monkeypatch.setenv("HOTSPLIT_HOT_GB", "4")
    with pytest.raises(ConfigError, match="HOTSPLIT_HOT_GB: got an unknown setting; did you mean HOTSPLIT_HOT_GIB"):
        plugin.register()
    assert 1 == len(installed), "vLLM does not call it again: what is put right later must find its hooks"


_TWICE = """
import json, os
from hotsplit.engines.vllm.plugin import register
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.worker_base import WorkerWrapperBase

def state():
    names = ("load_model", "compile_or_warm_up_model", "execute_model", "shutdown", "sleep", "update_weights")
    return [
        id(EngineArgs.create_engine_config),
        [id(vars(WorkerWrapperBase).get(name)) for name in names],
        sorted((name, id(cls)) for name, cls in op_registry_oot.items()),
        id(vars(RoutedExperts).get("__init_subclass__")),
    ]

before = state()
register()
once = state()
register()
twice = state()
class Late(RoutedExperts):
    pass
print(json.dumps({
    "changed": before != once, "same": once == twice, "covers": sorted(op_registry_oot),
    "of": [cls.__mro__[2].__name__ for name, cls in sorted(op_registry_oot.items())],
}))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_registering_twice_is_registering_once_and_covers_every_class(environ, tmp_path):
    pytest.importorskip("vllm")
    settings = {"HOTSPLIT_ENABLE": "1", "HOTSPLIT_STATE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _TWICE], capture_output=True, text=True, check=True, env=environ | settings, timeout=300
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert (True, True) == (told["changed"], told["same"])
    assert {"RoutedExperts", "Late"} <= set(told["covers"])
    assert told["covers"] == told["of"]
