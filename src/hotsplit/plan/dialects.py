"""The forms in which histograms are found, and how a file of any of them becomes one.

First step of the flow: `file -> histogram -> plan`. This module decides which form a file has and opens it: JSON forms
are read by `forms`, CSV, npy and npz by `tables`. What a believable histogram is, `histogram` decides.

Shapes: L MoE layers, E routed experts per layer.

    >>> rows = {"3": [5, 1], "4": [2, 4]}
    >>> document = Document(content={"live": {"decode": rows}, "meta": {"top_k": 1}}, what="histogram x.json")
    >>> recognise(document)
    'live'
    >>> histogram, notices = DIALECTS["live"].parse(document)
    >>> histogram.layers, histogram.phases["decode"].counts.tolist()
    ((3, 4), [[5.0, 1.0], [2.0, 4.0]])
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotsplit.errors import HistogramError
from hotsplit.files import read_json
from hotsplit.notices import Notice
from hotsplit.plan.document import Document, Given
from hotsplit.plan.forms import DIALECTS, Dialect, identity_of, parse_ours
from hotsplit.plan.histogram import Histogram, fit_layers, validate
from hotsplit.plan.members import shortened
from hotsplit.plan.tables import TABLES, table_kind

__all__ = [
    "DIALECTS",
    "Dialect",
    "Document",
    "Given",
    "identity_of",
    "load_histogram",
    "parse_ours",
    "recognise",
    "settle",
    "split_set",
]

_HEAD_BYTES = 4096
"""Enough to tell JSON, CSV, npy and npz apart."""


def load_histogram(
    path: str | Path, *, layers: Sequence[int] | None = None, given: Given | None = None
) -> tuple[Histogram, list[Notice]]:
    """Read a histogram in any known form, and check it.

    Args:
        path: A file, or "FILE#set" to choose one set of several (of a trace: a domain).
        layers: Decoder indices of the model's MoE layers, ascending. A form that does not declare its model is laid
            over them: a layer or two that are missing become empty, draft layers are left out, both with a notice.
        given: What the user says about the file; None for nothing.

    Returns:
        The histogram and what was noticed.

    Raises:
        HistogramError: Unreadable, not recognised, no set chosen of several, no layer numbers, or not believable;
            names the place.
    """
    file, chosen = split_set(str(path))
    what = f"histogram {file}" if chosen is None else f"histogram {file}#{chosen}"
    document = Document(content={}, what=what, chosen=chosen, given=given or Given())
    kind = table_kind(_head(file), name=file.name, what=what)
    if kind is not None:
        histogram, notices, declares_model = TABLES[kind].read(file, document, layers)
    else:
        document = replace(document, content=_read_object(file))
        dialect = DIALECTS[recognise(document)]
        histogram, notices = dialect.parse(document)
        declares_model = dialect.declares_model
    histogram, said = settle(histogram, document=document, layers=None if declares_model else layers)
    return histogram, notices + said


def settle(histogram: Histogram, *, document: Document, layers: Sequence[int] | None) -> tuple[Histogram, list[Notice]]:
    """The last steps for any form: the phase that is kept, the model's layers, and the checks.

    Args:
        histogram: As parsed.
        document: The file, and what the user says.
        layers: Decoder indices of the model's MoE layers to lay it over; None to leave it.

    Raises:
        HistogramError: It is not believable, or has no counts of the phase that is wanted.
    """
    what, given, left_out = document.what, document.given, list[Notice]()
    if given.phase is not None:
        if given.phase not in histogram.phases:
            got = f"no {given.phase} counts, only {' and '.join(histogram.phases)}"
            raise HistogramError(what, got=got, do="leave the phase out")
        histogram = replace(histogram, phases={given.phase: histogram.phases[given.phase]})
    if layers is not None:
        histogram, left_out = fit_layers(histogram, layers=layers, what=what)
    if not given.is_part:
        return histogram, left_out + validate(histogram, what=what)
    parts = {phase: replace(counted, tokens=None) for phase, counted in histogram.phases.items()}
    validate(replace(histogram, phases=parts), what=what)
    return histogram, left_out


def split_set(path: str) -> tuple[Path, str | None]:
    """Split FILE#set; names of files and of sets may have a # of their own.

    Args:
        path: As the user wrote it.

    Returns:
        The longest part before a # (or the whole) that exists, and the rest, the set; None for no set. Where no part
        exists, what stands before the first #.
    """
    marks = [place for place, letter in enumerate(path) if letter == "#"]
    for place in (len(path), *reversed(marks)):
        if os.path.exists(path[:place]):
            return Path(path[:place]), path[place + 1 :] if place < len(path) else None
    file, mark, chosen = path.partition("#")
    return Path(file), chosen if mark else None


def recognise(document: Document) -> str:
    """The name of the document's dialect.

    Raises:
        HistogramError: None of the known ones; lists them.
    """
    for name, dialect in DIALECTS.items():
        if dialect.recognises(document.content):
            return name
    if document.content.get("format") == "hotsplit-plan":
        raise HistogramError(document.what, got="a plan, not a histogram", do="use it as one: --plan FILE")
    forms = {name: dialect.form for name, dialect in DIALECTS.items()} | {name: t.form for name, t in TABLES.items()}
    known = "; ".join(f"{name} {form}" for name, form in forms.items())
    keys = ", ".join(list(document.content)[:5]) or "none"
    raise HistogramError(document.what, got=f"a form that is not known, with keys {keys}", wanted=f"one of: {known}")


def _head(file: Path) -> bytes:
    """The first bytes of a regular file; nothing where it cannot be read, which its reader will say better."""
    with contextlib.suppress(OSError, ValueError):
        if file.is_file():
            with file.open("rb") as stream:
                return stream.read(_HEAD_BYTES)
    return b""


def _read_object(file: Path) -> dict[str, Any]:
    """The file's JSON object."""
    content = read_json(file, what="histogram", error=HistogramError)
    if not isinstance(content, dict):
        raise HistogramError(f"histogram {file}", got=shortened(content), wanted="a JSON object", path=file)
    return content
