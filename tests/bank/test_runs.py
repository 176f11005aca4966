"""Run folders: old ones of ours go, and nothing else ever does."""

from __future__ import annotations

import os
import subprocess
import sys

from hotsplit.bank import runs
from hotsplit.bank.runs import KEPT_RUNS, new_run_dir


def make_runs(folder, number, *, pid=2**22 + 1, content=("rank0.json",)):
    made = []
    for i in range(number):
        run = folder / "runs" / f"20260101T0000{i:02d}-{pid}-0"
        run.mkdir(parents=True)
        for name in content:
            (run / name).write_text("{}")
        made.append(run)
    return made


def test_the_oldest_ended_runs_go(tmp_path):
    made = make_runs(tmp_path, KEPT_RUNS + 5)
    new_run_dir(tmp_path)
    assert [False] * 6 + [True] * (KEPT_RUNS - 1) == [run.exists() for run in made]


def test_a_users_own_folders_stay(tmp_path):
    mine = [tmp_path / "runs" / f"Jan{i:02d}_12-00-00_host" for i in range(60)]
    for folder in mine:
        folder.mkdir(parents=True)
        (folder / "events").write_text("mine")
    strangers = make_runs(tmp_path, KEPT_RUNS + 5, content=("rank0.json", "notes.txt"))
    new_run_dir(tmp_path)
    assert all(folder.exists() for folder in [*mine, *strangers])


def test_runs_that_still_run_stay(tmp_path):
    made = make_runs(tmp_path, KEPT_RUNS + 5, pid=os.getpid())
    new_run_dir(tmp_path)
    assert all(run.exists() for run in made)


def test_two_runs_of_one_process_have_folders_of_their_own(tmp_path):
    assert new_run_dir(tmp_path) != new_run_dir(tmp_path)


def test_runs_that_were_asked_for_snapshots_go_too(tmp_path):
    made = make_runs(tmp_path, KEPT_RUNS + 5, content=("rank0.json", "rank1.json", "ask", "told-rank0", ".ask.x1"))
    new_run_dir(tmp_path)
    assert [False] * 6 + [True] * (KEPT_RUNS - 1) == [run.exists() for run in made]


def test_what_one_asks_with_is_what_a_rank_answers_with(tmp_path):
    assert ("", "") == (runs.asked(tmp_path), runs.told(tmp_path, rank=3))
    runs.ask(tmp_path, word="one")
    runs.tell(tmp_path, rank=3, word=runs.asked(tmp_path))
    assert ("one", "") == (runs.told(tmp_path, rank=3), runs.told(tmp_path, rank=0))


def test_runs_of_processes_that_are_there_are_live(tmp_path):
    make_runs(tmp_path, 2)
    mine = make_runs(tmp_path, 2, pid=os.getpid())
    (tmp_path / "runs" / f"20260101T000009-{os.getpid()}-x").mkdir()
    assert mine == runs.live_runs(tmp_path)
    assert [] == runs.live_runs(tmp_path / "gone")


def test_a_folder_of_an_earlier_process_with_the_same_id_is_no_live_run(tmp_path):
    (stale,) = make_runs(tmp_path, 1, pid=os.getpid())
    os.utime(stale, (1e9, 1e9))
    mine = runs.new_run_dir(tmp_path)
    mine.mkdir()
    assert [mine] == runs.live_runs(tmp_path)


def test_a_process_that_has_ended_and_that_nobody_has_reaped_runs_no_more(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        make_runs(tmp_path, 1, pid=ended.pid)
        assert [] == runs.live_runs(tmp_path)
