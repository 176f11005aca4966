"""What `hotsplit rerank` does: find the live counts, merge them into the reference under its guard, write the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from hotsplit.cli.learned_state import find_learned
from hotsplit.cli.places import histogram_files, require_places
from hotsplit.config import HotsplitConfig
from hotsplit.errors import HistogramError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, save_histogram
from hotsplit.plan.rerank import rerank


@dataclass(frozen=True, kw_only=True, slots=True)
class RerankTask:
    """What `hotsplit rerank` was asked for."""

    files: tuple[str, ...]
    """LIVE and REFERENCE, or REFERENCE alone."""
    output: Path
    """Merged histogram."""
    is_learned: bool
    """Whether LIVE is what servers have learned."""
    live_weight: float
    """Of live; the reference has 1."""
    min_tokens: int
    """Decode tokens per layer that live must have."""
    config: HotsplitConfig
    """Settings."""

    def __post_init__(self) -> None:
        """Check that there are as many histograms as are needed."""
        if len(self.files) != (1 if self.is_learned else 2):
            wanted = "REFERENCE alone, since --learned is LIVE" if self.is_learned else "LIVE and REFERENCE"
            raise click.UsageError(f"got {len(self.files)} histograms; wanted {wanted}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reranked:
    """The result; it is written."""

    histogram: Histogram
    """Merged."""
    learned: tuple[Path, ...]
    """Files that live was read from, where nobody named one."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def rerank_files(task: RerankTask) -> Reranked:
    """Merge and write.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: A file cannot be read, is of another model, or live is too small a sample; nothing was written.
    """
    require_places({"--output": task.output}, inputs=histogram_files(*task.files))
    reference, notices = load_histogram(task.files[-1])
    if task.is_learned:
        live, learned, said = find_learned(task.config.state_path, reference.identity)
        require_places({"--output": task.output}, inputs=learned)
    else:
        live, said = load_histogram(task.files[0])
        learned = []
    read = ", ".join(map(str, learned)) or task.files[0]
    merged, more = rerank(
        reference, live, live_weight=task.live_weight, min_tokens=task.min_tokens, what=f"the live sample {read}"
    )
    notices = [*said, *notices, *more]
    enforce(notices, strict=task.config.strict, error=HistogramError)
    save_histogram(merged, task.output)
    return Reranked(histogram=merged, learned=tuple(learned), notices=tuple(notices))
