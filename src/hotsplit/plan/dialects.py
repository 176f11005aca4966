"""The forms in which histograms are found, and how each is read.

First step of the flow: `file -> histogram -> plan`. This module decides which form a file has, which of its sets is
meant, and where its rows and facts stand; what a member may be, `members` decides, and what a believable histogram is,
`histogram`. A further form is one entry in DIALECTS.

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

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HistogramError
from hotsplit.files import read_json
from hotsplit.notices import Notice
from hotsplit.plan.histogram import (
    FORMAT,
    PHASES,
    VERSION,
    Histogram,
    PhaseCounts,
    fit_layers,
    validate,
)
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.members import (
    checked_counts,
    is_index,
    keyed_rows,
    optional_flag,
    optional_integer,
    optional_object,
    optional_text,
    phase_bodies,
    required_object,
    row_length,
    shortened,
)

_MILLION = 1_000_000.0
"""What the layers of a `train` file add up to when they are shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One parsed JSON file, before anybody believes it."""

    content: dict[str, Any]
    """The object at the top."""
    what: str
    """The file, for messages: "histogram hist.json"."""
    chosen: str | None = None
    """The set that the user chose with FILE#set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One form: how to know it and how to read it."""

    form: str
    """How it looks, for the error that lists the known forms."""
    recognises: Callable[[dict[str, Any]], bool]
    """Whether an object has this form."""
    parse: Callable[[Document], tuple[Histogram, list[Notice]]]
    """Reads it; cells are checked, totals and doubts are left to `validate`."""
    declares_model: bool = False
    """Whether it lists the model's layers, so that other layers mean another model."""


def load_histogram(path: str | Path, *, layers: Sequence[int] | None = None) -> tuple[Histogram, list[Notice]]:
    """Read a histogram in any known form, and check it.

    Args:
        path: A file, or "FILE#set" to choose one set of several.
        layers: Decoder indices of the model's MoE layers, ascending. A form that does not declare its model is laid
            over them: a layer or two that are missing become empty, draft layers are left out, both with a notice.

    Returns:
        The histogram and what was noticed.

    Raises:
        HistogramError: Unreadable, not recognised, no set chosen of several, or not believable; names the place.
    """
    file, chosen = split_set(str(path))
    what = f"histogram {file}" if chosen is None else f"histogram {file}#{chosen}"
    document = Document(content=_read_object(file), what=what, chosen=chosen)
    dialect = DIALECTS[recognise(document)]
    histogram, notices = dialect.parse(document)
    if layers is not None and not dialect.declares_model:
        histogram, left_out = fit_layers(histogram, layers=layers, what=what)
        notices = notices + left_out
    return histogram, notices + validate(histogram, what=what)


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
    known = "; ".join(f"{name} {dialect.form}" for name, dialect in DIALECTS.items())
    keys = ", ".join(list(document.content)[:5]) or "none"
    raise HistogramError(document.what, got=f"a form that is not known, with keys {keys}", wanted=f"one of: {known}")


def parse_ours(document: Document) -> tuple[Histogram, list[Notice]]:
    """Our own form, which declares its model."""
    content, what = document.content, document.what
    _refuse_set(document)
    if content.get("version") != VERSION:
        got = f"version {content.get('version')!r}"
        raise HistogramError(what, got=got, wanted=f"version {VERSION}", do="read it with a newer hotsplit")
    model = required_object(content, "model", what=what)
    identity = identity_of(model, what=what)
    normalised = optional_flag(content, "normalised", what=what)
    phases = {}
    for phase, body in phase_bodies(required_object(content, "phases", what=what), what=what).items():
        rows = keyed_rows(required_object(body, "layers", what=what), what=what)
        counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=normalised, what=what)
        phases[phase] = PhaseCounts(counts=counts_LE, tokens=optional_integer(body, "tokens", what=what))
    histogram = Histogram(
        identity=identity,
        phases=phases,
        normalised=normalised,
        name=optional_text(model, "name"),
        quantisation=optional_text(model, "quantisation"),
        source=optional_object(content, "source"),
    )
    return histogram, []


