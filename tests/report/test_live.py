from __future__ import annotations

import numpy as np
import pytest

from hotsplit.errors import HotsplitError, PlanMismatchError
from hotsplit.report.live import MAX_UPDATES, live_counts, other_plan, read_run, require_same_model, run_files
from report.reports import line_of, plan_of, run_folder, skewed, snapshot_of

COUNTS = skewed().phases["decode"].counts


@pytest.fixture
def plan():
    return plan_of(skewed())


def log_of(path, *lines):
    path.write_text("\n".join(f"12:00 (Worker pid=7) INFO {line}" for line in lines) + "\n")
    return path


def names_of(notices):
    return [notice.name for notice in notices]


def test_a_log_gives_every_update_of_every_rank_in_order(tmp_path):
    lines = [line_of(update, rank=rank) for update in (1, 2, 3) for rank in (1, 0)]
    run, notices = read_run([log_of(tmp_path / "server.log", "something else", *lines)])
    assert (0, 1) == run.ranks
    assert [[1, 2, 3]] * 2 == [[line.update for line in run.lines[rank]] for rank in (0, 1)]
    assert [] == notices


def test_a_folder_gives_the_state_of_every_rank(tmp_path, plan):
    folder = run_folder(tmp_path / "run", *(snapshot_of(plan, counts=COUNTS, rank=rank) for rank in (0, 1)))
    run, notices = read_run([folder])
    assert [0, 1] == list(run.snapshots)
    assert ({}, []) == (run.lines, notices)


def test_folder_and_log_are_one_run(tmp_path, plan):
    folder = run_folder(tmp_path / "run", snapshot_of(plan, counts=COUNTS))
    run, _ = read_run([folder, log_of(tmp_path / "server.log", line_of(1))])
    assert (1, 1) == (len(run.snapshots), len(run.lines[0]))


def test_a_log_in_the_folder_is_read_too(tmp_path, plan):
    folder = run_folder(tmp_path / "run", snapshot_of(plan, counts=COUNTS))
    log_of(folder / "server.log", line_of(1), line_of(2))
    assert 2 == len(read_run([folder])[0].lines[0])
    assert ["rank0.json", "server.log"] == [path.name for path in run_files([folder])]


def test_of_several_runs_in_one_log_the_last_is_shown_with_a_notice(tmp_path):
    lines = [line_of(update, hit=hit) for hit in (0.1, 0.9) for update in (1, 2)]
    run, notices = read_run([log_of(tmp_path / "a.log", *lines)])
    assert [0.9, 0.9] == [line.hit for line in run.lines[0]]
    assert ["several-runs"] == names_of(notices)


def test_a_torn_line_is_left_out_with_a_notice(tmp_path):
    run, notices = read_run([log_of(tmp_path / "a.log", line_of(1), str(line_of(2))[:40])])
    assert [1] == [line.update for line in run.lines[0]]
    assert ["torn-update-lines"] == names_of(notices)


def test_a_long_log_is_thinned_and_keeps_both_ends(tmp_path):
    last = MAX_UPDATES * 2 + 1
    run, notices = read_run([log_of(tmp_path / "a.log", *map(line_of, range(1, last + 1)))])
    assert (MAX_UPDATES, 1, last) == (len(run.lines[0]), run.lines[0][0].update, run.lines[0][-1].update)
    assert ["updates-thinned"] == names_of(notices)


@pytest.mark.parametrize("content", ["", "nothing to see\n", "hotsplit update=1 and then nothing\n"])
def test_a_log_without_an_update_line_is_refused(tmp_path, content):
    (tmp_path / "a.log").write_text(content)
    with pytest.raises(HotsplitError, match="neither a snapshot nor an update line"):
        read_run([tmp_path / "a.log"])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(HotsplitError, match="wanted a run's folder with rank0.json"):
        read_run([tmp_path])


def test_a_place_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(HotsplitError, match="no such file"):
        read_run([tmp_path / "gone"])


def test_a_damaged_snapshot_is_refused_by_name(tmp_path, plan):
    folder = run_folder(tmp_path / "run", snapshot_of(plan, counts=COUNTS))
    (folder / "rank0.json").write_text('{"format": "hotsplit-metrics", "version": 1, "snapshot": {}}')
    with pytest.raises(HotsplitError, match="rank0.json"):
        read_run([folder])


def test_counts_of_stages_are_put_together(tmp_path, plan):
    parts = [(3, 4, 5), (6, 7, 8)]
    snapshots = [snapshot_of(plan, counts=COUNTS, rank=rank, layers=layers) for rank, layers in enumerate(parts)]
    run, _ = read_run([run_folder(tmp_path / "run", *snapshots)])
    assert COUNTS.tolist() == live_counts(run, plan=plan, phase="decode").tolist()


@pytest.mark.parametrize("layers", [(3, 4), ()])
def test_counts_that_lack_a_layer_are_not_shown(tmp_path, plan, layers):
    run, _ = read_run([run_folder(tmp_path / "run", snapshot_of(plan, counts=COUNTS, layers=layers))])
    assert None is live_counts(run, plan=plan, phase="decode")


def test_counts_of_another_number_of_experts_are_not_shown(tmp_path, plan):
    wider = np.concatenate([COUNTS, COUNTS], axis=1)
    run, _ = read_run([run_folder(tmp_path / "run", snapshot_of(plan, counts=wider))])
    assert None is live_counts(run, plan=plan, phase="decode")


def test_a_run_of_another_plan_is_said(tmp_path, plan):
    run, _ = read_run([run_folder(tmp_path / "run", snapshot_of(plan, counts=COUNTS))])
    assert [] == other_plan(run, plans=[plan])
    assert ["run-of-another-plan"] == names_of(other_plan(run, plans=[plan_of(skewed(), fraction=0.5)]))


def test_a_run_with_a_layer_that_the_plan_has_not_is_refused(tmp_path, plan):
    foreign = plan_of(skewed(first_layer=4))
    run, _ = read_run([run_folder(tmp_path / "run", snapshot_of(foreign, counts=COUNTS))])
    with pytest.raises(PlanMismatchError, match="layer 9 is none of the plan's"):
        require_same_model(run, plan=plan)
