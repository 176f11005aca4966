"""hotsplit under torch.compile: equal to compiled stock, and compile caches that never mix and never miss.

vLLM's cache folder has one folder per configuration, named by a hash; hotsplit's settings are part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.vllm.vllm_jobs import Job, run

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NAME = "qwen3_moe"


def folders(cache: Path) -> set[str]:
    """The folders of compiled code, one per configuration."""
    return {path.name for path in _candidates(cache / "torch_compile_cache") if any(path.rglob("*.so"))}


def _candidates(root: Path) -> Iterator[Path]:
    paths = [*root.glob("*"), *root.glob("torch_aot_compile/*")]
    yield from (path for path in paths if re.fullmatch(r"[0-9a-f]{10,}", path.name))


@pytest.fixture(scope="module")
def compiled(checkpoint, prompts, settings, stock, tmp_path_factory):
    """Stock, hotsplit, and hotsplit again, which has learned by then; and what was in the cache after each."""
    cache = tmp_path_factory.mktemp("compile-cache")
    chosen = settings(NAME, HOTSPLIT_STATE_DIR=str(tmp_path_factory.mktemp("state")))
    job = Job(model=checkpoint(NAME), prompts=prompts(NAME), settings=chosen, cache=cache)
    runs, seen = [stock(NAME, cache=cache)], [folders(cache)]
    for number in range(2):
        runs.append(run(job, place=tmp_path_factory.mktemp(f"compiled-{number}")))
        seen.append(folders(cache))
    return runs, seen


def test_compiled_hotsplit_gives_what_compiled_stock_gives(compiled):
    (stock, first, second), _ = compiled
    assert stock.answers(0) == first.answers(0)
    assert stock.answers(0) == second.answers(0)


def test_experts_moved_meanwhile_and_fewer_once_they_had_learned(compiled):
    (_, first, second), _ = compiled
    assert first.snapshots[0].swaps_done > second.snapshots[0].swaps_done
    assert [0, 0] == [one.snapshots[0].swaps_failed for one in (first, second)]


def test_compiled_code_counts_what_eager_code_counts(compiled, played):
    """Compiled code rounds differently, so it routes a little differently: but as many pairs, in as many steps."""
    (_, first, _), _ = compiled
    (snapshot,) = first.snapshots
    steps = played(NAME, 1).steps(0)[: snapshot.steps]
    by_phase = {phase: sum(s["pairs"] for s in steps if s["phase"] == phase) for phase in ("decode", "prefill")}
    assert by_phase == dict(snapshot.pairs)


def test_stock_and_hotsplit_share_no_compiled_code(compiled):
    _, (with_stock, with_both, _) = compiled
    assert 1 == len(with_stock)
    assert 1 == len(with_both - with_stock)


def test_hotsplit_started_again_has_learned_another_plan_and_finds_its_own_compiled_code(compiled):
    (_, first, second), _ = compiled
    assert first.snapshots[0].plan_hash != second.snapshots[0].plan_hash
    _, (_, before, after) = compiled
    assert before == after
