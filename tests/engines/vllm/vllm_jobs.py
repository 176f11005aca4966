"""Runs of vLLM as the tests ask for them: what to run, under which environment, and what came out.

    job = Job(model=folder, prompts=..., settings={"HOTSPLIT_DYN_STEPS": "3"})
    result = run(job, place=tmp_path)            result.answers(0), result.snapshots, result.updates

Stock vLLM is the same job without settings.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.metrics import MetricsSnapshot, UpdateLine, read_snapshot

HERE = Path(__file__).parent
TIMEOUT_S = 400

ENGINE: Mapping[str, Any] = {"max_model_len": 512, "max_num_seqs": 64}
"""Arguments of vLLM in every run; small, so that start-up is quick."""
WITH_BIASES = ("gpt_oss",)
"""Models whose kernel holds expert biases itself: the probe cannot recompute them."""
IN_ODD_STATES = ("qwen3_moe", 1)
"""The run that also generates with its cold pages pushed out, with padding, and with a wrong row map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One offline run."""

    model: Path
    """The checkpoint's folder."""
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    max_tokens: int = 48
    """Generated per prompt."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """HOTSPLIT_ variables; none of them is stock vLLM."""
    probe: Mapping[str, str] | None = None
    """Variables of the probe (vllm_probe); None leaves it out."""
    passes: Sequence[Sequence[str]] = ((),)
    """One generation each, after these commands for the probe."""
    last: Sequence[str] = ()
    """Commands for the probe after the last generation."""
    ranks: int = 1
    """Tensor-parallel ranks."""
    cache: Path | None = None
    """Folder of the compile cache; None runs without torch.compile."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came out of a run."""

    passes: Sequence[Mapping[str, Any]]
    """As vllm_run.py writes them."""
    last: Mapping[str, list[dict[str, Any]]]
    """What the probe answered to the job's last commands: command -> rank by rank."""
    log: str
    """All that was printed."""
    place: Path
    """The run's own folder."""
    snapshots: Sequence[MetricsSnapshot]
    """The last one of every rank; none of stock."""

    def answers(self, number: int) -> list[dict[str, Any]]:
        """Tokens and log-probabilities of one pass.

        Args:
            number: Of the pass.
        """
        answers: list[dict[str, Any]] = self.passes[number]["answers"]
        return answers

    def told(self, command: str) -> list[dict[str, Any]]:
        """What the probe answered to a command the first time, rank by rank.

        Args:
            command: As in the job.
        """
        told = (*(one["told"] for one in self.passes), self.last)
        answer: list[dict[str, Any]] = next(answers[command] for answers in told if command in answers)
        return answer

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """Every step as the probe saw it: phase, tokens, pairs and hits.

        Args:
            rank: Whose.
        """
        lines = (self.place / "probe" / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def updates(self) -> list[UpdateLine]:
        """The update lines in the log, in their order."""
        return update_lines(self.log)


def run(job: Job, *, place: Path) -> Result:
    """Run a job in a process of its own.

    Args:
        job: What to run.
        place: Folder for its files; made when missing.

    Raises:
        AssertionError: It failed; the message has the end of its log.
    """
    place.mkdir(parents=True, exist_ok=True)
    ask, answer, log = place / "job.json", place / "result.json", place / "log.txt"
    engine = {**ENGINE, "tensor_parallel_size": job.ranks, "enforce_eager": job.cache is None, **job.engine}
    if job.ranks > 1:
        engine["distributed_executor_backend"] = "mp"
    content = {"model": str(job.model), "prompts": job.prompts, "max_tokens": job.max_tokens, "engine": engine}
    ask.write_text(json.dumps(content | {"passes": job.passes, "last": job.last}), encoding="utf-8")
    environment = environment_of(job.settings, probe=job.probe, cache=job.cache, place=place)
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, str(HERE / "vllm_run.py"), str(ask), str(answer)]
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=TIMEOUT_S, check=False
        )
    text = log.read_text(encoding="utf-8", errors="replace")
    assert 0 == done.returncode, f"vLLM ended with {done.returncode}; the end of its log:\n{text[-6000:]}"
    result = json.loads(answer.read_text(encoding="utf-8"))
    state = environment.get("HOTSPLIT_STATE_DIR")
    last = snapshots(Path(state)) if state else []
    return Result(passes=result["passes"], last=result["last"], log=text, place=place, snapshots=last)


def environment_of(
    settings: Mapping[str, str], *, probe: Mapping[str, str] | None, cache: Path | None, place: Path
) -> dict[str, str]:
    """The environment of a vLLM process: the user's own without settings, and all that makes runs comparable.

    Args:
        settings: HOTSPLIT_ variables.
        probe: Variables of the probe; None leaves it out.
        cache: Folder of the compile cache; None turns torch.compile off.
        place: The run's folder: state and what the probe finds go there.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 - handed on without anything that could change a run
        if not name.startswith(("HOTSPLIT_", "VLLM_", "PYTHON", "PYTEST", "PROMETHEUS", "TORCH"))
    }
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if settings:
        settings = {"HOTSPLIT_STATE_DIR": str(place / "state"), **settings}
    if probe is not None:
        (place / "probe").mkdir(parents=True, exist_ok=True)
        probe = {"VLLM_PROBE_DIR": str(place / "probe"), "PYTHONPATH": str(HERE / "vllm_probe"), **probe}
    compiling = {"TORCHDYNAMO_DISABLE": "1"} if cache is None else {"VLLM_CACHE_ROOT": str(cache)}
    return {**inherited, **fixed, **compiling, **settings, **(probe or {})}


def snapshots(state_dir: Path) -> list[MetricsSnapshot]:
    """The snapshots of the newest run in a state folder, in rank order.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
    """
    runs = sorted((state_dir / "runs").iterdir())
    return [read_snapshot(path) for path in sorted(runs[-1].glob("rank*.json"))]


def update_lines(log: str) -> list[UpdateLine]:
    """The update lines in a log.

    Args:
        log: Its text.
    """
    found = []
    for line in log.splitlines():
        try:
            found.append(UpdateLine.parse(line))
        except HotsplitError:
            continue
    return found


def random_prompts(vocabulary: int, *, number: int = 8, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths for a model that knows no language.

    Args:
        vocabulary: Token ids to choose from; the first three are special.
        number: Of prompts.
        seed: Of lengths and tokens.
    """
    chance = random.Random(seed)
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randint(3, 40))] for _ in range(number)]
