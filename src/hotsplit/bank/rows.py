"""Row numbers: which row of a layer is hot, spare or cold, and where every expert starts.

Between the plan and the memory: one numbering for all backends (E experts, H of them hot, R rows).

    exclusive   0..H-1 hot | H spare | H+1..E cold         R = E + 1    the cold bank holds only the cold experts
    inclusive   0..H-1 hot | H spare | H+1..H+E home       R = H+1+E    the checkpoint keeps every expert: its home row
                                                                        is H+1+expert, and nothing is written to it

Without swaps (static mode, or a layer that is wholly hot) there is no spare row and cold rows start at H.

    >>> place((2, 0), num_experts=4, spare=True, inclusive=False).row_map
    (1, 3, 0, 4)
    >>> place((2, 0), num_experts=4, spare=True, inclusive=True).row_map
    (1, 4, 0, 6)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """The rows of one layer as they stand before the first step."""

    row_map: tuple[int, ...]
    """Row of every expert, E of them."""
    spare_row: int | None
    """The hot row that belongs to nobody; None in a layer that cannot swap."""
    home_row: tuple[int, ...] | None
    """Row of every expert in a slow memory that keeps them all (inclusive placement); None where it does not."""
    num_hot: int
    """Hot rows without the spare, H."""
    num_rows: int
    """All rows, R."""

    @property
    def first_cold(self) -> int:
        """The lowest cold row: rows below it lie in fast memory."""
        return self.num_hot + (self.spare_row is not None)


def place(hot: Sequence[int], *, num_experts: int, spare: bool, inclusive: bool) -> LayerRows:
    """Number the rows of one layer.

    Args:
        hot: Hot expert ids in order of preference; they get rows 0..H-1 in this order.
        num_experts: E.
        spare: Whether the layer may swap; a wholly hot or wholly cold layer never does.
        inclusive: Whether slow memory keeps every expert.
    """
    num_hot = len(hot)
    has_spare = spare and 0 < num_hot < num_experts
    first_cold = num_hot + has_spare
    row_map = {expert: row for row, expert in enumerate(hot)}
    cold = [expert for expert in range(num_experts) if expert not in row_map]
    home = tuple(first_cold + expert for expert in range(num_experts)) if inclusive else None
    row_map |= {expert: home[expert] if home else first_cold + i for i, expert in enumerate(cold)}
    return LayerRows(
        row_map=tuple(row_map[expert] for expert in range(num_experts)),
        spare_row=num_hot if has_spare else None,
        home_row=home,
        num_hot=num_hot,
        num_rows=first_cold + (num_experts if inclusive else len(cold)),
    )
