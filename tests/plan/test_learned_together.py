"""Runs that learn at the same time: what each adds to the one file, in any order, and who waits for whom."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hotsplit
from hotsplit.errors import HistogramError, HotsplitError
from hotsplit.plan.histogram import MAX_COUNT, Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.learned import add_learned, learned_path, load_learned, save_learned

IDENTITY = ModelIdentity(model_type="qwen3_moe", layers=(3, 4), num_experts=2, top_k=1)
SOURCE = str(Path(hotsplit.__file__).parents[1])
ADDER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan import learned
from hotsplit.plan.learned import add_learned
learned._LOCK_TRIES = 100 * 120  # four have the lock in turn, as luck has it, and a busy disk holds up each of them
identity = ModelIdentity(model_type="qwen3_moe", layers=(3, 4), num_experts=2, top_k=1)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    phases = {"decode": PhaseCounts(counts=np.array([[1.0, 2.0], [3.0, 0.0]]), tokens=3)}
    add_learned(Histogram(identity=identity, phases=phases), Path(sys.argv[2]), decay=1.0)
"""


def learned(counts, *, tokens=None, identity=IDENTITY):
    phases = {"decode": PhaseCounts(counts=np.asarray(counts, dtype=float), tokens=tokens)}
    return Histogram(identity=identity, phases=phases)


def on_disk(state_dir, *, stage=0):
    """Counts and tokens."""
    counted = load_learned(state_dir, IDENTITY, stage=stage)[0].phases["decode"]
    return counted.counts.tolist(), counted.tokens


def test_the_first_save_is_the_file(tmp_path):
    path = add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=0.5)
    assert learned_path(tmp_path, IDENTITY) == path
    assert ([[4, 2], [3, 3]], 6) == on_disk(tmp_path)


def test_what_the_file_holds_fades_and_the_new_counts_are_added(tmp_path):
    add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0)
    add_learned(learned([[1, 0], [0, 1]], tokens=1), tmp_path, decay=0.5)
    assert ([[3, 1], [1.5, 2.5]], 7) == on_disk(tmp_path)


def test_counts_that_do_not_say_their_tokens_add_those_of_their_weakest_layer(tmp_path):
    add_learned(learned([[4, 2], [3, 3]]), tmp_path, decay=1.0)
    add_learned(learned([[4, 2], [1, 4]]), tmp_path, decay=1.0)
    assert 6 + 5 == on_disk(tmp_path)[1]


def test_a_save_without_news_only_fades(tmp_path):
    add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0)
    add_learned(learned(np.zeros((2, 2)), tokens=0), tmp_path, decay=0.5)
    assert ([[2, 1], [1.5, 1.5]], 6) == on_disk(tmp_path)


def test_stages_add_to_files_of_their_own(tmp_path):
    add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0, stage=1)
    add_learned(learned([[1, 0], [0, 1]], tokens=1), tmp_path, decay=1.0, stage=1)
    assert load_learned(tmp_path, IDENTITY)[0] is None
    assert ([[5, 2], [3, 4]], 7) == on_disk(tmp_path, stage=1)


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_run_that_saves_often_leaves_what_one_save_at_its_end_would_have(tmp_path_factory, saves):
    """Each window is an update; after some of them the run saves the difference, as the documentation says."""
    folder, decay = tmp_path_factory.mktemp("state"), 0.75
    windows = np.random.default_rng(len(saves)).integers(0, 50, (len(saves), 2, 2)).astype(float)
    earlier = np.array([[8.0, 4.0], [2.0, 1.0]])
    save_learned(learned(earlier, tokens=1000), folder)
    total, at_save, since = np.zeros((2, 2)), np.zeros((2, 2)), 0
    for window, is_saved in zip(windows, [*saves[:-1], True], strict=True):
        total, since = total * decay + window, since + 1
        if is_saved:
            fade = decay**since
            add_learned(learned(np.maximum(total - at_save * fade, 0), tokens=50 * since), folder, decay=fade)
            at_save, since = total.copy(), 0
    counts, tokens = on_disk(folder)
    np.testing.assert_allclose(total + earlier * decay ** len(saves), counts, rtol=1e-12, atol=1e-9)
    assert 1000 + 50 * len(saves) == tokens


