"""Where a worker's memory lies, from the kernel's own books."""

from __future__ import annotations

import threading
from pathlib import Path

_PERIOD_S = 0.02


class Memory:
    """Anonymous memory from the moment a worker starts to load until it makes its KV cache."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        """Bytes: anonymous before, at the peak, and when all is loaded."""
        self._loaded = threading.Event()

    def start(self) -> None:
        """Loading begins: watch."""
        self.found["before"] = self.found["peak"] = anonymous_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """All is loaded, and the KV cache comes next."""
        self._loaded.set()
        self.found["loaded"] = anonymous_bytes()
        self.found |= {f"loaded_{name}": value for name, value in banks().items()}

    def _watch(self) -> None:
        while not self._loaded.wait(_PERIOD_S):
            self.found["peak"] = max(self.found["peak"], anonymous_bytes())


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def banks() -> dict[str, int]:
    """Nameless files mapped shared, as bank files are: bytes in all, resident, and held as private copies."""
    found = {"bank_size": 0, "bank_resident": 0, "bank_anonymous": 0}
    names = {"Size:": "bank_size", "Rss:": "bank_resident", "Anonymous:": "bank_anonymous"}
    is_bank = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            is_bank = line.endswith(" (deleted)") and rest[0].startswith("rw-s") and "/dev/shm" not in line
        elif is_bank and first in names:
            found[names[first]] += int(rest[0]) * 1024
    return found
