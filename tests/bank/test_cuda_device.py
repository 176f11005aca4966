"""The device of the checks on a GPU that is not there: which of torch's and the driver's calls it makes, and in which order.

torch's CUDA parts are replaced by recorders of the same names, all of which torch has; no figure comes from here.
"""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from hotsplit.bank.checks import cuda_device
from hotsplit.bank.checks.cuda_device import CudaDevice
from hotsplit.bank.checks.device import STEPS_AHEAD, median_s
from hotsplit.bank.fake_driver import FakeDriver
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError

SUCCESS, NO_MEMORY = 0, 2


class Recorder:
    """What was called, in order."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, result=None):
        def call(*arguments, **keywords):
            self.calls.append((name, *arguments))
            return result

        return call


class Event:
    """An event whose time is the number of events recorded before it."""

    log = None
    num_recorded = 0

    def __init__(self, *, enable_timing=False):
        self.is_timed = enable_timing

    def record(self, stream=None):
        self.at, Event.num_recorded = Event.num_recorded, Event.num_recorded + 1
        self.stream = stream

    def elapsed_time(self, end):
        assert self.is_timed
        assert end.is_timed
        return float(end.at - self.at)  # milliseconds

    def synchronize(self):
        Event.log.append(("wait", self.at))


class Graph:
    """A graph of three nodes."""

    def __init__(self, *, keep_graph=False):
        self.is_kept = keep_graph
        self.done = []

    def instantiate(self):
        self.done.append("instantiate")

    def replay(self):
        self.done.append("replay")

    def raw_cuda_graph(self):
        assert self.is_kept
        return 77


def bindings_of(log, *, status=SUCCESS):
    """cuda.bindings.driver, as far as the device uses it itself."""

    def allocate(num_bytes, flags):
        log.calls.append(("cuMemHostAlloc", num_bytes, flags))
        held = torch.zeros(num_bytes, dtype=torch.uint8)
        log.held = held
        return status, held.data_ptr()

    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=SUCCESS),
        CU_MEMHOSTALLOC_PORTABLE=1,
        CU_MEMHOSTALLOC_DEVICEMAP=2,
        cuMemHostAlloc=allocate,
        cuMemHostGetDevicePointer=lambda address, flags: (SUCCESS, address),
        cuMemFreeHost=lambda address: (log.calls.append(("cuMemFreeHost",)) or SUCCESS,),
        cuGraphGetNodes=lambda graph: (SUCCESS, None, 3 if graph == 77 else 0),
        cuGetErrorName=lambda status: (SUCCESS, b"CUDA_ERROR_OUT_OF_MEMORY"),
    )


@pytest.fixture
def log():
    Event.log, Event.num_recorded = [], 0
    return Recorder()


@pytest.fixture
def make(log, monkeypatch):
    """Makes a device on the recorders."""
    streams = SimpleNamespace(handle=lambda stream: {"compute": 5, "side": 6}[stream])
    replaced = {
        "is_available": lambda: True,
        "set_device": log("set_device"),
        "set_stream": log("set_stream"),
        "Stream": lambda: "a stream of its own",
        "Event": Event,
        "ExternalStream": lambda handle, device: (handle, device),
        "CUDAGraph": Graph,
        "graph": lambda graph: contextlib.nullcontext(log.calls.append(("capture",))),
        "synchronize": log("synchronize"),
        "empty_cache": log("empty_cache"),
        "mem_get_info": lambda device: (3 << 30, 4 << 30),
        "get_device_properties": lambda device: SimpleNamespace(
            name="a GPU", total_memory=4 << 30, major=9, minor=0, multi_processor_count=132
        ),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)  # raises where torch has no such name
    monkeypatch.setattr(CudaDevice, "type", "cpu")
    monkeypatch.setattr(cuda_device, "load_driver", lambda device: FakeDriver())
    monkeypatch.setattr(cuda_device, "TorchStreams", lambda device: streams)
    monkeypatch.setattr(cuda_device, "DeviceTensors", lambda device: cpu_tensor)
    monkeypatch.setattr(cuda_device, "triton_kernels", lambda: None)

    def made(*, status=SUCCESS):
        monkeypatch.setattr(cuda_device.importlib, "import_module", lambda name: bindings_of(log, status=status))
        return CudaDevice()

    return made


def test_torch_has_the_graph_calls_that_the_device_makes():
    assert {"raw_cuda_graph", "instantiate", "replay"} <= set(dir(torch.cuda.CUDAGraph))
    assert "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters
    assert {"stream"} <= set(inspect.signature(torch.cuda.Event.record).parameters)


def test_all_work_goes_to_a_stream_of_its_own(make, log):
    make()
    assert [("set_device", 0), ("set_stream", "a stream of its own")] == log.calls


def test_names_are_those_of_the_gpu(make):
    device = make()
    wanted = {"gpu": "a GPU", "gpu_bytes": 4 << 30, "capability": "9.0", "multiprocessors": 132, "driver_cuda": 13000}
    assert wanted == {name: value for name, value in device.describe().items() if name in wanted}
    assert 3 << 30 == device.free_bytes()


def test_time_is_what_events_on_the_stream_say(make):
    device = make()
    start, end = device.stamp("side"), device.stamp("side")
    assert ((6, 0), 1e-3) == (start.stream, device.elapsed_s(start, end))
    assert 1e-3 == median_s(device, lambda: None, repeats=3)


def test_a_capture_comes_after_runs_that_compile_and_can_be_counted_and_replayed(make, log):
    device = make()
    graph = device.capture(lambda: log.calls.append(("work",)))
    assert [("work",), ("work",), ("synchronize", 0), ("capture",), ("work",)] == log.calls[2:]
    graph.replay()
    assert (3, ["instantiate", "replay"]) == (graph.num_nodes, graph._graph.done)


def test_no_more_steps_are_under_way_than_an_engine_has(make):
    device = make()
    for _ in range(STEPS_AHEAD + 2):
        device.launch(lambda: None)
    assert [("wait", 0), ("wait", 1)] == Event.log
    device.synchronise()
    device.launch(lambda: None)
    assert 2 == len(Event.log)


def test_pinned_memory_is_of_the_size_asked_for_and_given_back_when_the_device_is_done(make, log):
    device = make()
    with device.pinned(12_345) as held:
        held[0] = 9
        assert ((12_345,), torch.uint8, 9) == (tuple(held.shape), held.dtype, log.held[0].item())
    assert [("cuMemHostAlloc", 12_345, 3), ("synchronize", 0), ("cuMemFreeHost",)] == log.calls[2:]


def test_pinned_memory_that_is_refused_is_an_error_of_the_driver(make, log):
    device = make(status=NO_MEMORY)
    with pytest.raises(BankError, match="^cuMemHostAlloc: got CUDA_ERROR_OUT_OF_MEMORY$"), device.pinned(1):
        pass
    assert "cuMemFreeHost" not in [name for name, *_ in log.calls]


def test_what_nobody_uses_is_given_back(make, log):
    make().release()
    assert [("empty_cache",)] == log.calls[2:]
