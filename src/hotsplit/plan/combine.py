"""Several histograms of one model become one: added as shares, as pairs, or as what ranks counted apart.

Between `histogram` and `planner`, under `rerank`. Three rules, because three things are called merging:

    shares   samples of different traffic: per layer, each is divided by its total, weighted and added
    sum      more of the same traffic, counted in parts (replicas, hours): pairs are added
    ranks    one run counted by several ranks: parts that hold different experts (expert parallel) are added, copies
             that hold the same counts (tensor parallel) are one, and anything between the two is an error

Every rule gives the same result whatever the order of the files.

Shapes: P files, L MoE layers, E routed experts per layer.

    >>> toy = ModelIdentity(layers=(0,), num_experts=2, top_k=1)
    >>> one = Histogram(identity=toy, phases={"decode": PhaseCounts(counts=np.array([[3.0, 0.0]]))})
    >>> two = Histogram(identity=toy, phases={"decode": PhaseCounts(counts=np.array([[0.0, 5.0]]))})
    >>> join_ranks([one, two, one])[0].phases["decode"].counts
    array([[3., 5.]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, HistogramError
from hotsplit.notices import Notice
from hotsplit.plan.histogram import PHASES, Histogram, PhaseCounts, quantisation_notices, validate
from hotsplit.plan.identity import MAX_CELLS, ModelIdentity, require_same

Combined = tuple[Histogram, list[Notice]]


def merge_shares(parts: Sequence[Histogram], *, weights: Sequence[float], names: Sequence[str] = ()) -> Combined:
    """Add samples of different traffic: per phase and layer, the sum over files of weight x share.

    Args:
        parts: At least one histogram, of any scale.
        weights: What each file's shares weigh, [P], finite and >= 0, not all 0.
        names: The files, for messages, [P]; "file 1" and so on without.

    Returns:
        A normalised histogram under the first name; notices on what could not be compared. A layer or phase that only
        some of the files counted is theirs alone.

    Raises:
        PlanMismatchError: They are of different models; names the field.
        ConfigError: A weight is negative or not finite, there are not as many as files, or all are 0.
    """
    _require_weights(weights, num_parts=len(parts))
    notices = _require_one_model(parts, names=names)
    phases = {}
    for phase in PHASES:
        if any(phase in part.phases and weight > 0 for part, weight in zip(parts, weights, strict=True)):
            weighted = [shares(part, phase) * weight for part, weight in zip(parts, weights, strict=True)]
            phases[phase] = PhaseCounts(counts=exact_sum(weighted))
    whole = _with(parts, phases=phases, source={"rule": "shares", "weights": list(weights)})
    return replace(whole, normalised=True), notices


def add_counts(parts: Sequence[Histogram], *, names: Sequence[str] = ()) -> Combined:
    """Add pairs: the same traffic, counted in parts.

    Args:
        parts: At least one histogram of numbers of pairs.
        names: The files, for messages, [P].

    Returns:
        The sum, with the sum of tokens where every file that has the phase knows its own.

    Raises:
        PlanMismatchError: They are of different models.
        HistogramError: One is normalised, or a total is more than a file can hold.
    """
    _require_pairs(parts, rule="sum", names=names)
    notices = _require_one_model(parts, names=names)
    phases = {}
    for phase in _phases_of(parts):
        counted = [part.phases[phase] for part in parts if phase in part.phases]
        tokens = [one.tokens for one in counted]
        total = None if None in tokens else sum(number or 0 for number in tokens)
        phases[phase] = PhaseCounts(counts=exact_sum([one.counts for one in counted]), tokens=total)
    whole = _with(parts, phases=phases, source={"rule": "sum"})
    validate(whole, what="the sum")
    return whole, notices


def join_ranks(parts: Sequence[Histogram], *, names: Sequence[str] = ()) -> Combined:
    """Put together what the ranks of one run counted.

    Equal files are copies of one another (tensor parallel: every rank sees every pair). Of what then remains, no two
    may have counted the same cell (expert parallel: every rank has its own experts). A rank that left the experts of
    others out may have fewer of them.

    Args:
        parts: One histogram per rank, of numbers of pairs, as `Given(is_part=True)` reads them.
        names: The files, for messages, [P].

    Returns:
        The whole run's counts, with its tokens where all ranks agree on them; a notice that says what was found.

    Raises:
        PlanMismatchError: They are of different models.
        HistogramError: One is normalised; two ranks counted the same cell differently, with its place; the totals are
            not tokens x top_k.
    """
    _require_pairs(parts, rule="ranks", names=names)
    padded = _padded(parts)
    notices = _require_one_model(padded, names=names)
    phases, copies = {}, 0
    for phase in _phases_of(padded):
        present = [part for part in padded if phase in part.phases]
        distinct = _distinct([part.phases[phase].counts for part in present])
        _require_disjoint(distinct, layers=padded[0].layers, phase=phase)
        told = {part.phases[phase].tokens for part in present}
        phases[phase] = PhaseCounts(counts=exact_sum(distinct), tokens=told.pop() if len(told) == 1 else None)
        copies = max(copies, len(present) - len(distinct))
    whole = _with(padded, phases=phases, source={"rule": "ranks"})
    doubts = validate(whole, what="the ranks together")
    text = f"{len(parts)} rank files: {copies} are copies of others and count once, the rest hold different experts"
    return whole, [*notices, Notice(name="ranks-joined", text=text, strict=False), *doubts]


RULES: dict[str, Callable[..., Combined]] = {"sum": add_counts, "ranks": join_ranks}
"""Rules without weights, by name; "shares" is the one with."""


def shares(histogram: Histogram, phase: str) -> npt.NDArray[np.float64]:
    """Each layer's counts divided by their total.

    Args:
        histogram: Counts of any scale.
        phase: "decode" or "prefill".

    Returns:
        Shares, [L, E], float64; zero where a layer or the phase has no counts.
    """
    counted = histogram.phases.get(phase)
    if counted is None:
        return np.zeros((len(histogram.layers), histogram.identity.num_experts or 0))
    counts_LE = np.asarray(counted.counts, dtype=np.float64)
    totals_L1 = counts_LE.sum(axis=1, keepdims=True)
    shares_LE: npt.NDArray[np.float64] = counts_LE / np.where(totals_L1 > 0, totals_L1, 1.0)
    return shares_LE


def exact_sum(arrays: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The sum of arrays, rounded once: the same whatever their order.

    Args:
        arrays: At least one, all of one shape, float64.
    """
    cells = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    return np.array([math.fsum(cell) for cell in cells]).reshape(arrays[0].shape)


