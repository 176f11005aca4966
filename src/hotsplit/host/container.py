"""What this process runs in: a container, WSL, and which of the privileges that matter here it has.

Containers leave signs and no certificate, so what is told is the signs. Two privileges matter. IPC_LOCK lifts the limit
on locked memory; in a user namespace (rootless containers) it is there in name only, since the kernel asks for it in the
first namespace. SYS_NICE is what container engines ask for before they let `mbind` through, which places memory on NUMA
nodes.

    >>> wsl_of("5.15.153.1-microsoft-standard-WSL2"), wsl_of("4.4.0-19041-Microsoft"), wsl_of("6.8.0-45-generic")
    ('WSL 2', 'WSL 1', None)

Source: numbers of the capabilities as linux/capability.h has them; signs as the container engines leave them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, fact, known, read_text, unknown

_CAPABILITIES: Final = {"IPC_LOCK": 14, "SYS_NICE": 23}
_FILES: Final = {
    ".dockerenv": "docker",
    "run/.containerenv": "podman",
    "var/run/secrets/kubernetes.io": "kubernetes",
    "run/secrets/kubernetes.io": "kubernetes",
}
_GROUPS: Final = {
    "kubepods": "kubernetes",
    "libpod": "podman",
    "docker": "docker",
    "lxc": "lxc",
    "containerd": "containerd",
}
"""What a path of a control group contains."""
_WHOLE_RANGE: Final = ["0", "0", "4294967295"]
"""User ids of the first namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerFacts:
    """What this process runs in."""

    kinds: tuple[str, ...]
    """Container engines whose signs were found; none found does not prove that there is none."""
    signs: tuple[str, ...]
    """The files that are the signs."""
    kernel: Fact[str]
    """The kernel's release."""
    wsl: Fact[str]
    """"WSL 2" or "WSL 1" on Windows, "no" elsewhere."""
    capabilities: Fact[Mapping[str, bool]]
    """By name, whether this process has it in effect."""

    @property
    def has_ipc_lock(self) -> bool:
        """Whether the limit on locked memory is known not to bind."""
        return bool((self.capabilities.value or {}).get("IPC_LOCK"))


def read_container(root: Path = ROOT) -> ContainerFacts:
    """Look for signs.

    Args:
        root: Where /proc and files of container engines lie; another one only in tests.
    """
    signs = {f"/{name}": kind for name, kind in _FILES.items() if _is_there(root / name)}
    for name in ("proc/self/cgroup", "proc/1/cgroup"):
        text = read_text(root / name).value or ""
        signs |= {f"/{name}": kind for word, kind in reversed(_GROUPS.items()) if word in text}
    release = read_text(root / "proc/sys/kernel/osrelease")
    kernel: Fact[str] = unknown(release.reason)
    wsl: Fact[str] = unknown(release.reason)
    if release.value is not None:
        kernel = known(release.value.strip(), release.source)
        wsl = known(wsl_of(release.value) or "no", release.source)
    return ContainerFacts(
        kinds=tuple(sorted(set(signs.values()))),
        signs=tuple(signs),
        kernel=kernel,
        wsl=wsl,
        capabilities=_capabilities(root),
    )


def wsl_of(release: str) -> str | None:
    """Which WSL a kernel belongs to; None where it is none of them.

    Args:
        release: The kernel's.
    """
    if "microsoft" not in release.lower():
        return None
    return "WSL 2" if re.search("wsl2|microsoft-standard", release.lower()) else "WSL 1"


def _capabilities(root: Path) -> Fact[Mapping[str, bool]]:
    status = read_text(root / "proc/self/status")
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})$", status.value or "", re.MULTILINE)
    if found is None:
        return unknown(status.reason or f"{status.source} has no CapEff")
    bits = int(found[1], 16)
    has = {name: bool(bits >> number & 1) for name, number in _CAPABILITIES.items()}
    if not _is_first_namespace(root):
        has["IPC_LOCK"] = False
    return fact(has, source=f"{status.source}, CapEff", reason="")


def _is_first_namespace(root: Path) -> bool:
    """Whether user ids are the machine's own; a kernel that does not say has no other namespaces."""
    text = read_text(root / "proc/self/uid_map").value
    return text is None or text.split() == _WHOLE_RANGE


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
