"""Learned counts of a state folder, found by the model that a histogram is of: no file needs to be named.

A reference may know less of its model than a run does, and a run's pipeline stages have a file each; so files are
compared by identity, field by field, and stages are put together where their layers are the reference's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotsplit.errors import HistogramError, HotsplitError
from hotsplit.notices import Notice
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.identity import ModelIdentity, differences
from hotsplit.plan.learned import join_stages

_STAGE = re.compile(r"-stage(\d+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """Learned counts of one pipeline stage."""

    path: Path
    """The file."""
    stage: int
    """Of the run that wrote it."""
    histogram: Histogram
    """What is in it."""


def find_learned(state_dir: Path, identity: ModelIdentity) -> tuple[Histogram, list[Path], list[Notice]]:
    """Read what earlier runs of a model have learned.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
        identity: Of the reference: its layers and number of experts are known.

    Returns:
        The counts of all its layers, the files that they are in, and notices on files that cannot be read.

    Raises:
        HistogramError: There are none of this model, or more than one set of them.
    """
    folder = state_dir / "learned"
    files, notices = _read_all(folder)
    fitting = [file for file in files if not _differing(file, identity)]
    chains = list(_chains(fitting, layers=identity.layers or ()))
    what = f"learned counts in {folder}"
    if not chains:
        do = "serve the model with hotsplit for a while, or name its state folder with --state-dir"
        # The notices go unsaid where this is raised: a file that is damaged is likely the one that is missed.
        damaged = [notice.text for notice in notices if notice.name == "learned-damaged"][:1]
        found = [] if damaged and not files else [_nearest(files, identity)]
        raise HistogramError(what, got="; ".join(found + damaged), wanted="those of the reference's model", do=do)
    if len(chains) > 1:
        got = " and ".join("+".join(file.path.name for file in chain) for chain in chains)
        raise HistogramError(
            what, got=got, wanted="one set that fits", do="name the file: hotsplit rerank LIVE REFERENCE"
        )
    (chain,) = chains
    return join_stages([file.histogram for file in chain]), [file.path for file in chain], notices


def _read_all(folder: Path) -> tuple[list[_File], list[Notice]]:
    """All files of a folder that can be read, in order."""
    files, notices = [], list[Notice]()
    for path in sorted(folder.glob("*-stage*.json")):
        name = _STAGE.search(path.name)
        if name is None:
            continue
        try:
            histogram, said = load_histogram(str(path))
        except (HotsplitError, ValueError) as error:
            text = f"{path} is damaged and skipped: {error}"
            notices.append(Notice(name="learned-damaged", text=text, strict=False))
            continue
        notices += [replace(notice, strict=False) for notice in said if notice.name != "empty-layer"]
        files.append(_File(path=path, stage=int(name[1]), histogram=histogram))
    return files, notices


def _differing(file: _File, identity: ModelIdentity) -> list[str]:
    """How a file's model differs from another: a stage may have some of its layers."""
    theirs = file.histogram.identity
    differing, _ = differences(replace(theirs, layers=None), identity)
    if not set(theirs.layers or ()) <= set(identity.layers or ()):
        differing += differences(ModelIdentity(layers=theirs.layers), ModelIdentity(layers=identity.layers))[0]
    return differing


def _chains(files: Sequence[_File], *, layers: tuple[int, ...], stage: int = 0) -> Iterator[tuple[_File, ...]]:
    """Every way to put stages, from this one on, together to these layers."""
    if not layers:
        yield ()
        return
    for file in files:
        own = file.histogram.layers
        if file.stage == stage and own == layers[: len(own)]:
            for rest in _chains(files, layers=layers[len(own) :], stage=stage + 1):
                yield (file, *rest)


def _nearest(files: Sequence[_File], identity: ModelIdentity) -> str:
    """What is there instead, and by what it differs."""
    if not files:
        return "none"
    reasons, name = min((len(_differing(file, identity)), file.path.name) for file in files)
    file = next(file for file in files if file.path.name == name)
    return f"{name}: {'; '.join(_differing(file, identity))}" if reasons else f"{name}, but not of all pipeline stages"
