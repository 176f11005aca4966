"""What the commands that need no engine do: make plans, open files. The commands themselves only parse and print."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from hotsplit.cli.histograms import read_histogram
from hotsplit.cli.places import histogram_files, model_files, require_places
from hotsplit.config import HotsplitConfig
from hotsplit.errors import BudgetError, ConfigError, HistogramError, HotsplitError
from hotsplit.files import read_json
from hotsplit.host.budget import default_hot_bytes
from hotsplit.metrics import MetricsSnapshot, read_snapshot
from hotsplit.notices import Notice, enforce
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.choose import read_counts
from hotsplit.plan.dialects import load_histogram, split_set
from hotsplit.plan.evaluate import Evaluation, evaluate
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.planfile import FORMAT as PLAN_FORMAT
from hotsplit.plan.planfile import Plan, load_plan, save_plan
from hotsplit.plan.planner import PlanOptions, make_plan, plan_fraction
from hotsplit.plan.sizes import ExpertSizes, expert_sizes, left_out
from hotsplit.plan.trace import Trace, histogram_of, load_trace
from hotsplit.plan.verdict import not_unseen
from hotsplit.units import gib

SNAPSHOT_FORMAT = "hotsplit-metrics"
"""What a snapshot file says that it is."""

_TABLES = frozenset({".csv", ".npy", ".pt", ".pth"})
"""Endings of histograms that are no JSON."""
_SHOWN = "a histogram, plan, trace or snapshot"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTask:
    """What `hotsplit plan` was asked for."""

    config: HotsplitConfig
    """Settings."""
    model: str | None
    """Folder or hub id; None to plan a fraction."""
    hot_fraction: float | None
    """Share of all experts, without a model."""
    test: str | None
    """Histogram of other traffic."""
    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    force: bool
    """Use a histogram of another model all the same."""
    output: Path | None
    """Plan file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """A plan, scored."""

    plan: Plan
    """The plan."""
    evaluation: Evaluation
    """On its own counts and on the test's."""
    sizes: ExpertSizes | None
    """Of the model; None without one."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A file that `hotsplit show` has opened."""

    name: str
    """As the user wrote it."""
    content: Histogram | Plan | Trace | MetricsSnapshot
    """What it is."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def make_plan_for(task: PlanTask) -> PlanResult:
    """Plan, score, and write the file when one was asked for.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is wrong or nothing fits; nothing was written.
    """
    inputs = [*histogram_files(task.config.counts, task.test), *model_files(task.model)]
    require_places({"--output": task.output}, inputs=inputs)
    sizes = _sizes(task)
    counts, notices = _histogram(task.config.counts, sizes=sizes, task=task)
    test, said = _histogram(task.test, sizes=sizes, task=task)
    notices += said
    enforce(notices, strict=task.config.strict, error=HistogramError)
    notices += [] if sizes is None else left_out(sizes)
    options = PlanOptions(
        dynamic=task.config.dynamic,
        objective=task.config.objective,
        strict=task.config.strict,
        pp=task.pp,
        test=test,
    )
    if sizes is None:
        if counts is None:
            raise ConfigError("plan", got="no --counts", wanted="--counts FILE with --hot-fraction", do="name one")
        plan, said = plan_fraction(counts, fraction=task.hot_fraction or 0.0, options=options)
    else:
        plan, said = make_plan(sizes, histogram=counts, budget_bytes=_budget(task, sizes, notices), options=options)
    evaluation = evaluate(plan, histogram=counts, test=test)
    seen = not_unseen(plan, evaluation=evaluation, what=f"test {task.test}")
    enforce(seen, strict=task.config.strict, error=HistogramError)
    if task.output:
        save_plan(plan, task.output)
    return PlanResult(plan=plan, evaluation=evaluation, sizes=sizes, notices=(*notices, *said, *seen))


def _sizes(task: PlanTask) -> ExpertSizes | None:
    """The model's sizes, or None for a plan by fraction; half of one and half of the other is refused."""
    if task.hot_fraction is not None and task.config.hot_gib is not None:
        raise ConfigError("plan", got="--hot-fraction and --hot-gib", wanted="one of them", do="leave one out")
    if task.model is None:
        if task.hot_fraction is None:
            raise ConfigError("plan", got="neither MODEL nor --hot-fraction", do="name a model, or a fraction")
        return None
    if task.hot_fraction is not None:
        raise ConfigError("plan", got="MODEL and --hot-fraction", wanted="--hot-gib with a model", do="leave one out")
    return expert_sizes(read_headers(_folder(task.model)), tp=task.tp)


