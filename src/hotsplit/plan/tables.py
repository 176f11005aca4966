"""Histograms that are no JSON: CSV rows, npy and npz arrays, and traces, which are counted.

Under `dialects`, beside `forms`. Rows of an array have no layer numbers of their own, and a CSV may leave them out:
then they come from the user or from the model at hand, and never from a guess.

    layer,expert,count          one row per cell; header lines may recur, and cells that recur add up: files may be joined
    expert,count                no layers: as many blocks of all experts as the user lists layers
    [steps, layers, experts]    npy, the `logical_count` of SGLang's recorder; its steps are added
    counts | decode, prefill    npz, [layers, experts] each, with `layers` and `meta` where they are known

Shapes: L MoE layers, E routed experts per layer, S recorder steps.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.errors import HistogramError, TraceError
from hotsplit.files import MAX_JSON_BYTES, read_bytes
from hotsplit.notices import Notice
from hotsplit.plan.document import (
    Document,
    identity_with,
    number_rows,
    refuse_layers,
    refuse_set,
    spoken_phase,
)
from hotsplit.plan.histogram import PHASES, Histogram, PhaseCounts, bad_count, is_count
from hotsplit.plan.identity import MAX_CELLS
from hotsplit.plan.members import (
    cell_rows,
    checked_counts,
    optional_flag,
    optional_integer,
    optional_object,
    optional_text,
    row_length,
    shortened,
)
from hotsplit.plan.trace import UNREADABLE, histogram_of, load_trace, why_unreadable

Read = tuple[Histogram, list[Notice], bool]
"""A histogram, notices, and whether the file declares its model's layers."""

