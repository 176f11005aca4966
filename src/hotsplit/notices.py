"""Notices: what a user must hear although the work goes on.

Pure functions return notices beside their results; the edge (command line, engine) prints or logs them. A notice
about an input is *strict*: HOTSPLIT_STRICT=1 turns it into an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotsplit.errors import HotsplitError


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One thing to be said aloud.

    Attributes are documented below each field.
    """

    name: str
    """A stable name in kebab case, for tests and for searching the docs."""
    text: str
    """One line: what was found and what was done about it."""
    strict: bool = True
    """Whether strict mode refuses instead (True for doubtful inputs, False for plain facts)."""

    def __str__(self) -> str:
        return f"{self.text} [{self.name}]"


def enforce(notices: Iterable[Notice], *, strict: bool, error: type[HotsplitError]) -> None:
    """Raise the first strict notice as an error when strict mode is on.

    Args:
        notices: What was noticed.
        strict: HOTSPLIT_STRICT.
        error: Class to raise.

    Raises:
        HotsplitError: Of class `error`, in strict mode, with the notice's text.
    """
    for notice in notices:
        if strict and notice.strict:
            raise error(str(notice), do="mend the input or set HOTSPLIT_STRICT=0", notice=notice)
