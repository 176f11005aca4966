"""The PCIe link of a GPU: generation and width, now and at most, and every bridge on the way to the processor.

A link that idles drops to generation 1 to save power, so one that was read idle says little, and whether a copy was under
way is told with it. The slowest link on the way counts: a card with 16 lanes behind a switch that hangs on 4 has 4.

    >>> generation_of("32.0 GT/s PCIe"), generation_of("8 GT/s"), generation_of("Unknown")
    (5, 3, None)
    >>> f"{link_bytes_per_s(5, 16) / 1e9:.1f} GB/s", link_bytes_per_s(None, 16)
    ('63.0 GB/s', None)

Source: transfers per second and line codes of each generation as the PCI Express base specifications have them; names of
the relations between two GPUs as `nvidia-smi topo -m` has them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, fact, first_known, read_text, unknown, whole_number

_TRANSFERS: Final = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9, 7: 128e9}
"""Per second and lane, by generation."""
_MOST_LANES: Final = 32
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One PCIe link."""

    generation: Fact[int]
    """That it runs at."""
    width: Fact[int]
    """Lanes that it runs with."""
    max_generation: Fact[int]
    """That both ends can do."""
    max_width: Fact[int]
    """Lanes that both ends have."""
    is_loaded: bool = False
    """Whether a copy was under way when it was read."""

    @property
    def bytes_per_s(self) -> float | None:
        """What it carries one way, before the overhead of packets; None where it is not known."""
        return link_bytes_per_s(self.generation.value, self.width.value)

    @property
    def most_bytes_per_s(self) -> float | None:
        """What it carries under load: its lanes as they are, which stay when it idles, at its highest generation."""
        best = self.max_generation if self.max_generation.value is not None else self.generation
        return link_bytes_per_s(best.value, self.width.value)

    @property
    def is_narrowed(self) -> bool:
        """Whether it is known to run with fewer lanes than it has, which no idle link does by itself."""
        return (self.width.value or 0) < (self.max_width.value or 0) and self.width.value is not None


def unknown_link(reason: str) -> Link:
    """A link of which nothing is known.

    Args:
        reason: Why.
    """
    nothing: Fact[int] = unknown(reason)
    return Link(generation=nothing, width=nothing, max_generation=nothing, max_width=nothing)


def merged_link(first: Link, second: Link) -> Link:
    """What two sources tell of one link.

    Args:
        first: Counts where it tells something.
        second: Fills in.
    """
    return Link(
        generation=first_known(first.generation, second.generation),
        width=first_known(first.width, second.width),
        max_generation=first_known(first.max_generation, second.max_generation),
        max_width=first_known(first.max_width, second.max_width),
        is_loaded=(first if first.generation.value is not None else second).is_loaded,
    )


def generation_of(text: str) -> int | None:
    """The generation by its transfers per second; None for anything else.

    Args:
        text: As /sys writes it.
    """
    found = re.match(r"\s*([0-9]{1,3}(?:\.[0-9])?) GT/s", text)
    speed = float(found[1]) * 1e9 if found else None
    return next((number for number, transfers in _TRANSFERS.items() if transfers == speed), None)


def as_generation(number: int | None) -> int | None:
    """A number that is a generation, else None.

    Args:
        number: Of a tool.
    """
    return number if number in _TRANSFERS else None


def as_width(number: int | None) -> int | None:
    """A number that is one of lanes, else None: a link that is down has 0 or 63 of them.

    Args:
        number: Of a tool.
    """
    return number if number is not None and 1 <= number <= _MOST_LANES else None


def link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """What a link carries one way, before the overhead of packets; None where one of both is not known.

    Args:
        generation: 1 to 7.
        width: Lanes.
    """
    if generation is None or width is None:
        return None
    # 8b/10b up to generation 2, 128b/130b up to 5, flits of 256 bytes with 242 of content from 6 on.
    code = 0.8 if generation < 3 else 128 / 130 if generation < 6 else 242 / 256
    return _TRANSFERS[generation] * width * code / 8


def read_link(bus_id: str, *, root: Path = ROOT) -> Link:
    """What the kernel says of a device's link.

    Args:
        bus_id: As /sys writes it, "0000:17:00.0".
        root: Where /sys lies; another one only in tests.
    """
    folder = root / "sys/bus/pci/devices" / bus_id

    def speed(name: str) -> Fact[int]:
        text = read_text(folder / name)
        return fact(generation_of(text.value or ""), source=text.source, reason=text.reason or _says(text))

    def lanes(name: str) -> Fact[int]:
        text = read_text(folder / name)
        width = as_width(whole_number(text.value or ""))
        return fact(width, source=text.source, reason=text.reason or _says(text))

    return Link(
        generation=speed("current_link_speed"),
        width=lanes("current_link_width"),
        max_generation=speed("max_link_speed"),
        max_width=lanes("max_link_width"),
    )


def path_to_root(bus_id: str, *, root: Path = ROOT) -> Fact[tuple[str, ...]]:
    """The host bridge, then every PCI bridge, down to a device and without it.

    Args:
        bus_id: As /sys writes it.
        root: Where /sys lies; another one only in tests.
    """
    link = root / "sys/bus/pci/devices" / bus_id
    real = Path(os.path.realpath(link))
    # A plain folder where the kernel has a link tells nothing of what lies above.
    bridges = [part for part in real.parts[:-1] if _ADDRESS.fullmatch(part) or re.fullmatch(r"pci[0-9a-f:]+", part)]
    return fact(tuple(bridges) or None, source=str(link), reason=f"{link} does not lead to a place on the bus")


def slowest_above(path: tuple[str, ...], *, root: Path = ROOT) -> tuple[str, Link] | None:
    """The bridge whose link carries least under load, and that link; None where none of them tells.

    Args:
        path: From path_to_root().
        root: Where /sys lies; another one only in tests.
    """
    links = [(bridge, read_link(bridge, root=root)) for bridge in path if _ADDRESS.fullmatch(bridge)]
    told = [(bridge, link) for bridge, link in links if link.most_bytes_per_s is not None]
    return min(told, key=lambda one: one[1].most_bytes_per_s or 0, default=None)


def relation(one: tuple[str, ...], other: tuple[str, ...], *, nodes: tuple[int | None, int | None]) -> str | None:
    """How two devices reach each other, in the words of `nvidia-smi topo -m`; None where the bus does not tell.

    Args:
        one: Its path_to_root().
        other: Of the other one.
        nodes: NUMA nodes of both.

    >>> switch = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    >>> relation((*switch, "0000:02:00.0"), (*switch, "0000:02:01.0"), nodes=(0, 0))
    'PIX'
    >>> relation(("pci0000:00", "0000:00:01.0"), ("pci0000:80", "0000:80:01.0"), nodes=(0, 1))
    'SYS'
    """
    if not one or not other:
        return None
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == 0:
        if None in nodes:
            return None
        return "NODE" if nodes[0] == nodes[1] else "SYS"
    if shared == 1:
        return "PHB"
    # Below the last shared bridge each side has at most one more in a single switch.
    return "PIX" if max(len(one), len(other)) - shared <= 1 else "PXB"


RELATIONS: Final[Mapping[str, str]] = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, below one host bridge",
    "PHB": "one PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
"""What each word means; NV is followed by a number of links."""


def _says(text: Fact[str]) -> str:
    return f"{text.source} says {' '.join((text.value or '').split())[:40]!r}"
