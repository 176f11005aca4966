"""A disk that loses a model's pages while it computes: one clear error, no token of zeros, and then the model goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from hotsplit.bank import guard_library

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.slow,
    pytest.mark.skipif(guard_library.load() is None, reason="no native code here"),
]

SCRIPT = Path(__file__).with_name("lost_pages.py")
PLACES = ("prefill", "decode", "load")


@pytest.fixture(scope="module")
def play(checkpoint, tmp_path_factory):
    """play(kernel, "guarded" | "bare", *places) -> what lost_pages.py tells, or the number of the signal that ended it."""

    @cache
    def run(kernel, guard, *places):
        folder = tmp_path_factory.mktemp("lost") / "model"
        # A Mixtral's w1 and w3 lie apart in the file, so that rows are put together in slots.
        shutil.copytree(checkpoint("mixtral" if places == ("staging",) else "qwen3_moe"), folder)
        environment = os.environ | {  # noqa: TID251 - handed on
            "PYTHONPATH": str(SCRIPT.parents[1]),
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, SCRIPT, folder, kernel, guard, *places]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
        if done.returncode < 0:
            return done.returncode
        assert 0 == done.returncode, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("kernel", ["exact", "fast"])
@pytest.mark.parametrize("place", [*PLACES, "staging"])
def test_lost_pages_are_an_error_and_the_model_goes_on_to_the_bit(play, kernel, place):
    told = play(kernel, "guarded", *(PLACES if place in PLACES else (place,)))
    assert isinstance(told, dict), f"ended by signal {told}"
    found = told[place]
    assert found["failed"].startswith("BankError: cannot read ")
    if place != "staging":  # where another thread may meet the cut at its check
        assert "model.safetensors: got nothing at byte" in found["failed"]
    # Within a second its new length and time are noticed too.
    assert re.match(r"BankError: .*model.safetensors(: got | has changed)", found["still_cut"])
    assert [True, True] == found["again"]
    assert kernel == found["kernel"]
    assert (found["staged"] + found["kept"] > 0) == (place == "staging")
    if kernel == "exact":
        assert found["equals_stock"]


@pytest.mark.parametrize(
    ("kernel", "place"), [("exact", "prefill"), ("fast", "decode"), ("exact", "load"), ("fast", "staging")]
)
def test_without_the_guard_they_end_the_process(play, kernel, place):
    assert -signal.SIGBUS == play(kernel, "bare", place)
