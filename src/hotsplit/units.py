"""Units: bytes are bytes in the code, GiB and MiB where a person reads or writes them."""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20
"""Bytes."""
GIB: Final = 2**30
"""Bytes."""


def gib(num_bytes: int) -> str:
    """Bytes as a person reads them, with three significant places below one GiB.

    Args:
        num_bytes: Bytes.

    >>> gib(3 * 2**29)
    '1.500 GiB'
    >>> gib(48 * 2**20)
    '48.0 MiB'
    """
    return f"{num_bytes / GIB:.3f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"
