"""How much host memory hotsplit can use here, which limit says so, and what to do about it.

Cold rows that a GPU reads in place are locked pages, so beside what memory.py knows two more limits count:

    MemAvailable of /proc/meminfo
    limit - charge of the control groups            (memory.py; page cache that can be given back is not charged)
    limit on locked memory - what is locked         unless this process has CAP_IPC_LOCK, which lifts it
    half of the memory that WSL has                 the most that Windows lets a GPU's driver lock

and the smallest is the host budget. Rows that only a CPU reads need no lock: the last two do not count for them.

Worked example: 8 GiB available, no control group, `ulimit -l` of 64 KiB: the budget is 64 KiB, "memlock" binds, and the
cure is `ulimit -l unlimited`.

Source: what WSL locks at most as users report it (FlashML-org/FreeToken#27, microsoft/WSL#8447): 40 to 50 % of its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, fact, known, read_text, unknown, whole_number
from hotsplit.host.container import ContainerFacts
from hotsplit.host.memory import LIMITED, NO_LIMIT, MemoryLimit, memory_limits
from hotsplit.notices import Notice
from hotsplit.units import MIB, gib

MEMLOCK: Final = "memlock"
"""Name of the limit on locked memory."""
WSL: Final = "WSL pinning cap"
"""Name of what Windows lets a driver lock."""
_WSL_SHARE: Final = 0.5
_MOST_CAP_BITS: Final = 62
"""The kernel writes "no limit" as a number near 2**63 where it does not write "unlimited"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLimit:
    """One limit on host memory."""

    name: str
    """As memory.py calls it, or MEMLOCK or WSL."""
    room: Fact[int]
    """Bytes that may still be taken under it; a reason where it is unknown, or where there is no such limit."""
    is_unlimited: bool = False
    """Whether it is known that there is no such limit."""
    is_for_locked: bool = False
    """Whether it counts for locked memory only."""
    do: str = ""
    """What raises it: a command where there is one."""

    @property
    def state(self) -> str:
        """What is known of it: "limited", "no limit" or "unknown"."""
        return "no limit" if self.is_unlimited else "unknown" if self.room.value is None else "limited"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """Every limit, and what they leave."""

    limits: tuple[BudgetLimit, ...]
    """All that were looked for."""

    @property
    def binding(self) -> BudgetLimit | None:
        """The tightest one for memory that a GPU reads in place; None where none is known."""
        return _tightest(self.limits)

    @property
    def binding_unlocked(self) -> BudgetLimit | None:
        """The tightest one for memory that only a CPU reads; None where none is known."""
        return _tightest(one for one in self.limits if not one.is_for_locked)

    @property
    def num_bytes(self) -> int | None:
        """The host budget in bytes: the room under the tightest limit; None is unknown."""
        return None if self.binding is None else self.binding.room.value


def read_budget(container: ContainerFacts, *, root: Path = ROOT) -> HostBudget:
    """Read every limit of this process.

    Args:
        container: What it runs in; says how a limit is raised.
        root: Where /proc and /sys lie; another one only in tests.
    """
    found = [_of_memory(one, container=container) for one in memory_limits(root).limits]
    return HostBudget(limits=(*found, _memlock(container, root=root), _wsl(container, root=root)))


def read_total(root: Path = ROOT) -> Fact[int]:
    """All memory of this host, in bytes.

    Args:
        root: Where /proc lies; another one only in tests.
    """
    text = read_text(root / "proc/meminfo")
    found = re.search(r"^MemTotal:[ \t]+([0-9]{1,15}) kB$", text.value or "", re.MULTILINE)
    kilobytes = int(found[1]) if found else 0
    # A machine without memory runs no Python: a 0 is no answer.
    return fact(1024 * kilobytes or None, source=text.source, reason=text.reason or f"{text.source} has no MemTotal")


def size_text(num_bytes: int) -> str:
    """Bytes as a person reads them, the small ones too that limits on locked memory are.

    Args:
        num_bytes: Bytes.

    >>> size_text(65536), size_text(3 * 2**29)
    ('64 KiB', '1.500 GiB')
    """
    return gib(num_bytes) if num_bytes >= MIB else f"{num_bytes / 1024:g} KiB"


def budget_notices(budget: HostBudget, *, total: Fact[int]) -> list[Notice]:
    """What must be said aloud of a host's limits.

    Args:
        budget: The limits.
        total: All memory of the host.
    """
    binding, notices = budget.binding, list[Notice]()
    if binding is None:
        text = "no limit on host memory can be read: the host budget is unknown, and nothing will be refused"
        notices.append(Notice(name="host-budget-unknown", text=text, strict=False))
    elif binding.is_for_locked and (free := budget.binding_unlocked) is not None:
        least, most = size_text(binding.room.value or 0), size_text(free.room.value or 0)
        text = (
            f"{binding.name} leaves {least} for memory that a GPU reads in place, where {most} are free: {binding.do}"
        )
        notices.append(Notice(name="pinning-limited", text=text, strict=False))
    if total.value is None:
        text = f"the memory of this host is unknown: {total.reason}"
        notices.append(Notice(name="host-memory-unknown", text=text, strict=False))
    return notices


