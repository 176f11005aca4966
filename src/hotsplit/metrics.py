"""The numbers that a running engine shows: their names, a snapshot of them, and the update line.

Decides what each number is called, everywhere alike: in /metrics, in a run's snapshot files and in the log. Stands at
the end of the flow: `counters -> snapshot -> metrics`. An engine makes a snapshot per rank and update; whoever exports
it takes `to_samples()`.

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from hotsplit.errors import HotsplitError
from hotsplit.files import canonical_json, read_json, write_atomic

PHASES: Final = ("decode", "prefill")

_FORMAT: Final = "hotsplit-metrics"
_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One exported name."""

    name: str
    """As exported."""
    kind: Literal["counter", "gauge"]
    """A counter only grows; a gauge is the state at the last update."""
    unit: str
    """What one of it is."""
    labels: tuple[str, ...] = ()
    """Labels beside `rank`, which every sample carries."""
    meaning: str
    """One line of help."""


def _counter(name: str, unit: str, meaning: str, *, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"hotsplit_{name}_total", kind="counter", unit=unit, labels=labels, meaning=meaning)


def _gauge(name: str, unit: str, meaning: str, *, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"hotsplit_{name}", kind="gauge", unit=unit, labels=labels, meaning=meaning)


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        _counter("tokens", "tokens", "Tokens that went through the model.", labels=("phase",)),
        _counter("routed_pairs", "pairs", "Routed (token, expert) pairs of all layers.", labels=("phase",)),
        _counter("hit_pairs", "pairs", "Routed pairs that a hot expert served.", labels=("phase",)),
        _counter("touched_bytes", "bytes", "Bytes of distinct experts touched per step, summed.", labels=("bank",)),
        _counter("kept_bytes", "bytes", "Of the cold bytes touched, those that still lay in a slot."),
        _counter("steps", "steps", "Engine steps."),
        _counter("swaps", "swaps", "Swaps by result; refused ones found their layer busy.", labels=("result",)),
        _counter("swap_bytes", "bytes", "Bytes copied by swaps."),
        _counter("shifts", "shifts", "Shifts of the traffic that the adaptive schedule has acted upon."),
        _counter("update_failures", "updates", "Updates that failed; the third in a row stops the engine."),
        _gauge("hot_bytes", "bytes", "Bytes that hotsplit holds in fast memory."),
        _gauge("host_bytes", "bytes", "Bytes of cold rows in slow memory."),
        _gauge("budget_bytes", "bytes", "Bytes that hotsplit may hold in fast memory."),
        _gauge("hit_ratio_window", "ratio", "Hit rate of the last window."),
        _gauge("byte_hit_ratio_window", "ratio", "Touched bytes that were hot, of all touched, in the last window."),
        _gauge("kept_ratio_window", "ratio", "Touched bytes that lay in slots, of all touched, in the last window."),
        _gauge("oracle_ratio_window", "ratio", "Hit rate that the reachable oracle had in the last window."),
        _gauge("drift_ratio", "ratio", "Distance of the live shares from the plan's, 0 to 1."),
        _gauge("update_seconds", "seconds", "What the last update cost."),
        _gauge("info", "1", "Always 1; the labels say what runs.", labels=("version", "plan_hash", "mode", "backend")),
    )
}
"""Every exported metric by name; each also carries the label `rank`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One exported number."""

    name: str
    """A name of METRICS."""
    labels: Mapping[str, str]
    """The metric's labels and `rank`."""
    value: float
    """In the metric's unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSnapshot:
    """All numbers of one rank at one moment.

    Raises:
        HotsplitError: A number is negative or no integer, a ratio is outside [0, 1], a phase is unknown, or more pairs
            hit than were routed.
    """

    rank: int
    """The worker's rank."""
    version: str
    """Of hotsplit."""
    plan_hash: str
    """SHA-256 of the plan's bytes, hexadecimal."""
    mode: Literal["static", "dynamic"]
    """Whether the hot experts follow the traffic."""
    backend: str
    """Which kind of rows holds the experts, "cpu-pointers" for one."""
    tokens: Mapping[str, int]
    """Tokens so far, by phase; a phase without traffic may be absent, here and below."""
    pairs: Mapping[str, int]
    """Routed pairs so far, by phase."""
    hit_pairs: Mapping[str, int]
    """Routed pairs so far that a hot expert served, by phase."""
    touched_hot_bytes: int
    """Bytes of distinct hot experts touched per step, summed over the steps."""
    touched_cold_bytes: int
    """The same of cold experts."""
    kept_bytes: int = 0
    """Of these, bytes that still lay in a slot when the step asked for them; 0 where there are no slots."""
    steps: int
    """Engine steps so far."""
    swaps_done: int
    """Swaps that were published."""
    swaps_refused: int
    """Swaps that an update wanted in a layer that was still busy."""
    swaps_failed: int
    """Swaps whose copy failed."""
    swap_bytes: int
    """Bytes copied by swaps."""
    update_failures: int
    """Updates that failed."""
    shifts: int = 0
    """Shifts of the traffic that the adaptive schedule has acted upon."""
    hot_bytes: int
    """Bytes held in fast memory."""
    host_bytes: int
    """Bytes of cold rows in slow memory."""
    budget_bytes: int
    """Bytes that may be held in fast memory."""
    hit_ratio_window: float | None = None
    """Hit rate of the last window, of decode, or of prefill where there was no decode. None before the first update, as
    are the others of a window."""
    byte_hit_ratio_window: float | None = None
    """Byte hit rate of the last window."""
    kept_ratio_window: float | None = None
    """Touched bytes that lay in slots, of all touched, in the last window; None also where there are no slots."""
    oracle_ratio_window: float | None = None
    """Hit rate of the reachable oracle in the last window."""
    drift_ratio: float | None = None
    """Mean over layers of half the L1 distance between the live shares and the plan's."""
    update_seconds: float | None = None
    """What the last update cost, in seconds."""
    counts: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    """Routed pairs so far by phase, decoder layer index and expert: phase -> layer -> [E]."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type == "int" and not _is_count(value):
                raise _wrong(setting.name, value, wanted="an integer >= 0")
            if setting.type == "float | None" and value is not None:
                _require_between(setting.name, value, high=float("inf") if setting.name.endswith("_seconds") else 1.0)
        if self.mode not in ("static", "dynamic"):
            raise _wrong("mode", self.mode, wanted="static or dynamic")
        for name in ("tokens", "pairs", "hit_pairs"):
            _require_phases(name, getattr(self, name))
        _require_phases("counts", {phase: _total(phase, layers) for phase, layers in self.counts.items()})
        for phase, hits in self.hit_pairs.items():
            if hits > self.pairs.get(phase, 0):
                raise _wrong(f"hit_pairs[{phase}]", hits, wanted=f"at most pairs[{phase}]")
        if self.kept_bytes > self.touched_cold_bytes:
            raise _wrong("kept_bytes", self.kept_bytes, wanted="at most touched_cold_bytes")

    def to_json(self) -> dict[str, Any]:
        """A plain dict, as it stands in a snapshot file; layer keys become strings."""
        numbers = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in ("tokens", "pairs", "hit_pairs"):
            numbers[name] = dict(numbers[name])
        numbers["counts"] = {
            phase: {str(layer): list(counts) for layer, counts in layers.items()}
            for phase, layers in self.counts.items()
        }
        return {"format": _FORMAT, "version": _VERSION, "snapshot": numbers}

    @classmethod
    def from_json(cls, value: object, *, what: str = "snapshot") -> MetricsSnapshot:
        """The inverse of `to_json`.

        Args:
            value: A parsed snapshot file.
            what: The file, for the message.

        Raises:
            HotsplitError: It is no snapshot, of another version, or lacks or adds a field.
        """
        if not isinstance(value, dict) or value.get("format") != _FORMAT or value.get("version") != _VERSION:
            raise HotsplitError(what, got="something else", wanted=f"a {_FORMAT} file of version {_VERSION}")
        try:
            numbers = dict(value["snapshot"])
            numbers["counts"] = {
                phase: {int(layer): tuple(counts) for layer, counts in layers.items()}
                for phase, layers in numbers["counts"].items()
            }
            return cls(**numbers)
        except (HotsplitError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise HotsplitError(what, got=str(error), wanted="a snapshot as hotsplit writes it") from error

    def to_samples(self) -> list[Sample]:
        """Every metric of this rank, one sample per label set; what is None is left out."""
        rank = {"rank": str(self.rank)}
        return [
            Sample(name=f"hotsplit_{name}", labels=labels | rank, value=float(value))
            for name, labels, value in self._numbers()
            if value is not None
        ]

    def _numbers(self) -> Iterator[tuple[str, dict[str, str], float | None]]:
        for name, numbers in (("tokens", self.tokens), ("routed_pairs", self.pairs), ("hit_pairs", self.hit_pairs)):
            yield from ((f"{name}_total", {"phase": phase}, numbers.get(phase, 0)) for phase in PHASES)
        yield "touched_bytes_total", {"bank": "hot"}, self.touched_hot_bytes
        yield "touched_bytes_total", {"bank": "cold"}, self.touched_cold_bytes
        yield "kept_bytes_total", {}, self.kept_bytes
        yield "steps_total", {}, self.steps
        yield "swaps_total", {"result": "done"}, self.swaps_done
        yield "swaps_total", {"result": "refused"}, self.swaps_refused
        yield "swaps_total", {"result": "failed"}, self.swaps_failed
        yield "swap_bytes_total", {}, self.swap_bytes
        yield "shifts_total", {}, self.shifts
        yield "update_failures_total", {}, self.update_failures
        for metric in METRICS.values():
            name = metric.name.removeprefix("hotsplit_")
            if metric.kind == "gauge" and not metric.labels:
                yield name, {}, getattr(self, name)
        labels = {"version": self.version, "plan_hash": self.plan_hash, "mode": self.mode, "backend": self.backend}
        yield "info", labels, 1


def snapshot_path(run_dir: Path, *, rank: int) -> Path:
    """Where a rank's snapshot lies in a run's folder."""
    return run_dir / f"rank{rank}.json"


def write_snapshot(snapshot: MetricsSnapshot, run_dir: Path) -> Path:
    """Replace a rank's snapshot file, atomically.

    Args:
        snapshot: The numbers.
        run_dir: The run's folder; made when missing.

    Returns:
        The file.

    Raises:
        HotsplitError: It cannot be written; the old one is untouched.
    """
    path = snapshot_path(run_dir, rank=snapshot.rank)
    write_atomic(path, canonical_json(snapshot.to_json()))
    return path


def read_snapshot(path: Path) -> MetricsSnapshot:
    """Read one rank's snapshot file.

    Raises:
        HotsplitError: It cannot be read, or is no snapshot.
    """
    return MetricsSnapshot.from_json(read_json(path, what="snapshot", error=HotsplitError), what=f"snapshot {path}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateLine:
    """What one update did, as one line of the log: `str(line)`, and `parse` reads it back.

    Example:
        >>> line = (
        ...     "hotsplit update=1 step=9 tokens=9 hit=0.500 byte_hit=0.400 oracle=0.600 drift=0.06 swaps=1 "
        ...     "refused=0 failed=0 moved_mib=2.0 cost_ms=0.3 rank=0"
        ... )
        >>> UpdateLine.parse(line).byte_hit, str(UpdateLine.parse(line)) == line
        (0.4, True)
    """

    update: int
    """Number of the update, from 1."""
    step: int
    """Engine steps so far."""
    tokens: int
    """Tokens so far."""
    hit: float | None
    """Hit rate of the window; None, written "none", where the window routed nothing, as for the next two."""
    byte_hit: float | None
    """Byte hit rate of the window."""
    kept: float | None = None
    """Touched bytes of the window that lay in slots, of all touched; written where there are slots and anything touched."""
    oracle: float | None
    """Hit rate of the window's reachable oracle."""
    drift: float | None
    """Distance of the live shares from the plan's; None without a plan's shares."""
    swaps: int
    """Swaps published since the last line."""
    refused: int
    """Swaps refused since the last line."""
    failed: int
    """Swaps failed since the last line."""
    moved_mib: float
    """MiB copied since the last line."""
    cost_ms: float
    """Milliseconds that the update took."""
    rank: int
    """The worker's rank."""
    shifts: int = 0
    """Shifts of the traffic that the adaptive schedule has acted upon since the last line; written where there are any."""

    def __str__(self) -> str:
        told = [part.name for part in fields(self) if getattr(self, part.name) != part.default]
        parts = (f"{name}={_number_text(name, getattr(self, name))}" for name in told)
        return f"hotsplit {' '.join(parts)}"

    @classmethod
    def parse(cls, line: str) -> UpdateLine:
        """Read a line back, also from inside a log line with a prefix; numbers have the digits that were written.

        Raises:
            HotsplitError: There is no update line in it.
        """
        found = _UPDATE_LINE.search(line)
        if not found:
            raise HotsplitError("update line", got=repr(line), wanted="hotsplit update=... step=... to rank=...")
        values: dict[str, Any] = {
            part.name: _parsed(found[part.name], kind=int if part.type == "int" else float)
            for part in fields(cls)
            if found[part.name] is not None
        }
        return cls(**values)


