"""Generate text from hot and cold experts, and compare with the stock model, token by token.

    .venv/bin/python examples/generate.py
    .venv/bin/python examples/generate.py path/to/model --hot-gib 8 --prompt "Once upon a time"

Without a model the small one that ships with hotsplit is used, with 30 % of its expert bytes as budget.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hotsplit
from hotsplit.data import tiny_moe_path

TINY_HOT_GIB = 0.3 * 6 / 1024
"""30 % of the 6 MiB of experts of the bundled model."""


def answer(model: Any, ids: torch.Tensor, *, new_tokens: int) -> list[int]:
    """Continue a prompt greedily.

    Args:
        model: A transformers model, hotsplit's or stock.
        ids: The prompt, [1, S].
        new_tokens: At most so many.
    """
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    new_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return new_ids


def main(arguments: Sequence[str]) -> int:
    """Load twice, generate twice, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=tiny_moe_path(), help="a model folder")
    parser.add_argument("--hot-gib", type=float, default=TINY_HOT_GIB)
    parser.add_argument("--prompt", default="class Node:\n    def __init__(self")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor([tokenizer(options.prompt)["input_ids"]])

    # An example leaves nothing behind: learned counts and snapshots go with this folder. Leave both settings out at home.
    with tempfile.TemporaryDirectory() as scratch:
        model = hotsplit.load(options.model, hot_gib=options.hot_gib, learned="ignore", state_dir=scratch)
        if not hasattr(model, "hotsplit"):
            print("Every expert fits that budget: this is the stock model.")
            return 0
        mine = answer(model, ids, new_tokens=options.new_tokens)
        seen = model.hotsplit.snapshot()
        model.hotsplit.close()

    stock = transformers.AutoModelForCausalLM.from_pretrained(options.model, experts_implementation="eager").eval()
    theirs = answer(stock, ids, new_tokens=options.new_tokens)

    print(options.prompt + tokenizer.decode(mine))
    print(f"\nhot bytes: {seen.hot_bytes:,} of at most {seen.budget_bytes:,}")
    print(f"hit rate: {100 * sum(seen.hit_pairs.values()) / sum(seen.pairs.values()):.1f} %")
    print(f"identical to the stock model: {'yes' if mine == theirs else 'NO'}")
    return 0 if mine == theirs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
