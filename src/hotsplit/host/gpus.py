"""The GPUs of this host, as the driver and the bus tell of them, each fact with its source or the reason it is unknown.

Asked in this order, and what the first does not tell the next one fills in, by the GPU's place on the bus:

    NVML            the driver's library, where the package nvidia-ml-py is installed
    nvidia-smi      the driver's tool, which hosts and containers have wherever they have the driver
    /sys            the kernel: links, bridges, NUMA nodes; and GPUs for which no driver answers
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hotsplit.host.asking import ROOT, Fact, Tool, fact, first_known, read_text, run_tool, unknown
from hotsplit.host.gpu_facts import GpuFacts, GpuList
from hotsplit.host.links import Link, merged_link, path_to_root, read_link, slowest_above, unknown_link
from hotsplit.host.numa import gpu_node
from hotsplit.host.nvml import NvmlModule, read_nvml, read_nvml_link
from hotsplit.host.smi import read_smi, read_smi_link

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""Class of a device on the PCI bus: display controllers, 3D ones among them."""
_WSL_TOOL: Final = "usr/lib/wsl/lib/nvidia-smi"
"""WSL has the tool here, which is not in every PATH."""


def read_gpus(*, root: Path = ROOT, tool: Tool = run_tool, nvml: NvmlModule | None = None) -> GpuList:
    """Find every NVIDIA GPU.

    Args:
        root: Where /sys lies; another one only in tests.
        tool: Runs nvidia-smi.
        nvml: The module, or why there is none; None for the real one.
    """
    found = read_nvml(load_nvml() if nvml is None else nvml)
    if not _is_complete(found):
        found = merged(found, read_smi(smi_tool(tool, root=root)))
    on_bus = bus_ids(root)
    missing = [bus_id for bus_id in on_bus if bus_id not in {gpu.bus_id for gpu in found.gpus}]
    reason = found.reason or "no driver answers for it"
    after = _next_index(found.gpus)
    silent = tuple(_silent(bus_id, index=after + i, reason=reason) for i, bus_id in enumerate(missing))
    return replace(found, gpus=tuple(with_bus(gpu, root=root) for gpu in (*found.gpus, *silent)))


def read_link_now(
    bus_id: str, *, is_loaded: bool, root: Path = ROOT, tool: Tool = run_tool, nvml: NvmlModule | None = None
) -> Link:
    """The link of one GPU at this moment, by the first source that tells it all.

    Args:
        bus_id: Of the GPU, as /sys writes it.
        is_loaded: Whether a copy is under way.
        root: Where /sys lies; another one only in tests.
        tool: Runs nvidia-smi.
        nvml: The module, or why there is none; None for the real one.
    """
    link = read_nvml_link(load_nvml() if nvml is None else nvml, bus_id, is_loaded=is_loaded)
    link = merged_link(link, replace(read_link(bus_id, root=root), is_loaded=is_loaded))
    if None in (link.generation.value, link.width.value):
        link = merged_link(link, read_smi_link(smi_tool(tool, root=root), bus_id, is_loaded=is_loaded))
    return link


def load_nvml() -> NvmlModule:
    """The module of NVML, or why there is none."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return "the package nvidia-ml-py is not installed"


def smi_tool(tool: Tool, *, root: Path = ROOT) -> Tool:
    """A tool that finds nvidia-smi where WSL has it, too.

    Args:
        tool: Runs it.
        root: Where /usr lies; another one only in tests.
    """

    def run(command: Sequence[str]) -> Fact[str]:
        first = tool(command)
        there = root / _WSL_TOOL
        return tool([str(there), *command[1:]]) if first.value is None and there.is_file() else first

    return run


def bus_ids(root: Path = ROOT) -> tuple[str, ...]:
    """Every NVIDIA GPU on the PCI bus, in its order.

    Args:
        root: Where /sys lies; another one only in tests.
    """
    folders = sorted((root / "sys/bus/pci/devices").glob("*:*:*.*"))
    return tuple(folder.name for folder in folders if _is_gpu(folder))


def merged(first: GpuList, second: GpuList) -> GpuList:
    """What two sources know together.

    Args:
        first: Counts where it knows something; its order too, where it has any GPU.
        second: Fills in.
    """
    others = {gpu.bus_id: gpu for gpu in second.gpus}
    both = [_merged(gpu, others.pop(gpu.bus_id, None)) for gpu in first.gpus]
    reasons = "; ".join(dict.fromkeys(reason for reason in (first.reason, second.reason) if reason))
    driver, after = first_known(first.driver, second.driver), _next_index(both)
    return GpuList(
        gpus=(*both, *(replace(gpu, index=after + i) for i, gpu in enumerate(others.values()))),
        driver=unknown(reasons) if driver.value is None else driver,
        # One source that answered is enough.
        reason=reasons if driver.value is None else "",
    )


def with_bus(gpu: GpuFacts, *, root: Path = ROOT) -> GpuFacts:
    """A GPU with what the kernel knows of its place.

    Args:
        gpu: As the driver tells of it.
        root: Where /sys lies; another one only in tests.
    """
    path = path_to_root(gpu.bus_id, root=root).value or ()
    return replace(
        gpu,
        link=merged_link(gpu.link, read_link(gpu.bus_id, root=root)),
        numa_node=first_known(_numa_node(gpu.bus_id, root=root), gpu.numa_node),
        path=path,
        slowest=slowest_above(path, root=root),
    )


def _numa_node(bus_id: str, *, root: Path) -> Fact[int]:
    file = root / "sys/bus/pci/devices" / bus_id / "numa_node"
    text = read_text(file)
    reason = text.reason or f"{file} says {(text.value or '').strip()[:20]}"
    return fact(gpu_node(bus_id, root=root), source=str(file), reason=reason)


def _next_index(gpus: Sequence[GpuFacts]) -> int:
    """A number that none has: one that does not answer leaves a gap, so that their count may be taken."""
    return max((gpu.index for gpu in gpus), default=-1) + 1


def _is_complete(found: GpuList) -> bool:
    """Whether nothing is left to ask nvidia-smi for."""
    return bool(found.gpus) and all(
        None not in (gpu.name.value, gpu.memory_bytes.value, gpu.link.generation.value, gpu.link.width.value)
        for gpu in found.gpus
    )


def _is_gpu(folder: Path) -> bool:
    kind = read_text(folder / "class").value or ""
    return (read_text(folder / "vendor").value or "").strip() == _NVIDIA and kind.startswith(_DISPLAY)


def _silent(bus_id: str, *, index: int, reason: str) -> GpuFacts:
    """A GPU on the bus that no driver tells of."""
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        name=unknown(reason),
        memory_bytes=unknown(reason),
        link=unknown_link(reason),
        numa_node=unknown(reason),
        is_told=False,
    )


def _merged(gpu: GpuFacts, other: GpuFacts | None) -> GpuFacts:
    if other is None:
        return gpu
    return replace(
        gpu,
        name=first_known(gpu.name, other.name),
        memory_bytes=first_known(gpu.memory_bytes, other.memory_bytes),
        link=merged_link(gpu.link, other.link),
        numa_node=first_known(gpu.numa_node, other.numa_node),
    )
