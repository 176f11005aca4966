"""How a probe looks: one JSON object with stable keys, and plain tables; whatever is unknown there has its reason."""

from __future__ import annotations

from typing import Any

from hotsplit.cli import console
from hotsplit.cli.measuring import GPU_RATES, link_of, measured_of
from hotsplit.cli.probing import Probe
from hotsplit.host.asking import Fact, fact
from hotsplit.host.cpu import cpu_summary
from hotsplit.host.gpu_facts import GpuFacts
from hotsplit.host.limits import BudgetLimit, size_text
from hotsplit.host.links import RELATIONS, Link
from hotsplit.host.topology import clamped
from hotsplit.plan.rates import GIGA, to_json

_UNKNOWN = "unknown"
_LABEL = 14
"""Columns of the names of facts."""
_RATE_NAMES = {
    "hbm_bytes_per_s": "own memory",
    "dma_h2d_bytes_per_s": "copies",
    "in_place_bytes_per_s": "read in place",
}


class _Reasons(dict[str, str]):
    """Why what is null is null, by its place in the JSON object."""

    def take(self, place: str, told: Fact[Any]) -> Any:
        """The value of a fact; where there is none, its reason is kept."""
        if told.value is None:
            self[place] = told.reason
        return told.value


def probe_json(result: Probe) -> dict[str, Any]:
    """A host's facts; seconds and bytes in base units, null for unknown, and every reason in `unknown`.

    Args:
        result: From `hotsplit probe`.
    """
    why = _Reasons()
    survey, budget = result.survey, result.survey.budget
    free = budget.binding_unlocked
    return {
        "kind": "probe",
        "host": _host_json(result, why),
        "gpus": [_gpu_json(gpu, result, why) for gpu in survey.gpus.gpus],
        "relations": [
            {"gpus": list(pair), "relation": why.take(f"relations[{i}].relation", how), "source": how.source or None}
            for i, (pair, how) in enumerate(survey.topology.relations.items())
        ],
        "nodes": _nodes_json(result, why),
        "limits": [_limit_json(limit, why) for limit in budget.limits],
        "budget": {
            "bytes": budget.num_bytes,
            "binding": None if budget.binding is None else budget.binding.name,
            "do": None if budget.binding is None else budget.binding.do,
            "not_locked_bytes": None if free is None else free.room.value,
            "not_locked_binding": None if free is None else free.name,
        },
        "measured": {
            "memory_bytes_per_s": why.take("measured.memory_bytes_per_s", result.measured.memory.total),
            "all_gpus_h2d_bytes_per_s": why.take("measured.all_gpus_h2d_bytes_per_s", result.measured.all_dma),
            "all_gpus_in_place_bytes_per_s": why.take(
                "measured.all_gpus_in_place_bytes_per_s", result.measured.all_in_place
            ),
            "disk_bytes_per_s": why.take("measured.disk_bytes_per_s", result.measured.disk),
            "disk": None if result.mount.value is None else str(result.mount.value),
        },
        "rates": to_json(result.rates),
        "unknown": dict(why),
        "notices": [str(notice) for notice in result.notices],
    }


def _host_json(result: Probe, why: _Reasons) -> dict[str, Any]:
    survey = result.survey
    cpu, container, huge = survey.cpu, survey.container, survey.huge_pages
    return {
        "kernel": why.take("host.kernel", container.kernel),
        "wsl": why.take("host.wsl", container.wsl),
        "containers": list(container.kinds),
        "container_signs": list(container.signs),
        "capabilities": why.take("host.capabilities", container.capabilities),
        "can_place": why.take("host.can_place", survey.topology.can_place) == "yes" or None,
        "cpu": why.take("host.cpu", cpu.model),
        "cpu_flags": why.take("host.cpu_flags", cpu.flags),
        "cpus_online": why.take("host.cpus_online", cpu.online),
        "cpus_usable": why.take("host.cpus_usable", cpu.usable),
        "memory_bytes": why.take("host.memory_bytes", survey.total),
        "transparent_huge_pages": why.take("host.transparent_huge_pages", huge.mode),
        "huge_page_pools": [
            {
                "page_bytes": pool.page_bytes,
                "total": why.take(f"host.huge_page_pools[{i}].total", pool.total),
                "free": why.take(f"host.huge_page_pools[{i}].free", pool.free),
                "reserved": why.take(f"host.huge_page_pools[{i}].reserved", pool.reserved),
            }
            for i, pool in enumerate(huge.pools)
        ],
        "driver": why.take("host.driver", survey.gpus.driver),
    }


