from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hotsplit
from hotsplit.errors import HistogramError, HotsplitError
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.learned import choose_counts, learned_path, load_learned, save_learned
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer
from hotsplit.plan.rerank import merge

IDENTITY = ModelIdentity(model_type="qwen3_moe", layers=(3, 4), num_experts=2, top_k=1)
ENOUGH = [[60_000.0, 20_000.0], [10_000.0, 50_000.0]]


def histogram(decode=ENOUGH, *, identity=IDENTITY, tokens=None, **more):
    phases = {"decode": PhaseCounts(counts=np.asarray(decode, dtype=float), tokens=tokens)}
    return Histogram(identity=identity, phases=phases, **more)


def decode_of(counts):
    return counts.phases["decode"].counts.tolist()


def names(notices):
    return [notice.name for notice in notices]


def start_saver(state_dir, *, before):
    """A process that runs `before` with hotsplit's files module at hand, and saves 7 for every count."""
    source = str(Path(hotsplit.__file__).parents[1])
    script = f"""
import sys, time
sys.path.insert(0, {source!r})
from pathlib import Path
import numpy as np
from hotsplit import files
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.learned import save_learned
def hang(*arguments, **options):
    print("hanging", flush=True)
    time.sleep(600)
{before}
identity = ModelIdentity(model_type="qwen3_moe", layers=(3, 4), num_experts=2, top_k=1)
phases = {{"decode": PhaseCounts(counts=np.full((2, 2), 7.0))}}
save_learned(Histogram(identity=identity, phases=phases), Path({str(state_dir)!r}))
"""
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_what_was_learned_is_there_at_the_next_start(tmp_path):
    save_learned(histogram(quantisation="fp8", name="toy"), tmp_path)
    learned, notices = load_learned(tmp_path, IDENTITY, quantisation="fp8")
    assert ([], ENOUGH, "toy", IDENTITY) == (notices, decode_of(learned), learned.name, learned.identity)


def test_before_anything_was_learned_there_is_nothing_to_say(tmp_path):
    assert (None, []) == load_learned(tmp_path / "not there", IDENTITY)


