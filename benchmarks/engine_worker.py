"""One engine, loaded and measured in a process of its own, so that its peak memory is its own.

    python benchmarks/engine_worker.py JOB.json RESULT.json         bench_engines.py starts it

Every engine computes the same tokens: a prompt and a continuation that the model itself once sampled are fed to it, and
what it would have said is only compared. Two regimes: in "warm" all files lie in the page cache; in "cold" their pages
are dropped before every token, as on a machine whose memory the experts do not fit by far.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from loaders import LOADERS, Loaded, LoadOptions
from observe import AnonymousPeak, bytes_from_disk, cached_share, drop_pages, memory, warm_pages

_IMPORTS = ("accelerate", "transformers.models.qwen3_moe.modeling_qwen3_moe", "hotsplit.engines.transformers")
"""What a load would import; done before its clock runs, and the same for every engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What every engine computes."""

    prompt: tuple[int, ...]
    """Token ids of the prefill."""
    continuation: tuple[int, ...]
    """Token ids that are fed one by one; at least what warm-up and timing take."""
    question: tuple[int, ...]
    """A short prompt that generate() answers greedily."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """How much is measured."""

    skipped_tokens: int = 4
    """Decoded tokens before timing begins."""
    warm_tokens: int = 32
    """Timed tokens with warm files."""
    cold_tokens: int = 8
    """Timed tokens with dropped files."""
    answer_tokens: int = 16
    """Tokens that generate() makes, to compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One forward."""

    wall_ms: float
    """Time that passed."""
    cpu_ms: float
    """Time of all of the process's threads on a core, in the kernel too."""
    read_bytes: int
    """Asked of the disk meanwhile."""


