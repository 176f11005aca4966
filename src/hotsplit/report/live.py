"""What a run left behind: the update lines of its log, and the last snapshot of every rank.

Stands beside the plan: `run folder, log -> run -> page`. A run's folder holds one snapshot per rank, the state at its
last update; the course over time is in the log, one update line per update and rank. Either may be given, or both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HotsplitError, PlanMismatchError
from hotsplit.files import require_regular
from hotsplit.metrics import MetricsSnapshot, UpdateLine, read_snapshot
from hotsplit.notices import Notice
from hotsplit.plan.planfile import Plan, plan_hash

MAX_UPDATES = 2000
"""Update lines per rank that a page shows; of more, every n-th, and always the first and the last."""

_MARK = b"hotsplit update="
_LONGEST_LINE = 1 << 16
"""Bytes; an update line has some 200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is known of one run."""

    lines: Mapping[int, tuple[UpdateLine, ...]]
    """Updates in order, by rank."""
    snapshots: Mapping[int, MetricsSnapshot]
    """The last state, by rank."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that anything is known of, ascending."""
        return tuple(sorted({*self.lines, *self.snapshots}))


def read_run(places: Iterable[Path]) -> tuple[Run, list[Notice]]:
    """Read the folders and logs of one run.

    Args:
        places: Run folders (rank0.json, rank1.json, ..., and *.log where somebody put the log beside them) and logs,
            of one run.

    Returns:
        The run, and notices: logs of several runs, of which the last counts; lines that are torn; updates left out of a long log.

    Raises:
        HotsplitError: A place is neither, cannot be read, or holds neither a snapshot nor an update line.
    """
    lines: dict[int, list[UpdateLine]] = {}
    snapshots: dict[int, MetricsSnapshot] = {}
    notices: list[Notice] = []
    for place in places:
        found = list(_files(place))
        for path in found:
            if path.suffix == ".json":
                snapshot = read_snapshot(path)
                snapshots[snapshot.rank] = snapshot
            else:
                for line in _update_lines(path, notices):
                    lines.setdefault(line.rank, []).append(line)
        if not found or (found == [place] and not any(lines.values())):
            raise HotsplitError(
                f"run {place}",
                got="neither a snapshot nor an update line",
                wanted="a run's folder with rank0.json in it, or a log with lines that begin hotsplit update=",
                path=place,
            )
    shown = {rank: _last_run(found, notices) for rank, found in sorted(lines.items())}
    return Run(lines=shown, snapshots=dict(sorted(snapshots.items()))), notices


def run_files(places: Iterable[Path]) -> list[Path]:
    """The files that `read_run` reads.

    Args:
        places: Run folders and logs.

    Raises:
        HotsplitError: A place is neither.
    """
    return [path for place in places for path in _files(place)]


def live_counts(run: Run, *, plan: Plan, phase: str) -> npt.NDArray[np.float64] | None:
    """All that the run has routed so far, put together from its ranks.

    Args:
        run: The run; every stage's layers are in the snapshots of its ranks, alike.
        plan: Of the same model.
        phase: "decode" or "prefill".

    Returns:
        Routed pairs, [L, E], float64; None where a layer is missing, has other experts, or nothing was routed.
    """
    rows: dict[int, tuple[int, ...]] = {}
    for snapshot in run.snapshots.values():
        for layer, counts in snapshot.counts.get(phase, {}).items():
            rows.setdefault(layer, tuple(counts))
    shapes = {len(row) for row in rows.values()}
    if set(rows) != set(plan.layers) or shapes != {plan.identity.model.num_experts}:
        return None
    counts_LE = np.array([rows[layer] for layer in plan.layers], dtype=np.float64)
    return counts_LE if counts_LE.any() else None


def require_same_model(run: Run, *, plan: Plan) -> None:
    """Refuse a run of another model, as far as its snapshots tell; a log does not.

    Args:
        run: Whose snapshots have counts by layer and expert; a rank has its own stage's layers alone.
        plan: Of the model.

    Raises:
        PlanMismatchError: A layer that the plan has not, or another number of experts.
    """
    model = plan.identity.model
    for snapshot in run.snapshots.values():
        for rows in snapshot.counts.values():
            foreign = sorted(set(rows) - set(plan.layers))
            experts = {len(row) for row in rows.values()} - {model.num_experts}
            differing = [f"layer {foreign[0]} is none of the plan's"] if foreign else []
            differing += [f"num_experts is {found}, not {model.num_experts}" for found in sorted(experts)]
            if differing:
                raise PlanMismatchError(
                    f"rank {snapshot.rank} of the run was of another model",
                    got="; ".join(differing),
                    do="name a run of this model, or leave --run out",
                    differing=differing,
                )


def other_plan(run: Run, *, plans: Iterable[Plan]) -> list[Notice]:
    """Say that a run did not start from any of these plans.

    Args:
        run: Whose snapshots name the plan.
        plans: All that are shown.
    """
    ours, theirs = {plan_hash(plan) for plan in plans}, {snapshot.plan_hash for snapshot in run.snapshots.values()}
    if theirs <= ours:
        return []
    named = ", ".join(digest[:12] for digest in sorted(theirs - ours))
    text = f"the run started from plan {named}, which is none of those shown: its rates are not theirs"
    return [Notice(name="run-of-another-plan", text=text, strict=False)]


def _files(place: Path) -> Iterator[Path]:
    """A folder's snapshots and logs, or the file itself."""
    try:
        if not place.is_dir():
            require_regular(place)
            yield place
            return
        names = sorted(path for path in place.iterdir() if path.is_file())
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise HotsplitError(f"run {place}", got=reason, wanted="a run's folder or a log", path=place) from error
    yield from (path for path in names if path.match("rank*.json") or path.suffix == ".log")


def _update_lines(path: Path, notices: list[Notice]) -> Iterator[UpdateLine]:
    """Every update line of a log; what else is in it is passed over, line by line, however long the log is."""
    torn = 0
    try:
        with path.open("rb") as file:
            while text := file.readline(_LONGEST_LINE):
                if _MARK in text:
                    try:
                        yield UpdateLine.parse(text.decode("utf-8", errors="replace"))
                    except HotsplitError:  # a log that is being written ends in the middle of a line
                        torn += 1
    except OSError as error:
        raise HotsplitError(f"run {path}", got=(error.strerror or str(error)).lower(), path=path) from error
    if torn:
        said = f"{path}: {torn} update {'lines are' if torn > 1 else 'line is'} torn and left out"
        notices.append(Notice(name="torn-update-lines", text=said, strict=False))


def _last_run(found: list[UpdateLine], notices: list[Notice]) -> tuple[UpdateLine, ...]:
    """The lines of the last of the runs that share a log, thinned to what a page can show."""
    starts = [0, *(n for n in range(1, len(found)) if found[n].update <= found[n - 1].update)]
    lines = found[starts[-1] :]
    if len(starts) > 1:
        text = f"the log holds {len(starts)} runs of rank {lines[0].rank}: the last one is shown"
        notices.append(Notice(name="several-runs", text=text, strict=False))
    if len(lines) <= MAX_UPDATES:
        return tuple(lines)
    text = f"the log holds {len(lines)} updates of rank {lines[0].rank}: {MAX_UPDATES} of them are shown"
    notices.append(Notice(name="updates-thinned", text=text, strict=False))
    shown = np.linspace(0, len(lines) - 1, MAX_UPDATES).round().astype(int)
    return tuple(lines[n] for n in shown)
