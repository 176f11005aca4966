"""A recipe's flags and a user's: whose rule, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.recipes import load, names
from hotsplit.recipes.compose import compose
from hotsplit.recipes.flags import VllmFlag, VllmFlags, is_flag, pairs, shipped_flags

VLLM = shipped_flags()


def composed(recipe, *flags, **environ):
    return compose(recipe, flags=flags, environ=environ, vllm=VLLM)


def said(found, name):
    return [notice.text for notice in found.notices if notice.name == name]


def value_of(found, flag):
    return [found.flags[at + 1] for at, word in enumerate(found.flags) if word == flag]


def test_a_recipe_alone_is_its_layout_its_cache_and_its_flags():
    found = composed(load("mimo-v2.6-pro"))
    assert (["4"], ["262144"], ["4"]) == tuple(
        value_of(found, flag) for flag in ("--tensor-parallel-size", "--max-model-len", "--max-num-seqs")
    )
    assert ["13461094400"] == value_of(found, "--kv-cache-memory-bytes")
    assert {"VLLM_USE_DEEP_GEMM": "0"} == found.variables
    assert () == found.notices


@pytest.mark.parametrize("spelt", [("-tp", "2"), ("--tensor_parallel_size=2",), ("--tensor-parallel", "2"), ("-tp=2",)])
def test_a_users_flag_beats_the_recipes_in_any_spelling(spelt):
    found = composed(load("mimo-v2.6-pro"), *spelt)
    assert "--tensor-parallel-size" not in found.flags
    assert found.flags[-len(spelt) :] == spelt
    (text,) = said(found, "recipe-overridden")
    assert "your --tensor-parallel-size 2 beats the recipe's --tensor-parallel-size 4" in text


def test_the_cache_follows_the_layout_that_rules():
    recipe = load("mimo-v2.6-pro")
    half = composed(recipe, "--max-num-seqs", "2")
    assert ["6730547200"] == value_of(half, "--kv-cache-memory-bytes")
    two = composed(recipe, "-tp", "2")
    assert [str(2 * 13461094400)] == value_of(two, "--kv-cache-memory-bytes")


def test_a_context_in_words_leaves_the_cache_to_vllm_and_says_so():
    found = composed(load("mimo-v2.6-pro"), "--max-model-len", "auto")
    assert [] == value_of(found, "--kv-cache-memory-bytes")
    assert 1 == len(said(found, "recipe-kv-open"))


def test_a_users_own_size_of_the_cache_rules():
    found = composed(load("mimo-v2.6-pro"), "--kv-cache-memory-bytes", "5")
    assert ["5"] == value_of(found, "--kv-cache-memory-bytes")
    assert 1 == len(said(found, "recipe-overridden"))


def test_the_same_value_is_nothing_to_say():
    assert () == composed(load("mimo-v2.6-pro"), "--moe-backend", "marlin").notices


def test_a_switch_that_is_turned_off_beats_the_recipes():
    found = composed(load("mimo-v2.6-pro"), "--no-enable-auto-tool-choice")
    assert "--enable-auto-tool-choice" not in found.flags
    assert ["your --no-enable-auto-tool-choice beats the recipe's --enable-auto-tool-choice (Agents need it.)"] == said(
        found, "recipe-overridden"
    )


@pytest.mark.parametrize(
    "spelt", [("--no_enable_auto_tool_choice",), ("--enable-auto-tool-choice", "--no-enable-auto-tool")]
)
def test_a_switch_is_off_where_its_last_spelling_says_so(spelt):
    (text,) = said(composed(load("mimo-v2.6-pro"), *spelt), "recipe-overridden")
    assert text.startswith("your --no-enable-auto-tool-choice beats the recipe's --enable-auto-tool-choice")
    again = composed(load("mimo-v2.6-pro"), *spelt, "--enable-auto-tool-choice")
    assert [] == said(again, "recipe-overridden")


def test_parts_of_a_flag_are_said_as_they_were_given():
    found = composed(load("deepseek-v4.1-flash"), "--engram_config.cpu_offload", "false", "--engram-config.x=1")
    assert "--engram-config" not in found.flags
    (text,) = said(found, "recipe-overridden")
    assert "your --engram-config.cpu_offload false --engram-config.x 1 beats the recipe's --engram-config {" in text


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("glm-5.3", ("--kv-cache-dtype", "bfloat16")),
        ("glm-5.3", ("--kv-cache-dtype=auto",)),
        ("deepseek-v4-pro", ("--kv-cache-dtype", "fp8")),
    ],
)
def test_a_cache_that_was_chosen_for_one_type_is_not_claimed_for_another(name, flags):
    recipe = load(name)
    chosen = str(int(recipe.kv.gib * 2**30))
    assert [chosen] == value_of(composed(recipe), "--kv-cache-memory-bytes")
    found = composed(recipe, *flags)
    assert chosen not in value_of(found, "--kv-cache-memory-bytes")
    assert bool(value_of(found, "--kv-cache-memory-bytes")) != bool(said(found, "recipe-kv-open"))


def test_a_latent_cache_that_was_chosen_is_the_same_on_every_number_of_ranks():
    recipe = load("glm-5.3")
    assert value_of(composed(recipe), "--kv-cache-memory-bytes") == value_of(
        composed(recipe, "-tp", "2"), "--kv-cache-memory-bytes"
    )


def test_a_cache_of_heads_that_was_chosen_for_other_ranks_is_computed(write_recipe):
    recipe = load(str(write_recipe(("concurrency = 2", "concurrency = 2\ngib = 0.001"))))
    assert ["1073741"] == value_of(composed(recipe), "--kv-cache-memory-bytes")
    found = composed(recipe, "-tp", "2")
    assert [str(2 * 256 * 4 * 1 * (64 + 64) * 2)] == value_of(
        found, "--kv-cache-memory-bytes"
    )  # of the fields, one head


def test_a_size_of_thousands_of_digits_is_no_size():
    found = composed(load("mimo-v2.6-pro"), "--max-model-len", "9" * 5000)
    assert [] == value_of(found, "--kv-cache-memory-bytes")


@pytest.mark.parametrize("spelt", [("--config", "x.yaml"), ("--config=x.yaml",)])
def test_a_file_of_flags_is_said_to_be_weaker_than_the_recipe(spelt):
    assert 1 == len(said(composed(load("mimo-v2.6-pro"), *spelt), "recipe-config-file"))
    assert [] == said(composed(load("mimo-v2.6-pro")), "recipe-config-file")


def test_a_level_without_a_blank_is_the_flag_of_levels():
    names = ("-O3", "-O=3", "-O", "-Odecode")
    assert {"--optimization-level"} == {VLLM.canonical(name) for name in names}
    assert [("-O", ("3",)), ("-O", ("3",)), ("-O", ("3",))] == pairs(["-O3", "-O=3", "-O", "3"])


def test_a_variable_of_the_environment_beats_the_recipes():
    found = composed(load("mimo-v2.6-pro"), VLLM_USE_DEEP_GEMM="1")
    assert {} == found.variables
    assert "VLLM_USE_DEEP_GEMM=1 of the environment beats the recipe's 0" in said(found, "recipe-overridden")[0]


BAD = [
    (("--enable-eplb",), {}),
    (("--load-format", "runai_streamer"), {}),
    (("--load_format=runai_streamer",), {}),
    (("--data-parallel-size", "2"), {}),
    (("--speculative-config.method", "dflash"), {}),
    (("-sc", '{"method": "x"}'), {}),
    (("--moe-backend", "FlashInfer-TRTLLM"), {}),
    (("--no-enable-eplb", "--enable-eplb"), {}),
    ((), {"VLLM_MOE_SKIP_PADDING": "0"}),
]
HARMLESS = [
    (("--no-enable-eplb",), {}),
    (("--no_enable_eplb",), {}),
    (("--enable-eplb", "--no-enable-eplb"), {}),
    (("--load-format", "auto"), {}),
    (("--data-parallel-size", "1"), {}),
    ((), {"VLLM_MOE_SKIP_PADDING": "1"}),
    (("--served-model-name", "runai_streamer"), {}),
]


@pytest.mark.parametrize(("flags", "environ"), BAD, ids=str)
def test_a_known_bad_flag_is_a_doubt_with_its_reason_and_source(flags, environ):
    found = composed(load("mimo-v2.6-pro"), *flags, **environ)
    (bad,) = [notice for notice in found.notices if notice.name == "known-bad-flag"]
    assert bad.strict
    assert " is known to be bad here: " in bad.text
    assert bad.text.endswith(")")


@pytest.mark.parametrize(("flags", "environ"), HARMLESS, ids=str)
def test_what_only_looks_like_a_bad_flag_is_none(flags, environ):
    assert [] == said(composed(load("mimo-v2.6-pro"), *flags, **environ), "known-bad-flag")


@pytest.mark.parametrize("name", names())
def test_no_recipe_does_what_it_warns_of(name):
    recipe = load(name)
    own = composed(recipe).flags
    assert [] == said(composed(recipe, *own), "known-bad-flag")


@given(st.lists(st.sampled_from(["--port", "8000", "-tp", "2", "--enable-eplb", "-O3", "--x=y", "-1", ""])))
def test_a_users_words_reach_vllm_in_their_order(words):
    found = composed(load("glm-5.3"), *words)
    assert found.flags[len(found.flags) - len(words) :] == tuple(words)


def test_a_number_below_zero_is_a_value():
    assert [True, True, False, False, False] == [is_flag(word) for word in ("-tp", "--x", "-1", "-.5", "-")]
    assert [("--temperature", ("-0.5",))] == pairs(["--temperature", "-0.5"])


def test_a_beginning_that_two_flags_share_is_neither():
    both = VllmFlags(
        version="0", options=tuple(VllmFlag(names=(n,), takes="one", choices=None) for n in ("--ab", "--ac"))
    )
    assert ("--a", "--ab") == (both.canonical("--a"), both.canonical("--ab=1"))
