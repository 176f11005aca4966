"""The exact kernel: equal to the stock loop to the bit wherever rows lie, cold rows asked for first, hot ones computed first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.kernels import exact as kernel
from hotsplit.bank.kernels.exact import ExpertMath

E, D, F = 6, 16, 8


class Bank:
    """A LayerBank that writes down what happens to it; row = expert + 10 where cold."""

    def __init__(self, weights, *, hot, log=None, last_first=False):
        self.last_first = last_first
        self.weights, self.hot, self.log = weights, set(hot), [] if log is None else log

    def rows_of(self, ids):
        """What the route op would say; sentinels stay as they are."""
        rows = torch.tensor([expert if expert in self.hot else expert + 10 for expert in range(E)])
        return torch.where((ids >= 0) & (ids < E), rows[ids.clamp(0, E - 1)], ids)

    first_cold = 10

    def tensors(self, row):
        self.log.append(("tensors", row % 10))
        return self.weights[row % 10]

    def ask(self, rows):
        self.log.append(("ask", [row - 10 for row in rows]))

    def arrivals(self, rows):
        return reversed(list(rows)) if self.last_first else iter(rows)


def exact(hidden, *, topk_ids, topk_weights, bank, math):
    return kernel.exact(
        hidden, topk_ids=topk_ids, topk_weights=topk_weights, row_ids=bank.rows_of(topk_ids), bank=bank, math=math
    )


def weights_of(dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "up": torch.randn(F, D, generator=generator).to(dtype),
            "down": torch.randn(D, F, generator=generator).to(dtype),
        }
        for _ in range(E)
    ]


def mlp(tensors, tokens):
    inner = torch.nn.functional.silu(torch.nn.functional.linear(tokens, tensors["up"]))
    return torch.nn.functional.linear(inner, tensors["down"])


def math_of(*, accumulate=None, function=mlp):
    return ExpertMath(function=function, num_experts=E, accumulate=accumulate)


def stock(hidden, ids, weights, rows, *, dtype, order=range(E)):
    """The loop of transformers' eager experts: ascending expert ids, added in one dtype."""
    out = torch.zeros_like(hidden, dtype=dtype)
    for expert in order:
        places, tokens = torch.where((ids == expert).T)
        if len(tokens):
            output = mlp(rows[expert], hidden[tokens]) * weights[tokens, places, None]
            out.index_add_(0, tokens, output.to(dtype))
    return out.to(hidden.dtype)


