"""Tests marked `interpreted` run in a process in which Triton interprets its kernels, one per file.

A process of its own, because a kernel is interpreted or compiled from the moment it is decorated, and because a wild
address ends the process instead of the test. The test's result is that of its namesake there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

collect_ignore = [] if importlib.util.find_spec("triton") else ["compiled.py"]
"""A helper that needs Triton to be imported."""
_VARIABLE = "TRITON_INTERPRET"


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: runs in a process in which Triton interprets its kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Stand for the test's namesake in the other process."""
    is_there = os.environ.get(_VARIABLE) == "1"  # noqa: TID251 - what this very file sets
    if is_there or not pyfuncitem.get_closest_marker("interpreted"):
        return None
    failures, output = _failures(pyfuncitem.path)
    if pyfuncitem.name not in failures:
        pytest.fail(f"the process that interprets ended before this test:\n{output}", pytrace=False)
    if failures[pyfuncitem.name]:
        pytest.fail(failures[pyfuncitem.name], pytrace=False)
    return True


@cache
def _failures(path: Path) -> tuple[dict[str, str], str]:
    """What every test of the file failed with, "" where it passed; and the end of the output."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", path, f"--junitxml={report}", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {_VARIABLE: "1", "OMP_NUM_THREADS": "1"}  # noqa: TID251 - handed on
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)
        output = (done.stdout + done.stderr)[-5000:]
        cases = ET.parse(report).iter("testcase") if report.exists() else []
        return {case.attrib["name"]: "\n".join(one.text or one.tag for one in case) for case in cases}, output
