"""The handle of an engine: outputs stay the same wherever experts lie and whatever fails, and what happens is counted."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from bank.toy_source import HIDDEN, INNER, toy_source
from hotsplit.bank.banks import BankOptions, Banks
from hotsplit.bank.kernels.exact import ExpertMath
from hotsplit.bank.pointers import PointerRows
from hotsplit.errors import BankError, ConfigError
from hotsplit.plan.rebalance import RebalanceOptions
from patience import LIMIT_S, until

E = 6
HOT = [(2, 0), (3, 1)]


def expert_function(tensors, tokens):
    gate, up = torch.nn.functional.linear(tokens, tensors["gate_up_proj"]).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    assert INNER == inner.shape[-1]
    return torch.nn.functional.linear(inner, tensors["down_proj"]) + tensors["scale"].sum().to(tokens.dtype)


def stock(source, layer_id, hidden, ids, weights):
    out = torch.zeros_like(hidden)
    for expert in range(E):
        places, tokens = torch.where((ids == expert).T)
        if len(tokens):
            output = expert_function(source.expected[layer_id, expert], hidden[tokens]) * weights[tokens, places, None]
            out.index_add_(0, tokens, output)
    return out


@pytest.fixture
def source(tmp_path):
    return toy_source(tmp_path, num_experts=E)


@pytest.fixture
def make(source):
    made = []

    def build(*, hot=HOT, dynamic=True, dyn_steps=2, prior=None, margin=1.0, max_swaps=2):
        rebalance = RebalanceOptions(margin=margin, max_swaps=max_swaps, half_life=1.0)
        options = BankOptions(top_k=1, dynamic=dynamic, dyn_steps=dyn_steps, rebalance=rebalance)
        banks = Banks(source, hot=hot, prior=prior, options=options)
        for layer_id in range(len(hot)):
            math = ExpertMath(function=expert_function, num_experts=E, accumulate=None)
            banks.use_math(layer_id, math)
        made.append(banks)
        return banks

    yield build
    for banks in made:
        banks.close()


def step(banks, source, *, favourite=None, seed=0, num_tokens=5, phase="decode", is_padding=None):
    """One engine step over both layers, checked against the stock loop."""
    generator = torch.Generator().manual_seed(seed)
    banks.tick()
    banks.begin_step(phase=phase, is_padding=is_padding)
    for layer_id in range(2):
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(num_tokens)])
        if favourite is not None:
            ids[:, 0], ids[:, 1] = favourite, (favourite + 1) % E
        weights = torch.rand(num_tokens, 2, generator=generator).bfloat16()
        got = banks.forward(layer_id, hidden, topk_ids=ids, topk_weights=weights)
        assert torch.equal(stock(source, layer_id, hidden, ids, weights), got), f"layer {layer_id}, seed {seed}"


def settle(banks):
    """Count the last step, update if it is time, then tick until no swap is queued or in flight."""
    banks.tick()
    until(lambda: banks.live._swapper.is_idle() or banks.tick())


@pytest.mark.parametrize("hot", [[(), ()], [(2, 0), ()], [(5,), (0, 1, 2, 3, 4, 5)], [tuple(range(E))] * 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_placement_gives_the_stock_loops_bits(make, source, hot, dynamic):
    banks = make(hot=hot, dynamic=dynamic)
    for seed in range(5):
        step(banks, source, seed=seed)


def test_every_layer_asks_for_exactly_its_cold_rows_before_it_touches_any_and_takes_hot_ones_first(
    make, source, monkeypatch
):
    banks, log = make(dynamic=False), []
    ask, tensors = PointerRows.ask, PointerRows.tensors

    def spy_ask(rows, layer_id, wanted):
        wanted = list(wanted)
        log.append(("ask", layer_id, wanted))
        ask(rows, layer_id, wanted)

    def spy_tensors(rows, layer_id, row):
        log.append(("hot" if rows.is_hot(layer_id, row) else "cold", layer_id, row))
        return tensors(rows, layer_id, row)

    monkeypatch.setattr(PointerRows, "ask", spy_ask)
    monkeypatch.setattr(PointerRows, "tensors", spy_tensors)
    step(banks, source, favourite=0)
    # Experts 0 and 1 are routed: 0 is hot in layer 0, 1 is hot in layer 1.
    row_map = banks.router.row_map.tolist()
    cold = (row_map[0][1], row_map[1][0])
    assert [
        ("ask", 0, [cold[0]]),
        ("hot", 0, row_map[0][0]),
        ("cold", 0, cold[0]),
        ("ask", 1, [cold[1]]),
        ("hot", 1, row_map[1][1]),
        ("cold", 1, cold[1]),
    ] == log


def test_swaps_that_follow_the_traffic_change_no_bit(make, source):
    banks = make(dyn_steps=1)
    for seed in range(60):
        step(banks, source, seed=seed, favourite=seed // 10 % E)
        settle(banks)
    assert banks.live.swaps.done >= 10
    assert banks.live.swaps.done * source.layouts[0].num_bytes == banks.live.swaps.moved_bytes
    assert 0 == banks.live.swaps.failed


def test_what_the_traffic_uses_becomes_hot(make, source):
    banks = make(dyn_steps=2)
    for seed in range(6):
        step(banks, source, seed=seed, favourite=4)
        settle(banks)
    assert [[False] * 4 + [True] * 2] * 2 == banks.router.hot_mask().tolist()
    banks.tick()
    before = banks.router.counters.copy()
    step(banks, source, favourite=4)
    banks.tick()
    after = banks.router.counters
    assert (
        20 == after.hits["decode"] - before.hits["decode"] == (after.counts["decode"] - before.counts["decode"]).sum()
    )


def test_two_entries_of_the_row_map_exchanged_show_in_the_output(make, source):
    banks = make(dynamic=False)
    row_map = banks.router.row_map
    row_map[0, [2, 4]] = row_map[0, [4, 2]]
    with pytest.raises(AssertionError, match="layer 0"):
        step(banks, source, favourite=4)


def test_a_row_map_that_is_rolled_by_one_shows_in_the_output(make, source):
    banks = make(dynamic=False)
    banks.router.row_map[1] = banks.router.row_map[1].roll(1)
    with pytest.raises(AssertionError, match="layer 1"):
        step(banks, source)


def test_padding_is_computed_like_any_token_but_not_counted(make, source):
    banks = make()
    is_padding = torch.tensor([True, False, False, True, False])
    step(banks, source, is_padding=is_padding, phase="prefill")
    banks.tick()
    assert (3, 2 * 3 * 2) == (
        banks.router.counters.tokens["prefill"],
        banks.router.counters.counts["prefill"].sum(),
    )
    assert 0 == banks.router.counters.counts["decode"].sum()


def test_a_failed_copy_leaves_map_and_outputs_as_they_were_and_is_counted(make, source, monkeypatch):
    banks = make(dyn_steps=2, max_swaps=1)
    before = banks.router.row_map.tolist()

    def fail(*args, **kwargs):
        raise BankError("disk on fire")

    monkeypatch.setattr(PointerRows, "fill", fail)
    for seed in range(3):
        step(banks, source, seed=seed, favourite=4)
    settle(banks)
    assert (2, 0, 1) == (banks.live.swaps.failed, banks.live.swaps.done, banks.live.update_failures)
    assert before == banks.router.row_map.tolist()
    step(banks, source, favourite=4)


def test_the_third_failed_update_in_a_row_stops_the_run_and_says_why(make, source, monkeypatch):
    banks = make(dyn_steps=1)

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(PointerRows, "fill", fail)

    def keep_going():
        for seed in range(5):
            step(banks, source, seed=seed, favourite=4)
            settle(banks)

    with pytest.raises(BankError, match="3 updates in a row failed: got .*Input/output error"):
        keep_going()
    assert 3 == banks.live.update_failures
    assert 0 == banks.live.swaps.done


def test_a_copy_that_fails_once_is_tried_again_and_comes_in(make, source, monkeypatch):
    banks = make(dyn_steps=1, max_swaps=1)
    fill = PointerRows.fill

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(PointerRows, "fill", fill)
        raise BankError("disk on fire")

    monkeypatch.setattr(PointerRows, "fill", fail_once)
    for seed in range(6):
        step(banks, source, seed=seed, favourite=4)
        settle(banks)
    assert (1, 4) == (banks.live.swaps.failed, banks.live.swaps.done)
    assert [[False] * 4 + [True] * 2] * 2 == banks.router.hot_mask().tolist()


def test_an_update_that_finds_a_swap_in_flight_is_refused_and_waits_for_nothing(make, source, monkeypatch):
    banks = make(dyn_steps=1, max_swaps=1)
    go, fill = threading.Event(), PointerRows.fill
    monkeypatch.setattr(PointerRows, "fill", lambda *args, **kwargs: (go.wait(LIMIT_S), fill(*args, **kwargs))[1])
    try:
        for seed in range(5):
            step(banks, source, seed=seed, favourite=4)
        # Of 4 updates the first asked for a swap per layer, the others found both layers busy.
        assert (4, 6, 0) == (banks.live.num_updates, banks.live.swaps.refused, banks.live.swaps.done)
        assert 2 == int(banks.router.hot_mask()[0].sum())
        banks.tick()  # the fifth, still while both are busy: done later it would find them idle or not, as it happens
        assert (5, 8) == (banks.live.num_updates, banks.live.swaps.refused)
    finally:
        go.set()
    settle(banks)
    assert 2 == banks.live.swaps.done
    step(banks, source, favourite=4)


def test_only_layers_with_hot_and_cold_experts_swap(make, source):
    banks = make(hot=[(), tuple(range(E))], dyn_steps=1)
    for seed in range(4):
        step(banks, source, seed=seed, favourite=4)
    assert (0, 0, 0) == (banks.live.swaps.done, banks.live.swaps.refused, banks.live.swaps.failed)


def test_static_banks_never_swap(make, source):
    banks = make(dynamic=False, dyn_steps=1)
    before = banks.router.row_map.tolist()
    for seed in range(4):
        step(banks, source, seed=seed, favourite=4)
    assert (before, 3) == (banks.router.row_map.tolist(), banks.live.num_updates)


def test_the_prior_holds_a_first_window_back(make, source):
    prior = np.zeros((2, E))
    prior[0, [2, 0]] = prior[1, [3, 1]] = 100.0
    banks = make(prior=prior, dyn_steps=1, margin=2.0)
    step(banks, source, favourite=4)
    settle(banks)
    # 5 pairs each for 4 and 5; the prior is worth 5 tokens: 2.5 pairs for each hot expert. 5 is not above 2 x 2.5.
    assert 0 == banks.live.swaps.done
    step(banks, source, favourite=4)
    settle(banks)
    assert 4 == banks.live.swaps.done


def test_an_unknown_kernel_is_refused_with_the_known_ones(source):
    with pytest.raises(ConfigError, match="kernel: got 'turbo'; wanted exact"):
        Banks(source, hot=HOT, prior=None, options=BankOptions(top_k=1, kernel="turbo"))


def test_closing_counts_the_last_step_ends_the_worker_and_twice_is_harmless(make, source):
    banks = make()
    step(banks, source)
    assert 0 == banks.router.counters.steps
    banks.close()
    banks.close()
    assert 1 == banks.router.counters.steps
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]


def test_closed_banks_refuse_to_compute(make, source):
    banks = make()
    step(banks, source)
    banks.close()
    with pytest.raises(BankError):
        step(banks, source)


def test_banks_that_cannot_be_built_leave_no_file_open(source):
    os.truncate(source.files[0], 20)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BankError, match="ended early"):
        Banks(source, hot=HOT, prior=None, options=BankOptions(top_k=1))
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_padding_mask_of_another_length_is_said_once_and_everything_counts(make, source, caplog):
    banks = make()
    for seed in range(2):
        step(banks, source, seed=seed, num_tokens=5, is_padding=torch.tensor([True, False, False]))
    banks.tick()
    assert 10 == banks.router.counters.tokens["decode"]
    assert ["the padding mask has 3 tokens and a layer routes 5: padding, if any, counts as traffic"] == caplog.messages
