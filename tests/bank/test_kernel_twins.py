"""The torch twins of the Triton kernels: they are the specification, so they are held against counting and computing by hand."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bank.expert_rows import Experts, random_experts, random_tokens
from hotsplit.bank.kernels import reference
from hotsplit.bank.kernels.reference import TOTALS, LayerCounters
from hotsplit.errors import BankError

E, FIXED = 4, 2
ROWS = (5, 0, 3, 6, 1, 2)
"""Of experts 0..3 and of the fixed ids 4 and 5."""
FIRST_COLD = 4
IDS = (*range(E + FIXED), -1, E + FIXED, 10**6)


def counters():
    return LayerCounters(
        pairs=torch.zeros(2, E, dtype=torch.int64),
        totals=torch.zeros(2, 4, dtype=torch.int64),
        stamps=torch.zeros(E, dtype=torch.int64),
        step=torch.zeros(2, dtype=torch.int64),
    )


@st.composite
def steps(draw):
    """Steps of a phase, or -1, and calls: ids [T, K] and a mask as long or longer, or None."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        for _ in range(draw(st.integers(1, 2))):
            num_tokens = draw(st.integers(1, 4))
            ids = draw(st.lists(st.tuples(*[st.sampled_from(IDS)] * 2), min_size=num_tokens, max_size=num_tokens))
            mask = draw(st.none() | st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens + 2))
            calls.append((ids, mask))
        found.append((draw(st.sampled_from([-1, 0, 1])), calls))
    return found


@given(steps())
def test_what_is_counted_is_what_is_counted_pair_by_pair(played):
    held, pairs, totals = counters(), Counter(), Counter()
    for number, (phase, calls) in enumerate(played, 1):
        reference.begin_step(held.step, number=number, phase=phase)
        touched = set()
        for ids, mask in calls:
            reference.route_and_count(
                torch.tensor(ids),
                row_map=torch.tensor(ROWS),
                is_padding=None if mask is None else torch.tensor(mask),
                counters=held,
                first_cold=FIRST_COLD,
            )
            kept = [token for i, token in enumerate(ids) if phase >= 0 and not (mask and mask[i])]
            experts = [expert for token in kept for expert in token if 0 <= expert < E]
            pairs.update((phase, expert) for expert in experts)
            totals[phase, "hits"] += sum(ROWS[expert] < FIRST_COLD for expert in experts)
            totals[phase, "tokens"] += len(kept)
            touched |= set(experts)
        for expert in touched:
            totals[phase, "touched_hot" if ROWS[expert] < FIRST_COLD else "touched_cold"] += 1
            assert number == held.stamps[expert]
    assert [[pairs[phase, expert] for expert in range(E)] for phase in (0, 1)] == held.pairs.tolist()
    assert [[totals[phase, name] for name in TOTALS] for phase in (0, 1)] == held.totals.tolist()


def route(ids, *, mask=None, redirect_padding=True):
    return reference.route_and_count(
        torch.tensor(ids, dtype=torch.int32),
        row_map=torch.tensor(ROWS),
        is_padding=None if mask is None else torch.tensor(mask),
        counters=counters(),
        first_cold=FIRST_COLD,
        redirect_padding=redirect_padding,
    )


def test_experts_and_fixed_ids_are_mapped_and_sentinels_stay():
    assert [[5, 0], [1, 2], [-1, 6]] == route([[0, 1], [4, 5], [-1, 6]]).tolist()


def test_rows_have_the_dtype_of_the_ids():
    assert torch.int32 == route([[0]]).dtype


