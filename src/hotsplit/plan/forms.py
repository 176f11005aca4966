"""The JSON forms of histograms: how each is known and how it is read.

Under `dialects`, over `members` and `document`: this module knows where a form keeps its rows and facts; what a member
may be, `members` decides, and what a believable histogram is, `histogram`. A further form is one entry in DIALECTS.

Shapes: L MoE layers, E routed experts per layer.

    >>> document = Document(content={"3,0": 5, "3,1": 1}, what="histogram x.json")
    >>> DIALECTS["pairs"].recognises(document.content)
    True
    >>> histogram, notices = DIALECTS["pairs"].parse(document)
    >>> histogram.layers, histogram.phases["decode"].counts.tolist(), [notice.name for notice in notices]
    ((3,), [[5.0, 1.0]], ['unknown-phase'])
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HistogramError
from hotsplit.notices import Notice
from hotsplit.plan.document import (
    Document,
    choose_set,
    identity_with,
    number_rows,
    refuse_layers,
    refuse_set,
    spoken_phase,
)
from hotsplit.plan.histogram import FORMAT, VERSION, Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.members import (
    cell_rows,
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
_PAIR = re.compile(r"[0-9]{1,6},[0-9]{1,6}")

Parsed = tuple[Histogram, list[Notice]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One form: how to know it and how to read it."""

    form: str
    """How it looks, for the error that lists the known forms."""
    recognises: Callable[[dict[str, Any]], bool]
    """Whether an object has this form."""
    parse: Callable[[Document], Parsed]
    """Reads it; cells are checked, totals and doubts are left to `validate`."""
    declares_model: bool = False
    """Whether it lists the model's layers, so that other layers mean another model."""


def parse_ours(document: Document) -> Parsed:
    """Our own form, which declares its model."""
    content, what = document.content, document.what
    refuse_set(document)
    refuse_layers(document)
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
    return identity_with(layers, num_experts=num_experts, model=model, what=what)


def _parse_flat(document: Document) -> Parsed:
    """One phase, rows at the top level; a key "domain/layer" makes a set of each domain."""
    content, what = document.content, document.what
    refuse_layers(document)
    sets = _split_domains(required_object(content, "layers", what=what), what=what)
    chosen = choose_set(sets, document)
    phase, notices = spoken_phase(content.get("phase", "unknown"), document)
    rows = keyed_rows(sets[chosen], what=what)
    num_experts = optional_integer(content, "n_experts", what=what) or row_length(rows, what=what)
    identity = identity_with(sorted(rows), num_experts=num_experts, model=content, what=what)
    tokens_of = content["tokens"] if isinstance(content.get("tokens"), dict) else {chosen: content.get("tokens")}
    counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=False, what=what)
    counted = PhaseCounts(counts=counts_LE, tokens=optional_integer(tokens_of, chosen, what=what))
    source = optional_object(content, "source") | ({"set": chosen} if chosen else {})
    histogram = Histogram(
        identity=identity, phases={phase: counted}, name=optional_text(content, "model"), source=source
    )
    return histogram, notices


def _parse_keyed(document: Document, *, key: str, fractions: bool) -> Parsed:
    """Phases under `key`, facts under "meta"; where fractions are allowed, shares are told from numbers of pairs."""
    content, what = document.content, document.what
    refuse_set(document)
    refuse_layers(document)
    meta = optional_object(content, "meta")
    bodies = phase_bodies(required_object(content, key, what=what), what=what)
    rows_of = {phase: keyed_rows(body, what=what) for phase, body in bodies.items()}
    all_rows: dict[int, Any] = {layer: row for rows in rows_of.values() for layer, row in rows.items()}
    num_experts = optional_integer(meta, "num_experts", what=what) or row_length(all_rows, what=what)
    identity = identity_with(sorted(all_rows), num_experts=num_experts, model=meta, what=what)
    phases = {
        phase: PhaseCounts(counts=checked_counts(rows, phase=phase, identity=identity, normalised=fractions, what=what))
        for phase, rows in rows_of.items()
    }
    normalised = fractions and any(_are_shares(counted.counts) for counted in phases.values())
    if fractions and "normalised" in meta:
        normalised = optional_flag(meta, "normalised", what=what)
    name = optional_text(meta, "name") or optional_text(meta, "model")
    return Histogram(identity=identity, phases=phases, normalised=normalised, name=name, source=meta), []


