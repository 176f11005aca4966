"""The facts that ship, against figures that others published of the same checkpoints."""

from __future__ import annotations

import pytest

from hotsplit.plan.weigh import weigh
from hotsplit.recipes import load, names
from hotsplit.recipes.planning import recipe_sizes
from hotsplit.recipes.weighing import fit_recipe, kv_bytes, weigh_recipe
from hotsplit.units import GIB

PUBLISHED = {
    # all U8 bytes of the checkpoint's headers, from a public diff of two checkpoints
    "mimo-v2.6-pro": 531_351_207_936,
    # two ranks of 144,388,915,200 bytes, from a public test of another engine
    "deepseek-v4.1-flash": 2 * 144_388_915_200,
    # 61 x 384 x 3 x 7168 x 3072 weights of 0.5 + 1/32 bytes: 822.05 GB, from a public study of serving it
    "deepseek-v4-pro": 822_054_223_872,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_weigh_what_others_read_off_the_checkpoint(name):
    assert PUBLISHED[name] == weigh(load(name).facts.file, tp=1).sizes.expert_bytes


@pytest.mark.parametrize("name", names())
def test_facts_say_what_the_recipe_says(name):
    facts, sizes = load(name).facts, recipe_sizes(load(name))
    identity = sizes.identity
    assert (facts.layers, facts.moe_layers) == (sizes.num_decoder_layers, len(identity.layers))
    assert (facts.experts, facts.top_k) == (identity.num_experts, identity.top_k)


def test_dense_weights_are_what_the_total_leaves_from_shared_by_all_ranks_to_whole_on_each():
    recipe = load("mimo-v2.6-pro")
    dense = weigh_recipe(recipe, tp=4).dense
    left = recipe.facts.total_bytes - PUBLISHED["mimo-v2.6-pro"]
    assert (-(-left // 4), left) == (dense.least, dense.most)


def test_draft_layers_and_what_lies_on_the_host_are_no_dense_weights():
    glm, flash = load("glm-5.3"), load("deepseek-v4.1-flash")
    draft = 256 * 3 * 6144 * 2048 * (1 + 4 / 128 / 128)
    experts = weigh(glm.facts.file, tp=1).sizes.expert_bytes
    assert glm.facts.total_bytes - experts - draft == weigh_recipe(glm, tp=4).dense.most
    rest = 510_313_343_553 - PUBLISHED["deepseek-v4.1-flash"] - 202_758_032_400
    assert rest == weigh_recipe(flash, tp=4).dense.most


def test_a_total_below_the_experts_is_refused_by_its_key(write_recipe):
    recipe = load(str(write_recipe(("total_bytes = 8000000", "total_bytes = 1000"))))
    with pytest.raises(ValueError, match=r"facts.total_bytes: got 1000, \d+ bytes less than its experts"):
        weigh_recipe(recipe, tp=1)


def test_what_is_not_known_stays_open():
    weighed, found = fit_recipe(load("kimi-k2.6"))
    assert (None, None) == (weighed.dense.most, found.fits)


def test_a_chosen_kv_cache_is_scaled_to_what_is_asked():
    recipe = load("deepseek-v4-pro")
    assert recipe.kv.gib * GIB / 8 == kv_bytes(recipe, tp=4, context=recipe.kv.context // 2, concurrency=1)
    _, found = fit_recipe(recipe)
    assert recipe.kv.gib * GIB == found.kv_bytes.least == found.kv_bytes.most


def test_a_computed_kv_cache_shrinks_with_ranks_as_heads_do():
    recipe = load("mimo-v2.6-pro")
    four, two = (kv_bytes(recipe, tp=tp, context=1000, concurrency=1) for tp in (4, 2))
    assert 2 * four == two == (10 * 1000 + 60 * 128) * 4 * (192 + 128) * 2


def test_a_cache_that_a_recipe_chose_holds_what_its_fields_say():
    glm = load("glm-5.3")
    computed = weigh(glm.facts.file, tp=4, kv_dtype="fp8").kv
    assert 53_940 == computed.token_bytes
    assert computed.sequence_bytes(glm.kv.context) * glm.kv.concurrency <= glm.kv.gib * GIB
