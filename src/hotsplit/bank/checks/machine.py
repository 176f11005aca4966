"""What the machine says of itself, and where cold rows can lie on it.

Two checks. The first asks: the device's figures, its place on the PCI bus, NUMA nodes, memory. The second tries: it lets
cuda_probe.py choose a memory as the product does at start, then makes ranges of it whose rows are no whole pages, and
moves bytes into both of their memories and back, by kernels, by torch and by the driver.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.findings import Fact, Figure, Finding, Goal, Proof, not_measured
from hotsplit.bank.cuda_probe import LEAST_RATIO, Attempt, BackingChoice, Probe, choose_backing
from hotsplit.bank.cuda_ranges import CudaRange
from hotsplit.host.memory import memory_limits
from hotsplit.host.numa import choose_placement, gpu_node, read_nodes
from hotsplit.host.page_nodes import page_nodes
from hotsplit.units import MIB

_ATTRIBUTES: Final = (
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "GLOBAL_MEMORY_BUS_WIDTH",
    "HOST_NUMA_ID",
    "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "HOST_REGISTER_SUPPORTED",
    "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "L2_CACHE_SIZE",
    "MEMORY_CLOCK_RATE",
    "MULTIPROCESSOR_COUNT",
    "PAGEABLE_MEMORY_ACCESS",
    "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
)
_LINK_FILES: Final = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
_HOT_ROWS, _COLD_ROWS = 3, 4


def check_machine(bench: Bench) -> Iterator[Finding]:
    """Ask the device and the kernel.

    Args:
        bench: Gets the placement of cold rows.
    """
    driver = bench.device.driver
    bus_id = driver.bus_id()
    yield Fact(name="attributes", value={name: driver.attribute(name) for name in _ATTRIBUTES})
    yield Fact(name="bus id", value=bus_id)
    yield Fact(name="link", value=link_files(bus_id))
    yield Fact(name="NUMA node of the GPU", value=gpu_node(bus_id))
    yield Fact(
        name="NUMA nodes",
        value=[
            {"node": node.number, "has_cpus": node.has_cpus, "total_bytes": node.total_bytes} for node in read_nodes()
        ],
    )
    yield Fact(name="host memory", value=str(memory_limits()))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Fact(name="limit on locked memory", value=None if limit == resource.RLIM_INFINITY else limit)
    yield Fact(name="GPU memory left", value=bench.device.free_bytes())
    bench.placement, notices = choose_placement(
        "preferred", bus_id=bus_id, driver_node=driver.attribute("HOST_NUMA_ID")
    )
    yield Fact(name="placement", value=str(bench.placement))
    yield from (Fact(name="notice", value=str(notice)) for notice in notices)


def check_backing(bench: Bench) -> Iterator[Finding]:
    """Choose a memory for cold rows, then use it.

    Args:
        bench: Gets the location.
    """
    device = bench.device
    probe = Probe(read_rate=device.read_rate, tensor_at=device.tensor_at, trial_bytes=bench.sizes.trial_bytes)
    choice = choose_backing(device.driver, probe=probe, placement=bench.placement)
    bench.location = choice.location
    yield Fact(name="choice", value=str(choice))
    yield from _rates(choice)
    yield from (Fact(name="notice", value=str(notice)) for notice in choice.notices)
    if choice.location is None:
        return
    yield Fact(name="page", value=choice.page_bytes)
    for row_bytes in bench.sizes.odd_row_bytes:
        yield from _odd_rows(bench, row_bytes)


def link_files(bus_id: str, *, root: Path = Path("/")) -> dict[str, str | None]:
    """What the kernel says of a device's link; None where it does not. A link that idles may be slower than it can be.

    Args:
        bus_id: As /sys writes it.
        root: Where /sys lies; another one only in tests.
    """
    folder = root / "sys/bus/pci/devices" / bus_id

    def read(name: str) -> str | None:
        try:
            return (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    return {name: read(name) for name in _LINK_FILES}


def _rates(choice: BackingChoice) -> Iterator[Figure]:
    """What was read at which rate, beside plain pinned memory."""
    goal = Goal(least=LEAST_RATIO)
    attempts: list[Attempt] = [*choice.refused, *([] if choice.chosen is choice.pinned else [choice.chosen])]
    for attempt in attempts:
        name = f"torch.sum over {attempt.backing}"
        if attempt.read_bytes_per_s is None:
            yield not_measured(name, unit="bytes/s", reason=attempt.refusal)
            continue
        yield Figure(
            name=name,
            value=attempt.read_bytes_per_s,
            unit="bytes/s",
            bound=choice.pinned.read_bytes_per_s,
            bound_is="the same over registered pages",
            goal=goal,
        )


def _odd_rows(bench: Bench, row_bytes: int) -> Iterator[Finding]:
    """A range of rows that are no whole pages: where they lie, and whether they keep their bytes."""
    memory, num_rows = bench.memory(), _HOT_ROWS + _COLD_ROWS
    what = f"rows of {row_bytes / MIB:.4g} MiB"
    with opened(
        bench, CudaRange(shape=(num_rows, row_bytes), dtype=torch.uint8, num_fast=_HOT_ROWS, memory=memory)
    ) as rows:
        on_edge = rows.row_address(_HOT_ROWS) == rows.edge and rows.edge % memory.page_bytes == 0
        yield Proof(name=f"{what}: the first cold one lies on a page edge", holds=on_edge)
        yield Fact(name=f"{what}: nodes of cold pages", value=page_nodes(rows.edge, rows.slow_bytes).describe())
        yield from _kept_bytes(bench, rows, what=what)


def _kept_bytes(bench: Bench, rows: CudaRange, *, what: str) -> Iterator[Proof]:
    """Every way that rows are written by: a kernel, torch's copies from elsewhere, the driver's from row to row."""
    tensor, device = rows.tensor, bench.device
    for row in range(len(tensor)):
        tensor[row].fill_(row + 1)
    device.synchronise()
    found = [tensor[:, column].tolist() for column in (0, tensor.shape[1] // 2, -1)]
    wanted = list(range(1, len(tensor) + 1))
    yield Proof(name=f"{what}: a kernel's bytes come back", holds=found == [wanted] * 3)

    noise_W = torch.randint(
        0, 256, tensor.shape[1:], dtype=torch.uint8, device=device.type, generator=bench.generator()
    )
    cold, hot = _HOT_ROWS, 0
    tensor[cold].copy_(noise_W)
    tensor[hot].copy_(tensor[cold])
    is_same = torch.equal(tensor[hot].clone(), noise_W)
    yield Proof(name=f"{what}: torch copies into a cold row and out of it", holds=is_same)

    device.synchronise()
    for source, target in ((cold, hot + 1), (hot + 1, cold + 1)):
        device.calls.copy(
            rows.row_address(target),
            source=rows.row_address(source),
            num_bytes=tensor.shape[1],
            stream=device.streams.handle("side"),
        )
    device.synchronise()
    is_same = all(torch.equal(tensor[row], noise_W) for row in (hot + 1, cold + 1))
    is_alone = tensor[[hot + 2, cold + 2], 0].tolist() == [hot + 3, cold + 3]
    yield Proof(name=f"{what}: the driver copies both ways, and touches no other row", holds=is_same and is_alone)
