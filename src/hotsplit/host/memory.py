"""How much host memory a bank may still take, and which limit says so.

Asked by the banks and engines before they allocate. Inside a container the machine's own figures mislead: the limit of
the process's control group may be far below the free memory, and the group's usage counts page cache that the kernel
gives back when asked. So the answer is the smallest of

    MemAvailable of /proc/meminfo
    limit - charge of the process's control group and of every group above it (cgroup v2 or v1)

where charge is what cannot be reclaimed: usage minus the file pages on the kernel's reclaim lists and the reclaimable
slab. Memory that cannot be read is unknown, never 0.

Worked example: limit 70 GiB, usage 69.5 GiB, of which 68.9 GiB page cache: charge 0.6 GiB, 69.4 GiB are available.

Source: file names and fields as the Linux kernel documents them (admin-guide/cgroup-v2, cgroup-v1/memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNKNOWN = "unknown"
NO_LIMIT = "no limit"
LIMITED = "limited"

_V1_NONE = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of the page size in 63 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """One limit on this process's memory."""

    name: str
    """What it is, a key of PROBES."""
    state: str = UNKNOWN
    """"limited", "no limit", or "unknown" where it cannot be read."""
    available_bytes: int | None = None
    """What may still be taken under it; None unless it is limited."""
    source: str | None = None
    """The file that says so; of nested control groups, the tightest one's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """All limits, and the one that binds."""

    limits: tuple[MemoryLimit, ...]
    """Every limit that was looked for, known or not."""

    @property
    def binding(self) -> MemoryLimit | None:
        """The tightest known limit, the first of equals; None where none is known."""
        known = [limit for limit in self.limits if limit.available_bytes is not None]
        return min(known, key=lambda limit: limit.available_bytes or 0, default=None)

    @property
    def available_bytes(self) -> int | None:
        """Bytes that this process may still take without reclaiming anything of its own; None is unknown."""
        return None if self.binding is None else self.binding.available_bytes

    def __str__(self) -> str:
        binding = self.binding
        if binding is None or binding.available_bytes is None:
            return "available memory unknown"
        return f"{binding.available_bytes / 2**30:.1f} GiB available, by {binding.name} ({binding.source})"


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Read every memory limit of this process.

    Args:
        root: Where /proc and /sys lie; another one only in tests.

    Returns:
        The limits. Nothing is raised: what cannot be read is unknown.
    """
    return MemoryLimits(limits=tuple(_probe(name, root=root) for name in PROBES))


def swap_bytes(root: Path = Path("/")) -> int | None:
    """Swap space of this machine; None is unknown.

    Args:
        root: Where /proc lies; another one only in tests.
    """
    return next((num_bytes for _, num_bytes in _meminfo(root, field="SwapTotal")), None)


def _probe(name: str, *, root: Path) -> MemoryLimit:
    """The tightest of what one probe finds."""
    found = list(PROBES[name](root))
    limited = [one for one in found if one[1] is not None]
    if not found:
        return MemoryLimit(name=name)
    if not limited:
        return MemoryLimit(name=name, state=NO_LIMIT, source=str(found[0][0]))
    source, available = min(limited, key=lambda one: one[1] or 0)
    return MemoryLimit(name=name, state=LIMITED, available_bytes=available, source=str(source))


def _meminfo(root: Path, *, field: str = "MemAvailable") -> Iterator[tuple[Path, int | None]]:
    path = root / "proc/meminfo"
    for line in (_read(path) or "").splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0] == f"{field}:" and fields[2] == "kB" and fields[1].isdigit():
            yield path, int(fields[1]) * 1024


def _cgroup_v2(file_name: str) -> Callable[[Path], Iterator[tuple[Path, int | None]]]:
    def probe(root: Path) -> Iterator[tuple[Path, int | None]]:
        hybrid = root / "sys/fs/cgroup/unified"  # where systemd mounts v2 while v1 is still in use
        for group in _groups(root, controller="", mount=hybrid if hybrid.is_dir() else root / "sys/fs/cgroup"):
            yield from _headroom(group / file_name, usage="memory.current")

    return probe


def _cgroup_v1(root: Path) -> Iterator[tuple[Path, int | None]]:
    for group in _groups(root, controller="memory", mount=root / "sys/fs/cgroup/memory"):
        yield from _headroom(group / "memory.limit_in_bytes", usage="memory.usage_in_bytes")
        # Of groups above that are not mounted here, a container sees the tightest limit alone, and not what they hold.
        above = _stat(group / "memory.stat").get("hierarchical_memory_limit", _V1_NONE)
        charge = _charge(group, usage="memory.usage_in_bytes")
        if above < _V1_NONE and charge is not None:
            yield group / "memory.stat", max(0, above - charge)


PROBES: Mapping[str, Callable[[Path], Iterator[tuple[Path, int | None]]]] = {
    "MemAvailable": _meminfo,
    "cgroup memory.max": _cgroup_v2("memory.max"),
    "cgroup memory.high": _cgroup_v2("memory.high"),
    "cgroup memory.limit_in_bytes": _cgroup_v1,
}
"""By name: what yields (file, bytes still available or None for no limit) for every place where the limit is set.

memory.high counts as a limit: a group above it is throttled to a standstill rather than killed.
"""


def _groups(root: Path, *, controller: str, mount: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all above it, as far as they are mounted here.

    In a container without a cgroup namespace the path is the host's, of which only the last part is mounted, as the
    mount itself; in one with a namespace the path may lead out of it ("/../other").
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            parts = PurePosixPath(path).parts[1:]
            depths = range(len(parts), 0, -1) if ".." not in parts else ()
            yield from (mount.joinpath(*parts[:depth]) for depth in depths)
            yield mount
            return


def _headroom(path: Path, *, usage: str) -> Iterator[tuple[Path, int | None]]:
    """(file, bytes left under its limit); nothing where the limit or the charge cannot be read."""
    text = (_read(path) or "").strip()
    if text == "max" or (text.isdigit() and int(text) >= _V1_NONE):
        yield path, None
    elif text.isdigit():
        charge = _charge(path.parent, usage=usage)
        if charge is not None:
            yield path, max(0, int(text) - charge)


def _charge(group: Path, *, usage: str) -> int | None:
    """Bytes of a group that the kernel cannot give back; None where they cannot be read."""
    stat = _stat(group / "memory.stat")
    used = (_read(group / usage) or "").strip()
    if used.isdigit():
        return max(0, int(used) - _reclaimable(stat))
    anonymous = stat.get("anon", stat.get("rss"))
    return None if anonymous is None else anonymous + stat.get("shmem", 0) + stat.get("unevictable", 0)


def _reclaimable(stat: Mapping[str, int]) -> int:
    """File pages on the reclaim lists (shared memory and locked pages are on others), and reclaimable slab."""
    if "active_file" in stat and "inactive_file" in stat:
        files = stat["active_file"] + stat["inactive_file"]
    else:
        files = max(0, stat.get("file", stat.get("cache", 0)) - stat.get("shmem", 0))
    return files + stat.get("slab_reclaimable", 0)


def _stat(path: Path) -> dict[str, int]:
    """memory.stat; of v1, the figures of the whole subtree ("total_..."), as those of v2 are."""
    fields = (line.split() for line in (_read(path) or "").splitlines())
    stat = {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}
    totals = {name.removeprefix("total_"): value for name, value in stat.items() if name.startswith("total_")}
    return stat | totals


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
