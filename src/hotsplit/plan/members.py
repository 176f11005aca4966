"""The members of a parsed histogram file, believed one by one.

Under `dialects`, which knows the forms: here is what all forms share. Numbers are checked as Python numbers, before
float64 could round them, and rows before an array is allocated for them: a file cannot claim more than it holds.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mode
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HistogramError
from hotsplit.notices import Notice
from hotsplit.plan.histogram import PHASES, bad_count, is_count
from hotsplit.plan.identity import MAX_CELLS, MAX_INTEGER, ModelIdentity


def required_object(content: dict[str, Any], key: str, *, what: str) -> dict[str, Any]:
    """A member that must be an object.

    Raises:
        HistogramError: It is something else, or not there.
    """
    value = content.get(key)
    if not isinstance(value, dict):
        raise HistogramError(f"{what}, {key}", got=shortened(value), wanted="a JSON object", field=key)
    return value


def phase_bodies(body: dict[str, Any], *, what: str) -> dict[str, dict[str, Any]]:
    """Bodies by phase; an empty one is absent.

    Raises:
        HistogramError: Another name than decode and prefill, something that is no object, or no phase at all.
    """
    for phase, value in body.items():
        if phase not in PHASES or not isinstance(value, dict):
            got = f"{phase[:60]!r}: {shortened(value)}"
            raise HistogramError(f"{what}, phases", got=got, wanted="objects named decode and prefill")
    filled = {phase: value for phase, value in body.items() if value}
    if not filled:
        raise HistogramError(what, got="no phase", wanted="decode or prefill counts")
    return filled


def keyed_rows(body: dict[str, Any], *, what: str) -> dict[int, Any]:
    """Rows by decoder index; "3" and "03" would be the same layer twice.

    Raises:
        HistogramError: A key is no index, or two are the same one; no rows.
    """
    rows: dict[int, Any] = {}
    for key, row in body.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 6):
            raise HistogramError(f"{what}, layers", got=shortened(key), wanted="decoder layer indices as keys")
        if int(key) in rows:
            raise HistogramError(f"{what}, layer {int(key)}", got="two rows", wanted="one", layer=int(key))
        rows[int(key)] = row
    if not rows:
        raise HistogramError(what, got="no layers", wanted="counts per decoder layer index")
    return rows


def row_length(rows: Mapping[int, Any], *, what: str) -> int:
    """The number of experts that most rows agree on.

    Raises:
        HistogramError: There are no rows of counts.
    """
    lengths = [len(row) for row in rows.values() if isinstance(row, list)]
    if not lengths or mode(lengths) == 0:
        raise HistogramError(what, got="no rows of counts", wanted="a list of counts per layer")
    return mode(lengths)


def cell_rows(
    cells: Mapping[tuple[int, int], Any], *, num_experts: int | None, what: str
) -> tuple[dict[int, list[Any]], list[Notice]]:
    """Rows by decoder index from single cells; a cell that is not there is zero.

    Args:
        cells: Count by (decoder layer index, expert).
        num_experts: Routed experts per layer; None to take the highest id + 1, aloud where cells are missing.
        what: The file, for messages.

    Returns:
        Rows of equal length, and a notice where their length may be too short.

    Raises:
        HistogramError: No cells, an expert beyond `num_experts`, or more cells than any model has.
    """
    if not cells:
        raise HistogramError(what, got="no counts", wanted="a layer, an expert and a count in every row")
    layers = sorted({layer for layer, _ in cells})
    highest = max(expert for _, expert in cells)
    width = highest + 1 if num_experts is None else num_experts
    if highest >= width:
        layer = next(layer for layer, expert in cells if expert == highest)
        where = f"{what}, layer {layer}, expert {highest}"
        raise HistogramError(where, got="an expert too many", wanted=f"ids below {width}", layer=layer, expert=highest)
    if len(layers) * width > MAX_CELLS:
        raise HistogramError(
            what, got=f"{len(layers)} layers x {width} experts", wanted=f"at most {MAX_CELLS} together"
        )
    rows: dict[int, list[Any]] = {layer: [0] * width for layer in layers}
    for (layer, expert), value in cells.items():
        rows[layer][expert] = value
    if num_experts is not None or len(cells) == len(layers) * width:
        return rows, []
    text = f"{what} leaves experts out: {width} per layer, the highest id + 1, unless --experts says otherwise"
    return rows, [Notice(name="experts-from-ids", text=text)]


def checked_counts(
    rows: Mapping[int, Any], *, phase: str, identity: ModelIdentity, normalised: bool, what: str
) -> npt.NDArray[np.float64]:
    """Checked rows as an array, [L, E]; a layer without a row is zero, which validation flags.

    Args:
        rows: Parsed JSON by decoder index.
        phase: "decode" or "prefill", for messages.
        identity: Its layers and num_experts are the array's.
        normalised: Whether fractions are allowed.
        what: The file, for messages.

    Raises:
        HistogramError: A row of another layer, of another length, or with what is no count; more layers x experts than
            any model has.
    """
    layers, num_experts = identity.layers or (), identity.num_experts or 0
    layer_ids = {layer: layer_id for layer_id, layer in enumerate(layers)}
    for layer, row in sorted(rows.items()):
        if layer not in layer_ids:
            raise HistogramError(f"{what}, layer {layer}", got="a layer that model.layers lacks", layer=layer)
        _require_row(row, place=(phase, layer), num_experts=num_experts, normalised=normalised, what=what)
    if len(layers) * num_experts > MAX_CELLS:
        got = f"{len(layers)} layers x {num_experts} experts"
        raise HistogramError(what, got=got, wanted=f"at most {MAX_CELLS} together")
    counts_LE = np.zeros((len(layers), num_experts))
    for layer, row in rows.items():
        counts_LE[layer_ids[layer]] = row
    return counts_LE


def _require_row(row: Any, *, place: tuple[str, int], num_experts: int, normalised: bool, what: str) -> None:
    """Raise unless the row is `num_experts` counts."""
    phase, layer = place
    if not isinstance(row, list):
        where = f"{what}, layer {layer} ({phase})"
        raise HistogramError(where, got=shortened(row), wanted="a list of counts", layer=layer)
    if len(row) != num_experts:
        expert = min(len(row), num_experts)
        where, got = f"{what}, layer {layer}, expert {expert} ({phase})", f"{len(row)} experts"
        values = {"phase": phase, "layer": layer, "expert": expert, "value": len(row)}
        raise HistogramError(where, got=got, wanted=str(num_experts), do="check whose file it is", **values)
    for expert, value in enumerate(row):
        if not is_count(value, normalised=normalised):
            raise bad_count(value, what=what, place=(phase, layer, expert), normalised=normalised)


def optional_integer(content: dict[str, Any], key: str, *, what: str) -> int | None:
    """A member that is an integer from 0 to 2**53, or not there.

    Raises:
        HistogramError: It is something else.
    """
    value = content.get(key)
    if value is not None and not is_index(value):
        wanted = "an integer from 0 to 2**53"
        raise HistogramError(f"{what}, {key}", got=shortened(value), wanted=wanted, field=key, value=value)
    return value


def optional_flag(content: dict[str, Any], key: str, *, what: str) -> bool:
    """A member that is true or false; false where it is not there.

    Raises:
        HistogramError: It is something else: "true" is a text.
    """
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise HistogramError(f"{what}, {key}", got=shortened(value), wanted="true or false", field=key, value=value)
    return value


def optional_object(content: dict[str, Any], key: str) -> dict[str, Any]:
    """A member that is an object, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def optional_text(content: dict[str, Any], key: str) -> str | None:
    """A member that is text, or None."""
    value = content.get(key)
    return value if isinstance(value, str) else None


def is_index(value: object) -> bool:
    """An integer from 0 to 2**53; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


def shortened(value: object) -> str:
    """A value for a message, cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