def identity_of(model: dict[str, Any], *, what: str) -> ModelIdentity:
    """The identity in the `model` object of our own form.

    Raises:
        HistogramError: A field has the wrong type, or layers or num_experts are missing.
    """
    layers = model.get("layers")
    if not isinstance(layers, list) or not layers or not all(is_index(layer) for layer in layers):
        raise HistogramError(f"{what}, model.layers", got=shortened(layers), wanted="a list of decoder layer indices")
    if list(layers) != sorted(set(layers)):
        raise HistogramError(f"{what}, model.layers", got=shortened(layers), wanted="ascending indices, each once")
    num_experts = optional_integer(model, "num_experts", what=what)
    if not num_experts:
        raise HistogramError(f"{what}, model.num_experts", got=shortened(num_experts), wanted="an integer >= 1")
    return _identity(layers, num_experts=num_experts, model=model, what=what)


def _parse_flat(document: Document) -> tuple[Histogram, list[Notice]]:
    """One phase, rows at the top level; a key "domain/layer" makes a set of each domain."""
    content, what = document.content, document.what
    body = required_object(content, "layers", what=what)
    sets = _split_domains(body, what=what)
    chosen = _choose(sets, document)
    phase, notices = _flat_phase(content["phase"], what=what)
    rows = keyed_rows(sets[chosen], what=what)
    num_experts = optional_integer(content, "n_experts", what=what) or row_length(rows, what=what)
    identity = _identity(sorted(rows), num_experts=num_experts, model=content, what=what)
    tokens_of = content["tokens"] if isinstance(content.get("tokens"), dict) else {chosen: content.get("tokens")}
    counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=False, what=what)
    counted = PhaseCounts(counts=counts_LE, tokens=optional_integer(tokens_of, chosen, what=what))
    source = optional_object(content, "source") | ({"set": chosen} if chosen else {})
    histogram = Histogram(
        identity=identity, phases={phase: counted}, name=optional_text(content, "model"), source=source
    )
    return histogram, notices


def _parse_keyed(document: Document, *, key: str, fractions: bool) -> tuple[Histogram, list[Notice]]:
    """Phases under `key`, facts under "meta"; where fractions are allowed, shares are told from numbers of pairs."""
    content, what = document.content, document.what
    _refuse_set(document)
    meta = optional_object(content, "meta")
    bodies = phase_bodies(required_object(content, key, what=what), what=what)
    rows_of = {phase: keyed_rows(body, what=what) for phase, body in bodies.items()}
    all_rows: dict[int, Any] = {layer: row for rows in rows_of.values() for layer, row in rows.items()}
    num_experts = optional_integer(meta, "num_experts", what=what) or row_length(all_rows, what=what)
    identity = _identity(sorted(all_rows), num_experts=num_experts, model=meta, what=what)
    phases = {
        phase: PhaseCounts(counts=checked_counts(rows, phase=phase, identity=identity, normalised=fractions, what=what))
        for phase, rows in rows_of.items()
    }
    normalised = fractions and any(_are_shares(counted.counts) for counted in phases.values())
    name = optional_text(meta, "name") or optional_text(meta, "model")
    return Histogram(identity=identity, phases=phases, normalised=normalised, name=name, source=meta), []


