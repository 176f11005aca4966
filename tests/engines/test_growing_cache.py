"""A cache that grows in place holds what transformers' own does, to the bit, and never changes what it gave out."""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engines import tiny
from hotsplit.engines.transformers import growing_cache
from hotsplit.engines.transformers.growing_cache import GrowingLayer, grow_in_place

pytestmark = pytest.mark.transformers


def states(tokens, *, batch=2, dims=(4, 6), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 3, tokens, dim, generator=generator).to(dtype) for dim in dims)


def growing_layer():
    cache = DynamicCache()
    cache.update(*states(5), 0)
    grow_in_place(cache)
    return cache.layers[0]


@torch.no_grad()
def grown(layer, *tokens, seed=1):
    for number, count in enumerate(tokens):
        given = layer.update(*states(count, batch=layer.keys.shape[0], seed=seed + number))
    return given


def place(layer):
    return layer.keys.untyped_storage().data_ptr(), layer.values.untyped_storage().data_ptr()


OPERATIONS = {
    "step": lambda layer, n: layer.update(*states(1, batch=layer.keys.shape[0], seed=n)),
    "steps": lambda layer, n: [layer.update(*states(1, batch=layer.keys.shape[0], seed=n + i)) for i in range(3)],
    "several": lambda layer, n: layer.update(*states(1 + n % 90, batch=layer.keys.shape[0], seed=n)),
    "crop": lambda layer, n: layer.crop(-min(1 + n % 4, layer.get_seq_length() - 1)),
    "crop nothing": lambda layer, n: layer.crop(0),
    "reorder": lambda layer, n: layer.reorder_cache(torch.randperm(layer.keys.shape[0])),
    "repeat": lambda layer, n: layer.batch_repeat_interleave(2) if layer.keys.shape[0] < 8 else None,
    "select": lambda layer, n: layer.batch_select_indices(torch.tensor([0, layer.keys.shape[0] - 1])),
    "reset": lambda layer, n: (layer.reset(), layer.update(*states(2, seed=n))),
    "assign": lambda layer, n: setattr(layer, "keys", layer.keys.clone()),
    "offload": lambda layer, n: (layer.offload(), layer.prefetch()),
    "in place": lambda layer, n: layer.keys.mul_(2),
    "by hand": lambda layer, n: setattr(layer, "values", layer.values + 1),
}


@settings(max_examples=150, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=14), seed=st.integers(0, 999))
def test_every_operation_gives_what_transformers_own_layer_gives(names, seed):
    mine, theirs = growing_layer(), DynamicLayer()
    held = []
    with torch.no_grad():
        theirs.update(*states(5))
        for number, name in enumerate(names):
            for layer in (mine, theirs):
                torch.manual_seed(seed)
                OPERATIONS[name](layer, seed + 7 * number)
            assert torch.equal(theirs.keys, mine.keys)
            assert torch.equal(theirs.values, mine.values)
            assert theirs.get_seq_length() == mine.get_seq_length()
            assert theirs.get_mask_sizes(1) == mine.get_mask_sizes(1)
            if "in place" not in names:
                held += [(tensor, tensor.clone()) for tensor in (mine.keys, mine.values)]
                assert all(torch.equal(tensor, then) for tensor, then in held)
    assert type(mine) is GrowingLayer


def test_tokens_are_written_behind_the_others_until_there_is_no_room():
    layer = growing_layer()
    grown(layer, 1)
    first = place(layer)
    grown(layer, 1)
    there = place(layer)
    assert first != there
    rooms = {there}
    for _ in range(60):
        grown(layer, 1)
        rooms.add(place(layer))
    assert {there} == rooms
    grown(layer, 30)
    assert there != place(layer)
    assert layer.keys.shape[-2] == 5 + 1 + 1 + 60 + 30


def test_room_is_a_quarter_and_a_few():
    layer = growing_layer()
    grown(layer, 995, 1)
    capacity = layer.keys.untyped_storage().nbytes() // (layer.keys.nbytes // 1001)
    assert 1001 < capacity <= int(1.25 * 1001) + 64
    prompt = growing_layer()
    grown(prompt, 995)  # no more than transformers' own, until there are steps
    assert prompt.keys.untyped_storage().nbytes() == prompt.keys.nbytes


INTERFERENCES = {
    "crop": lambda layer: layer.crop(-1),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "assign": lambda layer: setattr(layer, "keys", layer.keys[:]),
    "values": lambda layer: setattr(layer, "values", layer.values[:]),
    "swap of numbers": lambda layer: setattr(
        layer.keys, "data", torch.zeros(2, 3, 99, 4)[:, :, : layer.keys.shape[-2]]
    ),
    "cut of numbers": lambda layer: (
        setattr(layer.values, "data", layer.values.data[:1]) or setattr(layer.keys, "data", layer.keys.data[:1])
    ),
}


@pytest.mark.parametrize("name", sorted(INTERFERENCES))
def test_whatever_touches_a_layer_ends_its_room(name):
    layer = growing_layer()
    grown(layer, 1, 1, 1)
    INTERFERENCES[name](layer)
    held = layer.keys.clone(), layer.values.clone()
    grown(layer, 1)
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
    assert torch.equal(held[0], layer.keys[..., :-1, :])
    assert torch.equal(held[1], layer.values[..., :-1, :])


def test_two_layers_never_write_into_one_room():
    layer = growing_layer()
    grown(layer, 1, 1)
    other, taken, shallow = GrowingLayer(), GrowingLayer(), copy.copy(layer)
    other.__dict__.update(layer.__dict__)
    taken.keys, taken.values, taken.is_initialized = layer.keys, layer.values, True
    every = [layer, other, taken, shallow]
    for number, one in enumerate(every):
        grown(one, 1, 1, seed=50 + 10 * number)
    for number, one in enumerate(every):
        keys = torch.cat([states(1, seed=50 + 10 * number + i)[0] for i in range(2)], dim=-2)
        assert torch.equal(keys, one.keys[..., -2:, :])


