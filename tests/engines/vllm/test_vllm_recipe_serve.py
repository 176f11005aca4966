"""`hotsplit serve --recipe`: the command that a recipe makes starts a real server with the recipe's settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import httpx

import recipe_files
from engines.vllm.vllm_jobs import environment_of
from engines.vllm.vllm_server import wait_for
from hotsplit.data import tiny_moe_path

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PORT = 18631
FLAGS = ("--host", "127.0.0.1", "--port", str(PORT), "--enforce-eager", "--gpu-memory-utilization", "0.3")
ON_A_CPU = (
    (
        '[[flags]]\nflag = "--moe-backend"\nvalue = "triton"',
        '[[flags]]\nflag = "--served-model-name"\nvalue = "by-recipe"',
    ),
    ("concurrency = 2", "concurrency = 8"),
    ("context = 256", "context = 512"),
)


def test_a_recipe_of_ones_own_serves_with_its_flags_its_counts_and_its_budget(tmp_path):
    recipe = recipe_files.write_recipe(tmp_path, *ON_A_CPU)
    command = [str(Path(sys.executable).parent / "hotsplit"), "serve", "--recipe", str(recipe), str(tiny_moe_path())]
    variables = environment_of({}, probe=None, cache=None, place=tmp_path) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HOTSPLIT_STATE_DIR": str(tmp_path / "state"),
        "HOTSPLIT_BANK_DIR": str(tmp_path),
    }
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--", *FLAGS], stdout=out, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    try:
        wait_for(lambda: is_ready(process, log), what="the server", timeout_s=240)
        reply = httpx.get(f"http://127.0.0.1:{PORT}/v1/models", timeout=120)
        (model,) = reply.json()["data"]
        assert ("by-recipe", 512) == (model["id"], model["max_model_len"])
        content = {"model": "by-recipe", "prompt": "def main(", "max_tokens": 4}
        assert 200 == httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=content, timeout=120).status_code
        text = log.read_text(errors="replace")
        assert f"--kv-cache-memory-bytes {8 * 512 * 2048} " in text
        assert "budget=2.0 MiB" in text
        assert "expected_hit=0.7" in text
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)


def is_ready(process, log):
    assert process.poll() is None, log.read_text(errors="replace")[-6000:]
    try:
        return 200 == httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5).status_code
    except httpx.TransportError:
        return False
