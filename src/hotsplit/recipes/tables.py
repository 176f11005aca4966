"""Tables of a TOML file, believed key by key: every refusal names the file and the key, and the nearest known one.

>>> table = Table({"tp": 4, "tpp": 8}, what="recipe x.toml", where="parallel")
>>> table.integer("tp")
4
>>> table.close()
Traceback (most recent call last):
    ...
hotsplit.errors.ConfigError: recipe x.toml, parallel.tpp: got an unknown key; did you mean tp?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hotsplit.errors import ConfigError
from hotsplit.nearest import nearest

_LONGEST = 80
MAX_GIB = 2**23
"""Eight exbibytes: no machine has more, and all sums stay exact."""


class Table:
    """A table that is taken apart; what is left at the end is unknown.

    Args:
        content: As TOML gave it.
        what: The file, for messages.
        where: Dotted path of the table; empty for the whole file.
    """

    def __init__(self, content: Mapping[str, Any], *, what: str, where: str = "") -> None:
        self._left = dict(content)
        self._known: list[str] = []
        self.what, self.where = what, where

    def refuse(self, key: str, *, got: str, wanted: str | None = None, do: str | None = None) -> NoReturn:
        """Refuse the value of a key.

        Args:
            key: In this table.
            got: What is there.
            wanted: What would be right.
            do: The way out.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.what}, {self._path(key)}", got=got, wanted=wanted, do=do)

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty, unless it may be left out.

        Args:
            key: Its name.
            default: Where the key may be missing; None where it must be there.
        """
        value = self._take(key, default)
        if not isinstance(value, str) or (not value.strip() and default is None):
            self.refuse(key, got=_shown(value), wanted="a text")
        return self._one_line(key, value)

    def optional_text(self, key: str) -> str | None:
        """A text, or None where the key is missing."""
        return self.text(key) if self.has(key) else None

    def integer(self, key: str, *, low: int = 1, default: int | None = None) -> int:
        """An integer.

        Args:
            key: Its name.
            low: The lowest that is allowed.
            default: Where the key may be missing; None where it must be there.
        """
        value = self._take(key, default)
        if type(value) is not int or not low <= value <= 2**53:
            self.refuse(key, got=_shown(value), wanted=f"an integer >= {low}")
        return value

    def optional_integer(self, key: str, *, low: int = 0) -> int | None:
        """An integer, or None where the key is missing."""
        return self.integer(key, low=low) if self.has(key) else None

    def number(self, key: str) -> float:
        """A number of GiB above 0."""
        value = self._take(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_GIB:
            self.refuse(key, got=_shown(value), wanted=f"a number above 0, of GiB and at most {MAX_GIB:,}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None where the key is missing."""
        return self.number(key) if self.has(key) else None

    def truth(self, key: str) -> bool:
        """Whether something is so; not so where the key is missing."""
        value = self._take(key, default=False)
        if not isinstance(value, bool):
            self.refuse(key, got=_shown(value), wanted="true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, or one text; nothing where the key is missing."""
        value = self._take(key, ())
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(one, str) and one.strip() for one in listed):
            self.refuse(key, got=_shown(value), wanted="a list of texts")
        return tuple(self._one_line(key, one) for one in listed)

    def words(self, key: str) -> tuple[str, ...]:
        """What stands behind a flag, as the command line will have it; nothing where the key is missing.

        A text, a number, or a list of them; a table is JSON in one text already.
        """
        value = self._take(key, ())
        listed = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in listed):
            self.refuse(key, got=_shown(value), wanted="a text, a number, or a list of them; leave it out for a switch")
        # what a command line shows is what it says: no escape sequence, and no NUL, which no program can be given
        if not all(str(one).replace("\n", " ").replace("\t", " ").isprintable() for one in listed):
            self.refuse(key, got=_shown(value), wanted="printable characters")
        return tuple(str(one) for one in listed)

    def values(self) -> dict[str, Any]:
        """All that is left, for somebody who knows these keys."""
        left, self._left = self._left, {}
        return left

    def table(self, key: str, *, may_lack: bool = False) -> Table:
        """A table in this one.

        Args:
            key: Its name.
            may_lack: Whether it may be missing, and is then empty.
        """
        value = self._take(key, {} if may_lack else None)
        if not isinstance(value, dict):
            self.refuse(key, got=_shown(value), wanted=f"a table: [{self._path(key)}]")
        return Table(value, what=self.what, where=self._path(key))

    def tables(self, key: str) -> list[Table]:
        """An array of tables; empty where the key is missing."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.refuse(key, got=_shown(value), wanted=f"tables: [[{self._path(key)}]]")
        return [Table(one, what=self.what, where=f"{self._path(key)}[{n}]") for n, one in enumerate(value)]

    def close(self) -> None:
        """Refuse what nobody took.

        Raises:
            ConfigError: A key is not known; names the nearest that is.
        """
        for key in self._left:
            near = nearest(key, self._known)
            self.refuse(key, got="an unknown key", do=f"did you mean {near}?" if near else "leave it out")

    def _take(self, key: str, default: object) -> Any:
        self._known.append(key)
        if key in self._left:
            return self._left.pop(key)
        if default is None:
            raise ConfigError(f"{self.what}, {self._path(key)}", got="nothing", do=f"add {key}{self._near(key)}")
        return default

    def _one_line(self, key: str, value: str) -> str:
        """A text with its blanks folded, fit to be printed."""
        text = " ".join(value.split())
        if not text.isprintable():
            self.refuse(key, got=_shown(value), wanted="printable characters")
        return text

    def has(self, key: str) -> bool:
        """Whether a key is there.

        Args:
            key: Its name.
        """
        self._known.append(key)
        return key in self._left

    def _near(self, key: str) -> str:
        """A key that is there and may be a misspelling of one that is not."""
        near = nearest(key, self._left)
        return f"; is {near} meant for it?" if near else ""

    def _path(self, key: str) -> str:
        key = key if key.isprintable() else ascii(key)
        return f"{self.where}.{key}" if self.where else key


def _shown(value: object) -> str:
    try:
        text = ascii(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits, and TOML has them in base 16
        text = "an integer of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
