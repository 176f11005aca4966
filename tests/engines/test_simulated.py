"""A replay of what a model routed does what the model did: the same swaps, at the same steps, in the same order."""

from __future__ import annotations

import pytest
import torch

from engines.conftest import budget
from engines.copies import wait_for_copies
from hotsplit.data import text_path
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.resolve import load_tokenizer
from hotsplit.engines.transformers.traffic import read_prompts
from hotsplit.plan.rebalance import RebalanceOptions, Swap
from hotsplit.plan.replay import steps_of
from hotsplit.plan.simulate import Chosen, ReplayOptions, replay
from hotsplit.plan.steering import make_policy

pytestmark = pytest.mark.transformers

SETTINGS = {"dyn_steps": 7, "dyn_half_life": 2.0, "dyn_margin": 1.1}
PLAYED = ProfileOptions(decode_tokens=24, batch_size=2, temperature=0.8)


def watch_requests(banks):
    """Swaps that the swapper takes from now on, with the steps that had run."""
    taken, request = [], banks.live._swapper.request

    def watch(layer_id, *, expert_in, expert_out):
        is_taken = request(layer_id, expert_in=expert_in, expert_out=expert_out)
        if is_taken:
            swap = Swap(layer_id=layer_id, expert_in=expert_in, expert_out=expert_out)
            taken.append(Chosen(step=banks.router.counters.steps, swap=swap))
        return is_taken

    banks.live._swapper.request = watch
    return taken


@pytest.fixture
def run(load, tiny_moe, tmp_path):
    """A dynamic run of the bundled model over two kinds of text, and a replay of its own trace."""

    def both(*, schedule, has_prior):
        prompts = read_prompts(
            [text_path("english"), text_path("html")],
            tokenizer=load_tokenizer(tiny_moe),
            prompt_tokens=24,
            max_prompts=4,
        )
        counts = tmp_path / "counts.json" if has_prior else None
        if has_prior:
            from hotsplit.plan.histogram import save_histogram

            seen, _ = play(load(tiny_moe, dynamic=False), prompts[:4], options=PLAYED)
            save_histogram(seen, counts)
        settings = {"dyn_schedule": schedule, "learned": "ignore", "hot_gib": budget(tiny_moe, 0.4), **SETTINGS}
        model = load(tiny_moe, **settings, **({"counts": str(counts)} if counts else {}))
        banks = model.hotsplit.banks
        hot = banks.router.hot_mask()
        wait_for_copies(banks)  # a replay takes them for granted
        taken = watch_requests(banks)
        _, trace = play(model, prompts, options=PLAYED, want_trace=True)
        options = RebalanceOptions(half_life=2.0, margin=1.1, schedule=schedule)
        rows = tuple(int(rows) for rows in model.hotsplit.sizes.row_bytes)
        policy = make_policy(hot=hot, prior=banks.live._plan_shares, top_k=4, options=options, row_bytes=rows)
        replayed = replay(
            steps_of(trace, num_experts=32, kept="all"),
            hot=hot,
            policy=policy,
            options=ReplayOptions(row_bytes=rows, dyn_steps=SETTINGS["dyn_steps"], placement="inclusive"),
        )
        return banks, taken, replayed

    torch.manual_seed(0)
    return both


@pytest.mark.parametrize("has_prior", [True, False], ids=["prior", "no prior"])
@pytest.mark.parametrize("schedule", ["fixed", "adaptive"])
def test_a_replay_of_a_run_gives_the_same_swaps_in_the_same_order_and_the_same_hits_and_bytes(run, schedule, has_prior):
    banks, taken, replayed = run(schedule=schedule, has_prior=has_prior)
    counters, swaps = banks.router.counters, banks.live.swaps
    assert len(taken) > 10
    assert tuple(taken) == replayed.asked
    assert sum(counters.hits.values()) == replayed.hits
    assert (counters.steps, banks.live.num_updates) == (replayed.steps, replayed.updates)
    assert (swaps.done, swaps.refused, swaps.moved_bytes) == (replayed.done, replayed.refused, replayed.moved_bytes)
    cold_bytes = sum(counters.touched_cold_bytes.values())
    assert cold_bytes / counters.steps == pytest.approx(replayed.cold_bytes_per_step, rel=1e-12)
    assert banks.live.num_shifts == len(replayed.shifts)
    assert banks.router.hot_mask().tolist() == replayed.hot.tolist()