def _pattern(part: Field[Any]) -> str:
    """One part of the line; what has a default is written only where it is something else."""
    if part.default is MISSING:
        return f" {part.name}=(?P<{part.name}>{_NUMBER[str(part.type)]})"
    return f"(?: {part.name}=(?P<{part.name}>{_NUMBER[str(part.type).removesuffix(' | None')]}))?"


_DIGITS: Final = {"hit": 3, "byte_hit": 3, "kept": 3, "oracle": 3, "drift": 2, "moved_mib": 1, "cost_ms": 1}
_NUMBER: Final = {"int": r"-?\d+", "float": r"-?\d+\.\d+", "float | None": r"none|-?\d+\.\d+"}
_UPDATE_LINE: Final = re.compile(rf"\bhotsplit{''.join(map(_pattern, fields(UpdateLine)))}(?!\S)", re.ASCII)


def _number_text(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.{_DIGITS[name]}f}" if name in _DIGITS else str(value)


def _parsed(text: str, *, kind: type[int] | type[float]) -> float | None:
    return None if text == "none" else kind(text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(name: str, value: object, *, wanted: str) -> HotsplitError:
    return HotsplitError(f"snapshot field {name}", got=repr(value), wanted=wanted, field=name, value=value)


def _require_between(name: str, value: object, *, high: float) -> None:
    # Rates are sums of fractions: the last bit may pass 1.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= high + 1e-9
        or value == float("inf")
    ):
        raise _wrong(name, value, wanted="a ratio in [0, 1]" if high == 1.0 else "a finite number >= 0")


def _require_phases(name: str, numbers: Mapping[str, object]) -> None:
    for phase, number in numbers.items():
        if phase not in PHASES:
            raise _wrong(name, phase, wanted=f"the phases {' and '.join(PHASES)}")
        if not _is_count(number):
            raise _wrong(f"{name}[{phase}]", number, wanted="an integer >= 0")


def _total(phase: str, layers: Mapping[int, Sequence[int]]) -> int:
    """Sum of all counts, each of them checked."""
    total = 0
    for layer, counts in layers.items():
        for expert, count in enumerate(counts):
            if not _is_count(count):
                raise _wrong(f"counts[{phase}][{layer}][{expert}]", count, wanted="an integer >= 0")
            total += count
    return total