def test_copies_and_pickles_are_transformers_own_without_the_room():
    layer = growing_layer()
    grown(layer, 1, 1)
    assert layer.keys.untyped_storage().nbytes() > layer.keys.nbytes
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other) is DynamicLayer
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
        assert other.keys.untyped_storage().nbytes() == other.keys.nbytes
        assert "_hotsplit_room" not in other.__dict__
    shallow = copy.copy(layer)
    assert type(shallow) is DynamicLayer
    assert shallow.keys is layer.keys


def test_gradients_other_types_and_inference_mode_are_transformers_own():
    layer = growing_layer()
    grown(layer, 1, 1)
    there = place(layer)
    keys, values = (one.requires_grad_() for one in states(1))
    layer.update(keys, values)
    assert there != place(layer)
    layer.keys.sum().backward()
    assert torch.equal(torch.ones_like(keys), keys.grad)
    other = growing_layer()
    grown(other, 1, 1)
    with torch.no_grad():
        found, _ = other.update(*states(1, dtype=torch.float64))
    assert found.dtype == torch.float64
    with torch.inference_mode():
        made = growing_layer()
        grown(made, 1, 1, 1)
    grown(made, 1)  # transformers' own can as well
    assert made.get_seq_length() == 5 + 4


def test_what_a_graph_saved_of_a_cache_is_what_it_was():
    layer = growing_layer()
    grown(layer, 1, 1)
    scale = torch.ones((), requires_grad=True)
    product = (layer.keys * scale).sum()
    expected = layer.keys.sum()
    grown(layer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):  # said, not wrong
        product.backward()
    fresh = growing_layer()
    product = (fresh.update(*states(1))[0] * scale).sum()
    expected = fresh.keys.sum()
    grown(fresh, 1)
    product.backward()
    assert torch.equal(expected, scale.grad)


def test_a_compiled_graph_has_transformers_own():
    layer = growing_layer()
    grown(layer, 1, 1)
    held = layer.keys.clone()

    def doubled(keys, values):
        return layer.update(keys, values)[0] * 2

    with torch.no_grad():
        found = torch.compile(doubled, backend="eager", fullgraph=True)(*states(1, seed=8))
    assert torch.equal(2 * torch.cat([held, states(1, seed=8)[0]], dim=-2), found)
    grown(layer, 1, seed=9)
    assert torch.equal(torch.cat([held, states(1, seed=8)[0], states(1, seed=9)[0]], dim=-2), layer.keys)


def test_only_transformers_plain_layers_grow():
    class Own(DynamicLayer):
        pass

    layers = [DynamicLayer(), DynamicSlidingWindowLayer(8), Own()]
    cache = DynamicCache()
    cache.layers = layers
    grow_in_place(cache)
    assert [GrowingLayer, DynamicSlidingWindowLayer, Own] == [type(layer) for layer in layers]
    for nothing in (None, object(), (), {"layers": 3}):
        grow_in_place(nothing)
    assert repr(DynamicLayer()) == "DynamicLayer"


def played(model, cache):
    """Logits and cache of steps by hand."""
    ids = tiny.prompts()["input_ids"][-1:]
    with torch.no_grad():
        steps = [model(token, past_key_values=cache, use_cache=True) for token in ids.split(1, dim=1)]
    return torch.cat([step.logits for step in steps])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_the_steps_of_a_model_fill_the_same_cache(checkpoint, load, model_type, monkeypatch):
    model = load(checkpoint(model_type), dynamic=False, kernel="fast")
    mine, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits = played(model, mine)
    plain = [layer for layer in theirs.layers if type(layer) is DynamicLayer]
    assert len(plain) == sum(type(layer) is GrowingLayer for layer in mine.layers)
    assert plain
    monkeypatch.setattr(growing_cache.GrowingLayer, "update", DynamicLayer.update)
    assert torch.equal(logits, played(model, theirs))
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        if getattr(a, "keys", None) is not None:
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
    assert any(
        layer.keys.untyped_storage().nbytes() > layer.keys.nbytes
        for layer in mine.layers
        if type(layer) is GrowingLayer
    )


def test_other_kernels_and_caches_are_left_alone(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    exact, fast = load(folder, kernel="exact"), load(folder, kernel="fast")
    cache, static = DynamicCache(config=exact.config), StaticCache(config=fast.config, max_cache_len=32)
    played(exact, cache)
    played(fast, static)
    assert {DynamicLayer} == {type(layer) for layer in cache.layers}
    assert not any(isinstance(layer, DynamicLayer) for layer in static.layers)


def test_a_cache_goes_on_when_its_model_is_closed(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    fast, stock = load(folder, dynamic=False, kernel="fast"), tiny.stock(folder)
    cache = DynamicCache(config=fast.config)
    played(fast, cache)
    fast.hotsplit.close()
    played(stock, cache)
    assert cache.get_seq_length() == 18


def test_long_runs_of_anything_end_as_transformers_own_would():
    chooser = random.Random(3)
    mine, theirs = growing_layer(), DynamicLayer()
    with torch.no_grad():
        theirs.update(*states(5))
        for number in range(400):
            name = chooser.choice(["steps", "steps", "steps", "crop", "several" if number % 40 == 0 else "step"])
            for layer in (mine, theirs):
                OPERATIONS[name](layer, number)
    assert torch.equal(theirs.keys, mine.keys)
    assert torch.equal(theirs.values, mine.values)
