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


def counts(rows=ROWS):
    return {layer: {"counts": row, "total": sum(row)} for layer, row in rows.items()}


def layers(rows=ROWS):
    return {"layers": rows}


def pairs(rows=ROWS):
    return {f"{layer},{expert}": n for layer, row in rows.items() for expert, n in enumerate(row)}


def sets(rows=ROWS):
    """Its layers are 0..L-1 whatever the keys are."""
    return {"meta": {"top_k": 2, "model_type": "toy"}, "counts": {"english": {"decode": list(rows.values())}}}


def csv(rows=ROWS, *, header="layer,expert,count\n"):
    lines = [f"{layer},{expert},{n}\n" for layer, row in rows.items() for expert, n in enumerate(row)]
    return header + "".join(lines)


FORMS = {"ours": ours, "flat": flat, "train": train, "live": live}
"""Forms that say layer numbers and phase."""
PHASELESS = {"counts": counts, "layers": layers, "pairs": pairs}
"""Forms that say layer numbers, and no phase."""
