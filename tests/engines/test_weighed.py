"""What a config is said to weigh, against the model and the cache that transformers makes of it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from engines.tiny import CONFIGS, make_checkpoint
from hotsplit.plan.outline import outline_sizes
from hotsplit.plan.weigh import weigh

pytestmark = pytest.mark.transformers

TOKENS = 9
MIMO = {"num_key_value_heads": 1, "swa_num_key_value_heads": 2}
"""Its sliding layers have twice the KV heads, whatever the field says: the field says so as well."""


@pytest.fixture(scope="module", params=CONFIGS)
def weighed(request, tmp_path_factory):
    """A tiny checkpoint of an architecture, and what it weighs on one rank."""
    folder = tmp_path_factory.mktemp(request.param)
    changes = MIMO if request.param == "mimo_v2_flash" else {}
    make_checkpoint(folder, model_type=request.param, changes=changes)
    return folder, weigh(folder, tp=1)


def test_a_config_alone_weighs_experts_as_the_headers_do(weighed):
    folder, found = weighed
    config = json.loads((folder / "config.json").read_text())
    by_config = outline_sizes(config, tp=1, name=folder.name, what="config")
    assert "headers" == found.source
    assert found.sizes.identity == by_config.identity
    assert found.sizes.row_bytes.tolist() == by_config.row_bytes.tolist()


def test_every_layer_s_cache_is_as_large_as_the_model_makes_it(weighed):
    folder, found = weighed
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values
    if found.kv.unknown:
        pytest.skip(f"{model.config.model_type}: {found.kv.unknown[0]}")
    kept = []
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        kept.append(sum(t.numel() * t.element_size() for t in tensors if t is not None))
    assert kept == [layer.token_bytes * TOKENS for layer in found.kv.layers]


def test_without_draft_layers_all_bytes_are_experts_or_dense(weighed):
    folder, found = weighed
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    counted = found.sizes.expert_bytes + found.dense.least + found.draft.least
    assert found.dense.is_exact
    assert 0 <= total - counted < 64_000  # the headers
