"""What a race has found so far, on disk: a run that breaks off is taken up by the next one with the same settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotsplit.files import write_atomic


class Ledger:
    """One race's results by entry, each written as soon as there is one.

    Args:
        folder: Its own; the name ends in .partial.
        settings: What must be equal for earlier results to count.
    """

    def __init__(self, folder: Path, *, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, dict(settings)
        self._found: dict[str, dict[str, Any]] = {}
        self.note: str | None = None
        """One line where an earlier run's results were found."""
        if self._file.exists():
            self._take_up()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def _file(self) -> Path:
        return self._folder / "found.json"

    def _take_up(self) -> None:
        earlier = json.loads(self._file.read_text(encoding="utf-8"))
        if earlier["settings"] == json.loads(json.dumps(self._settings)):
            self._found = earlier["found"]
            self.note = f"{self._folder}: {len(self._found)} results of a run that broke off are taken up"
        else:
            shutil.rmtree(self._folder)
            self.note = f"{self._folder}: the results of a run with other settings or other code were dropped"

    def get(self, key: str) -> dict[str, Any] | None:
        """An entry's result, or None.

        Args:
            key: The entry.
        """
        return self._found.get(key)

    def put(self, key: str, result: Mapping[str, Any]) -> None:
        """Keep a result, on disk at once.

        Args:
            key: The entry.
            result: Plain JSON.
        """
        self._found[key] = dict(result)
        state = {"settings": self._settings, "found": self._found}
        write_atomic(self._file, json.dumps(state).encode())

    def logits_file(self, key: str) -> Path:
        """Where an entry's kept logits lie.

        Args:
            key: The entry.
        """
        return self._folder / ("".join(letter if letter.isalnum() else "-" for letter in key) + ".npy")

    def logits(self, key: str) -> Any:
        """An entry's kept logits, [T, V], float32; None where it has none.

        Args:
            key: The entry.
        """
        path = self.logits_file(key)
        return np.load(path) if path.exists() else None

    def close(self) -> None:
        """Remove everything: the result is written."""
        shutil.rmtree(self._folder)
