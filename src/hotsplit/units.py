"""Units: bytes are bytes in the code, GiB and MiB where a person reads or writes them."""

from __future__ import annotations

from typing import Final

KIB: Final = 2**10
"""Bytes."""
MIB: Final = 2**20
"""Bytes."""
GIB: Final = 2**30
"""Bytes."""


def gib(num_bytes: int) -> str:
    """Bytes as a person reads them: GiB, below one MiB, and below a tenth of that KiB or bytes.

    Args:
        num_bytes: Bytes.

    >>> gib(3 * 2**29)
    '1.500 GiB'
    >>> gib(48 * 2**20)
    '48.0 MiB'
    >>> gib(24 * 2**10), gib(1023), gib(0)
    ('24.0 KiB', '1023 bytes', '0.0 MiB')
    """
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.3f} GiB"
    if abs(num_bytes) >= MIB // 10 or num_bytes == 0:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / KIB:.1f} KiB" if abs(num_bytes) >= KIB else f"{num_bytes} bytes"