class Run:
    """Forwards of one loaded model over the same traffic, with their costs and a digest of all logits.

    Args:
        loaded: The engine.
        traffic: What it computes.
    """

    def __init__(self, loaded: Loaded, *, traffic: Traffic) -> None:
        self._loaded, self._traffic = loaded, traffic
        self._cache: Any = None
        self._digest = hashlib.sha256()
        self.most_anonymous = 0
        """Most anonymous bytes seen after a forward."""

    def prefill(self) -> Cost:
        """The whole prompt at once, into an empty cache."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._loaded.model.config)
        return self._forward(self._traffic.prompt)

    def decode(self, first: int, number: int, *, is_cold: bool) -> list[Cost]:
        """Tokens of the continuation, one by one.

        Args:
            first: Where in the continuation.
            number: How many.
            is_cold: Whether the files' pages are dropped before each.
        """
        costs = []
        for token in self._traffic.continuation[first : first + number]:
            if is_cold:
                self.drop()
            costs.append(self._forward((token,)))
        return costs

    def drop(self) -> None:
        """Make the next forward read the engine's files from the disk."""
        self._loaded.let_go()
        drop_pages(self._loaded.reads)

    def digest(self) -> str:
        """SHA-256 over the logits of all forwards so far, to the bit."""
        return self._digest.hexdigest()

    def _forward(self, ids: Sequence[int]) -> Cost:
        tokens = torch.tensor([ids])
        read, cpu, wall = bytes_from_disk(), time.process_time(), time.perf_counter()
        with torch.no_grad():
            logits = self._loaded.model(
                input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            ).logits
        cost = Cost(
            wall_ms=(time.perf_counter() - wall) * 1e3,
            cpu_ms=(time.process_time() - cpu) * 1e3,
            read_bytes=bytes_from_disk() - read,
        )
        self._digest.update(logits.float().numpy().tobytes())
        self.most_anonymous = max(self.most_anonymous, memory().anonymous)
        return cost


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Load an engine and take all its figures.

    Args:
        job: kind, folder, options, traffic, amounts.
    """
    traffic, amounts = Traffic(**job["traffic"]), Amounts(**job["amounts"])
    before = memory()
    loaded, load = _load(job)
    after = memory()
    warm_pages(loaded.reads)
    run = Run(loaded, traffic=traffic)
    with AnonymousPeak() as watch:  # warms up as well
        run.prefill()
        run.decode(0, amounts.skipped_tokens, is_cold=False)
    warm = _regime(run, loaded, amounts=amounts, is_cold=False)
    answer = _answer(loaded, traffic, num_tokens=amounts.answer_tokens)
    digest = run.digest()
    cold = _regime(run, loaded, amounts=amounts, is_cold=True) if loaded.reads else None
    return {
        "load": load,
        "memory": {
            "after_imports": asdict(before),
            "after_load": asdict(after),
            "anonymous_peak": max(watch.peak, run.most_anonymous),
            **{f"{name}_bytes": size for name, size in loaded.memory.items()},
        },
        "warm": warm,
        "cold": cold,
        "answer": answer,
        "logits_digest": digest,
        "updates": loaded.model.hotsplit.updates if hasattr(loaded.model, "hotsplit") else None,
        "scratch_bytes": sum(path.stat().st_size for path in Path(job["scratch"]).rglob("*") if path.is_file()),
    }


def _load(job: Mapping[str, Any]) -> tuple[Loaded, dict[str, Any]]:
    """The engine, and what loading cost."""
    options = replace(LoadOptions(**job["options"]), scratch=Path(job["scratch"]))
    read, cpu, wall = bytes_from_disk(), time.process_time(), time.perf_counter()
    loaded = LOADERS[job["kind"]](Path(job["folder"]), options)
    return loaded, {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "read_bytes": bytes_from_disk() - read,
    }


def _regime(run: Run, loaded: Loaded, *, amounts: Amounts, is_cold: bool) -> dict[str, Any]:
    """Prefill and decode in one regime, and what hotsplit counted meanwhile."""
    if is_cold:
        run.drop()
    cached = cached_share(loaded.reads)
    prefill = run.prefill()
    number = amounts.cold_tokens if is_cold else amounts.warm_tokens
    run.decode(0, amounts.skipped_tokens, is_cold=is_cold)
    before = _counted(loaded.model)
    tokens = run.decode(amounts.skipped_tokens, number, is_cold=is_cold)
    after = _counted(loaded.model)
    return {
        "cached_share": cached,
        "prefill": asdict(prefill),
        "tokens": [asdict(cost) for cost in tokens],
        "counted": {name: after[name] - before[name] for name in after},
    }


def _counted(model: Any) -> dict[str, int]:
    """What hotsplit counted for decode; nothing for the others."""
    if not hasattr(model, "hotsplit"):
        return {}
    seen = model.hotsplit.snapshot()
    return {
        "pairs": seen.pairs["decode"],
        "hit_pairs": seen.hit_pairs["decode"],
        # Of both phases: no prefill runs between two readings.
        "cold_bytes": seen.touched_cold_bytes,
        "swaps": seen.swaps_done,
    }


def _answer(loaded: Loaded, traffic: Traffic, *, num_tokens: int) -> list[int]:
    """What generate() says to the question."""
    ids = torch.tensor([traffic.question])
    with torch.no_grad():
        answer = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
    said: list[int] = answer[0, ids.shape[1] :].tolist()
    return said


def prepare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Count what sample prompts ask of the experts, and sample the traffic that is measured on.

    Args:
        job: folder, scratch, counts (where the histogram goes), prompt_tokens, continuation_tokens, seed.
    """
    from hotsplit.engines.transformers.profile import ProfileOptions, play
    from hotsplit.engines.transformers.traffic import Prompt
    from hotsplit.plan.histogram import save_histogram

    loaded = LOADERS["hotsplit"](Path(job["folder"]), LoadOptions(scratch=Path(job["scratch"])))
    size = loaded.model.config.vocab_size
    dice = torch.Generator().manual_seed(job["seed"])

    def text(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(size, (length,), generator=dice).tolist())

    options = ProfileOptions(prompt_tokens=64, decode_tokens=job["profile_decode"], batch_size=8, seed=job["seed"])
    prompts = [Prompt(domain="random", token_ids=text(64)) for _ in range(job["profile_prompts"])]
    histogram, _ = play(loaded.model, prompts, options=options)
    save_histogram(histogram, Path(job["counts"]))
    prompt = text(job["prompt_tokens"])
    with torch.no_grad():
        torch.manual_seed(job["seed"] + 1)
        ids = torch.tensor([prompt])
        sampled = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job["continuation_tokens"],
            do_sample=True,
            temperature=options.temperature,
            top_k=0,
        )
    return {
        "traffic": {"prompt": prompt, "continuation": sampled[0, len(prompt) :].tolist(), "question": text(32)},
        "profile_tokens": {phase: counted.tokens for phase, counted in histogram.phases.items()},
    }


def main(arguments: Sequence[str]) -> int:
    """Do one job."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    for module in _IMPORTS:
        importlib.import_module(module)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    result = (prepare if job["kind"] == "prepare" else measure)(job)
    Path(arguments[1]).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