def _gpu_json(gpu: GpuFacts, result: Probe, why: _Reasons) -> dict[str, Any]:
    place = f"gpus[{gpu.index}]"
    measured = measured_of(result.measured, gpu.bus_id)
    link = link_of(gpu, measured)
    return {
        "index": gpu.index,
        "cuda_index": measured.cuda_index,
        "bus_id": gpu.bus_id,
        "name": why.take(f"{place}.name", gpu.name),
        "memory_bytes": why.take(f"{place}.memory_bytes", gpu.memory_bytes),
        "numa_node": why.take(f"{place}.numa_node", gpu.numa_node),
        "cold_rows_node": why.take(f"{place}.cold_rows_node", result.survey.topology.cold_nodes[gpu.index]),
        "link": {
            "generation": why.take(f"{place}.link.generation", link.generation),
            "width": why.take(f"{place}.link.width", link.width),
            "max_generation": why.take(f"{place}.link.max_generation", link.max_generation),
            "max_width": why.take(f"{place}.link.max_width", link.max_width),
            "is_loaded": link.is_loaded,
        },
        "path": list(gpu.path),
        **{name: why.take(f"{place}.{name}", rate) for name, rate in measured.rates.items()},
    }


def _nodes_json(result: Probe, why: _Reasons) -> list[dict[str, Any]]:
    topology, budget = result.survey.topology, result.survey.budget.num_bytes
    stats = why.take("nodes.numastat", topology.stats) or {}
    nodes = []
    for node in topology.nodes:
        place, rate = f"nodes[{node.number}]", result.measured.memory.nodes.get(node.number)
        nodes.append(
            {
                "number": node.number,
                "has_cpus": node.has_cpus,
                "total_bytes": why.take(f"{place}.total_bytes", _told(node.total_bytes)),
                "free_bytes": why.take(f"{place}.free_bytes", _told(node.free_bytes)),
                "most_bytes": clamped(node.total_bytes, budget_bytes=budget),
                "distances": list(node.distances),
                "numastat": stats.get(node.number),
                "read_bytes_per_s": None if rate is None else why.take(f"{place}.read_bytes_per_s", rate),
            }
        )
    return nodes


def _told(num_bytes: int | None) -> Fact[int]:
    """A figure of a node's meminfo."""
    return fact(num_bytes, source="meminfo", reason="the node's meminfo does not tell it")


def _limit_json(limit: BudgetLimit, why: _Reasons) -> dict[str, Any]:
    return {
        "name": limit.name,
        "state": limit.state,
        "room_bytes": limit.room.value if limit.is_unlimited else why.take(f"limits.{limit.name}", limit.room),
        "source": limit.room.source or limit.room.reason,
        "is_for_locked": limit.is_for_locked,
        "do": limit.do or None,
    }


def print_probe(result: Probe) -> None:
    """Tables of what there is, then the limits that bind, then the rates, then every reason for what is unknown.

    Args:
        result: From `hotsplit probe`.
    """
    _print_host(result)
    _print_gpus(result)
    _print_nodes(result)
    _print_limits(result)
    _print_rates(result)
    _print_unknown(probe_json(result)["unknown"])


def _print_host(result: Probe) -> None:
    survey = result.survey
    cpu, container, huge = survey.cpu, survey.container, survey.huge_pages
    has = container.capabilities.value
    privileges = (
        str(container.capabilities)
        if has is None
        else ", ".join(f"{'' if on else 'no '}{name}" for name, on in has.items())
    )
    pools = ", ".join(
        f"{_amount(pool.free)} of {_amount(pool.total)} pages of {size_text(pool.page_bytes)} free"
        for pool in huge.pools
    )
    signs = f"{', '.join(container.kinds)} ({', '.join(container.signs)})" if container.kinds else "no signs of one"
    console.out.print("host", style="bold")
    for label, text in (
        ("kernel", f"{_text(container.kernel)}; WSL: {_text(container.wsl)}"),
        ("container", signs),
        ("privileges", f"{privileges}; place memory on NUMA nodes: {_text(survey.topology.can_place)}"),
        ("CPU", f"{_text(cpu.model)}, {_amount(cpu.usable)} of {_amount(cpu.online)} CPUs usable"),
        ("instructions", _text(cpu_summary(cpu))),
        ("memory", _size(survey.total)),
        ("huge pages", f"transparent: {_text(huge.mode)}; pools: {pools or 'none told'}"),
        ("GPU driver", _text(survey.gpus.driver)),
    ):
        console.prose(text, indent=_LABEL, label=label)


def _print_gpus(result: Probe) -> None:
    survey = result.survey
    if not survey.gpus.gpus:
        why = f"no driver answers: {survey.gpus.reason}" if survey.gpus.is_silent else "the driver tells of none"
        console.prose(f"no NVIDIA GPU found: none on the PCI bus, and {why}")
        return
    rows = []
    for gpu in survey.gpus.gpus:
        link = link_of(gpu, measured_of(result.measured, gpu.bus_id))
        node, cold = gpu.numa_node, survey.topology.cold_nodes[gpu.index]
        cells = [
            gpu.bus_id,
            _cell(gpu.name),
            _size_cell(gpu.memory_bytes),
            *_link_cells(link),
            _cell(node),
            _cell(cold),
        ]
        rows.append([f"GPU {gpu.index}", *cells])
    columns = ["", "bus id", "name", "memory", "link", "at most", "NUMA\nnode", "cold rows\non node"]
    console.table("", columns=columns, rows=rows)
    for (one, other), how in survey.topology.relations.items():
        word = how.value or ""
        meaning = RELATIONS.get(word.rstrip("0123456789") or word, "")
        console.prose(f"{_text(how)}{meaning and f', {meaning}'}", indent=_LABEL, label=f"GPU {one} - {other}")


