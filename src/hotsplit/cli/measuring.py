"""What `hotsplit probe` measures: host memory, the disk of a folder, GPUs and their links, each told before it begins."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from hotsplit.bank.disk_rate import ROW_BYTES, measure_disk
from hotsplit.cli import console
from hotsplit.errors import HotsplitError
from hotsplit.host.asking import Fact, unknown
from hotsplit.host.bandwidth import MemoryRates, measure_memory
from hotsplit.host.gpu_facts import GpuFacts
from hotsplit.host.gpus import read_link_now
from hotsplit.host.links import Link, merged_link
from hotsplit.host.mounts import Mount
from hotsplit.host.survey import Survey
from hotsplit.notices import Notice
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.rates import GIGA, is_plausible
from hotsplit.plan.sizes import expert_sizes

if TYPE_CHECKING:
    from hotsplit.bank.link_rates import LinkRates

GPU_RATES: Final = ("hbm_bytes_per_s", "dma_h2d_bytes_per_s", "in_place_bytes_per_s")
"""Members of a GPU in the rates file that are measured."""

LEAST_LOCKED_BYTES: Final = 16 * 2**20
"""Host memory that is locked per GPU to measure it, at least."""

_LEAST_ROW_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMeasured:
    """What was measured of one GPU, by the name of its member in the rates file."""

    rates: dict[str, Fact[float]]
    """Bytes per second."""
    has_locked: bool = False
    """Whether its driver locked the host memory that was copied from; a rate that is left unknown tells nothing of that."""
    memory_bytes: int | None = None
    """As CUDA has it."""
    link: Link | None = None
    """As it was while copies ran; None where none did."""
    cuda_index: int | None = None
    """As CUDA counts in this process; None where it does not see the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured; unknown, with the reason, where it was not."""

    memory: MemoryRates
    """Host memory."""
    disk: Fact[float]
    """The disk of the folder."""
    all_dma: Fact[float]
    """Copies to all GPUs at once."""
    all_in_place: Fact[float]
    """Reads in place by all GPUs at once."""
    gpus: dict[str, GpuMeasured] = field(default_factory=dict)
    """By place on the bus."""
    notices: tuple[Notice, ...] = ()
    """What must be said about it."""


def not_measured(reason: str) -> Measured:
    """Nothing measured.

    Args:
        reason: Why.
    """
    nothing: Fact[float] = unknown(reason)
    return Measured(
        memory=MemoryRates(total=nothing), disk=nothing, all_dma=nothing, all_in_place=nothing, gpus={}, notices=()
    )


def measured_of(found: Measured, bus_id: str) -> GpuMeasured:
    """What was measured of one GPU.

    Args:
        found: Of all.
        bus_id: Its place.
    """
    nothing: Fact[float] = unknown(found.all_dma.reason or "CUDA does not see it: look at CUDA_VISIBLE_DEVICES")
    return found.gpus.get(bus_id) or GpuMeasured(rates=dict.fromkeys(GPU_RATES, nothing))


def link_of(gpu: GpuFacts, measured: GpuMeasured) -> Link:
    """The link of a GPU, under load where it was read so.

    Args:
        gpu: As the host tells of it.
        measured: Of it.
    """
    return gpu.link if measured.link is None else merged_link(measured.link, gpu.link)


def measure(survey: Survey, *, folder: Path | None, mount: Fact[Mount]) -> Measured:
    """Measure everything, one after the other.

    Args:
        survey: What the host tells of itself.
        folder: On the disk to measure; None for no disk.
        mount: What the folder lies on.
    """
    available = None if survey.budget.binding_unlocked is None else survey.budget.binding_unlocked.room.value
    console.note("measuring host memory, some seconds")
    memory = measure_memory(survey.topology.nodes, available_bytes=available)
    notices = [*memory.notices]
    disk = _disk(folder, mount=mount, notices=notices)
    links = _links(survey)
    memory_rate, said = checked("memory_bytes_per_s", memory.total)
    all_dma, more = checked("all_gpus_h2d_bytes_per_s", links.all_dma)
    return Measured(
        memory=MemoryRates(total=memory_rate, nodes=memory.nodes),
        disk=disk,
        all_dma=all_dma,
        all_in_place=links.all_in_place,
        gpus=links.gpus,
        notices=(*notices, *said, *more, *links.notices),
    )


def _disk(folder: Path | None, *, mount: Fact[Mount], notices: list[Notice]) -> Fact[float]:
    """The disk of the folder; what must be said is appended."""
    if folder is None:
        return unknown("no --dir: name a model's folder on the disk")
    if mount.value is not None and mount.value.is_memory:
        return unknown(f"{folder} lies in memory ({mount.value.kind}), on no disk")
    console.note(f"measuring the disk of {folder}, some seconds")
    found = measure_disk(folder, row_bytes=_row_bytes(folder))
    rate, said = checked("disk_bytes_per_s", found.rate)
    notices += [*found.notices, *said]
    return rate


def _row_bytes(folder: Path) -> int:
    """The size of the model's largest expert; a usual one where the folder is no model's."""
    try:
        return max(int(expert_sizes(read_headers(folder)).row_bytes.max()), _LEAST_ROW_BYTES)
    except (HotsplitError, OSError):
        return ROW_BYTES


def checked(name: str, rate: Fact[float]) -> tuple[Fact[float], list[Notice]]:
    """A rate that the file's form allows; another one is unknown, and said.

    Args:
        name: Of its member.
        rate: As measured.
    """
    if rate.value is None or is_plausible(name, rate.value):
        return rate, []
    reason = f"{rate.value / GIGA:.3g} GB/s were measured, which {name} of a rates file does not allow"
    return unknown(reason), [Notice(name="rate-implausible", text=f"{reason}; it is left unknown", strict=False)]


def _links(survey: Survey) -> Measured:
    """GPUs and their links; unknown, with the reason, where torch or CUDA is missing."""
    torch = torch_with_cuda(survey)
    if isinstance(torch, str):
        return not_measured(torch)
    from hotsplit.bank.link_rates import LinkSizes, cuda_openers, measure_links  # needs torch

    openers = cuda_openers()
    # Whether the limit on locked memory counts for a driver's own is what the measurement shows: it is not asked first.
    free = survey.budget.binding_unlocked
    room = None if free is None else free.room.value
    sizes = LinkSizes()
    if room is not None:
        # All GPUs hold theirs at once, and half of the room stays free.
        sizes = LinkSizes(host_bytes=min(sizes.host_bytes, room // 2 // max(len(openers), 1)))
    if sizes.host_bytes < LEAST_LOCKED_BYTES:
        return not_measured("too little host memory is available for a measurement")
    found = measure_links(openers, sizes=sizes, read_link=_read_link, tell=_tell)
    return by_place(found)


def torch_with_cuda(survey: Survey) -> ModuleType | str:
    """torch, where it may see a GPU; else why nothing of GPUs can be measured. Not imported without need: it takes long.

    Args:
        survey: Of the host.
    """
    if not survey.gpus.gpus:
        return f"no NVIDIA GPU was found ({survey.gpus.reason or 'the driver tells of none'})"
    if survey.gpus.is_silent:
        return f"no driver answers ({survey.gpus.reason})"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; in hotsplit's checkout run pip install '.[transformers]'"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # its libraries are missing, or of another CUDA
        return f"torch cannot be imported ({' '.join(str(error).split())[:160]})"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: a build for CPUs, or CUDA_VISIBLE_DEVICES is empty"
    return torch


def by_place(found: LinkRates) -> Measured:
    """What was measured of links, by the GPUs' places on the bus.

    Args:
        found: Of all GPUs, in CUDA's order.
    """
    gpus: dict[str, GpuMeasured] = {}
    notices: list[Notice] = []
    for i, gpu in enumerate(found.gpus):
        if gpu.bus_id is None:
            notices.append(Notice(name="gpu-not-measured", text=f"CUDA's GPU {i}: {gpu.hbm.reason}", strict=False))
            continue
        rates: dict[str, Fact[float]] = {}
        for name, rate in zip(GPU_RATES, (gpu.hbm, gpu.dma, gpu.in_place), strict=True):
            rates[name], said = checked(name, rate)
            notices += said
        gpus[gpu.bus_id] = GpuMeasured(
            rates=rates,
            has_locked=gpu.dma.value is not None,
            memory_bytes=gpu.memory_bytes,
            link=gpu.link,
            cuda_index=i,
        )
    return Measured(
        memory=MemoryRates(total=unknown("not asked for")),
        disk=unknown("not asked for"),
        all_dma=found.all_dma,
        all_in_place=found.all_in_place,
        gpus=gpus,
        notices=tuple(notices),
    )


def _read_link(bus_id: str) -> Link:
    return read_link_now(bus_id, is_loaded=True)


def _tell(what: str) -> None:
    console.note(f"measuring {what}")