@given(hnp.arrays(np.float64, (2, 2), elements=st.floats(0, 2.0**53)))
def test_decayed_counts_come_back_to_the_bit(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("state")
    save_learned(histogram(counts), folder)
    learned, _ = load_learned(folder, IDENTITY)
    assert np.array_equal(counts, learned.phases["decode"].counts)


def test_decayed_counts_carry_the_tokens_of_their_weakest_layer(tmp_path):
    save_learned(histogram([[60_000.5, 20_000.0], [10_000.25, 49_000.5]]), tmp_path)
    learned, _ = load_learned(tmp_path, IDENTITY)
    assert (True, 59_000) == (learned.normalised, learned.phases["decode"].tokens)


def test_models_and_stages_have_files_of_their_own(tmp_path):
    others = [replace(IDENTITY, top_k=2), replace(IDENTITY, layers=(3, 5)), replace(IDENTITY, model_type="a/../b")]
    paths = {learned_path(tmp_path, identity) for identity in (IDENTITY, *others)}
    paths.add(learned_path(tmp_path, IDENTITY, stage=1))
    assert 5 == len(paths)
    assert {tmp_path / "learned"} == {path.parent for path in paths}


def test_a_stage_does_not_read_another_stages_counts(tmp_path):
    save_learned(histogram(), tmp_path, stage=1)
    assert load_learned(tmp_path, IDENTITY, stage=0)[0] is None
    assert load_learned(tmp_path, IDENTITY, stage=1)[0] is not None


OTHER_MODELS = [
    ({"model_type": "olmoe"}, "model_type is qwen3_moe, not olmoe"),
    ({"layers": (3, 4, 5)}, r"layers is \[3, 4\], not \[3, 4, 5\]"),
    ({"num_experts": 4}, "num_experts is 2, not 4"),
    ({"top_k": 2}, "top_k is 1, not 2"),
]


@pytest.mark.parametrize(("change", "text"), OTHER_MODELS)
def test_the_field_by_which_another_models_file_differs_is_named(tmp_path, change, text):
    save_learned(histogram(), tmp_path)
    learned, (notice,) = load_learned(tmp_path, replace(IDENTITY, **change))
    assert (None, "learned-mismatch", False) == (learned, notice.name, notice.strict)
    with pytest.raises(ValueError, match=text):
        raise ValueError(notice.text)


@pytest.mark.parametrize(("change", "text"), OTHER_MODELS)
def test_a_file_that_was_put_in_another_models_place_is_skipped_by_its_content(tmp_path, change, text):
    model = replace(IDENTITY, **change)
    save_histogram(histogram(), learned_path(tmp_path, model))
    learned, (notice,) = load_learned(tmp_path, model)
    assert (None, "learned-mismatch") == (learned, notice.name)
    with pytest.raises(ValueError, match=text):
        raise ValueError(notice.text)


def test_of_many_other_models_the_nearest_is_named(tmp_path):
    save_learned(histogram(identity=replace(IDENTITY, model_type="olmoe", top_k=2)), tmp_path)
    save_learned(histogram(), tmp_path)
    _, notices = load_learned(tmp_path, replace(IDENTITY, top_k=2))
    assert 1 == len(notices)
    assert "top_k is 1, not 2" in notices[0].text


def test_another_quantisation_alone_is_a_notice(tmp_path):
    save_learned(histogram(quantisation="fp8"), tmp_path)
    learned, notices = load_learned(tmp_path, IDENTITY, quantisation="int4")
    assert (ENOUGH, ["other-quantisation"]) == (decode_of(learned), names(notices))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace("60000", "NaN"),
        lambda text: text.replace("60000", "-1"),
        lambda text: text.replace('"version":1', '"version":9'),
        lambda text: text.replace('"num_experts":2', f'"num_experts":{10**10}'),
        lambda text: text.replace('"num_experts":2', f'"num_experts":{10**30}'),
        lambda text: text.replace('"tokens":60000', f'"tokens":{10**400}'),
        lambda text: text.replace('"name":null', '"name":null,"name":"x"'),
        lambda text: "[]",
        lambda text: json.dumps({"train": {"decode": {"3": [1, 2]}}}),
    ],
)
def test_a_damaged_file_is_skipped_aloud_and_never_fatal(tmp_path, damage):
    path = save_learned(histogram(), tmp_path)
    path.write_text(damage(path.read_text()))
    learned, (notice,) = load_learned(tmp_path, IDENTITY)
    assert (None, "learned-damaged", False) == (learned, notice.name, notice.strict)
    assert str(path) in notice.text


