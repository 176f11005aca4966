r"""Histograms written in the forms of other tools, with what each of them cannot hold said aloud.

The way out of `dialects`: `histogram -> bytes`. Going there and back gives the same counts, for every form; what a form
has no place for (a second phase, tokens, the model's identity) is named in a notice, and what would be wrong rather
than merely less (fractions where pairs are counted, layers that are not 0..L-1) is refused.

Shapes: L MoE layers, E routed experts per layer.

    >>> from hotsplit.plan.identity import ModelIdentity
    >>> toy = ModelIdentity(layers=(3,), num_experts=2, top_k=1)
    >>> histogram = Histogram(identity=toy, phases={"decode": PhaseCounts(counts=np.array([[5.0, 1.0]]), tokens=6)})
    >>> data, notices = convert(histogram, to="counts", created="2026-01-01T00:00:00+00:00")
    >>> data
    b'{"3":{"counts":[5,1],"total":6}}\n'
    >>> str(notices[0])
    'counts has no place for phase, tokens, top_k: dropped [dropped-facts]'
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError, HistogramError
from hotsplit.files import canonical_json
from hotsplit.notices import Notice
from hotsplit.plan.combine import shares
from hotsplit.plan.histogram import PHASES, Histogram, PhaseCounts, planning_counts, to_json, validate

_MILLION = 1_000_000.0
"""What the layers of a `train` file add up to when they are shares."""
_IDENTITY = ("model_type", "top_k")
_FACTS = ("phase", "tokens", "layers", "name", "quantisation", *_IDENTITY)
"""All that a form may have no place for, beside the counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One form to write."""

    write: Callable[[Histogram, str], bytes]
    """Writes the histogram; the second argument is the ISO time for forms that carry one."""
    holds: frozenset[str]
    """Which of phase, tokens, layers, name, quantisation, model_type and top_k it has a place for."""
    phases: int = 1
    """How many phases it holds."""
    is_scaled: bool = False
    """Whether it holds normalised counts."""


def convert(histogram: Histogram, *, to: str, created: str) -> tuple[bytes, list[Notice]]:
    """Write a histogram in another form.

    Args:
        histogram: Counts; of two phases a form for one gets that which plans rank on, aloud.
        to: A key of TARGETS.
        created: ISO time, for forms that carry one.

    Returns:
        The file's bytes, and notices on what the form has no place for.

    Raises:
        ConfigError: A form that is not known.
        HistogramError: Counts that the form cannot hold, or that are none.
    """
    if to not in TARGETS:
        raise ConfigError("--to", got=repr(to), wanted=f"one of {', '.join(TARGETS)}")
    target = TARGETS[to]
    validate(histogram, what="the histogram")
    if histogram.normalised and not target.is_scaled:
        able = ", ".join(name for name, one in TARGETS.items() if one.is_scaled)
        raise HistogramError(
            f"the form {to}", got="normalised counts", wanted="numbers of pairs", do=f"use one of {able}"
        )
    notices = _losses(histogram, name=to, target=target)
    try:
        return target.write(histogram, created), notices
    except HistogramError:
        raise
    except (TypeError, ValueError) as failure:  # the source is the file's own, and may hold what JSON cannot
        raise HistogramError("the histogram's source", got=str(failure).lower(), wanted="plain JSON") from failure


def logical_counts(histogram: Histogram) -> npt.NDArray[np.int64]:
    """The array of SGLang's recorder for one phase, one step, [1, L, E], int64.

    Args:
        histogram: Numbers of pairs.
    """
    counts_LE: npt.NDArray[np.int64] = planning_counts(histogram)[0].counts.astype(np.int64)
    return counts_LE[None]


def _losses(histogram: Histogram, *, name: str, target: Target) -> list[Notice]:
    """What the form has no place for, as one notice."""
    counted, kept, _ = planning_counts(histogram)
    facts: dict[str, object] = {
        "phase": kept,
        "tokens": counted.tokens,
        "layers": histogram.layers,
        "name": histogram.name,
        "quantisation": histogram.quantisation,
        **{field: getattr(histogram.identity, field) for field in _IDENTITY},
    }
    lost = [fact for fact in _FACTS if facts[fact] is not None and fact not in target.holds]
    if target.phases < len(histogram.phases):
        lost = [f"the {phase} counts" for phase in histogram.phases if phase != kept] + lost
    if not lost:
        return []
    return [Notice(name="dropped-facts", text=f"{name} has no place for {', '.join(lost)}: dropped", strict=False)]


def _rows(histogram: Histogram, counted: PhaseCounts) -> dict[str, list[Any]]:
    """Rows keyed by decoder index."""
    dtype = np.float64 if histogram.normalised else np.int64
    rows = counted.counts.astype(dtype).tolist()
    return {str(layer): row for layer, row in zip(histogram.layers, rows, strict=True)}


def _meta(histogram: Histogram) -> dict[str, Any]:
    """The facts for forms with a `meta`."""
    identity = histogram.identity
    facts = {"name": histogram.name, "model_type": identity.model_type, "top_k": identity.top_k}
    return {name: value for name, value in facts.items() if value is not None} | {"num_experts": identity.num_experts}


def _ours(histogram: Histogram, created: str) -> bytes:
    return canonical_json(to_json(histogram, created))


def _train(histogram: Histogram, _created: str) -> bytes:
    """Shares are scaled to a million, as the form's other writers do."""
    scaled = {
        phase: PhaseCounts(counts=shares(histogram, phase) * _MILLION) if histogram.normalised else counted
        for phase, counted in histogram.phases.items()
    }
    bodies = {phase: _rows(histogram, counted) for phase, counted in scaled.items()}
    return canonical_json({"train": bodies, "meta": {**_meta(histogram), "normalised": histogram.normalised}})


