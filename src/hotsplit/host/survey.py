"""Everything that this host tells of itself, nothing measured: what `hotsplit probe` reads first, in one call.

    read_survey(root, tool, nvml)  ->  Survey: CPU, container, memory, limits, huge pages, GPUs, topology, notices

The three arguments are all that it reads through, so that it runs on trees of files and texts of tools in tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotsplit.host.asking import ROOT, Fact, Tool, run_tool
from hotsplit.host.container import ContainerFacts, read_container
from hotsplit.host.cpu import CpuFacts, read_cpu
from hotsplit.host.gpu_facts import GpuFacts, GpuList
from hotsplit.host.gpus import read_gpus
from hotsplit.host.huge_pages import HugePageFacts, read_huge_pages
from hotsplit.host.limits import HostBudget, budget_notices, read_budget, read_total
from hotsplit.host.nvml import NvmlModule
from hotsplit.host.topology import Topology, read_topology_of
from hotsplit.notices import Notice
from hotsplit.units import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A host, by its own word."""

    cpu: CpuFacts
    """Processors."""
    container: ContainerFacts
    """What this process runs in, and its privileges."""
    total: Fact[int]
    """Memory of the host, bytes."""
    budget: HostBudget
    """Limits on it, and the one that binds."""
    huge_pages: HugePageFacts
    """Huge pages."""
    gpus: GpuList
    """GPUs, and the driver."""
    topology: Topology
    """NUMA nodes, and who is near to whom."""
    notices: tuple[Notice, ...]
    """What must be said aloud."""


def read_survey(
    *,
    root: Path = ROOT,
    tool: Tool = run_tool,
    nvml: NvmlModule | None = None,
    can_place: Fact[str] | None = None,
) -> Survey:
    """Ask this host.

    Args:
        root: Where /proc and /sys lie; another one only in tests.
        tool: Runs nvidia-smi and numastat.
        nvml: The module, or why there is none; None for the real one.
        can_place: Whether memory can be placed on NUMA nodes; None to try it.

    Returns:
        All of it. Nothing is raised: what cannot be found out is unknown, with the reason.
    """
    container, total = read_container(root), read_total(root)
    budget, huge = read_budget(container, root=root), read_huge_pages(root)
    gpus = read_gpus(root=root, tool=tool, nvml=nvml)
    topology = read_topology_of(gpus.gpus, root=root, tool=tool, can_place=can_place)
    return Survey(
        cpu=read_cpu(root),
        container=container,
        total=total,
        budget=budget,
        huge_pages=huge,
        gpus=gpus,
        topology=topology,
        notices=(
            *budget_notices(budget, total=total),
            *huge_page_notices(huge),
            *(notice for gpu in gpus.gpus for notice in link_notices(gpu)),
            *topology.notices,
        ),
    )


def huge_page_notices(huge: HugePageFacts) -> list[Notice]:
    """What must be said of huge pages.

    Args:
        huge: Of this host.
    """
    notices = []
    if huge.mode.value == "never":
        text = "transparent huge pages are off: cold rows get small pages, and a GPU may read them more slowly"
        do = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        notices.append(Notice(name="no-huge-pages", text=f"{text}; {do}", strict=False))
    if idle := huge.idle_bytes:
        text = f"{gib(idle)} of memory lie idle in pools of huge pages, which nothing else can use"
        notices.append(Notice(name="huge-pages-idle", text=text, strict=False))
    return notices


def link_notices(gpu: GpuFacts) -> list[Notice]:
    """What must be said of a GPU's link.

    Args:
        gpu: Of this host.
    """
    link, notices = gpu.link, list[Notice]()
    if link.is_narrowed:
        text = f"GPU {gpu.index} at {gpu.bus_id} runs with {link.width} of its {link.max_width} PCIe lanes"
        notices.append(Notice(name="link-narrowed", text=f"{text}: look at its slot, riser and BIOS", strict=False))
    own, above = link.most_bytes_per_s, None if gpu.slowest is None else gpu.slowest[1].most_bytes_per_s
    if gpu.slowest is not None and own is not None and above is not None and above < own:
        bridge, slow = gpu.slowest
        best = slow.max_generation if slow.max_generation.value is not None else slow.generation
        text = (
            f"GPU {gpu.index} at {gpu.bus_id} hangs on bridge {bridge}, a PCIe link of generation {best} x{slow.width}"
        )
        rates = f"{above / 1e9:.1f} GB/s at most, where its own could carry {own / 1e9:.1f}"
        notices.append(Notice(name="link-behind-slower", text=f"{text}: {rates}", strict=False))
    return notices