@given(st.binary(max_size=200))
def test_any_bytes_in_the_files_place_are_skipped(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("state")
    path = learned_path(folder, IDENTITY)
    path.parent.mkdir()
    path.write_bytes(data)
    assert (None, ["learned-damaged"]) == (load_learned(folder, IDENTITY)[0], names(load_learned(folder, IDENTITY)[1]))


def test_a_process_killed_in_the_middle_of_a_save_leaves_the_old_file(tmp_path):
    path = save_learned(histogram(), tmp_path)
    before = path.read_bytes()
    saver = start_saver(tmp_path, before="files.os.replace = hang")
    try:
        assert "hanging\n" == saver.stdout.readline()
    finally:
        saver.send_signal(signal.SIGKILL)
        saver.communicate()
    assert -signal.SIGKILL == saver.returncode
    leftover = list(path.parent.glob(f".{path.name}.*"))
    assert (1, before) == (len(leftover), path.read_bytes())
    assert (ENOUGH, []) == (decode_of(load_learned(tmp_path, IDENTITY)[0]), load_learned(tmp_path, IDENTITY)[1])
    save_learned(histogram([[1, 2], [3, 4]]), tmp_path)
    assert {path.name, f"{path.name}.lock"} == {file.name for file in path.parent.iterdir()}
    assert [[1, 2], [3, 4]] == decode_of(load_learned(tmp_path, IDENTITY)[0])


def test_a_process_killed_before_the_data_is_on_disk_leaves_the_old_file(tmp_path):
    path = save_learned(histogram(), tmp_path)
    saver = start_saver(tmp_path, before="files.os.fsync = hang")
    try:
        assert "hanging\n" == saver.stdout.readline()
        assert ENOUGH == decode_of(load_learned(tmp_path, IDENTITY)[0])
    finally:
        saver.kill()
        saver.communicate()
    assert ENOUGH == decode_of(load_learned(tmp_path, IDENTITY)[0])
    assert path.exists()


def test_the_same_process_left_alone_replaces_the_file(tmp_path):
    save_learned(histogram(), tmp_path)
    saver = start_saver(tmp_path, before="")
    saver.communicate()
    assert 0 == saver.returncode
    assert [[7, 7], [7, 7]] == decode_of(load_learned(tmp_path, IDENTITY)[0])


def test_a_save_waits_for_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("hotsplit.plan.learned._LOCK_TRIES", 100 * 120)  # a busy machine may keep us with the lock
    path = save_learned(histogram(), tmp_path)
    saver = threading.Thread(target=save_learned, args=(histogram([[1, 2], [3, 4]]), tmp_path))
    with Path(f"{path}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        saver.start()
        saver.join(0.2)
        assert saver.is_alive()
        assert ENOUGH == decode_of(load_learned(tmp_path, IDENTITY)[0])
    saver.join()
    assert [[1, 2], [3, 4]] == decode_of(load_learned(tmp_path, IDENTITY)[0])


def test_a_reader_never_sees_half_of_a_file(tmp_path, monkeypatch):
    # The writers have the lock in turn, as luck has it, and a busy disk holds up each of them.
    monkeypatch.setattr("hotsplit.plan.learned._LOCK_TRIES", 100 * 120)
    save_learned(histogram(), tmp_path)
    done = threading.Event()

    def write():
        for number in range(40):
            save_learned(histogram(np.full((2, 2), float(number))), tmp_path)
        done.set()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while not done.is_set() or reads < 10:
        learned, _ = load_learned(tmp_path, IDENTITY)
        assert learned is not None
        reads += 1
    for writer in writers:
        writer.join()


def test_a_state_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HotsplitError, match="cannot write .*set HOTSPLIT_STATE_DIR"):
        save_learned(histogram(), tmp_path / "file")


def test_everything_that_is_written_is_under_the_state_folder(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.chdir(model)
    model.chmod(0o555)
    path = save_learned(histogram(name=str(model)), tmp_path / "state")
    assert ([], tmp_path / "state" / "learned") == (list(model.iterdir()), path.parent)
    model.chmod(0o755)


def test_counts_that_are_none_are_never_saved_over_good_ones(tmp_path):
    path = save_learned(histogram(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(HistogramError, match="layer 3, expert 0"):
        save_learned(histogram([[np.nan, 1], [1, 1]]), tmp_path)
    assert before == path.read_bytes()


REFERENCE = histogram([[1e9, 3e9], [1.0, 1.0]], name="published")


def test_a_reference_and_learned_counts_are_merged_as_equals():
    counts, line, notices = choose_counts(REFERENCE, histogram(), use_learned=True)
    assert decode_of(merge(REFERENCE, histogram(), live_weight=1.0)) == decode_of(counts)
    expected = (
        "counts: reference published weight 1 + learned weight 1, 60000 decode tokens in its weakest layer 4, "
        "normalised per layer"
    )
    assert (expected, []) == (line, notices)


def test_ten_to_the_nine_old_counts_weigh_no_more_than_a_days_learning():
    learned = histogram([[50_000.0, 0.0], [50_000.0, 0.0]])
    counts, _, _ = choose_counts(histogram([[0.0, 1e9], [0.0, 1e9]]), learned, use_learned=True)
    assert [[1.0, 1.0], [1.0, 1.0]] == decode_of(counts)


def test_learned_counts_below_the_minimum_are_not_merged_and_the_layer_is_named():
    few = histogram([[60_000.0, 20_000.0], [10_000.0, 39_999.0]])
    counts, line, (notice,) = choose_counts(REFERENCE, few, use_learned=True)
    assert counts is REFERENCE
    assert "counts: reference published alone, weight 1; learned counts skipped" == line
    assert "layer 4: got 49999 decode tokens, wanted at least 50000" in notice.text


def test_the_minimum_is_met_by_decayed_counts_from_their_file(tmp_path):
    save_learned(histogram([[49_999.5, 0.75], [50_000.25, 0.5]]), tmp_path)
    learned, _ = load_learned(tmp_path, IDENTITY)
    assert "normalised per layer" in choose_counts(REFERENCE, learned, use_learned=True)[1]
    assert choose_counts(REFERENCE, learned, use_learned=True, min_tokens=50_001)[0] is REFERENCE


def test_learned_counts_rule_alone_without_a_reference_however_few():
    few = histogram([[3.0, 2.0], [1.0, 4.0]])
    counts, line, notices = choose_counts(None, few, use_learned=True)
    assert counts is few
    assert ("counts: learned alone, weight 1, 5 decode tokens in its weakest layer 3", []) == (line, notices)


def test_learned_counts_are_ignored_on_request():
    for reference, start in ((REFERENCE, "counts: reference published alone"), (None, "counts: none")):
        counts, line, notices = choose_counts(reference, histogram(), use_learned=False)
        assert counts is reference
        assert (True, True, []) == (line.startswith(start), "HOTSPLIT_LEARNED=ignore" in line, notices)


def test_nothing_known_is_uniform_and_said():
    expected = (None, "counts: none, every layer alike; no learned counts", [])
    assert expected == choose_counts(None, None, use_learned=True)
    assert expected == choose_counts(None, histogram(np.zeros((2, 2))), use_learned=True)


def test_learned_counts_of_another_model_are_never_merged():
    other = histogram(identity=replace(IDENTITY, model_type="olmoe"))
    counts, line, (notice,) = choose_counts(REFERENCE, other, use_learned=True)
    assert counts is REFERENCE
    assert "learned counts skipped" in line
    assert "model_type is olmoe, not qwen3_moe" in notice.text


def test_new_traffic_outweighs_ten_to_the_nine_old_counts_within_one_half_life():
    rebalancer = Rebalancer(
        hot=np.array([[True, False]]),
        prior=np.array([[1e9, 0.0]]),
        top_k=1,
        options=RebalanceOptions(half_life=10.0, margin=1.25),
    )
    window = np.array([[0.0, 2_000.0]])
    swapped = [bool(rebalancer.update(window, tokens=2_000)) for _ in range(10)]
    assert [False] * 9 + [True] == swapped
    old, new = rebalancer.scores()[0]
    assert new > 1.25 * old > 0


def test_learned_counts_hold_nothing_of_the_prior(tmp_path):
    rebalancer = Rebalancer(
        hot=np.array([[True, False]] * 2), prior=np.full((2, 2), 1e9), top_k=1, options=RebalanceOptions()
    )
    for _ in range(3):
        rebalancer.update(np.array([[0.0, 2_000.0], [1_500.0, 500.0]]), tokens=2_000)
    save_learned(histogram(rebalancer.live_counts()), tmp_path)
    learned, _ = load_learned(tmp_path, IDENTITY)
    assert 0.0 == learned.phases["decode"].counts[0, 0]
    assert rebalancer.live_counts().tolist() == decode_of(learned)
