"""A trace laid out for a replay: domains, phases and steps; and what is counted, against a count token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import ConfigError, TraceError
from hotsplit.plan.counters import Counters
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.replay import count_steps, first_steps, repeat_notice, steps_of
from hotsplit.plan.trace import Trace

E = 6


def trace_of(step, *, phase=None, domain=None, ids=None, layers=2, k=2):
    tokens = len(step)
    if ids is None:
        ids = (np.arange(tokens)[:, None, None] + np.arange(layers)[:, None] + np.arange(k)) % E
    return Trace(
        identity=ModelIdentity(layers=tuple(range(np.asarray(ids).shape[1])), num_experts=E),
        experts=np.asarray(ids),
        phase=np.array([1] * tokens if phase is None else phase, dtype=np.uint8),
        step=np.array(step, dtype=np.uint32),
        domain=None if domain is None else np.array(domain),
        domains=() if domain is None else ("a", "b"),
    )


def firsts(steps):
    """First id of every token: tells which tokens are played, and in which order."""
    return steps.experts[:, 0, 0].tolist()


def test_steps_are_those_of_the_file_in_their_order_whatever_the_order_of_the_rows():
    steps = steps_of(trace_of([5, 2, 5, 2, 9]), num_experts=E)
    assert [1, 3, 0, 2, 4] == firsts(steps)
    assert [0, 2, 4, 5] == steps.starts.tolist()


def test_tokens_per_step_cut_anew_in_file_order():
    steps = steps_of(trace_of([5, 2, 5, 2, 9]), num_experts=E, tokens_per_step=2)
    assert [0, 1, 2, 3, 4] == firsts(steps)
    assert [0, 2, 4, 5] == steps.starts.tolist()


def test_decode_is_played_unless_more_is_asked_for():
    trace = trace_of([0, 0, 1, 2], phase=[0, 0, 1, 1])
    assert [2, 3] == firsts(steps_of(trace, num_experts=E))
    assert [0, 1] == firsts(steps_of(trace, num_experts=E, kept="prefill"))
    whole = steps_of(trace, num_experts=E, kept="all")
    assert ([0, 1, 2, 3], [False, True, True]) == (firsts(whole), whole.is_decode.tolist())


def test_a_step_with_a_prefill_token_in_it_counts_as_prefill():
    steps = steps_of(trace_of([0, 0, 1], phase=[0, 1, 1]), num_experts=E, kept="all")
    assert [False, True] == steps.is_decode.tolist()


def test_a_domain_that_comes_again_goes_on_where_it_left_off_and_begins_anew_at_its_end():
    trace = trace_of(range(5), domain=[0, 0, 0, 1, 1])
    steps = steps_of(trace, num_experts=E, domains=("a", "b", "a"), num_steps=2)
    assert [0, 1, 3, 4, 2, 0] == firsts(steps)
    assert list(range(7)) == steps.starts.tolist()


def test_whole_domains_are_played_in_the_order_in_which_they_are_named():
    trace = trace_of(range(5), domain=[0, 0, 0, 1, 1])
    assert [3, 4, 0, 1, 2] == firsts(steps_of(trace, num_experts=E, domains=("b", "a")))


def test_more_steps_than_there_are_give_all():
    steps = steps_of(trace_of([0, 0, 1]), num_experts=E, num_steps=9)
    assert (2, 3) == (len(steps), len(steps.experts))
    assert [0, 1] == firsts(first_steps(steps, 1))


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({"domains": ("c",)}, TraceError, "domain: got 'c'; wanted a, b"),
        ({"kept": "prefill"}, TraceError, "got no such tokens; wanted prefill tokens"),
        ({"num_experts": 3}, TraceError, "got expert 5; wanted ids below 3"),
        ({"tokens_per_step": 0}, ConfigError, "tokens_per_step: got 0; wanted an integer from 1 to 16777216"),
        ({"num_steps": 0}, ConfigError, "steps: got 0; wanted an integer from 1 to 16777216"),
    ],
)
def test_what_cannot_be_played_is_refused(asked, error, match):
    trace = trace_of(range(5), domain=[0, 0, 0, 1, 1])
    with pytest.raises(error, match=match):
        steps_of(trace, **({"num_experts": E} | asked))


@st.composite
def traffic(draw):
    """Steps of one to three tokens of both phases, with padding here and there; and hot experts."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    step = np.repeat(np.arange(len(lengths)), lengths)
    phase = np.repeat(draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths))), lengths)
    seed = draw(st.integers(0, 10_000))
    random = np.random.default_rng(seed)
    ids = np.stack([random.permuted(np.tile(np.arange(E), (len(step), 1)), axis=1)[:, :2] for _ in range(2)], axis=1)
    ids[random.random(len(step)) < 0.2] = -1
    return trace_of(step, phase=phase, ids=ids), random.random((2, E)) < 0.5