def joint_identity(identities: Sequence[ModelIdentity]) -> ModelIdentity:
    """What any of several agreeing identities knows.

    Args:
        identities: At least one; earlier ones win.
    """
    known: dict[str, Any] = {}
    for field in fields(ModelIdentity):
        values = [getattr(identity, field.name) for identity in identities]
        known[field.name] = next((value for value in values if value is not None), None)
    return ModelIdentity(**known)


def _require_weights(weights: Sequence[float], *, num_parts: int) -> None:
    """As many weights as files, all possible, one that counts."""
    if len(weights) != num_parts:
        raise ConfigError("weights", got=str(len(weights)), wanted=f"one for each of {num_parts} files, in their order")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError("weight", got=str(weight), wanted="a finite number >= 0", value=weight)
    if not any(weights):
        raise ConfigError("weights", got="0 for every file", wanted="one above 0")


def _require_pairs(parts: Sequence[Histogram], *, rule: str, names: Sequence[str]) -> None:
    """Shares of unknown totals cannot be added."""
    for what, part in zip(_named(parts, names), parts, strict=True):
        if part.normalised:
            raise HistogramError(what, got="normalised counts", wanted=f"pairs, for the rule {rule}", do="use shares")


def _require_one_model(parts: Sequence[Histogram], *, names: Sequence[str]) -> list[Notice]:
    """All of one model; what some files do not carry is said once each."""
    notices: list[Notice] = []
    labels = _named(parts, names)
    for i, (what, part) in enumerate(zip(labels[1:], parts[1:], strict=True), start=1):
        known = joint_identity([earlier.identity for earlier in parts[:i]])
        said = require_same(part.identity, known, what=what)
        notices += [notice for notice in said if notice.name != "identity-not-compared"]
        before = labels[0] if i == 1 else f"none of the {i} files before {what}"
        notices += _not_compared(known, what=before, verb="does not carry" if i == 1 else "carries")
        notices += _not_compared(part.identity, what=what, verb="does not carry")
        notices += quantisation_notices(part.quantisation, parts[0].quantisation, what=what)
    return notices


