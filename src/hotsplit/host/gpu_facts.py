"""What is known of a GPU, each fact with its source or the reason it is unknown: what NVML, nvidia-smi and /sys tell it in.

>>> bus_id_of("00000000:17:00.0"), bus_id_of(b"00000009:01:00.0"), bus_id_of("garbage")
('0000:17:00.0', '0009:01:00.0', None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hotsplit.host.asking import Fact, unknown
from hotsplit.host.links import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One GPU."""

    index: int
    """As the driver counts on this host, each once; CUDA_VISIBLE_DEVICES changes it for CUDA."""
    bus_id: str
    """As /sys writes it, "0000:17:00.0"."""
    name: Fact[str]
    """Of the product."""
    memory_bytes: Fact[int]
    """Of its own."""
    link: Link
    """Its PCIe link."""
    numa_node: Fact[int]
    """That it hangs on."""
    is_told: bool = True
    """Whether a driver tells of it; else it is known from the bus alone."""
    path: tuple[str, ...] = ()
    """Host bridge and bridges above it; empty where the bus does not tell."""
    slowest: tuple[str, Link] | None = None
    """The bridge above it whose link carries least, and that link; None where none tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuList:
    """What was found."""

    gpus: tuple[GpuFacts, ...] = ()
    """In the driver's order."""
    driver: Fact[str] = field(default_factory=lambda: unknown("no driver answers"))
    """Version of the driver."""
    reason: str = ""
    """Why there is none, or no more is known of them; empty where all sources answered."""

    @property
    def is_silent(self) -> bool:
        """Whether no driver answered, so that an empty list does not prove that there is no GPU."""
        return self.driver.value is None


def bus_id_of(text: str | bytes) -> str | None:
    """A place on the bus as /sys writes it; None where it is none.

    Args:
        text: As NVML, nvidia-smi or CUDA write it, with a domain of 4 or 8 digits in either case.
    """
    plain = text.decode("ascii", errors="replace") if isinstance(text, bytes) else text
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", plain.strip("\0 \n").lower())
    return f"{int(found[1], 16):04x}:{found[2]}" if found else None