_COLUMNS = {
    "layer": "layer",
    "layer_id": "layer",
    "layer_idx": "layer",
    "expert": "expert",
    "expert_id": "expert",
    "expert_idx": "expert",
    "count": "count",
    "counts": "count",
}
_CSV_LINE = re.compile(rb'\s*[\w". +-]+(,\s*[\w". +-]+)+\s*')


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One form that is no JSON."""

    form: str
    """How it looks, for the error that lists the known forms."""
    read: Callable[[Path, Document, Sequence[int] | None], Read]
    """Reads it: the file, what the user says about it, and the layers of the model at hand."""


def table_kind(head: bytes, *, name: str, what: str) -> str | None:
    """Which of TABLES a file is, by its first bytes.

    Args:
        head: The first bytes.
        name: The file's name.
        what: The file, for messages.

    Returns:
        A key of TABLES; None for anything else, JSON it is to be hoped.

    Raises:
        HistogramError: A PyTorch file, which needs torch to read.
    """
    if name.endswith((".pt", ".pth")) or head.startswith(b"\x80"):
        do = "convert it first: hotsplit convert FILE --to hotsplit -o OUT"
        raise HistogramError(what, got="a PyTorch file", wanted="one that can be read without torch", do=do)
    if head.startswith(b"PK"):
        return "npz"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    first = next((line for line in head.splitlines() if line.strip()), b"")
    return "csv" if name.endswith(".csv") or _CSV_LINE.fullmatch(first) else None


def histogram_of_array(
    array: npt.NDArray[Any], document: Document, *, model_layers: Sequence[int] | None
) -> tuple[Histogram, list[Notice]]:
    """Counts of a recorder, whose steps are added and whose rows have no numbers.

    Args:
        array: Routed pairs, [L, E] or [S, L, E], any number type.
        document: The file, and what the user says.
        model_layers: Decoder indices of the MoE layers of the model at hand, if there is one.

    Raises:
        HistogramError: It is no such array, a count is none, or nobody says which layers its rows are.
    """
    refuse_set(document)
    phase, notices = spoken_phase("unknown", document)
    counts_RE = _added_steps(array, phase=phase, what=document.what)
    rows, layers, said = number_rows(_used([counts_RE]), document, model_layers=model_layers)
    identity = identity_with(layers, num_experts=counts_RE.shape[1], model={}, what=document.what)
    return Histogram(identity=identity, phases={phase: PhaseCounts(counts=counts_RE[rows])}), notices + said


def _added_steps(array: npt.NDArray[Any], *, phase: str, what: str) -> npt.NDArray[np.float64]:
    """Check an array and add its steps, [rows, E]."""
    if array.ndim not in (2, 3) or array.dtype.kind not in "iuf" or 0 in array.shape:
        got = f"{array.dtype} {list(array.shape)}"
        raise HistogramError(what, got=got, wanted="numbers [layers, experts] or [steps, layers, experts]")
    if array.shape[-2] * array.shape[-1] > MAX_CELLS:
        got = f"{array.shape[-2]} layers x {array.shape[-1]} experts"
        raise HistogramError(what, got=got, wanted=f"at most {MAX_CELLS} together")
    steps_SRE = array.reshape(-1, *array.shape[-2:])
    good_SRE = (steps_SRE >= 0) & (steps_SRE <= 2**53) & (steps_SRE == np.floor(steps_SRE))
    if not good_SRE.all():
        step, row, expert = (int(index) for index in np.argwhere(~good_SRE)[0])
        value = steps_SRE[step, row, expert].item()
        raise bad_count(value, what=what, place=(phase, row, expert), normalised=False)
    summed_RE: npt.NDArray[np.float64] = steps_SRE.sum(axis=0, dtype=np.float64)
    return summed_RE


def _used(arrays: Sequence[npt.NDArray[np.float64]]) -> list[bool]:
    """Whether a row has any counts, per row."""
    return [bool(row.any()) for row in np.sum(arrays, axis=0)]


def _read_csv(file: Path, document: Document, _model_layers: Sequence[int] | None) -> Read:
    """Rows of layer, expert and count; or of expert and count in blocks."""
    refuse_set(document)
    phase, notices = spoken_phase("unknown", document)
    data = read_bytes(file, what="histogram", error=HistogramError, limit=MAX_JSON_BYTES)
    columns, lines = _csv_lines(data, what=document.what)
    if "layer" in columns:
        refuse_layers(document)
        cells: dict[tuple[int, int], Any] = {}
        for line in lines:
            key = (line["layer"], line["expert"])
            cells[key] = cells.get(key, 0) + _count(line["count"], place=(phase, *key), what=document.what)
        rows, said = cell_rows(cells, num_experts=document.given.num_experts, what=document.what)
    else:
        rows, said = _blocks(lines, document, phase=phase), []
    num_experts = row_length(rows, what=document.what)
    identity = identity_with(sorted(rows), num_experts=num_experts, model={}, what=document.what)
    counts_LE = checked_counts(rows, phase=phase, identity=identity, normalised=False, what=document.what)
    histogram = Histogram(identity=identity, phases={phase: PhaseCounts(counts=counts_LE)})
    return histogram, notices + said, False


def _csv_lines(data: bytes, *, what: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns, and every line by column; header lines, also those in the middle of joined files, are read once."""
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(data.decode("utf-8-sig")))]
    except (UnicodeDecodeError, csv.Error) as failure:
        raise HistogramError(what, got="bytes that are no text", wanted="lines of layer,expert,count") from failure
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if any(line)]
    if not numbered:
        raise HistogramError(what, got="nothing", wanted="lines of layer,expert,count")
    columns = _header(numbered[0][1]) or (["layer", "expert", "count"] if len(numbered[0][1]) == 3 else [])
    if not columns:
        got = shortened(",".join(numbered[0][1]))
        raise HistogramError(what, got=got, wanted="lines of layer,expert,count, or a header expert,count")
    body = [(number, line) for number, line in numbered if _header(line) != columns]
    return columns, [_cells(line, columns, where=f"{what}, line {number}") for number, line in body]


def _header(line: Sequence[str]) -> list[str] | None:
    """A line's columns by our names, if it is a header of ours."""
    names = [_COLUMNS.get(cell.lower(), "") for cell in line]
    return names if sorted(names) in (["count", "expert", "layer"], ["count", "expert"]) else None


