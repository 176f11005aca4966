"""How fast the memories of a machine are, as measured: the rates file, read, checked and written.

Stands beside the plan: `plan + counts + rates -> forecast`. What was not measured is None, "unknown", and never 0. A
number that no memory or link can have is refused, because it was written in another unit most likely.

    >>> rates = from_json({"format": "hotsplit-rates", "version": 1, "host": {},
    ...     "gpus": [{"index": 0, "hbm_bytes_per_s": 3e12, "in_place_bytes_per_s": 2.5e10}]}, what="rates toy.json")
    >>> rates.gpus[0].in_place_bytes_per_s, rates.host.memory_bytes_per_s
    (25000000000.0, None)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hotsplit.errors import ConfigError, RatesError
from hotsplit.files import read_json, write_atomic
from hotsplit.notices import Notice
from hotsplit.plan.identity import MAX_INTEGER

FORMAT = "hotsplit-rates"
VERSION = 1
MEMORY_RANGE = (1e9, 2e13)
"""Bytes per second that a memory can have."""
LINK_RANGE = (1e8, 1e12)
"""Bytes per second that a link can have."""
DISK_RANGE = (1e6, 1e12)
"""Bytes per second that a disk can have, one that turns, or lies behind a network, or is busy."""
GIGA = 1e9
"""Rates are spoken of in GB/s, 10^9 bytes per second, as data sheets do; sizes are in GiB."""
_RANGES = {
    "hbm_bytes_per_s": MEMORY_RANGE,
    "memory_bytes_per_s": MEMORY_RANGE,
    "dma_h2d_bytes_per_s": LINK_RANGE,
    "in_place_bytes_per_s": LINK_RANGE,
    "all_gpus_h2d_bytes_per_s": (LINK_RANGE[0], MEMORY_RANGE[1]),  # one slow link, or many fast ones together
    "disk_bytes_per_s": DISK_RANGE,
}
_LEAST = {"index": 0, "memory_bytes": 1, "numa_node": -1}
"""The whole numbers of the file and their least values; a node of -1 is how Linux says that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """One GPU."""

    index: int = 0
    """As the driver counts."""
    name: str | None = None
    """The product's name, for people."""
    memory_bytes: int | None = None
    """Bytes of fast memory."""
    hbm_bytes_per_s: float | None = None
    """Reads of its own memory."""
    dma_h2d_bytes_per_s: float | None = None
    """Copies from pinned host memory."""
    in_place_bytes_per_s: float | None = None
    """Reads of host memory by a kernel, without a copy: how cold experts are read."""
    numa_node: int | None = None
    """Node that its link hangs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """What all GPUs share."""

    memory_bytes_per_s: float | None = None
    """Of the host's memory, all controllers together."""
    all_gpus_h2d_bytes_per_s: float | None = None
    """Copies to all GPUs at once, together."""
    disk_bytes_per_s: float | None = None
    """Of the disk with the checkpoint."""

    @property
    def shared_bytes_per_s(self) -> float | None:
        """What all GPUs together can read of it: the lower of what is known."""
        known = [rate for rate in (self.memory_bytes_per_s, self.all_gpus_h2d_bytes_per_s) if rate is not None]
        return min(known, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A machine."""

    gpus: tuple[GpuRates, ...]
    """In the order in which ranks take them; none of a host without any."""
    host: HostRates = field(default_factory=HostRates)
    """What they share."""
    measured: str | None = None
    """ISO time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a forecast needs to know of a machine, nothing unknown left."""

    hbm_bytes_per_s: tuple[float, ...]
    """Of every rank, [W]."""
    link_bytes_per_s: tuple[float, ...]
    """In-place reads of host memory by every rank alone, [W]."""
    host_bytes_per_s: float = math.inf
    """What all ranks together can read of host memory; infinite where unknown, and then nothing binds there."""

    def __post_init__(self) -> None:
        if not self.hbm_bytes_per_s or len(self.hbm_bytes_per_s) != len(self.link_bytes_per_s):
            raise RatesError("a machine", got="no ranks, or not as many links", wanted="both rates for every rank")
        for rate in (*self.hbm_bytes_per_s, *self.link_bytes_per_s, self.host_bytes_per_s):
            if not rate > 0:
                raise RatesError("a machine's rate", got=repr(rate), wanted="bytes per second > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRates:
    """Rates named on the command line, in bytes per second; they beat those of the file."""

    link: float | None = None
    """In-place reads, every rank."""
    hbm: float | None = None
    """Fast memory, every rank."""
    host: float | None = None
    """Host memory, all ranks together."""


def given_rates(*, link: float | None, hbm: float | None, host: float | None) -> GivenRates:
    """Take rates as a user types them.

    Args:
        link: In-place reads of host memory by one GPU, in GB/s.
        hbm: A GPU's own memory, in GB/s.
        host: Host memory, all GPUs together, in GB/s.

    Raises:
        ConfigError: No number, or one that no link or memory can have.
    """
    return GivenRates(
        link=_given("--link", link, limits=LINK_RANGE),
        hbm=_given("--hbm", hbm, limits=MEMORY_RANGE),
        host=_given("--host-memory", host, limits=MEMORY_RANGE),
    )


def load_rates(path: Path) -> Rates:
    """Read a rates file and check all of it.

    Raises:
        RatesError: Unreadable, a field is unknown or wrong, or a rate is in another unit; names the field.
    """
    return from_json(read_json(path, what="rates", error=RatesError), what=f"rates {path}")


def from_json(value: object, *, what: str) -> Rates:
    """Check a parsed rates file.

    Args:
        value: What the JSON parser gave.
        what: The file, for messages: "rates rates.json".

    Raises:
        RatesError: A field is unknown or wrong, or a rate is in another unit; names the field.
    """
    content = _record(value, "the file", keys={"format", "version", "gpus", "host", "measured"}, what=what)
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        got = f"format {content.get('format')!r} version {content.get('version')!r}"
        raise RatesError(what, got=got, wanted=f"{FORMAT!r} version {VERSION}", do="measure the machine again")
    gpus = content.get("gpus")
    if not isinstance(gpus, list):
        raise RatesError(f"{what}, gpus", got=_short(gpus), wanted="a list of GPUs, empty for a host without any")
    measured = content.get("measured")
    if measured is not None and not isinstance(measured, str):
        raise RatesError(f"{what}, measured", got=_short(measured), wanted="an ISO time, or null")
    return Rates(
        gpus=tuple(GpuRates(**_fields(gpu, GpuRates, name=f"gpus[{i}]", what=what)) for i, gpu in enumerate(gpus)),
        host=HostRates(**_fields(content.get("host") or {}, HostRates, name="host", what=what)),
        measured=measured,
    )


def to_json(rates: Rates) -> dict[str, Any]:
    """The content of a rates file; what is unknown is null.

    Args:
        rates: Of a machine.

    >>> to_json(Rates(gpus=()))["host"]["disk_bytes_per_s"] is None
    True
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "gpus": [_members(gpu) for gpu in rates.gpus],
        "host": _members(rates.host),
        "measured": rates.measured,
    }