def _tightest(limits: Iterable[BudgetLimit]) -> BudgetLimit | None:
    limited = [one for one in limits if one.room.value is not None]
    return min(limited, key=lambda one: one.room.value or 0, default=None)


def _of_memory(limit: MemoryLimit, *, container: ContainerFacts) -> BudgetLimit:
    """One of memory.py's limits, with its cure."""
    source = limit.source or ""
    if limit.state == LIMITED and limit.available_bytes is not None:
        return BudgetLimit(name=limit.name, room=known(limit.available_bytes, source), do=_cure(limit.name, container))
    if limit.state == NO_LIMIT:
        return BudgetLimit(name=limit.name, room=unknown(f"{source} sets none"), is_unlimited=True)
    file = limit.name.removeprefix("cgroup ")
    reason = f"no {file} of this process's control group" if file != limit.name else f"/proc/meminfo has no {file}"
    return BudgetLimit(name=limit.name, room=unknown(reason))


def _memlock(container: ContainerFacts, *, root: Path) -> BudgetLimit:
    text = read_text(root / "proc/self/limits")
    found = re.search(r"^Max locked memory +(\S+) +(\S+) +bytes *$", text.value or "", re.MULTILINE)
    if container.has_ipc_lock:
        reason = "CAP_IPC_LOCK lifts it" + (f": {_limit(found[1])}" if found else "")
        return BudgetLimit(name=MEMLOCK, room=unknown(reason), is_unlimited=True, is_for_locked=True)
    soft, hard = (found[1], found[2]) if found else ("", "")
    if _is_unlimited(soft):
        reason = f"{text.source} sets none"
        return BudgetLimit(name=MEMLOCK, room=unknown(reason), is_unlimited=True, is_for_locked=True)
    limit = whole_number(soft)
    if limit is None:
        reason = text.reason or f"{text.source} does not say"
        return BudgetLimit(name=MEMLOCK, room=unknown(reason), is_for_locked=True)
    room = known(max(limit - _locked_bytes(root), 0), text.source)
    return BudgetLimit(name=MEMLOCK, room=room, is_for_locked=True, do=_memlock_cure(container, hard=hard))


def _wsl(container: ContainerFacts, *, root: Path) -> BudgetLimit:
    if container.wsl.value is None:
        return BudgetLimit(name=WSL, room=unknown(container.wsl.reason), is_for_locked=True)
    if container.wsl.value == "no":
        reason = f"the kernel {container.kernel} is none of WSL's"
        return BudgetLimit(name=WSL, room=unknown(reason), is_unlimited=True, is_for_locked=True)
    if container.wsl.value == "WSL 1":
        reason = "WSL 1 gives no GPU to Linux: as administrator, wsl --set-version DISTRIBUTION 2"
        return BudgetLimit(name=WSL, room=unknown(reason), is_for_locked=True)
    total = read_total(root)
    if total.value is None:
        return BudgetLimit(name=WSL, room=unknown(total.reason), is_for_locked=True)
    room = known(int(total.value * _WSL_SHARE), f"half of {gib(total.value)}, {container.wsl}'s memory")
    do = "in %UserProfile%\\.wslconfig, under [wsl2], set memory= to more, then run: wsl --shutdown"
    return BudgetLimit(name=WSL, room=room, is_for_locked=True, do=do)


def _cure(name: str, container: ContainerFacts) -> str:
    """What raises a limit of memory.py's."""
    if not name.startswith("cgroup "):
        return "end other programs that use memory, or take a host with more"
    if "kubernetes" in container.kinds:
        return "raise resources.limits.memory of the pod's container"
    if container.kinds:
        engine = "podman" if "podman" in container.kinds else "docker"
        return f"{engine} run --memory SIZE, larger than before, or without --memory"
    return "systemd-run --scope -p MemoryMax=infinity -p MemoryHigh=infinity COMMAND, or start it in another slice"


def _memlock_cure(container: ContainerFacts, *, hard: str) -> str:
    """What raises the limit on locked memory."""
    if "kubernetes" in container.kinds:
        return "in the pod, securityContext.capabilities.add: [IPC_LOCK, SYS_NICE]"
    if container.kinds:
        engine = "podman" if "podman" in container.kinds else "docker"
        return f"{engine} run --ulimit memlock=-1 --cap-add IPC_LOCK --cap-add SYS_NICE"
    if _is_unlimited(hard):
        return "ulimit -l unlimited"
    return "as root, put `* - memlock unlimited` into /etc/security/limits.conf and log in again: ulimit -l unlimited"


def _locked_bytes(root: Path) -> int:
    """What this process has locked already; nothing where the kernel does not say."""
    found = re.search(r"^VmLck:[ \t]+([0-9]{1,15}) kB$", read_text(root / "proc/self/status").value or "", re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _is_unlimited(text: str) -> bool:
    number = whole_number(text)
    return text == "unlimited" or (text.isdecimal() and number is None) or (number or 0) >> _MOST_CAP_BITS > 0


def _limit(text: str) -> str:
    number = whole_number(text)
    return f"ulimit -l is {text if number is None else size_text(number)}"
