"""The known name that a misspelt one is meant for, where one is near enough to be worth offering.

>>> nearest("mimo", ["glm-5.3", "mimo-v2.6-pro"]), nearest("topk", ["top_k"]), nearest("foo", ["mimo-v2.6-pro"])
('mimo-v2.6-pro', 'top_k', None)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_LETTERS: Final = 3
"""Of the beginning of a name; fewer begin anything."""
_CUTOFF: Final = 0.65
"""Of difflib's ratio: what is less alike only looks like mockery."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find a known name that begins with a word, or is spelt nearly like it.

    Args:
        word: As it was typed; capitals do not matter.
        known: Names.

    Returns:
        One of them; None where none is near.
    """
    by_folded = {name.casefold(): name for name in known}
    folded = word.casefold()
    if len(folded.strip("-_")) >= _LEAST_LETTERS:
        begun = sorted(name for name in by_folded if name.startswith(folded))
        if begun:
            return by_folded[begun[0]]
    return next((by_folded[name] for name in difflib.get_close_matches(folded, by_folded, n=1, cutoff=_CUTOFF)), None)
