"""Settings on their way to the workers: whole, the same at every start, and missed aloud."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hotsplit.config import HotsplitConfig, settings
from hotsplit.engines.vllm.settings import KEY, from_additional, rows_text, to_additional
from hotsplit.errors import ConfigError, EngineError
from hotsplit.version import __version__

EVERY = {
    "HOTSPLIT_HOT_GIB": "0.30000000000000004",
    "HOTSPLIT_DYNAMIC": "0",
    "HOTSPLIT_DYN_STEPS": "500",
    "HOTSPLIT_DYN_MAX_SWAPS": "3",
    "HOTSPLIT_DYN_MARGIN": "1e2",
    "HOTSPLIT_VRAM_RESERVE_GIB": "0",
    "HOTSPLIT_NUMA_POLICY": "off",
    "HOTSPLIT_ENABLE": "1",
    "HOTSPLIT_COUNTS": "counts of mine.json#code",
    "HOTSPLIT_PLAN": "~/plan.json",
    "HOTSPLIT_LEARNED": "ignore",
    "HOTSPLIT_STATE_DIR": "/var/state",
    "HOTSPLIT_OBJECTIVE": "time",
    "HOTSPLIT_STRICT": "1",
    "HOTSPLIT_DYN_HALF_LIFE": "2.5",
    "HOTSPLIT_DYN_SCHEDULE": "fixed",
    "HOTSPLIT_KERNEL": "exact",
    "HOTSPLIT_BANK_DIR": "bank",
}
OFFLOAD = {"cpu_offload_gb": 4.0, "offload_params": ["experts", "w2"]}


def travelled(environ, *, offload=None):
    """Settings and offload flags as a worker finds them, after vLLM has pickled or written its configuration."""
    mine = to_additional(HotsplitConfig.from_env(environ), offload=offload or {})
    return from_additional({"somebody": "else", KEY: json.loads(json.dumps(mine))})


def test_the_examples_name_every_setting():
    assert {info.variable for info in settings()} == set(EVERY)


@pytest.mark.parametrize(
    "environ", [EVERY, {}, {"HOTSPLIT_ENABLE": "0"}, *({name: value} for name, value in EVERY.items())]
)
def test_every_value_and_its_origin_arrive(environ):
    expected, (found, _) = HotsplitConfig.from_env(environ), travelled(environ)
    assert (expected, expected.rows()) == (found, found.rows())


def test_a_default_that_was_written_out_is_still_given():
    assert "environment" == travelled({"HOTSPLIT_DYN_STEPS": "2000"})[0].origin("dyn_steps")


def test_offload_flags_arrive():
    assert OFFLOAD == travelled({"HOTSPLIT_ENABLE": "1"}, offload=OFFLOAD)[1]


def test_settings_that_came_as_options_arrive_with_the_same_values():
    config = HotsplitConfig.from_options({}, hot_gib=3, strict=True, counts="a.json")
    assert config == from_additional({KEY: to_additional(config, offload={})})[0]


def test_two_starts_write_the_same_and_two_processes_do():
    code = (
        "import json\n"
        "from hotsplit.config import HotsplitConfig\n"
        "from hotsplit.engines.vllm.settings import to_additional\n"
        f"print(json.dumps(to_additional(HotsplitConfig.from_env({EVERY!r}), offload={OFFLOAD!r})))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    here = [json.dumps(to_additional(HotsplitConfig.from_env(EVERY), offload=OFFLOAD)) for _ in range(2)]
    assert 1 == len({*here, *(run.stdout.strip() for run in runs)})


def test_only_what_was_given_is_written():
    mine = to_additional(HotsplitConfig.from_env({"HOTSPLIT_HOT_GIB": "40"}), offload={})
    assert {"version": __version__, "environment": {"HOTSPLIT_HOT_GIB": "40"}, "offload": {}} == mine


@pytest.mark.parametrize("additional", [{}, {"somebody": 1}, {KEY: None}, None, "text"])
def test_a_worker_without_settings_stops_and_says_what_to_do(additional):
    with pytest.raises(EngineError, match=r"its settings have not come .*; set the same HOTSPLIT_ variables on every"):
        from_additional(additional)


@pytest.mark.parametrize("version", ["0.0.0", None])
def test_a_worker_of_another_version_stops_and_names_both(version):
    mine = to_additional(HotsplitConfig.from_env({"HOTSPLIT_ENABLE": "1"}), offload={}) | {"version": version}
    with pytest.raises(EngineError, match=f"got version {__version__}; wanted {version}.*install the same version"):
        from_additional({KEY: mine})


def test_a_value_that_is_not_allowed_stops_the_worker():
    mine = to_additional(HotsplitConfig.from_env({}), offload={}) | {"environment": {"HOTSPLIT_DYN_STEPS": "0"}}
    with pytest.raises(ConfigError, match="HOTSPLIT_DYN_STEPS"):
        from_additional({KEY: mine})


@pytest.mark.parametrize(
    ("num_rows", "text"),
    [([], ""), ([9], "9x1"), ([129] * 48, "129x48"), ([129, 129, 128, 129], "129x2 128x1 129x1")],
)
def test_numbers_of_rows_are_written_in_runs(num_rows, text):
    assert text == rows_text(num_rows)


def test_layers_in_another_order_are_another_text():
    assert rows_text([129, 128]) != rows_text([128, 129])
