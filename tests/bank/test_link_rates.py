from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hotsplit.bank.checks import cuda_device
from hotsplit.bank.checks.dry_device import DryDevice
from hotsplit.bank.fake_driver import FakeDriver, FakeMachine
from hotsplit.bank.link_rates import LinkSizes, cuda_openers, measure_links
from hotsplit.errors import BankError
from hotsplit.host.asking import known
from hotsplit.host.links import Link
from hotsplit.units import MIB

SIZES = LinkSizes(host_bytes=4 * MIB, device_bytes=2 * MIB, passes=2, together_s=0.005)


class StandIn(DryDevice):
    """A GPU whose every pass takes as long as its link says, on stand-ins for everything else.

    Between two stamps it counts the bytes that were copied or read, and what it tells is their number / its rate; with
    `shared`, all links of the machine carry no more together.
    """

    def __init__(self, bus_id="0000:17:00.0", *, dma=25e9, in_place=20e9, shared=None, memory=100):
        self.fake = FakeDriver(FakeMachine(bus_id=bus_id))
        super().__init__(self.fake)
        self._rates, self._shared, self.seconds = {"dma": dma, "in_place": in_place}, shared, 0.0
        self.thread, self.closed, self._memory = threading.get_ident(), 0, memory
        self.copied = 0
        copy, sum_rows = self.calls.copy, self.kernels.sum_rows

        def timed_copy(target, *, source, num_bytes, stream):
            self._spend("dma", num_bytes)
            self.copied += num_bytes
            copy(target, source=source, num_bytes=num_bytes, stream=stream)

        def timed(rows, *, order):
            self._spend("in_place", rows.nbytes)
            return sum_rows(rows, order=order)

        self.calls = SimpleNamespace(copy=timed_copy)
        self.kernels = self.kernels.__class__(
            name="stand-in", route_and_count=None, begin_step=None, experts=None, sum_rows=timed
        )

    def _spend(self, work, num_bytes):
        assert self.thread == threading.get_ident(), "a GPU is its thread's"
        others = self._shared.active if self._shared else 1
        rate = self._rates[work] if others == 1 else min(self._rates[work], self._shared.rate / others)
        self.seconds += num_bytes / rate

    def describe(self):
        return {"gpu_bytes": self._memory}

    def stamp(self, stream):
        return self.seconds

    def elapsed_s(self, start, end):
        return max(end - start, 1e-12)

    def release(self):
        self.closed += 1


class Shared:
    """A host whose memory all GPUs share."""

    def __init__(self, rate, *, active=1):
        self.rate, self.active = rate, active


def openers(*devices_of, opened=None):
    """What opens stand-ins, each in its thread; they are kept."""

    def opener(make):
        def run():
            device = make()
            if opened is not None:
                opened.append(device)
            return device

        return run

    return [opener(make) for make in devices_of]


def test_each_rate_is_bytes_over_the_time_of_its_own_passes():
    opened = []
    found = measure_links(openers(lambda: StandIn(dma=25e9, in_place=20e9), opened=opened), sizes=SIZES)
    (gpu,) = found.gpus
    assert ("0000:17:00.0", 100) == (gpu.bus_id, gpu.memory_bytes)
    assert 25e9 == pytest.approx(gpu.dma.value)
    assert 20e9 == pytest.approx(gpu.in_place.value)
    assert 20e9 == pytest.approx(gpu.hbm.value)
    assert 3 * 4 * MIB == opened[0].copied  # one pass to warm up
    assert (25e9, 20e9) == pytest.approx((found.all_dma.value, found.all_in_place.value))
    assert "one GPU alone" in found.all_dma.source
    assert 1 == opened[0].closed


def test_together_gpus_get_what_the_host_gives_them_all():
    shared = Shared(30e9)
    tell = []

    def told(what):
        tell.append(what)
        shared.active = 2 if what.startswith("all") else 1

    devices = openers(lambda: StandIn(shared=shared), lambda: StandIn("0000:98:00.0", shared=shared))
    found = measure_links(devices, sizes=SIZES, tell=told)
    assert [25e9, 25e9] == pytest.approx([gpu.dma.value for gpu in found.gpus])
    assert 30e9 == pytest.approx(found.all_dma.value)
    assert 30e9 == pytest.approx(found.all_in_place.value)
    assert ["GPU 0 of 2", "GPU 1 of 2", "all 2 GPUs"] == [
        " ".join(line.replace(":", "").split()[: 4 if line[0] == "G" else 3]) for line in tell
    ]