def test_four_processes_that_save_at_once_lose_nothing(tmp_path):
    adders = [
        subprocess.Popen(
            [sys.executable, "-c", ADDER, SOURCE, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for adder in adders:
        assert "ready\n" == adder.stdout.readline()
    for adder in adders:
        adder.stdin.write("go\n")
        adder.stdin.flush()
    for adder in adders:
        adder.communicate(timeout=300)
    assert [0] * 4 == [adder.returncode for adder in adders]
    assert ([[40, 80], [120, 0]], 120) == on_disk(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "hotsplit-histogram"}'])
def test_a_damaged_file_is_not_carried_on(tmp_path, content):
    path = add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0)
    path.write_bytes(content)
    add_learned(learned([[1, 0], [0, 1]], tokens=1), tmp_path, decay=1.0)
    assert ([[1, 0], [0, 1]], 1) == on_disk(tmp_path)


def test_a_file_of_another_model_in_this_ones_place_is_not_carried_on(tmp_path):
    other = replace(IDENTITY, top_k=2)
    path = save_learned(learned([[4, 2], [3, 3]], identity=other), tmp_path)
    path.rename(learned_path(tmp_path, IDENTITY))
    add_learned(learned([[1, 0], [0, 1]], tokens=1), tmp_path, decay=1.0)
    assert ([[1, 0], [0, 1]], 1) == on_disk(tmp_path)


def test_counts_stop_at_the_largest_that_can_be_read_again(tmp_path):
    most = float(MAX_COUNT)
    for _ in range(2):
        add_learned(learned([[most, 1], [most, 0]], tokens=MAX_COUNT), tmp_path, decay=1.0)
    assert ([[most, 2], [most, 0]], MAX_COUNT) == on_disk(tmp_path)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_decay_that_is_none_leaves_the_file(tmp_path, decay):
    add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0)
    with pytest.raises(HistogramError, match="decay: got .*; wanted a number from 0 to 1"):
        add_learned(learned([[1, 0], [0, 1]], tokens=1), tmp_path, decay=decay)
    assert ([[4, 2], [3, 3]], 6) == on_disk(tmp_path)


def test_counts_that_are_none_leave_the_file(tmp_path):
    add_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path, decay=1.0)
    with pytest.raises(HistogramError, match="layer 3, expert 1"):
        add_learned(learned([[1, -1], [0, 1]], tokens=1), tmp_path, decay=1.0)
    assert ([[4, 2], [3, 3]], 6) == on_disk(tmp_path)


@pytest.mark.parametrize("save", [save_learned, lambda now, folder: add_learned(now, folder, decay=1.0)])
def test_a_lock_that_is_never_given_back_ends_a_save_within_seconds(tmp_path, save):
    path = save_learned(learned([[4, 2], [3, 3]], tokens=6), tmp_path)
    with Path(f"{path}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(HotsplitError, match=r"another process that has held .*\.lock for 2 s; end it"):
            save(learned([[1, 0], [0, 1]], tokens=1), tmp_path)
    assert 1.5 < time.monotonic() - started < 120
    assert ([[4, 2], [3, 3]], 6) == on_disk(tmp_path)


@pytest.mark.parametrize("content", ['{"model": []}', '{"model": {"layers": [0]}}', "[]", "7", '{"format": 1}'])
def test_junk_beside_a_models_file_is_nothing_to_say(tmp_path, content):
    junk = learned_path(tmp_path, replace(IDENTITY, top_k=2))
    junk.parent.mkdir()
    junk.write_text(content)
    assert (None, []) == load_learned(tmp_path, IDENTITY)
