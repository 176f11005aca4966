"""What `hotsplit probe` does: asks the host, measures it, and puts both into a rates file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hotsplit.bank.disk_rate import model_files
from hotsplit.cli.measuring import (
    GPU_RATES,
    LEAST_LOCKED_BYTES,
    GpuMeasured,
    Measured,
    link_of,
    measure,
    measured_of,
    not_measured,
)
from hotsplit.cli.places import require_places
from hotsplit.errors import ConfigError
from hotsplit.host.asking import Fact, unknown
from hotsplit.host.gpu_facts import GpuFacts
from hotsplit.host.limits import MEMLOCK, size_text
from hotsplit.host.mounts import Mount, mount_of
from hotsplit.host.survey import Survey, read_survey
from hotsplit.notices import Notice
from hotsplit.plan.rates import GpuRates, HostRates, Rates, save_rates

_NOT_ASKED: Final = "not measured, because of --no-measure"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTask:
    """What `hotsplit probe` was asked for."""

    output: Path | None
    """Rates file."""
    folder: Path | None
    """Folder on the disk to measure."""
    measure: bool
    """Whether to measure at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A host: what it tells of itself, and what was measured."""

    survey: Survey
    """What it tells."""
    measured: Measured
    """What was measured."""
    mount: Fact[Mount]
    """What the folder lies on."""
    rates: Rates
    """The content of the rates file."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def probe_for(task: ProbeTask) -> Probe:
    """Ask, measure, and write the rates file if one was asked for.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: The folder is none, or the output cannot be written: known before anything is measured.
    """
    folder = None if task.folder is None else _folder(task.folder)
    require_places({"--output": task.output}, inputs=[] if folder is None else model_files(folder))
    survey = read_survey()
    mount: Fact[Mount] = unknown("no --dir") if folder is None else mount_of(folder)
    measured = measure(survey, folder=folder, mount=mount) if task.measure else not_measured(_NOT_ASKED)
    rates = rates_of(survey, measured, now=datetime.now(UTC).isoformat(timespec="seconds"))
    if task.output is not None:
        save_rates(rates, task.output)
    return Probe(
        survey=survey,
        measured=measured,
        mount=mount,
        rates=rates,
        notices=tuple(dict.fromkeys((*survey.notices, *measured.notices, *notices_of(survey, measured)))),
    )


def ranks_order(survey: Survey, measured: Measured) -> list[GpuFacts]:
    """The GPUs in the order in which ranks take them: those that CUDA sees, in its order; all where it was not asked.

    Args:
        survey: Of the host.
        measured: Of the host.
    """
    seen = {bus_id: one.cuda_index for bus_id, one in measured.gpus.items() if one.cuda_index is not None}
    visible = [gpu for gpu in survey.gpus.gpus if gpu.bus_id in seen]
    if visible:
        return sorted(visible, key=lambda gpu: seen[gpu.bus_id] or 0)
    # A container sees every GPU of the host on the bus, and may use those alone that the driver tells of.
    return [gpu for gpu in survey.gpus.gpus if gpu.is_told] or list(survey.gpus.gpus)


def rates_of(survey: Survey, measured: Measured, *, now: str) -> Rates:
    """The content of the rates file.

    Args:
        survey: Of the host.
        measured: Of the host.
        now: ISO time.
    """
    gpus = [_gpu_rates(gpu, measured_of(measured, gpu.bus_id)) for gpu in ranks_order(survey, measured)]
    host = HostRates(
        memory_bytes_per_s=measured.memory.total.value,
        all_gpus_h2d_bytes_per_s=measured.all_dma.value,
        disk_bytes_per_s=measured.disk.value,
    )
    values = [getattr(host, name) for name in HostRates.__slots__]
    values += [getattr(gpu, name) for gpu in gpus for name in GPU_RATES]
    return Rates(gpus=tuple(gpus), host=host, measured=now if any(value is not None for value in values) else None)


def notices_of(survey: Survey, measured: Measured) -> list[Notice]:
    """What must be said of both together: idle links, GPUs that CUDA does not see, a limit that did not count.

    Args:
        survey: Of the host.
        measured: Of the host.
    """
    links = {gpu.index: link_of(gpu, measured_of(measured, gpu.bus_id)) for gpu in survey.gpus.gpus}
    idle = [str(i) for i, link in links.items() if link.generation.value is not None and not link.is_loaded]
    notices = []
    if idle:
        text = f"the links of GPU {', '.join(idle)} were read while they idled, when they drop to a slower generation"
        notices.append(Notice(name="link-read-idle", text=text, strict=False))
    hidden = [str(gpu.index) for gpu in survey.gpus.gpus if gpu.bus_id not in measured.gpus]
    if hidden and measured.gpus:
        text = f"CUDA does not see GPU {', '.join(hidden)}: the rates file leaves them out (CUDA_VISIBLE_DEVICES)"
        notices.append(Notice(name="gpus-not-visible", text=text, strict=False))
    binding = survey.budget.binding
    has_locked = any(one.has_locked for one in measured.gpus.values())
    if (
        has_locked
        and binding is not None
        and binding.name == MEMLOCK
        and (binding.room.value or 0) < LEAST_LOCKED_BYTES
    ):
        text = f"the driver locked more than the {size_text(binding.room.value or 0)} that ulimit -l leaves"
        more = "it does not count for the driver on this host, and more than the host budget may be had"
        notices.append(Notice(name="lock-limit-not-counted", text=f"{text}: {more}", strict=False))
    return notices


def _folder(path: Path) -> Path:
    folder = path.expanduser()
    if not folder.is_dir():
        raise ConfigError("--dir", got=str(path), wanted="a folder that is there", do="name the model's folder")
    return folder


def _gpu_rates(gpu: GpuFacts, measured: GpuMeasured) -> GpuRates:
    """A GPU's member of the rates file."""
    sizes = [size for size in (gpu.memory_bytes.value, measured.memory_bytes) if size is not None]
    return GpuRates(
        index=gpu.index if measured.cuda_index is None else measured.cuda_index,
        name=gpu.name.value,
        # A slice of a GPU (MIG) has less than the whole.
        memory_bytes=min(sizes, default=None),
        numa_node=gpu.numa_node.value,
        **{name: rate.value for name, rate in measured.rates.items()},
    )
