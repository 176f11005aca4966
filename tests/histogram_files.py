"""The same small counts in every form of histogram file that is read."""

from __future__ import annotations

ROWS = {"3": [6, 3, 1, 0], "4": [5, 5, 0, 0]}


def ours(rows=ROWS, *, layers=(3, 4), tokens=5, top_k=2, num_experts=4, **more):
    model = {"name": "toy", "model_type": "toy", "num_experts": num_experts, "top_k": top_k, "layers": list(layers)}
    phases = {"decode": {"tokens": tokens, "layers": rows}}
    return {"format": "hotsplit-histogram", "version": 1, "model": model, "source": {}, "phases": phases} | more


def flat(rows=ROWS, *, phase="decode", tokens=5, **more):
    return {"model": "toy", "phase": phase, "n_experts": 4, "top_k": 2, "tokens": tokens, "layers": rows} | more


def train(rows=ROWS, **more):
    return {"train": {"decode": rows}} | more


def live(rows=ROWS, **more):
    return {"live": {"decode": rows}, "meta": {"top_k": 2, "model_type": "toy"}} | more


FORMS = {"ours": ours, "flat": flat, "train": train, "live": live}
