"""Let the traffic move from one kind of text to another, and watch the hot experts follow.

    .venv/bin/python examples/follow_the_traffic.py

The counts that the hot experts are chosen by come from Python sources, and so does the first traffic; then it is
English prose. One line per round: the hit rate of decode, and the swaps so far. A round is short here, so updates come
every 32 steps instead of every 2000, and older counts fade faster.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import hotsplit
from hotsplit.data import text_path, tiny_moe_path
from hotsplit.plan.histogram import save_histogram

HOT_GIB = 0.3 * 6 / 1024
"""30 % of the 6 MiB of experts of the bundled model."""
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 32
ROUNDS = {"python": 3, "english": 9}


def prompts(domain: str, *, tokenizer: Any) -> torch.Tensor:
    """Pieces of a sample text, all of one length, [B, S]."""
    ids = tokenizer(text_path(domain).read_text(encoding="utf-8"), verbose=False)["input_ids"]
    far_apart = len(ids) // BATCH
    return torch.tensor([ids[i * far_apart :][:PROMPT_TOKENS] for i in range(BATCH)])


def play(model: Any, ids: torch.Tensor, *, seed: int) -> float:
    """One round of traffic.

    Returns:
        Hit rate of its decode steps.
    """
    before = model.hotsplit.snapshot()
    torch.manual_seed(seed)
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.8,
        )
    after = model.hotsplit.snapshot()
    pairs: int = after.pairs["decode"] - before.pairs["decode"]
    hits: int = after.hit_pairs["decode"] - before.hit_pairs["decode"]
    return hits / pairs


def count(ids: torch.Tensor, path: Path) -> None:
    """Profile: every expert hot, nothing moves, and what was routed goes into a file."""
    model = hotsplit.load(
        tiny_moe_path(), hot_gib=1, dynamic=False, run_when_fits=True, learned="ignore", state_dir=path.parent
    )
    for seed in range(3):
        play(model, ids, seed=seed)
    save_histogram(model.hotsplit.histogram(), path)
    model.hotsplit.close()


def main() -> int:
    """Count, load, play, and see that it recovers."""
    torch.set_num_threads(1)  # so small a model only loses by a second one
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_moe_path())
    traffic = {domain: prompts(domain, tokenizer=tokenizer) for domain in ROUNDS}

    with tempfile.TemporaryDirectory() as scratch:  # an example leaves nothing behind
        counts = Path(scratch) / "python.json"
        count(traffic["python"], counts)
        model = hotsplit.load(
            tiny_moe_path(),
            hot_gib=HOT_GIB,
            counts=counts,
            dyn_steps=32,
            dyn_half_life=4,
            dyn_max_swaps=4,
            learned="ignore",
            state_dir=scratch,
        )
        rates: dict[str, list[float]] = {domain: [] for domain in ROUNDS}
        for domain, rounds in ROUNDS.items():
            for seed in range(rounds):
                rates[domain].append(play(model, traffic[domain], seed=100 + seed))
                swaps = model.hotsplit.snapshot().swaps_done
                print(f"{domain:8} hit rate {100 * rates[domain][-1]:.1f} %   swaps so far {swaps}")
        model.hotsplit.close()

    before, after, end = rates["python"][-1], rates["english"][0], rates["english"][-1]
    percent = [f"{100 * rate:.1f} %" for rate in (before, after, end)]
    print(f"\n{percent[0]} before the traffic moved, {percent[1]} right after, {percent[2]} at the end")
    return 0 if end > after else 1


if __name__ == "__main__":
    sys.exit(main())
