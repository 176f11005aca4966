"""Which memory a worker gets, by vLLM's device, and what is said about it."""

from __future__ import annotations

import resource

import pytest

from engines.vllm.vllm_probe.hotsplit_probe.gpu import PAGE_BYTES, StandIn
from hotsplit.bank import cuda_open
from hotsplit.bank.fake_driver import FakeMachine
from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.rows import place
from hotsplit.engines.vllm import backends
from hotsplit.engines.vllm.backends import BackendOptions, locked_memory, open_backend
from hotsplit.errors import UnsupportedEngineError

GIB = 2**30
LAYERS = [place((0, 1), num_experts=4, spare=True, inclusive=False)]


@pytest.fixture
def options(tmp_path):
    """options(cold_bytes=1) -> what a worker asks for."""
    return lambda **more: BackendOptions(bank_dir=tmp_path / "bank", **{"numa_policy": "preferred"} | more)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(machine) -> a GPU of stand-ins is the one of this process."""

    def make(machine=None):
        stand_in = StandIn(machine)
        monkeypatch.setattr(cuda_open, "gpu_parts", lambda index: stand_in.parts())
        return stand_in

    return make


def test_a_cpu_worker_has_anonymous_memory_and_a_bank_file(options, tmp_path):
    backend = open_backend("cpu", options=options())
    assert ("cpu-twin", FileMemory) == (backend.name, type(backend.memory))
    assert (tmp_path / "bank").is_dir()
    for nothing in (backend.settle, backend.enter_thread):
        nothing()
    backend.warm_up(None, 2)
    backend.close()


def test_a_gpu_worker_has_the_memory_that_was_chosen_and_that_is_said(options, gpu, caplog, tmp_path):
    caplog.set_level("INFO", logger="hotsplit")
    stand_in = gpu()
    backend = open_backend("cuda", options=options())
    assert ("cuda-stitched", 1) == (backend.name, backend.memory.num_banks)
    assert any(message.startswith("hotsplit: cold rows at HOST_NUMA node 0") for message in caplog.messages)
    assert not (tmp_path / "bank").exists()
    backend.settle()
    assert 1 == stand_in.num_settled
    stand_in.driver.calls.clear()
    backend.enter_thread()
    assert ["cuCtxSetCurrent"] == [call.name for call in stand_in.driver.calls]


def test_a_gpu_worker_compiles_what_a_step_runs_when_it_is_told_to(options, gpu):
    gpu()
    backend = open_backend("cuda", options=options())
    router = backend.device.router(LAYERS, row_bytes=[256], dyn_steps=10, copies_ids=False)
    backend.warm_up(router, 2)
    router.settle()
    assert 0 == sum(counts.sum() for counts in router.counters.counts.values())


def test_what_must_be_said_about_the_choice_is_said(options, gpu, caplog, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    pages = dict.fromkeys(("device", "host_numa", "host"), PAGE_BYTES)
    gpu(FakeMachine(granularity=pages, unsupported=frozenset({"host_numa", "host"})))
    backend = open_backend("cuda", options=options(cold_bytes=GIB))
    assert ("cuda-two-banks", 2) == (backend.name, backend.memory.num_banks)
    assert any("[locked-memory]" in message for message in caplog.messages)


def test_one_range_locks_nothing_and_so_no_limit_is_mentioned(options, gpu, caplog, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    gpu()
    open_backend("cuda", options=options(cold_bytes=GIB))
    assert "locked-memory" not in caplog.text


@pytest.mark.parametrize(
    ("limit", "is_said"),
    [(GIB - 1, True), (GIB, False), (2 * GIB, False), (resource.RLIM_INFINITY, False), (-1, False)],
)
def test_a_limit_on_locked_memory_below_the_cold_rows_is_said(limit, is_said):
    notices = locked_memory(GIB, limit=limit)
    assert is_said == bool(notices)
    assert all("ulimit -l unlimited, for Docker --ulimit memlock=-1" in notice.text for notice in notices)


def test_the_limit_is_the_systems_unless_one_is_given(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3, 4))
    assert [] == locked_memory(3)
    assert 1 == len(locked_memory(4))


def test_a_device_without_a_backend_is_refused_by_name(options):
    with pytest.raises(UnsupportedEngineError, match="device xpu: got no backend for its memory; wanted cpu or cuda"):
        open_backend("xpu", options=options())
    assert {"cpu", "cuda"} == set(backends.BACKENDS)