def _live(histogram: Histogram, _created: str) -> bytes:
    bodies = {phase: _rows(histogram, counted) for phase, counted in histogram.phases.items()}
    return canonical_json({"live": bodies, "meta": _meta(histogram)})


def _counts(histogram: Histogram, _created: str) -> bytes:
    rows = _rows(histogram, planning_counts(histogram)[0])
    return canonical_json({layer: {"counts": row, "total": sum(row)} for layer, row in rows.items()})


def _layers(histogram: Histogram, _created: str) -> bytes:
    return canonical_json({"layers": _rows(histogram, planning_counts(histogram)[0])})


def _flat(histogram: Histogram, _created: str) -> bytes:
    counted, phase, _ = planning_counts(histogram)
    identity = histogram.identity
    facts = {"model": histogram.name, "model_type": identity.model_type, "top_k": identity.top_k}
    facts |= {"tokens": counted.tokens, "n_experts": identity.num_experts, "phase": phase}
    known = {name: value for name, value in facts.items() if value is not None}
    return canonical_json({**known, "layers": _rows(histogram, counted)})


def _pairs(histogram: Histogram, _created: str) -> bytes:
    rows = _rows(histogram, planning_counts(histogram)[0])
    return canonical_json({f"{layer},{expert}": n for layer, row in rows.items() for expert, n in enumerate(row)})


def _csv(histogram: Histogram, _created: str) -> bytes:
    rows = _rows(histogram, planning_counts(histogram)[0])
    lines = [f"{layer},{expert},{n}\n" for layer, row in rows.items() for expert, n in enumerate(row)]
    return "".join(["layer,expert,count\n", *lines]).encode()


def _sets(histogram: Histogram, _created: str) -> bytes:
    """One set, whose layers are 0..L-1 because the form cannot say others."""
    if histogram.layers != tuple(range(len(histogram.layers))):
        got = f"layers {histogram.layers[0]} to {histogram.layers[-1]}"
        raise HistogramError("the form sets", got=got, wanted="layers 0 to L-1, all that it can say")
    bodies = {phase: list(_rows(histogram, counted).values()) for phase, counted in histogram.phases.items()}
    return canonical_json({"meta": _meta(histogram), "counts": {"all": bodies}})


def _npy(histogram: Histogram, _created: str) -> bytes:
    file = io.BytesIO()
    np.save(file, logical_counts(histogram), allow_pickle=False)
    return file.getvalue()


def _npz(histogram: Histogram, _created: str) -> bytes:
    dtype = np.float64 if histogram.normalised else np.int64
    tokens = {phase: counted.tokens for phase, counted in histogram.phases.items() if counted.tokens is not None}
    more = {"quantisation": histogram.quantisation, "tokens": tokens, "normalised": histogram.normalised}
    arrays: Mapping[str, Any] = {
        **{phase: histogram.phases[phase].counts.astype(dtype) for phase in PHASES if phase in histogram.phases},
        "layers": np.array(histogram.layers, dtype=np.int32),
        "meta": np.array(json.dumps({**_meta(histogram), **more})),
    }
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


_KEYED = frozenset({"phase", "layers", "name", *_IDENTITY})
_ALL = frozenset(_FACTS)
TARGETS: dict[str, Target] = {
    "hotsplit": Target(write=_ours, holds=_ALL, phases=2, is_scaled=True),
    "train": Target(write=_train, holds=_KEYED, phases=2, is_scaled=True),
    "live": Target(write=_live, holds=_KEYED, phases=2),
    "flat": Target(write=_flat, holds=_KEYED | {"tokens"}),
    "layers": Target(write=_layers, holds=frozenset({"layers"})),
    "counts": Target(write=_counts, holds=frozenset({"layers"})),
    "pairs": Target(write=_pairs, holds=frozenset({"layers"})),
    "sets": Target(write=_sets, holds=_KEYED, phases=2),
    "csv": Target(write=_csv, holds=frozenset({"layers"})),
    "npy": Target(write=_npy, holds=frozenset()),
    "npz": Target(write=_npz, holds=_ALL, phases=2, is_scaled=True),
}
"""By the name that --to takes. "pt" is the npy array in a file of torch's, which the command line writes."""
