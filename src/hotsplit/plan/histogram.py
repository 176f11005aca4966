"""Routing histograms: what the traffic asked of every expert, checked, filled and written.

First step of the flow: `traffic -> histogram -> plan`. This module decides what a believable histogram is. Decode
and prefill stay apart; files carry decoder layer indices, arrays are indexed by layer_id (0..L-1), and every message
speaks of decoder indices. The forms that other tools write are read by `dialects`.

Shapes: L MoE layers, E routed experts per layer.

    >>> identity = ModelIdentity(model_type="toy", layers=(3, 4), num_experts=2, top_k=1)
    >>> counts_LE = np.array([[9.0, 1.0], [0.0, 0.0]])
    >>> toy = Histogram(identity=identity, phases={"decode": PhaseCounts(counts=counts_LE, tokens=10)})
    >>> [str(notice) for notice in validate(toy, what="histogram toy.json")]
    ['histogram toy.json, decode: all counts are in layer 3, a capture bug perhaps [one-layer-counts]', \
'histogram toy.json, decode: no counts for layer 4, taken as uniform [empty-layer]']
    >>> fill_empty_layers(counts_LE)
    (array([[9., 1.],
           [5., 5.]]), [1])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HistogramError
from hotsplit.files import canonical_json, write_atomic
from hotsplit.notices import Notice
from hotsplit.plan.identity import MAX_INTEGER, ModelIdentity

FORMAT = "hotsplit-histogram"
VERSION = 1
PHASES = ("decode", "prefill")
MAX_COUNT = MAX_INTEGER
"""Of pairs, in one cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCounts:
    """Routed (token, expert) pairs of one phase."""

    counts: npt.NDArray[np.float64]
    """Routed pairs per layer and expert, [L, E], float64 (exact for integers up to 2**53)."""
    tokens: int | None = None
    """Tokens that were routed; every layer's total is tokens x top_k. None where not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts per phase, with the identity of the model they came from."""

    identity: ModelIdentity
    """Its `layers` and `num_experts` are never None here: they index the arrays."""
    phases: Mapping[str, PhaseCounts]
    """By phase name, "decode" and "prefill"; a phase without traffic is absent."""
    normalised: bool = False
    """True for merged or scaled counts: floats that no longer are numbers of pairs."""
    name: str | None = None
    """The model's name, for people."""
    quantisation: str | None = None
    """The model's quantisation, for people; a different one is a notice, never a refusal."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where the counts come from, as free JSON."""

    def __post_init__(self) -> None:
        if self.identity.layers is None or self.identity.num_experts is None:
            raise HistogramError("a histogram's identity", wanted="layers and num_experts: they index its counts")
        shape = (len(self.identity.layers), self.identity.num_experts)
        for phase, counted in self.phases.items():
            if phase not in PHASES:
                raise HistogramError("a histogram's phase", got=repr(phase), wanted=" or ".join(PHASES))
            if counted.counts.shape != shape:
                raise HistogramError(f"the {phase} counts", got=f"shape {counted.counts.shape}", wanted=f"{shape}")

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder indices of the rows, [L]."""
        return self.identity.layers or ()


def planning_counts(histogram: Histogram) -> tuple[PhaseCounts, str, list[Notice]]:
    """Choose the phase that a plan ranks on: decode, or prefill only where there is no decode.

    Args:
        histogram: Counts of one or both phases.

    Returns:
        The counts, the phase's name, and a notice where prefill stands in.

    Raises:
        HistogramError: There is no phase at all.
    """
    present = [phase for phase in PHASES if phase in histogram.phases]
    if not present:
        raise HistogramError("histogram", got="no phase", wanted="decode or prefill counts")
    used = next((phase for phase in present if histogram.phases[phase].counts.any()), present[0])
    notices = []
    if used == "prefill":
        text = "no decode counts: the plan ranks on prefill counts, which choose a weaker decode set"
        notices.append(Notice(name="prefill-counts", text=text, strict=False))
    return histogram.phases[used], used, notices


def validate(histogram: Histogram, *, what: str) -> list[Notice]:
    """Check that every count can be believed.

    Args:
        histogram: Counts, any memory layout (strided views included), float or integer.
        what: The file, for the message: "histogram hist.json".

    Returns:
        Doubts with a name: "flat-counts" (presence counted instead of use), "one-layer-counts" (a capture bug),
        "empty-layer" (taken as uniform). All are strict.

    Raises:
        HistogramError: No phase; a count that is NaN, infinite, negative, above 2**53, or fractional without
            `normalised`; tokens that are none; a layer whose total is not tokens x top_k. Has `layer` (decoder index),
            `expert`, `value`.
    """
    if not histogram.phases:
        raise HistogramError(what, got="no phase", wanted="decode or prefill counts")
    notices: list[Notice] = []
    for phase in PHASES:
        if phase in histogram.phases:
            _require_cells(histogram, phase=phase, what=what)
            _require_totals(histogram, phase=phase, what=what)
            notices += _doubts(histogram, phase=phase, what=what)
    return notices


def is_count(value: object, *, normalised: bool) -> bool:
    """Whether a parsed number is a count, judged before it becomes float64: there 2**53 + 1 would look right.

    Args:
        value: What the file holds.
        normalised: Whether fractions are allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_COUNT and (normalised or value == int(value))