def save_rates(rates: Rates, path: Path) -> None:
    """Write a rates file, after it has been checked as a reader will; the file before it stays if that fails.

    Args:
        rates: Of a machine.
        path: Where to.

    Raises:
        RatesError: A rate is none that its thing can have.
        HotsplitError: The place cannot be written.
    """
    content = to_json(rates)
    from_json(content, what=f"rates {path}")
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def is_plausible(name: str, bytes_per_s: float) -> bool:
    """Whether a rate is one that its thing can have.

    Args:
        name: Of the member, "disk_bytes_per_s".
        bytes_per_s: The rate.
    """
    low, high = _RANGES[name]
    return low <= bytes_per_s <= high


def machine_of(rates: Rates | None, *, given: GivenRates, ranks: int) -> tuple[Machine, list[Notice]]:
    """Give every rank its rates.

    Args:
        rates: Of the file; None without one.
        given: On the command line; they beat the file.
        ranks: Ranks of the plan, tp x pp; they take the GPUs in order, and one GPU stands for all.

    Returns:
        The machine, and notices on what stands in or is unknown.

    Raises:
        RatesError: Rates that are needed are not known, all of them named, or there are fewer GPUs than ranks.
    """
    gpus, notices = _gpus_of(rates, ranks=ranks)
    _require_known(gpus, given=given, rates=rates)
    hbm = [given.hbm or gpu.hbm_bytes_per_s or 0.0 for gpu in gpus]
    links = [given.link or gpu.in_place_bytes_per_s or gpu.dma_h2d_bytes_per_s or 0.0 for gpu in gpus]
    if given.link is None and None in [gpu.in_place_bytes_per_s for gpu in gpus]:
        text = "in-place reads were not measured: the rate of copies stands in, which is the more that a link gives"
        notices.append(Notice(name="copy-rate-stands-in", text=text, strict=False))
    shared = given.host or (rates.host.shared_bytes_per_s if rates else None)
    if shared is None:
        text = "the rate of host memory is not known: the forecast takes it that ranks do not slow each other down"
        notices.append(Notice(name="host-rate-unknown", text=text, strict=False))
    machine = Machine(hbm_bytes_per_s=tuple(hbm), link_bytes_per_s=tuple(links), host_bytes_per_s=shared or math.inf)
    return machine, notices


