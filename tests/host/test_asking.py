"""Tools that hang, as nvidia-smi does where a driver does."""

from __future__ import annotations

import subprocess
import time

import pytest

from hotsplit.host import asking
from hotsplit.host.asking import run_tool
from patience import LIMIT_S


@pytest.fixture
def started(monkeypatch):
    """Every process that was started; ended after the test, whatever the code did."""
    found = []

    class Kept(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    yield found
    for process in found:
        process.send_signal(9)
        process.wait()


def test_a_tool_that_no_signal_ends_is_waited_for_no_longer(monkeypatch, started):
    monkeypatch.setattr(asking, "TOOL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(asking, "_END_S", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    began = time.monotonic()
    answer = run_tool(("sleep", "600"))
    assert "unknown (sleep gave no answer in 0.1 s)" == str(answer)
    assert time.monotonic() - began < LIMIT_S
    assert None is started[0].poll()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_tool_that_is_given_up_is_ended(monkeypatch, started, error):
    monkeypatch.setattr(asking, "TOOL_TIMEOUT_S", 0.1)
    if error is None:
        assert "gave no answer" in run_tool(("sleep", "600")).reason
    else:
        monkeypatch.setattr(subprocess.Popen, "communicate", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            run_tool(("sleep", "600"))
    assert -9 == started[0].returncode


def test_output_and_failure_of_a_tool_are_told():
    assert "out\n" == run_tool(("sh", "-c", "echo out; echo err >&2")).value
    assert "sh ended with 3: 'err'" == run_tool(("sh", "-c", "echo out; echo err >&2; exit 3")).reason
    assert "no-such-tool is not installed" == run_tool(("no-such-tool",)).reason
