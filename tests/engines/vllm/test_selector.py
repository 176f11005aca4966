from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.engines.vllm.selector import decoder_index, is_other_stack, match_layers, require_real
from hotsplit.errors import UnsupportedEngineError

PLAIN = "model.layers.{}.mlp.experts"
MULTIMODAL = "language_model.model.layers.{}.mlp.experts.routed_experts"
NESTED = "model.layers.{}.mlp.experts.switch_glu"


def names_of(pattern, indices):
    return [pattern.format(index) for index in indices]


def refusal(match):
    with pytest.raises(UnsupportedEngineError) as caught:
        match.require_all()
    assert 1 == caught.value.exit_code
    return caught.value


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("model.layers.0.mlp.experts", 0),
        ("language_model.model.layers.12.mlp.experts.routed_experts.w13_weight", 12),
        ("model.layers.3.mlp.experts.switch_glu", 3),
        ("transformer.blocks.39.ffn.experts", 39),
        ("model.layers.7.mlp.experts.5.w1", 7),
        ("backbone.layers.007.mixer.experts", 7),
        ("9.experts", 9),
        ("model.layers3.experts", None),
        ("model.experts", None),
        ("model.layers.\u0663.experts", None),
        ("", None),
    ],
)
def test_the_decoder_index_is_the_first_number_of_a_path(path, index):
    assert index == decoder_index(path)


@pytest.mark.parametrize("pattern", [PLAIN, MULTIMODAL, NESTED, "transformer.blocks.{}.ffn.experts"])
def test_layers_are_matched_one_to_one_under_any_prefix_and_nesting(pattern):
    expected = range(3, 61)
    match = match_layers(names_of(pattern, expected), expected=expected)
    assert dict(zip(expected, names_of(pattern, expected), strict=True)) == match.names
    assert () == match.left_alone
    match.require_all()


def test_names_of_other_stacks_are_told_and_not_matched():
    others = ["visual.blocks.0.moe", "vision_tower.layers.1.mlp.experts", "mtp.layers.0.mlp.experts",
              "model.layers.1.mtp_block.mlp.experts", "draft_model.model.layers.0.mlp.experts",
              "model.layers.1.mlp.vision_experts"]  # fmt: skip
    match = match_layers([*others, *names_of(MULTIMODAL, range(2))], expected=range(2))
    assert tuple(others) == match.other
    assert names_of(MULTIMODAL, range(2)) == list(match.names.values())
    match.require_all()


@pytest.mark.parametrize(
    "path", ["language_model.model.layers.3.mlp.experts", "model.decoder.layers.3.experts", "text_model.layers.0.supervision"]
)  # fmt: skip
def test_the_language_model_is_no_other_stack(path):
    assert not is_other_stack(path)


def test_of_two_modules_of_one_layer_the_first_has_it_and_the_second_is_told():
    main, second = names_of(PLAIN, range(3)), "model.layers.1.ffn.experts"
    match = match_layers([*main, second], expected=range(3))
    assert main == list(match.names.values())
    assert (second,) == match.taken == match.left_alone
    match.require_all()


def test_layers_that_are_not_expected_are_told():
    match = match_layers([*names_of(PLAIN, [3, 4, 61]), "head.experts"], expected=[3, 4])
    assert ("model.layers.61.mlp.experts", "head.experts") == match.beyond
    match.require_all()


def test_a_second_stack_does_not_fill_the_holes_of_the_first():
    found = names_of("encoder.layers.{}.mlp.experts", range(6)) + names_of(PLAIN, [0, 1, 2, 3, 4, 6, 7])
    match = match_layers(found, expected=range(8))
    assert (5,) == match.missing
    assert all(name.startswith("model.") for name in match.names.values())


def test_layers_that_stay_unmatched_are_refused_with_counts_and_the_three_nearest_names():
    found = names_of(MULTIMODAL, range(40))
    error = refusal(match_layers(found, expected=range(48)))
    assert (40, 48, tuple(range(40, 48))) == (error.num_found, error.num_expected, error.missing)
    text = str(error)
    assert "got 40, without decoder layer 40; nearest names: " in text
    assert "wanted 48, as its configuration says" in text
    nearest = text.partition("nearest names: ")[2].partition(";")[0].split(", ")
    assert 3 == len(set(nearest))
    assert set(nearest) <= set(found)
    assert found[4] in nearest


def test_nearest_names_come_from_the_whole_model_where_it_is_given():
    modules = ["lm_head", "model.norm", *names_of("model.layers.{}.feed_forward.experts", range(2))]
    match = match_layers(["visual.blocks.0.moe"], expected=range(2), modules=modules)
    text = str(refusal(match))
    assert "got 0, without decoder layer 0; nearest names: model.layers.0.feed_forward.experts" in text


def test_a_selector_that_finds_nothing_is_refused_with_what_was_expected():
    text = str(refusal(match_layers([], expected=range(48))))
    assert "no routed experts" in text
    assert "wanted 48 MoE layers, as its configuration says" in text


def test_a_dense_model_has_no_routed_experts_and_that_is_an_error():
    text = str(refusal(match_layers([], expected=[])))
    assert "no routed experts: got a model without any module of them; run this model without hotsplit" == text


def test_nothing_expected_and_only_others_found_is_complete():
    match = match_layers(["mtp.layers.0.mlp.experts"], expected=[])
    match.require_all()
    assert ({}, ("mtp.layers.0.mlp.experts",)) == (match.names, match.left_alone)


@given(
    st.lists(
        st.sampled_from([*names_of(PLAIN, range(6)), *names_of(MULTIMODAL, range(6)), "visual.blocks.2.moe", "a"])
    ),
    st.sets(st.integers(0, 7)),
)
def test_every_module_is_matched_once_or_told_once(found, expected):
    match = match_layers(found, expected=sorted(expected))
    assert sorted({*found}) == sorted({*match.names.values(), *match.left_alone})
    assert len(set(match.names.values())) == len(match.names)
    assert all(index == decoder_index(name) for index, name in match.names.items())
    assert sorted(expected) == sorted([*match.names, *match.missing])
    assert 1 >= len({name.partition(".layers")[0] for name in match.names.values()})


# -- placeholders


def test_tensors_that_hold_weights_are_done():
    require_real({"w13_weight": (64, "cpu"), "w2_weight": (32, "cuda")})


@pytest.mark.parametrize(("hollow", "said"), [((0, "cpu"), "0 elements on cpu"), ((64, "meta"), "64 elements on meta")])
def test_empty_and_placeholder_tensors_are_not_offloaded_and_an_error(hollow, said):
    tensors = {"a.w13_weight": (64, "cpu"), "a.w2_weight": hollow, "b.w2_weight": hollow}
    with pytest.raises(UnsupportedEngineError) as caught:
        require_real(tensors)
    assert f"a.w2_weight is not offloaded: got {said}, as 2 of 3 of the experts' tensors are" in str(caught.value)
    assert ("a.w2_weight", "b.w2_weight") == caught.value.hollow


def test_no_tensor_at_all_is_not_offloaded():
    with pytest.raises(UnsupportedEngineError, match="routed experts are not offloaded: got no tensor of them"):
        require_real({})
