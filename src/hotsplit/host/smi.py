r"""GPUs as nvidia-smi tells of them: `nvidia-smi -q -x` for each by itself, `nvidia-smi topo -m` for how they reach each other.

What the tool prints is parsed with suspicion: another release may leave fields out, name them differently or write "N/A",
and a driver in trouble prints sentences. What is not as expected is unknown.

    >>> print(read_matrix("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n").value[0, 1])
    NV18

Source: names of the XML elements and of the relations as nvidia-smi prints them (driver 535 to 580).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias
from xml.etree import ElementTree as ET

from hotsplit.host.asking import Fact, Tool, fact, known, shortened, unknown, whole_number
from hotsplit.host.gpu_facts import GpuFacts, GpuList, bus_id_of
from hotsplit.host.links import Link, as_generation, as_width, unknown_link
from hotsplit.units import GIB, MIB

QUERY: Final = ("nvidia-smi", "-q", "-x")
"""Command line for all GPUs."""
TOPOLOGY: Final = ("nvidia-smi", "topo", "-m")
"""Command line for their relations."""

_SOURCE: Final = "nvidia-smi"
_SCALES: Final = {"MiB": MIB, "GiB": GIB, "KiB": 1024, "B": 1}
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_RELATION: Final = re.compile(r"NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS")

Matrix: TypeAlias = Mapping[tuple[int, int], str]


def read_smi(tool: Tool) -> GpuList:
    """Ask nvidia-smi for every GPU.

    Args:
        tool: Runs it.

    Returns:
        The GPUs; none, with the reason, where it does not answer. Nothing is raised.
    """
    output = tool(QUERY)
    if output.value is None:
        return GpuList(reason=output.reason, driver=unknown(output.reason))
    return parse_query(output.value)


def read_smi_link(tool: Tool, bus_id: str, *, is_loaded: bool) -> Link:
    """The link of one GPU, now.

    Args:
        tool: Runs nvidia-smi.
        bus_id: Of the GPU, as /sys writes it.
        is_loaded: Whether a copy is under way.
    """
    output = tool((*QUERY, "-i", bus_id))
    if output.value is None:
        return unknown_link(output.reason)
    found = {gpu.bus_id: gpu.link for gpu in parse_query(output.value, is_loaded=is_loaded).gpus}
    return found.get(bus_id) or unknown_link(f"nvidia-smi tells of no GPU at {bus_id}")


def read_topology(tool: Tool) -> Fact[Matrix]:
    """Ask nvidia-smi how GPUs reach each other.

    Args:
        tool: Runs it.
    """
    output = tool(TOPOLOGY)
    return unknown(output.reason) if output.value is None else read_matrix(output.value)


def parse_query(text: str, *, is_loaded: bool = False) -> GpuList:
    """What `nvidia-smi -q -x` printed.

    Args:
        text: Its output.
        is_loaded: Whether a copy was under way.
    """
    try:
        log = ET.fromstring(text)  # noqa: S314 - the output of the driver's own tool, which runs as we do
    except (ET.ParseError, ValueError) as error:
        reason = f"nvidia-smi -q -x gave no XML ({error}): {shortened(text)}"
        return GpuList(reason=reason, driver=unknown(reason))
    driver = _text(log, "driver_version")
    # One without a place is counted, as the driver and its table of relations count it.
    found = [(i, _bus_id(node), node) for i, node in enumerate(log.iter("gpu"))]
    gpus = tuple(
        _gpu(node, index=i, bus_id=bus_id, is_loaded=is_loaded) for i, bus_id, node in found if bus_id is not None
    )
    reason = "" if gpus else "nvidia-smi tells of no GPU"
    return GpuList(gpus=gpus, driver=driver, reason=reason)


def read_matrix(text: str) -> Fact[Matrix]:
    """What `nvidia-smi topo -m` printed: relations by the numbers of two GPUs, both ways.

    Args:
        text: Its output; headings may be underlined by escapes.
    """
    lines = [re.split(r"\t+", _ESCAPES.sub("", line)) for line in text.splitlines()]
    head = next((cells for cells in lines if any(cell.strip() == "GPU0" for cell in cells)), None)
    if head is None:
        return unknown(f"nvidia-smi topo -m gave no table: {shortened(text)}")
    columns = [cell.strip() for cell in head if cell.strip()]
    found = dict(_relations(columns, lines))
    return fact(found or None, source="nvidia-smi topo -m", reason="nvidia-smi topo -m tells of one GPU alone")


def _relations(columns: list[str], lines: Iterable[list[str]]) -> Iterable[tuple[tuple[int, int], str]]:
    for cells in lines:
        row = _number_of(cells[0])
        if row is None:
            continue
        for column, cell in zip(columns, cells[1:], strict=False):
            other = _number_of(column)
            word = cell.strip()
            if other is not None and other != row and _RELATION.fullmatch(word):
                yield (row, other), word


def _number_of(text: str) -> int | None:
    """7 for "GPU7"; None for anything else."""
    found = re.fullmatch(r"\s*GPU([0-9]{1,4})\s*", text)
    return int(found[1]) if found else None


def _gpu(node: ET.Element, *, index: int, bus_id: str, is_loaded: bool) -> GpuFacts:
    generation, lanes = "pci/pci_gpu_link_info/pcie_gen", "pci/pci_gpu_link_info/link_widths"
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        name=_text(node, "product_name"),
        memory_bytes=_bytes(node, "fb_memory_usage/total"),
        link=Link(
            generation=_number(node, f"{generation}/current_link_gen", check=as_generation),
            width=_number(node, f"{lanes}/current_link_width", check=as_width),
            max_generation=_number(node, f"{generation}/max_link_gen", check=as_generation),
            max_width=_number(node, f"{lanes}/max_link_width", check=as_width),
            is_loaded=is_loaded,
        ),
        numa_node=unknown("nvidia-smi -q -x does not tell it"),
    )


def _bus_id(node: ET.Element) -> str | None:
    return bus_id_of(node.get("id") or "") or bus_id_of(node.findtext("pci/pci_bus_id") or "")


def _text(node: ET.Element, path: str) -> Fact[str]:
    text = (node.findtext(path) or "").strip()
    is_told = text and text.upper() != "N/A" and not text.startswith("[")
    return known(text, _SOURCE) if is_told else unknown(f"nvidia-smi tells no {path.rpartition('/')[2]}")


def _number(node: ET.Element, path: str, *, check: Callable[[int | None], int | None]) -> Fact[int]:
    """A generation, "5", or a width, "16x"."""
    text = _text(node, path)
    number = whole_number((text.value or "").removesuffix("x"))
    return fact(check(number), source=_SOURCE, reason=text.reason or f"nvidia-smi says {shortened(text.value or '')}")


def _bytes(node: ET.Element, path: str) -> Fact[int]:
    """A size, "143771 MiB"; a 0 is no memory of its own."""
    text = _text(node, path)
    amount, _, unit = (text.value or "").partition(" ")
    number, scale = whole_number(amount), _SCALES.get(unit.strip())
    value = None if number is None or scale is None else number * scale or None
    return fact(value, source=_SOURCE, reason=text.reason or f"nvidia-smi says {shortened(text.value or '')}")
