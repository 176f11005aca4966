"""A recipe of the bundled model, as a user would write one, with its files beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hotsplit.data import tiny_moe_path
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
TEXT = """
format = "hotsplit-recipe"
version = 1
name = "tiny"
title = "The bundled model"
model = "hotsplit/tiny-moe"

[facts]
file = "config.json"
source = "ships with hotsplit"
layers = 4
moe_layers = 4
experts = 32
top_k = 4
total_bytes = 8000000

[machine]
gpus = 1
vram_gib = 0.02
ram_gib = 10

[kv]
context = 256
concurrency = 2

[settings]
vram_reserve_gib = 0.001
hot_gib = 0.002

[[flags]]
flag = "--moe-backend"
value = "triton"
why = "rows by index"

[[variables]]
name = "VLLM_USE_DEEP_GEMM"
value = 0
why = "descriptors"

[[known_bad]]
flag = "--load-format"
value = "runai_streamer"
why = "zeros"
source = "here"

[histogram]
file = "counts.json"
source = "made up"
licence = "none"
"""


def write_recipe(folder: Path, *changes: tuple[str, str], config: dict[str, object] | None = None) -> Path:
    """Write the recipe with texts replaced, and fields of its config.json changed."""
    known = json.loads((tiny_moe_path() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | (config or {})))
    shares_E = 1.0 / np.arange(1, 33)
    rows = [np.random.default_rng(layer).permutation(shares_E / shares_E.sum()) for layer in range(4)]
    counts_LE = [np.random.default_rng(layer).multinomial(4000, shares) for layer, shares in enumerate(rows)]
    counted = PhaseCounts(counts=np.array(counts_LE, dtype=np.float64), tokens=1000)
    save_histogram(Histogram(identity=TINY, phases={"decode": counted}), folder / "counts.json")
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "tiny.toml").write_text(text)
    return folder / "tiny.toml"
