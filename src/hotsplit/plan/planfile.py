"""The plan: which experts are hot, with the proof of why, and its file.

Made by the planner, read by the banks. Canonical JSON: the same plan is the same bytes on every machine, and its
SHA-256 is its name. A reader believes nothing: ids, sums, stages and proof are checked before a plan is used.

Shapes: L MoE layers, E routed experts per layer.

    >>> import json
    >>> model = ModelIdentity(model_type="toy", layers=(3,), num_experts=2, top_k=1)
    >>> stage = Stage(layers=(3,), budget_bytes=8, used_bytes=8, fixed_bytes=0)
    >>> plan = Plan(identity=PlanIdentity(model=model), objective="share", row_bytes=(8,), stages=(stage,),
    ...             hot=((1,),), proof=Proof())
    >>> from_json(json.loads(to_bytes(plan)), what="plan toy.json") == plan
    True
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, PlanError, PlanMismatchError
from hotsplit.files import canonical_json, read_json, write_atomic
from hotsplit.notices import Notice
from hotsplit.plan.identity import MAX_CELLS, MAX_INTEGER, ModelIdentity, require_same
from hotsplit.plan.objectives import OBJECTIVES
from hotsplit.plan.sizes import ExpertSizes

FORMAT = "hotsplit-plan"
VERSION = 1
_MAX_RANKS = 65536
_KEYS_OF_HISTOGRAMS = {"phases", "layers", "train", "live"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanIdentity:
    """The model's identity, its checkpoint's headers and the parallel layout."""

    model: ModelIdentity
    """As in the histogram; `layers` and `num_experts` are never None."""
    headers_hash: str | None = None
    """Of the safetensors headers; None for a plan without a model."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline stage: its layers and its budget per rank."""

    layers: tuple[int, ...]
    """Decoder indices of its MoE layers."""
    budget_bytes: int
    """What hotsplit may take of fast memory, everything counted."""
    used_bytes: int
    """What the plan takes: hot rows, spare rows, fixed bytes."""
    fixed_bytes: int
    """The part of it that stays fast for all experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """How good the plan is, as hit rates in [0, 1]."""

    hit_rate: float | None = None
    """In-sample: on the counts that the plan was made from. None without counts."""
    null: float | None = None
    """Of a uniform choice of the same bytes."""
    bound: float | None = None
    """Fractional (linear-programming) bound: no choice under this budget can beat it, in-sample."""
    gap: float | None = None
    """bound - hit_rate."""
    oracle_free: float | None = None
    """Best choice in hindsight for the scored traffic (the test's, else the plan's own), any layer sizes."""
    oracle_reachable: float | None = None
    """The same with this plan's number of hot rows in every layer: what swaps can reach."""
    held_out: float | None = None
    """Of the counts' own choice on the test counts; None without them. Where it is no better than null, the plan is
    not that choice: it spreads evenly, and this is why."""
    worst_layer: int | None = None
    """Decoder index of the layer with the lowest hit rate on the scored traffic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """For every MoE layer the hot experts, in order of preference."""

    identity: PlanIdentity
    """Whom it was made for."""
    objective: str
    """"share" or "time"."""
    row_bytes: tuple[int, ...]
    """Bytes of one expert's row, per layer in identity.model.layers order; all 1 in a plan without a model."""
    stages: tuple[Stage, ...]
    """One per pipeline stage, in order; their layers together are all layers."""
    hot: tuple[tuple[int, ...], ...]
    """Hot expert ids per layer, most wanted first."""
    proof: Proof
    """Why."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder indices of the MoE layers, [L]."""
        return self.identity.model.layers or ()

    def hot_mask(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot, [L, E], bool."""
        mask = np.zeros((len(self.hot), self.identity.model.num_experts or 0), dtype=bool)
        for layer_id, experts in enumerate(self.hot):
            mask[layer_id, list(experts)] = True
        return mask

    def hot_rows(self) -> npt.NDArray[np.int64]:
        """Number of hot experts per layer, [L], int64."""
        return np.array([len(experts) for experts in self.hot], dtype=np.int64)


def to_bytes(plan: Plan) -> bytes:
    """The plan's file: canonical JSON without a time stamp."""
    identity = plan.identity
    parallel = {"headers_hash": identity.headers_hash, "tp": identity.tp, "pp": identity.pp}
    return canonical_json(
        {
            "format": FORMAT,
            "version": VERSION,
            "identity": {**identity.model.to_json(), **parallel},
            "objective": plan.objective,
            "row_bytes": {str(layer): size for layer, size in zip(plan.layers, plan.row_bytes, strict=True)},
            "stages": [{**asdict(stage), "layers": list(stage.layers)} for stage in plan.stages],
            "hot": {str(layer): list(experts) for layer, experts in zip(plan.layers, plan.hot, strict=True)},
            "proof": asdict(plan.proof),
        }
    )


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the plan's file, in hex: equal on ranks that hold the same plan."""
    return hashlib.sha256(to_bytes(plan)).hexdigest()


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, atomically.

    Raises:
        HotsplitError: The place cannot be written; nothing was changed.
    """
    write_atomic(path, to_bytes(plan))


def load_plan(path: Path) -> Plan:
    """Read a plan and check all of it.

    Raises:
        PlanError: The file cannot be read or a field is wrong; the message names it.
    """
    what = f"plan {path}"
    return from_json(read_json(path, what="plan", error=PlanError), what=what)


def from_json(value: object, *, what: str) -> Plan:
    """Check a parsed plan file and make it a plan.

    Args:
        value: What the JSON parser gave.
        what: The file, for messages: "plan plan.json".

    Raises:
        PlanError: A field is missing, unknown or wrong; the message names it.
    """
    reader = _Reader(what=what)
    if isinstance(value, dict) and value.get("format") != FORMAT and value.keys() & _KEYS_OF_HISTOGRAMS:
        raise PlanError(what, got="a histogram, not a plan", do="make one: hotsplit plan MODEL --counts FILE -o PLAN")
    content = reader.record(value, "the file", keys=_PLAN_KEYS)
    if (content["format"], type(content["version"]), content["version"]) != (FORMAT, int, VERSION):
        reader.refuse("format", f"{content['format']!r} {content['version']!r}", f"{FORMAT!r} version {VERSION}")
    identity = reader.identity(content["identity"])
    if content["objective"] not in list(OBJECTIVES):
        reader.refuse("objective", repr(content["objective"]), " or ".join(sorted(OBJECTIVES)))
    plan = Plan(
        identity=identity,
        objective=content["objective"],
        row_bytes=reader.row_bytes(content["row_bytes"], identity=identity),
        stages=reader.stages(content["stages"], identity=identity),
        hot=reader.hot(content["hot"], identity=identity),
        proof=reader.proof(content["proof"], identity=identity),
    )
    _require_sums(plan, reader=reader)
    return plan


def require_plan_for(plan: Plan, sizes: ExpertSizes, *, force: bool = False) -> list[Notice]:
    """Refuse a plan of another model, and check its budget again where rows weigh something else by now.

    Args:
        plan: The plan.
        sizes: Of the model at hand.
        force: Use a plan of another model all the same, with a notice. Its arrays must fit even then.

    Returns:
        Notices: what could not be compared, what was forced, and that row bytes differ.

    Raises:
        PlanMismatchError: A field differs; the message names it.
        BudgetError: With the rows' real bytes the plan exceeds its budget.
    """
    ours = sizes.identity
    notices = require_same(plan.identity.model, ours, what="the plan", force=force)
    theirs, here = (plan.identity.headers_hash, plan.identity.tp), (sizes.headers_hash, sizes.tp)
    pairs = zip(("headers_hash", "tp"), theirs, here, strict=True)
    differing = [f"{name} is {a}, not {b}" for name, a, b in pairs if None not in (a, b) and a != b]
    has_model = plan.identity.headers_hash is not None or set(plan.row_bytes) != {1}
    if not has_model:
        differing.append("it was made without a model, for rows of equal size")
    shape = (len(plan.layers), plan.identity.model.num_experts)
    if (differing and not (force and has_model)) or shape != (len(ours.layers or ()), ours.num_experts):
        got = "; ".join(differing) or f"{shape[0]} layers x {shape[1]} experts"
        forcing = ", or pass --force to a command that has it" if has_model and not force else ""
        raise PlanMismatchError(
            "the plan was made for another model", got=got, do=f"make one for this model{forcing}", differing=differing
        )
    if differing:
        text = f"the plan is used because of --force, although {'; '.join(differing)}"
        notices.append(Notice(name="plan-forced", text=text, strict=False))
    return notices + _reweigh(plan, sizes)


def _reweigh(plan: Plan, sizes: ExpertSizes) -> list[Notice]:
    """Check the plan against its budget with the rows' real bytes, where they differ."""
    rows_L, fixed_L = sizes.row_bytes.tolist(), sizes.fixed_bytes.tolist()
    if tuple(rows_L) == plan.row_bytes:
        return []
    real, start = replace(plan, row_bytes=tuple(rows_L)), 0
    for before, stage in zip(_stage_spares(plan), plan.stages, strict=True):
        part = range(start, start + len(stage.layers))
        spares = _spare_bytes(real, part) if before else 0
        used = sum(fixed_L[n] for n in part) + _hot_bytes(real, part) + spares
        if used > stage.budget_bytes:
            raise BudgetError(
                "the plan, with this model's row bytes",
                got=f"{used} bytes",
                wanted=f"at most its budget, {stage.budget_bytes} bytes",
                do="make a new plan",
                used_bytes=used,
                budget_bytes=stage.budget_bytes,
            )
        start = part.stop
    text = "expert rows weigh something else than when the plan was made; it still fits its budget"
    return [Notice(name="row-bytes-differ", text=text, strict=False)]


def _stage_spares(plan: Plan) -> list[bool]:
    """Per stage whether the plan pays for spare rows: what it takes beside hot rows and fixed bytes."""
    spares, start = [], 0
    for stage in plan.stages:
        part = range(start, start + len(stage.layers))
        spares.append(stage.used_bytes - stage.fixed_bytes > _hot_bytes(plan, part))
        start = part.stop
    return spares


def _hot_bytes(plan: Plan, layer_ids: range) -> int:
    return sum(len(plan.hot[n]) * plan.row_bytes[n] for n in layer_ids)


def _spare_bytes(plan: Plan, layer_ids: range) -> int:
    return sum(plan.row_bytes[n] for n in layer_ids if len(plan.hot[n]) != plan.identity.model.num_experts)


def _require_sums(plan: Plan, *, reader: _Reader) -> None:
    """Stages follow each other over all layers, and what each takes is its rows, within its budget."""
    if tuple(layer for stage in plan.stages for layer in stage.layers) != plan.layers:
        reader.refuse("stages", "other layers", "every layer of the identity in one stage, in order")
    start = 0
    for number, stage in enumerate(plan.stages):
        part = range(start, start + len(stage.layers))
        least = stage.fixed_bytes + _hot_bytes(plan, part)
        if stage.used_bytes not in (least, least + _spare_bytes(plan, part)):
            wanted = f"the bytes of its hot rows, {least}, or of these and a spare row per layer"
            reader.refuse(f"stages[{number}].used_bytes", str(stage.used_bytes), wanted)
        if stage.used_bytes > stage.budget_bytes:
            reader.refuse(f"stages[{number}].used_bytes", str(stage.used_bytes), f"at most {stage.budget_bytes}")
        start = part.stop


_PLAN_KEYS = {"format", "version", "identity", "objective", "row_bytes", "stages", "hot", "proof"}
_PARALLEL_KEYS = {"headers_hash", "tp", "pp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Turns parsed JSON into checked values; every refusal names the file and the field."""

    what: str
    """The file, for messages."""

    def refuse(self, name: str, got: str, wanted: str) -> NoReturn:
        """Raise the one error."""
        short = got if len(got) <= 60 else f"{got[:57]}..."
        raise PlanError(f"{self.what}, {name}", got=short, wanted=wanted, do="make the plan again", field=name)

    def record(self, value: object, name: str, *, keys: set[str]) -> dict[str, Any]:
        """An object with exactly these keys."""
        if not isinstance(value, dict):
            self.refuse(name, type(value).__name__, "a JSON object")
        if value.keys() != keys:
            odd = sorted(value.keys() ^ keys)
            self.refuse(name, f"{'no ' if odd[0] in keys else 'unknown '}{odd[0]!r}", f"the keys {sorted(keys)}")
        return value

    def integer(self, value: object, name: str, *, least: int, most: int = MAX_INTEGER) -> int:
        """An integer (true is none)."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(name, repr(value), f"an integer from {least} to {'2**53' if most == MAX_INTEGER else most}")
        return value

    def integers(self, value: object, name: str, *, below: int | None = None) -> tuple[int, ...]:
        """A list of different integers >= 0."""
        if not isinstance(value, list):
            self.refuse(name, repr(value), "a list of integers")
        items = tuple(self.integer(item, name, least=0) for item in value)
        if below is not None and items and max(items) >= below:
            self.refuse(name, str(max(items)), f"ids below {below}")
        if len(set(items)) != len(items):
            self.refuse(name, "a repeated entry", "every entry once")
        return items

    def identity(self, value: object) -> PlanIdentity:
        """Whom the plan is for; layers and num_experts index everything else and must be there."""
        model_keys = {field.name for field in fields(ModelIdentity)}
        content = self.record(value, "identity", keys=model_keys | _PARALLEL_KEYS)
        layers = self.integers(content["layers"], "identity.layers")
        if not layers or list(layers) != sorted(layers):
            self.refuse("identity.layers", str(list(layers)), "decoder layer indices, ascending")
        for name in ("model_type", "headers_hash"):
            if content[name] is not None and not isinstance(content[name], str):
                self.refuse(f"identity.{name}", repr(content[name]), "text or null")
        top_k, num_experts = content["top_k"], self.integer(content["num_experts"], "identity.num_experts", least=1)
        if len(layers) * num_experts > MAX_CELLS:
            self.refuse("identity", f"{len(layers)} layers x {num_experts} experts", f"at most {MAX_CELLS} together")
        return PlanIdentity(
            model=ModelIdentity(
                model_type=content["model_type"],
                layers=layers,
                num_experts=num_experts,
                top_k=None if top_k is None else self.integer(top_k, "identity.top_k", least=1),
            ),
            headers_hash=content["headers_hash"],
            tp=self.integer(content["tp"], "identity.tp", least=1, most=_MAX_RANKS),
            pp=self.integer(content["pp"], "identity.pp", least=1, most=_MAX_RANKS),
        )

    def by_layer(self, value: object, name: str, *, identity: PlanIdentity) -> Mapping[int, Any]:
        """An object with one entry per decoder layer."""
        layers = identity.model.layers or ()
        content = self.record(value, name, keys={str(layer) for layer in layers})
        return {layer: content[str(layer)] for layer in layers}

    def row_bytes(self, value: object, *, identity: PlanIdentity) -> tuple[int, ...]:
        """Bytes of a row, per layer."""
        rows = self.by_layer(value, "row_bytes", identity=identity)
        return tuple(self.integer(size, f"row_bytes.{layer}", least=1) for layer, size in rows.items())

    def hot(self, value: object, *, identity: PlanIdentity) -> tuple[tuple[int, ...], ...]:
        """Hot expert ids, per layer."""
        rows = self.by_layer(value, "hot", identity=identity)
        return tuple(self.integers(ids, f"hot.{n}", below=identity.model.num_experts) for n, ids in rows.items())

    def stages(self, value: object, *, identity: PlanIdentity) -> tuple[Stage, ...]:
        """One per pipeline stage."""
        if not isinstance(value, list) or len(value) != identity.pp:
            self.refuse("stages", repr(value), f"a list of pp = {identity.pp} stages")
        stages = []
        for number, item in enumerate(value):
            name = f"stages[{number}]"
            content = self.record(item, name, keys={field.name for field in fields(Stage)})
            layers = self.integers(content.pop("layers"), f"{name}.layers")
            sums = {key: self.integer(amount, f"{name}.{key}", least=0) for key, amount in content.items()}
            stages.append(Stage(layers=layers, **sums))
        return tuple(stages)

    def proof(self, value: object, *, identity: PlanIdentity) -> Proof:
        """Rates in [0, 1] or null, and a layer."""
        content = dict(self.record(value, "proof", keys={field.name for field in fields(Proof)}))
        worst = content.pop("worst_layer")
        if worst is not None and (type(worst) is not int or worst not in (identity.model.layers or ())):
            self.refuse("proof.worst_layer", repr(worst), "a layer of the identity, or null")
        for name, rate in content.items():
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate is not None and not (is_number and 0 <= rate <= 1):
                self.refuse(f"proof.{name}", repr(rate), "a finite rate from 0 to 1, or null")
        return Proof(worst_layer=worst, **content)