def test_a_slow_link_among_fast_ones_does_not_count_for_more_than_its_time():
    found = measure_links(openers(lambda: StandIn(dma=50e9), lambda: StandIn("0000:98:00.0", dma=5e9)), sizes=SIZES)
    assert 55e9 == pytest.approx(found.all_dma.value, rel=0.1)


def test_the_slowest_gpu_says_how_long_all_of_them_took():
    shared = Shared(25e9)

    def told(what):
        shared.active = 2 if what.startswith("all") else 1

    found = measure_links(
        openers(StandIn, lambda: StandIn("0000:98:00.0", shared=shared)), sizes=SIZES, tell=told
    )  # the second one alone gets a half of what it has alone
    assert 25e9 == pytest.approx(found.all_dma.value)


def test_a_gpu_that_cannot_be_opened_is_unknown_and_the_others_go_on():
    def broken():
        raise BankError("NVIDIA GPU", got="one that fell off the bus")

    found = measure_links(openers(broken, StandIn), sizes=SIZES)
    assert None is found.gpus[0].bus_id
    assert "fell off the bus" in found.gpus[0].dma.reason
    assert found.gpus[1].dma.value > 0
    assert "GPU 0: NVIDIA GPU: got one that fell off the bus" == found.all_dma.reason


def test_memory_that_cannot_be_locked_leaves_the_gpus_own_memory_known():
    class NoLock(StandIn):
        def pinned(self, num_bytes):
            raise BankError("cuMemHostAlloc", got="CUDA_ERROR_OUT_OF_MEMORY")

    (gpu,) = measure_links(openers(NoLock), sizes=SIZES).gpus
    assert gpu.hbm.value > 0
    assert "no locked host memory to read: cuMemHostAlloc" in gpu.dma.reason
    assert gpu.dma.reason == gpu.in_place.reason


def test_a_kernel_that_cannot_be_built_gives_way_to_torchs_sum():
    class NoCompiler(StandIn):
        def __init__(self):
            super().__init__()

            def fail(rows, *, order):
                raise FileNotFoundError("no C compiler")

            self.kernels = self.kernels.__class__(
                name="x", route_and_count=None, begin_step=None, experts=None, sum_rows=fail
            )

    found = measure_links(openers(NoCompiler), sizes=SIZES)
    assert 1e9 == found.gpus[0].in_place.value
    assert "torch's sum, since Triton's kernel fails: no C compiler" in found.gpus[0].in_place.source


def test_an_error_while_all_run_is_the_reason_and_nobody_waits_for_ever():
    class FailsTogether(StandIn):
        def elapsed_s(self, start, end):
            if threading.active_count() > 2 and self.copied > 20 * MIB:
                raise RuntimeError("CUDA error: an illegal memory access")
            return super().elapsed_s(start, end)

    found = measure_links(openers(lambda: StandIn("0000:98:00.0"), FailsTogether), sizes=SIZES)
    assert "illegal memory access" in found.all_dma.reason
    assert found.gpus[0].dma.value > 0


def test_the_link_is_read_while_copies_run():
    opened, seen = [], []

    def read_link(bus_id):
        before = opened[0].copied
        for _ in range(12_000):
            if opened[0].copied > before:
                break
            threading.Event().wait(0.005)
        seen.append((bus_id, opened[0].copied > before))
        four = known(4, "test")
        return Link(generation=four, width=four, max_generation=four, max_width=four, is_loaded=True)

    found = measure_links(openers(StandIn, opened=opened), sizes=SIZES, read_link=read_link)
    assert [("0000:17:00.0", True)] == seen
    assert (4, True) == (found.gpus[0].link.generation.value, found.gpus[0].link.is_loaded)


def test_nobody_asked_leaves_the_link_unknown():
    link = measure_links(openers(StandIn), sizes=SIZES).gpus[0].link
    assert (None, "nobody was asked") == (link.generation.value, link.generation.reason)


def test_of_no_gpu_everything_is_unknown():
    found = measure_links([], sizes=SIZES)
    assert () == found.gpus
    assert "unknown (CUDA sees no GPU)" == str(found.all_dma)


def test_every_gpu_that_cuda_sees_is_opened_by_its_own_number(monkeypatch):
    opened = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(cuda_device, "CudaDevice", opened.append)
    for opener in cuda_openers():
        opener()
    assert [0, 1, 2] == opened
