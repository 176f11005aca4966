"""Routing traces: which experts every token chose, token by token, and the histogram of them.

Beside the histogram at the head of the flow: a histogram forgets the steps, a trace keeps them, so that unique cold
bytes per step can be replayed. The file is an npz; files without steps or layers are completed, aloud.

Shapes: T tokens, L MoE layers, K experts per token, E routed experts per layer.

    >>> count_ids(np.array([[[0, 2]], [[2, -1]]]), num_experts=3)
    array([[1, 0, 2]])
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HotsplitError, TraceError
from hotsplit.files import read_bytes, write_atomic
from hotsplit.notices import Notice
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import MAX_CELLS, MAX_INTEGER, ModelIdentity

PREFILL, DECODE = 0, 1
"""How the file spells the phases."""
PADDING = -1
"""An id that stands for no expert."""
UNREADABLE = (
    ValueError,
    OSError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    OverflowError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What numpy and zipfile raise on damaged files; an .npy file lacks the archive's attributes."""
_PER_TOKEN = ("phase", "step", "request", "position", "domain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Routing decisions in the order in which they were made."""

    identity: ModelIdentity
    """Its `layers` are never None; `num_experts` is None where the file does not say."""
    experts: npt.NDArray[Any]
    """Expert ids in falling router weight, [T, L, K], any integer type; -1 is padding."""
    phase: npt.NDArray[np.uint8]
    """0 prefill, 1 decode, [T], uint8."""
    step: npt.NDArray[np.uint32]
    """Engine step of each token, [T], uint32."""
    request: npt.NDArray[Any] | None = None
    """Request number, [T], integer."""
    position: npt.NDArray[Any] | None = None
    """Position in the request, [T], integer."""
    domain: npt.NDArray[Any] | None = None
    """Index into `domains`, [T], integer."""
    domains: tuple[str, ...] = ()
    """Names of the kinds of traffic."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Where the trace comes from, as free JSON."""

    def __post_init__(self) -> None:
        _require_shapes(self)
        _require_ids(self)

    def domain_mask(self, domain: str | None) -> npt.NDArray[np.bool_]:
        """Tokens of one domain, [T], bool.

        Args:
            domain: Its name; None for all tokens.

        Raises:
            TraceError: There is no such domain.
        """
        if domain is None:
            return np.ones(len(self.phase), dtype=bool)
        if self.domain is None or domain not in self.domains:
            wanted = ", ".join(self.domains) or "no domain: the trace has none"
            raise TraceError("domain", got=repr(domain), wanted=wanted)
        mask_T: npt.NDArray[np.bool_] = self.domain == self.domains.index(domain)
        return mask_T


def load_trace(path: Path) -> tuple[Trace, list[Notice]]:
    """Read a trace.

    Args:
        path: The npz file.

    Returns:
        The trace, complete with layers and steps, and notices on what was made up.

    Raises:
        TraceError: Unreadable, an array is missing or has the wrong shape or type, an id out of range; names it.
    """
    arrays = _read_arrays(Path(path))
    what = f"trace {path}"
    for name in ("experts", "phase"):
        if name not in arrays:
            raise TraceError(what, got=f"no array {name!r}", wanted="experts and phase", path=path)
    meta = _meta(arrays, what=what)
    notices = []
    if "layers" not in arrays:
        text = f"{what} does not say its layers: taken as 0..L-1"
        notices.append(Notice(name="trace-layers", text=text))
    try:
        return _trace_of(arrays, meta=meta), notices
    except TraceError as error:
        raise TraceError(f"{what}: {error}", path=path, **_place_of(error)) from error


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace, atomically; ids become uint8, or uint16 where they need it.

    Args:
        trace: Without padding ids, which the file form cannot hold.
        path: Where to.

    Raises:
        TraceError: A padding id is in it.
        HotsplitError: The folder cannot be written; what was there stays.
    """
    if trace.experts.size and int(trace.experts.min()) < 0:
        raise TraceError(f"trace for {path}", got="a padding id", wanted="ids >= 0", do="leave padding tokens out")
    largest = (trace.identity.num_experts or int(trace.experts.max(initial=0)) + 1) - 1
    meta = {**trace.meta, **trace.identity.to_json()}
    arrays: dict[str, Any] = {
        "experts": trace.experts.astype(np.uint8 if largest < 256 else np.uint16),
        "layers": np.array(trace.identity.layers, dtype=np.int32),
        "meta": np.array(json.dumps(meta)),
    }
    arrays |= {name: getattr(trace, name) for name in _PER_TOKEN if getattr(trace, name) is not None}
    arrays |= {"phase": trace.phase.astype(np.uint8), "step": trace.step.astype(np.uint32)}
    if trace.domains:
        arrays["domains"] = np.array(trace.domains)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    write_atomic(Path(path), file.getvalue())


def histogram_of(trace: Trace, *, num_experts: int | None = None, domain: str | None = None) -> Histogram:
    """Count a trace, decode and prefill apart.

    Args:
        trace: Routing decisions.
        num_experts: Routed experts per layer, where the trace does not say.
        domain: Count only this kind of traffic; None for all.

    Returns:
        Counts per phase that has tokens. Tokens that are wholly padding are not counted as tokens; where single ids
        are padding, `tokens` is None, since totals cannot be tokens x top_k.

    Raises:
        TraceError: Nobody knows num_experts, an id is beyond it, or there is no such domain.
    """
    experts_count = num_experts or trace.identity.num_experts
    if experts_count is None:
        raise TraceError("the trace", got="no num_experts", wanted="the number of routed experts per layer")
    chosen_T = trace.domain_mask(domain)
    phases = {}
    for name, code in (("decode", DECODE), ("prefill", PREFILL)):
        ids_TLK = trace.experts[chosen_T & (trace.phase == code)]
        if ids_TLK.size:
            counts_LE = count_ids(ids_TLK, num_experts=experts_count).astype(np.float64)
            phases[name] = PhaseCounts(counts=counts_LE, tokens=_whole_tokens(ids_TLK))
    identity = ModelIdentity(
        model_type=trace.identity.model_type,
        layers=trace.identity.layers,
        num_experts=experts_count,
        top_k=trace.identity.top_k or int(trace.experts.shape[2]),
    )
    source = {**trace.meta, **({"domain": domain} if domain else {})}
    return Histogram(identity=identity, phases=phases, source=source)


def count_ids(ids: npt.NDArray[Any], *, num_experts: int) -> npt.NDArray[np.int64]:
    """Count raw routing ids; padding (-1) is left out.

    Args:
        ids: Expert ids, [T, L, K], any integer type and memory layout.
        num_experts: Routed experts per layer.

    Returns:
        Routed pairs per layer and expert, [L, E], int64.

    Raises:
        TraceError: An id is below -1 or not below num_experts; names token, layer_id and id.
    """
    counts_LE = np.zeros((ids.shape[1], num_experts), dtype=np.int64)
    bad_TLK = (ids >= num_experts) if ids.dtype.kind == "u" else (ids >= num_experts) | (ids < PADDING)
    if bad_TLK.any():
        token, layer_id, k = (int(index) for index in np.argwhere(bad_TLK)[0])
        raise _bad_id(int(ids[token, layer_id, k]), token=token, layer=layer_id, num_experts=num_experts)
    for layer_id in range(ids.shape[1]):
        ids_N = ids[:, layer_id, :].ravel()
        real_N = ids_N[ids_N >= 0]
        counts_LE[layer_id] = np.bincount(real_N, minlength=num_experts)
    return counts_LE


def steps_of(phase: npt.NDArray[Any], *, request: npt.NDArray[Any] | None) -> npt.NDArray[np.uint32]:
    """Make up the steps of a trace without any: each decode token is a step, each request's prefill is one.

    Args:
        phase: 0 prefill, 1 decode, [T].
        request: Request number, [T]; None takes every run of prefill tokens as one request.

    Returns:
        Step of each token, numbered in the order of first appearance, [T], uint32.
    """
    is_decode_T = np.asarray(phase) == DECODE
    run_T = np.cumsum(np.r_[True, is_decode_T[1:] | is_decode_T[:-1]]) if len(is_decode_T) else np.zeros(0, np.int64)
    group_T = run_T if request is None else np.unique(request, return_inverse=True)[1].reshape(-1)
    own_T = np.arange(len(is_decode_T)) + (int(group_T.max(initial=0)) + 1)
    _, first_S, inverse_T = np.unique(np.where(is_decode_T, own_T, group_T), return_index=True, return_inverse=True)
    order_S = np.empty(len(first_S), dtype=np.uint32)
    order_S[np.argsort(first_S)] = np.arange(len(first_S), dtype=np.uint32)
    return order_S[inverse_T.reshape(-1)]


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every array of the npz; nothing is unpickled."""
    data = read_bytes(path, what="trace", error=TraceError)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except UNREADABLE as failure:
        raise TraceError(f"trace {path}", got=why_unreadable(failure), wanted="an npz file", path=path) from failure


def why_unreadable(failure: BaseException) -> str:
    """What numpy says of a file; but where it offers to unpickle it, which would run what stands there, only that it is none.

    Args:
        failure: One of UNREADABLE.

    >>> why_unreadable(ValueError("This file contains pickled (object) data. If you trust the file ..."))
    'no arrays, or arrays of Python objects'
    """
    return "no arrays, or arrays of Python objects" if "pickle" in str(failure) else str(failure)


def _trace_of(arrays: dict[str, npt.NDArray[Any]], *, meta: dict[str, Any]) -> Trace:
    """A trace from a file's arrays, completed."""
    experts_TLK, phase_T = arrays["experts"], arrays["phase"]
    if experts_TLK.ndim != 3:
        raise TraceError("experts", got=f"shape {experts_TLK.shape}", wanted="[tokens, layers, k]")
    layers = arrays["layers"].tolist() if "layers" in arrays else list(range(experts_TLK.shape[1]))
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise TraceError("layers", got=repr(layers)[:60], wanted="decoder layer indices")
    identity = ModelIdentity(
        model_type=meta["model_type"] if isinstance(meta.get("model_type"), str) else None,
        layers=tuple(layers),
        num_experts=_number(meta.get("num_experts", meta.get("experts"))),
        top_k=_number(meta.get("top_k")) or int(experts_TLK.shape[2]),
    )
    trace = Trace(
        identity=identity,
        experts=experts_TLK,
        phase=phase_T,
        step=arrays.get("step", np.zeros(experts_TLK.shape[0], dtype=np.uint32)),
        request=arrays.get("request"),
        position=arrays.get("position"),
        domain=arrays.get("domain"),
        domains=tuple(str(name) for name in arrays.get("domains", np.zeros(0, dtype=str)).reshape(-1)),
        meta=meta,
    )
    return trace if "step" in arrays else replace(trace, step=steps_of(phase_T, request=trace.request))


def _meta(arrays: dict[str, npt.NDArray[Any]], *, what: str) -> dict[str, Any]:
    """The JSON object in `meta`, empty where there is none."""
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except (ValueError, RecursionError) as failure:
        raise TraceError(f"{what}, meta", got=str(failure), wanted="JSON") from failure
    if not isinstance(meta, dict):
        raise TraceError(f"{what}, meta", got=type(meta).__name__, wanted="a JSON object")
    return meta


def _number(value: object) -> int | None:
    """A positive integer up to 2**53, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INTEGER else None


def _require_shapes(trace: Trace) -> None:
    """Every array has T entries, ids are integers, phases are 0 or 1."""
    experts_TLK, layers = trace.experts, trace.identity.layers
    if experts_TLK.ndim != 3 or experts_TLK.dtype.kind not in "iu":
        got = f"{experts_TLK.dtype} {experts_TLK.shape}"
        raise TraceError("experts", got=got, wanted="integers [tokens, layers, k]")
    if layers is None or len(layers) != experts_TLK.shape[1] or list(layers) != sorted(set(layers)):
        wanted = f"{experts_TLK.shape[1]} ascending decoder indices"
        raise TraceError("layers", got=repr(layers)[:60], wanted=wanted)
    if layers and layers[0] < 0:
        raise TraceError("layers", got=str(layers[0]), wanted="decoder indices >= 0", value=layers[0])
    for name in _PER_TOKEN:
        values_T = getattr(trace, name)
        if values_T is not None and (values_T.shape != experts_TLK.shape[:1] or values_T.dtype.kind not in "iu"):
            got = f"{values_T.dtype} {values_T.shape}"
            raise TraceError(name, got=got, wanted=f"{experts_TLK.shape[0]} integers, one per token")
    if not np.isin(trace.phase, (PREFILL, DECODE)).all():
        raise TraceError("phase", got=str(int(trace.phase.max())), wanted="0 (prefill) or 1 (decode)")
    if trace.domain is not None and trace.domain.size and int(trace.domain.max()) >= len(trace.domains):
        raise TraceError(
            "domain", got=str(int(trace.domain.max())), wanted=f"an index into {len(trace.domains)} domains"
        )


def _require_ids(trace: Trace) -> None:
    """Every id names an expert, or is padding; and an array of their counts can be made."""
    num_experts, num_layers = trace.identity.num_experts or 0, trace.experts.shape[1]
    if num_experts * num_layers > MAX_CELLS:
        got = f"{num_layers} layers x {num_experts} experts"
        raise TraceError("num_experts", got=got, wanted=f"at most {MAX_CELLS} together")
    bad_TLK = trace.experts < PADDING
    if trace.identity.num_experts is not None:
        bad_TLK |= trace.experts >= trace.identity.num_experts
    if bad_TLK.any():
        token, layer_id, k = (int(index) for index in np.argwhere(bad_TLK)[0])
        layer = (trace.identity.layers or ())[layer_id]
        value = int(trace.experts[token, layer_id, k])
        raise _bad_id(value, token=token, layer=layer, num_experts=trace.identity.num_experts)


def _bad_id(value: int, *, token: int, layer: int, num_experts: int | None) -> TraceError:
    """The error for one id."""
    wanted = "an expert id, or -1 for padding" if num_experts is None else f"0 to {num_experts - 1}, or -1 for padding"
    where = f"token {token}, layer {layer}"
    return TraceError(where, got=f"expert {value}", wanted=wanted, token=token, layer=layer, value=value)


def _place_of(error: HotsplitError) -> dict[str, Any]:
    """The coordinates an error carries, to carry them on."""
    return {name: getattr(error, name) for name in ("token", "layer", "value") if hasattr(error, name)}


def _whole_tokens(ids_TLK: npt.NDArray[Any]) -> int | None:
    """Tokens with ids, if all of theirs are real."""
    if ids_TLK.dtype.kind == "u":
        return len(ids_TLK)
    real_TLK = ids_TLK >= 0
    real_T = real_TLK.any(axis=(1, 2))
    return int(real_T.sum()) if real_TLK[real_T].all() else None