def traffic(num_tokens=7, top_k=3, *, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, D, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(num_tokens)])
    return hidden, ids, torch.rand(num_tokens, top_k, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@given(
    hot=st.sets(st.integers(0, E - 1)),
    num_tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 99),
    last_first=st.booleans(),
)
@settings(max_examples=25)
def test_every_placement_and_order_of_arrival_gives_the_stock_loops_bits(
    dtype, hot, num_tokens, top_k, seed, last_first
):
    rows = weights_of(dtype)
    hidden, ids, weights = traffic(num_tokens, top_k, dtype=dtype, seed=seed)
    expected = stock(hidden, ids, weights, rows, dtype=dtype)
    bank = Bank(rows, hot=hot, last_first=last_first)
    got = exact(hidden, topk_ids=ids, topk_weights=weights, bank=bank, math=math_of(accumulate=dtype))
    assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("accumulate", "weights_dtype", "sums_in"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (None, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_outputs_are_added_in_the_dtype_that_is_asked_for(accumulate, weights_dtype, sums_in):
    rows = weights_of(torch.bfloat16)
    hidden, ids, weights = traffic()
    weights = weights.to(weights_dtype)
    got = exact(
        hidden, topk_ids=ids, topk_weights=weights, bank=Bank(rows, hot={1}), math=math_of(accumulate=accumulate)
    )
    assert torch.equal(stock(hidden, ids, weights, rows, dtype=sums_in), got)
    assert torch.bfloat16 == got.dtype


def test_the_order_and_the_dtype_of_adding_show_in_the_result():
    rows = weights_of(torch.bfloat16)
    hidden, ids, weights = traffic(num_tokens=64)
    expected = stock(hidden, ids, weights, rows, dtype=torch.bfloat16)
    for order, dtype in [(reversed(range(E)), torch.bfloat16), (range(E), torch.float32)]:
        assert not torch.equal(expected, stock(hidden, ids, weights, rows, dtype=dtype, order=order))


def test_another_experts_row_shows_in_the_result():
    rows = weights_of(torch.bfloat16)
    hidden, ids, weights = traffic()
    expected = stock(hidden, ids, weights, rows, dtype=torch.bfloat16)
    swapped = [rows[1], rows[0], *rows[2:]]
    bank = Bank(swapped, hot={0, 1})
    got = exact(hidden, topk_ids=ids, topk_weights=weights, bank=bank, math=math_of(accumulate=torch.bfloat16))
    assert not torch.equal(expected, got)


def run_logged(hot, *, ids=((4, 1), (0, 1), (5, 4))):
    log = []

    rows = weights_of(torch.float32)
    expert_of = {id(tensors): expert for expert, tensors in enumerate(rows)}

    def function(tensors, tokens):
        log.append(("compute", expert_of[id(tensors)]))
        return mlp(tensors, tokens)

    hidden, _, weights = traffic(len(ids), 2, dtype=torch.float32)
    exact(
        hidden,
        topk_ids=torch.tensor(ids),
        topk_weights=weights,
        bank=Bank(rows, hot=hot, log=log),
        math=math_of(function=function),
    )
    return [entry for entry in log if entry[0] != "tensors"]


def test_cold_rows_are_asked_for_once_before_anything_is_computed_and_hot_experts_run_first():
    assert [("ask", [0, 4]), ("compute", 1), ("compute", 5), ("compute", 0), ("compute", 4)] == run_logged({1, 2, 5})


def test_only_routed_cold_rows_are_asked_for():
    assert [("ask", [0, 1, 4, 5]), *(("compute", expert) for expert in (0, 1, 4, 5))] == run_logged(set())
    assert ("ask", []) == run_logged(set(range(E)))[0]


def test_long_prefill_runs_in_ascending_order_so_that_outputs_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(kernel, "_MAX_PENDING_BYTES", 0)
    assert [("ask", [0, 4]), *(("compute", expert) for expert in (0, 1, 4, 5))] == run_logged({1, 2, 5})


def test_both_orders_of_computing_give_the_same_bits(monkeypatch):
    rows = weights_of(torch.bfloat16)
    hidden, ids, weights = traffic(num_tokens=33)
    results = []
    for limit in (0, 1 << 30):
        monkeypatch.setattr(kernel, "_MAX_PENDING_BYTES", limit)
        bank = Bank(rows, hot={2, 4})
        results.append(exact(hidden, topk_ids=ids, topk_weights=weights, bank=bank, math=math_of()))
    assert torch.equal(*results)


def test_outputs_wait_no_longer_than_their_turn(monkeypatch):
    rows = weights_of(torch.float32)
    hidden, ids, weights = traffic(12, 3, dtype=torch.float32)
    added = []
    real = torch.Tensor.index_add_

    def spy(target, dim, index, source):
        added.append(len(index))
        return real(target, dim, index, source)

    monkeypatch.setattr(torch.Tensor, "index_add_", spy)
    exact(hidden, topk_ids=ids, topk_weights=weights, bank=Bank(rows, hot={4, 5}), math=math_of())
    assert [int((ids == expert).sum()) for expert in range(E)] == added


@pytest.mark.parametrize("sentinel", [-1, E, E + 3])
def test_sentinels_contribute_nothing(sentinel):
    rows = weights_of(torch.bfloat16)
    hidden, ids, weights = traffic()
    ids[2, 1] = sentinel
    ids[5] = sentinel
    got = exact(hidden, topk_ids=ids, topk_weights=weights, bank=Bank(rows, hot={0}), math=math_of())
    assert torch.equal(stock(hidden, ids, weights, rows, dtype=torch.bfloat16), got)
    assert 0 == got[5].abs().sum()


def test_a_token_that_names_an_expert_twice_gets_it_twice():
    rows = weights_of(torch.float32)
    hidden, _, weights = traffic(3, 2, dtype=torch.float32)
    ids = torch.tensor([[2, 2], [1, 2], [2, 0]])
    got = exact(hidden, topk_ids=ids, topk_weights=weights, bank=Bank(rows, hot={2}), math=math_of())
    assert torch.equal(stock(hidden, ids, weights, rows, dtype=torch.float32), got)


def test_no_token_gives_no_output():
    rows = weights_of(torch.float32)
    hidden, ids, weights = torch.zeros(0, D), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    got = exact(hidden, topk_ids=ids, topk_weights=weights, bank=Bank(rows, hot=set()), math=math_of())
    assert (0, D) == tuple(got.shape)
