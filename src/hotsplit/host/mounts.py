"""Which file system, and which device, a folder lies on: a read rate means nothing without it.

    >>> line = "36 35 98:0 / /data rw,noatime master:1 - ext4 /dev/nvme0n1p1 rw,errors=continue"
    >>> mount_in(line, Path("/data/models"))
    Mount(folder=PosixPath('/data'), kind='ext4', device='/dev/nvme0n1p1')

Source: fields of mountinfo as the Linux kernel documents them (filesystems/proc).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, fact, read_text

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Where files lie."""

    folder: Path
    """Where it is mounted."""
    kind: str
    """Type of the file system, "ext4"."""
    device: str
    """What it lies on, by its own word: "/dev/nvme0n1p1", "overlay", "server:/export"."""

    @property
    def is_memory(self) -> bool:
        """Whether its files are memory."""
        return self.kind in _IN_MEMORY

    def __str__(self) -> str:
        return f"{self.device} ({self.kind}, at {self.folder})"


def mount_of(folder: Path, *, root: Path = ROOT) -> Fact[Mount]:
    """What a folder lies on.

    Args:
        folder: That is there.
        root: Where /proc lies; another one only in tests.
    """
    text = read_text(root / "proc/self/mountinfo")
    found = mount_in(text.value or "", Path(os.path.realpath(folder)))
    return fact(found, source=text.source, reason=text.reason or f"{text.source} names no mount of it")


def mount_in(mountinfo: str, folder: Path) -> Mount | None:
    """The mount of a folder; None where there is none in the list.

    Args:
        mountinfo: Text of /proc/self/mountinfo.
        folder: A real path.
    """
    mounts = [mount for line in mountinfo.splitlines() if (mount := _parsed(line)) is not None]
    # Of mounts on the same folder the last one counts: it lies over the others.
    above = [(len(mount.folder.parts), i) for i, mount in enumerate(mounts) if folder.is_relative_to(mount.folder)]
    return mounts[max(above)[1]] if above else None


def _parsed(line: str) -> Mount | None:
    before, divider, after = line.partition(" - ")
    places, kinds = before.split(" "), after.split(" ")
    if not divider or len(places) < 5 or len(kinds) < 2:
        return None
    return Mount(folder=Path(_unescaped(places[4])), kind=kinds[0], device=_unescaped(kinds[1]))


def _unescaped(text: str) -> str:
    """Blanks and the like stand as three octal digits."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found[1], 8)), text)