def test_padding_takes_the_rows_of_the_first_real_token_or_row_0():
    ids = [[0, 1], [2, -1], [3, 3]]
    assert [[3, -1], [3, -1], [6, 6]] == route(ids, mask=[True, False, False, True]).tolist()
    assert [[0, 0], [0, -1], [0, 0]] == route(ids, mask=[True] * 3).tolist()
    assert [[5, 0], [3, -1], [6, 6]] == route(ids, mask=[True] * 3, redirect_padding=False).tolist()


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def by_hand(experts, drawn):
    """Outputs in Python's own numbers: [T, D] as lists."""
    hidden, ids, weights = drawn
    activation, has_gate = ACTIVATIONS[experts.options["activation"]], experts.options["has_gate"]
    values = {name: tensor.double() for name, tensor in experts.tensors.items()}
    outputs = []
    for token, token_ids, token_weights in zip(hidden.double(), ids.tolist(), weights.tolist(), strict=True):
        total = torch.zeros(hidden.shape[1], dtype=torch.float64)
        for expert, weight in zip(token_ids, token_weights, strict=True):
            inner = (values["up"][expert] @ token + values["up_bias"][expert]).tolist()
            half = len(inner) // 2
            gated = [activation(a) * b for a, b in zip(inner[:half], inner[half:], strict=True)]
            inner = gated if has_gate else [activation(a) for a in inner]
            vector = torch.tensor(inner, dtype=torch.float64)
            total += weight * (values["down"][expert] @ vector + values["down_bias"][expert])
        outputs.append(total.tolist())
    return outputs


def compute(experts, drawn, *, row_map=(2, 0, 4, 1, 5), num_rows=6):
    hidden, ids, weights = drawn
    return reference.experts(
        hidden,
        row_ids=torch.tensor(row_map)[ids],
        topk_weights=weights,
        rows=experts.placed(row_map, num_rows=num_rows),
    )


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_outputs_are_those_computed_by_hand(activation, has_gate):
    experts = random_experts(
        hidden_dim=8, inner_dim=6, dtype=torch.float32, has_bias=True, activation=activation, has_gate=has_gate
    )
    drawn = random_tokens(3, hidden_dim=8)
    expected = torch.tensor(by_hand(experts, drawn), dtype=torch.float32)
    torch.testing.assert_close(compute(experts, drawn), expected, rtol=1e-5, atol=1e-6)


def clamped(gate, other, *, limit, slope, shift):
    """What a gate with a limit makes of its two values."""
    gate, other = min(gate, limit), max(-limit, min(other, limit))
    return gate / (1 + math.exp(-slope * gate)) * (other + shift)


@pytest.mark.parametrize(("limit", "slope", "shift"), [(0.4, 1.0, 0.0), (0.5, 1.702, 1.0)])
def test_a_gates_limit_slope_and_shift_are_those_computed_by_hand(limit, slope, shift):
    values = torch.tensor([[-2.0, -0.45, 0.1, 3.0, 0.9, -0.2, -7.0, 0.3]])
    rows = random_experts(hidden_dim=8, inner_dim=4, gate_limit=limit, gate_slope=slope, gate_shift=shift).placed(
        range(5), num_rows=5
    )
    pairs = zip(values[0, :4].tolist(), values[0, 4:].tolist(), strict=True)
    wanted = [[clamped(gate, other, limit=limit, slope=slope, shift=shift) for gate, other in pairs]]
    torch.testing.assert_close(reference.activated(values, rows=rows), torch.tensor(wanted))


def test_a_limit_keeps_what_is_no_number():
    rows = random_experts(hidden_dim=8, inner_dim=1, gate_limit=1.0).placed(range(5), num_rows=5)
    assert reference.activated(torch.tensor([[float("nan"), 1.0]]), rows=rows).isnan().all()


@given(st.permutations(range(7)).map(lambda rows: rows[:5]))
@settings(max_examples=20)
def test_where_rows_lie_decides_no_bit(row_map):
    experts, drawn = random_experts(hidden_dim=16), random_tokens(6, hidden_dim=16)
    assert torch.equal(compute(experts, drawn), compute(experts, drawn, row_map=row_map, num_rows=7))


def sum_of_two(*, up, weights):
    """One token (1, 1) through two experts, bfloat16, whose second projection is 1."""
    tensors = {"up": torch.tensor(up)[:, None], "down": torch.ones(2, 2, 1)}
    experts = Experts(
        tensors={name: value.bfloat16() for name, value in tensors.items()},
        options={"activation": "relu", "has_gate": False},
    )
    drawn = (torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[0, 1]]), torch.tensor([weights]))
    return compute(experts, drawn, row_map=(1, 0), num_rows=2)[0, 0].item()


