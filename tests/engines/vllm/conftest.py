"""What the tests of vLLM share: checkpoints and stock answers made once, and runs that several tests look at.

Starting vLLM takes 15 seconds and more, so a run is made once per session and every fact about it is a test of its own.
`make test-vllm` runs what CI can afford; runs marked `soak` are for `make soak`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest

from engines.vllm import vllm_models
from engines.vllm.vllm_jobs import IN_ODD_STATES, WITH_BIASES, Job, Result, random_prompts, run

collect_ignore = ["vllm_probe", "vllm_server.py"]
"""Helpers without docstring examples, which need vLLM's companions to be imported."""
HOT_SHARE = 0.25
DYN_STEPS = 3


def once(play: Callable[..., Any]) -> Callable[..., Any]:
    """What a call gave, kept, and so is its failure: a run that fails takes its time once, not in every test."""

    @cache
    def attempt(*args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
        try:
            return play(*args, **kwargs), None
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            return None, error

    @wraps(play)
    def remembered(*args: Any, **kwargs: Any) -> Any:
        result, error = attempt(*args, **kwargs)
        if error is not None:
            raise error
        return result

    return remembered


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes; `make soak` runs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes runs only where it is asked for."""
    for item in items:
        if item.get_closest_marker("soak") and "soak" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes minutes: make soak"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("qwen3_moe") -> folder, made once."""

    @cache
    def make(name: str) -> Path:
        return vllm_models.make_checkpoint(name, tmp_path_factory.mktemp(name))

    return make


@pytest.fixture(scope="session")
def settings(checkpoint: Callable[[str], Path]) -> Callable[..., dict[str, str]]:
    """settings("qwen3_moe", ranks=2, HOTSPLIT_X="1") -> a quarter of the experts hot, and updates all the time."""

    def make(name: str, *, ranks: int = 1, **more: str) -> dict[str, str]:
        return {
            "HOTSPLIT_HOT_GIB": vllm_models.hot_gib(checkpoint(name), share=HOT_SHARE, ranks=ranks),
            "HOTSPLIT_DYN_STEPS": str(DYN_STEPS),
            **more,
        }

    return make


@pytest.fixture(scope="session")
def prompts(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """prompts("small-moe") -> eight prompts of mixed lengths: text of several domains for a trained model."""

    @cache
    def make(name: str) -> list[list[int]]:
        if name not in ("small-moe", "tiny-moe"):
            return random_prompts(vllm_models.config_of(checkpoint(name))["vocab_size"])
        return vllm_models.text_prompts(checkpoint(name))

    return make


@pytest.fixture(scope="session")
def stock(
    checkpoint: Callable[[str], Path], prompts: Callable[[str], list[list[int]]], tmp_path_factory: Any
) -> Callable[..., Result]:
    """stock("qwen3_moe", ranks=1, cache=None) -> what vLLM without hotsplit gives, run once."""

    @once
    def play(name: str, *, ranks: int = 1, cache: Path | None = None) -> Result:
        place = tmp_path_factory.mktemp(f"stock-{name}-{ranks}")
        return run(Job(model=checkpoint(name), prompts=prompts(name), ranks=ranks, cache=cache), place=place)

    return play


@pytest.fixture(scope="session")
def played(
    checkpoint: Callable[[str], Path],
    settings: Callable[..., dict[str, str]],
    prompts: Callable[[str], list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int], Result]:
    """played("glm4_moe", 2) -> the same with hotsplit, experts moving and the probe watching, run once."""

    @once
    def play(name: str, ranks: int) -> Result:
        more = [["evict"], ["pad 5"], ["pad 0", "report", "roll"]] if (name, ranks) == IN_ODD_STATES else []
        job = Job(
            model=checkpoint(name),
            prompts=prompts(name),
            ranks=ranks,
            settings=settings(name, ranks=ranks),
            probe={"VLLM_PROBE_EVERY": "0" if name in WITH_BIASES else "5"},
            passes=[[], *more],
            last=["report", "check rows"],
        )
        return run(job, place=tmp_path_factory.mktemp(f"hotsplit-{name}-{ranks}"))

    return play
