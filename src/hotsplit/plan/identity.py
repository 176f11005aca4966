"""Who a histogram or a plan was made for, and whether that is the model at hand.

Stands at the head of the flow: every file carries an identity, and every reader compares it before it believes
a number.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hotsplit.errors import PlanMismatchError
from hotsplit.notices import Notice

MAX_INTEGER = 2**53
"""The largest integer that a file may hold: up to it float64, and so every JSON parser, has each one exactly."""
MAX_CELLS = 2**24
"""The most layers x experts that a file may claim: a hundred times any model, and small enough to allocate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """The facts that must agree before counts of one model may steer another."""

    model_type: str | None = None
    """Architecture as config.json names it, None where a file does not say."""
    layers: tuple[int, ...] | None = None
    """Decoder indices of the MoE layers, ascending; None where a file does not say."""
    num_experts: int | None = None
    """Routed experts per MoE layer."""
    top_k: int | None = None
    """Experts chosen per token."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict; layers become a list."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value["layers"] = None if self.layers is None else list(self.layers)
        return value


def differences(theirs: ModelIdentity, ours: ModelIdentity) -> tuple[list[str], list[str]]:
    """Compare two identities field by field.

    Args:
        theirs: Of the file.
        ours: Of the model at hand.

    Returns:
        Fields that differ, as "top_k is 8, not 6"; and names of the fields that one side does not carry.
    """
    differing, unknown = [], []
    for field in fields(ModelIdentity):
        a, b = getattr(theirs, field.name), getattr(ours, field.name)
        if a is None or b is None:
            unknown.append(field.name)
        elif a != b:
            differing.append(f"{field.name} is {_short(a)}, not {_short(b)}")
    return differing, unknown


def require_same(theirs: ModelIdentity, ours: ModelIdentity, *, what: str, force: bool = False) -> list[Notice]:
    """Refuse a file of another model.

    Args:
        theirs: Of the file.
        ours: Of the model at hand.
        what: The file, for the message: "histogram hist.json".
        force: Use it all the same, with a notice.

    Returns:
        Notices: fields that could not be compared, and what was forced.

    Raises:
        PlanMismatchError: A field differs and `force` is off.
    """
    differing, unknown = differences(theirs, ours)
    if differing and not force:
        raise PlanMismatchError(
            f"{what} was made for another model",
            got="; ".join(differing),
            do="make one for this model, or pass --force to a command that has it",
            differing=differing,
        )
    notices = []
    if differing:
        text = f"{what} was made for another model and is used because of --force: {'; '.join(differing)}"
        notices.append(Notice(name="identity-forced", text=text, strict=False))
    if unknown:
        text = f"{what} does not carry {', '.join(unknown)}: not compared"
        notices.append(Notice(name="identity-not-compared", text=text, strict=False))
    return notices


def _short(value: object) -> str:
    """Layer lists are long: name their ends and their number."""
    if isinstance(value, tuple) and len(value) > 4:
        return f"{value[0]}..{value[-1]} ({len(value)} layers)"
    return str(list(value)) if isinstance(value, tuple) else str(value)