def _cells(line: Sequence[str], columns: Sequence[str], *, where: str) -> dict[str, Any]:
    """One line by column: ids as integers, the count as it stands."""
    if len(line) != len(columns):
        raise HistogramError(where, got=f"{len(line)} columns", wanted=",".join(columns))
    cells: dict[str, Any] = dict(zip(columns, line, strict=True))
    for name in set(columns) - {"count"}:
        if not (cells[name].isascii() and cells[name].isdigit() and len(cells[name]) <= 6):
            raise HistogramError(f"{where}, {name}", got=shortened(cells[name]), wanted="an index from 0")
        cells[name] = int(cells[name])
    return cells


def _count(text: str, *, place: tuple[str, int, int], what: str) -> int:
    """A count of a CSV, believed before it is added to others."""
    value: Any = text
    for parse in (int, float):
        try:
            value = parse(text)
            break
        except ValueError:
            continue
    if not is_count(value, normalised=False):
        raise bad_count(value, what=what, place=place, normalised=False)
    return int(value)


def _blocks(lines: Sequence[Mapping[str, Any]], document: Document, *, phase: str) -> dict[int, list[int]]:
    """Rows of a CSV without layers: the user's layers divide its lines, and every block has each expert once."""
    what, layers = document.what, document.given.layers
    if layers is None:
        got = f"{len(lines)} lines without layer numbers"
        do = "convert it with --layers LIST, in the order of the file"
        raise HistogramError(what, got=got, wanted="a column of layers", do=do)
    num_experts, left = divmod(len(lines), len(layers))
    if left or not num_experts:
        raise HistogramError(what, got=f"{len(lines)} lines", wanted=f"a multiple of {len(layers)} layers")
    rows = {}
    for i, layer in enumerate(layers):
        block = lines[i * num_experts : (i + 1) * num_experts]
        if sorted(line["expert"] for line in block) != list(range(num_experts)):
            got = f"lines {i * num_experts + 1} to {(i + 1) * num_experts} that are not experts 0 to {num_experts - 1}"
            raise HistogramError(
                f"{what}, layer {layer}", got=got, wanted="every expert of a layer once, then the next"
            )
        row = [0] * num_experts
        for line in block:
            row[line["expert"]] = _count(line["count"], place=(phase, layer, line["expert"]), what=what)
        rows[layer] = row
    return rows


def _read_npy(file: Path, document: Document, model_layers: Sequence[int] | None) -> Read:
    """One array."""
    array = _load(file, what=document.what)
    if not isinstance(array, np.ndarray):
        raise HistogramError(document.what, got="no array", wanted="an npy file")
    return (*histogram_of_array(array, document, model_layers=model_layers), False)


def _read_npz(file: Path, document: Document, model_layers: Sequence[int] | None) -> Read:
    """Arrays by name; a trace is counted."""
    arrays = _load(file, what=document.what)
    if not isinstance(arrays, dict) or "data.pkl" in {name.rpartition("/")[2] for name in arrays}:
        raise HistogramError(
            document.what, got="a PyTorch file", wanted="an npz file", do="name it FILE.pt and convert it"
        )
    if "experts" in arrays:
        return _count_trace(file, document)
    refuse_set(document)
    found = [name for name in ("counts", *PHASES) if name in arrays]
    if not found or (len(found) > 1 and "counts" in found):
        got = f"arrays {', '.join(list(arrays)[:5]) or 'none'}"
        raise HistogramError(document.what, got=got, wanted="counts, or decode and prefill")
    return _of_arrays(arrays, found, document, model_layers)