def _members(value: GpuRates | HostRates) -> dict[str, Any]:
    return {member.name: getattr(value, member.name) for member in fields(value)}


def _gpus_of(rates: Rates | None, *, ranks: int) -> tuple[tuple[GpuRates, ...], list[Notice]]:
    """One GPU per rank; of a file without GPUs, ones of which nothing is known."""
    gpus = rates.gpus if rates and rates.gpus else (GpuRates(),)
    if len(gpus) >= ranks:
        return gpus[:ranks], []
    if len(gpus) > 1:
        wanted = f"{ranks}, one for each rank, or one that stands for all"
        raise RatesError("the rates file", got=f"{len(gpus)} GPUs", wanted=wanted)
    notices = []
    if rates and rates.gpus:
        text = f"the rates file has one GPU for {ranks} ranks: all are taken as like it"
        notices.append(Notice(name="one-gpu-for-all", text=text, strict=False))
    return tuple(replace(gpus[0], index=rank) for rank in range(ranks)), notices


def _require_known(gpus: Sequence[GpuRates], *, given: GivenRates, rates: Rates | None) -> None:
    """Refuse what is needed and not known, all of it in one message; copies stand in for in-place reads."""
    missing: dict[str, list[str]] = {"--hbm": [], "--link": []}
    for gpu in gpus:
        if given.hbm is None and gpu.hbm_bytes_per_s is None:
            missing["--hbm"].append(f"hbm_bytes_per_s of GPU {gpu.index}")
        if given.link is None and gpu.in_place_bytes_per_s is None and gpu.dma_h2d_bytes_per_s is None:
            missing["--link"].append(f"in_place_bytes_per_s of GPU {gpu.index}")
    names = [name for found in missing.values() for name in found]
    if not names:
        return
    told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    options = " and ".join(option for option, found in missing.items() if found)
    raise RatesError(
        "the rates file, which has no GPU" if rates and not rates.gpus else "the rates of this machine",
        got=f"unknown: {told}",
        wanted="the rates of a GPU's own memory and of in-place reads of host memory",
        do=f"pass a rates file that has it with --rates, or {options} in GB/s; hotsplit probe -o writes that file",
        fields=tuple(names),
    )


def _given(option: str, value: float | None, *, limits: tuple[float, float]) -> float | None:
    if value is None:
        return None
    if not limits[0] <= value * GIGA <= limits[1]:  # a NaN is in no range
        wanted = f"GB/s (10^9 bytes per second), from {limits[0] / GIGA:g} to {limits[1] / GIGA:g}"
        raise ConfigError(option, got=repr(value), wanted=wanted, do="check the unit")
    return value * GIGA


def _record(value: object, name: str, *, keys: set[str], what: str) -> dict[str, Any]:
    """An object with these keys at most: a misspelt one would read as unknown."""
    if not isinstance(value, dict):
        raise RatesError(f"{what}, {name}", got=_short(value), wanted="a JSON object")
    unknown = sorted(value.keys() - keys)
    if unknown:
        got, wanted = f"unknown {unknown[0][:40]!r}", f"the keys {', '.join(sorted(keys))}"
        raise RatesError(f"{what}, {name}", got=got, wanted=wanted, field=unknown[0])
    return value


def _fields(value: object, kind: type[GpuRates | HostRates], *, name: str, what: str) -> dict[str, Any]:
    """The members of a GPU or of the host, checked; null and absent are unknown."""
    content = _record(value, name, keys={member.name for member in fields(kind)}, what=what)
    return {
        key: _member(member, key, where=f"{what}, {name}.{key}")
        for key, member in content.items()
        if member is not None
    }


def _member(value: object, key: str, *, where: str) -> Any:
    """One name, whole number or rate."""
    if key in _RANGES:
        return _rate(value, key, where=where)
    if key == "name":
        if isinstance(value, str):
            return value
        raise RatesError(where, got=_short(value), wanted="text, or null")
    if type(value) is not int or not _LEAST[key] <= value <= MAX_INTEGER:
        raise RatesError(where, got=_short(value), wanted=f"an integer >= {_LEAST[key]}, or null", field=key)
    return value


def _rate(value: object, key: str, *, where: str) -> float:
    """A rate that the thing can have, in bytes per second."""
    low, high = _RANGES[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= float(value) <= high:  # type: ignore[arg-type]
        wanted = f"bytes per second, from {low:g} to {high:g}, or null for unknown"
        raise RatesError(where, got=_short(value), wanted=wanted, do="check the unit", field=key, value=value)
    return float(value)  # type: ignore[arg-type]


def _short(value: object) -> str:
    text = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
