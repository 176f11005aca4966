"""Driver calls: each goes out as CUDA has it, each refusal becomes one error, and without a driver it is said what lacks."""

from __future__ import annotations

import enum
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hotsplit.bank import driver as driver_module
from hotsplit.bank.driver import CudaDriver, Driver, Location, driver_error, load_driver
from hotsplit.bank.fake_driver import FakeDriver
from hotsplit.errors import BankError

GPU, NODE, HOST = Location(kind="device", index=2), Location(kind="host_numa", index=1), Location(kind="host")


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NAMELESS = 9999


def error_name(status):
    if status is Status.CUDA_ERROR_NAMELESS:
        return Status.CUDA_ERROR_INVALID_VALUE, None
    return Status.CUDA_SUCCESS, status.name.encode()


RESULTS = {
    "cuDeviceGet": "device",
    "cuDevicePrimaryCtxRetain": "context",
    "cuDriverGetVersion": 13000,
    "cuDeviceGetAttribute": 1,
    "cuDeviceGetPCIBusId": b"0000:1A:00.0\0\0\0\0",
    "cuMemGetAllocationGranularity": 1 << 21,
    "cuMemAddressReserve": 4096,
    "cuMemCreate": 77,
    "cuMemHostGetDevicePointer": 8192,
}
NO_RESULT = (
    "cuInit", "cuCtxSetCurrent", "cuMemAddressFree", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyAsync", "cuMemsetD32Async",
)  # fmt: skip


class Bindings:
    """Stands in for cuda.bindings.driver: the same names, the same tuples, no driver."""

    CUresult = Status
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID="134")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="readwrite")
    CUmemLocationType = SimpleNamespace(
        CU_MEM_LOCATION_TYPE_DEVICE="DEVICE",
        CU_MEM_LOCATION_TYPE_HOST_NUMA="HOST_NUMA",
        CU_MEM_LOCATION_TYPE_HOST="HOST",
    )
    CUmemAllocationProp = CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self):
        self.calls, self.refused = [], {}

    def __getattr__(self, name):
        if name == "cuGetErrorName":
            return error_name
        if name not in RESULTS and name not in NO_RESULT:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            status = self.refused.get(name, Status.CUDA_SUCCESS)
            if isinstance(status, Exception):
                raise status
            return (status, RESULTS.get(name)) if name in RESULTS else (status,)

        return call


@pytest.fixture
def bindings():
    return Bindings()


@pytest.fixture
def driver(bindings):
    made = CudaDriver(bindings, device=2)
    bindings.calls.clear()
    return made


def allocation(kind, index):
    return SimpleNamespace(type="pinned", location=SimpleNamespace(type=kind, id=index))


def access(kind, index):
    return SimpleNamespace(flags="readwrite", location=SimpleNamespace(type=kind, id=index))


CALLS = [
    (lambda d: d.make_current(), None, [("cuCtxSetCurrent", "context")]),
    (lambda d: d.version(), 13000, [("cuDriverGetVersion",)]),
    (lambda d: d.attribute("HOST_NUMA_ID"), 1, [("cuDeviceGetAttribute", "134", "device")]),
    (lambda d: d.bus_id(), "0000:1a:00.0", [("cuDeviceGetPCIBusId", 16, "device")]),
    (
        lambda d: d.granularity(NODE),
        1 << 21,
        [("cuMemGetAllocationGranularity", allocation("HOST_NUMA", 1), "minimum")],
    ),
    (lambda d: d.reserve(8192, alignment=4096), 4096, [("cuMemAddressReserve", 8192, 4096, 0, 0)]),
    (lambda d: d.free(4096, num_bytes=8192), None, [("cuMemAddressFree", 4096, 8192)]),
    (lambda d: d.create(64, location=GPU), 77, [("cuMemCreate", 64, allocation("DEVICE", 2), 0)]),
    (lambda d: d.create(64, location=HOST), 77, [("cuMemCreate", 64, allocation("HOST", 0), 0)]),
    (lambda d: d.release(77), None, [("cuMemRelease", 77)]),
    (lambda d: d.map(4096, num_bytes=64, handle=77), None, [("cuMemMap", 4096, 64, 0, 77, 0)]),
    (lambda d: d.unmap(4096, num_bytes=64), None, [("cuMemUnmap", 4096, 64)]),
    (
        lambda d: d.set_access(4096, num_bytes=64, locations=[GPU, NODE]),
        None,
        [("cuMemSetAccess", 4096, 64, [access("DEVICE", 2), access("HOST_NUMA", 1)], 2)],
    ),
    (
        lambda d: d.register(4096, num_bytes=64),
        8192,
        [("cuMemHostRegister", 4096, 64, 3), ("cuMemHostGetDevicePointer", 4096, 0)],
    ),
    (lambda d: d.unregister(4096), None, [("cuMemHostUnregister", 4096)]),
    (lambda d: d.copy(1, source=2, num_bytes=3, stream=4), None, [("cuMemcpyAsync", 1, 2, 3, 4)]),
    (lambda d: d.write32(4, value=7, stream=5), None, [("cuMemsetD32Async", 4, 7, 1, 5)]),
    (lambda d: d.write32(4, value=-1, stream=5), None, [("cuMemsetD32Async", 4, 0xFFFFFFFF, 1, 5)]),
]


@pytest.mark.parametrize(("make", "result", "calls"), CALLS, ids=[calls[0][0] for *_, calls in CALLS])
def test_a_method_makes_its_cuda_call(driver, bindings, make, result, calls):
    assert (result, calls) == (make(driver), bindings.calls)