def _print_nodes(result: Probe) -> None:
    topology, budget = result.survey.topology, result.survey.budget.num_bytes
    stats = topology.stats.value or {}
    rows = []
    for node in topology.nodes:
        rate, told = result.measured.memory.nodes.get(node.number), stats.get(node.number, {})
        rows.append([
            f"node {node.number}",
            "yes" if node.has_cpus else "none",
            *(_bytes(value) for value in (node.total_bytes, node.free_bytes)),
            _bytes(clamped(node.total_bytes, budget_bytes=budget)),
            *(str(told.get(name, _UNKNOWN)) for name in ("numa_miss", "numa_foreign")),
            "-" if rate is None else _rate(rate),
        ])  # fmt: skip
    if not rows:
        console.prose("NUMA nodes: unknown, the kernel tells of none")
        return
    columns = ["NUMA", "CPUs", "memory", "free", "within\nbudget", "misses\npages", "foreign\npages", "read\nGB/s"]
    console.table("", columns=columns, rows=rows)


def _print_limits(result: Probe) -> None:
    budget = result.survey.budget
    console.out.print("\nlimits on host memory", style="bold")
    for limit in budget.limits:
        text = f"{size_text(limit.room.value)} left ({limit.room.source})" if limit.room.value is not None else ""
        text = text or f"{limit.state} ({limit.room.reason})"
        console.prose(text, indent=2 * _LABEL + 4, label=limit.name)
    binding, free = budget.binding, budget.binding_unlocked
    if binding is None:
        console.prose("host budget: unknown, since no limit can be read", style="bold")
        return
    console.prose(f"host budget: {_size(binding.room)}, bound by {binding.name}", style="bold")
    console.prose(f"to raise it: {binding.do}")
    if binding.is_for_locked and free is not None:
        console.prose(
            f"that is for memory which a GPU reads in place; a CPU alone has {_size(free.room)}, by {free.name}"
        )


def _print_rates(result: Probe) -> None:
    measured = result.measured
    rows = [["host memory", _rate(measured.memory.total), measured.memory.total.source]]
    for gpu in result.survey.gpus.gpus:
        rates = measured_of(measured, gpu.bus_id).rates
        rows += [
            [f"GPU {gpu.index}, {_RATE_NAMES[name]}", _rate(rates[name]), rates[name].source] for name in GPU_RATES
        ]
    for name, rate in (("copies", measured.all_dma), ("read in place", measured.all_in_place)):
        rows.append([f"all GPUs at once, {name}", _rate(rate), rate.source])
    rows.append(
        ["disk" if result.mount.value is None else f"disk {result.mount}", _rate(measured.disk), measured.disk.source]
    )
    console.table("", columns=["rates", "GB/s"], rows=[row[:2] for row in rows])
    for name, _, source in rows:
        if source:
            console.prose(f"{name}: {source}", indent=2, label="  ")


def _print_unknown(reasons: dict[str, str]) -> None:
    if not reasons:
        return
    console.out.print("\nunknown, and why", style="bold")
    by_reason: dict[str, list[str]] = {}
    for place, reason in reasons.items():
        by_reason.setdefault(reason, []).append(place)
    for reason, places in by_reason.items():
        console.prose(f"{', '.join(places)}: {reason}", indent=2, label="  ")


def _link_cells(link: Link) -> tuple[str, str]:
    """The link now, and at most."""
    if link.generation.value is None and link.width.value is None:
        return _UNKNOWN, _UNKNOWN
    state = "under load" if link.is_loaded else "idle"
    now = f"gen {_cell(link.generation)} x{_cell(link.width)} {state}"
    return now, f"gen {_cell(link.max_generation)} x{_cell(link.max_width)}"


def _text(told: Fact[str]) -> str:
    return str(told)


def _cell(told: Fact[Any]) -> str:
    return _UNKNOWN if told.value is None else str(told.value)


def _amount(told: Fact[int]) -> str:
    return _cell(told)


def _size(told: Fact[int]) -> str:
    return str(told) if told.value is None else size_text(told.value)


def _size_cell(told: Fact[int]) -> str:
    return _bytes(told.value)


def _bytes(value: int | None) -> str:
    return _UNKNOWN if value is None else size_text(value)


def _rate(told: Fact[float]) -> str:
    return _UNKNOWN if told.value is None else f"{told.value / GIGA:.1f}"
