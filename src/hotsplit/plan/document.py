"""One histogram file on its way in: what it holds, what the user says about it, and which of its sets is meant.

Under `dialects`, beside `members`: the parsers of all forms share these few decisions. What a file does not say (its
layer numbers, its phase, how many experts there are) is taken from the user or refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotsplit.errors import HistogramError
from hotsplit.notices import Notice
from hotsplit.plan.histogram import PHASES, name_layers
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.members import optional_integer, optional_text, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the user says about a file, for what the file does not say itself."""

    layers: tuple[int, ...] | None = None
    """Decoder index of each row, ascending, for forms without layer numbers."""
    num_experts: int | None = None
    """Routed experts per layer, for forms that may leave unused ones out."""
    phase: str | None = None
    """Phase of counts that do not say theirs; of counts that do, the only one to keep."""
    is_part: bool = False
    """One rank's share of the counts: its totals need not be tokens x top_k, nor its layers all counted."""

    def __post_init__(self) -> None:
        if self.phase is not None and self.phase not in PHASES:
            raise HistogramError("phase", got=repr(self.phase), wanted=" or ".join(PHASES))
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            raise HistogramError("layers", got=shortened(list(self.layers)), wanted="ascending indices, each once")
        if self.num_experts is not None and self.num_experts < 1:
            raise HistogramError("experts", got=str(self.num_experts), wanted="an integer >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One parsed JSON file, before anybody believes it."""

    content: dict[str, Any]
    """The object at the top; empty for a file that is no JSON."""
    what: str
    """The file, for messages: "histogram hist.json"."""
    chosen: str | None = None
    """The set that the user chose with FILE#set."""
    given: Given = field(default_factory=Given)
    """What the user says about it."""


def choose_set(sets: Mapping[str, Any], document: Document) -> str:
    """The set that the user means.

    Args:
        sets: By name; "" where the file has none.
        document: The file.

    Raises:
        HistogramError: None chosen of several, or one that is not there; lists them.
    """
    if document.chosen is None and len(sets) == 1:
        return next(iter(sets))
    if "" in sets:
        refuse_set(document)
    if document.chosen is not None and document.chosen in sets:
        return document.chosen
    got = f"{len(sets)} sets and none chosen" if document.chosen is None else f"no set {document.chosen!r}"
    raise HistogramError(document.what, got=got, wanted=f"FILE#set with one of {', '.join(sets)}", sets=[*sets])


def refuse_set(document: Document) -> None:
    """A set was chosen in a form that has none.

    Raises:
        HistogramError: So it was.
    """
    if document.chosen is not None:
        got = f"#{document.chosen}"
        raise HistogramError(document.what, got=got, wanted="a file with sets", do="leave the # part out")


def refuse_layers(document: Document) -> None:
    """Layer numbers were given for a file that has its own.

    Raises:
        HistogramError: So they were.
    """
    if document.given.layers is not None:
        raise HistogramError(
            document.what, got="a list of layers beside the file's own layer numbers", do="leave --layers out"
        )


def spoken_phase(value: Any, document: Document) -> tuple[str, list[Notice]]:
    """The phase of counts of one phase: the first word rules, "prefill (teacher forced ...)".

    Args:
        value: What the file says; "unknown" where it does not know or has no place for it.
        document: The file, and what the user says.

    Returns:
        The phase; where nobody knows, decode and a notice.

    Raises:
        HistogramError: It is no phase.
    """
    words = value.split() if isinstance(value, str) else []
    if words and words[0] in PHASES:
        return words[0], []
    if words[:1] != ["unknown"]:
        got, wanted = shortened(value), "decode, prefill or unknown"
        raise HistogramError(f"{document.what}, phase", got=got, wanted=wanted)
    if document.given.phase is not None:
        return document.given.phase, []
    text = f"{document.what} does not know its phase: its counts are taken as decode"
    return "decode", [Notice(name="unknown-phase", text=text)]


def identity_with(layers: Sequence[int], *, num_experts: int, model: dict[str, Any], what: str) -> ModelIdentity:
    """An identity with what the file's object of facts says, if its top_k is possible.

    Args:
        layers: Decoder indices of the rows.
        num_experts: Routed experts per layer.
        model: The object that may name `top_k` and `model_type`.
        what: The file, for messages.

    Raises:
        HistogramError: top_k is no integer from 1 to num_experts.
    """
    top_k = optional_integer(model, "top_k", what=what)
    if top_k is not None and not 1 <= top_k <= num_experts:
        raise HistogramError(f"{what}, top_k", got=str(top_k), wanted=f"an integer from 1 to {num_experts}")
    model_type = optional_text(model, "model_type")
    return ModelIdentity(model_type=model_type, layers=tuple(layers), num_experts=num_experts, top_k=top_k)


def number_rows(
    used: Sequence[bool], document: Document, *, model_layers: Sequence[int] | None
) -> tuple[list[int], tuple[int, ...], list[Notice]]:
    """Say which decoder layer each row of a file without layer numbers is.

    The list of layers comes from the user, else from the model at hand. It has one entry per row; or it is shorter and
    the rows are all decoder layers from 0 on: then the rows that it leaves out are dense layers, and must be empty.

    Args:
        used: Whether a row has any counts, per row.
        document: The file, and what the user says.
        model_layers: Decoder indices of the MoE layers of the model at hand, if there is one.

    Returns:
        Rows to take, their decoder indices, and a notice where the model's list was used.

    Raises:
        HistogramError: There is no list, or it does not fit the rows.
    """
    num_rows = len(used)
    layers = document.given.layers or (tuple(model_layers) if model_layers is not None else None)
    if layers is None:
        raise HistogramError(
            document.what,
            got=f"{num_rows} rows without layer numbers",
            wanted="the decoder index of each",
            do=f"convert it with --layers, 0-{max(num_rows - 1, 0)} where every layer has routed experts",
        )
    rows = list(range(num_rows)) if len(layers) == num_rows else [layer for layer in layers if layer < num_rows]
    lost = next((row for row in range(num_rows) if used[row] and row not in set(rows)), None)
    if len(rows) != len(layers) or lost is not None:
        got = f"{num_rows} rows" if lost is None else f"{num_rows} rows, counts in row {lost}"
        wanted = f"one for each of {len(layers)} layers, or all decoder layers with the dense ones empty"
        raise HistogramError(document.what, got=got, wanted=wanted, do="check the list of layers")
    if document.given.layers is not None:
        return rows, layers, []
    text = f"{document.what} has no layer numbers: its rows are taken as the model's {name_layers(layers)}"
    return rows, layers, [Notice(name="layers-from-model", text=text, strict=False)]