def bad_count(value: object, *, what: str, place: tuple[str, int, int], normalised: bool) -> HistogramError:
    """The error for one bad cell.

    Args:
        value: What the cell holds.
        what: The file.
        place: Phase, decoder layer index, expert.
        normalised: Whether fractions would have been allowed.
    """
    phase, layer, expert = place
    return HistogramError(
        f"{what}, layer {layer}, expert {expert} ({phase})",
        got=_spell(value),
        wanted=f"{'a finite number' if normalised else 'an integer'} from 0 to 2**53",
        do="count the traffic again",
        phase=phase,
        layer=layer,
        expert=expert,
        value=value,
    )


def fill_empty_layers(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Take layers without counts as uniform, as heavy as the average counted layer (every token passes them all).

    Args:
        counts: Routed pairs, [L, E], any number type; it is not changed.

    Returns:
        A copy without empty layers, [L, E], float64, and the layer_ids that were filled, ascending.
    """
    filled_LE = np.array(counts, dtype=np.float64, order="C")
    totals_L = filled_LE.sum(axis=1)
    empty = np.flatnonzero(totals_L == 0)
    if empty.size:
        counted_L = totals_L[totals_L > 0]
        filled_LE[empty] = counted_L.mean() / filled_LE.shape[1] if counted_L.size else 1.0
    return filled_LE, [int(layer_id) for layer_id in empty]


def fit_layers(histogram: Histogram, *, layers: Sequence[int], what: str) -> tuple[Histogram, list[Notice]]:
    """Lay a file's layers over the model's, where the file only keyed its rows and never declared a model.

    A layer or two that the file lacks become empty (which validation flags); up to three layers after the model's
    last one are draft layers and are left out. Anything else is another model and returned as it is, for the
    identity check to refuse.

    Args:
        histogram: As read.
        layers: Decoder indices of the model's MoE layers, ascending.
        what: The file, for the message.

    Returns:
        The histogram over `layers`, and a notice that names what was left out.
    """
    wanted = tuple(layers)
    missing = set(wanted) - set(histogram.layers)
    extra = sorted(set(histogram.layers) - set(wanted))
    few_missing = len(missing) <= max(1, len(wanted) // 10)
    only_drafts = len(extra) <= 3 and all(layer > wanted[-1] for layer in extra)
    if not wanted or wanted == histogram.layers or not (few_missing and only_drafts):
        return histogram, []
    phases = {
        phase: PhaseCounts(counts=_select(counted.counts, theirs=histogram.layers, ours=wanted), tokens=counted.tokens)
        for phase, counted in histogram.phases.items()
    }
    fitted = replace(histogram, identity=replace(histogram.identity, layers=wanted), phases=phases)
    if not extra:
        return fitted, []
    text = f"{what}: {name_layers(extra)} is no layer of the model (a draft layer) and is left out"
    return fitted, [Notice(name="draft-layer", text=text, strict=False)]


def tokens_per_layer(histogram: Histogram, *, phase: str, top_k: int | None) -> npt.NDArray[np.float64] | None:
    """How many tokens stand behind each layer's counts.

    Args:
        histogram: Counts; scaled ones answer only with the number of tokens they carry.
        phase: "decode" or "prefill".
        top_k: Experts per token; None where not known.

    Returns:
        Tokens per layer, [L], float64; None where nobody can tell.
    """
    counted = histogram.phases.get(phase)
    if counted is None:
        return np.zeros(len(histogram.layers))
    if not histogram.normalised and top_k is not None:
        totals_L: npt.NDArray[np.float64] = np.sum(counted.counts, axis=1, dtype=np.float64)
        return totals_L / top_k
    if counted.tokens is None:
        return None
    return np.where(np.any(counted.counts, axis=1), float(counted.tokens), 0.0)


def quantisation_notices(theirs: str | None, ours: str | None, *, what: str) -> list[Notice]:
    """Say that counts come from another quantisation of the same model: they are used all the same."""
    if theirs is None or ours is None or theirs == ours:
        return []
    text = f"{what} was counted on quantisation {theirs}, not {ours}: used all the same"
    return [Notice(name="other-quantisation", text=text, strict=False)]


def to_json(histogram: Histogram, created: str) -> dict[str, Any]:
    """The histogram in our own file form.

    Args:
        histogram: Counts; whole numbers unless `normalised`.
        created: ISO time.
    """
    value: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "name": histogram.name,
            "quantisation": histogram.quantisation,
            **histogram.identity.to_json(),
        },
        "source": dict(histogram.source),
        "created": created,
        "phases": {phase: _phase_json(histogram, phase) for phase in PHASES if phase in histogram.phases},
    }
    return {**value, "normalised": True} if histogram.normalised else value


def save_histogram(histogram: Histogram, path: Path, *, created: str | None = None) -> None:
    """Write our JSON, atomically, and never a histogram that could not be read again.

    Args:
        histogram: Counts.
        path: Where to.
        created: ISO time to write into the file; None for now.

    Raises:
        HistogramError: The counts are not valid, or the source is no JSON.
        HotsplitError: The folder cannot be written; what was there stays.
    """
    validate(histogram, what=f"histogram for {path}")
    stamp = created or datetime.now(UTC).isoformat(timespec="seconds")
    try:
        data = canonical_json(to_json(histogram, stamp))
    except (TypeError, ValueError) as failure:
        raise HistogramError(f"the source of the histogram for {path}", got=str(failure), wanted="JSON") from failure
    write_atomic(Path(path), data)


def name_layers(layers: Iterable[int]) -> str:
    """Decoder indices for a message: "layer 3", or "layers 3, 4, 5 and 58 more"."""
    listed = list(layers)
    shown = ", ".join(str(layer) for layer in listed[:3])
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"layer{'s' if len(listed) > 1 else ''} {shown}{more}"


def _spell(value: object) -> str:
    """A bad value as people write it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "+inf", -math.inf: "-inf"}.get(value, "NaN")
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _require_cells(histogram: Histogram, *, phase: str, what: str) -> None:
    """Raise for the first bad cell in (layer, expert) order."""
    counts_LE = histogram.phases[phase].counts
    good_LE = (counts_LE >= 0) & (counts_LE <= MAX_COUNT)
    if not histogram.normalised:
        good_LE &= counts_LE == np.floor(counts_LE)
    if not good_LE.all():
        layer_id, expert = (int(index) for index in np.argwhere(~good_LE)[0])
        place = (phase, histogram.layers[layer_id], expert)
        raise bad_count(counts_LE[layer_id, expert].item(), what=what, place=place, normalised=histogram.normalised)


