"""GPUs as NVML tells of them, the driver's own library, by way of NVIDIA's module pynvml (package nvidia-ml-py).

The module is a parameter: it is no dependency of hotsplit, and tests have their own. Each call may fail by itself, as on
GPUs without memory of their own; what fails is unknown, with NVML's word for it, and the rest is told.

Source: names of the calls as NVIDIA's NVML API reference has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from hotsplit.host.asking import Fact, fact, known, shortened, unknown
from hotsplit.host.gpu_facts import GpuFacts, GpuList, bus_id_of
from hotsplit.host.links import Link, as_generation, as_width, unknown_link

NvmlModule: TypeAlias = Any
"""pynvml, or what stands in for it; or a text: why there is none. Any, because it ships no types."""

_SOURCE: Final = "NVML"
_MOST_GPUS: Final = 1024


def read_nvml(module: NvmlModule) -> GpuList:
    """Ask NVML for every GPU.

    Args:
        module: pynvml, or why there is none.

    Returns:
        The GPUs; none, with the reason, where NVML does not answer. Nothing is raised.
    """
    if isinstance(module, str):
        return GpuList(reason=module, driver=unknown(module))
    start = _asked(module, "nvmlInit")
    if start.reason:
        reason = f"NVML does not start: {start.reason}"
        return GpuList(reason=reason, driver=unknown(reason))
    try:
        return _read(module)
    finally:
        _asked(module, "nvmlShutdown")


def read_nvml_link(module: NvmlModule, bus_id: str, *, is_loaded: bool) -> Link:
    """The link of one GPU, now.

    Args:
        module: pynvml, or why there is none.
        bus_id: Of the GPU, as /sys writes it.
        is_loaded: Whether a copy is under way.
    """
    if isinstance(module, str):
        return unknown_link(module)
    start = _asked(module, "nvmlInit")
    if start.reason:
        return unknown_link(f"NVML does not start: {start.reason}")
    try:
        for i in range(_count(module)):
            handle = _asked(module, "nvmlDeviceGetHandleByIndex", i)
            if handle.value is not None and _bus_id(module, handle.value) == bus_id:
                return _link(module, handle.value, is_loaded=is_loaded)
        return unknown_link(f"NVML knows no GPU at {bus_id}")
    finally:
        _asked(module, "nvmlShutdown")


def _read(module: Any) -> GpuList:
    gpus = []
    for i in range(_count(module)):
        handle = _asked(module, "nvmlDeviceGetHandleByIndex", i)
        bus_id = None if handle.value is None else _bus_id(module, handle.value)
        if bus_id is not None:
            gpus.append(_gpu(module, handle.value, index=i, bus_id=bus_id))
    return GpuList(gpus=tuple(gpus), driver=_text(_asked(module, "nvmlSystemGetDriverVersion")))


def _gpu(module: Any, handle: Any, *, index: int, bus_id: str) -> GpuFacts:
    memory = _asked(module, "nvmlDeviceGetMemoryInfo", handle)
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        name=_text(_asked(module, "nvmlDeviceGetName", handle)),
        memory_bytes=_number(_part(memory, "total"), least=1),
        link=_link(module, handle, is_loaded=False),
        numa_node=_number(_asked(module, "nvmlDeviceGetNumaNodeId", handle), least=0),
    )


def _link(module: Any, handle: Any, *, is_loaded: bool) -> Link:
    def ask(name: str, checked: Callable[[int | None], int | None]) -> Fact[int]:
        answer = _asked(module, name, handle)
        number = answer.value if type(answer.value) is int else None
        return fact(
            checked(number), source=_SOURCE, reason=answer.reason or f"NVML says {shortened(str(answer.value))}"
        )

    return Link(
        generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", as_generation),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth", as_width),
        max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", as_generation),
        max_width=ask("nvmlDeviceGetMaxPcieLinkWidth", as_width),
        is_loaded=is_loaded,
    )


def _count(module: Any) -> int:
    count = _asked(module, "nvmlDeviceGetCount").value
    return min(count, _MOST_GPUS) if type(count) is int else 0


def _bus_id(module: Any, handle: Any) -> str | None:
    text = _part(_asked(module, "nvmlDeviceGetPciInfo", handle), "busId").value
    return bus_id_of(text) if isinstance(text, str | bytes) else None


def _text(answer: Fact[Any]) -> Fact[str]:
    """A name, which old releases of the module give as bytes."""
    value = answer.value.decode("utf-8", errors="replace") if isinstance(answer.value, bytes) else answer.value
    if isinstance(value, str) and value.strip():
        return known(value.strip(), _SOURCE)
    return unknown(answer.reason or f"NVML says {shortened(str(value))}")


def _number(answer: Fact[Any], *, least: int) -> Fact[int]:
    value = answer.value
    if type(value) is int and value >= least:
        return known(value, _SOURCE)
    return unknown(answer.reason or f"NVML says {shortened(str(value))}")


def _part(answer: Fact[Any], name: str) -> Fact[Any]:
    """A member of a struct."""
    return Fact(value=getattr(answer.value, name, None), source=_SOURCE, reason=answer.reason)


def _asked(module: Any, name: str, *arguments: Any) -> Fact[Any]:
    """One call of the module, whose errors are classes of its own; old releases lack some calls."""
    try:
        # A call that only does something returns None, which is no unknown answer: it has no reason.
        return Fact(value=getattr(module, name)(*arguments), source=_SOURCE)
    except Exception as error:  # noqa: BLE001 - NVMLError, and whatever a driver that is being replaced brings about
        return unknown(" ".join(str(error).split())[:80] or type(error).__name__)