DIALECTS: dict[str, Dialect] = {
    "ours": Dialect(
        form=f'{{"format": "{FORMAT}", "model": ..., "phases": ...}}',
        recognises=lambda content: content.get("format") == FORMAT,
        parse=parse_ours,
        declares_model=True,
    ),
    "train": Dialect(
        form='{"train": {"decode": {LAYER: [...]}, "prefill": ...}}',
        recognises=lambda content: isinstance(content.get("train"), dict),
        parse=partial(_parse_keyed, key="train", fractions=True),
    ),
    "live": Dialect(
        form='{"live": {"decode": {LAYER: [...]}}, "meta": ...}',
        recognises=lambda content: isinstance(content.get("live"), dict),
        parse=partial(_parse_keyed, key="live", fractions=False),
    ),
    "flat": Dialect(
        form='{"phase": ..., "tokens": ..., "layers": {LAYER or "DOMAIN/LAYER": [...]}}',
        recognises=lambda content: "phase" in content and isinstance(content.get("layers"), dict),
        parse=_parse_flat,
    ),
}
"""By name, in the order in which they are tried."""


def _read_object(file: Path) -> dict[str, Any]:
    """The file's JSON object."""
    content = read_json(file, what="histogram", error=HistogramError)
    if not isinstance(content, dict):
        raise HistogramError(f"histogram {file}", got=shortened(content), wanted="a JSON object", path=file)
    return content


def _split_domains(body: dict[str, Any], *, what: str) -> dict[str, dict[str, Any]]:
    """Layer rows by set; "" where keys have no domain."""
    sets: dict[str, dict[str, Any]] = {}
    for key, row in body.items():
        domain, _, layer = key.rpartition("/")
        sets.setdefault(domain, {})[layer] = row
    if not sets:
        raise HistogramError(what, got="no layers", wanted="counts per decoder layer index")
    if "" in sets and len(sets) > 1:
        raise HistogramError(f"{what}, layers", got="keys with and without a domain", wanted="one kind")
    return sets


def _choose(sets: Mapping[str, Any], document: Document) -> str:
    """The set that the user means."""
    if document.chosen is None and len(sets) == 1:
        return next(iter(sets))
    if "" in sets:
        _refuse_set(document)
    if document.chosen is not None and document.chosen in sets:
        return document.chosen
    got = f"{len(sets)} sets and none chosen" if document.chosen is None else f"no set {document.chosen!r}"
    raise HistogramError(document.what, got=got, wanted=f"FILE#set with one of {', '.join(sets)}", sets=[*sets])


def _refuse_set(document: Document) -> None:
    """A set was chosen in a form that has none."""
    if document.chosen is not None:
        got = f"#{document.chosen}"
        raise HistogramError(document.what, got=got, wanted="a file with sets", do="leave the # part out")


def _flat_phase(value: Any, *, what: str) -> tuple[str, list[Notice]]:
    """The first word rules: "prefill (teacher forced ...)"; "unknown" counts as decode, aloud."""
    words = value.split() if isinstance(value, str) else []
    if words and words[0] in PHASES:
        return words[0], []
    if words and words[0] == "unknown":
        text = f"{what} does not know its phase: its counts are taken as decode"
        return "decode", [Notice(name="unknown-phase", text=text)]
    raise HistogramError(f"{what}, phase", got=shortened(value), wanted="decode, prefill or unknown")


def _are_shares(counts_LE: npt.NDArray[np.float64]) -> bool:
    """Whether counts are fractions, or shares scaled to a million, rather than numbers of pairs."""
    totals_L = counts_LE.sum(axis=1)
    scaled = totals_L.any() and (abs(totals_L[totals_L > 0] / _MILLION - 1) < 1e-3).all()
    return bool(scaled or (counts_LE != np.floor(counts_LE)).any())


def _identity(layers: Sequence[int], *, num_experts: int, model: dict[str, Any], what: str) -> ModelIdentity:
    """An identity with what the model's object says, if its top_k is possible."""
    top_k = optional_integer(model, "top_k", what=what)
    if top_k is not None and not 1 <= top_k <= num_experts:
        raise HistogramError(f"{what}, top_k", got=str(top_k), wanted=f"an integer from 1 to {num_experts}")
    model_type = optional_text(model, "model_type")
    return ModelIdentity(model_type=model_type, layers=tuple(layers), num_experts=num_experts, top_k=top_k)