def _require_totals(histogram: Histogram, *, phase: str, what: str) -> None:
    """Raise for tokens that are none, and for the first layer whose total is not tokens x top_k; empty is a doubt."""
    counted, top_k = histogram.phases[phase], histogram.identity.top_k
    if counted.tokens is not None and not 0 <= counted.tokens <= MAX_COUNT:
        got = _spell(counted.tokens)
        raise HistogramError(f"{what}, tokens ({phase})", got=got, wanted="an integer from 0 to 2**53", phase=phase)
    if histogram.normalised or counted.tokens is None or top_k is None:
        return
    totals_L = counted.counts.sum(axis=1)
    wrong = np.flatnonzero((totals_L != counted.tokens * top_k) & (totals_L != 0))
    if wrong.size:
        layer, total = histogram.layers[int(wrong[0])], int(totals_L[wrong[0]])
        raise HistogramError(
            f"{what}, layer {layer} ({phase})",
            got=f"{total} routed pairs",
            wanted=f"tokens x top_k = {counted.tokens} x {top_k} = {counted.tokens * top_k}",
            do="count the traffic again, or correct tokens and top_k",
            phase=phase,
            layer=layer,
            expert=None,
            value=total,
        )


def _doubts(histogram: Histogram, *, phase: str, what: str) -> list[Notice]:
    """The named warnings about one phase."""
    counts_LE = histogram.phases[phase].counts
    counted_L: npt.NDArray[np.bool_] = np.any(counts_LE, axis=1)
    notices = []
    if counted_L.any() and _is_flat(counts_LE[counted_L]):
        text = f"{what}, {phase}: every used expert has the same count, as if presence was counted instead of use"
        notices.append(Notice(name="flat-counts", text=text))
    if len(counted_L) > 1 and counted_L.sum() == 1:
        layer = histogram.layers[int(np.argmax(counted_L))]
        text = f"{what}, {phase}: all counts are in layer {layer}, a capture bug perhaps"
        notices.append(Notice(name="one-layer-counts", text=text))
    if not counted_L.all():
        empty = [layer for layer, has_counts in zip(histogram.layers, counted_L, strict=True) if not has_counts]
        text = f"{what}, {phase}: no counts for {name_layers(empty)}, taken as uniform"
        notices.append(Notice(name="empty-layer", text=text))
    return notices


