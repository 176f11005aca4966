"""What a profile counts and traces, told from the routers' own outputs and from what generate() returned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines import tiny
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.traffic import Prompt
from hotsplit.errors import ConfigError
from hotsplit.plan.trace import DECODE, PREFILL, histogram_of

pytestmark = pytest.mark.transformers

LENGTHS = (5, 12, 3, 9, 1)
DECODED = 8
GREEDY = ProfileOptions(decode_tokens=DECODED, batch_size=3, temperature=0)


@pytest.fixture
def model(load, tiny_moe):
    return load(tiny_moe, dynamic=False)


def prompts_of(lengths=LENGTHS, *, seed=0):
    draw = np.random.default_rng(seed)
    return [
        Prompt(domain="ab"[number % 2], token_ids=tuple(draw.integers(5, 2000, length).tolist()))
        for number, length in enumerate(lengths)
    ]


@pytest.fixture
def generated(model, monkeypatch):
    """Token ids that every batch's generate() returned, [B, S]."""
    outputs, generate = [], model.generate

    def watch(*args, **kwargs):
        outputs.append(generate(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(model, "generate", watch)
    return outputs


def rows_of(trace, request):
    """Indices of a request's tokens in the order of its positions."""
    (mine,) = np.nonzero(trace.request == request)
    return mine[np.argsort(trace.position[mine])]


def test_totals_are_tokens_times_top_k_for_prompts_of_different_lengths(model):
    histogram, trace = play(model, prompts_of(), options=GREEDY)
    assert None is trace
    assert (sum(LENGTHS), len(LENGTHS) * DECODED) == tuple(histogram.phases[p].tokens for p in ("prefill", "decode"))
    for counted in histogram.phases.values():
        assert [counted.tokens * 4] * 4 == counted.counts.sum(axis=1).tolist()


def test_a_trace_counts_to_the_histogram(model):
    histogram, trace = play(model, prompts_of(), options=GREEDY, want_trace=True)
    counted = histogram_of(trace)
    assert histogram.identity == counted.identity
    for phase, expected in histogram.phases.items():
        np.testing.assert_array_equal(expected.counts, counted.phases[phase].counts)
        assert expected.tokens == counted.phases[phase].tokens


def test_a_trace_numbers_requests_positions_phases_and_domains(model):
    _, trace = play(model, prompts_of(), options=GREEDY, want_trace=True)
    for request, length in enumerate(LENGTHS):
        mine = rows_of(trace, request)
        assert list(range(length + DECODED)) == trace.position[mine].tolist()
        assert [PREFILL] * length + [DECODE] * DECODED == trace.phase[mine].tolist()
        assert ["ab"[request % 2]] * len(mine) == [trace.domains[n] for n in trace.domain[mine]]
        assert 1 == len(set(trace.step[mine][:length].tolist()))
        assert [1] * DECODED == np.diff(trace.step[mine][length - 1 :].astype(int)).tolist()


def test_requests_of_one_batch_share_its_steps_and_batches_follow_each_other(model):
    _, trace = play(model, prompts_of(), options=GREEDY, want_trace=True)
    steps = [set(trace.step[trace.request == request].tolist()) for request in range(len(LENGTHS))]
    assert steps[0] == steps[1] == steps[2]
    assert steps[3] == steps[4]
    assert max(steps[0]) + 1 == min(steps[3])
    assert 2 * (1 + DECODED) == len(steps[0] | steps[3])


def test_the_experts_of_every_token_are_those_that_its_router_chose(load, checkpoint):
    # The routers of this architecture return their logits, so that the choice can be made again from them.
    model = load(checkpoint("qwen3_moe"), dynamic=False)
    lengths = (4, 7, 2)
    prompts = [Prompt(domain="x", token_ids=tuple(range(10, 10 + length))) for length in lengths]
    with tiny.routers_watched(model) as seen:
        _, trace = play(model, prompts, options=GREEDY, want_trace=True)
    num_layers = len({layer for layer, _ in seen})
    chosen = {step: {} for step in range(len(seen) // num_layers)}
    for number, (layer, logits) in enumerate(seen):
        chosen[number // num_layers][layer] = logits.reshape(-1, logits.shape[-1]).topk(3).indices
    first = int(trace.step.min())
    for request, length in enumerate(lengths):
        for place, row in enumerate(rows_of(trace, request)):
            step = int(trace.step[row]) - first
            width = 7 if step == 0 else 1
            token = request * width + (width - length + place if step == 0 else 0)
            for layer_id in range(num_layers):
                expected = set(chosen[step][layer_id][token].tolist())
                assert expected == set(trace.experts[row, layer_id].tolist())


def test_a_sequence_that_ends_early_is_not_counted_while_its_batch_goes_on(model, generated):
    prompts = prompts_of((6, 6, 6))
    play(model, prompts, options=GREEDY)
    texts = generated[0][:, 6:].tolist()
    # The token at which one text ends and the others, for a while at least, do not.
    end, place = min(
        (token, text.index(token))
        for text in texts
        for token in text[1:5]
        if sum(token in other for other in texts) == 1
    )
    model.generation_config.eos_token_id = end
    before = model.hotsplit.histogram().phases["decode"].tokens
    histogram, trace = play(model, prompts, options=GREEDY, want_trace=True)
    ended = next(number for number, text in enumerate(texts) if end in text)
    for request in range(3):
        # From its end token on, nobody asks for what follows it.
        decoded = place if request == ended else DECODED
        mine = rows_of(trace, request)
        assert list(range(6 + decoded)) == trace.position[mine].tolist()
        assert decoded == (trace.phase[mine] == DECODE).sum()
    assert place + 2 * DECODED == histogram.phases["decode"].tokens - before


def test_a_padded_row_gets_no_token_at_all(model):
    _, trace = play(model, prompts_of((1, 30)), options=GREEDY, want_trace=True)
    assert [1 + DECODED, 30 + DECODED] == [len(rows_of(trace, request)) for request in range(2)]


def test_what_ran_before_is_in_the_histogram_and_not_in_the_trace(model):
    with torch.no_grad():
        model(torch.tensor([[7, 8, 9]]))
    histogram, trace = play(model, prompts_of((4,)), options=GREEDY, want_trace=True)
    assert 4 + DECODED == len(trace.phase)
    assert 3 + 4 == histogram.phases["prefill"].tokens


def test_no_decoded_tokens_is_a_profile_of_prefill_alone(model):
    histogram, _ = play(model, prompts_of((5, 3, 9)), options=ProfileOptions(decode_tokens=0, batch_size=2))
    assert ["prefill"] == list(histogram.phases)


def test_sampling_follows_its_seed_and_leaves_the_callers_random_numbers_alone(load, tiny_moe):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(123)
        model = load(tiny_moe, dynamic=False)
        histogram, _ = play(model, prompts_of(), options=ProfileOptions(decode_tokens=DECODED, seed=seed))
        found.append((histogram.phases["decode"].counts.tolist(), torch.rand(1).item()))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] == found[2][1]


def test_progress_is_told_in_prompts(model):
    told = []
    play(model, prompts_of(), options=GREEDY, on_progress=lambda done, total: told.append((done, total)))
    assert [(3, 5), (5, 5)] == told


def test_the_observer_is_gone_afterwards(model):
    play(model, prompts_of((2,)), options=GREEDY, want_trace=True)
    assert [] == model.hotsplit.banks.router.observers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", 0),
        ("decode_tokens", -1),
        ("max_prompts", 0),
        ("batch_size", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: got {value}; wanted "):
        ProfileOptions(**{name: value})
