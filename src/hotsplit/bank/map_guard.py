"""Whether all that was read of mapped files was theirs: asked after a use, since before it nobody can know.

Pages are looked at before a row is computed (mapped.py), but one can go again until it is: thrown out by the kernel and then
not to be read, or cut off with the end of its file. The native guard makes zeros of it where it would end the process, and:

    begin            a layer's cold rows are asked for: files that broke earlier are mapped again
    ... compute ...
    require_whole    nothing has broken meanwhile and no file is shorter; else one BankError, and nobody sees the result

Without native code such a page ends the process; that a file has become shorter is found all the same: its last page goes on
in zeros without any signal.

    a step          MapGuard, on the thread that runs steps
    another thread  Reading, for what it copies
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hotsplit.bank import guard_library
from hotsplit.bank.guard_library import GuardLibrary, is_whole
from hotsplit.bank.source import Span
from hotsplit.errors import BankError, HotsplitError


class GuardedMemory(mmap.mmap):
    """A mapping that the guard forgets before it is unmapped: from then on its addresses may be anybody's."""

    _forget: Callable[[], None] | None = None

    def watch(self, library: GuardLibrary | None, *, address: int) -> int | None:
        """Have the guard watch it, for as long as anyone holds a view of it.

        Args:
            library: The guard; None for none.
            address: Of the first byte.

        Returns:
            Its number there; None where it is not watched.
        """
        number = -1 if library is None else library.add(address, len(self))
        if library is None or number < 0:
            return None
        self._forget = partial(library.drop, number)
        return number

    def __del__(self) -> None:
        if self._forget is not None:
            self._forget()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GuardedMap:
    """One mapped file."""

    path: Path
    """Of the file."""
    memory: GuardedMemory
    """The mapping, all of the file."""
    number: int | None
    """In the guard; None where it is not watched."""

    def require_length(self) -> None:
        """Refuse a file that has become shorter.

        Raises:
            BankError: It has.
        """
        size = self.memory.size()
        if size < len(self.memory):
            raise self.unreadable(f"a file of {size} bytes now")

    def unreadable(self, reason: str) -> BankError:
        """The one error of a file that could not be read when it had to be.

        Args:
            reason: Why not.
        """
        return BankError(
            f"cannot read {self.path}",
            got=reason,
            wanted=f"the {len(self.memory)} bytes that were there at load",
            do="check the disk that holds the model, and load it again",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A use of some files outside of the steps' thread."""

    library: GuardLibrary | None
    """The guard."""
    maps: Sequence[tuple[GuardedMap, int]]
    """What is read, and its state before."""

    def require_whole(self) -> None:
        """Refuse what was read since, where it was not the files' own.

        Raises:
            BankError: A file broke, or is shorter now.
        """
        for one, state in self.maps:
            _require_state(one, state=state, library=self.library)
            one.require_length()


class MapGuard:
    """The mapped files of one model; all but reading() belongs to the thread that runs the steps.

    Args:
        maps: The files.
    """

    def __init__(self, maps: Sequence[GuardedMap]) -> None:
        self._library = guard_library.load()
        self._maps = list(maps)
        self._used: set[GuardedMap] = set()  # since begin(); any thread adds to it
        self._breaks = -1  # that the states below are of
        self._states: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Before files are read: map those again that broke.

        Raises:
            BankError: That cannot be.
        """
        self._used.clear()
        if self._library is None:
            return
        breaks = self._library.begin()
        if breaks != self._breaks:  # of any model's
            self._states = [_made_whole(one, library=self._library) for one in self._maps]
            self._breaks = breaks

    def use(self, file: int) -> None:
        """Tell that a file is read, so that its length is looked at afterwards.

        Args:
            file: Its index.

        Raises:
            BankError: The banks are closed.
        """
        self._used.add(self._map(file))

    def require_whole(self) -> None:
        """After they were read: refuse all of it where a part was not the files' own.

        Raises:
            BankError: A file broke since begin(), or is shorter now.
        """
        if self._library is not None and self._library.breaks() != self._breaks:
            for one, state in zip(self._maps, self._states, strict=False):  # none where another thread closes
                _require_state(one, state=state, library=self._library)
        for one in list(self._used):
            one.require_length()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a use outside of steps: what came of lost pages is no other error than that they are lost.

        Raises:
            BankError: A file broke since begin(), or is shorter now.
        """
        try:
            yield
        except HotsplitError:
            self.require_whole()
            raise
        self.require_whole()

    def reading(self, spans: Iterable[Span]) -> Reading:
        """Before another thread reads.

        Args:
            spans: What.

        Raises:
            BankError: A file is broken, or the banks are closed.
        """
        maps, library = [self._map(file) for file in {span.file for span in spans}], self._library
        states = [0 if library is None or one.number is None else library.state(one.number) for one in maps]
        for one, state in zip(maps, states, strict=True):
            if not is_whole(state):  # to be mapped again by the thread that runs the steps
                raise _broken(one, library=library)
        return Reading(library=library, maps=tuple(zip(maps, states, strict=True)))

    def close(self) -> None:
        """Let go of the files; each is watched for as long as anyone holds a view of it."""
        self._maps = []
        self._used = set()

    def _map(self, file: int) -> GuardedMap:
        try:
            return self._maps[file]
        except IndexError:  # another thread has closed them
            raise BankError("the banks are closed", do="load the model again") from None


def _made_whole(one: GuardedMap, *, library: GuardLibrary) -> int:
    """A file's state once it is whole; mapped again where it was not."""
    if one.number is None:
        return 0
    state = library.state(one.number)
    if is_whole(state):
        return state
    failure = library.mend(one.number)
    state = library.state(one.number)
    if not is_whole(state):
        raise one.unreadable(f"no mapping of it again: {os.strerror(failure)}")
    return state


def _require_state(one: GuardedMap, *, state: int, library: GuardLibrary | None) -> None:
    if library is not None and one.number is not None and library.state(one.number) != state:
        raise _broken(one, library=library)


def _broken(one: GuardedMap, *, library: GuardLibrary | None) -> BankError:
    at = None if library is None or one.number is None else library.broken_at(one.number)
    size = one.memory.size()
    length = f", in a file of {size} bytes now" if size < len(one.memory) else ""
    return one.unreadable(f"nothing at byte {at} when it was used{length}")