def _is_flat(counts_LE: npt.NDArray[Any]) -> bool:
    """Whether in every layer all counts that are not zero are equal; one expert alone is no evidence."""
    highest_L1 = counts_LE.max(axis=1, keepdims=True)
    used_LE = counts_LE > 0
    return bool(((counts_LE == highest_L1) | ~used_LE).all() and used_LE.sum(axis=1).max() > 1)


def _phase_json(histogram: Histogram, phase: str) -> dict[str, Any]:
    """Rows keyed by decoder index: integers, or floats where the counts are scaled."""
    counted = histogram.phases[phase]
    dtype = np.float64 if histogram.normalised else np.int64
    rows = counted.counts.astype(dtype).tolist()
    layers = {str(layer): row for layer, row in zip(histogram.layers, rows, strict=True)}
    return {"tokens": counted.tokens, "layers": layers}


def _select(counts_LE: npt.NDArray[Any], *, theirs: Sequence[int], ours: Sequence[int]) -> npt.NDArray[np.float64]:
    """Rows of `ours` in order; a row that `theirs` lacks is zero."""
    row_of = {layer: row for row, layer in enumerate(theirs)}
    selected = np.zeros((len(ours), counts_LE.shape[1]))
    for row, layer in enumerate(ours):
        if layer in row_of:
            selected[row] = counts_LE[row_of[layer]]
    return selected
