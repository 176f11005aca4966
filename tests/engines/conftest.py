"""What the tests of the engines share: checkpoints made once, what the stock model gives for them, and loads that end."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hotsplit
from engines import tiny
from engines.stand_in import StandIn
from engines.stand_in import budget as stand_in_budget
from hotsplit.bank import cold_choice
from hotsplit.bank.fake_driver import NOTHING
from hotsplit.bank.mapped import MappedFiles
from hotsplit.engines.transformers import cpu_rows
from hotsplit.host.memory import LIMITED, MemoryLimit, MemoryLimits
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.sizes import expert_sizes

load_module = importlib.import_module("hotsplit.engines.transformers.loading")


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products only lose by a second thread, most of all on a busy machine
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here runs on the CPU, on every machine; a GPU is a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _same_default_type() -> Iterator[None]:
    """A test that leaves another default type behind must not make others fail."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint("qwen3_moe", dtype=..., fp8=...) -> folder, made once."""

    @cache
    def make(model_type: str, *, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(f"{model_type}-{str(dtype).removeprefix('torch.')}")
        if fp8:
            return tiny.quantise(make(model_type, dtype=dtype), folder / "fp8")
        if model_type == "qwen3_vl_moe":
            return tiny.make_vision_checkpoint(folder, dtype=dtype)
        return tiny.make_checkpoint(folder, model_type=model_type, dtype=dtype)

    return make


@pytest.fixture(scope="session")
def expected() -> Callable[..., Any]:
    """expected(folder, dtype=...) -> what tiny.play gives on the stock model, played once."""

    @cache
    def play(folder: Path, **kwargs: Any) -> Any:
        return tiny.play(tiny.stock(folder, **kwargs))

    return play


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """load(folder, hot=0.5, ...) -> a model with that part of its expert bytes as budget; closed when the test ends."""
    loaded = []

    def run(folder: Path, *, hot: float = 0.5, **settings: Any) -> Any:
        settings = {"state_dir": tmp_path / "state", "run_when_fits": True, "hot_gib": budget(folder, hot)} | settings
        loaded.append(hotsplit.load(folder, **settings))
        return loaded[-1]

    yield run
    for model in loaded:
        if hasattr(model, "hotsplit"):
            model.hotsplit.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory is all taken, and whose page cache is empty: cold rows are read directly, into slots."""
    limit = MemoryLimit(name="MemAvailable", state=LIMITED, available_bytes=0, source="here")
    monkeypatch.setattr(cpu_rows, "memory_limits", lambda: MemoryLimits(limits=(limit,)))
    monkeypatch.setattr(MappedFiles, "is_present", lambda *_: False)
    # A tiny model's slots would take more than their share of a tiny budget.
    for share in ("_LARGEST_SHARE", "RECENT_SHARE"):
        monkeypatch.setattr(cold_choice, share, 0.6)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StandIn]]:
    """stand_in(...) -> a machine that load() takes for a GPU; everything it gave is back when the test ends."""
    made: list[StandIn] = []

    def make(**options: Any) -> StandIn:
        machine = StandIn(**options)
        monkeypatch.setattr(load_module, "place_of", lambda device: machine.place())
        made.append(machine)
        return machine

    yield make
    gc.collect()
    assert [NOTHING] * len(made) == [machine.driver.held for machine in made]


@pytest.fixture
def load_on_gpu(tmp_path: Path, stand_in: Callable[..., StandIn]) -> Iterator[Callable[..., Any]]:
    """load_on_gpu(folder, rows=4, ...) -> a model with so many hot rows in every layer; closed when the test ends."""
    loaded: list[Any] = []

    def run(folder: Path, *, rows: int = 4, machine: StandIn | None = None, **settings: Any) -> Any:
        machine = machine or stand_in()
        settings = {"state_dir": tmp_path / "state", "run_when_fits": True, "dynamic": False} | settings
        if "hot_gib" not in settings:
            settings["hot_gib"] = stand_in_budget(folder, rows=rows, dynamic=settings["dynamic"])
        loaded.append(hotsplit.load(folder, **settings))
        return loaded[-1]

    yield run
    for model in loaded:
        model.hotsplit.close()


def budget(folder: Path, hot: float) -> float:
    """GiB for a part of the experts: their rows, with room for what aligns a row's tensors."""
    if hot == 0:
        return 0.0
    sizes = expert_sizes(read_headers(folder))
    rows = int(sizes.row_bytes.sum()) + 512 * len(sizes.row_bytes)
    return rows * (sizes.identity.num_experts or 0) * hot / 2**30
