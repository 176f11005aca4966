"""What `hotsplit serve` believes about vLLM as a program, asked of the real one."""

from __future__ import annotations

import subprocess

import pytest

pytest.importorskip("vllm")

from hotsplit.cli.vllm_process import find_vllm, server_arguments
from hotsplit.engines.vllm.releases import TESTED

pytestmark = pytest.mark.vllm


def test_it_is_found_with_its_version_its_time_its_command_and_our_plugin(monkeypatch):
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    found = find_vllm()
    assert (True, 600, True, True) == (
        found.version in TESTED,
        found.ready_timeout_s,
        found.has_command,
        found.has_plugin,
    )


@pytest.mark.parametrize("has_command", [True, False], ids=["its command", "the older entry point"])
def test_both_command_lines_run_vllms_server_whatever_is_called_vllm_where_one_stands(tmp_path, has_command):
    (tmp_path / "vllm.py").write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        server_arguments("MODEL", flags=("--help",), has_command=has_command),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "ParallelConfig" in done.stdout