def _named(parts: Sequence[Histogram], names: Sequence[str]) -> list[str]:
    return list(names) or [f"file {number}" for number in range(1, len(parts) + 1)]


def _not_compared(identity: ModelIdentity, *, what: str, verb: str) -> list[Notice]:
    """Which fields this side lacks."""
    lacking = [field.name for field in fields(ModelIdentity) if getattr(identity, field.name) is None]
    text = f"{what} {verb} {', '.join(lacking)}: not compared"
    return [Notice(name="identity-not-compared", text=text, strict=False)] if lacking else []


def _phases_of(parts: Sequence[Histogram]) -> list[str]:
    return [phase for phase in PHASES if any(phase in part.phases for part in parts)]


def _with(parts: Sequence[Histogram], *, phases: dict[str, PhaseCounts], source: dict[str, Any]) -> Histogram:
    """The result, with the facts that any file knows."""
    return Histogram(
        identity=joint_identity([part.identity for part in parts]),
        phases=phases,
        name=next((part.name for part in parts if part.name), None),
        quantisation=next((part.quantisation for part in parts if part.quantisation), None),
        source={**source, "files": [dict(part.source) for part in parts]},
    )


def _padded(parts: Sequence[Histogram]) -> list[Histogram]:
    """Every part over all layers and experts that any of them has; what it lacks it did not count."""
    layers = tuple(sorted({layer for part in parts for layer in part.layers}))
    num_experts = max(part.identity.num_experts or 0 for part in parts)
    if len(layers) * num_experts * len(parts) > MAX_CELLS:
        got = f"{len(parts)} x {len(layers)} layers x {num_experts} experts"
        raise HistogramError("the rank files", got=got, wanted=f"at most {MAX_CELLS} together")
    return [_pad(part, layers=layers, num_experts=num_experts) for part in parts]


def _pad(part: Histogram, *, layers: tuple[int, ...], num_experts: int) -> Histogram:
    """One part over these layers and experts."""
    rows = [layers.index(layer) for layer in part.layers]
    phases = {}
    for phase, counted in part.phases.items():
        counts_LE = np.zeros((len(layers), num_experts))
        counts_LE[rows, : counted.counts.shape[1]] = counted.counts
        phases[phase] = replace(counted, counts=counts_LE)
    identity = replace(part.identity, layers=layers, num_experts=num_experts)
    return replace(part, identity=identity, phases=phases)


def _distinct(arrays: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """The arrays without later copies of earlier ones."""
    kept: dict[bytes, npt.NDArray[np.float64]] = {}
    for array in arrays:
        kept.setdefault(np.ascontiguousarray(array).tobytes(), array)
    return list(kept.values())


def _require_disjoint(arrays: Sequence[npt.NDArray[np.float64]], *, layers: Sequence[int], phase: str) -> None:
    """No cell that two parts counted."""
    counted_by_LE = np.sum([array > 0 for array in arrays], axis=0)
    twice = np.argwhere(counted_by_LE > 1)
    if twice.size:
        layer_id, expert = (int(index) for index in twice[0])
        told = [str(int(array[layer_id, expert])) for array in arrays if array[layer_id, expert] > 0]
        raise HistogramError(
            f"the rank files, layer {layers[layer_id]}, expert {expert} ({phase})",
            got=f"counts {' and '.join(told[:3])} from different ranks",
            wanted="equal files (tensor parallel) or different experts in each (expert parallel)",
            do="use --rule sum if each counted its own tokens",
            layer=layers[layer_id],
            expert=expert,
        )