def test_sums_keep_what_a_16_bit_float_would_lose():
    assert 1 - 2**-7 == sum_of_two(up=[[1.0, 0.0], [1.0, 0.0]], weights=[256.0, -255.0 - 2**-7])


def test_values_between_the_projections_have_the_tokens_dtype():
    assert 0.0 == sum_of_two(up=[[1.0, 2**-9], [1.0, 0.0]], weights=[512.0, -512.0])
    assert 4.0 == sum_of_two(up=[[1.0, 2**-7], [1.0, 0.0]], weights=[512.0, -512.0])


def test_a_row_that_is_nobodys_adds_nothing():
    experts, (hidden, ids, weights) = random_experts(), random_tokens(2)
    rows = experts.placed(range(5), num_rows=6)
    ids[1] = torch.tensor([-1, 6, 99])
    outputs = reference.experts(hidden, row_ids=ids, topk_weights=weights, rows=rows)
    assert (True, False) == (outputs[0].any().item(), outputs[1].any().item())


@pytest.mark.transformers
@pytest.mark.parametrize("columns", [256, 200])
def test_factors_are_applied_as_transformers_applies_them(columns):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, columns, generator=generator).to(reference.FP8)
    scale = torch.rand(2, 2, generator=generator)
    ours = reference._weight(weight[None], scale=scale[None], row=0, block=128)
    # transformers wants whole blocks of inputs; the last one is filled up for it.
    whole = torch.cat([weight.float(), torch.zeros(256, 256 - columns)], dim=1).to(reference.FP8)
    theirs = Fp8Dequantize(None)._dequantize_one(whole, scale, output_dtype=torch.float32)
    assert torch.equal(theirs[:, :columns], ours)


def changed(experts, **changes):
    """Rows of the experts with other fields."""
    return dataclasses.replace(experts.placed(range(5), num_rows=5), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up": torch.zeros(5, 63, 64)}, r"up of expert rows: got shape \(5, 63, 64\); wanted \(5, 64, 64\)"),
        ({"has_gate": False}, r"up of expert rows: .*wanted \(5, 32, 64\)"),
        ({"down_bias": torch.zeros(5, 1)}, r"down_bias of expert rows: .*wanted \(5, 64\)"),
        ({"down": torch.zeros(5, 64, 32, dtype=torch.float16)}, "weights of expert rows: got torch.float16 and"),
        ({"down_scale": torch.zeros(5, 1, 1)}, "weights of expert rows: got torch.float32 without factors of up"),
        ({"activation": "tanh"}, "activation of expert rows: got tanh; wanted one of silu, gelu"),
        ({"up": torch.zeros(64, 5, 64).transpose(0, 1)}, "up of expert rows: got a strided view"),
        ({"gate_slope": 1.5, "activation": "gelu"}, "slope of expert rows: got 1.5 with gelu; wanted 1, or silu"),
        ({"gate_limit": 0.0}, "limit of a gate: got 0.0; wanted more than 0"),
        (
            {"up": torch.zeros(5, 32, 64), "has_gate": False, "gate_shift": 1.0},
            "limit, slope and shift of a gate: got rows without a gate",
        ),
        ({"scale_block": 24}, "block of scaled expert rows: got 24; wanted a power of two >= 16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rows_that_no_kernel_computes_with_are_refused(changes, message):
    with pytest.raises(BankError, match=message):
        changed(random_experts(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up_scale": torch.zeros(5, 4, 3)}, r"up_scale of expert rows: got shape \(5, 4, 3\); wanted \(5, 4, 4\)"),
        ({"down_scale": None}, "weights of expert rows: got torch.float8_e4m3fn with factors of up"),
        ({"down_scale": torch.zeros(5, 4, 2, dtype=torch.float16)}, "down_scale of expert rows: got torch.float16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_factors_that_do_not_belong_to_the_rows_are_refused(changes, message):
    with pytest.raises(BankError, match=message):
        changed(random_experts(block=16), **changes)


def test_an_inner_dim_that_cuts_a_block_is_refused():
    with pytest.raises(
        BankError, match="inner dim of scaled expert rows: got 24; wanted a multiple of the block of 16"
    ):
        random_experts(block=16, inner_dim=24).placed(range(5), num_rows=5)
