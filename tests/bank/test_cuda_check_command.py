"""The command of the device check: one line for what is wrong, and make's way to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotsplit.bank import cuda_check

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path, capsys):
    assert 1 == cuda_check.main(["--out", str(tmp_path / "found.json")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hotsplit: NVIDIA GPU: got torch")
    assert line.endswith("or try every line on a CPU with --dry")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_ends_the_run_with_one_line(tmp_path, capsys):
    assert 1 == cuda_check.main(["--out", str(tmp_path), "--dry", "--only", "machine"])
    assert f"hotsplit: cannot write {tmp_path}" in capsys.readouterr().err


def test_a_check_that_there_is_not_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cuda_check.main(["--out", str(tmp_path / "found.json"), "--only", "colour"])
    assert 2 == ended.value.code
    assert "invalid choice: 'colour'" in capsys.readouterr().err


def test_make_runs_it_from_the_sources(tmp_path):
    out = tmp_path / "found.json"
    command = ["make", "gpu-check", f"GPU_PYTHON={sys.executable}", f"GPU_ARGS=--dry --only machine --out {out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ["machine"] == [check["name"] for check in json.loads(out.read_text())["checks"]]