def _parse_counts(document: Document) -> Parsed:
    """An object per layer, with its row and perhaps the row's total."""
    content, what = document.content, document.what
    refuse_set(document)
    refuse_layers(document)
    phase, notices = spoken_phase("unknown", document)
    rows = keyed_rows({layer: body["counts"] for layer, body in content.items()}, what=what)
    num_experts = row_length(rows, what=what)
    identity = identity_with(sorted(rows), num_experts=num_experts, model={}, what=what)
    counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=False, what=what)
    for layer, body in content.items():
        total = optional_integer(body, "total", what=f"{what}, layer {layer}")
        if total is not None and total != sum(body["counts"]):
            got, wanted = f"counts that add up to {sum(body['counts'])}", f"its total, {total}"
            raise HistogramError(f"{what}, layer {layer}", got=got, wanted=wanted, layer=int(layer), value=total)
    return Histogram(identity=identity, phases={phase: PhaseCounts(counts=counts_LE)}), notices


def _parse_pairs(document: Document) -> Parsed:
    """One member per cell, "layer,expert"."""
    refuse_set(document)
    refuse_layers(document)
    phase, notices = spoken_phase("unknown", document)
    cells: dict[tuple[int, int], Any] = {}
    for key, value in document.content.items():
        layer, _, expert = key.partition(",")
        if (int(layer), int(expert)) in cells:
            where = f"{document.what}, layer {int(layer)}, expert {int(expert)}"
            raise HistogramError(where, got="two counts", wanted="one", layer=int(layer), expert=int(expert))
        cells[int(layer), int(expert)] = value
    rows, said = cell_rows(cells, num_experts=document.given.num_experts, what=document.what)
    num_experts = row_length(rows, what=document.what)
    identity = identity_with(sorted(rows), num_experts=num_experts, model={}, what=document.what)
    counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=False, what=document.what)
    return Histogram(identity=identity, phases={phase: PhaseCounts(counts=counts_LE)}), notices + said


def _parse_sets(document: Document) -> Parsed:
    """Sets of phases of plain rows; they are layers 0..L-1 unless the user says otherwise."""
    content, what = document.content, document.what
    sets = required_object(content, "counts", what=what)
    if not sets:
        raise HistogramError(f"{what}, counts", got="no set", wanted="counts by set and phase")
    chosen = choose_set(sets, document)
    meta = optional_object(content, "meta")
    bodies = {phase: _listed(body, what=what) for phase, body in required_object(sets, chosen, what=what).items()}
    longest = max((len(body) for body in bodies.values()), default=0)
    _, layers, _ = number_rows([True] * longest, document, model_layers=range(longest))
    rows_of = {phase: {str(n): row for n, row in zip(layers, body, strict=False)} for phase, body in bodies.items()}
    num_experts = row_length({i: row for body in bodies.values() for i, row in enumerate(body)}, what=what)
    identity = identity_with(layers, num_experts=num_experts, model=meta, what=what)
    phases = {
        phase: PhaseCounts(
            counts=checked_counts(
                keyed_rows(rows, what=what), phase=phase, identity=identity, normalised=False, what=what
            )
        )
        for phase, rows in phase_bodies(rows_of, what=what).items()
    }
    source = {"set": chosen} if chosen else {}
    return Histogram(identity=identity, phases=phases, name=optional_text(meta, "name"), source=source), []


def _is_counts(content: dict[str, Any]) -> bool:
    """Whether every member is a layer with its counts."""
    return bool(content) and all(
        key.isascii() and key.isdigit() and isinstance(body, dict) and isinstance(body.get("counts"), list)
        for key, body in content.items()
    )


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
    "layers": Dialect(
        form='{"layers": {LAYER: [...]}}',
        recognises=lambda content: isinstance(content.get("layers"), dict),
        parse=_parse_flat,
    ),
    "sets": Dialect(
        form='{"meta": ..., "counts": {SET: {PHASE: [[...] per layer]}}}',
        recognises=lambda content: isinstance(content.get("counts"), dict),
        parse=_parse_sets,
    ),
    "counts": Dialect(
        form='{LAYER: {"counts": [...], "total": n}}',
        recognises=_is_counts,
        parse=_parse_counts,
    ),
    "pairs": Dialect(
        form='{"LAYER,EXPERT": n}',
        recognises=lambda content: bool(content) and all(_PAIR.fullmatch(key) for key in content),
        parse=_parse_pairs,
    ),
}
"""By name, in the order in which they are tried."""


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


def _listed(body: Any, *, what: str) -> list[Any]:
    """Rows of one phase of a set."""
    if not isinstance(body, list):
        raise HistogramError(f"{what}, counts", got=shortened(body), wanted="a list of counts per layer")
    return body


def _are_shares(counts_LE: npt.NDArray[np.float64]) -> bool:
    """Whether counts are fractions, or shares scaled to a million, rather than numbers of pairs."""
    totals_L = counts_LE.sum(axis=1)
    scaled = totals_L.any() and (abs(totals_L[totals_L > 0] / _MILLION - 1) < 1e-3).all()
    return bool(scaled or (counts_LE != np.floor(counts_LE)).any())
