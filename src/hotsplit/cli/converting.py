"""What `hotsplit convert` and `hotsplit merge` do; the commands themselves only parse and print."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hotsplit.cli.histograms import read_histogram, torch_bytes
from hotsplit.cli.places import histogram_files, require_places
from hotsplit.errors import ConfigError, HistogramError
from hotsplit.files import write_atomic
from hotsplit.notices import Notice, enforce
from hotsplit.plan.combine import RULES, merge_shares
from hotsplit.plan.convert import TARGETS, convert
from hotsplit.plan.dialects import Given
from hotsplit.plan.histogram import Histogram, save_histogram

TARGET_NAMES = (*TARGETS, "pt")
RULE_NAMES = ("shares", *RULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertTask:
    """What `hotsplit convert` was asked for."""

    file: str
    """FILE or FILE#SET."""
    to: str
    """One of TARGET_NAMES."""
    output: Path
    """Where to."""
    layers: tuple[int, ...] | None
    """Decoder index of every row, for files without."""
    experts: int | None
    """Routed experts per layer, for files that leave unused ones out."""
    phase: str | None
    """Phase of counts that do not say theirs, or the one to keep."""
    strict: bool
    """Whether doubts are errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeTask:
    """What `hotsplit merge` was asked for."""

    files: tuple[str, ...]
    """FILE or FILE#SET, in order."""
    output: Path
    """Where to, in our form."""
    rule: str
    """One of RULE_NAMES."""
    weights: tuple[float, ...]
    """One per file, for shares; empty for 1 each."""
    layers: tuple[int, ...] | None
    """Decoder index of every row, for files without."""
    experts: int | None
    """Routed experts per layer, for files that leave unused ones out."""
    phase: str | None
    """Phase of counts that do not say theirs, or the one to keep."""
    strict: bool
    """Whether doubts are errors."""


def convert_file(task: ConvertTask) -> tuple[Histogram, list[Notice]]:
    """Read, write, and say what was lost.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: The file cannot be read, the form cannot hold it, or the place cannot be written; nothing was.
    """
    require_places({"--output": task.output}, inputs=histogram_files(task.file))
    given = Given(layers=task.layers, num_experts=task.experts, phase=task.phase)
    histogram, notices = read_histogram(task.file, given=given)
    enforce(notices, strict=task.strict, error=HistogramError)
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    data, lost = convert(histogram, to="npy" if task.to == "pt" else task.to, created=stamp)
    if task.to == "pt":
        data = torch_bytes(histogram)
        lost = [replace(notice, text=notice.text.replace("npy", "pt", 1)) for notice in lost]
    write_atomic(task.output, data)
    return histogram, notices + lost


def merge_files(task: MergeTask) -> tuple[Histogram, list[Notice]]:
    """Read, combine by the rule, and write our form.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: A file cannot be read, they do not belong together, or the place cannot be written; nothing was.
    """
    if len(task.files) < 2:
        raise ConfigError("merge", got=f"{len(task.files)} file", wanted="two or more")
    if task.weights and task.rule != "shares":
        raise ConfigError("--weight", got=f"one with --rule {task.rule}", wanted="--rule shares", do="leave it out")
    require_places({"--output": task.output}, inputs=histogram_files(*task.files))
    is_part = task.rule == "ranks"
    given = Given(layers=task.layers, num_experts=task.experts, phase=task.phase, is_part=is_part)
    parts, notices = [], list[Notice]()
    for name in task.files:
        histogram, said = read_histogram(name, given=given)
        parts.append(histogram)
        # How many experts there are, a part need not know: the ranks together are checked.
        notices += [notice for notice in said if not (is_part and notice.name == "experts-from-ids")]
    if task.rule == "shares":
        merged, said = merge_shares(parts, weights=task.weights or (1.0,) * len(parts), names=task.files)
    else:
        merged, said = RULES[task.rule](parts, names=task.files)
    notices += said
    enforce(notices, strict=task.strict, error=HistogramError)
    merged = replace(merged, source={**merged.source, "names": [Path(name).name for name in task.files]})
    save_histogram(merged, task.output)
    return merged, notices