def _folder(model: str) -> Path:
    """A local folder needs no engine; a hub id does, since the engine's hub client downloads it."""
    path = Path(model).expanduser()
    if path.exists() or model.count("/") != 1 or model.startswith((".", "~", "/")):
        return path
    from hotsplit.engines.transformers.resolve import model_folder

    return model_folder(model)


def _histogram(name: str | None, *, sizes: ExpertSizes | None, task: PlanTask) -> tuple[Histogram | None, list[Notice]]:
    if sizes is not None:
        return read_counts(name, sizes=sizes, force=task.force)
    return (None, []) if name is None else load_histogram(name)


def _budget(task: PlanTask, sizes: ExpertSizes, notices: list[Notice]) -> int:
    """The budget that was named, or what this machine would give; the second is said."""
    if task.config.hot_bytes is not None:
        return task.config.hot_bytes
    budget = default_hot_bytes(sizes, reserve_bytes=task.config.vram_reserve_bytes)
    if budget <= 0:
        raise BudgetError(
            "the default hot budget", got="no memory left beside reserve and dense weights", do="pass --hot-gib"
        )
    text = f"no --hot-gib: planning for {gib(budget)}, what this machine has free beside reserve and dense weights"
    notices.append(Notice(name="default-budget", text=text, strict=False))
    return budget


def open_any(name: str) -> Opened:
    """Open a plan, a trace, a snapshot or a histogram, whichever it is.

    Args:
        name: A file, or FILE#SET for a histogram.

    Raises:
        HotsplitError: It is none of them.
    """
    path = Path(name)
    _require_file(name)
    if path.is_file() and _is_trace(path):
        trace, notices = load_trace(path)
        return Opened(name=name, content=trace, notices=tuple(notices))
    if path.is_file() and path.suffix not in _TABLES and not zipfile.is_zipfile(path):
        _require_braces(path)
        value = read_json(path, what="file", error=HotsplitError)
        form = value.get("format") if isinstance(value, dict) else None
        if form == PLAN_FORMAT:
            return Opened(name=name, content=load_plan(path), notices=())
        if form == SNAPSHOT_FORMAT:
            return Opened(name=name, content=read_snapshot(path), notices=())
    histogram, notices = read_histogram(name)
    return Opened(name=name, content=histogram, notices=tuple(notices))


def _is_trace(path: Path) -> bool:
    """Whether it is an archive of arrays, and not that of a histogram: one without counts."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return not {"counts.npy", "decode.npy", "prefill.npy"} & set(archive.namelist())


def _require_file(name: str) -> None:
    """Only a file that is there can be called a histogram, a plan or anything else."""
    file, _ = split_set(name)
    try:
        file.stat()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise HotsplitError(f"file {file}", got=reason, wanted=_SHOWN, path=file) from error


def _require_braces(path: Path) -> None:
    """What is no JSON at all is told by its beginning, which says more than a parser does."""
    with path.open("rb") as file:
        start = file.read(200).decode("utf-8", errors="replace").lstrip()
    if not start.startswith(("{", "[")):
        got = f"text that begins {start[:40]!r}" if start else "nothing"
        raise HotsplitError(f"file {path}", got=got, wanted=f"JSON or npz: {_SHOWN}", path=path)


def counted(trace: Trace) -> Histogram:
    """The histogram of a trace.

    Args:
        trace: Routing decisions.
    """
    return histogram_of(trace)