def _of_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], found: Sequence[str], document: Document, model_layers: Sequence[int] | None
) -> Read:
    """Counts by phase, numbered by the file where it says its layers, with the facts in `meta`."""
    what, meta = document.what, _meta(arrays.get("meta"), what=document.what)
    phase_of, notices = {name: name for name in found}, list[Notice]()
    if found == ["counts"]:
        phase_of["counts"], notices = spoken_phase("unknown", document)
    normalised = optional_flag(meta, "normalised", what=what)
    counts_of = {
        phase: _scaled(arrays[name], what=what) if normalised else _added_steps(arrays[name], phase=phase, what=what)
        for name, phase in phase_of.items()
    }
    shapes = {counts.shape for counts in counts_of.values()}
    if len(shapes) > 1:
        raise HistogramError(what, got=f"arrays of shapes {sorted(shapes)}", wanted="one shape")
    rows, layers, said = _rows(arrays.get("layers"), _used([*counts_of.values()]), document, model_layers)
    identity = identity_with(layers, num_experts=shapes.pop()[1], model=meta, what=what)
    tokens = optional_object(meta, "tokens")
    phases = {
        phase: PhaseCounts(counts=counts[rows], tokens=optional_integer(tokens, phase, what=what))
        for phase, counts in counts_of.items()
    }
    histogram = Histogram(
        identity=identity,
        phases=phases,
        normalised=normalised,
        name=optional_text(meta, "name"),
        quantisation=optional_text(meta, "quantisation"),
        source=optional_object(meta, "source"),
    )
    return histogram, notices + said, "layers" in arrays


def _scaled(array: npt.NDArray[Any], *, what: str) -> npt.NDArray[np.float64]:
    """Counts that may be fractions; `validate` checks their cells."""
    if array.ndim != 2 or array.dtype.kind not in "iuf" or 0 in array.shape or array.size > MAX_CELLS:
        raise HistogramError(what, got=f"{array.dtype} {list(array.shape)}", wanted="numbers [layers, experts]")
    return array.astype(np.float64)


def _rows(
    layers: npt.NDArray[Any] | None, used: Sequence[bool], document: Document, model_layers: Sequence[int] | None
) -> tuple[list[int], tuple[int, ...], list[Notice]]:
    """Rows and their decoder indices: the file's, else the user's or the model's."""
    if layers is None:
        return number_rows(used, document, model_layers=model_layers)
    refuse_layers(document)
    listed = layers.tolist() if layers.dtype.kind in "iu" and layers.ndim == 1 else None
    if listed is None or len(listed) != len(used) or listed != sorted(set(listed)) or listed[0] < 0:
        got, wanted = shortened(listed), f"{len(used)} ascending decoder indices"
        raise HistogramError(f"{document.what}, layers", got=got, wanted=wanted)
    return list(range(len(used))), tuple(listed), []


def _count_trace(file: Path, document: Document) -> Read:
    """A trace's counts; a set is one of its domains."""
    refuse_layers(document)
    try:
        trace, notices = load_trace(file)
        num_experts = document.given.num_experts or trace.identity.num_experts
        return histogram_of(trace, num_experts=num_experts, domain=document.chosen), notices, True
    except TraceError as failure:
        raise HistogramError(f"{document.what}: {failure}") from failure


def _load(file: Path, *, what: str) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]]:
    """The array of an npy file, or those of an npz by name; nothing is unpickled."""
    data = read_bytes(file, what="histogram", error=HistogramError)
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except UNREADABLE as failure:
        raise HistogramError(what, got=shortened(why_unreadable(failure)), wanted="an npy or npz file") from failure


def _meta(array: npt.NDArray[Any] | None, *, what: str) -> dict[str, Any]:
    """The JSON object in `meta`, empty where there is none."""
    if array is None:
        return {}
    try:
        meta = json.loads(str(array))
    except (ValueError, RecursionError) as failure:
        raise HistogramError(f"{what}, meta", got=shortened(str(failure)), wanted="JSON") from failure
    if not isinstance(meta, dict):
        raise HistogramError(f"{what}, meta", got=type(meta).__name__, wanted="a JSON object")
    return meta


TABLES: dict[str, Table] = {
    "csv": Table(form="layer,expert,count lines", read=_read_csv),
    "npy": Table(form="an array [steps, layers, experts]", read=_read_npy),
    "npz": Table(form="arrays counts, or decode and prefill, [layers, experts]; or a trace", read=_read_npz),
}
"""By name."""