@pytest.mark.parametrize(("make", "name"), [(make, calls[0][0]) for make, _, calls in CALLS])
def test_a_return_code_becomes_an_error_with_the_calls_and_the_codes_name(driver, bindings, make, name):
    bindings.refused[name] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(BankError) as caught:
        make(driver)
    assert f"{name}: got CUDA_ERROR_OUT_OF_MEMORY" == str(caught.value)
    assert (name, "CUDA_ERROR_OUT_OF_MEMORY") == (caught.value.call, caught.value.error_name)


def test_a_driver_starts_with_the_primary_context_current(bindings):
    CudaDriver(bindings, device=2)
    expected = [
        ("cuInit", 0),
        ("cuDeviceGet", 2),
        ("cuDevicePrimaryCtxRetain", "device"),
        ("cuCtxSetCurrent", "context"),
    ]
    assert expected == bindings.calls


def test_a_code_without_a_name_is_told_by_its_number(driver, bindings):
    bindings.refused["cuMemUnmap"] = Status.CUDA_ERROR_NAMELESS
    with pytest.raises(BankError, match="cuMemUnmap: got error 9999"):
        driver.unmap(4096, num_bytes=64)


def test_memory_without_a_device_address_does_not_stay_registered(driver, bindings):
    bindings.refused["cuMemHostGetDevicePointer"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(BankError, match="cuMemHostGetDevicePointer"):
        driver.register(4096, num_bytes=64)
    assert ("cuMemHostUnregister", 4096) == bindings.calls[-1]


def test_a_figure_that_bindings_or_driver_do_not_know_is_unknown_and_not_zero(driver, bindings):
    assert driver.attribute("MADE_UP") is None
    assert [] == bindings.calls
    bindings.refused["cuDeviceGetAttribute"] = Status.CUDA_ERROR_INVALID_VALUE
    assert driver.attribute("HOST_NUMA_ID") is None


def test_a_figure_that_cannot_be_asked_for_is_an_error(driver, bindings):
    bindings.refused["cuDeviceGetAttribute"] = Status.CUDA_ERROR_NOT_PERMITTED
    with pytest.raises(BankError, match="CUDA_ERROR_NOT_PERMITTED; in a container, start it with --cap-add SYS_NICE"):
        driver.attribute("HOST_NUMA_ID")


def test_without_a_driver_library_the_error_says_what_to_install(bindings):
    bindings.refused["cuInit"] = RuntimeError("Failed to dlopen libcuda.so.1\nand more")
    with pytest.raises(
        BankError, match=r"cuInit: got no CUDA driver \(Failed to dlopen libcuda.so.1\); install NVIDIA"
    ):
        CudaDriver(bindings, device=0)


def test_without_a_device_the_error_says_where_to_look(bindings):
    bindings.refused["cuInit"] = Status.CUDA_ERROR_NO_DEVICE
    with pytest.raises(BankError, match="CUDA_ERROR_NO_DEVICE; look at nvidia-smi and CUDA_VISIBLE_DEVICES"):
        CudaDriver(bindings, device=0)


def test_without_cuda_bindings_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(
        BankError, match="CUDA driver calls: got no module cuda.bindings .*; install a CUDA build of torch"
    ):
        load_driver()


def test_load_driver_takes_cuda_bindings_as_they_are_installed(monkeypatch, bindings):
    monkeypatch.setattr(driver_module.importlib, "import_module", {"cuda.bindings.driver": bindings}.__getitem__)
    assert 2 == load_driver(2).device
    assert ("cuDeviceGet", 2) in bindings.calls


def test_importing_the_module_loads_neither_torch_nor_cuda():
    code = "import sys, hotsplit.bank.driver; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set() == set(done.stdout.split()) & {"torch", "cuda.bindings.driver", "numpy"}


def test_a_location_reads_as_cuda_calls_it():
    assert ["device 2", "HOST_NUMA node 1", "HOST"] == [str(GPU), str(NODE), str(HOST)]


def test_a_refusal_keeps_what_else_is_known():
    error = driver_error("cuMemMap", name="CUDA_ERROR_INVALID_VALUE", detail="something is mapped there")
    assert "cuMemMap: got CUDA_ERROR_INVALID_VALUE (something is mapped there)" == str(error)


@pytest.mark.parametrize("kind", [CudaDriver, FakeDriver])
def test_a_driver_has_every_method_of_the_protocol_with_its_arguments(kind):
    methods = {
        name: made for name, made in vars(Driver).items() if inspect.isfunction(made) and not name.startswith("_")
    }
    assert 16 == len(methods)
    for name, method in methods.items():
        assert inspect.signature(method) == inspect.signature(getattr(kind, name)), name


def test_the_installed_cuda_bindings_know_every_name_that_is_used():
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    names = [*RESULTS, *NO_RESULT, "cuGetErrorName", "CU_MEMHOSTREGISTER_PORTABLE", "CU_MEMHOSTREGISTER_DEVICEMAP"]
    assert [] == [name for name in names if not hasattr(real, name)]
    for group in ("CUmemLocationType", "CUmemAllocationGranularity_flags", "CUmemAllocationType", "CUmemAccess_flags"):
        assert [] == [name for name in vars(getattr(Bindings, group)) if not hasattr(getattr(real, group), name)]
    described = real.CUmemAccessDesc()
    described.location.type, described.location.id = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, 1
    assert 1 == described.location.id
