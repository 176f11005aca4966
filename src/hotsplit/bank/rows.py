"""Row numbers: which row of a layer is hot, spare or cold, and where every expert starts.

Between the plan and the memory: one numbering for all backends (E experts, H of them hot, F fixed, R rows).

    exclusive   H hot | F fixed | spare | E-H cold     R = E + F + 1        the cold bank holds only the cold experts
    inclusive   H hot | F fixed | spare | E home       R = H + F + 1 + E    the checkpoint keeps every expert: its home
                                                                            row is H + F + 1 + expert, and nothing is
                                                                            written to it

Without swaps (static mode, or a layer that is wholly hot) there is no spare row and cold rows start at H + F.

Fixed rows are those of shared experts that an engine fuses behind the routed ones, under the ids E..E+F-1: every token
uses them, so they lie in fast memory and are never counted, ranked or swapped. Most engines fuse none: F = 0.

    >>> place((2, 0), num_experts=4, spare=True, inclusive=False).row_map
    (1, 3, 0, 4)
    >>> place((2, 0), num_experts=4, spare=True, inclusive=True).row_map
    (1, 4, 0, 6)
    >>> fused = place((2, 0), num_experts=4, spare=True, inclusive=False, fixed=1)
    >>> fused.row_map, fused.fixed_rows, fused.spare_row
    ((1, 4, 0, 5), range(2, 3), 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """The rows of one layer as they stand before the first step."""

    row_map: tuple[int, ...]
    """Row of every routed expert, E of them."""
    spare_row: int | None
    """The hot row that belongs to nobody; None in a layer that cannot swap."""
    home_row: tuple[int, ...] | None
    """Row of every expert in a slow memory that keeps them all (inclusive placement); None where it does not."""
    num_hot: int
    """Hot rows without the fixed ones and the spare, H."""
    num_rows: int
    """All rows, R."""
    num_fixed: int = 0
    """Rows of shared experts that an engine fuses behind the routed ones, F: the expert with id E + i has the i-th."""

    @property
    def fixed_rows(self) -> range:
        """The rows of the ids E..E+F-1, in this order; they never change."""
        return range(self.num_hot, self.num_hot + self.num_fixed)

    @property
    def first_cold(self) -> int:
        """The lowest cold row: rows below it lie in fast memory."""
        return self.num_hot + self.num_fixed + (self.spare_row is not None)


def place(hot: Sequence[int], *, num_experts: int, spare: bool, inclusive: bool, fixed: int = 0) -> LayerRows:
    """Number the rows of one layer.

    Args:
        hot: Hot expert ids in order of preference; they get rows 0..H-1 in this order.
        num_experts: E, without the fused shared ones.
        spare: Whether the layer may swap; a wholly hot or wholly cold layer never does.
        inclusive: Whether slow memory keeps every routed expert.
        fixed: F, shared experts that are fused behind the routed ones.
    """
    num_hot = len(hot)
    has_spare = spare and 0 < num_hot < num_experts
    first_cold = num_hot + fixed + has_spare
    row_map = {expert: row for row, expert in enumerate(hot)}
    cold = [expert for expert in range(num_experts) if expert not in row_map]
    home = tuple(first_cold + expert for expert in range(num_experts)) if inclusive else None
    row_map |= {expert: home[expert] if home else first_cold + i for i, expert in enumerate(cold)}
    return LayerRows(
        row_map=tuple(row_map[expert] for expert in range(num_experts)),
        spare_row=num_hot + fixed if has_spare else None,
        home_row=home,
        num_hot=num_hot,
        num_rows=first_cold + (num_experts if inclusive else len(cold)),
        num_fixed=fixed,
    )
