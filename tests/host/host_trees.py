"""Hosts as /proc and /sys tell of them, for tests of the probe. numa_trees.py has NUMA nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hotsplit.host.asking import Fact, known, unknown

GIB = 2**30
FIXTURES = Path(__file__).parent / "fixtures"
INTEL_FLAGS = "fpu sse4_2 avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8"
ALL_CAPABILITIES, NO_CAPABILITIES, DOCKER_CAPABILITIES = "000001ffffffffff", "0" * 16, "00000000a80425fb"
"""Of root on a host, of a user, and of root in a container as docker starts it: without IPC_LOCK and SYS_NICE."""


def put(root: Path, files: Mapping[str, object]) -> None:
    """Files by their names under the root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def put_host(
    root: Path,
    *,
    total_gib: float = 512,
    available_gib: float = 400,
    memlock: str = "unlimited",
    hard: str | None = None,
    capabilities: str = NO_CAPABILITIES,
    kernel: str = "6.8.0-45-generic",
) -> Path:
    """A plain host of one process: no control group that limits, no container."""
    put(root, {
        "proc/meminfo": f"MemTotal: {int(total_gib * 2**20)} kB\nMemFree: 1 kB\nMemAvailable: {int(available_gib * 2**20)} kB",
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8480+\nflags\t\t: {INTEL_FLAGS}",
        "proc/self/cgroup": "0::/user.slice",
        "proc/self/limits": f"Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max processes             127000               127000               processes \n"
        f"Max locked memory         {memlock:<20} {hard or memlock:<20} bytes     ",
        "proc/self/status": f"Name:\tpython\nVmLck:\t       0 kB\nCapEff:\t{capabilities}\nCpus_allowed_list:\t0-3",
        "proc/self/uid_map": "         0          0 4294967295",
        "proc/sys/kernel/osrelease": kernel,
        "sys/devices/system/cpu/online": "0-7",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": 0,
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": 0,
    })  # fmt: skip
    return root


def put_group_v2(root: Path, *, limit: object, used: int, stat: str, high: object = "max") -> None:
    """The control group of the process, cgroup v2."""
    base = "sys/fs/cgroup/user.slice"
    put(root, {
        f"{base}/memory.max": limit, f"{base}/memory.high": high, f"{base}/memory.current": used, f"{base}/memory.stat": stat,
    })  # fmt: skip


def put_group_v1(root: Path, *, limit: object, used: int, stat: str) -> None:
    """The control group of the process, cgroup v1."""
    put(root, {
        "proc/self/cgroup": "4:memory:/job\n0::/",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": used,
        "sys/fs/cgroup/memory/job/memory.stat": stat,
    })  # fmt: skip


def put_gpu(
    root: Path,
    path: Sequence[str],
    *,
    node: object = 0,
    link: tuple[object, object] = ("32.0 GT/s PCIe", 16),
    most: tuple[object, object] = ("32.0 GT/s PCIe", 16),
    bridges: Mapping[str, tuple[str, int]] | None = None,
) -> None:
    """A GPU below bridges, as the kernel lays them out: real folders, and a link by the place on the bus.

    `path` begins with the host bridge and ends with the GPU; `bridges` has links that differ from the GPU's.
    """
    folder = root / "sys/devices"
    for part in path:
        folder = folder / part
        speed, width = link if part == path[-1] else (bridges or {}).get(part, most)
        if part != path[0]:
            name = str(folder.relative_to(root))
            put(root, {
                f"{name}/current_link_speed": speed, f"{name}/current_link_width": width,
                f"{name}/max_link_speed": most[0] if part == path[-1] else speed, f"{name}/max_link_width": most[1],
            })  # fmt: skip
            devices = root / "sys/bus/pci/devices"
            devices.mkdir(parents=True, exist_ok=True)
            if not (devices / part).exists():
                (devices / part).symlink_to(folder)
    place = str(folder.relative_to(root))
    put(root, {f"{place}/vendor": "0x10de", f"{place}/class": "0x030200", f"{place}/numa_node": node})


def tools(**outputs: str) -> Callable[[Sequence[str]], Fact[str]]:
    """Tools by the last word of their command line, x for `nvidia-smi -q -x`; every other one is not installed."""

    def run(command: Sequence[str]) -> Fact[str]:
        name = command[-1].lstrip("-") if len(command) < 4 else "x"
        text = outputs.get(name)
        return unknown(f"{command[0]} is not installed") if text is None else known(text, " ".join(command))

    return run


def fixture(name: str) -> str:
    """What a tool printed."""
    return (FIXTURES / name).read_text()


class FakeNvmlError(Exception):
    """As the module's own errors: no class that anybody knows."""


class FakeNvml:
    """The module pynvml of a host: what each call gives; an Exception is raised, a missing name is missing.

    Handles are indices.
    """

    def __init__(self, *gpus: Mapping[str, object], driver: object = "570.86.15", init: object = None) -> None:
        self._gpus, self._driver, self._init = gpus, driver, init
        self.starts = 0

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        _given(self._init)
        self.starts += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - its name
        self.starts -= 1

    def nvmlSystemGetDriverVersion(self) -> object:  # noqa: N802 - its name
        return _given(self._driver)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - its name
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - its name
        return index

    def __getattr__(self, name: str) -> Callable[[int], object]:
        short = name.removeprefix("nvmlDeviceGet")
        if short == name or not any(short in gpu for gpu in self._gpus):
            raise AttributeError(name)
        return lambda handle: _given(self._gpus[handle].get(short))


class Struct:
    """What NVML gives for several values."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def nvml_gpu(bus_id: object = "00000000:17:00.0", **values: object) -> dict[str, object]:
    """One GPU of a FakeNvml, an H200 unless said otherwise."""
    return {
        "PciInfo": Struct(busId=bus_id),
        "Name": "NVIDIA H200",
        "MemoryInfo": Struct(total=143771 * 2**20),
        "CurrPcieLinkGeneration": 1,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkGeneration": 5,
        "MaxPcieLinkWidth": 16,
        **values,
    }


def _given(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value