@given(traffic())
def test_counts_hits_and_distinct_bytes_are_those_of_a_count_token_by_token(drawn):
    trace, hot = drawn
    row_bytes = (10, 1000)
    steps = steps_of(trace, num_experts=E, kept="all")
    counters = Counters.zeros((2, E))
    half = len(steps) // 2
    for first, last in ((0, half), (half, len(steps))):
        count_steps(steps, counters, first=first, last=last, hot=hot, row_bytes=row_bytes)
    expected = {name: {"decode": 0, "prefill": 0} for name in ("hits", "hot", "cold", "tokens", "pairs")}
    for number in range(len(steps)):
        phase = "decode" if steps.is_decode[number] else "prefill"
        ids = steps.experts[steps.starts[number] : steps.starts[number + 1]]
        expected["tokens"][phase] += int((ids[:, 0, 0] >= 0).sum())
        for layer_id in range(2):
            real = ids[:, layer_id][ids[:, layer_id] >= 0]
            expected["pairs"][phase] += len(real)
            expected["hits"][phase] += int(hot[layer_id, real].sum())
            for expert in set(real.tolist()):
                expected["hot" if hot[layer_id, expert] else "cold"][phase] += row_bytes[layer_id]
    assert expected["hits"] == counters.hits
    assert expected["hot"] == counters.touched_hot_bytes
    assert expected["cold"] == counters.touched_cold_bytes
    assert expected["tokens"] == counters.tokens
    assert expected["pairs"] == {phase: int(counts.sum()) for phase, counts in counters.counts.items()}
    assert len(steps) == counters.steps


@pytest.mark.parametrize(("num_steps", "passes"), [(3, 1), (4, 2), (7, 3)])
def test_a_trace_that_is_too_short_says_how_often_it_is_played(num_steps, passes):
    steps = steps_of(trace_of(range(3), domain=[0, 0, 0]), num_experts=E, domains=("a",), num_steps=num_steps)
    assert passes == steps.passes
    notice = repeat_notice(steps)
    assert (passes > 1) == (notice is not None)
    assert notice is None or f"{passes} times" in notice.text


@pytest.mark.parametrize("name", ["num_steps", "tokens_per_step"])
@pytest.mark.parametrize("value", [10**9, 10**20])
def test_more_steps_than_memory_holds_are_refused_with_the_most(name, value):
    with pytest.raises(ConfigError, match="from 1 to 16777216"):
        steps_of(trace_of(range(3), domain=[0, 0, 0]), num_experts=E, domains=("a",), **{name: value})


def test_ids_that_memory_does_not_hold_are_refused_with_the_most():
    trace = trace_of([0] * 100, domain=[0] * 100, ids=np.zeros((100, 50, 8), np.int64))
    with pytest.raises(ConfigError, match="at most 13421 of this trace"):
        steps_of(trace, num_experts=E, domains=("a",), num_steps=10**6)
