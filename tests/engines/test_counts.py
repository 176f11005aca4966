"""Counts are exact: they agree with what the routers themselves gave out, padding and ended sequences left out."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from engines import tiny
from engines.copies import until_swapped

pytestmark = pytest.mark.transformers

E, TOP_K, LAYERS = 8, 3, 2
NEW = 6


def count(seen, *, step_of, kept_of):
    """Pairs per (phase, layer, expert), counted from router logits.

    Args:
        seen: (layer, logits) in the order of the calls, all layers of a step behind one another.
        step_of: Number of a step to its phase.
        kept_of: Number of a step to the tokens that count, [T], bool.
    """
    pairs = {phase: np.zeros((LAYERS, E), dtype=np.int64) for phase in ("decode", "prefill")}
    steps = Counter()
    for layer, logits in seen:
        step = steps[layer]
        steps[layer] += 1
        chosen = logits.float().softmax(-1).topk(TOP_K, dim=-1).indices
        assert len(kept_of(step)) == len(chosen)
        for token, is_kept in zip(chosen.tolist(), kept_of(step), strict=True):
            for expert in token if is_kept else ():
                pairs[step_of(step)][layer, expert] += 1
    return pairs


def assert_counted(model, expected):
    counted = model.hotsplit.histogram().phases
    for phase, pairs in expected.items():
        got = counted[phase].counts if phase in counted else np.zeros((LAYERS, E))
        assert pairs.tolist() == got.tolist(), phase
    return counted


@pytest.fixture
def model(checkpoint, load):
    return load(checkpoint("qwen3_moe"), hot=0.5, dynamic=False)


def test_prefill_and_decode_agree_with_the_routers_and_padding_is_left_out(model):
    batch = tiny.prompts()
    mask = batch["attention_mask"].bool().flatten().tolist()
    assert 18 == sum(mask)
    with tiny.routers_watched(model) as seen:
        model.generate(**batch, **tiny.greedy(NEW))
    expected = count(
        seen,
        step_of=lambda step: "decode" if step else "prefill",
        kept_of=lambda step: [True] * 3 if step else mask,
    )
    phases = assert_counted(model, expected)
    # The prompt's own step yields the first token.
    assert (18, 3 * (NEW - 1)) == (phases["prefill"].tokens, phases["decode"].tokens)
    assert TOP_K * 18 * LAYERS == expected["prefill"].sum()


def test_a_lone_prompt_agrees_with_the_routers(model):
    ids = tiny.prompts()["input_ids"][:1]
    with tiny.routers_watched(model) as seen:
        model.generate(ids, **tiny.greedy(NEW))
    expected = count(
        seen,
        step_of=lambda step: "decode" if step else "prefill",
        kept_of=lambda step: [True] if step else [True] * 9,
    )
    assert_counted(model, expected)


def test_a_step_of_several_tokens_is_prefill_also_with_a_cache(model):
    ids = tiny.prompts()["input_ids"][:1]
    with torch.no_grad(), tiny.routers_watched(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
        cache = model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        model(ids[:, :4], past_key_values=cache, use_cache=True)
    lengths, phases = (9, 1, 4), ("prefill", "decode", "prefill")
    expected = count(seen, step_of=phases.__getitem__, kept_of=lambda step: [True] * lengths[step])
    counted = assert_counted(model, expected)
    assert (13, 1) == (counted["prefill"].tokens, counted["decode"].tokens)


def test_every_forward_is_a_step_and_the_last_one_is_counted_when_asked(model):
    ids = tiny.prompts()["input_ids"][:1]
    with torch.no_grad():
        for number in range(1, 4):
            model(ids)
            assert number == model.hotsplit.snapshot().steps


@pytest.fixture
def ending(checkpoint, expected, tmp_path):
    """A checkpoint whose end token is one that a sequence of the batch really generates, and that sequence."""
    folder = tmp_path / "ending"
    shutil.copytree(checkpoint("qwen3_moe"), folder)
    generated = expected(checkpoint("qwen3_moe"))[2][:, 9:]

    def first(row, token):
        found = (generated[row] == token).nonzero()
        return int(found[0]) if len(found) else None

    for row in range(3):
        for token in generated[row, 1:4].tolist():
            ends = [first(other, token) for other in range(3)]
            # This sequence ends early, at least one goes on to the end.
            if None in ends:
                (folder / "generation_config.json").write_text(
                    json.dumps({"eos_token_id": token, "pad_token_id": 0, "bos_token_id": 1})
                )
                return folder, token
    pytest.fail("no sequence ends before another")


def test_a_sequence_that_has_ended_is_no_longer_counted(load, ending):
    folder, end = ending
    model = load(folder, dynamic=False)
    batch, new = tiny.prompts(), 12
    with tiny.routers_watched(model) as seen:
        generated = model.generate(**batch, **(tiny.greedy(new) | {"min_new_tokens": 1}))[:, 9:]
    assert new == generated.shape[1]
    is_live = ((generated == end).cumsum(dim=1) == 0).tolist()
    mask = batch["attention_mask"].bool().flatten().tolist()
    # Decode step n feeds token n - 1 of every sequence; nobody asked for what follows the end token.
    expected = count(
        seen,
        step_of=lambda step: "decode" if step else "prefill",
        kept_of=lambda step: [row[step - 1] for row in is_live] if step else mask,
    )
    counted = assert_counted(model, expected)
    assert sum(sum(row[: new - 1]) for row in is_live) == counted["decode"].tokens


def test_hits_and_misses_are_all_pairs_and_hits_are_those_of_hot_experts(model):
    tiny.play(model)
    snapshot, hot = model.hotsplit.snapshot(), model.hotsplit.plan.hot_mask()
    for phase in ("decode", "prefill"):
        counts = np.array([snapshot.counts[phase][layer] for layer in range(LAYERS)])
        assert int(counts.sum()) == snapshot.pairs[phase]
        assert int(counts[hot].sum()) == snapshot.hit_pairs[phase]
        assert 0 < snapshot.hit_pairs[phase] < snapshot.pairs[phase]
        assert TOP_K * LAYERS * snapshot.tokens[phase] == snapshot.pairs[phase]


def test_touched_bytes_are_rows_of_the_distinct_experts_of_every_step(model):
    batch = tiny.prompts()
    mask = batch["attention_mask"].bool().flatten()
    with tiny.routers_watched(model) as seen:
        model.generate(**batch, **tiny.greedy(NEW))
    hot, row = model.hotsplit.plan.hot_mask(), int(model.hotsplit.sizes.row_bytes[0])
    touched = {True: 0, False: 0}
    for number, (layer, logits) in enumerate(seen):
        chosen = logits.float().softmax(-1).topk(TOP_K, dim=-1).indices
        for expert in set((chosen[mask] if number < LAYERS else chosen).flatten().tolist()):
            touched[bool(hot[layer, expert])] += row
    snapshot = model.hotsplit.snapshot()
    assert (touched[True], touched[False]) == (snapshot.touched_hot_bytes, snapshot.touched_cold_bytes)


def test_id_sentinels_are_neither_computed_nor_counted(model):
    module = model.model.layers[0].mlp.experts
    hidden = torch.randn(4, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1, 2], [3, E, 4], [E, E, E], [-1, 5, -1]])
    weights = torch.full((4, 3), 0.25, dtype=torch.bfloat16)
    banks = model.hotsplit.banks
    banks.begin_step(phase="decode", is_padding=None)
    with torch.no_grad():
        got = module(hidden, ids, weights)
        alone = module(hidden[3:], torch.tensor([[5, -1, -1]]), weights[3:])
    assert 0 == got[2].abs().sum()
    assert torch.equal(alone[0], got[3])
    banks.router.flush()
    assert [1, 1, 1, 1, 1, 2, 0, 0] == banks.router.counters.counts["decode"][0].tolist()


def test_all_architectures_count_a_pair_per_token_layer_and_place(checkpoint, load):
    for model_type in sorted(tiny.CONFIGS):
        model = load(checkpoint(model_type), dynamic=False)
        tiny.play(model)
        snapshot = model.hotsplit.snapshot()
        # Played: 9 tokens alone, 18 in a batch, 18 again and 11 decoded tokens of 3 sequences.
        assert {"prefill": 45, "decode": 33} == snapshot.tokens, model_type
        layers = len(model.hotsplit.plan.layers)
        assert {"prefill": 45 * layers * TOP_K, "decode": 33 * layers * TOP_K} == snapshot.pairs, model_type


def test_counts_follow_swaps_to_the_pair(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    model = load(folder, hot=0.5, dyn_steps=2, dyn_margin=1, dyn_half_life=1)
    banks, hits, pairs = model.hotsplit.banks, 0, 0
    batch = tiny.prompts()

    def watch(layer):
        def hook(module, args, output):
            nonlocal hits, pairs
            hot = banks.router.hot_mask()[layer]  # as it is at the moment of routing
            chosen = output[0].float().softmax(-1).topk(TOP_K, dim=-1).indices
            kept = chosen if len(chosen) == 3 else chosen[batch["attention_mask"].bool().flatten()]
            hits += int(hot[kept.numpy()].sum())
            pairs += kept.numel()

        return hook

    for layer in range(LAYERS):
        model.model.layers[layer].mlp.gate.register_forward_hook(watch(layer))
    model.generate(**batch, **tiny.greedy(40))
    until_swapped(model, lambda: model.generate(**batch, **tiny.greedy(40)))
    snapshot = model.hotsplit.snapshot()
    assert (hits, pairs) == (sum(snapshot.hit_pairs.values()), sum(snapshot.pairs.values()))


def test_a_mask_that_cannot_be_read_is_said_once(model, caplog):
    ids = tiny.prompts()["input_ids"][:1]
    mask = torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            model(ids, attention_mask=mask)
    said = [message for message in caplog.messages if "not two-dimensional" in message]
    assert 1 == len(said)
    assert 27 == model.hotsplit.snapshot().tokens["prefill"]


def test_embeddings_instead_of_ids_count_alike(checkpoint, load):
    models = [load(checkpoint("qwen3_moe"), dynamic=False) for _ in range(2)]
    batch = tiny.prompts()
    with torch.no_grad():
        models[0](**batch)
        embedded = models[1].get_input_embeddings()(batch["input_ids"])
        models[1](inputs_embeds=embedded, attention_mask=batch["attention_mask"])
    first, second = (model.hotsplit.snapshot() for model in models)
    assert first.counts == second.counts
    assert {"decode": 0, "prefill": 18} == first.tokens == second.tokens
