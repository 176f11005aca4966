"""hotsplit inside vLLM gives what stock vLLM gives, to the last bit, while experts move.

One schedule: offline, all prompts at once, greedy; 8 prompts x 48 tokens, tokens and the log-probabilities of the five
likeliest. A quarter of the experts is hot, and every third step brings an update. The probe (vllm_probe) counts
for itself and recomputes one call in five without hotsplit.
"""

from __future__ import annotations

import pytest

from engines.vllm.vllm_jobs import WITH_BIASES

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

soak = pytest.mark.soak
RUNS = [
    pytest.param("qwen3_moe", 1, id="qwen3"),
    pytest.param("deepseek_v3", 1, id="deepseek"),
    pytest.param("glm4_moe", 2, id="glm-tp2"),
    pytest.param("small-moe", 1, id="small"),
    pytest.param("qwen3_moe", 2, id="qwen3-tp2", marks=soak),
    pytest.param("glm4_moe", 1, id="glm", marks=soak),
    pytest.param("deepseek_v3", 2, id="deepseek-tp2", marks=soak),
    pytest.param("small-moe", 2, id="small-tp2", marks=soak),
    pytest.param("tiny-moe", 1, id="tiny", marks=soak),
    pytest.param("mixtral", 1, id="mixtral", marks=soak),
    pytest.param("gpt_oss", 1, id="gpt-oss", marks=soak),
]
every_run = pytest.mark.parametrize(("name", "ranks"), RUNS)


@every_run
def test_tokens_and_log_probabilities_are_those_of_stock(played, stock, name, ranks):
    answers = stock(name, ranks=ranks).answers(0)
    assert {48} == {len(answer["logprobs"]) for answer in answers}
    assert answers == played(name, ranks).answers(0)


@every_run
def test_experts_moved_meanwhile_and_whole_steps_ran_between_the_two_halves_of_a_swap(played, name, ranks):
    run = played(name, ranks)
    assert ranks == len(run.snapshots)
    for snapshot, report in zip(run.snapshots, run.last["report"], strict=True):
        assert snapshot.swaps_done > 0
        assert (0, 0) == (snapshot.swaps_failed, snapshot.update_failures)
        assert report["half_swapped_steps"] > 0


@every_run
def test_no_call_differs_from_one_without_hotsplit(played, name, ranks):
    for report in played(name, ranks).told("report"):
        assert 0 == report["mismatches"]
        assert report["compared"] == (0 if name in WITH_BIASES else report["calls"] // 5)


@every_run
def test_every_expert_keeps_its_bytes_and_a_row_of_its_own(played, name, ranks):
    assert [{"rows_intact": True, "rows_distinct": True}] * ranks == played(name, ranks).told("check rows")


@every_run
def test_what_is_counted_is_what_the_router_chose(played, name, ranks):
    run = played(name, ranks)
    for snapshot, report in zip(run.snapshots, run.last["report"], strict=True):
        assert report["steps"] == snapshot.steps
        assert report["tokens"] == dict(snapshot.tokens)
        assert report["pairs"] == dict(snapshot.pairs)
        assert report["hits"] == dict(snapshot.hit_pairs)
        counts = {
            phase: {str(layer): list(row) for layer, row in rows.items()} for phase, rows in snapshot.counts.items()
        }
        assert report["counts"] == counts
        assert all(0 < report["hits"][phase] < report["pairs"][phase] for phase in ("decode", "prefill"))


@every_run
def test_the_hit_rate_of_every_update_line_is_that_of_the_steps_since_the_one_before(played, name, ranks):
    run = played(name, ranks)
    for rank in range(ranks):
        steps = run.steps(rank)
        lines = [line for line in run.updates if line.rank == rank]
        assert len(lines) > 10
        for before, line in zip([0, *(line.step for line in lines)], lines, strict=False):
            window = steps[before : line.step]
            phase = "decode" if any(step["phase"] == "decode" for step in window) else "prefill"
            pairs, hits = (sum(step[what] for step in window if step["phase"] == phase) for what in ("pairs", "hits"))
            assert f"{hits / pairs:.3f}" == f"{line.hit:.3f}"


@every_run
def test_all_ranks_of_a_group_plan_and_swap_alike(played, name, ranks):
    run = played(name, ranks)
    assert 1 == len({(s.plan_hash, s.steps, s.swaps_done, s.hit_pairs["decode"]) for s in run.snapshots})
