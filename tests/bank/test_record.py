"""What a run tells and keeps: numbers that agree with counting by hand, and learned counts that nothing is lost of."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from hotsplit.bank import record as recording
from hotsplit.bank.live import Live
from hotsplit.bank.record import Record, RunFacts
from hotsplit.bank.route import Router
from hotsplit.bank.rows import place
from hotsplit.bank.swap import TickResult
from hotsplit.metrics import read_snapshot, snapshot_path
from hotsplit.plan.learned import learned_path, load_learned
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer
from plan_builders import sizes_of

E, TOP_K, ROW_BYTES, HOT = 4, 2, (100, 1000), ((0, 1), (2,))
SIZES = sizes_of(ROW_BYTES, num_experts=E, top_k=TOP_K, first_layer=3)


class Swapper:
    """Never moves anything."""

    def tick(self):
        return TickResult()

    def busy(self):
        return frozenset()

    def request(self, layer_id, *, expert_in, expert_out):
        return True


class Run:
    """Counters, live loop and record of one rank, with an update every two steps."""

    def __init__(self, *, dynamic=True, half_life=1.0, **facts):
        layers = [place(hot, num_experts=E, spare=dynamic, inclusive=False) for hot in HOT]
        self.router = Router(layers, row_bytes=ROW_BYTES)
        self.live = Live(self.router, plan_shares=None, row_bytes=ROW_BYTES, dyn_steps=2)
        if dynamic:
            options = RebalanceOptions(half_life=half_life)
            rebalancer = Rebalancer(hot=self.router.hot_mask(), prior=None, top_k=TOP_K, options=options)
            self.live.adapt(Swapper(), rebalancer=rebalancer)
        known = {"sizes": SIZES, "plan_hash": "abc", "budget_bytes": 5000, "hot_bytes": 4000, "backend": "toy"}
        kept = {"learn_into": None, "run_dir": None, "rank": 1, "dynamic": dynamic}
        self.record = Record(self.router, live=self.live, facts=RunFacts(**(known | kept | facts)))
        self.random = Random(5)

    def step(self, *, phase="decode", num_tokens=3):
        """One step of random traffic; its ids."""
        self.live.tick()
        ids = [[[self.random.randrange(E) for _ in range(TOP_K)] for _ in range(num_tokens)] for _ in HOT]
        for layer_id, layer_ids in enumerate(ids):
            self.router.route(layer_id, torch.tensor(layer_ids), is_padding=None, phase=phase, step=1)
        self.router.flush()
        return ids


class Law:
    """What a single run has learned, by plain arithmetic: every update halves what came before its own window."""

    def __init__(self, decay=0.5):
        self.decay, self.steps = decay, 0
        self.faded, self.window, self.tokens = np.zeros((2, E)), np.zeros((2, E)), 0

    def step(self, ids):
        if self.steps and self.steps % 2 == 0:
            self.faded, self.window = self.decay * self.faded + self.window, np.zeros((2, E))
        self.steps += 1
        self.tokens += len(ids[0])
        for layer_id, layer_ids in enumerate(ids):
            np.add.at(self.window[layer_id], np.ravel(layer_ids), 1)

    @property
    def counts(self):
        return (self.faded + self.window).tolist()


def play(run, law, num_steps):
    for _ in range(num_steps):
        law.step(run.step())


def saved(folder):
    """Counts and tokens of the learned file."""
    learned, notices = load_learned(folder, SIZES.identity)
    assert [] == notices
    return learned.phases["decode"].counts.tolist(), learned.phases["decode"].tokens


class Lock:
    """Tells whether it is held, and how often it was."""

    def __init__(self):
        self.is_held, self.times = False, 0

    def __enter__(self):
        assert not self.is_held
        self.is_held, self.times = True, self.times + 1

    def __exit__(self, *error):
        self.is_held = False


@pytest.fixture
def listen(caplog):
    caplog.set_level("INFO", logger="hotsplit")
    return caplog


def test_the_snapshot_and_the_histogram_agree_with_counting_pair_by_pair():
    run = Run()
    counts = {phase: np.zeros((2, E), int) for phase in ("decode", "prefill")}
    tokens, hits, touched = {"decode": 0, "prefill": 0}, {"decode": 0, "prefill": 0}, {True: 0, False: 0}
    for number in range(9):
        phase = "prefill" if number % 4 == 0 else "decode"
        ids = run.step(phase=phase, num_tokens=number + 1)
        tokens[phase] += number + 1
        for layer_id, layer_ids in enumerate(ids):
            pairs = [expert for token in layer_ids for expert in token]
            hits[phase] += sum(expert in HOT[layer_id] for expert in pairs)
            for expert in pairs:
                counts[phase][layer_id, expert] += 1
            for expert in set(pairs):
                touched[expert in HOT[layer_id]] += ROW_BYTES[layer_id]
    snapshot, histogram = run.record.snapshot(), run.record.histogram()
    assert (tokens, hits) == (snapshot.tokens, snapshot.hit_pairs)
    assert {phase: int(counted.sum()) for phase, counted in counts.items()} == snapshot.pairs
    assert (touched[True], touched[False]) == (snapshot.touched_hot_bytes, snapshot.touched_cold_bytes)
    assert (9, 5000, 4000, 2 * 100 + 3 * 1000) == (
        snapshot.steps,
        snapshot.budget_bytes,
        snapshot.hot_bytes,
        snapshot.host_bytes,
    )
    for phase, counted in counts.items():
        assert {3: counted[0].tolist(), 4: counted[1].tolist()} == snapshot.counts[phase]
        assert counted.tolist() == histogram.phases[phase].counts.tolist()
        assert tokens[phase] == histogram.phases[phase].tokens
    assert ("dynamic", "toy", "abc", 1) == (snapshot.mode, snapshot.backend, snapshot.plan_hash, snapshot.rank)


def test_window_ratios_are_those_of_the_last_update_and_unknown_before_it():
    run = Run()
    run.step()
    assert run.record.snapshot().hit_ratio_window is None
    for _ in range(2):
        run.step()
    line, snapshot = run.live.last.line, run.record.snapshot()
    assert (line.hit, line.byte_hit, line.oracle) == (
        snapshot.hit_ratio_window,
        snapshot.byte_hit_ratio_window,
        snapshot.oracle_ratio_window,
    )
    assert 0 <= snapshot.hit_ratio_window <= 1
    assert line.cost_ms / 1e3 == snapshot.update_seconds


def test_a_phase_that_was_not_seen_is_not_in_the_histogram():
    run = Run()
    run.step(phase="prefill")
    assert ["prefill"] == list(run.record.histogram().phases)
    assert SIZES.identity == run.record.histogram().identity


def test_host_bytes_follow_the_row_map():
    run = Run()
    run.router.publish(1, expert=0, row=1)  # into the spare row; expert 2 is still hot
    assert 2 * 100 + 2 * 1000 == run.record.snapshot().host_bytes


def test_saving_holds_the_lock_while_it_reads_and_not_while_it_writes(tmp_path, monkeypatch):
    run, lock, seen = Run(learn_into=tmp_path, run_dir=tmp_path), Lock(), []
    run.step()

    def spy(owner, name):
        stock = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (seen.append((name, lock.is_held)), stock(*a, **k))[1])

    for owner, name in ((recording, "write_snapshot"), (recording, "add_learned")):
        spy(owner, name)
    for owner, name in ((run.record, "snapshot"), (run.live, "learned"), (run.live, "learned_saved")):
        spy(owner, name)
    run.record.save(lock)
    reads, writes = [("snapshot", True), ("learned", True)], [("write_snapshot", False), ("add_learned", False)]
    assert [*reads, *writes, ("learned_saved", True)] == seen
    assert (2, False) == (lock.times, lock.is_held)


def test_the_snapshot_file_holds_the_snapshot(tmp_path):
    run = Run(run_dir=tmp_path)
    run.step()
    run.record.save()
    assert list(run.record.snapshot().to_samples()) == list(read_snapshot(snapshot_path(tmp_path, rank=1)).to_samples())


def test_without_folders_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run()
    run.step()
    run.record.save()
    assert [] == list(tmp_path.iterdir())


def test_a_run_without_decode_saves_no_learned_counts(tmp_path):
    run = Run(learn_into=tmp_path)
    run.step(phase="prefill")
    run.record.save()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7])
def test_saves_one_after_the_other_add_up_to_what_the_run_has_learned(tmp_path, num_steps, dynamic):
    run, law = Run(learn_into=tmp_path, dynamic=dynamic), Law(0.5 if dynamic else 1.0)
    for _ in range(6):
        play(run, law, num_steps)
        run.record.save()
        assert (law.counts, law.tokens) == saved(tmp_path)


@pytest.mark.parametrize("num_meanwhile", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_what_comes_while_a_save_is_written_is_in_the_next_one_and_in_no_other(
    tmp_path, monkeypatch, num_before, num_meanwhile
):
    run, law, add_learned = Run(learn_into=tmp_path), Law(), recording.add_learned

    def slow(*args, **kwargs):
        play(run, law, num_meanwhile)
        return add_learned(*args, **kwargs)

    play(run, law, num_before)
    told = law.counts, law.tokens
    monkeypatch.setattr(recording, "add_learned", slow)
    run.record.save()
    assert told == saved(tmp_path)
    monkeypatch.setattr(recording, "add_learned", add_learned)
    for _ in range(3):
        play(run, law, 1)
        run.record.save()
        assert (law.counts, law.tokens) == saved(tmp_path)


def test_with_any_half_life_saves_in_the_midst_of_windows_change_nothing(tmp_path):
    run, law = Run(learn_into=tmp_path, half_life=10.0), Law(0.5**0.1)
    for num_steps in (1, 1, 5, 2, 3, 8, 1):
        play(run, law, num_steps)
        run.record.save()
    counts, tokens = saved(tmp_path)
    assert np.allclose(law.counts, counts, rtol=1e-12)
    assert law.tokens == tokens


def test_an_unwritable_state_folder_is_said_and_its_counts_are_saved_the_next_time(tmp_path, listen):
    folder = tmp_path / "state"
    folder.write_text("a file is in the way")
    run, law = Run(learn_into=folder), Law()
    play(run, law, 3)
    run.record.save()
    (warning,) = [line for line in listen.records if line.levelname == "WARNING"]
    assert "learned counts are not saved: cannot write " in warning.getMessage()
    assert "HOTSPLIT_STATE_DIR" in warning.getMessage()
    folder.unlink()
    play(run, law, 4)
    run.record.save()
    assert (law.counts, law.tokens) == saved(folder)
    assert f"learned counts saved to {learned_path(folder, SIZES.identity)}" == listen.messages[-1]


def test_a_run_folder_that_cannot_be_written_is_said_and_learned_counts_are_saved_all_the_same(tmp_path, listen):
    (tmp_path / "run").write_text("a file is in the way")
    run = Run(learn_into=tmp_path / "state", run_dir=tmp_path / "run")
    run.step()
    run.record.save()
    assert ["WARNING"] == [line.levelname for line in listen.records if "metrics are not written" in line.getMessage()]
    assert 3 == saved(tmp_path / "state")[1]


def test_a_pipeline_stage_saves_a_file_of_its_own(tmp_path):
    run = Run(learn_into=tmp_path, stage=2)
    run.step()
    run.record.save()
    assert [learned_path(tmp_path, SIZES.identity, stage=2)] == list((tmp_path / "learned").glob("*.json"))


def test_a_save_is_due_five_minutes_after_the_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    run, due = Run(), []
    for seconds in (299.9, 300.0):
        now[0] = seconds
        due.append(run.record.is_save_due)
    run.record.save()
    due.append(run.record.is_save_due)
    assert [False, True, False] == due
