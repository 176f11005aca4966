"""What all tests share: no network, no user's settings, no user's cache; and skips that say what is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hotsplit.data import tiny_moe_path

# Deadlines, and how fast examples are drawn, measure the machine, not the code. Derandomised: a run of CI and a run on a laptop try the same examples.
settings.register_profile(
    "hotsplit", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hotsplit")

_NEEDED = {"gpu": "torch", "vllm": "vllm", "transformers": "transformers"}


@pytest.fixture(autouse=True, scope="session")
def quiet_environment(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Settings of whoever runs the tests do not reach them, and nothing reaches the user's cache or the network.

    Nor does a GPU, unless the tests that need one are asked for: models would run there, and promise other bits.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HOTSPLIT_")]:  # noqa: TID251 - cleared, not read
            patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        if "gpu" not in str(pytestconfig.getoption("markexpr")):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """Folder of the bundled trained model: 4 MoE layers x 32 routed experts, top-4."""
    return tiny_moe_path()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with published histograms beside the repository; tests that need it are skipped without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder shared/data is not beside this repository")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and what was not asked for by name, with the reason."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="takes many minutes: make soak"))
    for mark, module in _NEEDED.items():
        reason = "" if importlib.util.find_spec(module) else f"needs {module}"
        for item in items:
            if item.get_closest_marker(mark) and (why := reason or _no_gpu(mark)):
                item.add_marker(pytest.mark.skip(reason=why))


def _no_gpu(mark: str) -> str:
    if mark != "gpu":
        return ""
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"
