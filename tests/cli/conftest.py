"""How the tests of the command line run it: in this process through the real entry point, streams kept apart."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hotsplit.cli import openai_client
from hotsplit.cli.main import main
from hotsplit.data import text_path, tiny_moe_path
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from patience import LIMIT_S

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
"""Of the bundled model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    """Exit code."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""

    def refusal(self, code: int = 1) -> str:
        """The one line that a refused command prints, after whatever it had noticed before."""
        assert (code, "") == (self.code, self.out), self.err
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("hotsplit: ")]
        assert self.err.endswith(f"{line}\n")
        return line


Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the tests may be as busy as this machine: only a hang is one."""
    monkeypatch.setattr(openai_client, "_QUESTION_S", LIMIT_S)


@pytest.fixture(scope="session")
def cli() -> Cli:
    """cli("plan", ..., env={...}) -> Result."""

    def run(*arguments: object, env: Mapping[str, str] | None = None) -> Result:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["hotsplit", *map(str, arguments)])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main()
                except SystemExit as stop:
                    code = stop.code
        return Result(code=code, out=out.getvalue(), err=err.getvalue())

    return run


@pytest.fixture(scope="session")
def write_counts() -> Callable[..., Path]:
    """write_counts(path, seed=..., tokens=..., identity=...) -> a skewed histogram of the bundled model's shape."""

    def write(path: Path, *, seed: int = 0, tokens: int = 60_000, identity: ModelIdentity = TINY) -> Path:
        favourites, draws = np.random.default_rng(seed), np.random.default_rng([seed, tokens])
        shares_E = 1.0 / np.arange(1, identity.num_experts + 1)
        counts_LE = [
            draws.multinomial(tokens * identity.top_k, favourites.permutation(shares_E / shares_E.sum()))
            for _ in identity.layers
        ]
        counted = PhaseCounts(counts=np.array(counts_LE, dtype=np.float64), tokens=tokens)
        save_histogram(Histogram(identity=identity, phases={"decode": counted}, name="made up"), path)
        return path

    return write


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory, write_counts: Callable[..., Path]) -> Path:
    """A histogram of the bundled model."""
    return write_counts(tmp_path_factory.mktemp("counts") / "counts.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """One profile of the bundled model on two of its texts, made once."""

    result: Result
    """Of the command."""
    histogram: Path
    """What it wrote."""
    trace: Path
    """What it wrote beside it."""


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Profiled:
    """12 prompts of 24 tokens, each with 12 decoded."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products only lose by a second thread
    folder = tmp_path_factory.mktemp("profiled")
    histogram, trace = folder / "hist.json", folder / "trace.npz"
    texts = (text_path("python"), text_path("english"))
    size = ("--prompt-tokens", 24, "--decode-tokens", 12, "--max-prompts", 6, "--batch-size", 4)
    result = cli("profile", tiny_moe_path(), "--data", *texts, *size, "-o", histogram, "--trace", trace)
    torch.set_num_threads(threads)
    assert 0 == result.code, result.err
    return Profiled(result=result, histogram=histogram, trace=trace)
